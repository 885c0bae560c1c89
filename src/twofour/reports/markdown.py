"""The eligibility report as GitHub Markdown: summary, what to change, a row per kind of layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.weights import ReasonCode
from twofour.reports.cells import (
    main_reason,
    name_cell,
    other_codes,
    pattern_word,
    surprise,
    tactic_times,
    timed,
)
from twofour.reports.confusion import confusion_table
from twofour.reports.markdown_parts import code, plain, table
from twofour.reports.rows import Row, collapse
from twofour.reports.summary import advice_lines, title_line, totals
from twofour.reports.words import shape_cell

_TITLES = ("layer", "op", "C x K kernel", "type", "pattern", "verdict", "why", "what to do")
_TIMES = ("sparse ms", "dense ms")


def to_markdown(report: EligibilityReport) -> str:
    """Layers that differ in one number of their names share a row; names are never markup.

    Ordinary names stand in backticks, those with a backtick, a pipe or a backslash in <code> with
    character references: both read the same when rendered, in a table too.
    """
    parts = [
        "# Sparsity report",
        plain(title_line(report)),
        table(("", "layers", "weights", "main reasons"), _totals(report)),
        "\n".join(f"- {plain(line)}" for line in advice_lines(report)),
        "## Layers",
        _layers(report.verdicts),
        *_sources(report.verdicts),
        *_confusion(report),
        *_unmatched(report.unmatched_engine_layers),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _totals(report: EligibilityReport) -> Iterable[Sequence[str]]:
    return ((t.title, t.layers, t.weights, plain(t.codes)) for t in totals(report))


def _layers(verdicts: Sequence[Verdict]) -> str:
    with_times = timed(verdicts)
    rows = ((*_cells(row), *(_times(row) if with_times else ())) for row in collapse(verdicts))
    return table(_TITLES + (_TIMES if with_times else ()), rows)


def _cells(row: Row) -> tuple[str, ...]:
    first = row.first
    also = surprise(first)
    return (
        code(name_cell(row.name)) + (f" x{len(row.members)}" if len(row.members) > 1 else ""),
        plain(first.op),
        shape_cell(first),
        plain(first.dtype),
        pattern_word(first),
        first.verdict.value + (f" ({also})" if also else ""),
        _why(row),
        plain(first.remedy or "-"),
    )


def _why(row: Row) -> str:
    first = row.first
    text = plain(main_reason(first))
    if first.reasons[0].code is not ReasonCode.QUALIFIES:
        text = f"`{first.reasons[0].code.value}`: {text}"
    if not row.same_reasons:
        text += " (figures of the first)"
    return "; ".join(part for part in (text, plain(other_codes(first))) if part)


def _times(row: Row) -> tuple[str, str]:
    known = [both for member in row.members if (both := tactic_times(member)) is not None]
    sparse, dense = ([both[i] for both in known] for i in (0, 1))
    return _span(sparse), _span(dense)


def _span(figures: Sequence[float]) -> str:
    if not figures:
        return "-"
    low, high = f"{min(figures):.4g}", f"{max(figures):.4g}"
    return low if low == high else f"{low} to {high}"


def _sources(verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    pairs = dict.fromkeys(
        (r.code.value, r.source) for v in verdicts for r in v.reasons if r.source is not None
    )
    if not pairs:
        return ()
    lines = (f"- `{code}`: {plain(source)}" for code, source in sorted(pairs))
    return ("## What the reasons rest on", "\n".join(lines))


def _confusion(report: EligibilityReport) -> tuple[str, ...]:
    made = confusion_table(report)
    if made is None:
        return ()
    counts = ((row[0], *map(str, row[1])) for row in made.rows)
    parts = (
        "## Prediction against evidence",
        table(("predicted", *(f"measured {name}" for name in made.measured)), counts),
    )
    if not made.disagreements:
        return parts
    rows = ((code(d[0]), d[1], d[2], plain(d[3])) for d in made.disagreements)
    return (*parts, table(("layer", "predicted", "measured", "what was found"), rows))


def _unmatched(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    lines = (f"- {code(name_cell(name))}" for name in names)
    return ("## Engine layers not matched to a layer of the model", "\n".join(lines))
