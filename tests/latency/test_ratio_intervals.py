from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sampled_variants import around

from twofour.latency.noise import LEAST_ROUNDS, RatioEstimate, paired_ratio

PAIRS = st.lists(st.tuples(st.floats(0.01, 1000), st.floats(0.01, 1000)), min_size=1, max_size=40)


def paired(variant: list[float], baseline: list[float]) -> RatioEstimate:
    found = paired_ratio(variant, baseline, seed=3)
    assert found is not None
    return found


def interval(found: RatioEstimate) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def test_the_ratio_is_the_middle_half_of_the_rounds() -> None:
    """A quarter on either side may be outliers."""
    found = paired([1.0, 1.0, 4.0, 8.0, 16.0, 32.0, 2.0**20, 2.0**30], [1.0] * 8)
    assert found.ratio == pytest.approx(2 ** ((2 + 3 + 4 + 5) / 4))
    assert (found.low, found.high, found.rounds) == (None, None, 8)
    assert found.widest == pytest.approx(2**30)


def test_rounds_in_which_one_did_not_run_do_not_count() -> None:
    found = paired([2.0, 2.0, 0.0, math.nan, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0, math.inf])
    assert (found.ratio, found.rounds) == (2.0, 2)
    assert paired_ratio([], [1.0], seed=0) is None
    assert paired_ratio([0.0], [1.0], seed=0) is None


def test_an_interval_needs_ten_rounds() -> None:
    variant, baseline = around(2, rounds=LEAST_ROUNDS), around(1, rounds=LEAST_ROUNDS, phase=1)
    low, high = interval(paired(variant, baseline))
    assert 1.99 < low < 2 < high < 2.01
    assert paired(variant[1:], baseline).low is None


@given(PAIRS)
def test_swapping_the_sides_turns_ratio_and_interval_over(pairs: list[tuple[float, float]]) -> None:
    variant, baseline = [v for v, _ in pairs], [b for _, b in pairs]
    one, other = paired(variant, baseline), paired(baseline, variant)
    assert one.ratio * other.ratio == pytest.approx(1)
    assert (one.low is None) == (other.low is None)
    if one.low is not None:
        low, high = interval(one)
        assert (low * interval(other)[1], high * interval(other)[0]) == pytest.approx((1, 1))


@given(PAIRS)
def test_ratio_and_interval_lie_within_those_of_the_single_rounds(
    pairs: list[tuple[float, float]],
) -> None:
    found = paired([v for v, _ in pairs], [b for _, b in pairs])
    each = [v / b for v, b in pairs]
    inside = [found.ratio] if found.low is None else [found.low, found.ratio, found.high or 0]
    assert min(each) <= inside[0] * (1 + 1e-9)
    assert inside[-1] <= max(each) * (1 + 1e-9)
    assert found.widest == pytest.approx(max(*each, 1 / min(each)))
    assert inside == sorted(inside) or len(set(each)) <= 2


def test_the_same_seed_gives_the_same_interval_and_another_one_hardly_another() -> None:
    rng = np.random.default_rng(2)
    variant, baseline = (np.exp(0.02 * rng.standard_normal(50)).tolist() for _ in range(2))
    one, same, other = (paired_ratio(variant, baseline, seed=s) for s in (1, 1, 2))
    assert one == same
    assert one is not None
    assert other is not None
    (low, high), (other_low, other_high) = interval(one), interval(other)
    assert one != other
    assert max(abs(low - other_low), abs(high - other_high)) < 0.15 * (high - low)


@pytest.mark.parametrize("truth", [1.0, 1.02, 1.3])
def test_the_interval_covers_the_truth_in_93_to_97_per_cent(truth: float) -> None:
    """Drift by half, 2 % of noise and 5 % of runs three times as slow, over 50 rounds."""
    rng = np.random.default_rng(24)
    held, runs = 0, 600
    drift = np.linspace(1, 1.5, 50)
    for _ in range(runs):
        noise = np.exp(0.02 * rng.standard_normal((2, 50)))
        slow = np.where(rng.random((2, 50)) < 0.05, 3, 1)
        variant, baseline = noise * slow * drift
        low, high = interval(paired((variant * truth).tolist(), baseline.tolist()))
        held += low <= truth <= high
    assert 0.93 <= held / runs <= 0.97
