"""Which layers to prune: the most that can be saved for a loss, or the least loss for a saving.

A 0/1 knapsack, solved by HiGHS. Losses of layers pruned alone do not add up exactly, so `within`
measures what it chose, rescales, and solves again: the limit holds by measurement, not by a sum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

Measure = Callable[[frozenset[str]], float]
"""Names of what is pruned -> the loss of the whole model, in the unit of the limit."""

ROUNDS = 5
"""Solve, measure, rescale; then layers are taken back until the limit holds."""
_UNIT = 1e6
"""What the objective sums up to: HiGHS stops within 1e-6 of the optimum (mip_abs_gap)."""
_TIE = 1e-7
"""Weight of the other quantity, so that of sets that are as good the cheaper one is taken."""
_ROUNDED = 1e-9
"""Relative error of a sum that is put down to rounding."""
_FLOOR = 1e-3
"""Part of the limit that all layers together are taken to lose at least: none is free beside
others, though alone it changed nothing that the metric sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What pruning one layer, or several that are pruned together, saves and loses."""

    name: str
    gain: float
    """Saved, in any unit; 0 where it is not run sparse."""
    loss: float
    """Of this one pruned alone; below 0 where the model becomes better; NaN: not known."""

    @property
    def why_dense(self) -> str | None:
        """Why no budget prunes it; None for a layer that is worth a choice."""
        if not math.isfinite(self.loss):
            return "what pruning it loses could not be measured"
        if not math.isfinite(self.gain) or self.gain <= 0:
            return "pruning it saves nothing"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One set that was measured."""

    pruned: frozenset[str]
    gain: float
    predicted: float
    """Sum of the losses alone, those below 0 as 0."""
    measured: float

    def holds(self, limit: float) -> bool:
        """The measured loss is not above the limit; NaN is."""
        return self.measured <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The set that saves most among those that were measured to hold, and all that was tried."""

    best: Trial
    """The empty set, which loses nothing, where no other holds."""
    trials: tuple[Trial, ...]


def most_saved(costs: Sequence[Cost], limit: float) -> frozenset[str]:
    """The set with the largest gain whose losses add up to at most `limit`.

    A loss below 0 counts as 0: what one layer seems to win pays for no other. Ties go to the lower
    loss, and between equal layers to the first.
    """
    wanted = _worth(costs)
    free = [c for c in wanted if c.loss <= 0]
    paid = [c for c in wanted if 0 < c.loss <= limit]
    if math.fsum(c.loss for c in paid) <= limit:
        return _names((*free, *paid))
    whole = math.fsum(c.gain for c in paid)
    parts = np.array([c.loss / limit for c in paid])
    objective = [_TIE * part - c.gain / whole for c, part in zip(paid, parts, strict=True)]
    chosen = _solved(objective, parts, low=-np.inf, high=1.0)
    chosen = _fitting(chosen, paid, limit)
    return _names((*free, *_first_of_equals(paid, chosen)))


def least_lost(costs: Sequence[Cost], share: float) -> frozenset[str]:
    """The set with the lowest loss that gains at least `share` (0 to 1) of what all would gain.

    What loses nothing is always in it; ties go to the larger gain, between equal layers to the
    first.
    """
    wanted = _worth(costs)
    free = [c for c in wanted if c.loss <= 0]
    paid = [c for c in wanted if c.loss > 0]
    whole = math.fsum(c.gain for c in wanted)
    missing = share * whole - math.fsum(c.gain for c in free)
    if not paid or missing <= _ROUNDED * whole:
        return _names(free)
    if missing >= math.fsum(c.gain for c in paid) * (1 - _ROUNDED):
        return _names(wanted)
    total = math.fsum(c.loss for c in paid)
    # one that is enough alone counts as just enough: the same sets, in numbers of one size
    parts = np.array([min(c.gain / missing, 1.0) for c in paid])
    objective = [c.loss / total - _TIE * c.gain / whole for c in paid]
    chosen = _reaching(_solved(objective, parts, low=1.0, high=np.inf), paid, missing)
    return _names((*free, *_first_of_equals(paid, chosen)))


def within(
    costs: Sequence[Cost],
    limit: float,
    measure: Measure,
    *,
    rounds: int = ROUNDS,
    known: Iterable[Trial] = (),
) -> Outcome:
    """Save as much as holds `limit` (0 or more) by the measured loss of the whole set.

    `known` was measured before. Everything pruned is measured first, every set once; at most
    `rounds`, one and twice the logarithm of the number of layers are.
    """
    search = _Search(costs, limit, measure, known)
    search.try_out(_names(search.floored))
    scale = search.first_scale()
    for _ in range(rounds):
        chosen = most_saved(search.floored, limit / scale)
        if chosen in search.trials:
            break
        trial = search.try_out(chosen)
        scale = search.rescaled(scale, trial)
    search.take_back()
    return Outcome(best=search.best, trials=tuple(search.trials.values()))


class _Search:
    """The trials so far, and what follows from them."""

    def __init__(
        self, costs: Sequence[Cost], limit: float, measure: Measure, known: Iterable[Trial]
    ) -> None:
        self.limit = limit
        self._measure = measure
        self._costs = {c.name: c for c in _worth(costs)}
        floor = _FLOOR * limit / max(1, len(self._costs))
        self.floored = [replace(c, loss=max(c.loss, 0) + floor) for c in self._costs.values()]
        self._floored = {c.name: c.loss for c in self.floored}
        nothing = Trial(pruned=frozenset(), gain=0.0, predicted=0.0, measured=0.0)
        self.trials = {nothing.pruned: nothing, **{t.pruned: t for t in known}}

    @property
    def best(self) -> Trial:
        """The first of those with the largest gain and the lowest loss that hold."""
        holding = (t for t in self.trials.values() if t.holds(self.limit))
        return max(holding, key=lambda t: (t.gain, -t.measured))

    def try_out(self, pruned: frozenset[str]) -> Trial:
        """Measure a set, once."""
        if pruned not in self.trials:
            self.trials[pruned] = trial_of(self._costs.values(), pruned, self._measure(pruned))
        return self.trials[pruned]

    def first_scale(self) -> float:
        """From the known set whose loss is nearest to the limit."""
        of_use = [t for t in self.trials.values() if t.pruned and 0 < t.measured < math.inf]
        if not of_use:
            return 1.0
        return self.rescaled(1.0, min(of_use, key=lambda t: abs(t.measured - self.limit)))

    def rescaled(self, scale: float, trial: Trial) -> float:
        """Measured over predicted; halved where the set lost nothing, doubled where all is lost."""
        predicted = math.fsum(self._floored.get(name, 0.0) for name in trial.pruned)
        if not math.isfinite(trial.measured):
            return 2 * scale
        if predicted <= 0:
            return scale
        return trial.measured / predicted if trial.measured > 0 else scale / 2

    def take_back(self) -> None:
        """Leave layers of a set that does not hold dense again, the worst first, until it does.

        The worst loses most for what it saves. Twice as many at a time, then half as many: what
        comes out was measured all the same.
        """
        best = self.best
        broken = [t for t in self.trials.values() if not t.holds(self.limit) and t.gain > best.gain]
        if not broken:
            return
        start = min(broken, key=lambda t: (_or_infinite(t.measured), t.gain))
        order = sorted(start.pruned, key=self._worst_first)

        def taken_back(number: int) -> Trial:
            return self.try_out(frozenset(order[number:]))

        low, high = 0, 1
        while high < len(order) and not taken_back(high).holds(self.limit):
            low, high = high, min(2 * high, len(order))
        while high - low > 1:
            middle = (low + high) // 2
            if taken_back(middle).holds(self.limit):
                high = middle
            else:
                low = middle

    def _worst_first(self, name: str) -> tuple[float, int]:
        cost = self._costs.get(name)
        if cost is None:  # of a known set: it saves nothing
            return -math.inf, 0
        return -self._floored[name] / cost.gain, list(self._costs).index(name)


def trial_of(costs: Iterable[Cost], pruned: frozenset[str], measured: float) -> Trial:
    """A measured set, with what its layers save and lose by themselves."""
    there = [c for c in costs if c.name in pruned]
    return Trial(
        pruned=pruned,
        gain=math.fsum(c.gain for c in there),
        predicted=math.fsum(max(c.loss, 0) for c in there),
        measured=measured,
    )


def _worth(costs: Iterable[Cost]) -> list[Cost]:
    return [c for c in costs if c.why_dense is None]


def _names(costs: Iterable[Cost]) -> frozenset[str]:
    return frozenset(c.name for c in costs)


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _solved(
    objective: Sequence[float], parts: np.ndarray, *, low: float, high: float
) -> list[bool]:
    """The 0/1 choice with the lowest objective whose parts add up to between `low` and `high`.

    HiGHS (Huangfu & Hall 2018) works in one thread: the same numbers give the same choice.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    count = len(objective)
    found = milp(
        _UNIT * np.asarray(objective),
        integrality=np.ones(count),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(parts[np.newaxis], low, high),
        options={"mip_rel_gap": 0.0, "node_limit": 100_000},
    )
    if found.x is None:  # the limit of nodes came before any solution
        return [False] * count
    return [bool(x > 0.5) for x in found.x]


def _fitting(chosen: Sequence[bool], costs: Sequence[Cost], limit: float) -> list[bool]:
    """Without what goes beyond the limit by more than rounding: HiGHS allows 1e-6."""
    kept = list(chosen)
    while math.fsum(c.loss for c, yes in zip(costs, kept, strict=True) if yes) > limit * (
        1 + _ROUNDED
    ):
        there = [i for i, yes in enumerate(kept) if yes]
        kept[min(there, key=lambda i: costs[i].gain / costs[i].loss)] = False
    return kept


def _reaching(chosen: Sequence[bool], costs: Sequence[Cost], missing: float) -> list[bool]:
    """With what the gain is short of by more than rounding."""
    taken = list(chosen)
    while math.fsum(c.gain for c, yes in zip(costs, taken, strict=True) if yes) < missing * (
        1 - _ROUNDED
    ):
        left = [i for i, yes in enumerate(taken) if not yes]
        taken[min(left, key=lambda i: costs[i].loss / costs[i].gain)] = True
    return taken


def _first_of_equals(costs: Sequence[Cost], chosen: Sequence[bool]) -> list[Cost]:
    """The chosen ones; of layers with one gain and one loss the first, as many as were chosen."""
    numbers: dict[tuple[float, float], int] = defaultdict(int)
    for cost, yes in zip(costs, chosen, strict=True):
        numbers[cost.gain, cost.loss] += yes
    found = []
    for cost in costs:
        if numbers[cost.gain, cost.loss]:
            numbers[cost.gain, cost.loss] -= 1
            found.append(cost)
    return found
