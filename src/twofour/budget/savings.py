"""What is pruned or left dense together, and what that saves: time, forecast, or multiply-adds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from math import fsum, prod
from pathlib import Path

from twofour.eligibility.totals import SPARSE_SPEEDUP, multiply_adds, uncounted
from twofour.errors import BadInputError
from twofour.forecasting import gpus
from twofour.forecasting.model_forecast import saved_ms
from twofour.graph.mixture import changed_places
from twofour.graph.opened import OpenedModel
from twofour.pipeline.evidence_files import EvidenceFiles
from twofour.pipeline.folder import INPUTS, SPARSE
from twofour.pipeline.reporting import forecast_file, report_files, report_folder
from twofour.pipeline.stages import Run
from twofour.pruning.selection import glob_of
from twofour.records import frozen
from twofour.records.eligibility import ShareUnit, Verdict
from twofour.records.export import GraphNode, LayerMap, LayerName
from twofour.records.forecast import ForecastCell, GpuKind
from twofour.records.weights import PrunedWeight, PruneResult
from twofour.words import count


@frozen
class PruningUnit:
    """Weights that are pruned together, or not at all: users of one array, siblings."""

    rows: tuple[PrunedWeight, ...]
    names: tuple[str, ...]
    """One for each of the weights: its layer, or itself where the layer has several."""
    nodes: tuple[str, ...]
    """Labels of the nodes in the graph; () for layers that were not exported."""
    places: tuple[int, ...]
    """The constants that pruning changed, as `Mixture` counts them."""

    @property
    def name(self) -> str:
        """The name of the first weight."""
        return self.names[0]

    @property
    def globs(self) -> tuple[str, ...]:
        """What leaves its weights dense."""
        return tuple(dict.fromkeys(map(glob_of, self.names)))

    @property
    def taken(self) -> tuple[str, ...]:
        """The names of those that pruning takes."""
        named = zip(self.names, self.rows, strict=True)
        return tuple(dict.fromkeys(name for name, row in named if row.pruned))

    @property
    def members(self) -> tuple[str, ...]:
        """Their layers."""
        return tuple(dict.fromkeys(row.weight.layer for row in self.rows))


def find_units(
    rows: Sequence[PrunedWeight],
    layers: LayerMap,
    dense: OpenedModel,
    sparse: OpenedModel,
    *,
    siblings: bool,
) -> tuple[PruningUnit, ...]:
    """The weights of prune.json in units, in its order.

    Both files are exports of one model, before and after. With `siblings`, matrix products of one
    tensor (q, k and v) are one unit: TensorRT fuses them, and sparse are all or none.
    """
    exports = _exports(rows, layers)
    inputs = _inputs_of_products(dense) if siblings else {}
    changed = changed_places(dense, sparse)
    names = _names(rows)
    units = []
    for members in _joined(map(_shared, rows, exports, repeat(inputs))):
        exported = chain.from_iterable(exports[at] for at in members)
        nodes = tuple(dict.fromkeys(layer.node for layer in exported))
        places = chain.from_iterable(changed.get(node, ()) for node in nodes)
        unit = PruningUnit(
            rows=tuple(rows[at] for at in members),
            names=tuple(names[at] for at in members),
            nodes=nodes,
            places=tuple(sorted(set(places))),
        )
        units.append(unit)
    return tuple(units)


def _exports(rows: Sequence[PrunedWeight], layers: LayerMap) -> list[list[LayerName]]:
    """What each row became in the graph."""
    by_parameter: dict[str | None, list[LayerName]] = defaultdict(list)
    for layer in layers.layers:
        by_parameter[layer.parameter].append(layer)
    return [by_parameter[row.weight.weight or row.weight.layer] for row in rows]


def _names(rows: Sequence[PrunedWeight]) -> list[str]:
    """The layer of each row, or its weight where the layer has several, or no name (one layer)."""
    weights_in = Counter(row.weight.layer for row in rows)
    names = []
    for row in rows:
        layer, weight = row.weight.layer, row.weight.weight
        is_alone = weights_in[layer] == 1 and layer != ""
        names.append(layer if is_alone or weight is None else weight)
    return names


def _shared(
    row: PrunedWeight, exports: Sequence[LayerName], inputs: Mapping[str, str]
) -> set[object]:
    """What the row may share with others: its array, and one of `inputs`, by node."""
    weight = row.weight
    shared: set[object] = {("initializer", layer.initializer) for layer in exports}
    # two layers that name each other share this pair
    shared.update(frozenset({weight.layer, other}) for other in weight.tied_to)
    shared.update(inputs[layer.node] for layer in exports if inputs.get(layer.node))
    return shared


def _inputs_of_products(model: OpenedModel) -> dict[str, str]:
    """The tensor that its weight is multiplied with, for the label of each product."""
    products = {weight.node for weight in model.weights().weights}
    inputs = {}
    for node in model.nodes:
        if node.op in ("MatMul", "Gemm") and node.label in products:
            computed = (name for name in node.inputs if name and name not in node.constants)
            inputs[node.label] = next(computed, "")
    return inputs


def _joined(shared: Iterable[set[object]]) -> list[list[int]]:
    """Numbers of the rows in groups that share something, in the order of their first members."""
    # Example: rows with {a}, {b}, {a, c} and {c} are the groups [0, 2, 3] and [1]
    groups: list[tuple[list[int], set[object]]] = []
    for at, own in enumerate(shared):
        joined = ([at], own)
        for group in [group for group in groups if group[1] & own]:
            groups.remove(group)
            joined = (group[0] + joined[0], group[1] | joined[1])
        groups.append(joined)
    return sorted(sorted(members) for members, _ in groups)


# --- what a unit saves ----------------------------------------------------------------------------


TimesSaved = Mapping[str, float]
"""Dense minus sparse milliseconds, by node or layer."""
_FORECAST = (
    "what a layer saves is a forecast for {}, at the sizes of the example inputs or --shapes: "
    "nothing was measured there (--profile uses the times of a build)"
)
_ASSUMED = (
    "a layer that can use sparse kernels counts as saving half of its multiply-adds: an upper "
    "bound, not a time (--profile uses the times of a build)"
)


@frozen
class Savings:
    """What each unit saves, by its name; 0 where it cannot run sparse."""

    unit: ShareUnit
    of: Mapping[str, float]
    why_not: Mapping[str, str]
    """Why a unit saves nothing."""
    notes: tuple[str, ...] = ()


def find_savings(
    run: Run,
    pruned: PruneResult,
    layers: LayerMap,
    units: Sequence[PruningUnit],
    times: TimesSaved | None,
) -> Savings:
    """Savings from the times that the user names, else a forecast for --gpu, else multiply-adds.

    Where the rules let no layer run sparse at all (float32, another pattern), what is saved is the
    number of zeros.
    """
    if times is not None:
        return _savings_of_times(units, run.options.budget.profile or "", times)
    return _savings_by_rules(run, pruned, layers, units)


def _savings_by_rules(
    run: Run, pruned: PruneResult, layers: LayerMap, units: Sequence[PruningUnit]
) -> Savings:
    gpu = None if run.options.gpu is None else gpus.gpu_named(run.options.gpu)
    files = EvidenceFiles(onnx=run.onnx(SPARSE), inputs=run.file(INPUTS))
    judged = report_files(files, layers, gpu=None if gpu is None else gpu.as_gpu, pruned=pruned)
    verdicts = {row.node: row for row in judged.report.verdicts if row.node is not None}
    why_not = _why_not(units, verdicts)
    if len(why_not) == len(units) and any(unit.taken for unit in units):
        return _zeros(units, why_not[units[0].name])
    if gpu is None:
        gains, notes = _multiply_adds(verdicts, judged.evidence().nodes)
        of = _of_units(units, verdicts, gains)
        return Savings(unit=ShareUnit.MULTIPLY_ADDS, of=of, why_not=why_not, notes=notes)
    whole = forecast_file(files, layers, gpu.name, pruned)
    return _savings_of_forecast(whole, _of_units(units, verdicts, _forecast(run, gpu)), why_not)


def _forecast(run: Run, gpu: GpuKind) -> dict[str | None, float]:
    model = run.opened(SPARSE)
    return saved_ms(model, run.asked_shapes(model), gpu)


def _of_units(
    units: Sequence[PruningUnit], verdicts: Mapping[str, Verdict], gains: Mapping[str | None, float]
) -> dict[str, float]:
    """What each unit gains in the nodes that can run sparse; 0 where it is not pruned."""
    of = dict.fromkeys((unit.name for unit in units), 0.0)
    for unit in units:
        if unit.taken:
            nodes = [node for node in unit.nodes if _is_usable(node, verdicts)]
            of[unit.name] = fsum(gains.get(node, 0.0) for node in nodes)
    return of


def _is_usable(node: str, verdicts: Mapping[str, Verdict]) -> bool:
    return node in verdicts and verdicts[node].verdict.is_usable


def _why_not(units: Sequence[PruningUnit], verdicts: Mapping[str, Verdict]) -> dict[str, str]:
    """Why no node of a unit can run sparse, for the units of which none can."""
    why_not = {}
    for unit in units:
        if any(_is_usable(node, verdicts) for node in unit.nodes):
            continue
        there = [verdicts[node] for node in unit.nodes if node in verdicts]
        reason = next(chain.from_iterable(verdict.reasons for verdict in there), None)
        if reason is None:
            why_not[unit.name] = "no node of the exported graph uses it"
        else:
            why_not[unit.name] = f"{reason.code.value}: {reason.message}"
    return why_not


def _savings_of_forecast(
    whole: ForecastCell, of: Mapping[str, float], why_not: Mapping[str, str]
) -> Savings:
    gpu = whole.gpu
    notes = [
        f"forecast for {whole.name}, all layers pruned: {whole.in_words}",
        _FORECAST.format(gpu),
    ]
    if not any(of.values()):
        notes.insert(0, f"by the forecast no layer gains on {gpu}")
    no_gain = dict.fromkeys(of, f"forecast: no gain on {gpu}")
    return Savings(
        unit=ShareUnit.FORECAST, of=of, why_not={**no_gain, **why_not}, notes=tuple(notes)
    )


def _zeros(units: Sequence[PruningUnit], why: str) -> Savings:
    """The number of zeros, where the rules let no layer run sparse."""
    zeros = {}
    for unit in units:
        arrays = {row.weight.weight: row for row in unit.rows if row.pruned}
        zeros[unit.name] = float(sum(row.zeros for row in arrays.values()))
    note = f"TensorRT runs none of these layers sparse ({why}): what is saved is zeros"
    return Savings(unit=ShareUnit.WEIGHTS, of=zeros, why_not={}, notes=(note,))


def _multiply_adds(
    verdicts: Mapping[str, Verdict], nodes: Iterable[GraphNode]
) -> tuple[dict[str | None, float], tuple[str, ...]]:
    """Multiply-adds that each node saves for one sample, and notes on what is assumed."""
    by_label = {node.label: node for node in nodes}
    saved: dict[str | None, float] = {}
    unknown = []
    for label, verdict in verdicts.items():
        number = None
        if label in by_label:
            number = multiply_adds(verdict, by_label[label])
        if number is None:
            unknown.append(verdict.layer)
            number = prod(verdict.shape)
        saved[label] = number / SPARSE_SPEEDUP
    if not unknown:
        return saved, (_ASSUMED,)
    return saved, (_ASSUMED, f"{uncounted(unknown)}: each of their weights counts as one")


# --- times of a build -----------------------------------------------------------------------------


def read_times_saved(path: Path) -> dict[str, float]:
    """Dense minus sparse milliseconds, by node, else by layer, in the folder of a build.

    They are times of the fastest tactics, where the builder timed both. Layers that are one in the
    engine (q, k and v) were timed once: each has an equal part. Raises BadInputError without any.
    """
    timed = []
    for verdict in report_folder(path).report.verdicts:
        if verdict.sparse_ms is not None and verdict.dense_ms is not None:
            both = (verdict.dense_ms, verdict.sparse_ms)
            timed.append((verdict, both))
    if not timed:
        raise BadInputError(
            f"--profile {path}: no layer there has times of a dense and a sparse kernel",
            hint="they come from the verbose log of a TensorRT build with sparse weights allowed",
        )
    together = Counter((verdict.engine_layer, both) for verdict, both in timed)
    saved = {}
    for verdict, (dense_ms, sparse_ms) in timed:
        parts = 1
        if verdict.engine_layer is not None:
            parts = together[verdict.engine_layer, (dense_ms, sparse_ms)]
        saved[verdict.node or verdict.layer] = (dense_ms - sparse_ms) / parts
    return saved


def _savings_of_times(units: Sequence[PruningUnit], source: str, times: TimesSaved) -> Savings:
    """What the build's times say; raises BadInputError where it knows no layer."""
    saved = {}
    for unit in units:
        names = {*unit.nodes, *unit.members, *(row.weight.weight for row in unit.rows)}
        timed = times.keys() & names
        if timed:
            saved[unit.name] = fsum(times[name] for name in timed)
    if not saved:
        raise BadInputError(
            f"--profile {source}: none of its {count(len(times), 'layer')} is in this model",
            hint="name the folder of a TensorRT build of this model",
        )
    of = dict.fromkeys((unit.name for unit in units), 0.0)
    why_not = {}
    for unit in units:
        if unit.name not in saved:
            why_not[unit.name] = f"{source} has no times of it"
        elif saved[unit.name] <= 0:
            why_not[unit.name] = "its sparse kernel is no faster"
        elif unit.taken:
            of[unit.name] = saved[unit.name]
    notes = () if any(of.values()) else (f"by the times of --profile {source} no layer gains",)
    return Savings(unit=ShareUnit.MILLISECONDS, of=of, why_not=why_not, notes=notes)
