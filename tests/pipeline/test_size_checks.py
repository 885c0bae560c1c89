"""A file that is wrong at other sizes than the example's: refused, or said where nobody asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from twofour.errors import BuildFailedError, PatternBrokenError
from twofour.inputs.fits import save_arrays
from twofour.pipeline.checks import at_other_sizes
from twofour.pipeline.stages import Run
from twofour.records.export import LayerMap, OnnxFile
from twofour.records.options import DynamicAxis, Precision, RunOptions, Variant
from twofour.records.run import ExportedVariant, OtherSizes, SizeCheck
from twofour.workers.host import Session

HEIGHT = DynamicAxis(input="x", axis=1, name="height")


@dataclass
class _Run:
    """What the check needs of a run."""

    path: Path
    options: RunOptions
    notes: list[str] = field(default_factory=list)

    @property
    def progress(self) -> _Run:
        return self

    def file(self, name: str) -> Path:
        return self.path / name

    def note(self, text: str) -> None:
        self.notes.append(text)


class _File:
    """A session on a file that adds `off` to its input."""

    def __init__(self, off: float, error: BuildFailedError | None = None) -> None:
        self._off = off
        self._error = error

    def outputs(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if self._error is not None:
            raise self._error
        return {"y": inputs["x"] + np.float32(self._off)}


def checks(run: _Run, file: _File) -> list[SizeCheck]:
    """Of a module that gives its input back, at a height of 8."""
    x = np.ones((1, 8), np.float32)
    save_arrays(run.file("sizes.npz"), {"input:x": x, "output:y": x})
    exported = ExportedVariant(
        onnx=OnnxFile(variant=Variant.DENSE, file="dense.onnx", size_bytes=1),
        reference=None,
        precision=Precision.FLOAT16,
        opset=20,
        inputs=(),
        outputs=(),
        layers=LayerMap(layers=()),
        other_sizes=(OtherSizes(sizes={"height": 8}, file="sizes.npz"),),
    )
    return list(at_other_sizes(cast("Run", run), cast("Session", file), exported))


def test_a_file_that_is_right_holds(tmp_path: Path) -> None:
    run = _Run(path=tmp_path, options=RunOptions(dynamic=(HEIGHT,)))
    assert [(c.sizes, c.holds) for c in checks(run, _File(0.0))] == [({"height": 8}, True)]
    assert run.notes == []


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (_File(0.5), r"output 'y' differs from that of the module by 0\.5 .*; 0\.02 is allowed"),
        (_File(np.nan), "output 'y' has 8 NaN or infinite values"),
        (_File(0.0, BuildFailedError("it does not run")), "it does not run"),
    ],
)
def test_a_file_that_is_wrong_is_refused_where_the_size_was_asked_for(
    tmp_path: Path, file: _File, why: str
) -> None:
    run = _Run(path=tmp_path, options=RunOptions(dynamic=(HEIGHT,)))
    with pytest.raises(PatternBrokenError, match=f"at height 8: {why}") as raised:
        checks(run, file)
    assert raised.value.hint == "leave out a --dynamic of height"


def test_it_is_only_said_where_nobody_asked_for_the_size(tmp_path: Path) -> None:
    run = _Run(path=tmp_path, options=RunOptions())
    assert [c.holds for c in checks(run, _File(0.5))] == [False]
    assert run.notes[0].startswith("WARNING: dense.onnx does not compute what the module does")
    assert run.notes[0].endswith("--dynamic none keeps the example's sizes")
