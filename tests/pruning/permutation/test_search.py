"""The search for an order of columns: known best orders, bounds, repeatability."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.pruning.permutation.search import Progress, Stop, kept_score, search
from twofour.records.weights import Pattern

Array = NDArray[Any]
TWO_FOUR = Pattern(2, 4)
PATTERNS = [Pattern(1, 2), TWO_FOUR, Pattern(1, 4), Pattern(3, 4), Pattern(4, 8), Pattern(2, 3)]


def published_matrix() -> Array:
    """The matrix of the published permutation tests: uniform, 128 x 64."""
    return np.random.RandomState(1).rand(128, 64)


def planted(pattern: Pattern, groups: int, rows: int = 24, seed: int = 0) -> Array:
    """N columns of each group matter and the rest do not; those that matter lie side by side."""
    random = np.random.default_rng(seed)
    scores = random.uniform(0.0, 0.01, (rows, groups, pattern.m))
    scores[:, :, : pattern.n] += random.uniform(1, 2, (rows, groups, pattern.n))
    return np.asarray(scores.transpose(0, 2, 1).reshape(rows, -1))


def test_the_published_matrix_has_the_published_sums() -> None:
    found = search(published_matrix(), TWO_FOUR, steps=0)
    assert published_matrix().sum() == pytest.approx(4083.169, abs=1e-3)
    assert found.kept_at_most == pytest.approx(3042.332, abs=1e-3)
    assert found.kept_before == found.kept == pytest.approx(2852.377, abs=1e-3)
    assert found.efficacy == 0
    assert found.order.tolist() == list(range(64))


def test_efficacy_on_the_published_matrix_is_above_the_best_published() -> None:
    found = search(published_matrix(), TWO_FOUR, steps=2800)  # 0.2 s of CPU time
    assert found.efficacy >= 0.366
    assert found.kept == pytest.approx(kept_score(published_matrix(), TWO_FOUR, found.order))


def test_the_best_of_all_35_splits_of_eight_columns_is_found() -> None:
    scores = np.random.default_rng(3).random((20, 8))
    splits = ([*s, *sorted({*range(8)} - {*s})] for s in itertools.combinations(range(8), 4))
    best = max(kept_score(scores, TWO_FOUR, np.array(order)) for order in splits)
    assert search(scores, TWO_FOUR).kept == pytest.approx(best)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_hidden_order_that_keeps_nearly_all_is_found(pattern: Pattern) -> None:
    found = search(planted(pattern, 8), pattern)
    assert found.efficacy > 0.99
    assert sorted(found.order) == list(range(8 * pattern.m))


@settings(max_examples=30, deadline=None)
@given(
    pattern=st.sampled_from(PATTERNS),
    rows=st.integers(1, 6),
    width=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_an_order_is_a_permutation_that_never_keeps_less(
    pattern: Pattern, rows: int, width: int, seed: int
) -> None:
    scores = np.random.default_rng(seed).exponential(size=(rows, width)).round(1)
    found = search(scores, pattern, steps=20, seed=seed)
    whole = width - width % pattern.m
    assert sorted(found.order[:whole]) == list(range(whole))
    assert found.order[whole:].tolist() == list(range(whole, width)), "the tail stays"
    after = _kept_plainly(scores[:, found.order], pattern)
    assert found.kept == pytest.approx(after)
    assert found.kept_before == pytest.approx(_kept_plainly(scores, pattern))
    assert found.kept >= found.kept_before * (1 - 1e-12)
    assert 0 <= found.efficacy <= 1 + 1e-9


def _kept_plainly(scores: Array, pattern: Pattern) -> float:
    total = 0.0
    for row in scores:
        for first in range(0, len(row), pattern.m):
            total += sum(sorted(row[first : first + pattern.m])[-pattern.n :])
    return total


def test_the_same_seed_gives_the_same_order_and_time_has_no_say() -> None:
    scores = np.random.default_rng(0).random((64, 32))
    first = search(scores, TWO_FOUR, steps=300, seed=5)
    again = search(scores, TWO_FOUR, steps=300, seed=5, seconds=1000)
    other = search(scores, TWO_FOUR, steps=300, seed=6)
    assert first.order.tolist() == again.order.tolist()
    assert first.stop is again.stop is not Stop.SECONDS
    assert first.order.tolist() != other.order.tolist()


def test_time_that_runs_out_is_told_and_still_gives_an_order() -> None:
    found = search(published_matrix(), TWO_FOUR, seconds=0)
    assert found.stop is Stop.SECONDS
    assert found.steps == 1
    assert sorted(found.order) == list(range(64))
    assert found.kept > found.kept_before


def test_a_search_that_gains_nothing_more_ends_by_itself() -> None:
    found = search(planted(TWO_FOUR, 4), TWO_FOUR)
    assert found.stop is Stop.CONVERGED
    assert found.steps < 1000
    assert search(planted(TWO_FOUR, 4), TWO_FOUR, steps=50).stop is Stop.STEPS


def test_a_single_group_and_a_matrix_of_zeros_have_nothing_to_gain() -> None:
    for scores in (np.ones((3, 4)), np.zeros((3, 16)), np.zeros((0, 16)), np.ones((3, 0))):
        found = search(scores, TWO_FOUR)
        assert (found.efficacy, found.steps) == (0, 0)
        assert found.order.tolist() == list(range(scores.shape[1]))


def test_progress_counts_every_sweep_and_never_falls() -> None:
    told: list[Progress] = []
    found = search(published_matrix(), TWO_FOUR, steps=120, progress=told.append)
    assert [step.steps for step in told] == list(range(1, found.steps + 1))
    assert told == sorted(told, key=lambda step: step.kept)
    assert told[-1].kept == pytest.approx(found.kept)
    assert {step.of for step in told} == {120}


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_scores_that_are_no_magnitudes_are_refused(bad: float) -> None:
    scores = np.ones((2, 8))
    scores[1, 3] = bad
    with pytest.raises(BadInputError, match="negative, infinite or NaN"):
        search(scores, TWO_FOUR)


def test_scores_that_are_no_matrix_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"shape \(8,\)"):
        search(np.ones(8), TWO_FOUR)
