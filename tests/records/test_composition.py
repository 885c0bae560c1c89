"""Records are composed: what two of them share is stated once."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import twofour
from twofour.records import SUBJECTS
from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.latency import ComparedVariant, LatencyComparison, LatencyRatio
from twofour.records.log import Build, SparsityLine, Tactic, TunedLayer
from twofour.records.weights import Reason, Validation, WeightCheck

RECORDS: list[type[Any]] = [
    kind
    for module in [importlib.import_module(f"twofour.records.{name}") for name in SUBJECTS]
    for kind in vars(module).values()
    if isinstance(kind, type)
    and dataclasses.is_dataclass(kind)
    and kind.__module__ == module.__name__
]
ALIKE = 3
"""Fields of one name and type that two records may not state both."""

FOR_READERS = {
    "AutotuningCounts.foreign_node_tables": "how much of a build its log holds",
    "AutotuningCounts.runner_choices": "how much of a build its log holds",
    "AutotuningCounts.tactic_names": "how much of a build its log holds",
    "BuildResult.asked_for": "beside the engine that ran, and why no other",
    "EligibilitySummary.not_eligible": "the totals are a contract",
    "EligibilitySummary.not_in_engine": "the totals are a contract",
    "EligibilitySummary.weights_eligible": "the totals are a contract",
    "EligibilitySummary.weights_elsewhere": "the totals are a contract",
    "Fusion.rule": "TensorRT's own name of an optimisation",
    "GainCeiling.eligible_ms": "what the gain is computed from",
    "GainCeiling.weighted_ms": "what the gain is computed from",
    "LatencyMetric.max_ms": "trtexec's own summary, whole",
    "LatencyMetric.min_ms": "trtexec's own summary, whole",
    "LatencyMetric.percentiles": "trtexec's own summary, whole",
    "LoadedWeights.made_permanent": "what the caller of load_weights is told",
    "LoadedWeights.tied": "what the caller of load_weights is told",
    "Percentile.percent": "trtexec's own summary, whole",
    "PrunedWeight.bias_corrected": "what was done beside the weight",
    "PrunedWeight.refit_steps": "what was done beside the weight",
    "Solution.bias_corrected": "what was done beside the weight",
    "Solution.refit_steps": "what was done beside the weight",
    "RunResult.validation": "what the caller of run is given",
    "Weight.trace": "what lies between a node and its constant",
}
"""Fields that nothing in twofour reads, each with the reason why it is there all the same."""

CONTRACT: dict[type[Any], str] = {
    Build: "producer tensorrt_version gpu sparsity eligible chosen sparsity_lines contradictions "
    "layers",
    SparsityLine: "line kind foreign_node printed_count names",
    TunedLayer: "name runner tactics best_dense_ms best_sparse_ms",
    Tactic: "kernel id ms sparse",
    EligibilityReport: "verdicts unmatched_engine_layers summary",
    Verdict: "layer node op engine_layer shape axis groups pattern_holds verdict evidence "
    "predicted reasons remedy sparse_ms dense_ms",
    Reason: "code message source",
    Validation: "checks",
    WeightCheck: "layer node weight shape axis groups_checked violations first_violation "
    "holds_along",
    LatencyComparison: "variants ratios noise",
    ComparedVariant: "name samples_ms median_ms p90_ms p99_ms throughput peak_memory_bytes error",
    LatencyRatio: "variant baseline ratio low high verdict",
}
"""Names in the JSON that are never changed."""


def _stated(kind: type[Any]) -> set[tuple[str, str]]:
    """Fields that the record adds to those it inherits, with their types."""
    return {(n, t) for n, t in vars(kind)["__annotations__"].items() if n != "schema_version"}


def test_no_two_records_state_the_same_fields() -> None:
    alike = {
        f"{one.__name__} and {other.__name__}": sorted(_stated(one) & _stated(other))
        for one, other in combinations(RECORDS, 2)
    }
    assert {pair: both for pair, both in alike.items() if len(both) >= ALIKE} == {}


def _read_names() -> set[str]:
    """Every name that twofour reads from an object, in Python or in a template."""
    source = Path(twofour.__file__).parent
    found = {
        node.attr
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    templates = (path.read_text(encoding="utf-8") for path in source.rglob("*.j2"))
    return found.union(*(re.findall(r"\.(\w+)", text) for text in templates))


def test_every_field_is_read_or_is_there_for_the_reader_of_the_json() -> None:
    stated = {
        f"{kind.__name__}.{field.name}": field.name
        for kind in RECORDS
        for field in dataclasses.fields(kind)
        if field.name != "schema_version"  # store.py compares it
    }
    read = _read_names()
    assert {place for place, name in stated.items() if name not in read} == set(FOR_READERS)


@pytest.mark.parametrize("kind", CONTRACT, ids=lambda kind: kind.__name__)
def test_the_names_that_others_read_are_there(kind: type[Any]) -> None:
    assert set(CONTRACT[kind].split()) <= {field.name for field in dataclasses.fields(kind)}
