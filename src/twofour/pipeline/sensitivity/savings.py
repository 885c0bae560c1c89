"""What each layer saves by running sparse: milliseconds of a build, else multiply-adds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from twofour.eligibility.evidence import NO_ENGINE
from twofour.eligibility.predict import predict
from twofour.eligibility.resolve import index_nodes, resolve
from twofour.eligibility.rules import ReportContext
from twofour.eligibility.totals import SPARSE_SPEEDUP, multiply_adds
from twofour.engines.machine import find_gpu
from twofour.errors import BadInputError
from twofour.pipeline.evidence import EvidenceFiles, read_evidence
from twofour.pipeline.reporting import known_to_pruning, named
from twofour.pipeline.sensitivity.layer_times import PROFILE_HINT, LayerTimes
from twofour.pipeline.sensitivity.units import Unit
from twofour.pipeline.stages import INPUTS, SPARSE, Run, onnx_name
from twofour.records.eligibility import ShareUnit, Verdict, VerdictName
from twofour.records.export import GraphNode, LayerMap
from twofour.records.pruning import PruneResult
from twofour.records.weights import HARDWARE_PATTERN
from twofour.words import count, listed

_RUNS_SPARSE = (VerdictName.ELIGIBLE, VerdictName.CHOSEN)
_ASSUMED = (
    f"a layer that the rules call eligible is taken to save 1 - 1/{SPARSE_SPEEDUP:g} of its "
    "multiply-adds: a bound, not a time (--profile takes times of a build)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """What each unit saves, by its name; nothing where it cannot run sparse."""

    unit: ShareUnit
    of: Mapping[str, float]
    why_not: Mapping[str, str]
    """Why a unit saves nothing."""
    notes: tuple[str, ...] = field(default=())


def find_savings(
    run: Run,
    pruned: PruneResult,
    layers: LayerMap,
    units: Sequence[Unit],
    times: LayerTimes | None,
) -> Savings:
    """By the times that the user names where there are some, else by the rules and multiply-adds.

    Where the rules let no layer run sparse at all (float32, another pattern), every pruned one
    counts by its weights: what is saved is zeros then, no time.
    """
    if times is not None:
        return _of_times(units, times, _nodes(run, layers))
    verdicts = _predicted(run, pruned, layers)
    gains = _products(run, layers, verdicts)
    of, why_not = {}, {}
    for unit in units:
        there = [verdicts[label] for label in unit.nodes if label in verdicts]
        usable = [v for v in there if v.verdict in _RUNS_SPARSE]
        of[unit.name] = sum(gains[v.node] for v in usable) / SPARSE_SPEEDUP
        if not usable:
            why_not[unit.name] = _why_not(there)
    if any(of.values()) or not any(unit.pruned for unit in units):
        return Savings(unit=ShareUnit.MULTIPLY_ADDS, of=of, why_not=why_not, notes=(_ASSUMED,))
    why = next(iter(why_not.values()), "")
    return Savings(
        unit=ShareUnit.WEIGHTS,
        of={unit.name: _zeros(unit) for unit in units},
        why_not={},
        notes=(f"TensorRT runs none of these layers sparse ({why}): what is saved is zeros",),
    )


def _why_not(verdicts: Sequence[Verdict]) -> str:
    said = next((v.reasons[0] for v in verdicts if v.reasons), None)
    if said is None:
        return "no node of the exported graph uses it"
    return f"{said.code.value}: {said.message}"


def _zeros(unit: Unit) -> float:
    arrays = {row.weight.weight: row for row in unit.rows if row.pruned}
    return float(sum(row.zeros for row in arrays.values()))


def _predicted(run: Run, pruned: PruneResult, layers: LayerMap) -> dict[str, Verdict]:
    """Verdicts of the rules on the model with everything pruned, by label of the node."""
    from twofour.pruning.verify import check_onnx

    model = run.models.open(run.file(onnx_name(SPARSE)))
    found = model.weights(HARDWARE_PATTERN)
    context = ReportContext(
        model=run.source.name,
        pattern=pruned.pattern,
        engine=NO_ENGINE,
        gpu=find_gpu(),
        activation_products=found.activation_products,
        not_covered=found.not_covered,
    )
    weights = named(found.weights, layers, known_to_pruning(pruned))
    checks = check_onnx(model, HARDWARE_PATTERN)
    return {v.node: v for v in predict(weights, checks, context).verdicts if v.node is not None}


def _nodes(run: Run, layers: LayerMap) -> Sequence[GraphNode]:
    path = run.file(onnx_name(SPARSE))
    files = EvidenceFiles(onnx=path, inputs=run.file(INPUTS))
    return read_evidence(files, run.models.open(path), layers).nodes


def _products(
    run: Run, layers: LayerMap, verdicts: Mapping[str, Verdict]
) -> dict[str | None, float]:
    """Multiply-adds of each node for one row of the batch; its weights where they are not known."""
    nodes = {node.label: node for node in _nodes(run, layers)}
    found: dict[str | None, float] = {}
    for label, verdict in verdicts.items():
        node = nodes.get(label)
        number = None if node is None else multiply_adds(verdict, node)
        found[label] = float(prod(verdict.shape) if number is None else number)
    return found


def _of_times(units: Sequence[Unit], times: LayerTimes, nodes: Sequence[GraphNode]) -> Savings:
    """Dense minus sparse milliseconds; raises BadInputError where the profile knows no layer."""
    dense, sparse = (_Shares.of(units, rows, nodes) for rows in (times.dense, times.sparse))
    of, why_not = {}, {}
    for unit in units:
        before, after = dense.ms.get(unit.name), sparse.ms.get(unit.name)
        if before is None or after is None:
            of[unit.name], why_not[unit.name] = 0.0, f"{times.source} has no times of it"
            continue
        of[unit.name] = max(0.0, before - after)
        if not of[unit.name]:
            why_not[unit.name] = "its sparse kernel is no faster"
    if not dense.ms:
        raise BadInputError(
            f"--profile {times.source}: none of its {count(len(times.dense), 'layer')} is in this "
            "model",
            hint=PROFILE_HINT,
        )
    notes = dict.fromkeys((*dense.notes(times.source), *sparse.notes(times.source)))
    return Savings(unit=ShareUnit.MILLISECONDS, of=of, why_not=why_not, notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """Times of one engine by unit, and the names whose times are not simply those of one."""

    ms: dict[str, float]
    fused: tuple[str, ...]
    regions: tuple[str, ...]
    unknown: tuple[str, ...]

    @classmethod
    def of(
        cls, units: Sequence[Unit], rows: Mapping[str, float], nodes: Sequence[GraphNode]
    ) -> _Shares:
        """By layer, weight or node, else as TensorRT names what it fused."""
        known = _units_by_name(units)
        others = [name for name in rows if name not in known]
        index = index_nodes(nodes, None, others)
        ms: dict[str, float] = defaultdict(float)
        resolved = {found.name: found for found in resolve(others, index)}
        fused, regions, unknown = [], [], []
        for name, time in rows.items():
            found = resolved.get(name)
            labels = (name,) if found is None else tuple(nodes[at].label for at in found.nodes)
            holds = dict.fromkeys(unit for label in labels for unit in known.get(label, ()))
            for unit in holds:
                ms[unit] += time / len(holds)
            if len(holds) > 1:
                fused.append(name)
            elif found is not None and not holds and (found.region or found.shared):
                regions.append(name)
            elif found is not None and not found.matched:
                unknown.append(name)
        return cls(ms=dict(ms), fused=tuple(fused), regions=tuple(regions), unknown=tuple(unknown))

    def notes(self, source: str) -> Iterator[str]:
        """What to say of them."""
        if self.fused:
            yield f"{source}: layers in one share its time evenly: {listed(self.fused)}"
        if self.regions:
            yield f"{source}: the time of regions is no layer's: {listed(self.regions)}"
        if self.unknown:
            yield (
                f"{source}: {count(len(self.unknown), 'name')} of nothing in this model: "
                f"{listed(self.unknown)}"
            )


def _units_by_name(units: Sequence[Unit]) -> dict[str, dict[str, None]]:
    """Units by the names of their layers, weights and nodes."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for unit in units:
        weights = (n for row in unit.rows for n in (row.weight.layer, row.weight.weight) if n)
        for name in (*weights, *unit.nodes):
            found[name][unit.name] = None
    return found
