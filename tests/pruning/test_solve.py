"""One layer through a method: the mask, the bias, the errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from twofour.errors import PatternBrokenError
from twofour.pattern import check
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout, matrix_rows
from twofour.pruning.methods import METHODS, method_named
from twofour.pruning.methods.problem import best_of_groups
from twofour.pruning.solve import solve_layer
from twofour.pruning.statistics import InputSums, held_out_samples
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern

PATTERN = Pattern(2, 4)


def test_wandas_errors_are_those_of_the_outputs() -> None:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(6, 10)).astype(np.float32)
    x = (generator.normal(size=(40, 3, 10)) * generator.uniform(0.1, 3, 10) + 1).astype(np.float32)
    layout = Layout(shape=weight.shape, axis=1, m=4)
    sums, held = InputSums(), held_out_samples(0, 40)
    sums.add(matrix_rows(x[:20], layout), np.repeat(held[:20], 3))
    sums.add(matrix_rows(x[20:], layout), np.repeat(held[20:], 3))
    statistics = sums.statistics()
    assert statistics is not None
    problem = LayerProblem(
        stored=weight, layout=layout, pattern=PATTERN, statistics=statistics, has_bias=True
    )
    solved = solve_layer(problem, method_named("wanda"), MethodOptions())
    assert check(solved.weight, 1, PATTERN).holds
    score = np.abs(weight) * np.sqrt((x[~held].astype(np.float64) ** 2).mean((0, 1)))
    padded = np.pad(score, ((0, 0), (0, 2))).reshape(6, 3, 4)
    kept = np.argsort(np.argsort(-padded, axis=-1, kind="stable"), axis=-1) < 2
    assert np.array_equal(solved.weight != 0, kept.reshape(6, 12)[:, :10])
    gone = (weight - solved.weight).astype(np.float64)
    for inputs, error in (
        (x[~held], solved.output_error.calibration),
        (x[held], solved.output_error.held_out),
    ):
        assert error is not None
        lost = inputs @ gone.T - solved.bias_change
        assert np.isclose(error, (lost**2).sum() / ((inputs @ weight.T) ** 2).sum(), rtol=1e-4)


def _layer(
    shape: tuple[int, int] = (12, 16), rows: int = 200, seed: int = 0
) -> tuple[LayerProblem, NDArray[np.float32]]:
    """A matrix with correlated inputs."""
    generator = np.random.default_rng(seed)
    weight = generator.normal(size=shape).astype(np.float32)
    mix = generator.normal(size=(shape[1], shape[1]))
    x = (generator.normal(size=(rows, shape[1])) @ mix + 1).astype(np.float32)
    layout = Layout(shape=weight.shape, axis=1, m=4)
    sums = InputSums()
    sums.add(matrix_rows(x, layout), held_out_samples(0, rows))
    statistics = sums.statistics()
    assert statistics is not None
    problem = LayerProblem(
        stored=weight, layout=layout, pattern=PATTERN, statistics=statistics, has_bias=True
    )
    return problem, x


def test_the_more_a_method_does_the_less_a_layer_loses() -> None:
    problem, _ = _layer((64, 64), 2000)
    errors = [
        solve_layer(problem, METHODS[name], MethodOptions(refit=refit)).output_error.calibration
        for name, refit in (("wanda", 0), ("sparsegpt", 0), ("sparsegpt", 10), ("admm", 10))
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.7 * errors[1]


def test_a_mask_that_is_there_is_kept_and_refitted_to_the_dense_weight() -> None:
    problem, _ = _layer()
    dense = problem.stored
    pruned = dense * best_of_groups(np.abs(dense), PATTERN)
    with pytest.raises(PatternBrokenError, match=r"there is no mask to keep: 96 non-zeros"):
        solve_layer(problem, METHODS["keep"], MethodOptions())
    kept = solve_layer(replace(problem, stored=pruned), METHODS["keep"], MethodOptions())
    assert np.array_equal(kept.weight, pruned)
    assert kept.output_error.calibration == 0
    problem = replace(problem, stored=pruned, reference=dense)
    kept, refitted = (
        solve_layer(problem, METHODS["keep"], MethodOptions(refit=steps)) for steps in (0, 10)
    )
    assert np.array_equal(kept.weight, pruned)
    assert np.array_equal(refitted.weight != 0, pruned != 0)
    assert refitted.output_error.calibration < 0.7 * kept.output_error.calibration


def test_a_weight_of_very_many_rows_is_solved_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(50, 12)).astype(np.float32)
    x = generator.normal(size=(60, 12)).astype(np.float32)
    layout = Layout(shape=weight.shape, axis=1, m=4)
    sums = InputSums()
    sums.add(matrix_rows(x, layout), held_out_samples(0, 60))
    statistics = sums.statistics()
    assert statistics is not None
    problem = LayerProblem(
        stored=weight, layout=layout, pattern=PATTERN, statistics=statistics, has_bias=True
    )
    options = MethodOptions(damping=0.01)
    whole = solve_layer(problem, method_named("admm"), options)
    monkeypatch.setattr("twofour.pruning.layer_problem._LARGEST_PIECE", 12 * 7)
    pieces = solve_layer(problem, method_named("admm"), options)
    assert check(pieces.weight, 1, PATTERN).holds
    assert np.array_equal(whole.weight != 0, pieces.weight != 0)
    assert np.allclose(whole.weight, pieces.weight, atol=1e-5)
    assert whole.bias_change == pytest.approx(pieces.bias_change, abs=1e-5)
    assert whole.output_error.held_out == pytest.approx(pieces.output_error.held_out, rel=1e-4)
