"""What each layer saves by running sparse: milliseconds of a build, else multiply-adds."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from twofour.eligibility.evidence import NO_ENGINE
from twofour.eligibility.predict import predict
from twofour.eligibility.rules import ReportContext
from twofour.eligibility.totals import SPARSE_SPEEDUP, multiply_adds
from twofour.engines.machine import find_gpu
from twofour.errors import BadInputError
from twofour.pipeline.evidence import EvidenceFiles, read_evidence
from twofour.pipeline.reporting import known_to_pruning, named, report_folder
from twofour.pipeline.sensitivity.units import Unit
from twofour.pipeline.stages import INPUTS, SPARSE, Run, onnx_name
from twofour.records.eligibility import EligibilityReport, ShareUnit, Verdict, VerdictName
from twofour.records.export import LayerMap
from twofour.records.pruning import PruneResult
from twofour.records.weights import HARDWARE_PATTERN
from twofour.words import count

_RUNS_SPARSE = (VerdictName.ELIGIBLE, VerdictName.CHOSEN)
_PROFILE_HINT = (
    'name a run folder with a build of TensorRT, or write {"layer": [dense_ms, sparse_ms], ...}, '
    "or lines of CSV: layer, dense_ms, sparse_ms"
)
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
    profile: str | None,
) -> Savings:
    """By the times of `profile` where it is given, else by the rules and multiply-adds.

    Where the rules let no layer run sparse at all (float32, another pattern), every pruned one
    counts by its weights: what is saved is zeros then, no time.
    """
    if profile is not None:
        return _of_times(units, read_times(Path(profile)), profile)
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


# --- times that the user names --------------------------------------------------------------------


def _of_times(
    units: Sequence[Unit], times: Mapping[str, tuple[float, float]], profile: str
) -> Savings:
    """Dense minus sparse milliseconds; raises BadInputError where the profile knows no layer."""
    of, why_not = {}, {}
    for unit in units:
        names = [n for row in unit.rows for n in (row.weight.layer, row.weight.weight) if n]
        found = [times[n] for n in dict.fromkeys((*names, *unit.nodes)) if n in times][:1]
        of[unit.name] = max(0.0, sum(dense - sparse for dense, sparse in found))
        if not found:
            why_not[unit.name] = f"{profile} has no times of it"
        elif not of[unit.name]:
            why_not[unit.name] = "its sparse kernel is no faster"
    if len(why_not) == len(units) and not any(unit.name in times for unit in units):
        raise BadInputError(
            f"--profile {profile}: none of its {count(len(times), 'layer')} is in this model",
            hint=_PROFILE_HINT,
        )
    return Savings(unit=ShareUnit.MILLISECONDS, of=of, why_not=why_not)


def read_times(path: Path) -> dict[str, tuple[float, float]]:
    """Dense and sparse milliseconds by layer (or node); raises BadInputError."""
    if path.is_dir():
        return _of_report(report_folder(path), path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"--profile: cannot read {path}: {error}", hint=_PROFILE_HINT) from None
    if text.lstrip()[:1] == "{":
        return _of_json(text, path)
    return _of_rows(csv.reader(text.splitlines(), skipinitialspace=True), path)


def _of_report(report: EligibilityReport, path: Path) -> dict[str, tuple[float, float]]:
    """From the fastest tactics of both kinds, where the builder timed both."""
    found = {}
    for verdict in report.verdicts:
        if verdict.sparse_ms is not None and verdict.dense_ms is not None:
            for name in (verdict.layer, verdict.node):
                if name is not None:
                    found[name] = (verdict.dense_ms, verdict.sparse_ms)
    if not found:
        raise BadInputError(
            f"--profile {path}: no layer there has times of a dense and a sparse kernel",
            hint="they come from the verbose log of a TensorRT build with sparse weights allowed",
        )
    return found


def _of_json(text: str, path: Path) -> dict[str, tuple[float, float]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"--profile: {path} is no JSON: {error}", hint=_PROFILE_HINT) from error
    if isinstance(value, dict) and isinstance(value.get("verdicts"), list):
        from twofour.store import from_json

        return _of_report(from_json(EligibilityReport, text), path)
    rows = (
        [name, *times] if isinstance(times, list) else [name, times]
        for name, times in value.items()
    )
    return _of_rows(rows, path)


def _of_rows(rows: Iterable[Sequence[object]], path: Path) -> dict[str, tuple[float, float]]:
    """Name, dense and sparse milliseconds; a first row of headings is left out."""
    found: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        if not row:
            continue
        times = tuple(map(_milliseconds, row[1:3]))
        if len(row) < 3 or None in times:
            if number == 0 and all(isinstance(cell, str) for cell in row):
                continue
            raise BadInputError(
                f"--profile: {path}: {', '.join(map(str, row))[:200]}", hint=_PROFILE_HINT
            )
        dense, sparse = times
        assert dense is not None
        assert sparse is not None
        found[str(row[0])] = (dense, sparse)
    if not found:
        raise BadInputError(f"--profile: {path} has no times", hint=_PROFILE_HINT)
    return found


def _milliseconds(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever a file holds
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number >= 0 else None
