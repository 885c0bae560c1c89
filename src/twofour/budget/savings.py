"""What is pruned or left dense together, and what that saves: time, forecast, or multiply-adds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import fsum, prod
from pathlib import Path

from twofour.eligibility.totals import SPARSE_SPEEDUP, multiply_adds, uncounted
from twofour.errors import BadInputError
from twofour.forecasting import gpus
from twofour.forecasting.model_forecast import times_of_nodes
from twofour.graph.mixture import changed_places
from twofour.graph.opened import OpenedModel
from twofour.pipeline.evidence_files import EvidenceFiles
from twofour.pipeline.folder import INPUTS, SPARSE, onnx_name
from twofour.pipeline.reporting import report_files, report_folder
from twofour.pipeline.stages import Run
from twofour.pruning.selection import glob_of
from twofour.records.eligibility import ShareUnit, Verdict, VerdictName
from twofour.records.export import GraphNode, LayerMap, LayerName
from twofour.records.forecast import GpuKind
from twofour.records.weights import PrunedWeight, PruneResult
from twofour.words import count


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningUnit:
    """Weights that are pruned together, or not at all: users of one array, siblings."""

    name: str
    """Layer of the first weight, or the weight itself where the layer has several."""
    rows: tuple[PrunedWeight, ...]
    globs: tuple[str, ...]
    """One for each of the weights."""
    nodes: tuple[str, ...]
    """Labels of the nodes in the graph; () for layers that were not exported."""
    places: tuple[int, ...]
    """The constants that pruning changed, as `Mixture` counts them."""
    names: tuple[str, ...]
    """Those that pruning takes, each named as the unit would be by itself."""

    @property
    def pruned(self) -> bool:
        """Whether pruning everything takes any of them."""
        return any(row.pruned for row in self.rows)

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
    exported: dict[str | None, list[LayerName]] = defaultdict(list)
    for name in layers.layers:
        exported[name.parameter].append(name)
    of_row = [exported[row.weight.weight or row.weight.layer] for row in rows]
    changed = changed_places(dense, sparse)
    names = Counter(row.weight.layer for row in rows)
    units = []
    for members in _joined(_shared(rows, of_row, dense, siblings=siblings)):
        there = tuple(rows[i] for i in members)
        exports = chain.from_iterable(of_row[i] for i in members)
        labels = tuple(dict.fromkeys(name.node for name in exports))
        unit = PruningUnit(
            name=_name(there[0], names),
            rows=there,
            globs=tuple(dict.fromkeys(glob_of(_name(row, names)) for row in there)),
            nodes=labels,
            names=tuple(dict.fromkeys(_name(row, names) for row in there if row.pruned)),
            places=tuple(sorted(set().union(*(changed.get(label, ()) for label in labels)))),
        )
        units.append(unit)
    return tuple(units)


def _name(row: PrunedWeight, names: Mapping[str, int]) -> str:
    """The layer, or its weight where the layer has several, or no name: a model of one layer."""
    weight = row.weight
    by_layer = names[weight.layer] == 1 and weight.layer != ""
    return weight.layer if by_layer or weight.weight is None else weight.weight


def _shared(
    rows: Sequence[PrunedWeight],
    of_row: Sequence[Sequence[LayerName]],
    model: OpenedModel,
    *,
    siblings: bool,
) -> Iterator[set[object]]:
    """For each row what it may share with others: its array, and with `siblings` its input."""
    inputs = _inputs_of_products(model) if siblings else {}
    for row, exported in zip(rows, of_row, strict=True):
        weight = row.weight
        arrays = {("initializer", name.initializer) for name in exported}
        if weight.weight is not None:
            arrays.add(("key", weight.weight))
        # a pair that name each other
        tied = {frozenset({weight.layer, other}) for other in weight.tied_to}
        yield {*arrays, *tied, *(inputs[n.node] for n in exported if inputs.get(n.node))}


def _inputs_of_products(model: OpenedModel) -> dict[str, str]:
    """The tensor that its weight is multiplied with, for the label of each product."""
    weights = {weight.node for weight in model.weights().weights}
    found = {}
    for node in model.nodes:
        if node.op in ("MatMul", "Gemm") and node.label in weights:
            tensors = (name for name in node.inputs if name and name not in node.constants)
            found[node.label] = next(tensors, "")
    return found


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


Times = Mapping[str, tuple[float, float]]
"""Milliseconds, dense and sparse, by node or layer."""
_RUNS_SPARSE = (VerdictName.ELIGIBLE, VerdictName.CHOSEN)
_FORECAST = (
    "what a layer saves is a forecast for {}, at the sizes of the example inputs or --shapes: "
    "nothing was measured there (--profile uses the times of a build)"
)
_ASSUMED = (
    "a layer that can use sparse kernels counts as saving half of its multiply-adds: an upper "
    "bound, not a time (--profile uses the times of a build)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What each unit saves, by its name; 0 where it cannot run sparse."""

    unit: ShareUnit
    of: Mapping[str, float]
    why_not: Mapping[str, str]
    """Why a unit saves nothing."""
    notes: tuple[str, ...] = field(default=())


def find_savings(
    run: Run,
    pruned: PruneResult,
    layers: LayerMap,
    units: Sequence[PruningUnit],
    times: Times | None,
) -> Savings:
    """Savings from the times that the user names, else a forecast for --gpu, else multiply-adds.

    Where the rules let no layer run sparse at all (float32, another pattern), what is saved is the
    number of zeros.
    """
    if times is not None:
        return _savings_of_times(units, run.options.budget.profile or "", times)
    kind = None if run.options.gpu is None else gpus.find_gpu(run.options.gpu)
    files = EvidenceFiles(onnx=run.file(onnx_name(SPARSE)), inputs=run.file(INPUTS))
    gpu = None if kind is None else kind.as_gpu
    judged = report_files(files, layers, gpu=gpu, pruned=pruned)
    rows = judged.report.verdicts
    verdicts = {verdict.node: verdict for verdict in rows if verdict.node is not None}
    why_not = {unit.name: why for unit in units if (why := _why_dense(unit, verdicts)) is not None}
    if len(why_not) == len(units) and any(unit.pruned for unit in units):
        return _zeros(units, why_not[units[0].name])
    if kind is not None:
        of = _of_units(units, verdicts, _forecast(run, kind))
        return _savings_of_forecast(kind.name, of, why_not)
    gains, notes = _products(verdicts, judged.evidence().nodes)
    of = _of_units(units, verdicts, gains)
    return Savings(unit=ShareUnit.MULTIPLY_ADDS, of=of, why_not=why_not, notes=notes)


def _forecast(run: Run, gpu: GpuKind) -> dict[str | None, float]:
    """Milliseconds that each node is forecast to save."""
    model = run.models.open(run.file(onnx_name(SPARSE)))
    times = times_of_nodes(model, run.asked_shapes(model), gpu)
    return {node: n * max(0, t.dense_us - t.sparse_us) / 1e3 for node, (t, n) in times.items()}


def _savings_of_forecast(gpu: str, of: Mapping[str, float], why_not: Mapping[str, str]) -> Savings:
    notes: tuple[str, ...] = (_FORECAST.format(gpu),)
    if not any(of.values()):
        notes = (f"by the forecast no layer gains on {gpu}", *notes)
    no_gain = dict.fromkeys(of, f"forecast: no gain on {gpu}")
    return Savings(unit=ShareUnit.FORECAST, of=of, why_not={**no_gain, **why_not}, notes=notes)


def _of_units(
    units: Sequence[PruningUnit], verdicts: Mapping[str, Verdict], gains: Mapping[str | None, float]
) -> dict[str, float]:
    """What each unit gains in the nodes that can run sparse; 0 where it is not pruned."""
    of = {}
    for unit in units:
        nodes = [node for node in unit.nodes if unit.pruned and _runs_sparse(node, verdicts)]
        of[unit.name] = fsum(gains.get(node, 0.0) for node in nodes)
    return of


def _runs_sparse(node: str, verdicts: Mapping[str, Verdict]) -> bool:
    return node in verdicts and verdicts[node].verdict in _RUNS_SPARSE


def _why_dense(unit: PruningUnit, verdicts: Mapping[str, Verdict]) -> str | None:
    """Why no node of the unit can run sparse; None where one can."""
    if any(_runs_sparse(node, verdicts) for node in unit.nodes):
        return None
    there = [verdicts[node] for node in unit.nodes if node in verdicts]
    reason = next((verdict.reasons[0] for verdict in there if verdict.reasons), None)
    if reason is None:
        return "no node of the exported graph uses it"
    return f"{reason.code.value}: {reason.message}"


def _zeros(units: Sequence[PruningUnit], why: str) -> Savings:
    """The number of zeros, where the rules let no layer run sparse."""
    zeros = {}
    for unit in units:
        arrays = {row.weight.weight: row for row in unit.rows if row.pruned}
        zeros[unit.name] = float(sum(row.zeros for row in arrays.values()))
    note = f"TensorRT runs none of these layers sparse ({why}): what is saved is zeros"
    return Savings(unit=ShareUnit.WEIGHTS, of=zeros, why_not={}, notes=(note,))


def _products(
    verdicts: Mapping[str, Verdict], nodes: Iterable[GraphNode]
) -> tuple[dict[str | None, float], tuple[str, ...]]:
    """Multiply-adds that each node saves for one sample, and notes on what is assumed."""
    known = {
        node.label: multiply_adds(verdicts[node.label], node)
        for node in nodes
        if node.label in verdicts
    }
    found: dict[str | None, float] = {}
    unknown = []
    for label, verdict in verdicts.items():
        number = known.get(label)
        unknown += [verdict.layer] if number is None else []
        found[label] = (prod(verdict.shape) if number is None else number) / SPARSE_SPEEDUP
    note = f"{uncounted(unknown)}: each of their weights counts as one"
    return found, (_ASSUMED, *([note] if unknown else []))


def read_layer_times(path: Path) -> dict[str, tuple[float, float]]:
    """Milliseconds, dense and sparse, by node, else by layer, in the folder of a build.

    They are times of the fastest tactics, where the builder timed both. Layers that are one in the
    engine (q, k and v) were timed once: each has an equal part. Raises BadInputError without any.
    """
    verdicts = report_folder(path).report.verdicts
    timed = [v for v in verdicts if v.sparse_ms is not None and v.dense_ms is not None]
    if not timed:
        raise BadInputError(
            f"--profile {path}: no layer there has times of a dense and a sparse kernel",
            hint="they come from the verbose log of a TensorRT build with sparse weights allowed",
        )
    together = Counter((v.engine_layer, v.dense_ms, v.sparse_ms) for v in timed)
    found = {}
    for v in timed:
        assert v.dense_ms is not None
        assert v.sparse_ms is not None
        parts = 1 if v.engine_layer is None else together[v.engine_layer, v.dense_ms, v.sparse_ms]
        found[v.node or v.layer] = (v.dense_ms / parts, v.sparse_ms / parts)
    return found


def _savings_of_times(units: Sequence[PruningUnit], source: str, times: Times) -> Savings:
    """Dense minus sparse milliseconds; raises BadInputError where the build knows no layer."""
    saved: dict[str, float] = defaultdict(float)
    for unit in units:
        weights = (n for row in unit.rows for n in (row.weight.layer, row.weight.weight) if n)
        for name in dict.fromkeys((*weights, *unit.nodes)):
            if name in times:
                dense, sparse = times[name]
                saved[unit.name] += dense - sparse
    if not saved:
        raise BadInputError(
            f"--profile {source}: none of its {count(len(times), 'layer')} is in this model",
            hint="name the folder of a TensorRT build of this model",
        )
    missing = {u.name: f"{source} has no times of it" for u in units if u.name not in saved}
    slower = {name: "its sparse kernel is no faster" for name, ms in saved.items() if ms <= 0}
    of = {u.name: max(0.0, saved.get(u.name, 0.0)) for u in units if u.pruned}
    notes = () if any(of.values()) else (f"by the times of --profile {source} no layer gains",)
    return Savings(unit=ShareUnit.MILLISECONDS, of=of, why_not=missing | slower, notes=notes)
