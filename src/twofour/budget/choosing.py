"""Which layers a budget prunes and leaves dense: by what each loses and saves, then by measurement.

Losses of layers pruned alone do not add up exactly, so sets are measured: some layers in the order
of what they lose for what they save, then sets that differ from the best ones in a layer or two.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

from twofour.errors import BadInputError, PatternBrokenError
from twofour.pipeline.folder import STAGES
from twofour.pipeline.reporting import SENSITIVITY
from twofour.pipeline.stages import Run
from twofour.records import frozen
from twofour.records.options import BudgetOptions
from twofour.records.run import LayerCost, SensitivityResult, TakenBack
from twofour.reports.pruning_document import in_order_of_worth
from twofour.store import read_record, sha256_file, write_record
from twofour.words import count, figure, printable

Measure = Callable[[Sequence[frozenset[str]]], Sequence[float]]
"""Sets, by the names of what is pruned -> the loss of the whole model with each."""

AT_ONCE = 16
"""Sets that are measured side by side before the next are chosen: the same on every machine."""
FIRST = 8
"""Sets that are measured first, in equal steps of what can be saved."""
STEPS = 4
"""How often sets near the best ones are measured."""
_ROUNDED = 1e-9
"""Relative error of a sum that is put down to rounding."""


@frozen
class Cost:
    """What pruning one layer, or several that are pruned together, saves and loses."""

    name: str
    gain: float
    """What is saved, in any unit; 0 where it is not run sparse."""
    loss: float
    """The loss with this one alone pruned; below 0 where the model improves; NaN: not known."""

    @property
    def counted(self) -> float:
        """The loss, those below 0 as 0: what one layer wins pays for no other."""
        return max(self.loss, 0.0)


@frozen
class TriedSet:
    """One set that was measured."""

    pruned: frozenset[str]
    gain: float
    predicted: float
    """Sum of the losses alone, as they count."""
    measured: float
    """The loss; infinite where it is not known."""


Worth = Callable[[TriedSet], tuple[float, float, float]]
"""The best trial has the highest."""


class SetSearch:
    """Sets of layers, each measured once, and the best of them for a budget."""

    def __init__(self, costs: Iterable[Cost], measure: Measure) -> None:
        """What saves nothing, or loses nobody knows how much, is left out."""
        choices = [cost for cost in costs if cost.gain > 0 and math.isfinite(cost.loss)]
        # first what loses least for what it saves; of equal ones the larger
        self.order = sorted(choices, key=lambda cost: (cost.counted / cost.gain, -cost.gain))
        self.possible = _gain(self.order)
        """What all of them save together."""
        self._measure = measure
        self.trials = {frozenset[str](): self._trial((), 0.0)}

    def measured(self, sets: Iterable[frozenset[str]]) -> list[TriedSet]:
        """These sets, measured side by side where they are new."""
        asked = list(sets)
        new = [pruned for pruned in dict.fromkeys(asked) if pruned not in self.trials]
        for pruned, loss in zip(new, self._measure(new), strict=True):
            self.trials[pruned] = self._trial(pruned, math.inf if math.isnan(loss) else loss)
        return [self.trials[pruned] for pruned in asked]

    def first_sets(self) -> list[TriedSet]:
        """Sets that save from little to all, each once."""
        shares = (part / FIRST for part in range(1, FIRST + 1))
        return self.measured(dict.fromkeys(map(self.least_loss, shares)))

    def least_loss(self, share: float) -> frozenset[str]:
        """A set that gains at least `share` (0 to 1) of what all would gain, and loses little.

        From the end of the order, each layer stays dense without which the others gain enough.
        """
        # gains 9, 9 and 2 in this order: half of all takes the first two, 0.9 too, 0.1 the first
        pruned = list(self.order)
        for cost in reversed(self.order):
            others = [other for other in pruned if other is not cost]
            if cost.counted > 0 and _gain(others) >= self._wanted(share):
                pruned = others
        return _names(pruned)

    def best_within(self, limit: float) -> TriedSet:
        """The set that saves most among those measured to lose no more than the limit (0 or more).

        It is the empty set, which loses nothing, where no other is within.
        """
        return self._best(
            lambda trial: (min(limit - trial.measured, 0.0), trial.gain, -trial.measured)
        )

    def best_reaching(self, share: float) -> TriedSet:
        """The set that loses least among those measured that save the share."""
        wanted = self._wanted(share)
        return self._best(
            lambda trial: (min(trial.gain - wanted, 0.0), -trial.measured, trial.gain)
        )

    def _best(self, worth: Worth) -> TriedSet:
        """The best of the trials, after sets near the best ones were measured STEPS times."""
        self.first_sets()
        for _ in range(STEPS):
            best_first = sorted(self.trials.values(), key=worth, reverse=True)
            # near the second where nothing is left near the best
            near = (self._near(trial, worth) for trial in best_first)
            self.measured(next(filter(None, near), []))
        return max(self.trials.values(), key=worth)

    def _near(self, best: TriedSet, worth: Worth) -> list[frozenset[str]]:
        """New sets with one or two layers changed that would be better if they lost nothing.

        They are the best ones if layers lose together what they lose alone.
        """
        near = []
        for changed in chain(combinations(self.order, 1), combinations(self.order, 2)):
            trial = self._trial(best.pruned ^ _names(changed), 0.0)
            if trial.pruned not in self.trials and worth(trial) > worth(best):
                expected = best.measured + trial.predicted - best.predicted
                near.append(replace(trial, measured=expected))
        near.sort(key=worth, reverse=True)
        return [trial.pruned for trial in near[:AT_ONCE]]

    def _trial(self, pruned: Collection[str], measured: float) -> TriedSet:
        costs = [cost for cost in self.order if cost.name in pruned]
        predicted = math.fsum(cost.counted for cost in costs)
        return TriedSet(
            pruned=frozenset(pruned), gain=_gain(costs), predicted=predicted, measured=measured
        )

    def _wanted(self, share: float) -> float:
        return share * self.possible * (1 - _ROUNDED)


def _gain(costs: Iterable[Cost]) -> float:
    return math.fsum(cost.gain for cost in costs)


def _names(costs: Iterable[Cost]) -> frozenset[str]:
    return frozenset(cost.name for cost in costs)


# --- the user's figures ---------------------------------------------------------------------------


_TAKEN_BACK = f"{STAGES}/taken-back.json"


def figure_of(budget: BudgetOptions, metrics: Mapping[str, float]) -> str | None:
    """Which of the user's figures counts, the first where nothing depends on it; None without any.

    Raises BadInputError for one that the metric does not give, and where --max-drop has to be of
    one of several.
    """
    names = list(metrics)
    listed = ", ".join(map(printable, names))
    if budget.figure is not None:
        if budget.figure not in names:
            raise BadInputError(
                f"the metric gives no figure {budget.figure!r}",
                hint=f"it gives {listed}" if names else "name the metric with --metric",
            )
        return budget.figure
    if budget.max_drop is not None and len(names) > 1:
        raise BadInputError(
            f"the metric gives {len(names)} figures: {listed}",
            hint=f"say which may fall: --max-drop {printable(names[0])}={budget.max_drop:g}",
        )
    return next(iter(names), None)


def drop_of(
    budget: BudgetOptions,
    name: str | None,
    dense: Mapping[str, float],
    pruned: Mapping[str, float],
) -> float:
    """How much worse a figure is than that of the dense model; NaN where it is missing."""
    if name is None or name not in dense or name not in pruned:
        return math.nan
    drop = dense[name] - pruned[name]
    return -drop if budget.lower_is_better else drop


# --- the layers that the budget leaves dense ------------------------------------------------------


def leave_dense(run: Run, chosen: SensitivityResult, lost_in: Callable[[Run], float]) -> Run:
    """The run with the layers excluded that the budget leaves dense.

    With --max-drop, `lost_in` prunes, exports and measures the model that comes out: where that
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
    worst_first = reversed(in_order_of_worth(chosen))
    order = [row for row in worst_first if row.pruned]
    if order:
        return _within(limit, order, run, chosen, lost_in)
    measured = [row for row in chosen.layers if row.loss is not None and row.why_dense is None]
    least = min(measured, key=lambda row: row.loss or 0.0, default=None)
    raise no_layer_within(chosen, least, None if least is None else least.loss)


def _within(
    limit: float,
    order: Sequence[LayerCost],
    run: Run,
    chosen: SensitivityResult,
    lost_in: Callable[[Run], float],
) -> Run:
    """The run with as many of the first of `order` left dense as the limit needs."""
    # of 12 layers 0, 1, 2, 4, 8 and 11 are tried: with 12 nothing would be pruned
    most = len(order) - 1
    choice = sha256_file(run.file(SENSITIVITY))
    taken = _taken_before(run, choice)
    while True:
        tried = _leaving(run, chosen, order[:taken])
        drop = lost_in(tried)
        if drop <= limit:
            return tried
        if taken == most:
            raise no_layer_within(chosen, order[-1], drop)
        taken = min(max(1, 2 * taken), most)
        write_record(run.file(_TAKEN_BACK), TakenBack(chosen=choice, layers=taken))
        more = sum(len(row.members) for row in order[:taken])
        run.progress.note(
            f"the pruned model loses {figure(drop)}, {figure(limit) or 0} is allowed: "
            f"{count(more, 'layer')} more left dense"
        )


def _taken_before(run: Run, choice: str) -> int:
    """How many layers an earlier run of the same choice took back."""
    with contextlib.suppress(BadInputError):
        before = read_record(TakenBack, run.file(_TAKEN_BACK))
        if before.chosen == choice:
            return before.layers
    return 0


def _leaving(run: Run, chosen: SensitivityResult, more: Iterable[LayerCost]) -> Run:
    """The run with the layers excluded that the budget leaves dense, and these."""
    taken = {row.layer for row in more}
    selection = run.options.selection
    said_by = dict(selection.said_by)
    for row in chosen.layers:
        stays = not row.pruned or row.layer in taken
        if row.alone is not None and stays:
            why = f"the budget: {row.why_dense or _what_it_costs(row, chosen)}"
            said_by = dict.fromkeys(row.globs, why) | said_by
    new = [glob for glob in said_by if glob not in selection.said_by]
    selection = replace(selection, exclude=(*selection.exclude, *new), said_by=said_by)
    return replace(run, options=replace(run.options, selection=selection))


def _what_it_costs(row: LayerCost, chosen: SensitivityResult) -> str:
    possible = sum(other.saves for other in chosen.layers if other.why_dense is None)
    part = 100 * row.saves / possible
    saves = f"saves{chosen.forecast} {part:.1f} % of what all could"
    return f"it loses {figure(row.loss) or 0} alone and {saves}"


def no_layer_within(
    chosen: SensitivityResult, row: LayerCost | None, drop: float | None
) -> PatternBrokenError:
    """The error for a limit within which no layer can be pruned, not even this one alone."""
    assert chosen.budget is not None
    why = ""
    if row is not None:
        why = f"; with {printable(row.layer)} alone pruned the model loses {figure(drop)}"
    is_calibrated = any(row.output_error is not None for row in chosen.layers)
    data = "" if is_calibrated else "prune with calibration data (--calibrate), "
    return PatternBrokenError(
        f"no layer can be pruned within --max-drop {chosen.budget.asked.max_drop:g}{why}",
        hint=f"allow more, {data}or train with `twofour finetune`",
    )
