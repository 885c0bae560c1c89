"""What the evidence adds to a report, in lines: shares, what can still be won, disagreements."""

from __future__ import annotations

from collections.abc import Iterator

from twofour.records import (
    EligibilityReport,
    EligibilityTotals,
    GainCeiling,
    Share,
    ShareUnit,
    VerdictName,
)
from twofour.reports.words import count, printable, share

DISAGREEMENTS_SHOWN = 5


def evidence_lines(report: EligibilityReport) -> tuple[str, ...]:
    """Lines for a reader in a hurry; () for a report that is predicted alone."""
    notes = tuple(printable(note) for note in report.notes)
    if report.totals is None:
        return notes
    return (*_of_totals(report.totals), *notes)


def _of_totals(totals: EligibilityTotals) -> Iterator[str]:
    yield from map(_share_line, totals.shares)
    yield from map(_ceiling_line, totals.ceilings)
    yield from _agreement(totals)
    yield from (printable(note) for note in totals.notes)


def _share_line(of: Share) -> str:
    parts = [
        f"{share(part, of.total)} {word}"
        for part, word in (
            (of.runs_sparse, "run sparse"),
            (of.eligible, "eligible and dense"),
            (of.never, "never as the model is"),
            (of.unknown, "not known"),
            (of.other, "in layers without such a weight"),
        )
        if part
    ]
    total = f"{of.total:,.0f} {of.unit.value}"
    if of.unit is ShareUnit.MILLISECONDS:
        total = f"{of.total:.3f} ms"
    return f"of {total}: {', '.join(parts)}"


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
