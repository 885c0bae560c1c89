"""The methods on torch tensors: the same masks, close values, and nothing comes to the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.calibrated_layers import KINDS, problem_of

from twofour.calibrate.new_values import solve_all, solving_device
from twofour.inputs.samples import factors_of, held_out_samples
from twofour.pruning.methods import METHODS
from twofour.pruning.methods.problem import Problem, cholesky, refit
from twofour.pruning.solve import LayerSolver, SolvedLayer
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern

WITH_MASK = [name for name in METHODS if name != "keep"]


def half(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float16).astype(np.float32)


def solved(kind: str, method: str, on_torch: bool) -> SolvedLayer:
    layer = KINDS[kind](4, 0)
    narrow = replace(
        layer, rows=layer.rows.astype(np.float32), weight=layer.weight.astype(np.float32)
    )
    factors = factors_of(held_out_samples(0, layer.rows.shape[1]))
    rounded = None if kind == "linear" else half
    problem = replace(problem_of(narrow, Pattern(2, 4), factors), rounded=rounded)
    solver = LayerSolver(METHODS[method], MethodOptions())
    (layer_solved,) = solve_all(solver, [problem], "cpu" if on_torch else None)
    return layer_solved


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *(("linear", method) for method in WITH_MASK),
        ("conv2d, groups", "admm"),
    ],
)
def test_tensors_get_what_arrays_get(kind: str, method: str) -> None:
    array, tensor = solved(kind, method, False), solved(kind, method, True)
    assert array.bias_change is not None
    assert isinstance(tensor.weight, np.ndarray)
    assert isinstance(tensor.bias_change, np.ndarray)
    assert np.array_equal(tensor.weight != 0, array.weight != 0)
    assert np.array_equal(half(tensor.weight), tensor.weight) is (kind != "linear")
    apart = 1e-4 if kind == "linear" else 1e-3  # a step of float16
    assert np.allclose(tensor.weight, array.weight, rtol=1e-3, atol=apart)
    assert np.allclose(tensor.bias_change, array.bias_change, rtol=1e-3, atol=apart)
    assert tensor.output_error.held_out is not None
    for a, b in zip(
        (tensor.output_error.calibration, tensor.output_error.held_out),
        (array.output_error.calibration, array.output_error.held_out or 0),
        strict=True,
    ):
        assert np.isclose(a, b, rtol=1e-3, atol=1e-6)
    assert (tensor.damping, tensor.note) == (array.damping, array.note)


def test_without_a_gpu_numpy_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twofour.calibrate.new_values.find_gpu", lambda: None)
    assert solving_device() is None


@pytest.mark.parametrize("method", WITH_MASK)
def test_nothing_comes_to_the_host_inside_a_method(method: str) -> None:
    """On the device `meta`, that has shapes and no values: to read one or to mix devices fails."""
    problem = Problem(
        weight=torch.empty(32, 256, device="meta"),
        gram=torch.empty(256, 256, device="meta"),
        pattern=Pattern(2, 4),
    )
    with pytest.raises(RuntimeError, match="meta"):
        float(problem.gram[0, 0])
    one = METHODS[method]
    if one.prepare is not None:
        problem = replace(problem, prepared=one.prepare(problem))
    new = refit(problem, one.solve(problem), 10)
    assert (new.shape, new.device.type) == (problem.weight.shape, "meta")


def test_only_a_matrix_that_is_not_definite_has_no_factor() -> None:
    assert np.array_equal(np.asarray(cholesky(4 * torch.eye(2))), 2 * np.eye(2))
    assert cholesky(-torch.eye(2)) is None
    assert cholesky(-np.eye(2)) is None
    with pytest.raises(RuntimeError, match="square"):  # as a lack of memory on a GPU is one
        cholesky(torch.ones(2, 3))
