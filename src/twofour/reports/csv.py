"""Reports as CSV (RFC 4180 with a header), for spreadsheets and scripts.

Lines end in a newline, what is not known is empty. Text that a spreadsheet would run as a formula
(it starts with = + - @, blanks aside) gets a leading apostrophe, and so does text that starts with
one: a reader that wants the exact name drops one leading apostrophe. Control characters are written
as escapes, so a row is a line.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from math import isfinite

from twofour.reports.document import Document, Table, Value
from twofour.words import printable

CELLS = ("table", "row", "column", "shown", "exact")
"""Columns of a document that has no one table of everything: a line for each cell."""
_FORMULA = frozenset("=+-@＝＋－＠")  # noqa: RUF001 -- the full-width signs are the point
"""First characters that make a spreadsheet run a cell (OWASP, CSV injection)."""


def render(document: Document) -> str:
    """The table for scripts, or each cell of each table as it is shown, and exactly."""
    if document.data is None:
        return _written((CELLS, *(row for table in document.tables for row in _cells(table))))
    columns = document.data().columns
    heads = tuple(column.head for column in columns)
    return _written((heads, *zip(*(column.values for column in columns), strict=True)))


def _cells(table: Table) -> Iterator[tuple[Value, ...]]:
    names, *others = table.columns
    for at, name in enumerate(names.cells):
        for column in others:
            text = None if column.cells[at] is None else f"{column.cells[at]} {column.note(at)}"
            exact = column.values[at] if column.values else None
            yield (table.title, _one_line(name), column.head, _one_line(text), exact)


def _one_line(text: str | None) -> str | None:
    return None if text is None else text.strip().replace("\n", " | ")


def _written(rows: Iterable[Iterable[Value]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _cell(value: Value) -> str:
    if not isinstance(value, str):
        return "" if value is None or not isfinite(value) else str(value)
    safe = printable(value)
    risky = safe.lstrip()[:1] in _FORMULA or safe.startswith("'")
    return f"'{safe}" if safe and risky else safe
