"""A comparison for the terminal: the answer, tables that never break a number, circumstances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from twofour.records.latency import LatencyComparison, LatencyVerdict
from twofour.reports.latency_document import all_grids
from twofour.reports.latency_grids import Column, Grid, Kind, layer_grid
from twofour.reports.latency_words import (
    answer_lines,
    difference_lines,
    legend,
    machine_lines,
    noise_lines,
    note_lines,
)

_STYLES = {
    LatencyVerdict.FASTER.value: "green",
    LatencyVerdict.SLOWER.value: "red",
    LatencyVerdict.UNDECIDED.value: "yellow",
}
_LEAST_NAME, _LEAST_TEXT = 16, 20
"""Columns that a name or a sentence is given before the figures go into a second table."""
_LONGEST_HEAD = 12
"""Columns of a head's word that is not broken: a user's metric may have any name."""
_BREAK_BEHIND = "@:/.-_+ "


def comparison_text(comparison: LatencyComparison) -> RenderableType:
    """The whole comparison; as wide as the console, from 60 columns on no number is broken."""
    answer, *more = answer_lines(comparison)
    warned = (f"WARNING: {line}" for line in difference_lines(comparison))
    return Group(
        Text(answer, style="bold"),
        *map(Text, more),
        *(_FittedGrid(made) for made in all_grids(comparison)),
        Text(f"\n{legend(comparison)}"),
        *map(Text, noise_lines(comparison)),
        *(Text(line, style="yellow") for line in warned),
        *map(Text, machine_lines(comparison)),
        *(_FittedGrid(layer_grid(contrast)) for contrast in comparison.layers),
        *(Text(f"note: {line}") for line in note_lines(comparison)),
    )


class _FittedGrid:
    """A table that is split into several, each with the names, where it is wider than the console.

    Meets rich's ConsoleRenderable: how wide the console is, only it knows.
    """

    def __init__(self, made: Grid) -> None:
        self._grid = made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Heading, tables, legend."""
        del console
        yield Text(f"\n{self._grid.title}", style="bold")
        for columns in _split(self._grid.columns, options.max_width):
            yield _table(columns, options.max_width)
        if self._grid.legend is not None:
            yield Text(self._grid.legend)


def _split(columns: Sequence[Column], width: int) -> Iterator[tuple[Column, ...]]:
    """Columns in groups that fit the width, the first column in each."""
    names, *others = columns
    group = [names]
    for one in others:
        if len(group) > 1 and _least((*group, one), gap=1) > width:
            yield tuple(group)
            group = [names]
        group.append(one)
    yield tuple(group)


def _table(columns: Sequence[Column], width: int) -> Table:
    """Figures get the width they need, names and sentences share the rest."""
    names, *others = columns
    longest = _longest_line(names.cells, names.head)
    fixed = [c for c in others if c.kind is not Kind.TEXT]
    gap = 2 if longest + _least(fixed, gap=2) + 2 <= width and len(fixed) == len(others) else 1
    for_names = max(_LEAST_NAME, min(longest, width - _least(others, gap=gap) - gap))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1, 0, 0), show_edge=False)
    for one in columns:
        own = for_names if one is names else _least_width(one) if one.kind is Kind.FIGURE else None
        justify: JustifyMethod = "right" if one.kind is Kind.FIGURE else "left"
        table.add_column(Text(one.head), justify=justify, overflow="fold", width=own)
    for name, *cells in zip(*(c.cells for c in columns), strict=True):
        table.add_row(Text(_folded(name or "-", for_names)), *map(_cell, cells))
    return table


def _cell(text: str | None) -> Text:
    return Text("-" if text is None else text, style=_STYLES.get(text or "", ""), overflow="fold")


def _folded(name: str, width: int) -> str:
    """The name in lines of this width, broken behind its punctuation rather than within a word."""
    lines: list[str] = []
    for line in name.split("\n"):
        rest = line
        while cell_len(rest) > width:
            cut = len(chop_cells(rest, width)[0])
            marks = [
                i + 1 for i, c in enumerate(rest[:cut]) if c in _BREAK_BEHIND and i >= cut // 3
            ]
            cut = marks[-1] if marks else cut
            lines.append(rest[:cut])
            rest = rest[cut:]
        lines.append(rest)
    return "\n".join(lines)


def _least(columns: Sequence[Column], *, gap: int) -> int:
    return sum(map(_least_width, columns)) + gap * max(0, len(columns) - 1)


def _least_width(one: Column) -> int:
    """Of a figure the longest line, of a verdict the longest word; a head may break at blanks."""
    if one.kind is Kind.NAME:
        return _LEAST_NAME
    if one.kind is Kind.TEXT:
        return _LEAST_TEXT
    between = None if one.kind is Kind.VERDICT else "\n"
    words = [word for cell in one.cells for word in (cell or "-").split(between)]
    head = max(map(cell_len, one.head.split()), default=1)
    return max(min(head, _LONGEST_HEAD), *map(cell_len, words), 1)


def _longest_line(cells: Sequence[str | None], head: str) -> int:
    return max(cell_len(line) for cell in (head, *cells) for line in (cell or "-").split("\n"))
