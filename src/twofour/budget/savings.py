"""What is pruned or left dense together, and what that saves: time, forecast, or multiply-adds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from twofour.eligibility.build_evidence import NO_ENGINE
from twofour.eligibility.build_facts import ReportContext
from twofour.eligibility.predict import predict
from twofour.eligibility.totals import SPARSE_SPEEDUP, multiply_adds, uncounted
from twofour.engines.machine import find_gpu
from twofour.errors import BadInputError
from twofour.forecasting import gpus
from twofour.forecasting.model_forecast import times_of_nodes
from twofour.graph.mixture import changed_places
from twofour.graph.opened import OpenedModel
from twofour.pipeline.evidence_files import EvidenceFiles, read_evidence, with_module_names
from twofour.pipeline.folder import INPUTS, SPARSE, onnx_name
from twofour.pipeline.reporting import known_to_pruning, report_folder
from twofour.pipeline.stages import Run
from twofour.pruning.selection import glob_of
from twofour.records.eligibility import ShareUnit, Verdict, VerdictName
from twofour.records.export import LayerMap, LayerName
from twofour.records.forecast import GpuKind
from twofour.records.weights import HARDWARE_PATTERN, PrunedWeight, PruneResult
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
    of_key: dict[str | None, list[LayerName]] = defaultdict(list)
    for name in layers.layers:
        of_key[name.parameter].append(name)
    nodes = [tuple(n.node for n in of_key[r.weight.weight or r.weight.layer]) for r in rows]
    inputs = _by_input(nodes, dense) if siblings else {}
    together = (*_by_array(rows, of_key).values(), *inputs.values())
    changed = changed_places(dense, sparse)
    names = Counter(row.weight.layer for row in rows)
    units = []
    for members in _joined(len(rows), together):
        there = tuple(rows[i] for i in members)
        labels = tuple(dict.fromkeys(n for i in members for n in nodes[i]))
        unit = PruningUnit(
            name=_name(there[0], names),
            rows=there,
            globs=tuple(dict.fromkeys(glob_of(_name(row, names)) for row in there)),
            nodes=labels,
            names=tuple(dict.fromkeys(_name(row, names) for row in there if row.pruned)),
            places=tuple(sorted({p for label in labels for p in changed.get(label, ())})),
        )
        units.append(unit)
    return tuple(units)


def _name(row: PrunedWeight, names: Mapping[str, int]) -> str:
    """The layer, or its weight where the layer has several, or no name: a model of one layer."""
    weight = row.weight
    by_layer = names[weight.layer] == 1 and weight.layer != ""
    return weight.layer if by_layer or weight.weight is None else weight.weight


def _by_array(
    rows: Sequence[PrunedWeight], of_key: Mapping[str | None, Sequence[LayerName]]
) -> dict[object, list[int]]:
    """Rows by what they share: a stored array before or after the export."""
    found: dict[object, list[int]] = defaultdict(list)
    places = {row.weight.layer: i for i, row in enumerate(rows)}
    for i, row in enumerate(rows):
        weight = row.weight
        if weight.weight is not None:
            found["key", weight.weight].append(i)
        for name in of_key.get(weight.weight, ()):
            found["initializer", name.initializer].append(i)
        for other in weight.tied_to:
            j = places.get(other)
            if j is not None and weight.layer in rows[j].weight.tied_to:
                found["tied", min(i, j), max(i, j)] += [i, j]
    return found


def _by_input(nodes: Sequence[tuple[str, ...]], model: OpenedModel) -> dict[object, list[int]]:
    """Rows by the tensor that their products multiply with."""
    weights = {w.node for w in model.weights().weights}
    data = {
        node.label: next((n for n in node.inputs if n and n not in node.constants), None)
        for node in model.nodes
        if node.op in ("MatMul", "Gemm") and node.label in weights
    }
    found: dict[object, list[int]] = defaultdict(list)
    for i, labels in enumerate(nodes):
        for tensor in filter(None, map(data.get, labels)):
            found[tensor].append(i)
    return found


def _joined(size: int, together: Iterable[Iterable[int]]) -> list[list[int]]:
    """The numbers below `size` in groups, in the order of their first members."""
    # Example: 4 rows, together [[0, 2], [2, 3]]. `first` names the first member of each row's
    # group: [0, 1, 2, 3], then [0, 1, 0, 3], then [0, 1, 0, 0]: the groups are [0, 2, 3] and [1].
    first = list(range(size))
    for members in together:
        roots = {first[i] for i in members}
        first = [min(roots) if root in roots else root for root in first]
    found: dict[int, list[int]] = defaultdict(list)
    for i, root in enumerate(first):
        found[root].append(i)
    return list(found.values())


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
    verdicts = _predicted(run, pruned, layers, kind)
    measure = ShareUnit.MULTIPLY_ADDS if kind is None else ShareUnit.FORECAST
    gains, notes = _products(run, layers, verdicts) if kind is None else _forecast(run, kind)
    of, why_not, runs_sparse = {}, {}, False
    for unit in units:
        there = [verdicts[label] for label in unit.nodes if label in verdicts]
        usable = [v for v in there if v.verdict in _RUNS_SPARSE]
        runs_sparse |= bool(usable)
        of[unit.name] = sum(gains.get(v.node, 0.0) for v in usable if unit.pruned)
        if not usable:
            said = next((v.reasons[0] for v in there if v.reasons), None)
            words = "no node of the exported graph uses it"
            why_not[unit.name] = words if said is None else f"{said.code.value}: {said.message}"
        elif kind is not None and not of[unit.name]:
            why_not[unit.name] = f"forecast: no gain on {kind.name}"
    if kind is not None and not any(of.values()):
        notes = (f"by the forecast no layer gains on {kind.name}", *notes)
    if runs_sparse or not any(unit.pruned for unit in units):
        return Savings(unit=measure, of=of, why_not=why_not, notes=notes)
    why = next(iter(why_not.values()), "")
    zeros = {}
    for unit in units:
        arrays = {row.weight.weight: row for row in unit.rows if row.pruned}
        zeros[unit.name] = float(sum(row.zeros for row in arrays.values()))
    return Savings(
        unit=ShareUnit.WEIGHTS,
        of=zeros,
        why_not={},
        notes=(f"TensorRT runs none of these layers sparse ({why}): what is saved is zeros",),
    )


def _predicted(
    run: Run, pruned: PruneResult, layers: LayerMap, kind: GpuKind | None
) -> dict[str, Verdict]:
    """Verdicts of the rules on the model with everything pruned, by label of the node."""
    from twofour.pruning.verify import check_onnx

    model = run.models.open(run.file(onnx_name(SPARSE)))
    found = model.weights(HARDWARE_PATTERN)
    context = ReportContext(
        model=run.source.name,
        pattern=pruned.pattern,
        engine=NO_ENGINE,
        gpu=find_gpu() if kind is None else kind.as_gpu,
        activation_products=found.activation_products,
        not_covered=found.not_covered,
    )
    weights = with_module_names(found.weights, layers, known_to_pruning(pruned))
    checks = check_onnx(model, HARDWARE_PATTERN)
    return {v.node: v for v in predict(weights, checks, context).verdicts if v.node is not None}


def _products(
    run: Run, layers: LayerMap, verdicts: Mapping[str, Verdict]
) -> tuple[dict[str | None, float], tuple[str, ...]]:
    """Multiply-adds that each node saves for one sample, and notes on what is assumed."""
    path = run.file(onnx_name(SPARSE))
    files = EvidenceFiles(onnx=path, inputs=run.file(INPUTS))
    evidence = read_evidence(files, run.models.open(path), layers)
    nodes = {node.label: node for node in evidence.nodes}
    found: dict[str | None, float] = {}
    unknown = []
    for label, verdict in verdicts.items():
        number = multiply_adds(verdict, nodes[label]) if label in nodes else None
        unknown += [verdict.layer] if number is None else []
        found[label] = (prod(verdict.shape) if number is None else number) / SPARSE_SPEEDUP
    note = f"{uncounted(unknown)}: each of their weights counts as one"
    return found, (_ASSUMED, *([note] if unknown else []))


def _forecast(run: Run, gpu: GpuKind) -> tuple[dict[str | None, float], tuple[str, ...]]:
    """Milliseconds that each node is forecast to save, and a note that nothing was measured."""
    model = run.models.open(run.file(onnx_name(SPARSE)))
    times = times_of_nodes(model, run.asked_shapes(model), gpu)
    gains = {node: n * max(0, t.dense_us - t.sparse_us) / 1e3 for node, (t, n) in times.items()}
    return gains, (_FORECAST.format(gpu.name),)


def read_layer_times(path: Path) -> dict[str, tuple[float, float]]:
    """Milliseconds, dense and sparse, by node, else by layer, in the folder of a build.

    They are times of the fastest tactics, where the builder timed both. Layers that are one in the
    engine (q, k and v) were timed once: each has an equal part. Raises BadInputError without any.
    """
    verdicts = report_folder(path).verdicts
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
