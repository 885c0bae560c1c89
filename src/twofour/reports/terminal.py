"""Reports for the terminal."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
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
)
from twofour.words import printable_lines

PLAIN_WIDTH = 120
"""Columns where the output is no terminal and so has no width."""
_NO_VALUE = "-"
_NAMES_SHOWN = 5
_LEAST_NAME, _LEAST_TEXT = 16, 20
"""Columns that a name or a sentence is given before the figures go into a second table."""
_LONGEST_HEAD = 12
"""Columns of a head's word that is not broken: a user's metric may have any name."""
_BREAK_BEHIND = "@:/.-_+ "
_CODES = re.compile(r"(?:^|also |, |\()([A-Z][A-Z0-9_]+)(?=[:,)]|$)")
"""The codes in a cell: "WRONG_AXIS: ...; also PATTERN_BROKEN, EXCLUDED", "... (DTYPE)"."""
_OP_WIDTH, _VERDICT_WIDTH, _REMEDY_WIDTH = len("ConvTranspose"), len("(likely dense)"), 15
_GAP = 2
"""Columns between two cells."""
_COLOURS = {
    **dict.fromkeys(("runs", "can", "doubtful", "faster", "holds"), "green"),
    **dict.fromkeys(("gain-1", "gain-2", "gain-3", "gain-4"), "green"),
    **dict.fromkeys(("cannot", "slower", "broken"), "red"),
    **dict.fromkeys(("absent", "unknown", "undecided", "dense"), "yellow"),
}
"""Slug of a verdict -> its colour."""
_LINES = {
    Role.ANSWER: ("{}", "bold"),
    Role.WARNING: ("WARNING: {}", "yellow"),
    Role.LEGEND: ("\n{}", ""),
    Role.NOTE: ("note: {}", ""),
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

    No number is broken from 60 columns on, and no code. Plots and the appendix are left out, but
    for the first of its names.
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
            yield from (Text(words.format(line), style=style) for line in block.lines)
        elif isinstance(block, NameList):
            more = len(block.names) - _NAMES_SHOWN
            rest = f", and {more:,} more (--json has all)" if more > 0 else ""
            yield Text(f"{block.short}: {', '.join(block.names[:_NAMES_SHOWN])}{rest}")
        elif isinstance(block, Table):
            made = block.folded()
            if made.style == "cards":
                yield from _totals(made)
            else:
                yield _LayerTable(made) if made.style == "layers" else _FittedTable(made)


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
        for columns in _split(self._made.columns, options.max_width):
            yield _fitted(columns, options.max_width)
        if self._made.legend is not None:
            yield Text(self._made.legend)


def _totals(made: Table) -> Iterator[Text]:
    least = [max(map(len, filter(None, c.cells)), default=0) for c in made.columns]
    for title, layers, weights, codes in made.rows:
        known = f"{title:<{least[0]}}  {layers:>{least[1]}}  {weights:>{least[2]}}  {codes}"
        yield Text(known.rstrip())


class _LayerTable:
    """A row per layer: on one line if it fits, else words below others, times in a table behind."""

    def __init__(self, made: Table) -> None:
        self._made = made
        self._columns = {column.key: column for column in made.columns}
        self._names = [_behind(self._columns["layer"], at, "  ") for at in range(len(made.rows))]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """The table of words, and one of figures where anything was timed."""
        width = options.max_width
        if _fits(self._made.columns, width):
            yield _fitted(self._made.columns, width)
            return
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.show_edge = False
        widths = self._widths(width)
        for title, own in zip(_STACKED, widths, strict=True):
            table.add_column(title, overflow="fold", width=own)
        verdicts = self._columns["verdict"]
        for at in range(len(self._names)):
            size = " ".join(self._cell(key, at) for key in _SIZE)
            name = Text(f"{_folded(self._names[at], widths[0])}\n{size}", overflow="fold")
            verdict = Text(_behind(verdicts, at), style=_colour(verdicts, at))
            verdict.append(f"\n{self._cell('pattern', at)}")
            table.add_row(name, verdict, *(Text(self._cell(key, at)) for key in ("why", "remedy")))
        yield table
        times = [c for c in self._made.columns if c.kind is Kind.FIGURE]
        if times:
            yield _FittedTable(self._timed(times))

    def _cell(self, key: str, at: int) -> str:
        return self._columns[key].cells[at] or _NO_VALUE

    def _timed(self, times: Sequence[Column]) -> Table:
        rows = [at for at in range(len(self._names)) if any(c.cells[at] for c in times)]
        columns = (
            replace(
                column,
                cells=tuple(column.cells[at] for at in rows),
                notes=tuple(column.note(at) for at in rows),
            )
            for column in (self._columns["layer"], *times)
        )
        return Table(title="Times by layer", columns=tuple(columns))

    def _widths(self, width: int) -> tuple[int, int, int, int]:
        """Columns for the name, the verdict, why and what to do; no code is broken from 80 on."""
        codes = (word for text in self._columns["why"].cells for word in _CODES.findall(text or ""))
        code = max(map(len, codes), default=0) + len(":")
        sizes = [" ".join(self._cell(key, at) for key in _SIZE) for at in range(len(self._names))]
        longest = max(map(len, (*_STACKED[0].split("\n"), *self._names, *sizes)))
        name = max(_OP_WIDTH, min(longest, width // 4))
        texts = width - name - _VERDICT_WIDTH - 3 * _GAP
        why = max(code, min(texts * 5 // 9, texts - _REMEDY_WIDTH))
        return name, _VERDICT_WIDTH, why, max(texts - why, _REMEDY_WIDTH)


_SIZE = "op", "size", "type"
_STACKED = ("layer\nop, C x K kernel, type", "verdict\npattern", "why", "what to do")


def _behind(column: Column, at: int, between: str = " ") -> str:
    text = column.cells[at]
    return between.join(filter(None, (_NO_VALUE if text is None else text, column.note(at))))


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


def _fits(columns: Sequence[Column], width: int) -> bool:
    """Whether no head and no cell needs to be folded."""
    longest = (
        _longest_line((column.head, *(_behind(column, at) for at in range(len(column.cells)))))
        for column in columns
    )
    return sum(longest) + _GAP * (len(columns) - 1) <= width


def _fitted(columns: Sequence[Column], width: int) -> RichTable:
    """Figures get the width they need, names and sentences share the rest."""
    names, *others = columns
    rows = range(len(names.cells))
    first = [_behind(names, at) for at in rows]
    longest = _longest_line((names.head, *first))
    fixed = [c for c in others if c.kind is not Kind.TEXT]
    is_whole = _fits(columns, width)
    roomy = longest + _least(fixed, gap=2) + 2 <= width and len(fixed) == len(others)
    gap = _GAP if is_whole or roomy else 1
    for_names = min(longest, max(_LEAST_NAME, width - _least(others, gap=gap) - gap))
    for_names = longest if is_whole else for_names
    table = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1, 0, 0), show_edge=False
    )
    for one in columns:
        is_figure = one.kind is Kind.FIGURE and not is_whole
        own = for_names if one is names else _least_width(one) if is_figure else None
        side: JustifyMethod = "right" if one.kind is Kind.FIGURE else "left"
        table.add_column(Text(one.head), justify=side, overflow="fold", width=own)
    for at in rows:
        cells = (Text(_behind(c, at), style=_colour(c, at), overflow="fold") for c in others)
        table.add_row(Text(_folded(first[at] or "-", for_names)), *cells)
    return table


def _colour(column: Column, at: int) -> str:
    return _COLOURS.get(column.slugs[at], "") if column.slugs else ""


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
    """The longest line of a figure, the longest word of a verdict; a head may break at blanks."""
    if (least := {Kind.NAME: _LEAST_NAME, Kind.TEXT: _LEAST_TEXT}.get(one.kind)) is not None:
        return min(least, _longest_line((one.head, *one.cells)))
    between = None if one.kind is Kind.VERDICT else "\n"
    words = [word for cell in one.cells for word in (cell or "-").split(between)]
    head = max(map(cell_len, one.head.split()), default=1)
    return max(min(head, _LONGEST_HEAD), *map(cell_len, words), 1)


def _longest_line(cells: Sequence[str | None]) -> int:
    return max(cell_len(line) for cell in cells for line in (cell or "-").split("\n"))
