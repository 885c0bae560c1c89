"""The eligibility report as a table for spreadsheets and scripts: layers, then the rest."""

from __future__ import annotations

import csv
import io
from math import isfinite, prod

from twofour.eligibility.predict import NO_FACTOR, NOT_COVERED, rules_were_wrong, uses_of
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict
from twofour.records.weights import NotCovered
from twofour.words import printable, times

COLUMNS = (
    *("layer", "node", "weight", "op", "shape", "axis", "in_channels", "out_channels", "kernel"),
    *("groups", "dtype", "pattern_holds", "verdict", "evidence", "predicted", "reason_codes"),
    *("reasons", "sources", "remedy", "engine_layer", "sparse_ms", "dense_ms"),
    *("weights", "rules_were_wrong"),
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
    `weights` are the elements of the stored array, in the first row that names it: the column adds
    up to all that is stored. Rows with the verdict "not covered" or "no factor" are no layers: they
    stand for what an op uses that no layer names. Engine layers that were not matched to a layer of
    the model are not in this table.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    counted: set[str] = set()
    for verdict in report.verdicts:
        stored = verdict.weight is not None and verdict.weight not in counted
        counted.update(() if verdict.weight is None else (verdict.weight,))
        weights = _figure(prod(verdict.shape) if stored else 0)
        writer.writerow((*_row(verdict), weights, _wrong(verdict)))
    writer.writerows(map(_beside, report.not_covered))
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


def _wrong(verdict: Verdict) -> str:
    return str(rules_were_wrong(verdict)).lower() if verdict.evidence is Evidence.MEASURED else ""


def _beside(group: NotCovered) -> tuple[str, ...]:
    """What no layer names, under its op: the other columns are empty."""
    said = {
        "layer": _text(uses_of((group,))),
        "op": _text(group.op),
        "verdict": NOT_COVERED if group.multiplies else NO_FACTOR,
        "weights": _figure(group.weights),
    }
    return tuple(said.get(column, "") for column in COLUMNS)


def _text(text: str | None) -> str:
    safe = printable(text or "")
    risky = safe.lstrip()[:1] in _FORMULA or safe.startswith("'")
    return f"'{safe}" if safe and risky else safe


def _figure(number: float | None) -> str:
    return "" if number is None or not isfinite(number) else str(number)
