"""The eligibility report as a table for spreadsheets and scripts: one row per layer."""

from __future__ import annotations

import csv
import io
from math import isfinite

from twofour.records import EligibilityReport, Verdict
from twofour.reports.words import printable, times

COLUMNS = (
    *("layer", "node", "weight", "op", "shape", "axis", "in_channels", "out_channels", "kernel"),
    *("groups", "dtype", "pattern_holds", "verdict", "evidence", "predicted", "reason_codes"),
    *("reasons", "sources", "remedy", "engine_layer", "sparse_ms", "dense_ms"),
)
"""Names of the columns: columns may be added at the end, never renamed or moved."""
_FORMULA = frozenset("=+-@＝＋－＠")  # noqa: RUF001 -- the full-width signs are the point
"""First characters that make a spreadsheet run a cell (OWASP, CSV injection)."""
_BETWEEN = " | "


def to_csv(report: EligibilityReport) -> str:
    """RFC 4180 with a header; lines end in a newline, what is not known is empty.

    Text that a spreadsheet would run as a formula (it starts with = + - @, blanks aside) gets a
    leading apostrophe, and so does text that starts with one: a reader that wants the exact name
    drops one leading apostrophe. Control characters are written as escapes, so a row is a line.
    Engine layers that were not matched to a layer of the model are not in this table.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_row(verdict) for verdict in report.verdicts)
    return text.getvalue()


def _row(verdict: Verdict) -> tuple[str, ...]:
    codes = dict.fromkeys(r.code.value for r in verdict.reasons)
    sources = dict.fromkeys(r.source for r in verdict.reasons if r.source is not None)
    sentences = (f"{r.code.value}: {r.message}" for r in verdict.reasons)
    return (
        *map(_text, (verdict.layer, verdict.node, verdict.weight, verdict.op)),
        times(verdict.shape),
        *map(_figure, (verdict.axis, verdict.in_channels, verdict.out_channels)),
        times(verdict.kernel) if verdict.kernel else "",
        _figure(verdict.groups),
        _text(verdict.dtype),
        {True: "true", False: "false", None: ""}[verdict.pattern_holds],
        verdict.verdict.value,
        "" if verdict.evidence is None else verdict.evidence.value,
        verdict.predicted.value,
        " ".join(codes),
        _text(_BETWEEN.join(sentences)),
        _text(_BETWEEN.join(sources)),
        *map(_text, (verdict.remedy, verdict.engine_layer)),
        *map(_figure, (verdict.sparse_ms, verdict.dense_ms)),
    )


def _text(text: str | None) -> str:
    safe = printable(text or "")
    risky = safe.lstrip()[:1] in _FORMULA or safe.startswith("'")
    return f"'{safe}" if safe and risky else safe


def _figure(number: float | None) -> str:
    return "" if number is None or not isfinite(number) else str(number)
