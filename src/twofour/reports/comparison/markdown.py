"""A comparison as GitHub Markdown: the answer, a table each, circumstances, layers, notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twofour.records.latency import LatencyComparison
from twofour.reports.comparison.answer import answer_lines
from twofour.reports.comparison.circumstances import (
    difference_lines,
    legend,
    machine_lines,
    noise_lines,
    note_lines,
)
from twofour.reports.comparison.columns import Grid, Kind
from twofour.reports.comparison.grids import all_grids
from twofour.reports.comparison.layer_grid import layer_grid
from twofour.reports.markdown_parts import code, plain, table


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
