"""What each layer saves by running sparse: milliseconds of a build, else multiply-adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from twofour.eligibility.evidence import NO_ENGINE
from twofour.eligibility.predict import predict
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
from twofour.records.export import LayerMap
from twofour.records.pruning import PruneResult
from twofour.records.weights import HARDWARE_PATTERN
from twofour.words import count

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
        return _of_times(units, times)
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


def _products(
    run: Run, layers: LayerMap, verdicts: Mapping[str, Verdict]
) -> dict[str | None, float]:
    """Multiply-adds of each node for one row of the batch; its weights where they are not known."""
    files = EvidenceFiles(onnx=run.file(onnx_name(SPARSE)), inputs=run.file(INPUTS))
    model = run.models.open(run.file(onnx_name(SPARSE)))
    nodes = {node.label: node for node in read_evidence(files, model, layers).nodes}
    found: dict[str | None, float] = {}
    for label, verdict in verdicts.items():
        node = nodes.get(label)
        number = None if node is None else multiply_adds(verdict, node)
        found[label] = float(prod(verdict.shape) if number is None else number)
    return found


def _of_times(units: Sequence[Unit], times: LayerTimes) -> Savings:
    """Dense minus sparse milliseconds; raises BadInputError where the profile knows no layer."""
    of, why_not = {}, {}
    for unit in units:
        names = [n for row in unit.rows for n in (row.weight.layer, row.weight.weight) if n]
        found = [times.of[n] for n in dict.fromkeys((*names, *unit.nodes)) if n in times.of][:1]
        of[unit.name] = max(0.0, sum(dense - sparse for dense, sparse in found))
        if not found:
            why_not[unit.name] = f"{times.source} has no times of it"
        elif not of[unit.name]:
            why_not[unit.name] = "its sparse kernel is no faster"
    if len(why_not) == len(units) and not any(unit.name in times.of for unit in units):
        raise BadInputError(
            f"--profile {times.source}: none of its {count(len(times.of), 'layer')} is in this "
            "model",
            hint=PROFILE_HINT,
        )
    return Savings(unit=ShareUnit.MILLISECONDS, of=of, why_not=why_not)
