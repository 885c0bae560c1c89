"""Reports as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from twofour.eligibility.cells import (
    main_reason,
    name_cell,
    other_codes,
    pattern_word,
    surprise,
    tactic_times,
    timed,
)
from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.latency import LatencyComparison
from twofour.records.weights import ReasonCode
from twofour.reports.eligibility_document import (
    Row,
    advice_lines,
    collapse,
    confusion_table,
    title_line,
    totals,
)
from twofour.reports.latency_document import all_grids
from twofour.reports.latency_grids import Grid, Kind, layer_grid
from twofour.reports.latency_words import (
    answer_lines,
    difference_lines,
    legend,
    machine_lines,
    noise_lines,
    note_lines,
)
from twofour.words import printable, shape_cell

_LITERAL = {
    **{c: f"\\{c}" for c in "`*[]~$#"},
    "\\": "&#92;",
    "|": "&#124;",
    "<": "&lt;",
    "&": "&amp;",
}
"""How a character that Markdown or a table of it might obey is written where it is just text."""
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
"""An underscore within a word is never emphasis (CommonMark 6.2), and codes are full of them."""
_NOT_FOR_BACKTICKS = re.compile(r"[`|\\]|^\s|\s$")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = (titles, tuple("---" for _ in titles), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plain(text: str) -> str:
    """Text that no Markdown reader takes for markup, emphasis, a link or the end of a cell."""
    return _EMPHASIS.sub(r"\\_", "".join(_LITERAL.get(c, c) for c in printable(text)))


def code(name: str) -> str:
    """A name without control characters in backticks, or in <code> where it has one itself."""
    if not _NOT_FOR_BACKTICKS.search(name):
        return f"`{name}`"
    return f"<code>{''.join(c if c.isalnum() else f'&#{ord(c)};' for c in name)}</code>"


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


def comparison_markdown(comparison: LatencyComparison) -> str:
    """A document of its own; names are never markup (see markdown_parts)."""
    answer, *more = map(plain, answer_lines(comparison))
    warnings = tuple(f"**Warning:** {plain(line)}" for line in difference_lines(comparison))
    parts = (
        f"# Latency of {plain(comparison.source)}",
        f"**{answer}**",
        _list(more),
        *(part for made in all_grids(comparison) for part in _grid(made)),
        plain(legend(comparison)),
        _list((*map(plain, noise_lines(comparison)), *warnings)),
        "## Measured on",
        _list(tuple(map(plain, machine_lines(comparison)))),
        *(part for contrast in comparison.layers for part in _grid(layer_grid(contrast))),
        *_notes(comparison),
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _grid(made: Grid) -> Iterator[str]:
    """Heading, table, legend."""
    yield f"## {plain(made.title)}"
    kinds = [column.kind for column in made.columns]
    rows = [[_cell(c, kind) for c, kind in zip(row, kinds, strict=True)] for row in made.rows]
    yield table([plain(column.head) for column in made.columns], rows)
    if made.legend is not None:
        yield plain(made.legend)


def _cell(text: str | None, kind: Kind) -> str:
    """The cell's first line as a name where it is one; lines are kept apart."""
    if text is None:
        return "-"
    first, *others = text.split("\n")
    shown = code(first) if kind is Kind.NAME else plain(first)
    return "<br>".join((shown, *map(plain, others)))


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _notes(comparison: LatencyComparison) -> tuple[str, ...]:
    notes = tuple(plain(line) for line in note_lines(comparison))
    return ("## Notes", _list(notes)) if notes else ()
