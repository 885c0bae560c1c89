"""Reports as one HTML file that needs no network: cards, bars, a table to search in.

The page trusts no name: text is escaped by the template engine, data for the script is JSON without
a character HTML knows, and a Content Security Policy lets only its own script and style run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from markupsafe import Markup, escape

from twofour.reports.document import (
    Block,
    Column,
    Document,
    Fold,
    Kind,
    Lines,
    Role,
    RowDetails,
    Section,
    Table,
)
from twofour.reports.text import markdown
from twofour.store import write_text

if TYPE_CHECKING:
    from jinja2 import Environment

Choices: TypeAlias = tuple[list[tuple[str, str, int]], list[tuple[str, int]]]
_Row: TypeAlias = tuple[RowDetails, list[str]]
_NOT_IN_JSON = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def page(document: Document) -> str:
    """A whole page with its style, script and data inside; the same report gives the same bytes.

    A table of layers can be read without the script, which adds the filter, the sorting and the
    details. Layers that share a row have the details of the first, and all of their names.
    """
    tables = {table.style: table for table in document.tables}
    layers = tables.get("layers")
    script = data = None
    choices: Choices = [], []
    if layers is not None and layers.details is not None:
        details = list(_details(layers, layers.details))
        choices = _choices(tables["cards"], layers, details)
        layers = layers.folded()
        script = _asset("report.js")
        data = _script_data(layers, details)
    style = _style(document)
    template = _environment().get_template("page.html.j2")
    return template.render(
        document=document,
        subtitle=[line for block in filter(_is_title, document.lead) for line in block.lines],
        lead=[block for block in document.lead if not _is_title(block)],
        known={
            "cell": _cell,
            "reason": _reason,
            "headline": _headline,
            "choices": choices,
            "layers": layers,
        },
        policy=_policy(style, script),
        style=style,
        script=script,
        data=data,
    )


def write_pages(folder: Path, names: tuple[str, str], document: Document) -> None:
    """Write the document as Markdown and as a page, under these two names."""
    for_text, for_page = names
    write_text(folder / for_text, markdown(document))
    write_text(folder / for_page, page(document))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """The templates of the pages: every text is escaped, no name may be missing."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("twofour.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _style(document: Document) -> Markup:
    style = _asset("report.css")
    for block in (*document.blocks, *document.appendix):
        if isinstance(block, Section) and block.style == "latency":
            return style + _asset("latency.css")
    return style


def _asset(name: str) -> Markup:
    """A style or script from the folder of the templates, on lines of its own."""
    text = (files("twofour.reports") / "templates" / name).read_text(encoding="utf-8")
    return Markup(f"\n{text}")  # noqa: S704 -- a file of this package


def _is_title(block: Block) -> TypeGuard[Lines]:
    return isinstance(block, Lines) and block.role is Role.TEXT


def _policy(style: Markup, script: Markup | None) -> str:
    """Content Security Policy: nothing is fetched, nothing runs but what is in the page."""
    allowed = ["default-src 'none'", f"style-src {_digest(style)}"]
    if script is not None:
        allowed.append(f"script-src {_digest(script)}")
    return "; ".join((*allowed, "base-uri 'none'", "form-action 'none'"))


def _digest(text: Markup) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _cell(column: Column, row: int) -> Markup:
    """A name may break behind its dots, a verdict is a badge, a code stands apart."""
    text = column.cells[row]
    if text is None:
        return Markup("-")
    if column.kind is Kind.VERDICT and column.slugs:
        badge = Markup('<span class="badge {}">{}</span>').format(column.slugs[row], text)
        note = column.note(row)
        if note:
            return badge + Markup(" <em>{}</em>").format(note)
        return badge
    shown = escape(text).replace("_", Markup("_<wbr>"))
    if column.kind is Kind.NAME:  # a line may break behind a dot or a slash
        shown = shown.replace(".", Markup(".<wbr>")).replace("/", Markup("/<wbr>"))
    return shown.replace("\n", Markup("<br>"))


def _reason(text: str) -> Markup:
    return Markup("<code>{}</code>: {}").format(*text.split(": ", 1))


def _details(layers: Table, details: Callable[[int], RowDetails]) -> Iterator[_Row]:
    """The details of each row that is shown, with the names of the layers that share it."""
    names = layers.columns[0].cells
    folds = (
        layers.folds() if layers.folds else [Fold(name="", rows=(at,)) for at in range(len(names))]
    )
    for fold in folds:
        yield details(fold.rows[0]), [names[row] or "" for row in fold.rows]


def _headline(text: str) -> tuple[str, str]:
    """The first sentence, which is set large, and the rest."""
    first, end, rest = text.partition(". ")
    return first + end.rstrip(), rest


def _choices(cards: Table, layers: Table, details: Sequence[_Row]) -> Choices:
    """What layers can be filtered by, counted: verdicts (slug, title) and codes."""
    titles = cards.columns[0]
    numbers = Counter(_column(layers, "verdict").slugs)
    verdicts: list[tuple[str, str, int]] = []
    for slug, title in zip(titles.slugs, titles.cells, strict=True):
        if numbers[slug]:
            verdicts.append((slug, title or "", numbers[slug]))
    codes: Counter[str] = Counter()
    for row, names in details:
        codes.update(dict.fromkeys(_codes(row), len(names)))
    return verdicts, sorted(codes.items())


def _codes(details: RowDetails) -> tuple[str, ...]:
    return tuple(dict.fromkeys(code for code, _, _ in details.reasons))


def _column(table: Table, key: str) -> Column:
    return next(column for column in table.columns if column.key == key)


def _script_data(layers: Table, details: Sequence[_Row]) -> Markup:
    """What the script sorts and filters by and the details it shows, as JSON that is safe here."""
    rows = [_layer_data(layers, at, row) for at, row in enumerate(details)]
    text = json.dumps(rows, separators=(",", ":"), allow_nan=False)
    # everything but ASCII is an escape already, U+2028 and lone surrogates among it
    return Markup(text.translate(_NOT_IN_JSON))  # noqa: S704 -- no character of HTML is left


def _layer_data(layers: Table, row: int, of: _Row) -> dict[str, object]:
    cells = {column.key: column.cells[row] for column in layers.columns}
    details, names = of
    return {
        "names": names,
        "status": _column(layers, "verdict").slugs[row],
        "codes": _codes(details),
        "sort": {column.key: column.values[row] for column in layers.columns},
        "size": cells["size"],
        "verdict": cells["verdict"],
        "facts": details.facts,
        "reasons": details.reasons,
        "remedy": details.remedy,
    }
