"""Each method is what its paper says, written out in float64 for one output at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.calibrated_layers import KINDS, CalibratedLayer, Unit, problem_of
from support.matrix_problem import solve_layer

from twofour.pattern import check
from twofour.pruning.methods import METHODS
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern

Vector = NDArray[np.float64]
DAMPING = 0.02


def groups_of(unit: Unit, m: int) -> list[list[int]]:
    """Places of each group among the unit's weights."""
    groups, first = [], 0
    for run in unit.runs:
        groups += [
            list(range(first + i, first + min(i + m, len(run)))) for i in range(0, len(run), m)
        ]
        first += len(run)
    return groups


def largest(score: Vector, unit: Unit, pattern: Pattern) -> NDArray[np.bool_]:
    mask = np.zeros(score.size, bool)
    for group in groups_of(unit, pattern.m):
        for place in sorted(group, key=lambda i: (-score[i], i))[: pattern.n]:
            mask[place] = True
    return mask


def damped_gram(unit: Unit) -> NDArray[np.float64]:
    gram = unit.inputs.T @ unit.inputs / len(unit.inputs)
    gram += DAMPING * np.mean(np.diag(gram)) * np.eye(len(gram))
    return np.asarray(gram)


def magnitude(weight: Vector, unit: Unit, pattern: Pattern) -> Vector:
    return weight * largest(np.abs(weight), unit, pattern)


def wanda(weight: Vector, unit: Unit, pattern: Pattern) -> Vector:
    return weight * largest(np.abs(weight) * np.linalg.norm(unit.inputs, axis=0), unit, pattern)


def sparsegpt(weight: Vector, unit: Unit, pattern: Pattern) -> Vector:
    weight = weight.copy()
    upper = np.linalg.cholesky(np.linalg.inv(damped_gram(unit))).T
    for group in groups_of(unit, pattern.m):
        score = {i: weight[i] ** 2 / upper[i, i] ** 2 for i in group}
        kept = sorted(group, key=lambda i: (-score[i], i))[: pattern.n]
        for i in group:
            error = 0.0 if i in kept else weight[i] / upper[i, i]
            weight[i:] -= error * upper[i, i:]
            if i not in kept:
                weight[i] = 0
    return weight


def admm(weight: Vector, unit: Unit, pattern: Pattern) -> Vector:
    gram = damped_gram(unit)
    norms = np.sqrt(np.diag(gram))
    gram = gram / np.outer(norms, norms)
    wanted = weight * norms
    sparse, dual, rho = wanted, np.zeros_like(wanted), 0.1
    for _ in range(16):
        dense = np.linalg.solve(gram + rho * np.eye(len(gram)), gram @ wanted - dual + rho * sparse)
        moved = dense + dual / rho
        sparse = moved * largest(np.abs(moved), unit, pattern)
        dual = dual + rho * (dense - sparse)
        rho *= 1.158
    return sparse / norms


def conjugate_gradients(weight: Vector, pruned: Vector, unit: Unit, steps: int) -> Vector:
    """Steps to the best values of the kept weights alone, preconditioned by the diagonal."""
    kept = np.flatnonzero(pruned)
    gram = damped_gram(unit)
    inner, values = gram[np.ix_(kept, kept)], pruned[kept]
    residual = gram[kept] @ weight - inner @ values
    step = scaled = residual / np.diag(inner)
    for _ in range(steps):
        if not np.any(residual):
            break
        length = residual @ scaled / (step @ inner @ step)
        values = values + length * step
        new = residual - length * inner @ step
        rescaled = new / np.diag(inner)
        step = rescaled + (new @ rescaled) / (residual @ scaled) * step
        residual, scaled = new, rescaled
    result = np.zeros_like(weight)
    result[kept] = values
    return result


REFERENCES: dict[str, Callable[[Vector, Unit, Pattern], Vector]] = {
    "magnitude": magnitude,
    "wanda": wanda,
    "sparsegpt": sparsegpt,
    "admm": admm,
}
PATTERNS = [Pattern(2, 4), Pattern(1, 2), Pattern(4, 8), Pattern(3, 5), Pattern(1, 16)]


def by_hand(layer: CalibratedLayer, one: Callable[[Vector, Unit], Vector]) -> NDArray[np.float64]:
    """The stored weight of which each output is what `one` makes of it."""
    result = np.full_like(layer.weight, np.nan)
    for unit in layer.units:
        places = tuple(np.array([i for run in unit.runs for i in run]).T)
        result[places] = one(layer.weight[places], unit)
    return result


CASES = [(kind, PATTERNS[0]) for kind in KINDS] + [
    (kind, pattern)
    for kind in ("linear", "conv2d, groups", "transposed, 2d")
    for pattern in PATTERNS[1:]
]


@pytest.mark.parametrize("method", REFERENCES)
@pytest.mark.parametrize(("kind", "pattern"), CASES, ids=str)
def test_a_method_is_its_reference_on_every_kind_of_layer(
    method: str, kind: str, pattern: Pattern
) -> None:
    layer = KINDS[kind](pattern.m, 0)
    problem = problem_of(layer, pattern)
    options = MethodOptions(refit=0, damping=DAMPING)
    solved = solve_layer(problem, METHODS[method], options)
    expected = by_hand(layer, lambda weight, unit: REFERENCES[method](weight, unit, pattern))
    if check(layer.weight, layer.layout.axis, pattern).holds:
        expected = layer.weight  # nothing has to go, so nothing moves
    assert np.array_equal(solved.weight != 0, expected != 0)
    assert np.allclose(solved.weight, expected, rtol=1e-7, atol=1e-9)
    assert check(solved.weight, layer.layout.axis, pattern).holds
    lost = whole = 0.0
    for unit in layer.units:
        places = tuple(np.array([i for run in unit.runs for i in run]).T)
        output = unit.inputs @ (layer.weight - expected)[places]
        lost += np.mean((output - output.mean()) ** 2)
        whole += np.mean((unit.inputs @ layer.weight[places]) ** 2)
    assert np.isclose(solved.output_error.calibration, lost / whole, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refit_is_conjugate_gradients_towards_least_squares(kind: str) -> None:
    pattern = Pattern(2, 4)
    layer = KINDS[kind](4, 1)
    alone = by_hand(layer, lambda weight, unit: wanda(weight, unit, pattern))

    def refitted(weight: Vector, unit: Unit) -> Vector:
        return conjugate_gradients(weight, wanda(weight, unit, pattern), unit, 3)

    options = MethodOptions(refit=3, damping=DAMPING)
    solved = solve_layer(problem_of(layer, pattern), METHODS["wanda"], options)
    holds = check(layer.weight, layer.layout.axis, pattern).holds
    expected = alone if holds else by_hand(layer, refitted)
    assert np.allclose(solved.weight, expected, rtol=1e-6, atol=1e-7)
    assert np.array_equal(solved.weight != 0, alone != 0)


@pytest.mark.parametrize("kind", ["conv2d, groups", "transposed, 2d"])
def test_a_convolution_cut_into_taps_is_pruned_tap_by_tap(kind: str) -> None:
    """Wanda's mask is the same, and so is the bias; what taps share is unknown to the error."""
    layer = KINDS[kind](4, 0)
    whole = solve_layer(problem_of(layer, Pattern(2, 4)), METHODS["wanda"], MethodOptions(refit=0))
    layout = replace(layer.layout, per_tap=True)
    parts, count, _ = layer.rows.shape
    by_tap = layer.rows.reshape(parts, count, layout.taps, -1).transpose(0, 2, 1, 3)
    cut = replace(layer, layout=layout, rows=by_tap.reshape(parts * layout.taps, count, -1))
    problem = problem_of(cut, Pattern(2, 4))
    taps = solve_layer(problem, METHODS["wanda"], MethodOptions(refit=0))
    assert np.array_equal(taps.weight, whole.weight)
    assert taps.bias_change is not None
    assert whole.bias_change is not None
    assert np.allclose(taps.bias_change, whole.bias_change)
    assert 0.3 < taps.output_error.calibration / whole.output_error.calibration < 3
    refitted = solve_layer(problem, METHODS["admm"], MethodOptions())
    assert check(refitted.weight, layout.axis, Pattern(2, 4)).holds
    assert refitted.output_error.calibration < taps.output_error.calibration


def test_many_inputs_go_through_several_blocks() -> None:
    """SparseGPT's update of what lies behind a block; 3:5 does not divide a block of 128."""
    generator = np.random.default_rng(0)
    for pattern in (Pattern(2, 4), Pattern(3, 5)):
        x = generator.normal(size=(600, 300)) @ generator.normal(size=(300, 300)) / 17
        layer = KINDS["linear"](pattern.m, 0)
        unit = Unit(runs=(tuple((0, c) for c in range(300)),), inputs=x)
        layout = type(layer.layout)(shape=(1, 300), axis=1, m=pattern.m)
        layer = CalibratedLayer(
            weight=generator.normal(size=(1, 300)), layout=layout, units=(unit,), rows=x[None]
        )
        options = MethodOptions(refit=0, damping=DAMPING)
        for method in ("sparsegpt", "admm"):
            solved = solve_layer(problem_of(layer, pattern), METHODS[method], options)
            expected = REFERENCES[method](layer.weight[0], unit, pattern)
            assert np.allclose(solved.weight[0], expected, rtol=1e-6, atol=1e-8)
