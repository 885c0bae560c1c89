"""What becomes of layers, in the words that every share, card and bar counts by: one definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from twofour.eligibility.predict import NOT_COVERED, count_weights
from twofour.records.eligibility import Verdict, VerdictName
from twofour.records.weights import ReasonCode


class Fate(str, Enum):
    """Titles of the summary, best first: the verdict, with eligible told in two."""

    RUNS = "runs sparse"
    CAN = "can run sparse"
    DOUBTFUL = "eligible, dense or doubtful"
    CANNOT = "cannot run sparse"
    ABSENT = "not in the engine"
    UNKNOWN = "not known"
    UNCOVERED = NOT_COVERED

    @property
    def slug(self) -> str:
        """One word for classes and keys, such as "doubtful"."""
        return self.name.lower()


FATE_OF_NAME = {
    VerdictName.CHOSEN: Fate.RUNS,
    VerdictName.ELIGIBLE: Fate.CAN,
    VerdictName.NOT_ELIGIBLE: Fate.CANNOT,
    VerdictName.NOT_IN_ENGINE: Fate.ABSENT,
    VerdictName.UNKNOWN: Fate.UNKNOWN,
}
"""Where nothing more is known than the name of the verdict."""


def fate_of(verdict: Verdict) -> Fate:
    """An eligible layer is doubtful, or dense, where its main reason speaks against sparse kernels.

    A build without sparse weights settles every layer of its engine, as an old GPU does.
    """
    if verdict.verdict is not VerdictName.ELIGIBLE:
        return FATE_OF_NAME[verdict.verdict]
    free = verdict.reasons[0].code is ReasonCode.QUALIFIES
    return Fate.CAN if free else Fate.DOUBTFUL


def by_fate(verdicts: Sequence[Verdict]) -> dict[Fate, list[Verdict]]:
    """Layers of each fate, the best fate first; fates of no layer are there too."""
    found: dict[Fate, list[Verdict]] = {fate: [] for fate in Fate}
    for verdict in verdicts:
        found[fate_of(verdict)].append(verdict)
    return found


def counted_once(verdicts: Sequence[Verdict]) -> Callable[[Verdict], bool]:
    """Whether the weights of a layer count under its own fate, not under a better one.

    An array that several layers share counts once, under the best that becomes of it.
    """
    best: dict[str, Fate] = {}
    for fate, layers in by_fate(verdicts).items():
        best = {v.weight: fate for v in layers if v.weight is not None} | best
    return lambda v: v.weight is None or best[v.weight] is fate_of(v)


def weights_by_fate(verdicts: Sequence[Verdict]) -> dict[Fate, int]:
    """Weights of each fate, as `counted_once` counts them."""
    of = counted_once(verdicts)
    return {fate: count_weights(filter(of, found)) for fate, found in by_fate(verdicts).items()}
