"""The fates that the summary counts by: the verdict, with eligible told in two, and no row."""

from __future__ import annotations

from enum import Enum

from twofour.records import ReasonCode, Verdict, VerdictName
from twofour.reports.summary import CAN_RUN, is_only_off
from twofour.reports.uncovered import NOT_COVERED


class Fate(str, Enum):
    """Titles of the summary, best first."""

    RUNS = "runs sparse"
    CAN = CAN_RUN
    DOUBTFUL = "eligible, doubtful"
    CANNOT = "cannot run sparse"
    ABSENT = "not in the engine"
    UNKNOWN = "not known"
    UNCOVERED = NOT_COVERED

    @property
    def slug(self) -> str:
        """One word for classes and keys, such as "doubtful"."""
        return self.name.lower()


_FATES = {
    VerdictName.CHOSEN: Fate.RUNS,
    VerdictName.NOT_ELIGIBLE: Fate.CANNOT,
    VerdictName.NOT_IN_ENGINE: Fate.ABSENT,
    VerdictName.UNKNOWN: Fate.UNKNOWN,
}


def fate_of(verdict: Verdict) -> Fate:
    """An eligible layer is doubtful where its main reason speaks against a sparse kernel.

    Of a layer that only this build's switch keeps dense, it is not known.
    """
    if is_only_off(verdict):
        return Fate.UNKNOWN
    if verdict.verdict is not VerdictName.ELIGIBLE:
        return _FATES[verdict.verdict]
    free = verdict.reasons[0].code is ReasonCode.QUALIFIES
    return Fate.CAN if free else Fate.DOUBTFUL
