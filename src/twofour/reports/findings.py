"""What a rule is given and what it answers: a case and a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twofour.records import Reason, ReasonCode, VerdictName, Weight, WeightCheck
from twofour.reports.context import ReportContext

GUIDE = "TensorRT developer guide, structured sparsity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer to be judged: its weight, the check of the saved array, the circumstances."""

    weight: Weight
    check: WeightCheck | None
    context: ReportContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rule says about one layer."""

    reason: Reason
    best: VerdictName
    """The best verdict the layer can have while this holds."""


Rule = Callable[[Case], Finding | None]


def never(code: ReasonCode, message: str, source: str | None) -> Finding:
    """A finding that rules sparse math out."""
    reason = Reason(code=code, message=message, source=source)
    return Finding(reason=reason, best=VerdictName.NOT_ELIGIBLE)


def unknown(code: ReasonCode, message: str) -> Finding:
    """A finding that leaves the question open; there is no source for what nobody says."""
    return Finding(reason=Reason(code=code, message=message), best=VerdictName.UNKNOWN)


def eligible(code: ReasonCode, message: str, source: str | None) -> Finding:
    """A finding that the builder does not mind, though its kernels may."""
    reason = Reason(code=code, message=message, source=source)
    return Finding(reason=reason, best=VerdictName.ELIGIBLE)
