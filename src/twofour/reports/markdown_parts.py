"""Text, names and tables in GitHub Markdown, escaped so that they are nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from twofour.reports.words import printable

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
