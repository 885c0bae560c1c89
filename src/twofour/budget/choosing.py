"""Which layers a budget prunes and leaves dense: by what each loses and saves, then by measurement.

Layers are taken in the order of what they lose for what they save. Losses of layers pruned alone do
not add up exactly, so sets are measured: those in this order, then those near the best of them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from twofour.errors import BadInputError, PatternBrokenError
from twofour.pipeline.folder import STAGES
from twofour.pipeline.reporting import SENSITIVITY
from twofour.pipeline.stages import Run
from twofour.records.options import BudgetOptions
from twofour.records.run import LayerCost, SensitivityResult, TakenBack
from twofour.store import read_record, sha256_file, write_record
from twofour.words import count, figure, printable

Measure = Callable[[frozenset[str]], float]
"""Names of what is pruned -> the loss of the whole model, in the unit of the limit."""
Ahead = Callable[[Sequence[frozenset[str]]], object]
"""Measures several sets side by side before `Measure` is asked for each; `len` does nothing."""

MOST_NEARBY = 64
"""Most sets that are measured with several layers changed at once."""
AT_ONCE = 16
"""Sets that are measured side by side before the best one is taken: the same on every machine."""
ROUNDS = 4
"""Rounds of the search; in each, one layer that breaks the limit is left dense."""
_ROUNDED = 1e-9
"""Relative error of a sum that is put down to rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What pruning one layer, or several that are pruned together, saves and loses."""

    name: str
    gain: float
    """What is saved, in any unit; 0 where it is not run sparse."""
    loss: float
    """The loss with this one alone pruned; below 0 where the model improves; NaN: not known."""

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

    def is_within(self, limit: float) -> bool:
        """The measured loss is not above the limit; NaN counts as above."""
        return self.measured <= limit


def least_loss(costs: Sequence[Cost], share: float) -> frozenset[str]:
    """A set that gains at least `share` (0 to 1) of what all would gain, and loses little for it.

    What loses nothing is always in it. Some layers in order and one more that makes the gain large
    enough: of such sets the one that loses least.
    """
    order = _in_order(costs)
    wanted = share * math.fsum(c.gain for c in order) * (1 - _ROUNDED)
    free = [c for c in order if c.loss <= 0]
    saved = math.fsum(c.gain for c in free)
    found = [free] if saved >= wanted else []
    for at in range(len(free), len(order)):
        enough = [c for c in order[at:] if saved + c.gain >= wanted]
        if enough:
            found.append([*order[:at], min(enough, key=lambda c: c.loss)])
        saved += order[at].gain
    best = min(found, key=lambda s: math.fsum(max(c.loss, 0.0) for c in s), default=order)
    return _names(best)


def best_within(
    costs: Sequence[Cost],
    limit: float,
    measure: Measure,
    known: Iterable[Trial] = (),
    ahead: Ahead = len,
) -> tuple[Trial, tuple[Trial, ...]]:
    """The set that saves most among those measured to be within the limit, and all measured sets.

    The first is the empty set, which loses nothing, where no other is within; `known` ones count.
    Everything is tried, then half of the layers in order, and so on until one more would break the
    limit (0 or more). That one is left dense, and of the layers behind it one, two, four, ... are
    tried: mostly no other fits. Then the sets near the best one are tried (`_improved`).
    """
    # Example: layers a to h in order; only sets with d break the limit. Round 1 tries 8, 4, 2 and 3
    # of them: a, b, c are held and d stays dense. Round 2 adds e, then e f, then e f g h: all hold.
    trials = {t.pruned: t for t in (trial_of(costs, frozenset(), 0.0), *known)}
    held: frozenset[str] = frozenset()
    left = _in_order(costs)
    for number in range(ROUNDS):
        low, high = 0, len(left) + 1  # so many are within the limit, so many are not
        at = len(left) if number == 0 else 1
        while high - low > 1:
            tried = held | _names(left[:at])
            if tried not in trials:
                trials[tried] = trial_of(costs, tried, measure(tried))
            low, high = (at, high) if trials[tried].is_within(limit) else (low, at)
            at = (low + high) // 2 if high <= len(left) else min(2 * at, len(left))
        held |= _names(left[:low])
        left = left[high:]
    return _improved(costs, _Goal(limit=limit), trials, measure, ahead), tuple(trials.values())


def best_reaching(
    costs: Sequence[Cost],
    share: float,
    measure: Measure,
    known: Iterable[Trial] = (),
    ahead: Ahead = len,
) -> tuple[Trial, tuple[Trial, ...]]:
    """The set that loses least among those measured that save the share, and all measured sets."""
    first = least_loss(costs, share)
    trials = {t.pruned: t for t in (trial_of(costs, frozenset(), 0.0), *known)}
    trials.setdefault(first, trial_of(costs, first, measure(first)))
    goal = _Goal(wanted=share * math.fsum(c.gain for c in _in_order(costs)) * (1 - _ROUNDED))
    return _improved(costs, goal, trials, measure, ahead), tuple(trials.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Goal:
    """To save most within a limit, or to lose least for at least what is wanted."""

    limit: float | None = None
    wanted: float = 0.0

    def worth(self, trial: Trial) -> tuple[bool, float, float]:
        """The best trial has the highest; one that is not allowed is below every one that is."""
        lost = math.inf if math.isnan(trial.measured) else trial.measured
        if self.limit is None:
            return trial.gain >= self.wanted, -lost, trial.gain
        return trial.is_within(self.limit), trial.gain, -lost

    def nearby(self, best: Trial, costs: Sequence[Cost], changes: int) -> list[frozenset[str]]:
        """Sets with up to so many layers changed that may be better, the most promising first."""
        found = []
        sizes = range(1, changes + 1)
        for changed in (c for size in sizes for c in itertools.combinations(costs, size)):
            signed = [(-1 if c.name in best.pruned else 1, c) for c in changed]
            gain = best.gain + sum(sign * c.gain for sign, c in signed)
            loss = best.measured + sum(sign * max(c.loss, 0.0) for sign, c in signed)
            if self.limit is not None and gain > best.gain * (1 + _ROUNDED):
                found.append((max(loss - self.limit, 0.0), -gain, changed))
            elif self.limit is None and gain >= self.wanted:
                found.append((loss, -gain, changed))
        return [best.pruned ^ _names(c) for *_, c in sorted(found, key=lambda item: item[:2])]


def _improved(
    costs: Sequence[Cost],
    goal: _Goal,
    trials: dict[frozenset[str], Trial],
    measure: Measure,
    ahead: Ahead,
) -> Trial:
    """The best of the trials, once no set near it is measured to be better.

    Near it are additions, removals and exchanges of up to three layers, MOST_NEARBY of them at
    most; then those of one layer, at most as many as there are layers.
    """
    worth = _in_order(costs)
    several = 3 if len(worth) <= MOST_NEARBY else 2  # 100 layers have 161,700 sets of three
    for changes, most in ((several, MOST_NEARBY), (1, len(worth))):
        for begun in range(0, most, AT_ONCE):
            best = max(trials.values(), key=goal.worth)
            near = [s for s in goal.nearby(best, worth, changes) if s not in trials]
            near = near[: min(most - begun, AT_ONCE)]
            ahead(near)
            trials.update({s: trial_of(costs, s, measure(s)) for s in near})
    return max(trials.values(), key=goal.worth)


def trial_of(costs: Iterable[Cost], pruned: frozenset[str], measured: float) -> Trial:
    """A measured set, with what its layers save and lose by themselves."""
    there = [c for c in costs if c.name in pruned]
    return Trial(
        pruned=pruned,
        gain=math.fsum(c.gain for c in there),
        predicted=math.fsum(max(c.loss, 0) for c in there),
        measured=measured,
    )


def _in_order(costs: Iterable[Cost]) -> list[Cost]:
    """Those that are worth a choice; first what loses least for what it saves, of equals the first.

    A loss below 0 counts as 0: what one layer seems to win pays for no other.
    """
    worth = [c for c in costs if c.why_dense is None]
    return sorted(worth, key=lambda c: (max(c.loss, 0.0) / c.gain, -c.gain))


def _names(costs: Iterable[Cost]) -> frozenset[str]:
    return frozenset(c.name for c in costs)


_TAKEN_BACK = f"{STAGES}/taken-back.json"
_Figures = tuple[Mapping[str, float], Mapping[str, float]]
"""The user's figures of the dense model, and of the pruned one."""


def figure_of(budget: BudgetOptions, metrics: Mapping[str, float]) -> str | None:
    """Which of the user's figures counts, the first where nothing depends on it; None without any.

    Raises BadInputError for one that the metric does not give, and where --max-drop has to be of
    one of several.
    """
    names = list(metrics)
    listed = ", ".join(map(printable, names))
    if budget.figure is not None and budget.figure not in names:
        raise BadInputError(
            f"the metric gives no figure {budget.figure!r}",
            hint=f"it gives {listed}" if names else "name the metric with --metric",
        )
    if budget.figure is None and budget.max_drop is not None and len(names) > 1:
        raise BadInputError(
            f"the metric gives {len(names)} figures: {listed}",
            hint=f"say which may fall: --max-drop {printable(names[0])}={budget.max_drop:g}",
        )
    return budget.figure if budget.figure is not None else next(iter(names), None)


def drop_of(
    budget: BudgetOptions,
    name: str | None,
    dense: Mapping[str, float],
    pruned: Mapping[str, float],
) -> float:
    """How much worse a figure is than that of the dense model; NaN where it is missing."""
    if name is None or name not in dense or name not in pruned:
        return math.nan
    before, after = dense[name], pruned[name]
    return after - before if budget.lower_is_better else before - after


def leave_dense(run: Run, chosen: SensitivityResult, figures_of: Callable[[Run], _Figures]) -> Run:
    """The run with the layers excluded that the budget leaves dense.

    With --max-drop, `figures_of` prunes, exports and measures the model that comes out: where it
    drops further than the sets that chose it, more layers are left dense, the worst first, twice
    as many each time. Raises PatternBrokenError where none is left to prune, and BadInputError
    where none saves anything.
    """
    if chosen.no_gain is not None:
        option = "--gpu" if chosen.forecast else "--profile"
        hint = f"leave {option} out to prune all the same, for savings in multiply-adds"
        raise BadInputError(chosen.no_gain, hint=hint)
    limit = run.options.budget.max_drop
    if limit is None:
        return _leaving(run, chosen, ())
    order = _worst_first(chosen)
    if not order:
        known = [r for r in chosen.layers if r.loss is not None and r.why_dense is None]
        least = min(known, key=lambda r: r.loss or 0.0, default=None)
        raise no_layer_within(chosen, least, None if least is None else least.loss)
    taken, choice = 0, sha256_file(run.file(SENSITIVITY))
    with contextlib.suppress(BadInputError):  # an earlier run of the same choice took layers back
        kept = read_record(TakenBack, run.file(_TAKEN_BACK))
        taken = min(kept.layers, len(order) - 1) if kept.chosen == choice else 0
    while True:
        found = _leaving(run, chosen, order[:taken])
        drop = drop_of(run.options.budget, chosen.figure, *figures_of(found))
        if drop <= limit:
            return found
        if taken >= len(order) - 1:  # the next would leave all of them dense
            raise no_layer_within(chosen, order[-1], drop)
        taken = min(len(order) - 1, max(1, 2 * taken))
        write_record(run.file(_TAKEN_BACK), TakenBack(chosen=choice, layers=taken))
        run.progress.note(
            f"the pruned model loses {figure(drop)}, {figure(limit) or 0} is allowed: "
            f"{count(sum(len(row.members) for row in order[:taken]), 'layer')} more left dense"
        )


def _leaving(run: Run, chosen: SensitivityResult, more: Iterable[LayerCost]) -> Run:
    """The run with the layers excluded that the budget leaves dense, and these."""
    taken = {row.layer for row in more}
    whole = sum(row.saves for row in chosen.layers if row.why_dense is None)
    said_by = dict(run.options.selection.said_by)
    for row in chosen.layers:
        if row.alone is None or (row.pruned and row.layer not in taken):
            continue
        lost = "" if row.loss is None else f"it loses {figure(row.loss) or 0} alone and "
        part = 100 * row.saves / whole if whole else 0.0
        saved = f"{lost}saves{chosen.forecast} {part:.1f} % of what all could" if whole else ""
        for glob in row.globs:
            said_by.setdefault(glob, f"the budget: {row.why_dense or saved}")
    selection = run.options.selection
    new = [glob for glob in said_by if glob not in selection.said_by]
    selection = replace(selection, exclude=(*selection.exclude, *new), said_by=said_by)
    return replace(run, options=replace(run.options, selection=selection))


def _worst_first(chosen: SensitivityResult) -> Sequence[LayerCost]:
    """Layers that the budget prunes; those that lose most for what they save come first."""

    def worth(row: LayerCost) -> tuple[float, float]:
        moved = (row.alone and row.alone.outputs) or 0.0
        return -max(row.loss or 0.0, 0.0) / row.saves, -moved / row.saves

    return sorted((row for row in chosen.layers if row.pruned and row.saves > 0), key=worth)


def no_layer_within(
    chosen: SensitivityResult, row: LayerCost | None, drop: float | None
) -> PatternBrokenError:
    """The error for a limit within which no layer can be pruned, not even this one alone."""
    assert chosen.budget is not None
    why = (
        f"; with {printable(row.layer)} alone pruned the model loses {figure(drop)}" if row else ""
    )
    calibrated = any(row.output_error is not None for row in chosen.layers)
    data = "" if calibrated else "prune with calibration data (--calibrate), "
    return PatternBrokenError(
        f"no layer can be pruned within --max-drop {chosen.budget.asked.max_drop:g}{why}",
        hint=f"allow more, {data}or train with `twofour finetune`",
    )
