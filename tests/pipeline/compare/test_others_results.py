"""A comparison writes over nothing that no comparison wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import onnx_models as om

from twofour.errors import BadInputError
from twofour.pipeline.compare.compare import compare
from twofour.records.options import CompareOptions


@pytest.mark.parametrize(
    ("name", "told"),
    [("latency.json", "latency.json"), ("latency.md", "latency.md"),
     ("latency.html", "latency.html"), ("compare/inputs.npz", "compare/")],
)  # fmt: skip
def test_results_that_no_comparison_wrote_are_refused_and_left(
    tmp_path: Path, name: str, told: str
) -> None:
    model, out = om.save(om.two_weights(), tmp_path / "m.onnx"), tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("the user's")
    with pytest.raises(BadInputError, match=f"holds {told}, which no comparison wrote"):
        compare([model], out, CompareOptions())
    assert (out / name).read_text() == "the user's"
    assert [p for p in out.rglob("*") if p.is_file()] == [out / name]


def test_a_comparison_that_was_killed_is_begun_again(tmp_path: Path) -> None:
    model, out = om.save(om.two_weights(), tmp_path / "m.onnx"), tmp_path / "out"
    options = CompareOptions(engines=("onnxruntime:cpu",), rounds=1, warmup=0)
    (out / "compare").mkdir(parents=True)
    (out / "compare" / ".comparison").touch()
    (out / "compare" / "inputs.npz").write_bytes(b"half")
    folder, found = compare([model], out, options)
    assert folder == out
    assert found.variants[0].error is None
