"""Which layers a budget prunes, and that the limit holds for metrics that mislead."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofour.budget.choosing import AT_ONCE, FIRST, STEPS, Cost, SetSearch

MOST_MEASURED = FIRST + STEPS * AT_ONCE

FIGURES = st.one_of(st.integers(0, 8).map(float), st.floats(1e-6, 1e3))
COSTS = st.lists(st.tuples(FIGURES, st.one_of(FIGURES, st.floats(-5, 0))), max_size=9).map(
    lambda rows: [Cost(name=f"l{i}", gain=g, loss=x) for i, (g, x) in enumerate(rows)]
)


def least_loss(costs: Sequence[Cost], share: float) -> frozenset[str]:
    return SetSearch(costs, lambda _: ()).least_loss(share)


def _gain(costs: Sequence[Cost], pruned: frozenset[str]) -> float:
    return math.fsum(c.gain for c in costs if c.name in pruned)


def _loss(costs: Sequence[Cost], pruned: frozenset[str]) -> float:
    return math.fsum(max(c.loss, 0.0) for c in costs if c.name in pruned)


@settings(max_examples=150, deadline=None)
@given(costs=COSTS, share=st.integers(0, 100).map(lambda n: n / 100))
def test_a_share_is_reached_for_no_more_than_the_layers_in_order_lose(
    costs: list[Cost], share: float
) -> None:
    chosen = least_loss(costs, share)
    wanted = share * _gain(costs, frozenset(c.name for c in costs)) * (1 - 1e-9)
    assert _gain(costs, chosen) >= wanted * (1 - 1e-9)
    there = [c for c in costs if c.gain > 0]
    assert chosen <= {c.name for c in there}
    assert chosen >= {c.name for c in there if c.loss <= 0}
    in_order = sorted(there, key=lambda c: (max(c.loss, 0) / c.gain, -c.gain))
    for at in range(len(there) + 1):
        first = frozenset(c.name for c in in_order[:at])
        if _gain(costs, first) >= wanted:
            assert _loss(costs, chosen) <= _loss(costs, first) * (1 + 1e-9)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_known_keeps_the_layer_dense(loss: float) -> None:
    costs = [Cost(name="broken", gain=9.0, loss=loss), Cost(name="fine", gain=1.0, loss=0.0)]
    assert least_loss(costs, 1.0) == {"fine"}


def test_of_equal_layers_the_first_are_pruned_and_of_equal_gains_the_cheaper() -> None:
    equal = [Cost(name=f"l{i}", gain=1.0, loss=1.0) for i in range(20)]
    assert least_loss(equal, 0.35) == {f"l{i}" for i in range(7)}
    two = [Cost(name="dear", gain=1.0, loss=0.9), Cost(name="cheap", gain=1.0, loss=0.6)]
    assert least_loss(two, 0.5) == {"cheap"}


# --- the limit by measurement ---------------------------------------------------------------------


class Metric:
    """Counts what it is asked, and answers by a function of the set."""

    def __init__(self, function: Callable[[frozenset[str]], float]) -> None:
        self.function = function
        self.asked: list[frozenset[str]] = []

    def __call__(self, sets: Sequence[frozenset[str]]) -> list[float]:
        self.asked += sets
        return [float(self.function(pruned)) for pruned in sets]


@settings(max_examples=100, deadline=None)
@given(costs=COSTS, limit=FIGURES, seed=st.integers(0, 1 << 30))
def test_the_limit_holds_for_any_metric_whatever(
    costs: list[Cost], limit: float, seed: int
) -> None:
    metric = Metric(lambda s: hash((seed, *sorted(s))) % 1000 / 300 * limit)
    best = SetSearch(costs, metric).best_within(limit)
    assert best.measured <= limit
    if best.pruned:
        assert best.measured == metric.function(best.pruned)
    assert len(metric.asked) == len(set(metric.asked))
    assert len(metric.asked) <= MOST_MEASURED


COMMON = [Cost(name=f"l{i}", gain=float(1 + i % 3), loss=0.1 * (1 + i % 4)) for i in range(12)]


def test_a_layer_that_breaks_the_limit_is_left_out_and_those_behind_it_are_tried() -> None:
    costs = [Cost(name=f"l{i}", gain=1.0, loss=0.01 * i) for i in range(8)]
    metric = Metric(lambda s: 5.0 if "l3" in s else 0.1 * len(s))
    best = SetSearch(costs, metric).best_within(1.0)
    assert best.pruned == {f"l{i}" for i in range(8)} - {"l3"}


DIGITS_GAINS = (3072, 3072, 2048, 1536, 1536, 320)
# fmt: off
DIGITS_LOST = (
    0, 65, 1, 84, 7, 114, 7, 134, 2, 61, 11, 94, 3, 111, 15, 137,
    20, 114, 8, 129, 21, 161, 18, 170, 10, 96, 8, 115, 15, 144, 19, 160,
    35, 92, 43, 119, 22, 131, 30, 155, 45, 106, 61, 129, 27, 132, 48, 158,
    39, 132, 46, 152, 35, 160, 32, 180, 41, 123, 45, 145, 24, 149, 25, 167,
)
# fmt: on
"""More mistakes among 800 digits of scikit-learn by a perceptron 64-48-64-32-48-32-10, pruned by
magnitude; of all its sets of layers, from none to all, the last layer changes first."""
DIGITS = {
    frozenset(f"l{i}" for i, pruned in enumerate(flags) if pruned): lost / 8
    for flags, lost in zip(itertools.product((0, 1), repeat=6), DIGITS_LOST, strict=True)
}
DIGITS_COSTS = [
    Cost(name=f"l{i}", gain=gain, loss=DIGITS[frozenset({f"l{i}"})])
    for i, gain in enumerate(DIGITS_GAINS)
]


@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0, 4.0])
def test_of_a_real_net_what_is_saved_within_a_limit_is_the_most_that_can_be(limit: float) -> None:
    metric = Metric(DIGITS.__getitem__)
    best = SetSearch(DIGITS_COSTS, metric).best_within(limit)
    most = max(_gain(DIGITS_COSTS, s) for s, lost in DIGITS.items() if lost <= limit)
    assert best.gain >= 0.95 * most
    assert len(metric.asked) < len(DIGITS)


@pytest.mark.parametrize("share", [0.2, 0.3, 0.5, 0.7, 0.9])
def test_of_a_real_net_a_share_is_reached_for_the_least_loss(share: float) -> None:
    best = SetSearch(DIGITS_COSTS, Metric(DIGITS.__getitem__)).best_reaching(share)
    enough = {s for s in DIGITS if _gain(DIGITS_COSTS, s) >= share * sum(DIGITS_GAINS)}
    assert best.pruned in enough
    assert best.measured <= 1.05 * min(DIGITS[s] for s in enough)


def test_a_measured_set_that_saves_more_and_loses_less_than_predicted_is_taken() -> None:
    lucky = frozenset({"l0", "l9", "l2"})
    search = SetSearch(COMMON, Metric(lambda s: 0.01 if s == lucky else _loss(COMMON, s)))
    (known,) = search.measured([lucky])
    assert search.best_reaching(0.2) is known
