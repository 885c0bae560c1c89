"""Layers that pruning knows and the exported graph lacks: rows of their own, which count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twofour.records.eligibility import (
    EligibilityReport,
    EligibilityTotals,
    Evidence,
    Share,
    ShareUnit,
    Verdict,
    VerdictName,
)
from twofour.records.pruning import PrunedWeight
from twofour.records.weights import Reason, ReasonCode
from twofour.reports.eligibility import count_weights, summarize, unjudged


def with_not_exported(
    report: EligibilityReport, missing: Sequence[PrunedWeight]
) -> EligibilityReport:
    """The report with a row behind the others for each layer that no node of the graph is of.

    Their weights are part of the totals; an array that a layer of the graph stores too is not
    counted again.
    """
    if not missing:
        return report
    verdicts = (*report.verdicts, *map(_row, missing))
    products = report.summary.activation_products
    added = count_weights(verdicts) - count_weights(report.verdicts)
    return replace(
        report,
        verdicts=verdicts,
        summary=summarize(verdicts, products, report.not_covered),
        totals=None if report.totals is None else _totals(report.totals, float(added)),
    )


def not_exported(
    rows: Sequence[PrunedWeight], parameters: Sequence[str], constants: Sequence[str]
) -> tuple[PrunedWeight, ...]:
    """Rows of prune.json that the export has neither a product nor a constant of.

    `parameters` are the state_dict keys that weights of the graph come from, `constants` the names
    of its constants.
    """
    there = {*parameters, *constants}
    layers = {row.weight.layer for row in rows if row.weight.weight in there}
    return tuple(
        _shared(row, layers)
        for row in rows
        if row.weight.weight is not None and row.weight.weight not in there
    )


def _shared(row: PrunedWeight, layers: set[str]) -> PrunedWeight:
    """Without a weight of its own where a layer of the graph holds the array."""
    if layers.isdisjoint(row.weight.tied_to):
        return row
    return replace(row, weight=replace(row.weight, weight=None))


def _row(row: PrunedWeight) -> Verdict:
    weight = row.weight
    done = "pruned, and " if row.pruned else ""
    reason = Reason(
        code=ReasonCode.NOT_EXPORTED,
        message=f"{done}no node of the exported graph uses it: a branch that the example inputs do"
        " not take, a part for training alone, or one whose result nothing needs",
    )
    return replace(
        unjudged(weight),
        node=None,
        verdict=VerdictName.NOT_IN_ENGINE,
        evidence=Evidence.PREDICTED,
        predicted=VerdictName.NOT_IN_ENGINE,
        reasons=(reason,),
        required=False,
    )


def _totals(totals: EligibilityTotals, added: float) -> EligibilityTotals:
    return replace(totals, shares=tuple(_share(share, added) for share in totals.shares))


def _share(share: Share, added: float) -> Share:
    if share.unit is not ShareUnit.WEIGHTS:
        return share
    return replace(share, total=share.total + added, other=share.other + added)
