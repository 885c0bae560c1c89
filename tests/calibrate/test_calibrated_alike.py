"""A torch module and its ONNX file alone: calibration prunes both alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from twofour.main_job import run_export, run_prune
from twofour.records.options import CalibrationOptions, MethodOptions, Precision, RunOptions
from twofour.records.weights import PrunedWeight

_SMALL = Path(__file__).parents[1] / "support" / "small_model.py"
_SHARE = 2e-3
"""Of the energy of a layer's outputs. Errors are such shares already; rounding, which differs from
processor to processor, moves a layer that loses 1e-4 by several per cent of that."""


@pytest.mark.slow
def test_a_module_and_its_file_lose_the_same(tmp_path: Path) -> None:
    side = 12  # so that some places of each sample are looked at
    model = f"{tmp_path / 'model.py'}:make"
    code = _SMALL.read_text().replace("2, 3, 8, 8", f"2, 3, {side}, {side}")
    (tmp_path / "model.py").write_text(code)
    x = np.random.default_rng(0).normal(0.3, size=(60, 3, side, side)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    options = RunOptions(
        precision=Precision.FLOAT32,
        calibration=CalibrationOptions(data=str(tmp_path / "x.npz")),
        method=MethodOptions(name="admm"),
    )
    run_export(model, tmp_path / "e", RunOptions(precision=Precision.FLOAT32))
    _, module, _ = run_prune(model, tmp_path / "m", options)
    file = str(tmp_path / "e" / "dense.onnx")
    no_precision = RunOptions(calibration=options.calibration, method=options.method)
    _, alone, _ = run_prune(file, tmp_path / "f", no_precision)
    for one, other in zip(_pruned(module.weights), _pruned(alone.weights), strict=True):
        assert one.weight.shape == other.weight.shape
        assert one.output_error is not None
        assert other.output_error is not None
        lost = one.output_error.calibration, other.output_error.calibration
        assert abs(lost[0] - lost[1]) < _SHARE, one.weight.layer


def _pruned(weights: tuple[PrunedWeight, ...]) -> list[PrunedWeight]:
    return [weight for weight in weights if weight.pruned]
