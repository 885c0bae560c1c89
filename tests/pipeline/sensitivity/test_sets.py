"""Measurements of sets of layers: one that is missing for want of memory is no result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from twofour.errors import BuildFailedError, TwofourError
from twofour.pipeline.jobs.job import Done, Job, LostError
from twofour.pipeline.sensitivity.measuring import MixedModel
from twofour.pipeline.sensitivity.sets import Sets


class Failing:
    """Answers every job with one error."""

    def __init__(self, error: TwofourError) -> None:
        self.error = error

    def run(self, jobs: Sequence[Job], done: Done) -> None:
        """Meets what Sets asks of its workers."""
        for job in jobs:
            done(job.key, self.error)


@pytest.mark.parametrize(
    ("error", "lasts"),
    [
        (LostError("k", ("SIGKILL", "SIGKILL")), False),
        (LostError("k", ("SIGSEGV",)), True),
        (BuildFailedError("cannot load the model: std::bad_alloc"), False),
        (BuildFailedError("no kernel for LSTM(14)"), True),
    ],
)
def test_only_what_would_come_again_is_a_result(
    tmp_path: Path, error: TwofourError, lasts: bool
) -> None:
    workers: Any = Failing(error)
    model = MixedModel(
        key="", folder=str(tmp_path), base="dense.onnx", other="sparse.onnx", places=(),
        inputs="inputs.npz", reference="outputs.npz", metric=None, seed=0,
    )  # fmt: skip
    sets = Sets(model=model, content="c", workers=workers, step=lambda _done, _of: None)
    sets.measure([(1,), (2,)])
    assert sets.found[(1,)].error == error.message
    assert sets.is_lasting is lasts
    assert not (tmp_path / "measured").exists()
