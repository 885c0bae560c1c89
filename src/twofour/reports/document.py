"""A report before any format: texts, tables and plots, built once from the records.

Every text in it is printable already (see `words.printable`); a cell may hold several lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeVar

from twofour.words import figure, name_cell

if TYPE_CHECKING:
    from twofour.reports.svg import Drawing

_T = TypeVar("_T")
Value: TypeAlias = "str | float | None"
_CODE = re.compile(r"([A-Z][A-Z0-9_]*): ")
_NUMBERS = re.compile(r"(\d+)", re.ASCII)
_LONGEST_NUMBER = 9
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
    REASON = "reason"
    """A sentence, behind its code where it has one: `DTYPE: no sparse kernel for it`."""


class Role(str, Enum):
    """What lines of text are for."""

    ANSWER = "answer"
    TEXT = "text"
    LIST = "list"
    WARNING = "warning"
    LEGEND = "legend"
    NOTE = "note"
    SOURCES = "sources"
    """A list of codes, each with what it rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
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

    def note(self, row: int) -> str:
        """The note behind the cell of this row."""
        return self.notes[row] if self.notes else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Rows that a short form shows as one: "encoder.{0-11}.fc" for twelve of them."""

    name: str
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDetails:
    """What is known of a row beside its cells: labels with values, reasons in full."""

    facts: tuple[tuple[str, str], ...]
    reasons: tuple[tuple[str, str, str], ...]
    """Code, sentence, source."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """"cards", "layers" or "rows" (a line each where there is room), set in a way of their own."""

    @property
    def rows(self) -> tuple[tuple[str | None, ...], ...]:
        """The cells row by row."""
        return tuple(zip(*(column.cells for column in self.columns), strict=True))

    def folded(self) -> Table:
        """A row for each fold: figures from the smallest to the largest, else those of its first.

        A reason that is not word for word that of every row says so.
        """
        if self.folds is None:
            return self
        folds = self.folds()
        return replace(self, columns=tuple(_folded(c, folds) for c in self.columns), folds=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Paragraphs, or the points of a list, by their role."""

    kind: ClassVar[str] = "lines"
    lines: tuple[str, ...]
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class NameList:
    """Names under a heading; where there is no room for all, the first few behind `short`."""

    kind: ClassVar[str] = "names"
    title: str
    short: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot with what it shows above it and how to read it beneath.

    It is drawn by the formats that show it, as plots of many layers take longer than the tables.
    """

    kind: ClassVar[str] = "plot"
    caption: str
    draw: Callable[[], Drawing | None]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Blocks that belong together, under a heading where they have one."""

    kind: ClassVar[str] = "section"
    title: str | None
    blocks: tuple[Block, ...]
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A section that a page can fold away; elsewhere just its blocks."""

    kind: ClassVar[str] = "details"
    title: str
    blocks: tuple[Block, ...]
    is_open: bool


Block: TypeAlias = "Lines | NameList | Table | Plot | Section | Details"


class Lack(str, Enum):
    """What a model that is not worth shipping lacks."""

    ACCURACY = "accuracy"
    SPEED = "speed"
    VALUES = "values"
    """An output has no finite one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report."""

    name: str
    """What it is about: a model, a run folder."""
    about: str
    """What it says of it, in a word or two: "latency"."""
    title: str
    lead: tuple[Block, ...] = ()
    """Read first: at the top of a page, at the end on a terminal, where it stays in view."""
    blocks: tuple[Block, ...]
    appendix: tuple[Block, ...] = ()
    """What a terminal has no room for; of names it gives the first."""
    data: Callable[[], Mapping[str, Sequence[Value]]] | None = None
    """Values by head for scripts, a row per thing; None: a row per cell of the tables."""
    lacks: Lack | None = None
    """What it says that the model lacks."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables in order, those within sections too."""
        return tuple(_tables((*self.lead, *self.blocks, *self.appendix)))


def split_code(text: str) -> tuple[str, str] | None:
    """The code and the sentence of a cell that gives a reason; None where it has no code."""
    found = _CODE.match(text)
    return None if found is None else (found[1], text[found.end() :])


def column(
    head: str,
    kind: Kind,
    items: Sequence[_T],
    cell: Callable[[_T], str | None],
    value: Callable[[_T], Value] | None = None,
    *,
    key: str = "",
) -> Column:
    """A column with a cell, and where it is given the exact value, for each item."""
    values = () if value is None else tuple(map(value, items))
    return Column(head=head, kind=kind, cells=tuple(map(cell, items)), values=values, key=key)


def figures(
    head: str,
    items: Sequence[_T],
    exact: Callable[[_T], float | None],
    words: Callable[[float], str | None] = figure,
    *,
    key: str = "",
) -> Column:
    """A column of figures as they are written, with the exact ones."""

    def cell(item: _T) -> str | None:
        found = exact(item)
        return None if found is None else words(found)

    return column(head, Kind.FIGURE, items, cell, exact, key=key)


def verdict_column(
    head: str, items: Sequence[_T], cell: Callable[[_T], str | None], slug: Callable[[_T], str]
) -> Column:
    """A column of verdicts, each with the class of its colour."""
    return replace(column(head, Kind.VERDICT, items, cell), slugs=tuple(map(slug, items)))


def table(
    title: str, columns: Sequence[Column], *, legend: str | None = None, style: str = ""
) -> Table:
    """A table of the columns that have a value somewhere."""
    kept = tuple(c for c in columns if any(cell is not None for cell in c.cells))
    return Table(title=title, columns=kept, legend=legend, style=style)


def section(title: str | None, *blocks: Block | None, style: str = "") -> Section | None:
    """None where nothing would stand under the heading."""
    there = present(*blocks)
    return Section(title=title, blocks=there, style=style) if there else None


def present(*blocks: Block | None) -> tuple[Block, ...]:
    """The blocks that have something to show."""
    return tuple(b for b in blocks if b is not None and not _is_empty(b))


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


def _folded(of: Column, folds: Sequence[Fold]) -> Column:
    firsts = [fold.rows[0] for fold in folds]
    notes = [of.note(at) for at in firsts]
    if of.kind is Kind.NAME:
        cells: list[str | None] = [fold.name for fold in folds]
        notes = [f"x{len(fold.rows)}" if len(fold.rows) > 1 else "" for fold in folds]
    else:
        cells = [_shared(of, fold.rows) for fold in folds]
    return replace(
        of,
        cells=tuple(cells),
        notes=tuple(notes),
        values=(),
        slugs=tuple(of.slugs[at] for at in firsts) if of.slugs else (),
    )


def _shared(of: Column, rows: Sequence[int]) -> str | None:
    """The cell of a row that several rows share."""
    first = of.cells[rows[0]]
    if len({of.cells[at] for at in rows}) == 1:
        return first
    if of.kind is Kind.REASON:
        return f"{first} (figures of the first)"
    ranked = sorted((v, at) for at in rows if isinstance(v := of.values[at], float | int))
    if of.kind is not Kind.FIGURE or not ranked:
        return first
    low, high = (of.cells[at] for _, at in (ranked[0], ranked[-1]))
    return low if low == high else f"{low} to {high}"


# --- rows that say the same, shown as one --------------------------------------------------------


def fold_rows(rows: Iterable[tuple[str, Hashable]]) -> tuple[Fold, ...]:
    """Rows of one kind whose names differ in one number, in the order of the first.

    A row is its layer's name and what it must have in common with others. Each is in exactly one
    fold.
    """
    named = list(rows)
    # "enc.0.fc1" has two keys: ("enc.", ".fc1") with the number 0, ("enc.0.fc", "") with 1. The
    # key that most rows have in common wins: enc.{0-11}.fc1, not enc.0.fc{1-2}
    keys = [_keys(name, kind) for name, kind in named]
    sizes = Counter(key for options in keys for key in options)
    members: dict[_Key | int, list[int]] = {}
    for index, options in enumerate(keys):
        best = max(options, key=lambda key: sizes[key], default=None)
        key = index if best is None or sizes[best] == 1 else best
        members.setdefault(key, []).append(index)
    return tuple(
        Fold(
            name=name_cell(
                named[at[0]][0]
                if len(at) == 1 or isinstance(key, int)
                else f"{key[0]}{{{_ranges([keys[i][key] for i in at])}}}{key[1]}"
            ),
            rows=tuple(at),
        )
        for key, at in members.items()
    )


def _keys(name: str, kind: Hashable) -> dict[_Key, str]:
    """For each number in the name: what a row along it has in common, and the number."""
    parts = _NUMBERS.split(name)
    return {
        ("".join(parts[:i]), "".join(parts[i + 1 :]), kind): parts[i]
        for i in range(1, len(parts), 2)
    }


def _ranges(numbers: Sequence[str]) -> str:
    """Write 0, 1, 2, 5 as "0-2,5"; numbers with leading zeros or very long ones as they are."""
    distinct = list(dict.fromkeys(numbers))
    if any(len(text) > _LONGEST_NUMBER or text != str(int(text)) for text in distinct):
        return ",".join(distinct)
    spans: list[tuple[int, int]] = []
    for value in sorted(map(int, distinct)):
        if spans and spans[-1][1] == value - 1:
            spans[-1] = (spans[-1][0], value)
        else:
            spans.append((value, value))
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
