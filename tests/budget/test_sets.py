"""Measurements of sets of layers: one that is missing for want of memory is no result."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from twofour.budget.measurer import Measurer, UnseenError
from twofour.budget.pool import Arguments, Done, LostError
from twofour.budget.sets import Sets
from twofour.engines.protocol import no_progress
from twofour.errors import BuildFailedError, TwofourError


class Failing:
    """Answers every call with one error."""

    def __init__(self, error: TwofourError) -> None:
        self.error = error

    def run(self, calls: Mapping[str, Arguments], done: Done) -> None:
        """Meets what Sets asks of its workers."""
        for key in calls:
            done(key, self.error)


def _failing(folder: Path, error: TwofourError) -> Sets:
    workers: Any = Failing(error)
    return Sets(
        folder=folder, metric=None, seed=0, content="c", workers=workers,
        step=lambda _done, _of: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "lasts"),
    [
        (LostError(["SIGKILL", "SIGKILL"]), False),
        (LostError(["SIGSEGV"]), False),
        (BuildFailedError("cannot load the model: std::bad_alloc"), False),
        (BuildFailedError("no kernel for LSTM(14)"), True),
    ],
)
def test_only_what_would_come_again_is_a_result(
    tmp_path: Path, error: TwofourError, lasts: bool
) -> None:
    sets = _failing(tmp_path, error)
    sets.measure([(1,), (2,)])
    assert sets.found[(1,)].error == error.message
    assert sets.is_lasting is lasts
    assert not (tmp_path / "measured").exists()


def test_a_node_that_does_not_see_the_files_ends_the_study(tmp_path: Path) -> None:
    metric = f"{tmp_path / 'm.py'}:f"
    for name in ("dense.onnx", "m.py"):
        with pytest.raises(UnseenError) as caught:
            Measurer(no_progress).measure(0, str(tmp_path), (1,), metric, 0)
        assert caught.value.message == f"{tmp_path / name} is not to be seen on {platform.node()}"
        assert "the same files at the same paths" in (caught.value.hint or "")
        (tmp_path / name).touch()
    sets = _failing(tmp_path, caught.value)
    with pytest.raises(UnseenError):
        sets.measure([(1,)])
