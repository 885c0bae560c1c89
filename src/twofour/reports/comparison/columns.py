"""Tables as columns of text, before any format: a column without a value is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

_T = TypeVar("_T")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A head and a cell for each row; None is shown as "-". Cells may hold several lines."""

    head: str
    kind: Kind
    cells: tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One table; its cells are plain text, already without control characters but newlines."""

    title: str
    columns: tuple[Column, ...]
    legend: str | None = None

    @property
    def rows(self) -> tuple[tuple[str | None, ...], ...]:
        """The cells row by row."""
        return tuple(zip(*(column.cells for column in self.columns), strict=True))


def column(head: str, kind: Kind, items: Sequence[_T], cell: Callable[[_T], str | None]) -> Column:
    """A column with a cell for each item."""
    return Column(head=head, kind=kind, cells=tuple(map(cell, items)))


def grid(title: str, columns: Sequence[Column], *, legend: str | None = None) -> Grid:
    """A table of the columns that have a value somewhere."""
    kept = tuple(c for c in columns if any(cell is not None for cell in c.cells))
    return Grid(title=title, columns=kept, legend=legend)
