"""Reports as text: GitHub Markdown and CSV.

Markdown: no name is anything but text. Ordinary names stand in backticks, those with a backtick, a
pipe or a backslash in <code> with character references: both read the same when rendered.

CSV (RFC 4180 with a header): lines end in a newline, what is not known is empty. Text that a
spreadsheet would run as a formula (it starts with = + - @, blanks aside) gets a leading apostrophe,
and so does text that starts with one: a reader that wants the exact name drops one leading
apostrophe. Control characters are written as escapes, so a row is a line.
"""

from __future__ import annotations

import csv as csv_module
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite

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
    Value,
)
from twofour.words import printable

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
_POINTS = {
    Role.LIST: "- {}",
    Role.NOTE: "- {}",
    Role.WARNING: "- **Warning:** {}",
}
"""Roles whose lines are points of a list."""


def markdown(document: Document) -> str:
    """The whole document as Markdown, without plots."""
    blocks = (*document.lead, *document.blocks, *document.appendix)
    parts = (f"# {escaped(document.title)}", *_blocks(blocks, "##"))
    return "\n\n".join(part for part in parts if part) + "\n"


def _blocks(blocks: Sequence[Block], mark: str) -> Iterator[str]:
    """Points that follow each other are one list; `mark` begins a heading."""
    points: list[str] = []
    for block in blocks:
        if isinstance(block, Lines) and block.role in _POINTS:
            point = _POINTS[block.role]
            points += (point.format(escaped(line)) for line in block.lines)
            continue
        yield "\n".join(points)
        points = []
        yield from _block(block, mark)
    yield "\n".join(points)


def _block(block: Block, mark: str) -> Iterator[str]:
    if isinstance(block, Section | NameList | Table) and block.title:
        yield f"{mark} {escaped(block.title)}"
    if isinstance(block, Section):
        yield from _blocks(block.blocks, f"#{mark}" if block.title else mark)
    elif isinstance(block, Details):
        yield from _blocks(block.blocks, mark)
    elif isinstance(block, NameList):
        yield _points(map(code, block.names))
    elif isinstance(block, Lines):
        yield _paragraphs(block)
    elif isinstance(block, Table):
        yield from _table(block.folded())


def _paragraphs(block: Lines) -> str:
    if block.role is Role.SOURCES:
        return _points(map(_reason, block.lines))
    words = "**{}**" if block.role is Role.ANSWER else "{}"
    return "\n\n".join(words.format(escaped(line)) for line in block.lines)


def _points(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(made: Table) -> Iterator[str]:
    heads = [escaped(column.head) for column in made.columns]
    columns = [_cells(column) for column in made.columns]
    yield markdown_table(heads, zip(*columns, strict=True))
    yield escaped(made.legend or "")


def _cells(column: Column) -> list[str]:
    return [_cell(column, row) for row in range(len(column.cells))]


def _cell(column: Column, row: int) -> str:
    """A name is code; the lines of a cell are kept apart."""
    text = column.cells[row]
    if text is None:
        return "-"
    # "conv1\nbaseline: conv" in a column of names: `conv1`<br>baseline: conv
    first, *others = text.split("\n")
    shown = code(first) if column.kind is Kind.NAME else escaped(first)
    shown = "<br>".join((shown, *map(escaped, others)))
    note = escaped(column.note(row))
    return f"{shown} {note}" if shown and note else shown or note


def _reason(text: str) -> str:
    name, _, sentence = text.partition(": ")
    return f"`{name}`: {escaped(sentence)}"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = (titles, tuple("---" for _ in titles), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escaped(text: str) -> str:
    """Text that no Markdown reader takes for markup, emphasis, a link or the end of a cell."""
    return _EMPHASIS.sub(r"\\_", "".join(_LITERAL.get(c, c) for c in printable(text)))


def code(name: str) -> str:
    """A name without control characters in backticks, or in <code> where it has one itself."""
    if not _NOT_FOR_BACKTICKS.search(name):
        return f"`{name}`"
    return f"<code>{''.join(c if c.isalnum() else f'&#{ord(c)};' for c in name)}</code>"


# --- CSV ------------------------------------------------------------------------------------------

CELLS = ("table", "row", "column", "shown", "exact")
"""Columns of a document that has no one table of everything: a line for each cell."""
_FORMULA = frozenset("=+-@＝＋－＠")  # noqa: RUF001 -- the full-width signs are the point
"""First characters that make a spreadsheet run a cell (OWASP, CSV injection)."""


def csv(document: Document) -> str:
    """The table for scripts as CSV, or each cell of each table as it is shown, and exactly."""
    text = io.StringIO()
    writer = csv_module.writer(text, lineterminator="\n")
    for row in rows_of(document):
        writer.writerow(map(_csv_cell, row))
    return text.getvalue()


def rows_of(document: Document) -> list[Iterable[Value]]:
    """The heads of that table, then its rows."""
    if document.data is not None:
        columns = document.data()
        return [columns, *zip(*columns.values(), strict=True)]
    rows: list[Iterable[Value]] = [CELLS]
    for table in document.tables:
        rows += _csv_rows(table)
    return rows


def _csv_rows(table: Table) -> Iterator[tuple[Value, ...]]:
    names, *others = table.columns
    for row, name in enumerate(names.cells):
        for column in others:
            cell = column.cells[row]
            shown = None if cell is None else f"{cell} {column.note(row)}"
            exact = column.values[row] if column.values else None
            # Times,sparse@torch:eager,median ms,3.649,3.64912
            yield table.title, _one_line(name), column.head, _one_line(shown), exact


def _one_line(text: str | None) -> str | None:
    return None if text is None else text.strip().replace("\n", " | ")


def _csv_cell(value: Value) -> str:
    if isinstance(value, str):
        safe = printable(value)
        is_risky = safe.lstrip()[:1] in _FORMULA or safe.startswith("'")
        return f"'{safe}" if safe and is_risky else safe
    if value is None or not isfinite(value):
        return ""
    return str(value)
