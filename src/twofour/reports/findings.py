"""What a rule is given and what it answers: a case and a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from twofour.records.eligibility import VerdictName
from twofour.records.pruning import WeightCheck
from twofour.records.weights import Reason, ReasonCode, Weight
from twofour.reports.context import BuildFacts, ReportContext

GUIDE = "TensorRT developer guide, structured sparsity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layer to be judged: its weight, the check of the saved array, the circumstances."""

    weight: Weight
    check: WeightCheck | None
    context: ReportContext
    at_odds: tuple[Weight, ...] = ()
    """Layers that take the same array, and hold or are to hold the pattern along another axis."""

    @property
    def build(self) -> BuildFacts:
        """What is known of the build; version and GPU are the report's own where no log says."""
        context, known = self.context, self.context.build
        here = None if context.gpu is None else context.gpu.compute_capability
        return replace(
            known,
            tensorrt_version=known.tensorrt_version or context.tensorrt_version,
            compute_capability=known.compute_capability or here,
        )


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


def unknown(code: ReasonCode, message: str, source: str | None = None) -> Finding:
    """A finding that leaves the question open; without a source where nobody says anything."""
    reason = Reason(code=code, message=message, source=source)
    return Finding(reason=reason, best=VerdictName.UNKNOWN)


def eligible(code: ReasonCode, message: str, source: str | None) -> Finding:
    """A finding that the builder does not mind, though its kernels may."""
    reason = Reason(code=code, message=message, source=source)
    return Finding(reason=reason, best=VerdictName.ELIGIBLE)
