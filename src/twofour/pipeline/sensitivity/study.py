"""The stage `sensitivity`: every layer alone, sets of them, and what the budget chooses.

Everything is pruned once, in a folder of its own inside the run folder; a set of layers is
dense.onnx with the constants of those layers from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from twofour.errors import BadInputError, BuildFailedError
from twofour.pipeline.checks import check, metric_key
from twofour.pipeline.layer_lists import LAYER_LIST, layer_list
from twofour.pipeline.reporting import SENSITIVITY
from twofour.pipeline.sensitivity.choosing import fall, figure_of
from twofour.pipeline.sensitivity.everything import FOLDER, Apart, apart, prune_everything
from twofour.pipeline.sensitivity.fisher import fisher_of
from twofour.pipeline.sensitivity.layer_times import LayerTimes, read_times
from twofour.pipeline.sensitivity.measured_on import MEASURED_ON
from twofour.pipeline.sensitivity.savings import Savings, find_savings
from twofour.pipeline.sensitivity.sets import Places, Sets, open_sets, union
from twofour.pipeline.sensitivity.units import Unit, find_units
from twofour.pipeline.stages import (
    DENSE,
    PRUNE,
    SPARSE,
    Made,
    Run,
    Stage,
    onnx_files,
    onnx_name,
    versions,
)
from twofour.pipeline.workers import may_pass
from twofour.pruning.budget import Cost, Trial, least_lost, trial_of, within
from twofour.records.options import BudgetOptions, LossKind
from twofour.records.run import ExportedVariant
from twofour.records.sensitivity import (
    BudgetResult,
    LayerCost,
    Measured,
    PrunedSet,
    SensitivityResult,
)
from twofour.reports import html, markdown
from twofour.reports.sensitivity_document import (
    in_order_of_worth,
    loss_words,
    sensitivity_document,
)
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
    """sensitivity.json, done where it has to be: the files in the folder `sensitivity` as well.

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
    with apart(run) as own_run:
        pruned = prune_everything(own_run, dense)
        return run.do(_stage(run, pruned, times))


def _stage(run: Run, everything: Apart, times: LayerTimes | None) -> Stage[SensitivityResult]:
    budget = run.options.budget
    watched: dict[str, str] = {}
    passing: list[str] = []

    def work() -> Made[SensitivityResult]:
        with open_sets(
            everything.run, lambda done, of: run.progress.step("measured", done, of)
        ) as sets:
            found = _Study(everything, budget, sets, times).result()
        watched.update(sets.watched)
        passing.extend(n for n in found.notes if may_pass(n))
        passing.extend([] if sets.is_lasting else ["a measurement"])
        write_sensitivity(run.path, found)
        return found, (LAYER_LIST, MARKDOWN, HTML)

    inside = [*onnx_files(everything.run.file(onnx_name(SPARSE))), MEASURED_ON, PRUNE]
    return Stage(
        name="sensitivity",
        title="measure what each layer loses",
        record=SENSITIVITY,
        kind=SensitivityResult,
        work=work,
        watched=lambda: [Path(name) for name in watched],
        lasting=lambda _: not passing,
        options=("budget", "metric", "seed"),
        facts={
            "source": run.source.key(),
            "metric": metric_key(run.options),
            "profile": times,
            "fisher": run.model is not None and versions("torch"),
        },
        packages=("numpy", "scipy"),
        reads=(*(f"{FOLDER}/{name}" for name in inside), *onnx_files(run.file(onnx_name(DENSE)))),
    )


def write_sensitivity(folder: Path, result: SensitivityResult) -> None:
    """layers.txt, sensitivity.md and sensitivity.html."""
    document = sensitivity_document(result)
    write_text(folder / MARKDOWN, markdown.render(document))
    write_text(folder / HTML, html.render(document))
    write_text(folder / LAYER_LIST, _layer_list(result))


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
        self, apart: Apart, budget: BudgetOptions, sets: Sets, times: LayerTimes | None
    ) -> None:
        self.apart, self.budget, self.sets = apart, budget, sets
        models = apart.run.models
        dense = models.open(apart.run.file(onnx_name(DENSE)))
        sparse = models.open(apart.run.file(onnx_name(SPARSE)))
        rows = apart.pruned.weights
        self.times = times
        self.units = find_units(rows, apart.layers, dense, sparse, siblings=budget.siblings)
        self.places = {unit.name: unit.places for unit in self.units}
        self.notes: list[str] = []

    def result(self) -> SensitivityResult:
        """Measure, choose, and put it together."""
        self.savings = self._savings()
        self.sets.measure([()])
        self.figure = figure_of(self.budget, self._measured(()).metrics)
        self.loss = self.budget.loss or self._default_loss()
        self.whole = self._loss_of_sets()
        everything = tuple(u for u in self.units if u.pruned)
        self.sets.measure([union([u.places for u in everything]), *(u.places for u in everything)])
        self.fisher = self._fisher()
        costs = self._costs()
        pareto = self._pareto(costs)
        chosen = self._chosen(costs, pareto)
        return SensitivityResult(
            source=self.apart.pruned.source,
            pattern=self.apart.pruned.pattern,
            method=self.apart.pruned.method,
            loss=self.loss,
            figure=self.figure,
            unit=self.savings.unit,
            dense=self._measured(()),
            layers=self._rows(chosen),
            pareto=tuple(self._set(t, costs) for t in pareto),
            budget=chosen,
            notes=(
                *self.savings.notes,
                *self.notes,
                *filter(None, (self.apart.note,)),
                *((_FITTED_TOGETHER,) if self.apart.pruned.calibration is not None else ()),
            ),
        )

    def _savings(self) -> Savings:
        run, pruned = self.apart.run, self.apart.pruned
        return find_savings(run, pruned, self.apart.layers, self.units, self.times)

    def _measured(self, places: Places) -> Measured:
        return self.sets.found[places]

    def _default_loss(self) -> LossKind:
        return LossKind.OUTPUTS if self.figure is None else LossKind.METRIC

    def _loss_of_sets(self) -> LossKind:
        """By what a model with several layers pruned is judged: a limit is of the metric."""
        if self.budget.max_drop is not None:
            return LossKind.METRIC
        of_one_layer = self.loss in (LossKind.FISHER, LossKind.LAYER)
        return self._default_loss() if of_one_layer else self.loss

    # --- losses -----------------------------------------------------------------------------------

    def _fisher(self) -> Mapping[str, float]:
        """By unit; none for an ONNX file, and where torch gives no gradient."""
        run = self.apart.run
        if run.model is None:
            return {}
        try:
            return fisher_of(run, [u for u in self.units if u.pruned])
        except RuntimeError as error:
            self.notes.append(f"no Fisher scores: {str(error).splitlines()[0]}")
            return {}

    def _alone(self, unit: Unit) -> float:
        """What a unit loses alone; NaN where that is not known."""
        if not unit.pruned or not unit.nodes:
            return math.nan
        if self.loss is LossKind.FISHER:
            return self._fisher_of(unit)
        if self.loss is LossKind.LAYER:
            return self._output_error(unit)
        return self._measured_loss(self.loss, unit.places)

    def _fisher_of(self, unit: Unit) -> float:
        return self.fisher.get(unit.name, math.nan)

    def _output_error(self, unit: Unit) -> float:
        found = [row.output_error.judged for row in unit.rows if row.output_error is not None]
        return math.fsum(found) if found else math.nan

    def _measured_loss(self, kind: LossKind, places: Places) -> float:
        """Of the model with these pruned: how far the metric falls, or how the outputs move."""
        measured = self._measured(places)
        if measured.error is not None:
            return math.nan
        if kind is LossKind.METRIC:
            dense = self._measured(()).metrics
            return fall(self.budget, self.figure, dense, measured.metrics)
        outputs = measured.outputs
        found = None if outputs is None else outputs.kl if kind is LossKind.KL else outputs.error
        return math.nan if found is None else found

    def _costs(self) -> tuple[Cost, ...]:
        """What is chosen from: losses alone, and a share of what only shows when all is pruned.

        A metric of few samples sees nothing of most layers alone: what all of them lose together
        beyond the sum is spread over them as the outputs move.
        """
        wanted = [u for u in self.units if u.pruned and u.nodes]
        alone = {u.name: self._alone(u) for u in wanted}
        everything = union([u.places for u in wanted])
        whole = self._measured_loss(self.whole, everything) if wanted else 0.0
        counted = math.fsum(max(x, 0.0) for x in alone.values() if math.isfinite(x))
        moved = {u.name: self._moved(u) for u in wanted}
        total = math.fsum(moved.values())
        if self.loss is not self.whole and counted > 0 and whole > 0:
            alone = {name: x * whole / counted for name, x in alone.items()}
            counted = whole
        excess = max(0.0, whole - counted) if math.isfinite(whole) else 0.0
        spread = excess / total if total > 0 else 0.0
        return tuple(
            Cost(
                name=u.name,
                gain=self.savings.of.get(u.name, 0.0),
                loss=alone[u.name] + spread * moved[u.name],
            )
            for u in wanted
        )

    def _moved(self, unit: Unit) -> float:
        outputs = self._measured(unit.places).outputs
        return 0.0 if outputs is None or not math.isfinite(outputs.error) else outputs.error

    # --- sets -------------------------------------------------------------------------------------

    def _places_of(self, pruned: frozenset[str]) -> Places:
        return union([self.places[name] for name in pruned])

    def _loss_of(self, pruned: frozenset[str]) -> float:
        self.sets.measure([self._places_of(pruned)])
        return self._measured_loss(self.whole, self._places_of(pruned)) if pruned else 0.0

    def _pareto(self, costs: Sequence[Cost]) -> list[Trial]:
        sets = dict.fromkeys(least_lost(costs, share) for share in STEPS)
        self.sets.measure(self._places_of(pruned) for pruned in sets)
        return [trial_of(costs, pruned, self._loss_of(pruned)) for pruned in sets if pruned]

    def _chosen(self, costs: Sequence[Cost], known: Sequence[Trial]) -> BudgetResult | None:
        asked = self.budget
        if asked.share is not None:
            pruned = least_lost(costs, asked.share)
            trial = trial_of(costs, pruned, self._loss_of(pruned))
            return BudgetResult(asked=asked, chosen=self._set(trial, costs), trials=())
        if asked.max_drop is None:
            return None
        outcome = within(costs, asked.max_drop, self._loss_of, known=known)
        return BudgetResult(
            asked=asked,
            chosen=self._set(outcome.best, costs),
            trials=tuple(self._set(t, costs) for t in outcome.trials if t.pruned),
        )

    def _set(self, trial: Trial, costs: Sequence[Cost]) -> PrunedSet:
        whole = math.fsum(c.gain for c in costs if c.why_dense is None)
        return PrunedSet(
            layers=len(trial.pruned),
            saves=trial.gain,
            share=trial.gain / whole if whole else 0.0,
            predicted=trial.predicted,
            loss=trial.measured if math.isfinite(trial.measured) else None,
            measured=self._measured(self._places_of(trial.pruned)),
            dense=tuple(
                c.name for c in costs if c.why_dense is None and c.name not in trial.pruned
            ),
        )

    def _rows(self, chosen: BudgetResult | None) -> tuple[LayerCost, ...]:
        return tuple(self._row(unit, chosen) for unit in self.units)

    def _row(self, unit: Unit, chosen: BudgetResult | None) -> LayerCost:
        loss = self._alone(unit)
        why = self._why_dense(unit, loss)
        first = next((r for r in unit.rows if r.output_error is not None), unit.rows[0])
        fisher = self._fisher_of(unit)
        left = None if chosen is None else why is None and unit.name not in chosen.chosen.dense
        return LayerCost(
            layer=unit.name,
            members=unit.members,
            globs=unit.globs,
            saves=self.savings.of.get(unit.name, 0.0) if unit.pruned else 0.0,
            alone=self._measured(unit.places) if unit.pruned and unit.nodes else None,
            output_error=first.output_error,
            fisher=fisher if math.isfinite(fisher) else None,
            loss=loss if math.isfinite(loss) else None,
            why_dense=why,
            pruned=left,
        )

    def _why_dense(self, unit: Unit, loss: float) -> str | None:
        if not unit.pruned:
            reasons = [r for row in unit.rows for r in row.reasons]
            return f"{reasons[0].code.value}: {reasons[0].message}" if reasons else "not pruned"
        if not unit.nodes:
            return "no node of the exported graph uses it"
        cost = Cost(name=unit.name, gain=self.savings.of.get(unit.name, 0.0), loss=loss)
        if cost.gain <= 0 and unit.name in self.savings.why_not:
            return self.savings.why_not[unit.name]
        error = self._measured(unit.places).error
        return cost.why_dense if error is None else f"{cost.why_dense}: {error}"
