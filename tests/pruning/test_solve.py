"""One layer through a method: the mask, the bias, the errors."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.matrix_problem import matrix_problem, solve_layer

from twofour.errors import PatternBrokenError
from twofour.inputs.samples import factors_of, held_out_samples
from twofour.pattern import check
from twofour.pruning import statistics as statistics_module
from twofour.pruning.layer_problem import LayerProblem, trial_of
from twofour.pruning.matrices import Layout, matrix_rows
from twofour.pruning.methods import METHODS, method_named
from twofour.pruning.methods.problem import best_of_groups
from twofour.pruning.solve import SolvedLayer
from twofour.pruning.statistics import Drift, InputSums, added
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern

PATTERN = Pattern(2, 4)


def _layer(
    shape: tuple[int, int] = (12, 16), rows: int = 200
) -> tuple[LayerProblem, NDArray[np.float32]]:
    """A matrix with correlated inputs."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=shape).astype(np.float32)
    mix = generator.normal(size=(shape[1], shape[1]))
    x = (generator.normal(size=(rows, shape[1])) @ mix + 1).astype(np.float32)
    return matrix_problem(weight, x), x


@pytest.mark.parametrize(
    ("rows", "damping"), [(1, 0.48), (9, 0.03 * 16 / 9), (19, 0.03 * 16 / 18), (30, 0.03 * 16 / 30)]
)
def test_the_damping_is_chosen_where_two_rows_are_held_out(rows: int, damping: float) -> None:
    problem, _ = _layer(rows=rows)
    chosen = solve_layer(problem, METHODS["admm"], MethodOptions()).damping
    assert chosen is not None
    assert (chosen == pytest.approx(damping)) == (rows < 20)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "admm"])
def test_no_held_out_row_is_solved_with_and_their_error_is_that_of_a_trial(method: str) -> None:
    problem, x = _layer()
    options, held = MethodOptions(damping=0.01, refit=10), held_out_samples(0, len(x))
    solved = solve_layer(problem, METHODS[method], options)
    louder = np.where(held[:, None], 100 * x, x)
    other = solve_layer(matrix_problem(problem.stored, louder), METHODS[method], options)
    assert np.array_equal(solved.weight, other.weight)
    trial = solve_layer(problem, METHODS["wanda"], options)

    def error(found: SolvedLayer, some: NDArray[np.float32]) -> float:
        lost = some.astype(float) @ (problem.stored - found.weight).T - found.bias_change
        return float((lost**2).sum() / ((some @ problem.stored.T) ** 2).sum())

    assert solved.output_error.calibration == pytest.approx(error(solved, x[~held]), rel=1e-3)
    assert solved.output_error.held_out == pytest.approx(error(trial, x[held]), rel=1e-3)


def test_without_a_refit_held_out_rows_take_no_matrices_of_their_own() -> None:
    problem, _ = _layer((4, 512), 40)
    tracemalloc.start()
    solve_layer(problem, METHODS["wanda"], MethodOptions(refit=0))
    peak = tracemalloc.get_traced_memory()[1] / problem.statistics.seen.gram.nbytes
    tracemalloc.stop()
    assert peak < 3


def test_a_mask_that_is_there_is_kept_and_refitted_to_the_dense_weight() -> None:
    problem, _ = _layer()
    dense = problem.stored
    pruned = dense * best_of_groups(np.abs(dense), PATTERN)
    with pytest.raises(PatternBrokenError, match="96 non-zeros"):
        solve_layer(problem, METHODS["keep"], MethodOptions())
    kept = solve_layer(replace(problem, stored=pruned), METHODS["keep"], MethodOptions())
    assert np.array_equal(kept.weight, pruned)
    assert kept.output_error.calibration == 0
    problem = replace(problem, stored=pruned, unpruned=dense)
    kept, refitted = (
        solve_layer(problem, METHODS["keep"], MethodOptions(refit=steps)) for steps in (0, 10)
    )
    assert np.array_equal(kept.weight, pruned)
    assert np.array_equal(refitted.weight != 0, pruned != 0)
    assert refitted.output_error.calibration < 0.7 * kept.output_error.calibration


def test_a_weight_of_very_many_rows_is_solved_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, *_ = _drifted()
    options = MethodOptions(damping=0.01)
    whole = solve_layer(problem, method_named("admm"), options)
    monkeypatch.setattr("twofour.pruning.layer_problem._LARGEST_PIECE", 16 * 7)
    pieces = solve_layer(problem, method_named("admm"), options)
    assert check(pieces.weight, 1, PATTERN).holds
    assert np.array_equal(whole.weight != 0, pieces.weight != 0)
    assert np.allclose(whole.weight, pieces.weight, atol=1e-5)
    assert whole.bias_change == pytest.approx(pieces.bias_change, abs=1e-5)
    assert whole.output_error.held_out == pytest.approx(pieces.output_error.held_out, rel=1e-4)


def _drifted(
    outputs: int = 24,
) -> tuple[LayerProblem, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """A matrix, its inputs, those of the dense model, and how far apart are what is added to the
    outputs in the two: (samples, rows, inputs) and (samples, rows, outputs).
    """
    generator, drift, samples, rows = np.random.default_rng(0), 0.1, 400, 3
    weight = generator.normal(size=(outputs, 16)).astype(np.float32)
    dense = np.abs(generator.normal(size=(samples, rows, 16)) @ generator.normal(size=(16, 16)))
    x = dense @ (np.eye(16) + drift * generator.normal(size=(16, 16))) + drift
    away = dense @ generator.normal(size=(16, outputs)) + generator.normal(size=outputs)
    layout, held = Layout(shape=weight.shape, axis=1, m=4), samples // 2
    away *= drift if layout.narrows else 0
    sums = InputSums(weight[None] if layout.narrows else None)
    for some in (slice(0, held), slice(held, samples)):
        factors = np.repeat(factors_of(held_out_samples(some.start, held)), rows)
        seen, near = (matrix_rows(each[some], layout) for each in (x, dense))
        sums.add(seen, factors, near, away[some].reshape(1, -1, outputs))
    statistics = sums.statistics()
    assert statistics is not None
    problem = LayerProblem(
        stored=weight, layout=layout, pattern=PATTERN, statistics=statistics, has_bias=True
    )
    return problem, x, dense, away


@pytest.mark.parametrize("outputs", [24, 8])
def test_a_layer_aims_at_what_it_gives_in_the_dense_model(outputs: int) -> None:
    problem, x, dense, away = _drifted(outputs)
    drift = problem.statistics.seen.drift
    assert drift is not None
    assert drift.of_outputs == (outputs == 8)
    held = held_out_samples(0, len(x))
    seen, near = x[~held].reshape(-1, 16), dense[~held].reshape(-1, 16)
    trial = trial_of(replace(problem, has_bias=False))
    gram = seen.T @ seen
    ridge = 0.03 * np.diag(gram).mean() * np.eye(16)
    further = away[~held].reshape(-1, outputs).T @ seen
    change = problem.stored @ (near.T @ seen - gram) + further
    change = change @ np.linalg.inv(gram + ridge)
    assert trial is not None
    share = trial.share
    assert share is not None
    aimed = problem.stored + share * change
    found = trial.stack.weight[0] * trial.stack.scale[0]
    assert np.allclose(found, aimed, atol=1e-3 * np.abs(aimed).max())
    wanted = dense[held] @ problem.stored.T + away[held]

    def lost(share: float) -> float:
        weight = problem.stored + share * change
        return float(((wanted - x[held] @ weight.T) ** 2).sum())

    assert lost(share) <= 1.001 * min(map(lost, (0.0, 0.25, 0.5, 0.75, 1.0)))
    assert 0.5 < share < 1.001

    def error(solved: SolvedLayer) -> float:
        given = x[held] @ solved.weight.T.astype(float) + solved.bias_change
        return float(((wanted - given) ** 2).sum() / (wanted**2).sum())

    seen_alone = replace(problem.statistics.seen, drift=None)
    alone = replace(problem, statistics=replace(problem.statistics, seen=seen_alone))
    for method in ("magnitude", "sparsegpt", "admm"):
        solved = solve_layer(problem, METHODS[method], MethodOptions())
        assert check(solved.weight, 1, PATTERN).holds
        assert error(solved) < 0.7 * error(solve_layer(alone, METHODS[method], MethodOptions()))
        means = x[~held].mean((0, 1)) @ solved.weight.T + solved.bias_change
        goal = dense[~held].mean((0, 1)) @ problem.stored.T + away[~held].mean((0, 1))
        assert np.allclose(means, goal, rtol=1e-4, atol=1e-4)


def test_the_aim_is_not_followed_where_it_does_no_good_on_held_out_rows() -> None:
    problem, *_ = _drifted()
    held_out = problem.statistics.held_out
    assert held_out is not None
    assert held_out.drift is not None
    away = replace(held_out, drift=replace(held_out.drift, cross=-held_out.drift.cross))
    statistics = replace(problem.statistics, held_out=away)
    trial = trial_of(replace(problem, statistics=statistics, has_bias=False))
    assert trial is not None
    assert trial.share == 0


def test_inputs_that_are_those_of_the_dense_model_have_no_drift() -> None:
    rows, sums = np.ones((1, 4, 8), np.float32), InputSums()
    sums.add(rows, np.array([1.0, 1.0, 1.0, -1.0]), rows)
    statistics = sums.statistics()
    assert statistics is not None
    assert statistics.held_out is not None
    assert statistics.seen.drift is None
    assert statistics.held_out.drift is None
    assert added(statistics, statistics).seen.drift is None
    sums.add(rows, np.ones(4), rows + 1)
    statistics = sums.statistics()
    assert statistics is not None
    doubled = added(statistics, statistics).seen
    assert doubled.drift is not None
    assert np.array_equal(doubled.drift.cross, np.full((1, 8, 8), 8.0))
    assert np.array_equal(doubled.drift.total, np.full((1, 8), 8.0))


def test_rows_that_come_one_by_one_add_up_as_if_they_came_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    x, near = rng.normal(size=(2, 2, 90, 12)).astype(np.float32)
    held, found = held_out_samples(0, 90), []
    for most in (1, 500, 1 << 21):
        monkeypatch.setattr(statistics_module, "_SUMMED_AT_ONCE", most)
        sums = InputSums()
        for row in range(90):
            here = slice(row, row + 1)
            sums.add(x[:, here], factors_of(held[here]), near[:, here] if row > 40 else None)
        statistics = sums.statistics()
        assert statistics is not None
        assert statistics.held_out is not None
        found += [(statistics.seen, ~held), (statistics.held_out, held)]
    away = np.where(np.arange(90)[:, None] > 40, near - x, 0)
    for inputs, rows in found:
        assert inputs.drift is not None
        assert inputs.rows == rows.sum()
        turned = x[:, rows].swapaxes(1, 2)
        assert np.allclose(inputs.gram, turned @ x[:, rows], atol=1e-4)
        assert np.allclose(inputs.drift.cross, away[:, rows].swapaxes(1, 2) @ x[:, rows], atol=1e-4)
        assert np.allclose(inputs.drift.total, away[:, rows].sum(1), atol=1e-4)


def test_wide_sums_are_divided_in_place_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(3)
    x, near = rng.normal(size=(2, 2, 900, 40))
    gram, cross = (np.swapaxes(a, 1, 2) @ x for a in (x, near - x))
    drift = Drift(cross=cross.copy(), total=cross[:, 0])
    at_once = Drift(cross=cross.copy(), total=cross[:, 0]).step(gram)
    monkeypatch.setattr(statistics_module, "_WIDE", 30)
    monkeypatch.setattr(statistics_module, "_COLUMNS", 16)
    np.testing.assert_allclose(drift.step(gram), at_once, atol=1e-12)
    assert drift.cross is None
    assert drift.step(gram) is drift.step(gram)
