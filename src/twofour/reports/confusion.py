"""Prediction against evidence as tables: layers of each kind, and each one that differs."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.records.eligibility import EligibilityReport, VerdictName
from twofour.reports.cells import name_cell
from twofour.reports.words import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfusionTable:
    """Layers by what the rules said (rows) and what was measured (columns)."""

    measured: tuple[str, ...]
    """Heads of the columns: the verdicts that were measured at all."""
    rows: tuple[tuple[str, tuple[int, ...]], ...]
    """Predicted verdict, and its layers in each column."""
    disagreements: tuple[tuple[str, str, str, str], ...]
    """Layer, predicted, measured, what is said about it: every one."""


def confusion_table(report: EligibilityReport) -> ConfusionTable | None:
    """None for a report without measured verdicts, and where nothing was predicted."""
    cells = () if report.totals is None else report.totals.confusion
    if report.totals is None or not cells:
        return None
    counts = {(cell.predicted, cell.measured): cell.layers for cell in cells}
    measured = [v for v in VerdictName if any(m is v for _, m in counts)]
    predicted = [v for v in VerdictName if any(p is v for p, _ in counts)]
    return ConfusionTable(
        measured=tuple(v.value for v in measured),
        rows=tuple((p.value, tuple(counts.get((p, m), 0) for m in measured)) for p in predicted),
        disagreements=tuple(
            (name_cell(d.layer), d.predicted.value, d.measured.value, printable(d.message))
            for d in report.totals.disagreements
        ),
    )
