"""What holds for every method, on any weights and any inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.matrix_problem import matrix_problem, solve_layer

from twofour.errors import BadInputError
from twofour.pattern import check
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.methods import METHODS
from twofour.pruning.methods.problem import Problem, best_of_groups, refit, ridge
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern

PATTERNS = [Pattern(1, 2), Pattern(2, 4), Pattern(4, 8), Pattern(3, 5), Pattern(1, 16)]
WITH_MASK = [name for name in METHODS if name != "keep"]


def _to_float16(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return weight.astype(np.float16).astype(np.float32)


@st.composite
def problems(draw: st.DrawFn) -> LayerProblem:
    """Ties, zeros, dead and repeated inputs, few rows, and any scale."""
    pattern = draw(st.sampled_from(PATTERNS))
    rows, inputs = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    weight = generator.normal(size=(rows, inputs))
    if draw(st.booleans()):
        weight = np.round(weight)
    x = generator.normal(size=(draw(st.integers(1, 40)), inputs))
    if draw(st.booleans()):
        x[:, generator.random(inputs) < 0.4] = 0
    if draw(st.booleans()):
        x[:, -1] = x[:, 0]
    weight *= draw(st.sampled_from([1e-30, 1.0, 1e30]))
    x *= draw(st.sampled_from([1e-15, 1.0, 1e15]))
    return matrix_problem(weight.astype(np.float32), x.astype(np.float32), pattern)


@settings(max_examples=40, deadline=None)
@given(problem=problems(), method=st.sampled_from(WITH_MASK), steps=st.sampled_from([0, 1, 10]))
def test_the_pattern_holds_and_errors_are_sane(
    problem: LayerProblem, method: str, steps: int
) -> None:
    options = MethodOptions(refit=steps, damping=0.01)
    solved = solve_layer(problem, METHODS[method], options)
    assert check(solved.weight, 1, problem.pattern).holds
    assert np.isfinite(solved.weight).all()
    assert solved.weight.dtype == np.float32
    assert not np.signbit(solved.weight[solved.weight == 0]).any() or np.array_equal(
        solved.weight, problem.stored
    )
    dropped = replace(problem, has_bias=False)
    without = solve_layer(dropped, METHODS[method], options)
    assert np.array_equal(without.weight, solved.weight)
    assert solved.output_error.calibration <= without.output_error.calibration * (1 + 1e-9)
    assert 0 <= solved.output_error.calibration < 1e6


@settings(max_examples=40, deadline=None)
@given(problem=problems(), method=st.sampled_from(WITH_MASK))
def test_a_refit_never_raises_the_error_it_lowers(problem: LayerProblem, method: str) -> None:
    seen = problem.statistics.seen
    gram = seen.gram[0] / max(1e-300, np.diag(seen.gram[0]).mean())
    weight = problem.stored / max(1e-37, np.abs(problem.stored).max())
    fill = gram.shape[0] - weight.shape[1]
    weight = np.pad(weight, ((0, 0), (0, fill)))
    if not gram.any():
        return
    one = Problem(
        weight=weight, gram=gram.astype(np.float32), pattern=problem.pattern, damping=0.01
    )
    pruned = METHODS[method].solve(one)
    damped = gram + np.diag(ridge(gram, 0.01))

    def lost(other: NDArray[np.float32]) -> NDArray[np.float64]:
        gone = (weight - other).astype(np.float64)
        return np.asarray(np.einsum("ri,ij,rj->r", gone, damped, gone))

    for steps in (1, 5, 50):
        new = refit(one, pruned, steps)
        assert np.array_equal(new != 0, pruned != 0) or not (new[pruned == 0]).any()
        assert (lost(new) <= lost(pruned) * (1 + 1e-5) + 1e-12).all()


@settings(max_examples=30, deadline=None)
@given(
    pattern=st.sampled_from(PATTERNS),
    values=st.lists(st.integers(0, 3), min_size=1, max_size=80),
)
def test_ties_keep_the_lower_index(pattern: Pattern, values: list[int]) -> None:
    values += [0] * (-len(values) % pattern.m)
    mask = best_of_groups(np.array([values], np.float32), pattern)[0]
    for first in range(0, len(values), pattern.m):
        places = range(first, first + pattern.m)
        best = sorted(places, key=lambda i: (-values[i], i))[: pattern.n]
        assert sorted(best) == [i for i in places if mask[i]]


@pytest.mark.parametrize("method", METHODS)
def test_what_holds_already_is_left_bit_for_bit(method: str) -> None:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(4, 16)).astype(np.float32)
    weight *= best_of_groups(np.abs(weight), Pattern(2, 4))
    x = generator.normal(size=(60, 16)).astype(np.float32)
    solved = solve_layer(matrix_problem(weight, x, Pattern(2, 4)), METHODS[method], MethodOptions())
    assert solved.weight.tobytes() == weight.tobytes()
    assert solved.output_error.calibration == 0
    assert (solved.refit_steps, solved.damping) == (0, None)
    assert solved.bias_change is not None
    assert not solved.bias_change.any()


@pytest.mark.parametrize("method", WITH_MASK)
def test_inputs_that_are_all_zero_fall_back_on_magnitude(method: str) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 16)).astype(np.float32)
    problem = matrix_problem(weight, np.zeros((40, 16), np.float32), Pattern(2, 4))
    solved = solve_layer(problem, METHODS[method], MethodOptions())
    mask = best_of_groups(np.abs(weight), Pattern(2, 4))
    assert np.allclose(solved.weight, weight * mask, atol=1e-6)
    assert "layer is 0" in (solved.note or "")


def test_fewer_rows_than_inputs_are_told_with_the_damping() -> None:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(4, 64)).astype(np.float32)
    x = (generator.normal(size=(4000, 8)) @ generator.normal(size=(8, 64))).astype(np.float32)
    x += generator.normal(size=x.shape).astype(np.float32)
    few, many = (
        solve_layer(matrix_problem(weight, rows, PATTERNS[1]), METHODS["admm"], MethodOptions())
        for rows in (x[:8], x)
    )
    assert few.damping == 0.24
    assert few.output_error.held_out is None
    assert few.note is not None
    assert few.note.startswith("8 rows of")
    assert "a damping of 0.24" in few.note
    assert many.damping is not None
    assert many.damping <= 0.03
    assert many.note is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sums_that_are_not_finite_are_refused(bad: float) -> None:
    weight = np.ones((4, 16), np.float32)
    x = np.ones((40, 16), np.float32)
    x[3, 2] = bad
    with pytest.raises(BadInputError, match="inputs are not finite"):
        solve_layer(matrix_problem(weight, x, PATTERNS[1]), METHODS["admm"], MethodOptions())
    weight[1, 1] = bad
    problem = matrix_problem(weight, np.ones((40, 16), np.float32), PATTERNS[1])
    with pytest.raises(BadInputError, match="holds NaN or infinity"):
        solve_layer(problem, METHODS["admm"], MethodOptions())


@pytest.mark.parametrize("method", ["sparsegpt", "admm"])
def test_a_gram_matrix_without_inverse_and_no_damping_still_gives_a_weight(method: str) -> None:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(4, 16)).astype(np.float32)
    x = np.repeat(generator.normal(size=(5, 8)), 2, axis=1).astype(np.float32)
    solved = solve_layer(
        matrix_problem(weight, x, PATTERNS[1]), METHODS[method], MethodOptions(damping=0.0)
    )
    assert check(solved.weight, 1, PATTERNS[1]).holds
    assert solved.output_error.calibration < 0.05
    if method == "sparsegpt":
        assert solved.damping is not None
        assert 0 < solved.damping <= 1e-4
        assert solved.note is not None
        assert "damping of 0" in solved.note
        assert f"{solved.damping:g} was used" in solved.note


def test_inputs_of_which_one_dwarfs_the_rest_get_little_damping() -> None:
    """As in large language models: a hundredth of the mean would be more than most inputs have."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(32, 64)).astype(np.float32)
    x = generator.normal(size=(4000, 16)) @ generator.normal(size=(16, 64))
    x += 0.3 * generator.normal(size=x.shape)
    x[:, 5] *= 1000
    weight[:, 5] /= 1000
    problem = matrix_problem(weight, x.astype(np.float32), PATTERNS[1])
    chosen, usual = (
        solve_layer(problem, METHODS["admm"], MethodOptions(damping=damping))
        for damping in (None, 0.01)
    )
    assert chosen.damping is not None
    assert chosen.damping <= 1e-4
    assert chosen.output_error.held_out is not None
    assert usual.output_error.held_out is not None
    assert chosen.output_error.held_out < 0.5 * usual.output_error.held_out


def test_a_weight_that_outgrows_its_type_keeps_its_old_value() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 1)) + 0.1 * generator.normal(size=(200, 16))
    problem = replace(
        matrix_problem(np.full((2, 16), 60000, np.float32), x.astype(np.float32), PATTERNS[1]),
        rounded=_to_float16,
    )
    solved = solve_layer(problem, METHODS["admm"], MethodOptions())
    assert np.isfinite(solved.weight).all()
    assert check(solved.weight, 1, PATTERNS[1]).holds
    assert 60000 in solved.weight
    wide = solve_layer(replace(problem, rounded=None), METHODS["admm"], MethodOptions())
    assert wide.weight.max() > 65520
