"""Reports for the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from twofour.reports.document import (
    Block,
    Column,
    Details,
    Document,
    Kind,
    Lines,
    NameList,
    Role,
    Section,
    Table,
    at_rows,
)
from twofour.words import printable_lines

PLAIN_WIDTH = 120
"""Columns where the output is no terminal and so has no width."""
_NO_VALUE = "-"
_NAMES_SHOWN = 5
_LEAST = {Kind.NAME: 16, Kind.TEXT: 20}
"""Columns that a name or a sentence is given before the figures go into a second table."""
_LONGEST_HEAD = 12
"""Columns of a head's word that is not broken: a user's metric may have any name."""
_BREAK_BEHIND = "@:/.-_+ "
_ALWAYS = 3
"""First columns of the table of layers, which are shown however narrow the terminal is."""
_NAMES = 32
"""Columns within which names may be folded before another column is."""
_TIMES = ("sparse", "dense", "ratio")
"""Keys of the columns that a terminal shows in a table of their own."""
_GAP = 2
"""Columns between two cells; 1 where there is no room for more."""
_COLOURS = {
    **dict.fromkeys(("runs", "gains", "faster", "holds"), "green"),
    "can": "cyan",
    **dict.fromkeys(("gain-1", "gain-2", "gain-3", "gain-4"), "green"),
    **dict.fromkeys(("cannot", "slower", "broken"), "red"),
    **dict.fromkeys(("doubtful", "absent", "unknown", "undecided", "dense"), "yellow"),
}
"""Slug of a verdict -> its colour."""
_LINES = {
    Role.ANSWER: ("{}", "bold"),
    Role.WARNING: ("WARNING: {}", "yellow"),
    Role.LEGEND: ("\n{}", ""),
    Role.NOTE: ("note: {}", ""),
    Role.SOURCES: ("- {}", ""),
}


class PrintableConsole(Console):
    """A console that takes every text literally: no markup in it, and nothing to obey.

    What documents are made of is printable already; this holds for whatever else is printed.
    """

    def __init__(
        self,
        file: TextIO,
        *,
        width: int | None = None,
        soft_wrap: bool = False,
        plain: bool = False,
    ) -> None:
        """`width` None: as wide as the terminal; `plain`: as in a file, FORCE_COLOR or not."""
        super().__init__(
            file=file,
            width=width,
            soft_wrap=soft_wrap,
            color_system=None if plain else "auto",
            force_terminal=False if plain else None,
            markup=False,
            emoji=False,
            highlight=False,
        )
        if self.width < 1:  # COLUMNS=0: rich would print nothing
            self.width = PLAIN_WIDTH

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """The segments of it; those that move the cursor are rich's own and stay."""
        for segment in super().render(renderable, options):
            if segment.control is not None or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable_lines(segment.text), segment.style)


def plain_text(
    renderable: RenderableType, *, width: int = PLAIN_WIDTH, encoding: str = "utf-8"
) -> str:
    """The renderable as text without colour or trailing blanks, for pipes and files."""
    with io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace") as nowhere:
        console = PrintableConsole(nowhere, width=width, plain=True)
        with console.capture() as capture:
            console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().split("\n")).removesuffix("\n") + "\n"


def render(document: Document) -> RenderableType:
    """The whole document, as wide as the console; what is to be read first comes last, in view.

    No number is broken from 60 columns on, and no code from 80. Bars and the appendix are left
    out, but for the first of its names.
    """
    named = [block for block in document.appendix if isinstance(block, NameList)]
    return draw((*document.blocks, *document.lead, *named))


def draw(blocks: Sequence[Block]) -> RenderableType:
    """A part of a document."""
    return Group(*_blocks(blocks))


def _blocks(blocks: Sequence[Block]) -> Iterator[RenderableType]:
    for block in blocks:
        if isinstance(block, Section | Details):
            yield from _blocks(block.blocks)
        elif isinstance(block, Lines):
            words, style = _LINES.get(block.role, ("{}", ""))
            for line in block.lines:
                yield Text(words.format(line), style=style)
            if block.role is Role.SOURCES:
                yield Text()
        elif isinstance(block, NameList):
            yield Text(_first_names(block))
        elif isinstance(block, Table):
            yield from _shown(block.folded())


def _first_names(block: NameList) -> str:
    line = f"{block.short}: {', '.join(block.names[:_NAMES_SHOWN])}"
    more = len(block.names) - _NAMES_SHOWN
    if more > 0:
        line += f", and {more:,} more (--json has all)"
    return line


def _shown(made: Table) -> Iterator[RenderableType]:
    if made.style == "cards":
        yield from _totals(made)
    elif made.style == "layers":
        words = [column for column in made.columns if column.key not in _TIMES]
        yield _FittedTable(replace(made, columns=tuple(words)))
        timed = _timed(made)
        if timed.columns:
            yield _FittedTable(timed)
    else:
        yield _FittedTable(made)


def _totals(made: Table) -> Iterator[Text]:
    titles, layers, weights, _ = (_longest_line(column.cells) for column in made.columns)
    for title, number, part, codes in made.rows:
        line = f"{title:<{titles}}  {number:>{layers}}  {part:>{weights}}  {codes}"
        yield Text(line.rstrip())


def _timed(layers: Table) -> Table:
    """The figures of the layers that have any; no columns where none has."""
    figures = [column for column in layers.columns if column.key in _TIMES]
    rows: set[int] = set()
    for column in figures:
        rows.update(row for row, cell in enumerate(column.cells) if cell is not None)
    columns: list[Column] = []
    for column in (layers.columns[0], *figures) if rows else ():
        columns.append(at_rows(column, sorted(rows)))
    return Table(title="Times by layer", columns=tuple(columns))


class _FittedTable:
    """A table that is split into several, each with the names, where it is wider than the console.

    Meets rich's ConsoleRenderable: how wide the console is, only it knows.
    """

    def __init__(self, made: Table) -> None:
        self._made = made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Heading, tables, legend."""
        del console
        if self._made.title:
            yield Text(f"\n{self._made.title}", style="bold")
        columns = self._made.columns
        if _width(map(_natural_width, columns), gap=1) > options.max_width:
            columns = tuple(map(_shortened, columns))
        parts = [*_split(columns, options.max_width)]
        if self._made.style == "layers":
            parts = [_leading(columns, options.max_width)]
        for part in parts:
            yield _fitted(part, options.max_width)
        if self._made.legend is not None:
            yield Text(self._made.legend)


def _leading(columns: Sequence[Column], width: int) -> list[Column]:
    """The first columns, as many as fit beside names that may be folded; --json has them all."""
    leading = list(columns[:_ALWAYS])
    used = min(_natural_width(columns[0]), _NAMES) + _width(map(_natural_width, leading[1:]), gap=1)
    for one in columns[_ALWAYS:]:
        used += 1 + _natural_width(one)
        if used >= width:
            break
        leading.append(one)
    return leading


def _shortened(column: Column) -> Column:
    return replace(column, cells=column.short) if column.short else column


def _split(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """Columns in groups that fit the width, the first column in each."""
    names, *others = columns
    group = [names]
    for one in others:
        if len(group) > 1 and _width(map(_least_width, (*group, one)), gap=1) > width:
            yield group
            group = [names]
        group.append(one)
    yield group


def _fitted(columns: Sequence[Column], width: int) -> RichTable:
    widths, gap = _chosen_widths(columns, width)
    table = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1, 0, 0), show_edge=False
    )
    for one, own in zip(columns, widths, strict=True):
        side: JustifyMethod = "right" if one.kind is Kind.FIGURE else "left"
        table.add_column(Text(one.head), justify=side, overflow="fold", width=own)
    for row in range(len(columns[0].cells)):
        table.add_row(*(_cell(*one, row) for one in zip(columns, widths, strict=True)))
    return table


def _chosen_widths(columns: Sequence[Column], width: int) -> tuple[list[int | None], int]:
    """The width of each column, and of the gaps between them; None: rich chooses."""
    names, *others = map(_natural_width, columns)
    if _width((names, *others), gap=_GAP) <= width:
        return [names, *[None] * len(others)], _GAP
    rest = width - _width((0, *others), gap=1)
    if rest >= _NAMES:  # it is enough that names are folded
        return [rest, *others], 1
    return _widths(columns, width), 1


def _cell(column: Column, width: int | None, row: int) -> Text:
    cell = _with_note(column, row)
    if column.kind is Kind.NAME and width is not None:
        cell = _folded(cell or _NO_VALUE, width)
    colour = _COLOURS.get(column.slugs[row], "") if column.slugs else ""
    return Text(cell, style=colour, overflow="fold")


def _widths(columns: Sequence[Column], width: int) -> list[int | None]:
    """Figures get the width they need, names and sentences share the rest; None: rich chooses."""
    names, *others = columns
    least = [_least_width(one) for one in others]
    rest = width - _width((0, *least), gap=1)
    widths: list[int | None] = [min(_natural_width(names), max(_LEAST[Kind.NAME], rest))]
    for one, own in zip(others, least, strict=True):
        widths.append(own if one.kind is Kind.FIGURE or one.short else None)
    return widths


def _width(columns: Iterable[int], *, gap: int) -> int:
    """The width of a row whose cells are so wide."""
    widths = list(columns)
    return sum(widths) + gap * (len(widths) - 1)


def _with_note(column: Column, row: int) -> str:
    cell = column.cells[row]
    note = column.note(row)
    text = _NO_VALUE if cell is None else cell
    return f"{text} {note}" if text and note else text or note


def _folded(name: str, width: int) -> str:
    """The name in lines of this width, broken behind its punctuation rather than within a word."""
    lines: list[str] = []
    for line in name.split("\n"):
        rest = line
        while cell_len(rest) > width:
            # width 16: "encoder.layer.0.fc" is cut to "encoder.layer.0." and "fc"
            cut = len(chop_cells(rest, width)[0])
            for at in range(cut, cut // 3, -1):
                if rest[at - 1] in _BREAK_BEHIND:
                    cut = at
                    break
            lines.append(rest[:cut])
            rest = rest[cut:]
        lines.append(rest)
    return "\n".join(lines)


def _natural_width(one: Column) -> int:
    """The width in which nothing is folded."""
    cells = [_with_note(one, row) for row in range(len(one.cells))]
    return _longest_line((one.head, *cells))


def _least_width(one: Column) -> int:
    """The longest line of a figure, word of a verdict, word of a head."""
    if one.kind in _LEAST:
        return min(_LEAST[one.kind], _longest_line((one.head, *one.cells)))
    head = min(_longest_line(one.head.split()), _LONGEST_HEAD)
    if one.kind is Kind.FIGURE or one.short:
        return max(head, _longest_line(one.cells))
    words: list[str] = []
    for cell in filter(None, one.cells):
        words += cell.split()
    return max(head, _longest_line(words))


def _longest_line(cells: Iterable[str | None]) -> int:
    longest = 1
    for cell in cells:
        for line in (cell or _NO_VALUE).split("\n"):
            longest = max(longest, cell_len(line))
    return longest
