"""The stage `sensitivity`: what each layer loses and saves, and which layers the budget prunes.

It runs behind the export of dense.onnx. Everything is pruned once, in a folder of its own inside
the run folder; a set of layers is dense.onnx with the constants of those layers from there. The
main job then prunes again with the layers left dense that `choosing` leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

from twofour.budget.choosing import Cost, SetSearch, TriedSet, drop_of, figure_of
from twofour.budget.measuring import (
    MEASURED_ON,
    OneAfterAnother,
    Places,
    SetMeasurements,
    Workers,
    open_workers,
)
from twofour.budget.savings import (
    PruningUnit,
    Savings,
    TimesSaved,
    find_savings,
    find_units,
    read_times_saved,
)
from twofour.errors import BadInputError, BuildFailedError
from twofour.inputs.fits import Arrays, save_arrays
from twofour.pipeline.checks import check_variant, held_out_inputs, lost_without_data, metric_key
from twofour.pipeline.folder import (
    DENSE,
    HELD_OUT,
    INPUTS,
    PRUNE,
    SPARSE,
    onnx_files,
    onnx_name,
    open_run_folder,
    remove_data,
)
from twofour.pipeline.reporting import SENSITIVITY
from twofour.pipeline.stages import Run, Runner, Stage, StageOutput
from twofour.pipeline.validating import validate_weights
from twofour.pruning.selection import LAYER_LIST, layer_list
from twofour.records.export import LayerMap
from twofour.records.options import BudgetOptions, LossKind
from twofour.records.run import (
    BudgetResult,
    ExportedVariant,
    LayerCost,
    PrunedSet,
    SensitivityResult,
)
from twofour.records.weights import PrunedModel, PruneResult, shared
from twofour.reports.html import write_pages
from twofour.reports.pruning_document import in_order_of_worth, sensitivity_document
from twofour.sources.user_code import Held, parse_reference
from twofour.store import link_or_copy, write_text
from twofour.words import count

FOLDER = "sensitivity"
"""Folder of everything pruned, inside the run folder."""
Everything = tuple[PruneResult, LayerMap]
"""The model with all pruned that may be."""
PAGES = "sensitivity.md", "sensitivity.html"
_FITTED_TOGETHER = (
    "each layer's weights were fitted after the pruned layers before it; if those stay dense, its "
    "loss may differ. prune-export-build --max-drop measures the final model"
)


def sensitivity(run: Run, dense: ExportedVariant) -> SensitivityResult:
    """sensitivity.json with its pages and the layer list, made where anything has changed.

    Raises BadInputError for a budget that does not fit the metric, a metric that fails, and a model
    that cannot be run here, and BuildFailedError for one that ends ONNX Runtime's process.
    """
    open_workers(run.options.side_by_side)  # which says where Ray is missing
    checked = run.do(check_variant(run, dense))  # before everything is pruned, which may take hours
    if checked.outputs is None:
        why = f"what layers lose cannot be measured: {checked.not_compared}"
        raise BuildFailedError(why) if checked.failed_tries else BadInputError(why)
    budget = run.options.budget
    figure_of(budget, checked.metrics)
    times = None if budget.profile is None else read_times_saved(Path(budget.profile))
    with _in_own_folder(run) as own:
        pruned = _prune_everything(own, dense)
        return run.do(_study(run, own, pruned, times))


def _study(
    run: Run,
    own: Run,
    everything: Everything,
    times: TimesSaved | None,
) -> Stage[SensitivityResult]:
    """sensitivity.json with its pages and the layer list."""
    is_lasting = True

    def work() -> StageOutput[SensitivityResult]:
        nonlocal is_lasting
        result, is_lasting = _result(own, everything, times)
        write_pages(run.path, PAGES, sensitivity_document(result))
        write_text(run.file(LAYER_LIST), _layer_list(result))
        return result, (LAYER_LIST, *PAGES)

    options = run.options
    dense = onnx_files(run.onnx(DENSE))
    own_files = [*onnx_files(own.onnx(SPARSE)), INPUTS, PRUNE]
    if held_out_inputs(own):
        own_files.append(HELD_OUT)
    return Stage(
        name="sensitivity",
        title="measure what each layer loses",
        record=SENSITIVITY,
        kind=SensitivityResult,
        work=work,
        lasting=lambda _: is_lasting,
        depends_on=(
            *(options.budget, options.seed, run.key_of(run.source), options.gpu),
            *(options.calibration, run.calibration_key(), metric_key(options), times),
        ),
        reads=(*(f"{FOLDER}/{name}" for name in own_files), *dense),
    )


def _result(
    own: Run, everything: Everything, times: TimesSaved | None
) -> tuple[SensitivityResult, bool]:
    """The study, and whether it is lasting: a measurement may fail for a passing reason."""
    pruned, layers = everything
    budget = own.options.budget
    arrays, note = _arrays(own)
    save_arrays(own.file(MEASURED_ON), arrays)
    dense = own.opened(DENSE)
    sparse = own.opened(SPARSE)
    units = find_units(pruned.weights, layers, dense, sparse, siblings=budget.siblings)
    savings = find_savings(own, pruned, layers, units, times)
    with _open_measurements(own) as sets:
        study = _Study(pruned, budget, sets, units, savings)
        return study.result(note), sets.is_lasting


@contextmanager
def _in_own_folder(run: Run) -> Iterator[Run]:
    """The same run in a folder of its own."""
    path = run.path / FOLDER
    with open_run_folder(path, run.runner.folder.manifest.source) as folder:
        runner = Runner(folder, run.progress, resume=run.options.resume)
        shown = run.shown / FOLDER
        yield replace(run, path=path, shown=shown, runner=runner)
        runner.say_kept()


def _prune_everything(run: Run, dense: ExportedVariant) -> Everything:
    """sparse.onnx with all pruned that may be, beside links to dense.onnx and the inputs."""
    outer = run.path.parent
    remove_data(run.onnx(DENSE))
    for name in (*onnx_files(outer / onnx_name(DENSE)), INPUTS):
        link_or_copy(outer / name, run.path / name)
    pruned = run.model.prune(run)
    run.do(validate_weights(run, pruned, run.model.weights(run)))
    return pruned, run.model.export_sparse(run, dense).layers


def _arrays(run: Run) -> tuple[Arrays, str]:
    """The arrays, the number of the run before each name, and a sentence on what they are."""
    held_out = held_out_inputs(run)
    if held_out:
        return held_out, "outputs are compared on held-out calibration samples"
    examples = {f"0:{name}": array for name, array in run.example_inputs().items()}
    rows = next((len(a) for a in examples.values() if a.ndim), 1)
    return examples, f"outputs are compared on the example inputs ({count(rows, 'row')})"


@contextmanager
def _open_measurements(run: Run) -> Iterator[SetMeasurements]:
    """Measurements for the folder of a run with dense.onnx, sparse.onnx and the inputs."""
    metric = run.options.metric
    opening: AbstractContextManager[Workers] = open_workers(run.options.side_by_side)
    if isinstance(metric, Held):
        opening = nullcontext(OneAfterAnother(run.sessions))
    elif metric is not None and (file := parse_reference(metric).file) is not None:
        metric = f"{file}:{metric.rpartition(':')[2]}"  # ~ may be another folder on a node
    with opening as workers:
        yield SetMeasurements(
            folder=run.path,
            metric=metric,
            seed=run.options.seed,
            workers=workers,
            step=lambda done, total: run.progress.step("measured", done, total),
        )


def _layer_list(result: SensitivityResult) -> str:
    """What stays dense; where nothing was chosen the rest as comments, the dearest first."""
    dense: list[tuple[str, str]] = []
    others: list[tuple[str, str]] = []
    for row in reversed(in_order_of_worth(result)):
        if row.alone is None:
            continue
        stays = row.pruned is False or row.why_dense is not None
        why = row.why_dense or f"loses {row.loss:.3g} alone"
        lines = dense if stays else others
        lines.extend((glob, why) for glob in row.globs)
    loss = "output error" if result.loss is LossKind.OUTPUTS else f"fall of {result.figure}"
    head = [
        f"Layers of {result.source} that stay dense; prune-export-build --layers takes this file.",
        f"Loss: {loss}.",
    ]
    if not dense:
        default = "None is named: those that stay dense do so by default (see sensitivity.md)."
        head.append(result.no_gain or default)
    text = layer_list(head, dense)
    if result.budget is None and others:
        text += "#\n# Could stay dense, what loses most for what it saves first:\n"
        text += "".join(f"# {line}\n" for line in layer_list((), others).splitlines())
    return text


# --- the study ------------------------------------------------------------------------------------


class _Study:
    """What is known of the layers so far; each step adds to it."""

    def __init__(
        self,
        pruned: PruneResult,
        budget: BudgetOptions,
        sets: SetMeasurements,
        units: Sequence[PruningUnit],
        savings: Savings,
    ) -> None:
        self.pruned = pruned
        self.budget = budget
        self.sets = sets
        self.units = {unit.name: unit for unit in units}
        self.savings = savings
        self.wanted: list[PruningUnit] = []
        if any(savings.of.values()):  # else no loss matters
            self.wanted = [unit for unit in units if unit.taken and unit.nodes]

    def result(self, note: str) -> SensitivityResult:
        """Measure, choose, and put it together; `note` says what the outputs are compared on."""
        self._measure_alone()
        pareto = [self._set(trial) for trial in self.search.first_sets() if trial.pruned]
        chosen = self._chosen()
        fitted = _FITTED_TOGETHER if self.pruned.calibration else lost_without_data(self.pruned)
        return SensitivityResult(
            **shared(self.pruned, PrunedModel),
            loss=self.loss,
            figure=self.figure,
            unit=self.savings.unit,
            dense=self.dense,
            layers=tuple(self._row(unit, chosen) for unit in self.units.values()),
            pareto=tuple(pareto),
            budget=chosen,
            notes=(*self.savings.notes, *filter(None, (note, fitted))),
        )

    # --- losses -----------------------------------------------------------------------------------

    def _measure_alone(self) -> None:
        """Nothing pruned, each layer, and everything: what the search begins with."""
        self.sets.measure([()])
        self.dense = self.sets.measurements[()]
        self.figure = figure_of(self.budget, self.dense.metrics)
        default = LossKind.OUTPUTS if self.figure is None else LossKind.METRIC
        self.loss = self.budget.loss or default
        everything = self._places_of(unit.name for unit in self.wanted)
        self.sets.measure([everything, *(unit.places for unit in self.wanted)])
        self.search = SetSearch(self._costs(everything), self._losses_of)
        self.search.measured(frozenset({cost.name}) for cost in self.search.order)

    def _lost(self, kind: LossKind, places: Places) -> float:
        """How far the metric drops or the outputs move with these pruned; NaN: not known."""
        measured = self.sets.measurements[places]
        if kind is LossKind.METRIC:
            return drop_of(self.budget, self.figure, self.dense.metrics, measured.metrics)
        return math.nan if measured.outputs is None else measured.outputs

    def _lost_by_set(self, places: Places) -> float:
        """The loss of a model with several layers pruned; a limit is one of the metric."""
        kind = self.loss if self.budget.max_drop is None else LossKind.METRIC
        return self._lost(kind, places)

    def _costs(self, everything: Places) -> list[Cost]:
        """What is chosen from: losses alone, and a share of what only shows when all is pruned.

        A metric of few samples sees nothing of most layers alone: what all of them lose together
        beyond the sum is spread over them as the outputs move.
        """
        # Example: alone, layers a and b lose 0 and 1 points and move the outputs by 0.1 and 0.3;
        # together they lose 5. The 4 points beyond the sum are spread 1 to 3: a costs 1, b costs 4.
        alone = {unit.name: self._lost(self.loss, unit.places) for unit in self.wanted}
        moved = {u.name: self.sets.measurements[u.places].outputs or 0.0 for u in self.wanted}
        if self.loss is LossKind.OUTPUTS and self.budget.max_drop is not None:
            # outputs have another unit than the limit: all that the metric loses is spread
            alone = {name: 0.0 * loss for name, loss in alone.items()}
        together = self._lost_by_set(everything)
        counted = math.fsum(max(loss, 0.0) for loss in alone.values() if math.isfinite(loss))
        total = math.fsum(moved.values())
        spread = 0.0
        if math.isfinite(together) and total > 0:
            spread = max(0.0, together - counted) / total
        return [
            Cost(name=name, gain=self.savings.of[name], loss=loss + spread * moved[name])
            for name, loss in alone.items()
        ]

    # --- sets -------------------------------------------------------------------------------------

    def _places_of(self, pruned: Iterable[str]) -> Places:
        places = chain.from_iterable(self.units[name].places for name in pruned)
        return tuple(sorted(set(places)))

    def _losses_of(self, sets: Iterable[frozenset[str]]) -> list[float]:
        places = [self._places_of(pruned) for pruned in sets]
        self.sets.measure(places)
        return [self._lost_by_set(place) for place in places]

    def _chosen(self) -> BudgetResult | None:
        if self.budget.share is not None:
            best = self.search.best_reaching(self.budget.share)
        elif self.budget.max_drop is not None:
            best = self.search.best_within(self.budget.max_drop)
        else:
            return None
        trials = tuple(self._set(t) for t in self.search.trials.values() if t.pruned)
        return BudgetResult(asked=self.budget, chosen=self._set(best), trials=trials)

    def _set(self, trial: TriedSet) -> PrunedSet:
        possible = self.search.possible
        others = (cost.name for cost in self.search.order if cost.name not in trial.pruned)
        dense = chain.from_iterable(self.units[name].taken for name in others)
        return PrunedSet(
            layers=sum(len(self.units[name].taken) for name in trial.pruned),
            saves=trial.gain,
            share=trial.gain / possible if possible else 0.0,
            predicted=trial.predicted,
            loss=_known(trial.measured),
            measured=self.sets.measurements[self._places_of(trial.pruned)],
            dense=tuple(dense),
        )

    def _row(self, unit: PruningUnit, chosen: BudgetResult | None) -> LayerCost:
        alone = None
        loss = math.nan
        if unit in self.wanted:
            alone = self.sets.measurements[unit.places]
            loss = self._lost(self.loss, unit.places)
        why = self._why_dense(unit, loss)
        pruned = None
        if chosen is not None:
            pruned = why is None and unit.taken[0] not in chosen.chosen.dense
        errors = (row.output_error for row in unit.rows)
        return LayerCost(
            layer=unit.name,
            members=unit.members,
            globs=unit.globs,
            saves=self.savings.of[unit.name],
            alone=alone,
            output_error=next(filter(None, errors), None),
            loss=_known(loss),
            why_dense=why,
            pruned=pruned,
        )

    def _why_dense(self, unit: PruningUnit, loss: float) -> str | None:
        if not unit.taken:
            reasons = chain.from_iterable(row.reasons for row in unit.rows)
            first = next(reasons, None)
            return "not pruned" if first is None else f"{first.code.value}: {first.message}"
        if not unit.nodes:
            return "no node of the exported graph uses it"
        if self.savings.of[unit.name] <= 0:
            return self.savings.why_not.get(unit.name, "pruning it saves nothing")
        if math.isfinite(loss):
            return None
        error = self.sets.measurements[unit.places].error
        return "what pruning it loses could not be measured" + (f": {error}" if error else "")


def _known(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
