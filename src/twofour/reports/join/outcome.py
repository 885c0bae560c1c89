"""What the evidence makes of one layer: a case to judge and the outcome."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.log import EngineLayer
from twofour.records.weights import Reason
from twofour.reports.join.circumstances import Circumstances
from twofour.reports.join.sightings import Sighting

_KERNELS_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCase:
    """One row of the predicted report, and everything that was seen of it."""

    row: Verdict
    seen: Sighting
    around: Circumstances
    fused: tuple[Verdict, ...] = ()
    """Rows of the report that run as one engine layer with it and read the same input."""

    @property
    def kernel_holder(self) -> EngineLayer | None:
        """The engine layer whose kernel is named, one with a sparse kernel first."""
        return next((h for h in self.seen.holders if h.kernel is not None), None)

    @property
    def runs_dense(self) -> bool:
        """Whether kernels are named for it in the engine, none of them sparse."""
        holder = self.kernel_holder
        return holder is not None and not holder.sparse

    @property
    def dense_kernels(self) -> str:
        """The named kernels of a layer that runs dense, for a sentence."""
        kernels = list(dict.fromkeys(h.kernel for h in self.seen.holders if h.kernel is not None))
        if len(kernels) == 1:
            return f"the dense kernel {kernels[0]}"
        more = len(kernels) - _KERNELS_SHOWN
        shown = kernels if more <= 0 else [*kernels[:_KERNELS_SHOWN], f"{more} more"]
        return f"the kernels {', '.join(shown[:-1])} and {shown[-1]}, none of them sparse"

    @property
    def sparse_ms(self) -> float | None:
        """Fastest sparse tactic."""
        return self.seen.tuned.best_sparse_ms if self.seen.tuned is not None else None

    @property
    def dense_ms(self) -> float | None:
        """Fastest dense tactic, of the sparse build where it timed one."""
        both = (self.seen.tuned, self.seen.dense_tuned)
        found = (t.best_dense_ms for t in both if t is not None)
        return next((ms for ms in found if ms is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is to be changed in the row."""

    verdict: VerdictName
    evidence: Evidence | None
    reasons: tuple[Reason, ...]
    remedy: str | None


def measured(verdict: VerdictName, reasons: tuple[Reason, ...], remedy: str | None) -> Outcome:
    """An outcome that a log or layer information shows."""
    return Outcome(verdict=verdict, evidence=Evidence.MEASURED, reasons=reasons, remedy=remedy)
