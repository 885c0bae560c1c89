"""Which layers a budget prunes: against every possible set, and against metrics that mislead."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twofour.pruning.budget import Cost, Trial, least_lost, most_saved, within

FIGURES = st.one_of(st.integers(0, 8).map(float), st.floats(1e-6, 1e3))
COSTS = st.lists(st.tuples(FIGURES, st.one_of(FIGURES, st.floats(-5, 0))), max_size=9).map(
    lambda rows: [Cost(name=f"l{i}", gain=g, loss=x) for i, (g, x) in enumerate(rows)]
)


def _gain(costs: Sequence[Cost], pruned: frozenset[str]) -> float:
    return math.fsum(c.gain for c in costs if c.name in pruned)


def _loss(costs: Sequence[Cost], pruned: frozenset[str]) -> float:
    return math.fsum(max(c.loss, 0.0) for c in costs if c.name in pruned)


def _sets(costs: Sequence[Cost]) -> list[frozenset[str]]:
    names = [c.name for c in costs]
    return [frozenset(s) for n in range(len(names) + 1) for s in itertools.combinations(names, n)]


@settings(max_examples=150, deadline=None)
@given(costs=COSTS, limit=st.one_of(st.just(0.0), FIGURES))
def test_no_set_within_the_limit_saves_more(costs: list[Cost], limit: float) -> None:
    chosen = most_saved(costs, limit)
    assert _loss(costs, chosen) <= limit * (1 + 1e-9)
    most = max(_gain(costs, s) for s in _sets(costs) if _loss(costs, s) <= limit * (1 - 2e-6))
    assert _gain(costs, chosen) >= most * (1 - 1e-6)
    assert all(c.gain > 0 for c in costs if c.name in chosen)


@settings(max_examples=150, deadline=None)
@given(
    costs=COSTS, share=st.one_of(st.integers(0, 100).map(lambda n: n / 100), st.floats(1e-8, 1e-3))
)
def test_no_set_that_saves_as_much_loses_less(costs: list[Cost], share: float) -> None:
    chosen = least_lost(costs, share)
    whole = _gain(costs, frozenset(c.name for c in costs))
    wanted = share * whole
    assert _gain(costs, chosen) >= wanted - 1e-9 * whole
    least = (
        min(
            _loss(costs, s) for s in _sets(costs) if _gain(costs, s) >= wanted * (1 + 2e-6) - 1e-300
        )
        if share < 1
        else math.inf
    )
    total = _loss(costs, frozenset(c.name for c in costs))
    assert _loss(costs, chosen) <= least + 1e-6 * total


def test_a_layer_that_saves_nothing_stays_dense_even_where_pruning_it_improves_the_model() -> None:
    costs = [Cost(name="narrow", gain=0.0, loss=-1.0), Cost(name="wide", gain=3.0, loss=0.1)]
    assert most_saved(costs, 1.0) == {"wide"}
    assert least_lost(costs, 1.0) == {"wide"}
    assert costs[0].why_dense == "pruning it saves nothing"


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_known_keeps_the_layer_dense(loss: float) -> None:
    costs = [Cost(name="broken", gain=9.0, loss=loss), Cost(name="fine", gain=1.0, loss=0.0)]
    assert most_saved(costs, 100.0) == {"fine"}
    assert least_lost(costs, 1.0) == {"fine"}
    assert costs[0].why_dense == "what pruning it loses could not be measured"


def test_what_one_layer_wins_pays_for_no_other() -> None:
    costs = [Cost(name="better", gain=1.0, loss=-5.0), Cost(name="worse", gain=9.0, loss=2.0)]
    assert most_saved(costs, 1.0) == {"better"}


def test_of_equal_layers_the_first_are_pruned_and_of_equal_gains_the_cheaper() -> None:
    equal = [Cost(name=f"l{i}", gain=1.0, loss=1.0) for i in range(20)]
    assert most_saved(equal, 7.5) == {f"l{i}" for i in range(7)}
    assert least_lost(equal, 0.35) == {f"l{i}" for i in range(7)}
    two = [Cost(name="dear", gain=1.0, loss=0.9), Cost(name="cheap", gain=1.0, loss=0.6)]
    assert most_saved(two, 1.0) == {"cheap"}
    assert least_lost(two, 0.5) == {"cheap"}


def test_losses_of_very_different_size_are_told_apart() -> None:
    costs = [Cost(name=f"l{i}", gain=1.0, loss=10.0**-i) for i in range(12)]
    assert most_saved(costs, 2e-9) == {"l9", "l10", "l11"}
    assert most_saved(costs, 0.0) == frozenset()


@pytest.mark.parametrize("share", [2e-9, 1e-8, 1e-5])
def test_next_to_nothing_is_saved_by_the_layer_that_loses_least(share: float) -> None:
    costs = [Cost(name=f"l{i}", gain=1 + i % 7, loss=0.5 + (i * 53 % 97) / 31) for i in range(60)]
    cheapest = min(costs, key=lambda c: c.loss)
    assert least_lost(costs, share) == {cheapest.name}


def test_four_hundred_layers_are_solved_in_a_moment() -> None:
    costs = [
        Cost(name=f"l{i}", gain=1 + (i * 37 % 101) / 7, loss=0.01 + (i * 53 % 97) / 31)
        for i in range(400)
    ]
    chosen = most_saved(costs, 60.0)
    assert _loss(costs, chosen) <= 60.0
    by_ratio = sorted(costs, key=lambda c: c.loss / c.gain)
    greedy, left = 0.0, 60.0
    for c in by_ratio:
        if c.loss <= left:
            left, greedy = left - c.loss, greedy + c.gain
    assert _gain(costs, chosen) >= greedy
    assert most_saved(costs, 60.0) == chosen


# --- the limit by measurement ---------------------------------------------------------------------


class Metric:
    """Counts what it is asked, and answers by a function of the set."""

    def __init__(self, function: object) -> None:
        self.function = function
        self.asked: list[frozenset[str]] = []

    def __call__(self, pruned: frozenset[str]) -> float:
        self.asked.append(pruned)
        return float(self.function(pruned))  # type: ignore[operator]  # a function of the tests


@settings(max_examples=100, deadline=None)
@given(costs=COSTS, limit=FIGURES, seed=st.integers(0, 1 << 30))
def test_the_limit_holds_for_any_metric_whatever(
    costs: list[Cost], limit: float, seed: int
) -> None:
    metric = Metric(lambda s: hash((seed, *sorted(s))) % 1000 / 300 * limit)
    outcome = within(costs, limit, metric)
    assert outcome.best.measured <= limit
    if outcome.best.pruned:
        assert outcome.best.measured == metric.function(outcome.best.pruned)  # type: ignore[operator]
    assert len(metric.asked) == len(set(metric.asked))
    assert len(metric.asked) <= 6 + 2 * (1 + math.log2(len(costs) + 1))


COMMON = [Cost(name=f"l{i}", gain=float(1 + i % 3), loss=0.1 * (1 + i % 4)) for i in range(12)]


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
def test_losses_that_add_up_wrongly_by_a_factor_are_found_out(factor: float) -> None:
    metric = Metric(lambda s: factor * _loss(COMMON, s))
    outcome = within(COMMON, 1.0, metric)
    ideal = most_saved([*COMMON], 1.0 / factor)
    assert outcome.best.gain == pytest.approx(_gain(COMMON, ideal), abs=1.01)
    assert outcome.best.measured <= 1.0
    assert len(metric.asked) <= 10


def test_layers_that_are_harmless_alone_and_ruinous_together_are_taken_back() -> None:
    costs = [Cost(name=f"l{i}", gain=1.0, loss=0.0) for i in range(8)]
    outcome = within(costs, 1.0, Metric(lambda s: 0.0 if len(s) <= 3 else 5.0))
    assert len(outcome.best.pruned) in (2, 3)
    assert outcome.best.measured == 0.0


def test_a_metric_that_is_broken_with_everything_pruned_still_gives_a_set() -> None:
    outcome = within(COMMON, 1.0, Metric(lambda s: math.nan if len(s) > 4 else 0.1 * len(s)))
    assert 1 <= len(outcome.best.pruned) <= 4


def test_where_no_layer_holds_nothing_is_pruned() -> None:
    outcome = within(COMMON, 0.5, Metric(lambda s: 9.0 if s else 0.0))
    assert outcome.best == Trial(pruned=frozenset(), gain=0.0, predicted=0.0, measured=0.0)
    assert all(t.measured == 9.0 for t in outcome.trials if t.pruned)


def test_everything_is_pruned_where_everything_holds() -> None:
    metric = Metric(lambda s: -0.01 * len(s))
    outcome = within(COMMON, 0.05, metric)
    assert outcome.best.pruned == {c.name for c in COMMON}


def test_a_limit_of_zero_takes_what_loses_nothing() -> None:
    costs = [Cost(name="a", gain=1.0, loss=0.0), Cost(name="b", gain=5.0, loss=0.2)]
    assert within(costs, 0.0, Metric(lambda s: _loss(costs, s))).best.pruned == {"a"}


def test_what_was_measured_before_is_not_measured_again() -> None:
    everything = frozenset(c.name for c in COMMON)
    known = Trial(pruned=everything, gain=_gain(COMMON, everything), predicted=2.9, measured=0.4)
    metric = Metric(lambda _: 9.9)
    assert within(COMMON, 0.5, metric, known=[known]).best is known
    assert everything not in metric.asked
