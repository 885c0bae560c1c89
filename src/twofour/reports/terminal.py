"""Reports for the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TextIO

from rich import box
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Column as RichColumn
from rich.table import Table as RichTable
from rich.text import Text

from twofour.reports.document import (
    Block,
    Column,
    Details,
    Document,
    Kind,
    Lines,
    Names,
    Role,
    Section,
    Table,
    split_code,
)
from twofour.words import printable_lines

PLAIN_WIDTH = 120
"""Columns where the output is no terminal and so has no width."""
AS_ABOVE = "as above"
_NO_VALUE = "-"
_NAMES_SHOWN = 5
_LEAST_NAME, _LEAST_TEXT = 16, 20
"""Columns that a name or a sentence is given before the figures go into a second table."""
_LONGEST_HEAD = 12
"""Columns of a head's word that is not broken: a user's metric may have any name."""
_BREAK_BEHIND = "@:/.-_+ "
_OP_WIDTH, _SIZE_WIDTH = len("ConvTranspose"), len("1024 x 1024")
_VERDICT_WIDTH, _REMEDY_WIDTH = len("not-eligible)"), 15
_CODE_WIDTH, _NAME_AND_CODE = len("AXIS_NOT_MULTIPLE:"), 46
"""Columns, at most (of what to do at least), so that 120 hold the longest reason code."""
_GAP, _LEAST_LAYER, _TEXTS = 2, 20, 54
"""Columns between two cells, of a layer's name that can be read at least, of both texts where names
are as long as they get."""
_COLOURS = {
    **dict.fromkeys(("runs", "can", "doubtful", "faster", "holds"), "green"),
    **dict.fromkeys(("cannot", "slower", "broken"), "red"),
    **dict.fromkeys(("absent", "unknown", "undecided", "dense"), "yellow"),
}
"""By the slug of a verdict."""
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
        no_color: bool = False,
        plain: bool = False,
    ) -> None:
        """Of `width` None as wide as the terminal; `plain`: as in a file, FORCE_COLOR or not."""
        super().__init__(
            file=file,
            width=width,
            soft_wrap=soft_wrap,
            no_color=no_color,
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
    named = [block for block in document.appendix if isinstance(block, Names)]
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
        elif isinstance(block, Names):
            yield Text(_first_names(block))
        elif isinstance(block, Table):
            yield _table(block.folded())


def _table(made: Table) -> RenderableType:
    if made.style == "layers":
        return _LayerTable(made)
    if made.style == "rows":
        return Group(*_rows(made))
    return _TotalsTable(made) if made.style == "cards" else _FittedTable(made)


def _first_names(block: Names) -> str:
    more = len(block.names) - _NAMES_SHOWN
    rest = f", and {more:,} more (--json has all)" if more > 0 else ""
    return f"{block.short}: {', '.join(block.names[:_NAMES_SHOWN])}{rest}"


def _rows(made: Table) -> Iterator[RenderableType]:
    """Short words and figures give none of their room away while names and sentences can."""
    if made.title:
        yield Text(made.title, style="bold")
    table = _headed()
    for one in made.columns:
        longest = max((len(cell or "") for cell in one.cells), default=0)
        is_whole = one.kind in (Kind.FIGURE, Kind.VERDICT)
        own = max(min(longest, _OP_WIDTH), len(one.head)) if is_whole else None
        head = Text(one.head, justify="left")
        table.add_column(head, justify=_justified(one), overflow="fold", width=own)
    for at in range(len(made.rows)):
        table.add_row(*(_cell(one, at) for one in made.columns))
    yield table


def _justified(column: Column) -> JustifyMethod:
    return "right" if column.kind is Kind.FIGURE else "left"


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


class _TotalsTable:
    """A line for each status; the codes on one of their own where they would be broken."""

    def __init__(self, made: Table) -> None:
        self._rows = [tuple(cell or "" for cell in row) for row in made.rows]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """Title, layers and weights under each other."""
        grid = RichTable.grid(padding=(0, _GAP, 0, 0))
        for justify in ("left", "right", "right", "left"):
            grid.add_column(justify=justify, overflow="fold")
        for row in self._rows:
            grid.add_row(*map(Text, row))
        least = [
            max(map(len, cells)) for cells in zip(*(row[:3] for row in self._rows), strict=True)
        ]
        code = max((len(word) for row in self._rows for word in row[3].split()), default=0)
        if sum(least) + 3 * _GAP + code <= options.max_width:
            yield grid
            return
        for title, layers, weights, codes in self._rows:
            yield Text(f"{title:<{least[0]}}  {layers:>{least[1]}}  {weights:>{least[2]}}")
            if codes:
                yield Padding(Text(codes), (0, 0, 0, _GAP))


class _LayerTable:
    """A row per layer: on one line if it fits, else words below others, times in a table behind.

    On a terminal a row that says what the one before it says is told "as above"; in a pipe or a
    file, where a line may be looked for alone, every row says all.
    """

    def __init__(self, made: Table) -> None:
        self._made = made
        self._columns = {column.key: column for column in made.columns}
        self._names = [_behind(self._columns["layer"], at, "  ") for at in range(len(made.rows))]
        self._times = tuple(c for c in made.columns if c.kind is Kind.FIGURE)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table of words, and one of figures where anything was timed."""
        width = options.max_width
        if _fits(self._made.columns, width):
            yield _fitted(self._made.columns, width)
            return
        table = _headed("layer", "op, type", "C x K kernel", "pattern", "verdict", *_TEXT_HEADS)
        stacked = not self._share_width(table, width)
        if stacked:
            table = _headed("layer, op, C x K kernel, type", "verdict, pattern", *_TEXT_HEADS)
            self._share_stacked(table, width)
        before: tuple[str, str] | None = None
        for at in range(len(self._names)):
            own = (self._cell("why", at), self._cell("remedy", at))
            texts = (AS_ABOVE, AS_ABOVE) if console.is_terminal and own == before else own
            before = own
            table.add_row(*self._words(at, stacked=stacked), *map(Text, texts))
        yield table
        if self._times:
            yield _FittedTable(self._timed())

    def _words(self, at: int, *, stacked: bool) -> tuple[Text, ...]:
        name = Text(self._names[at], overflow="fold")
        op, size, of_type = (self._cell(key, at) for key in ("op", "size", "type"))
        column, pattern = self._columns["verdict"], self._cell("pattern", at)
        verdict = Text(column.cells[at] or "", style=_COLOURS.get(column.slugs[at], ""))
        verdict.append(_note(column, at))
        if stacked:
            return Text("\n").join((name, Text(f"{op} {size} {of_type}"))), verdict.append(
                f"\n{pattern}"
            )
        both = Text(f"{op}\n{of_type}", overflow="fold")
        return name, both, Text(size), Text(pattern), verdict

    def _timed(self) -> Table:
        """The layers with a time."""
        rows = [at for at in range(len(self._names)) if any(c.cells[at] for c in self._times)]
        columns = (
            replace(
                column,
                cells=tuple(column.cells[at] for at in rows),
                notes=tuple(column.note(at) for at in rows),
            )
            for column in (self._columns["layer"], *self._times)
        )
        return Table(title="Tactics", columns=tuple(columns))

    def _cell(self, key: str, at: int) -> str:
        text = self._columns[key].cells[at]
        return _NO_VALUE if text is None else text

    def _longest(self, key: str) -> int:
        return max(map(len, filter(None, self._columns[key].cells)), default=0)

    def _code_width(self) -> int:
        """Of the longest code: one is read whole, and searched for."""
        codes = (word for text in self._columns["why"].cells for word in _codes(text or ""))
        return max(map(len, codes), default=0) + len(":")

    def _share_width(self, table: RichTable, width: int) -> bool:
        """Name, why and what to do share what the short columns leave; nothing is cut.

        False where the width does not hold codes and short words, with names that can be read.
        """
        name, op, size, pattern, verdict, why, what_to_do = table.columns
        longest = max(map(len, self._names), default=0)
        column = self._columns["verdict"]
        verdicts = (len((c or "") + _note(column, at)) for at, c in enumerate(column.cells))
        op.width = max(min(max(self._longest("op"), self._longest("type")), _OP_WIDTH), len("type"))
        size.width, pattern.width = _SIZE_WIDTH, len("pattern")
        verdict.width = max(min(max(verdicts, default=0), _VERDICT_WIDTH), len("verdict"))
        short = op.width + size.width + pattern.width + verdict.width
        least, code = max(min(longest, _LEAST_LAYER), len("layer")), self._code_width()
        left = width - short - 6 * _GAP - least - code - _REMEDY_WIDTH
        wanted = max(min(longest, _NAME_AND_CODE - max(code, _CODE_WIDTH)), least)
        name.width = least + max(min(wanted - least, left), 0)
        texts = (why, code), (what_to_do, _REMEDY_WIDTH)
        _spread(left - name.width + least, (name, longest), *texts)
        return left >= 0

    def _share_stacked(self, table: RichTable, width: int) -> None:
        """The same for four columns: the name has at least the room of its op."""
        name, verdict, why, what_to_do = table.columns
        longest, code = max(map(len, self._names), default=0), self._code_width()
        verdict.width = _VERDICT_WIDTH
        left = width - _VERDICT_WIDTH - _OP_WIDTH - code - _REMEDY_WIDTH - 3 * _GAP
        more = max(min(longest - _OP_WIDTH, _LEAST_LAYER - _OP_WIDTH, left), 0)
        name.width = _OP_WIDTH + more
        _spread(left - more, (name, longest), (why, code), (what_to_do, _REMEDY_WIDTH))


_TEXT_HEADS = ("why", "what to do")


def _spread(
    left: int,
    name: tuple[RichColumn, int],
    why: tuple[RichColumn, int],
    what: tuple[RichColumn, int],
) -> None:
    """Share `left` columns: of all, names have at most their part, the texts 5 to 4."""
    (named, longest), (why_cell, code), (what_cell, least) = name, why, what
    width, left = named.width or 0, max(left, 0)
    every = width + code + least + left
    named.width = max(width, min(longest, every * width // (width + _TEXTS)))
    texts = every - named.width
    why_cell.width = max(code, min(texts * 5 // 9, texts - least))
    what_cell.width = texts - why_cell.width


def _codes(text: str) -> tuple[str, ...]:
    """The code before a reason, and those behind its "also"."""
    found, (_, also, others) = split_code(text), text.rpartition("; also ")
    more = [code.strip() for code in others.split(",")] if also else []
    return (*([found[0]] if found is not None else []), *more)


def _headed(*titles: str) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _behind(column: Column, at: int, between: str = " ") -> str:
    """A cell with its note."""
    text = column.cells[at]
    return between.join(filter(None, (_NO_VALUE if text is None else text, column.note(at))))


def _note(column: Column, at: int) -> str:
    return f" {column.note(at)}" if column.note(at) else ""


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
    for_names = max(_LEAST_NAME, min(longest, width - _least(others, gap=gap) - gap))
    for_names = longest if is_whole else for_names
    table = RichTable(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, gap - 1, 0, 0), show_edge=False
    )
    for one in columns:
        is_figure = one.kind is Kind.FIGURE and not is_whole
        own = for_names if one is names else _least_width(one) if is_figure else None
        table.add_column(Text(one.head), justify=_justified(one), overflow="fold", width=own)
    for at in rows:
        table.add_row(Text(_folded(first[at] or "-", for_names)), *(_cell(c, at) for c in others))
    return table


def _cell(column: Column, at: int) -> Text:
    style = _COLOURS.get(column.slugs[at], "") if column.slugs else ""
    return Text(_behind(column, at), style=style, overflow="fold")


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


def _longest_line(cells: Sequence[str]) -> int:
    return max(cell_len(line) for cell in cells for line in (cell or "-").split("\n"))
