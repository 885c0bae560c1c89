"""What a variant says of itself after its inputs are prepared stands in its row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import onnx_models as om
from support.late_engine import TIMING

from twofour.comparing.comparison import compare
from twofour.engines.protocol import ENGINES, EngineInput, EngineRow
from twofour.records.options import CompareOptions

LATE = EngineRow(
    name="toy", title="Toy", code="support.late_engine:LateEngine", takes=EngineInput.ONNX
)


def test_each_batch_has_the_settings_of_its_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, LATE.name, LATE)
    weight = np.ones((8, 8), np.float32)
    model = om.one_layer(tmp_path / "m.onnx", "MatMul", weight, (["batch", 8], ["batch", 8]))
    options = CompareOptions(engines=("toy:plain",), rounds=5, time_limit_s=1, batches=(2, 4))
    _, comparison = compare((model,), tmp_path / "out", options)
    assert [row.batch for row in comparison.variants] == [2, 4, 2, 4]
    assert [row.enqueue_ms for row in comparison.variants] == [2.0, 4.0, 2.0, 4.0]
    settings = (row.settings for row in comparison.variants)
    assert {(s and s.timing, s and s.launches) for s in settings} == {(TIMING, 3)}
