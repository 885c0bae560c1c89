"""The report in a few lines: how much can run sparse, what never will, what to change first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from twofour.eligibility.predict import NOT_COVERED, count_weights, not_covered_lines, uses_of
from twofour.eligibility.reasons import changes
from twofour.records.eligibility import (
    EligibilityReport,
    EligibilitySummary,
    Evidence,
    Verdict,
    VerdictName,
)
from twofour.records.weights import ReasonCode
from twofour.reports.evidence_lines import evidence_lines
from twofour.reports.fates import Fate, by_fate, counted_once, weights_by_fate
from twofour.reports.words import count, printable, share

CHANGES_SHOWN = 3
CAN_TOO = "could run sparse too"
"""In place of "can run sparse" beside layers that do."""
_WARNING = "WARNING"
WORTH_CHANGING = 0.01
"""Share of the weights below which a change is not proposed up here; its row has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """How many layers share one fate, and the main reasons for it."""

    fate: Fate
    title: str
    layers: str
    weights: str
    codes: str


def totals(report: EligibilityReport) -> tuple[Total, ...]:
    """Each layer is counted once, under its main reason; that none can run sparse is said too.

    An array that several layers share counts once, with the best that becomes of it.
    """
    weights, found = weights_by_fate(report.verdicts), by_fate(report.verdicts)
    known = tuple(
        _total(fate, layers, weights[fate], report.summary)
        for fate, layers in found.items()
        if layers or (fate is Fate.CAN and not found[Fate.RUNS])
    )
    if found[Fate.RUNS]:  # what can run sparse is told apart from what does
        known = tuple(replace(t, title=CAN_TOO) if t.fate is Fate.CAN else t for t in known)
    beside = not_covered_total(report)
    return known if beside is None else (*known, beside)


def not_covered_total(report: EligibilityReport) -> Total | None:
    """Factors of matrix products that no row names; None where there are none."""
    factors = [group for group in report.not_covered if group.multiplies]
    if not factors:
        return None
    return Total(
        fate=Fate.UNCOVERED,
        title=NOT_COVERED,
        layers=count(sum(group.uses for group in factors), "node"),
        weights=_weights(report.summary.weights_not_covered, report.summary),
        codes=uses_of(factors),
    )


def title_line(report: EligibilityReport) -> str:
    """Model, pattern, engine and GPU."""
    gpu = report.gpu
    parts = [printable(report.model), f"pattern {report.pattern}", printable(report.engine)]
    if gpu is not None:
        major, minor = gpu.compute_capability
        parts.append(f"{printable(gpu.name)} (compute capability {major}.{minor})")
    elif "compute capability" not in report.engine:  # as a log names the GPU of its build
        parts.append("GPU not known")
    return " · ".join(parts)


def advice_lines(report: EligibilityReport) -> tuple[str, ...]:
    """Warnings, what to change first by the weights it concerns, what the report leaves out."""
    beside = not_covered_lines(report.not_covered)
    lines = (*_changes(report), *beside, *evidence_lines(report), *_footnotes(report))
    if report.not_evidence is not None:
        said = printable(report.not_evidence)
        lines = (f"{_WARNING}: {said}", *(line for line in lines if line != said))
    return tuple(sorted(lines, key=lambda line: not line.startswith(_WARNING)))


def _total(fate: Fate, layers: list[Verdict], weights: int, of: EligibilitySummary) -> Total:
    codes: Counter[ReasonCode] = Counter(
        code for v in layers if (code := _main_code(v)) is not ReasonCode.QUALIFIES
    )
    return Total(
        fate=fate,
        title=fate.value,
        layers=count(len(layers), "layer"),
        weights=_weights(weights, of),
        codes=_codes(codes),
    )


def _weights(part: int, of: EligibilitySummary) -> str:
    """An engine alone does not say how many weights its layers have."""
    if of.layers and not of.weights:
        return "weights not known"
    return f"{count(part, 'weight')} ({share(part, of.weights)})"


def _codes(codes: Counter[ReasonCode]) -> str:
    ranked = sorted(codes.items(), key=lambda item: (-item[1], item[0].value))
    return ", ".join(f"{code.value} {number}" for code, number in ranked)


def _changes(report: EligibilityReport) -> tuple[str, ...]:
    """What the rows' own remedies ask to change, by the weights that totals count under them."""
    wanting: dict[str, list[Verdict]] = {}
    for verdict in report.verdicts:
        is_open = verdict.verdict is not VerdictName.CHOSEN and verdict.remedy is not None
        for change in changes(verdict.remedy or "") if is_open else ():
            wanting.setdefault(change, []).append(verdict)
    of, whole = counted_once(report.verdicts), report.summary.weights
    found = [(c, layers, count_weights(filter(of, layers))) for c, layers in wanting.items()]
    worth = [item for item in found if item[2] >= WORTH_CHANGING * whole]
    ranked = sorted(worth, key=lambda item: -item[2])
    return tuple(
        f"{'change first' if not i else f'then ({i + 1})'}: {change} "
        f"({count(len(layers), 'layer')}, {share(weights, whole)} of the weights)"
        for i, (change, layers, weights) in enumerate(ranked[:CHANGES_SHOWN])
    )


def _footnotes(report: EligibilityReport) -> tuple[str, ...]:
    beside = " and of those not covered" if report.summary.weights_not_covered else ""
    notes = [f"percentages in brackets are of the weights of the layers listed{beside}"]
    products = report.summary.activation_products
    if products:
        notes.append(f"not listed: {count(products, 'product')} of two activations (no weight)")
    if report.unmatched_engine_layers:
        found = count(len(report.unmatched_engine_layers), "engine layer")
        notes.append(f"not matched to a layer of the model: {found}")
    if all(v.evidence is not Evidence.MEASURED for v in report.verdicts):
        notes.append("predicted from the rules; what TensorRT chose is in its build log only")
    return tuple(notes)


def _main_code(verdict: Verdict) -> ReasonCode:
    return verdict.reasons[0].code
