"""A comparison writes over nothing that no comparison wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import onnx_models as om

from twofour.comparing.comparison import compare
from twofour.errors import BadInputError
from twofour.records.options import CompareOptions


@pytest.mark.parametrize("name", ["latency.json", "latency.md", "latency.html"])
def test_results_that_no_comparison_wrote_are_refused_and_left(tmp_path: Path, name: str) -> None:
    model, out = om.save(om.two_weights(), tmp_path / "m.onnx"), tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("the user's")
    with pytest.raises(BadInputError, match=f"holds {name}, which no comparison wrote"):
        compare([model], out, CompareOptions())
    assert (out / name).read_text() == "the user's"
    assert [p for p in out.rglob("*") if p.is_file()] == [out / name]
