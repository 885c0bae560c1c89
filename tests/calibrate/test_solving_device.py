"""Layers solved on torch's device: what comes back is in numpy, with the masks that numpy finds."""

from __future__ import annotations

import numpy as np
import pytest
from support.calibrated_layers import KINDS

from twofour.calibrate.new_values import solve_all, solving_device
from twofour.inputs.samples import factors_of, held_out_samples
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.methods import method_named
from twofour.pruning.solve import LayerSolver
from twofour.pruning.statistics import InputSums
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern


def problem_of(kind: str) -> LayerProblem:
    layer = KINDS[kind](4, 0)
    rows = layer.rows.astype(np.float32)
    sums = InputSums()
    sums.add(rows, factors_of(held_out_samples(0, rows.shape[1])))
    statistics = sums.statistics()
    assert statistics is not None
    return LayerProblem(
        stored=layer.weight.astype(np.float32),
        layout=layer.layout,
        pattern=Pattern(2, 4),
        statistics=statistics,
        has_bias=True,
        rounded=lambda values: values.astype(np.float16).astype(np.float32),
    )


@pytest.mark.parametrize("kind", ["linear", "conv2d, groups"])
def test_a_device_finds_the_masks_that_numpy_finds(kind: str) -> None:
    solver = LayerSolver(method_named("admm"), MethodOptions())
    (here,) = solve_all(solver, [problem_of(kind)], None)
    (there,) = solve_all(solver, [problem_of(kind)], "cpu")
    assert isinstance(there.weight, np.ndarray)
    assert isinstance(there.bias_change, np.ndarray)
    assert np.array_equal(there.weight != 0, here.weight != 0)
    assert np.allclose(there.weight, here.weight, rtol=1e-3, atol=1e-3)
    assert there.output_error.calibration == pytest.approx(here.output_error.calibration, rel=1e-2)


def test_without_a_gpu_numpy_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.calibrate.new_values.find_gpu", lambda: None)
    assert solving_device() is None
