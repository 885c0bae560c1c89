"""Measurements of sets of layers: one that is missing for want of memory is no result."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from twofour.engines.protocol import no_progress
from twofour.errors import BuildFailedError, TwofourError
from twofour.pipeline.jobs.job import Done, Job, LostError
from twofour.pipeline.sensitivity.measuring import Measurer, MixedModel, UnseenError
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


def test_a_node_that_does_not_see_the_files_ends_the_study(tmp_path: Path) -> None:
    model = MixedModel(
        key="k", folder=str(tmp_path), base="dense.onnx", other="sparse.onnx", places=(1,),
        inputs="inputs.npz", reference="outputs.npz", metric=f"{tmp_path / 'm.py'}:f", seed=0,
    )  # fmt: skip
    for name in ("dense.onnx", "sparse.onnx", "inputs.npz", "outputs.npz", "m.py"):
        with pytest.raises(UnseenError) as caught:
            Measurer(no_progress).measure(0, model)
        assert caught.value.message == f"{tmp_path / name} is not to be seen on {platform.node()}"
        assert "the same files at the same paths" in (caught.value.hint or "")
        (tmp_path / name).touch()
    workers: Any = Failing(caught.value)
    sets = Sets(model=model, content="c", workers=workers, step=lambda _done, _of: None)
    with pytest.raises(UnseenError):
        sets.measure([(1,)])
