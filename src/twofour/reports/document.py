"""A report before any format: texts, tables and bars, built once from the records.

Every text in it is printable already (see `words.printable`); a cell may hold several lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import ClassVar, TypeAlias, TypeVar

from twofour.records import frozen
from twofour.words import figure, name_cell, printable

_T = TypeVar("_T")
Value: TypeAlias = "str | float | None"
_NUMBERS = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})(?!\d)", re.ASCII)
"""Those that read the same in a range: no leading zeros, no digits by the hundred."""
_Key = tuple[str, str, Hashable]


class Kind(str, Enum):
    """How the cells of a column may be set."""

    NAME = "name"
    """From outside, of any length: folded anywhere."""
    FIGURE = "figure"
    """To the right, never broken within a line of the cell."""
    VERDICT = "verdict"
    """One of a few words."""
    TEXT = "text"
    """Sentences: folded at blanks."""


class Role(str, Enum):
    """What lines of text are for."""

    ANSWER = "answer"
    TEXT = "text"
    LIST = "list"
    WARNING = "warning"
    LEGEND = "legend"
    NOTE = "note"
    SOURCES = "sources"
    """A list of codes, each with what it rests on: "DTYPE: No kernel ..."."""


@frozen
class Column:
    """A head and a cell for each row; None is shown as "-"."""

    head: str
    kind: Kind
    cells: tuple[str | None, ...]
    notes: tuple[str, ...] = ()
    """Behind each cell, not a part of it: "x12", "(rules said eligible)"."""
    values: tuple[Value, ...] = ()
    """What each cell is sorted by: of a figure the exact number, in the unit of the head."""
    slugs: tuple[str, ...] = ()
    """For each verdict, the class of its colour and shape."""
    key: str = ""
    """One word for scripts."""
    short: tuple[str | None, ...] = ()
    """The cells where a terminal has no room for the whole ones; (): they have no shorter form."""

    def note(self, row: int) -> str:
        """The note behind the cell of this row."""
        return self.notes[row] if self.notes else ""


@frozen
class Fold:
    """Rows that a short form shows as one: "encoder.{0-11}.fc" for twelve of them."""

    name: str
    rows: tuple[int, ...]


@frozen
class RowDetails:
    """What is known of a row beside its cells: labels with values, reasons in full."""

    facts: tuple[tuple[str, str], ...]
    reasons: tuple[tuple[str, str, str], ...]
    """Code, sentence, source."""
    remedy: str = ""


@frozen
class Table:
    """One table, its cells column by column."""

    kind: ClassVar[str] = "table"
    title: str
    columns: tuple[Column, ...]
    legend: str | None = None
    folds: Callable[[], tuple[Fold, ...]] | None = None
    """Gives every row in exactly one of them; None where no rows are alike."""
    details: Callable[[int], RowDetails] | None = None
    """Gives those of a row."""
    style: str = ""
    """"cards" or "layers", set in a way of their own."""

    @property
    def rows(self) -> tuple[tuple[str | None, ...], ...]:
        """The cells row by row."""
        return tuple(zip(*(column.cells for column in self.columns), strict=True))

    def folded(self) -> Table:
        """A row for each fold: figures from the smallest to the largest, else the first cell."""
        if self.folds is None:
            return self
        folds = self.folds()
        columns = tuple(_folded(column, folds) for column in self.columns)
        return replace(self, columns=columns, folds=None)


@frozen
class Lines:
    """Paragraphs, or the points of a list, by their role."""

    kind: ClassVar[str] = "lines"
    lines: tuple[str, ...]
    role: Role


@frozen
class NameList:
    """Names under a heading; where there is no room for all, the first few behind `short`."""

    kind: ClassVar[str] = "names"
    title: str
    short: str
    names: tuple[str, ...]


@frozen
class Segment:
    """A part of a bar, placed in per cent of its width."""

    slug: str
    start: float
    width: float
    title: str
    """Shown where a reader points at it."""
    label: str
    """Written into it; "" where it has no room for that."""


@frozen
class Bar:
    """A bar over the whole width of a page; formats of text leave it out."""

    kind: ClassVar[str] = "bar"
    caption: str
    label: str
    """The bar in words."""
    segments: tuple[Segment, ...]


@frozen
class Section:
    """Blocks that belong together, under a heading where they have one."""

    kind: ClassVar[str] = "section"
    title: str | None
    blocks: Blocks
    style: str = ""


@frozen
class Details:
    """A section that a page can fold away; elsewhere just its blocks."""

    kind: ClassVar[str] = "details"
    title: str
    blocks: Blocks
    is_open: bool


Block: TypeAlias = "Lines | NameList | Table | Bar | Section | Details"
Blocks: TypeAlias = "tuple[Block, ...]"


class Lack(str, Enum):
    """What a model that is not worth shipping lacks."""

    ACCURACY = "accuracy"
    SPEED = "speed"
    VALUES = "values"
    """An output has no finite one."""


@frozen
class Document:
    """A whole report."""

    name: str
    """What it is about: a model, a run folder."""
    about: str
    """What it says of it, in a word or two: "latency"."""
    title: str
    lead: Blocks = ()
    """Read first: at the top of a page, at the end on a terminal, where it stays in view."""
    blocks: Blocks
    appendix: Blocks = ()
    """What a terminal has no room for; of names it gives the first."""
    data: Callable[[], Mapping[str, Sequence[Value]]] | None = None
    """Values by head for scripts, a row per thing; None: a row per cell of the tables."""
    lacks: Lack | None = None
    """What it says that the model lacks."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables in order, those within sections too."""
        return tuple(_tables((*self.lead, *self.blocks, *self.appendix)))


def unfolded(document: Document) -> Document:
    """The document with every row of its tables."""
    return replace(document, blocks=tuple(map(_unfolded, document.blocks)))


def _unfolded(block: Block) -> Block:
    if isinstance(block, Section):
        return replace(block, blocks=tuple(map(_unfolded, block.blocks)))
    return replace(block, folds=None) if isinstance(block, Table) else block


def column(
    head: str,
    kind: Kind,
    items: Sequence[_T | None],
    cell: Callable[[_T], str | None],
    value: Callable[[_T], Value] | None = None,
    *,
    key: str = "",
) -> Column:
    """A column with a cell, and with `value` the exact value, for each item that is not None.

    Head and cells are made printable here, a cell line by line.
    """
    cells: list[str | None] = []
    values: list[Value] = []
    for item in items:
        text = None if item is None else cell(item)
        cells.append(None if text is None else "\n".join(map(printable, text.split("\n"))))
        if value is not None:
            values.append(None if item is None else value(item))
    return Column(
        head=printable(head), kind=kind, cells=tuple(cells), values=tuple(values), key=key
    )


def names(head: str, items: Sequence[_T | None], name: Callable[[_T], str]) -> Column:
    """A column of names from outside, each on one line and never empty."""
    return column(head, Kind.NAME, items, lambda item: name_cell(name(item)))


def texts(head: str, items: Sequence[_T | None], text: Callable[[_T], str | None]) -> Column:
    """A column of sentences and words, each on one line; an empty one is not shown."""
    return column(head, Kind.TEXT, items, lambda item: printable(text(item) or "") or None)


def figures(
    head: str,
    items: Sequence[_T | None],
    exact: Callable[[_T], float | None],
    words: Callable[[float], str | None] = figure,
    *,
    key: str = "",
) -> Column:
    """A column of figures as they are written, with the exact ones."""

    def cell(item: _T) -> str | None:
        value = exact(item)
        return None if value is None else words(value)

    return column(head, Kind.FIGURE, items, cell, exact, key=key)


def verdict_column(
    head: str, items: Sequence[_T], cell: Callable[[_T], str | None], slug: Callable[[_T], str]
) -> Column:
    """A column of verdicts, each with the class of its colour."""
    return replace(column(head, Kind.VERDICT, items, cell), slugs=tuple(map(slug, items)))


def table(title: str, columns: Sequence[Column], *, legend: str | None = None) -> Table:
    """A table of the columns that have a value somewhere."""
    known = tuple(one for one in columns if has_cells(one))
    return Table(title=title, columns=known, legend=legend)


def lines_of(role: Role, lines: Iterable[str]) -> Lines:
    """Lines for this purpose, made printable here."""
    return Lines(lines=tuple(map(printable, lines)), role=role)


def has_cells(one: Column) -> bool:
    """Whether any row has a cell in it."""
    return any(cell is not None for cell in one.cells)


def section(title: str | None, *blocks: Block | None, style: str = "") -> Section | None:
    """None where nothing would stand under the heading."""
    there = present(*blocks)
    return Section(title=title, blocks=there, style=style) if there else None


def present(*blocks: Block | None) -> Blocks:
    """The blocks that have something to show."""
    return tuple(block for block in blocks if block is not None and not _is_empty(block))


def _is_empty(block: Block) -> bool:
    if isinstance(block, Lines):
        return not block.lines
    if isinstance(block, NameList):
        return not block.names
    return isinstance(block, Table) and not block.columns


def _tables(blocks: Sequence[Block]) -> Iterator[Table]:
    for block in blocks:
        if isinstance(block, Table):
            yield block
        elif isinstance(block, Section | Details):
            yield from _tables(block.blocks)


def at_rows(of: Column, rows: Sequence[int]) -> Column:
    """The column with these rows alone."""

    def kept(items: tuple[_T, ...]) -> tuple[_T, ...]:
        return tuple(items[row] for row in rows) if items else ()

    return replace(
        of,
        cells=kept(of.cells),
        notes=kept(of.notes),
        values=kept(of.values),
        slugs=kept(of.slugs),
        short=kept(of.short),
    )


def _folded(of: Column, folds: Sequence[Fold]) -> Column:
    firsts = at_rows(of, [fold.rows[0] for fold in folds])
    if of.kind is Kind.FIGURE:
        return replace(firsts, cells=tuple(_range(of, fold.rows) for fold in folds))
    if of.kind is not Kind.NAME:
        return firsts
    return replace(
        firsts,
        cells=tuple(fold.name for fold in folds),
        notes=tuple(f"x{len(fold.rows)}" if len(fold.rows) > 1 else "" for fold in folds),
    )


def _range(of: Column, rows: Sequence[int]) -> str | None:
    """The cell of a row that several rows share, from the smallest figure to the largest."""
    if len({of.cells[row] for row in rows}) == 1:
        return of.cells[rows[0]]
    # 0.08, None, 0.05 in rows 3, 4, 5: "0.050 to 0.080", as the cells of rows 5 and 3 write them
    ranked: list[tuple[float, int]] = []
    for row in rows:
        value = of.values[row]
        if isinstance(value, float | int):
            ranked.append((value, row))
    low = of.cells[min(ranked)[1]]
    high = of.cells[max(ranked)[1]]
    return low if low == high else f"{low} to {high}"


# --- rows that say the same, shown as one --------------------------------------------------------


def fold_rows(rows: Iterable[tuple[str, Hashable]]) -> tuple[Fold, ...]:
    """Rows of one kind whose names differ in one number, in the order of the first.

    A row is its layer's name and what it must have in common with others. Each is in exactly one
    fold.
    """
    names: list[str] = []
    keys: list[dict[_Key, str]] = []
    for name, common in rows:
        names.append(name)
        keys.append(_keys(name, common))
    folds: list[Fold] = []
    for key, alike in _alike(keys).items():
        name = names[alike[0]]
        if len(alike) > 1 and not isinstance(key, int):
            name = _folded_name(key, [keys[row][key] for row in alike])
        folds.append(Fold(name=name_cell(name), rows=tuple(alike)))
    return tuple(folds)


def _alike(keys: Sequence[dict[_Key, str]]) -> dict[_Key | int, list[int]]:
    """Rows by the key that they share; a row that shares none stands under its own number."""
    # "enc.0.fc1" has two keys: ("enc.", ".fc1") with the number 0, ("enc.0.fc", "") with 1. The
    # key that most rows have in common wins: enc.{0-11}.fc1, not enc.0.fc{1-2}
    sizes: Counter[_Key] = Counter()
    for options in keys:
        sizes.update(options.keys())
    members: dict[_Key | int, list[int]] = {}
    for row, options in enumerate(keys):
        best = max(options, key=sizes.__getitem__, default=None)
        if best is None or sizes[best] == 1:
            members[row] = [row]
        else:
            members.setdefault(best, []).append(row)
    return members


def _folded_name(key: _Key, numbers: Sequence[str]) -> str:
    before, behind, _ = key
    return f"{before}{{{_ranges(numbers)}}}{behind}"


def _keys(name: str, common: Hashable) -> dict[_Key, str]:
    """For each number in the name: what a row along it has in common, and the number."""
    # "enc.0.fc1" is split into "enc.", "0", ".fc", "1", "": numbers have the odd places
    parts = _NUMBERS.split(name)
    keys: dict[_Key, str] = {}
    for at in range(1, len(parts), 2):
        keys["".join(parts[:at]), "".join(parts[at + 1 :]), common] = parts[at]
    return keys


def _ranges(numbers: Sequence[str]) -> str:
    """Write 0, 1, 2, 5 as "0-2,5"."""
    # 0, 1, 2, 5: [0], [0, 1], [0, 2], then [0, 2] and [5]
    spans: list[list[int]] = []
    for value in sorted(set(map(int, numbers))):
        if spans and spans[-1][-1] == value - 1:
            spans[-1] = [spans[-1][0], value]
        else:
            spans.append([value])
    return ",".join("-".join(map(str, span)) for span in spans)
