"""Reports as GitHub Markdown, escaped so that no name in them is anything but text.

Ordinary names stand in backticks, those with a backtick, a pipe or a backslash in <code> with
character references: both read the same when rendered, in a table too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

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


def render(document: Document) -> str:
    """The whole document; plots are left out."""
    blocks = (*document.lead, *document.blocks, *document.appendix)
    parts = (f"# {plain(document.title)}", *_blocks(blocks, "##"))
    return "\n\n".join(part for part in parts if part) + "\n"


def _blocks(blocks: Sequence[Block], mark: str) -> Iterator[str]:
    """Points that follow each other are one list; `mark` begins a heading."""
    points: list[str] = []
    for block in blocks:
        if isinstance(block, Lines) and block.role in _POINTS:
            points += (_POINTS[block.role].format(plain(line)) for line in block.lines)
            continue
        yield "\n".join(points)
        points = []
        yield from _block(block, mark)
    yield "\n".join(points)


def _block(block: Block, mark: str) -> Iterator[str]:
    title = getattr(block, "title", None)
    if isinstance(block, Section | Names | Table) and title:
        yield f"{mark} {plain(title)}"
    if isinstance(block, Section):
        yield from _blocks(block.blocks, f"#{mark}" if title else mark)
    elif isinstance(block, Details):
        yield from _blocks(block.blocks, mark)
    elif isinstance(block, Names):
        yield "\n".join(f"- {code(name)}" for name in block.names)
    elif isinstance(block, Lines):
        yield _paragraphs(block)
    elif isinstance(block, Table):
        made = block.folded()
        heads = [plain(column.head) for column in made.columns]
        rows = ([_cell(column, at) for column in made.columns] for at in range(len(made.rows)))
        yield table(heads, rows)
        yield plain(block.legend or "")


def _paragraphs(block: Lines) -> str:
    if block.role is Role.SOURCES:
        return "\n".join(f"- {_reason(line)}" for line in block.lines)
    lines = map(plain, block.lines)
    return "\n\n".join(f"**{line}**" if block.role is Role.ANSWER else line for line in lines)


def _cell(column: Column, at: int) -> str:
    """A name is code; the lines of a cell are kept apart."""
    text = column.cells[at]
    if text is None:
        return "-"
    if column.kind is Kind.REASON:
        return _reason(text)
    first, *others = text.split("\n")
    shown = code(first) if column.kind is Kind.NAME else plain(first)
    shown = "<br>".join((shown, *map(plain, others)))
    return " ".join(filter(None, (shown, plain(column.note(at)))))


def _reason(text: str) -> str:
    found = split_code(text)
    return plain(text) if found is None else f"`{found[0]}`: {plain(found[1])}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = (titles, tuple("---" for _ in titles), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plain(text: str) -> str:
    """Text that no Markdown reader takes for markup, emphasis, a link or the end of a cell."""
    return _EMPHASIS.sub(r"\\_", "".join(_LITERAL.get(c, c) for c in printable(text)))


def code(name: str) -> str:
    """A name without control characters in backticks, or in <code> where it has one itself."""
    if not _NOT_FOR_BACKTICKS.search(name):
        return f"`{name}`"
    return f"<code>{''.join(c if c.isalnum() else f'&#{ord(c)};' for c in name)}</code>"
