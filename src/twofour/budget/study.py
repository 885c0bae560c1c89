"""The stage `sensitivity`: every layer alone, sets of them, and what the budget chooses.

Everything is pruned once, in a folder of its own inside the run folder; a set of layers is
dense.onnx with the constants of those layers from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from twofour.budget.choosing import (
    Cost,
    Trial,
    fall,
    figure_of,
    least_lost,
    trial_of,
    within,
)
from twofour.budget.measurer import MEASURED_ON
from twofour.budget.savings import Savings, Unit, find_savings, find_units, read_times
from twofour.budget.sets import (
    FOLDER,
    Places,
    Sets,
    apart,
    open_sets,
    prune_everything,
    union,
)
from twofour.errors import BadInputError, BuildFailedError
from twofour.pipeline.checks import check, metric_key
from twofour.pipeline.reporting import SENSITIVITY
from twofour.pipeline.stages import DENSE, PRUNE, SPARSE, Made, Run, Stage, onnx_files, onnx_name
from twofour.pruning.selection import LAYER_LIST, layer_list
from twofour.records.options import BudgetOptions, LossKind
from twofour.records.run import (
    BudgetResult,
    ExportedVariant,
    LayerCost,
    PrunedSet,
    SensitivityResult,
)
from twofour.records.weights import PruneResult
from twofour.reports import html, markdown
from twofour.reports.sensitivity_document import in_order_of_worth, loss_words, sensitivity_document
from twofour.store import write_text

MARKDOWN, HTML = "sensitivity.md", "sensitivity.html"
STEPS = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Shares of the possible saving at which a set is measured for the table."""

_FITTED_TOGETHER = (
    "the weights of each layer are those of a run that pruned all of them, fitted to what the "
    "pruned layers before give: among dense ones a layer may lose more or less than it would. "
    "prune-export-build --max-drop measures the model that comes out"
)


def sensitivity(run: Run, dense: ExportedVariant) -> SensitivityResult:
    """sensitivity.json with its pages and list, done where it has to be, as is all it rests on.

    Raises BadInputError for a budget that does not fit the metric, a metric that fails, and a model
    that cannot be run here, and BuildFailedError for one that ends ONNX Runtime's process.
    """
    checked = run.do(check(run, dense))  # before everything is pruned, which may take hours
    if checked.outputs is None:
        why = f"what layers lose cannot be measured: {checked.not_compared}"
        raise BuildFailedError(why) if checked.failed_tries else BadInputError(why)
    figure_of(run.options.budget, checked.metrics)
    profile = run.options.budget.profile
    times = None if profile is None else read_times(Path(profile))
    with apart(run) as own:
        pruned, layers, note = prune_everything(own, dense)

        watched: dict[str, str] = {}
        is_lasting = True

        def work() -> Made[SensitivityResult]:
            nonlocal is_lasting
            models = (own.models.open(own.file(onnx_name(v))) for v in (DENSE, SPARSE))
            siblings = run.options.budget.siblings
            units = find_units(pruned.weights, layers, *models, siblings=siblings)
            savings = find_savings(own, pruned, layers, units, times)
            with open_sets(own, lambda done, of: run.progress.step("measured", done, of)) as sets:
                study = _Study(pruned, run.options.budget, sets, units, savings)
                found = study.result(() if note is None else (note,))
            watched.update(sets.watched)
            is_lasting = sets.is_lasting
            document = sensitivity_document(found)
            write_text(run.file(MARKDOWN), markdown.render(document))
            write_text(run.file(HTML), html.render(document))
            write_text(run.file(LAYER_LIST), _layer_list(found))
            return found, (LAYER_LIST, MARKDOWN, HTML)

        inside = [*onnx_files(own.file(onnx_name(SPARSE))), MEASURED_ON, PRUNE]
        dense_files = onnx_files(run.file(onnx_name(DENSE)))
        return run.do(
            Stage(
                name="sensitivity",
                title="measure what each layer loses",
                record=SENSITIVITY,
                kind=SensitivityResult,
                work=work,
                watched=lambda: [Path(name) for name in watched],
                lasting=lambda _: is_lasting,
                depends_on=(
                    *(run.options.budget, run.options.seed, run.key_of(run.source)),
                    *(metric_key(run.options), times),
                ),
                packages=("numpy",),
                reads=(*(f"{FOLDER}/{name}" for name in inside), *dense_files),
            )
        )


def _layer_list(result: SensitivityResult) -> str:
    """What stays dense; where nothing was chosen the rest as comments, the dearest first."""
    head = [
        f"Layers of {result.source} that stay dense; prune-export-build --layers takes this file.",
        f"Loss: {loss_words(result)}.",
    ]
    rows = in_order_of_worth(result)
    dense = [r for r in rows if r.pruned is False or r.why_dense is not None]
    lines = [(glob, _why_left(r)) for r in reversed(dense) if r.alone for glob in r.globs]
    text = layer_list(head, lines)
    if result.budget is not None:
        return text
    left = [r for r in reversed(rows) if r not in dense]
    others = layer_list((), [(glob, _why_left(r)) for r in left for glob in r.globs])
    offered = "".join(f"# {line}\n" for line in others.splitlines())
    return f"{text}#\n# Could stay dense, what loses most for what it saves first:\n{offered}"


def _why_left(row: LayerCost) -> str:
    if row.why_dense is not None:
        return row.why_dense
    return f"loses {row.loss:.3g} alone"


# --- the study ------------------------------------------------------------------------------------


class _Study:
    """What is known of the layers so far; each step adds to it."""

    def __init__(
        self,
        pruned: PruneResult,
        budget: BudgetOptions,
        sets: Sets,
        units: Sequence[Unit],
        savings: Savings,
    ) -> None:
        self.pruned, self.budget, self.sets = pruned, budget, sets
        self.units, self.savings = units, savings
        self.wanted = [u for u in units if u.pruned and u.nodes]
        self.places = {unit.name: unit.places for unit in units}

    def result(self, notes: tuple[str, ...]) -> SensitivityResult:
        """Measure, choose, and put it together."""
        self.sets.measure([()])
        self.dense = self.sets.found[()]
        self.figure = figure_of(self.budget, self.dense.metrics)
        default = LossKind.OUTPUTS if self.figure is None else LossKind.METRIC
        self.loss = self.budget.loss or default
        everything = union([u.places for u in self.wanted])
        self.sets.measure([everything, *(u.places for u in self.wanted)])
        self.costs = self._costs(everything)
        pareto = self._pareto()
        chosen = self._chosen(pareto)
        fitted = () if self.pruned.calibration is None else (_FITTED_TOGETHER,)
        return SensitivityResult(
            source=self.pruned.source,
            pattern=self.pruned.pattern,
            method=self.pruned.method,
            loss=self.loss,
            figure=self.figure,
            unit=self.savings.unit,
            dense=self.dense,
            layers=tuple(self._row(unit, chosen) for unit in self.units),
            pareto=tuple(map(self._set, pareto)),
            budget=chosen,
            notes=(*self.savings.notes, *notes, *fitted),
        )

    # --- losses -----------------------------------------------------------------------------------

    def _lost(self, kind: LossKind, places: Places) -> float:
        """How far the metric falls or the outputs move with these pruned; NaN: not known."""
        measured = self.sets.found[places]
        if measured.error is not None:
            return math.nan
        if kind is LossKind.METRIC:
            return fall(self.budget, self.figure, self.dense.metrics, measured.metrics)
        return math.nan if measured.outputs is None else measured.outputs

    def _lost_by_set(self, places: Places) -> float:
        """By what a model with several layers pruned is judged: a limit is of the metric."""
        return self._lost(
            LossKind.METRIC if self.budget.max_drop is not None else self.loss, places
        )

    def _costs(self, everything: Places) -> tuple[Cost, ...]:
        """What is chosen from: losses alone, and a share of what only shows when all is pruned.

        A metric of few samples sees nothing of most layers alone: what all of them lose together
        beyond the sum is spread over them as the outputs move.
        """
        alone = {u.name: self._lost(self.loss, u.places) for u in self.wanted}
        moved = {u.name: self._lost(LossKind.OUTPUTS, u.places) for u in self.wanted}
        moved = {name: x if math.isfinite(x) else 0.0 for name, x in moved.items()}
        whole = self._lost_by_set(everything) if self.wanted else 0.0
        counted = math.fsum(max(x, 0.0) for x in alone.values() if math.isfinite(x))
        total = math.fsum(moved.values())
        is_other = self.loss is LossKind.OUTPUTS and self.budget.max_drop is not None
        if is_other and counted > 0 and whole > 0:
            alone = {name: x * whole / counted for name, x in alone.items()}
            counted = whole
        excess = max(0.0, whole - counted) if math.isfinite(whole) else 0.0
        spread = excess / total if total > 0 else 0.0
        return tuple(
            Cost(name=name, gain=self.savings.of.get(name, 0.0), loss=loss + spread * moved[name])
            for name, loss in alone.items()
        )

    # --- sets -------------------------------------------------------------------------------------

    def _places_of(self, pruned: Iterable[str]) -> Places:
        return union([self.places[name] for name in pruned])

    def _loss_of(self, pruned: frozenset[str]) -> float:
        places = self._places_of(pruned)
        self.sets.measure([places])
        return self._lost_by_set(places) if pruned else 0.0

    def _pareto(self) -> list[Trial]:
        sets = dict.fromkeys(least_lost(self.costs, share) for share in STEPS)
        self.sets.measure(self._places_of(pruned) for pruned in sets)
        return [trial_of(self.costs, s, self._loss_of(s)) for s in sets if s]

    def _chosen(self, known: Sequence[Trial]) -> BudgetResult | None:
        asked = self.budget
        trials: tuple[Trial, ...] = ()
        if asked.share is not None:
            pruned = least_lost(self.costs, asked.share)
            best = trial_of(self.costs, pruned, self._loss_of(pruned))
        elif asked.max_drop is not None:
            best, trials = within(self.costs, asked.max_drop, self._loss_of, known)
        else:
            return None
        tried = tuple(self._set(t) for t in trials if t.pruned)
        return BudgetResult(asked=asked, chosen=self._set(best), trials=tried)

    def _set(self, trial: Trial) -> PrunedSet:
        worth = [c for c in self.costs if c.why_dense is None]
        whole = math.fsum(c.gain for c in worth)
        return PrunedSet(
            layers=len(trial.pruned),
            saves=trial.gain,
            share=trial.gain / whole if whole else 0.0,
            predicted=trial.predicted,
            loss=trial.measured if math.isfinite(trial.measured) else None,
            measured=self.sets.found[self._places_of(trial.pruned)],
            dense=tuple(c.name for c in worth if c.name not in trial.pruned),
        )

    def _row(self, unit: Unit, chosen: BudgetResult | None) -> LayerCost:
        loss = self._lost(self.loss, unit.places) if unit in self.wanted else math.nan
        why = self._why_dense(unit, loss)
        return LayerCost(
            layer=unit.name,
            members=unit.members,
            globs=unit.globs,
            saves=self.savings.of.get(unit.name, 0.0) if unit.pruned else 0.0,
            alone=self.sets.found[unit.places] if unit in self.wanted else None,
            output_error=next((r.output_error for r in unit.rows if r.output_error), None),
            loss=loss if math.isfinite(loss) else None,
            why_dense=why,
            pruned=None if chosen is None else why is None and unit.name not in chosen.chosen.dense,
        )

    def _why_dense(self, unit: Unit, loss: float) -> str | None:
        if not unit.pruned:
            reasons = [r for row in unit.rows for r in row.reasons]
            return f"{reasons[0].code.value}: {reasons[0].message}" if reasons else "not pruned"
        if not unit.nodes:
            return "no node of the exported graph uses it"
        gain = self.savings.of.get(unit.name, 0.0)
        if gain <= 0 and unit.name in self.savings.why_not:
            return self.savings.why_not[unit.name]
        error = self.sets.found[unit.places].error
        why = Cost(name=unit.name, gain=gain, loss=loss).why_dense
        return why if error is None else f"{why}: {error}"
