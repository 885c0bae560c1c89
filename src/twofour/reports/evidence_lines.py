"""What the evidence adds to a report, in lines: shares, what can still be won, disagreements."""

from __future__ import annotations

from collections.abc import Iterator

from twofour.eligibility.predict import NOT_COVERED
from twofour.records.eligibility import (
    EligibilityReport,
    EligibilityTotals,
    GainCeiling,
    Share,
    ShareUnit,
    VerdictName,
)
from twofour.reports.fates import Fate
from twofour.reports.words import count, printable, share

DISAGREEMENTS_SHOWN = 5


def evidence_lines(report: EligibilityReport) -> tuple[str, ...]:
    """Lines for a reader in a hurry; () for a report that is predicted alone."""
    notes = tuple(printable(note) for note in report.notes)
    if report.totals is None:
        return notes
    return (*_of_totals(report.totals), *notes)


def _of_totals(totals: EligibilityTotals) -> Iterator[str]:
    yield from (_share_line(of) for of in totals.shares if of.unit is not ShareUnit.WEIGHTS)
    yield from map(_ceiling_line, totals.ceilings)
    yield from _agreement(totals)
    yield from (printable(note) for note in totals.notes)


def _share_line(of: Share) -> str:
    """In the words of the totals, which have the shares of weights."""
    by_time = of.unit is ShareUnit.MILLISECONDS
    parts = [
        f"{share(part, of.total)} {words}"
        for part, words in (
            (of.runs_sparse, Fate.RUNS.value),
            (of.eligible - of.doubtful, Fate.CAN.value),
            (of.doubtful, Fate.DOUBTFUL.value),
            (of.never, Fate.CANNOT.value),
            (of.unknown, Fate.UNKNOWN.value),
            (of.other, "in kernels without such a weight" if by_time else Fate.ABSENT.value),
            (of.not_covered, "in kernels of weights not covered" if by_time else NOT_COVERED),
        )
        if part
    ]
    total = f"{of.total:.3f} ms" if by_time else f"{of.total:,.0f} {of.unit.value}"
    return f"of {total}: {'; '.join(parts)}"


def _ceiling_line(ceiling: GainCeiling) -> str:
    return (
        f"at most {ceiling.eligible_gain:.3f}x end to end if every eligible layer ran sparse, "
        f"{ceiling.weighted_gain:.3f}x if every layer with a weight did "
        f"({printable(ceiling.profile)}; {printable(ceiling.assumption)})"
    )


def _agreement(totals: EligibilityTotals) -> Iterator[str]:
    told = [c for c in totals.confusion if c.predicted is not VerdictName.UNKNOWN]
    measured = sum(cell.layers for cell in told)
    if not measured:
        return
    cells = ", ".join(f"{c.predicted.value} -> {c.measured.value} {c.layers}" for c in told)
    yield f"predicted -> measured: {cells}"
    wrong = totals.disagreements
    yield f"the rules were wrong about {len(wrong)} of {count(measured, 'measured layer')}"
    for row in wrong[:DISAGREEMENTS_SHOWN]:
        yield f"  {printable(row.layer)}: {printable(row.message)}"
    if len(wrong) > DISAGREEMENTS_SHOWN:
        yield f"  and {len(wrong) - DISAGREEMENTS_SHOWN} more"
