"""Reports as one HTML file that needs no network: cards, plots, a table to search in.

The page trusts no name: text is escaped by the template engine, data for the script is JSON without
a character HTML knows, and a Content Security Policy lets only its own script and style run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from markupsafe import Markup, escape

from twofour.reports.document import (
    Block,
    Column,
    Document,
    Kind,
    Lines,
    Role,
    RowDetails,
    Section,
    Table,
    split_code,
)
from twofour.reports.text import markdown
from twofour.store import write_text

if TYPE_CHECKING:
    from jinja2 import Environment

    from twofour.reports.svg import Drawing

Choices: TypeAlias = tuple[list[tuple[str, str, int]], list[tuple[str, int]]]
_NOT_IN_JSON = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def page(document: Document) -> str:
    """A whole page with its style, script and data inside; the same report gives the same bytes.

    A table of layers holds every one and can be read without the script, which adds the filter,
    the sorting and the details of a layer.
    """
    layers = next((t for t in document.tables if t.style == "layers"), None)
    blocks = (*document.blocks, *document.appendix)
    has_latency = any(isinstance(b, Section) and b.style == "latency" for b in blocks)
    styles = ["report.css", *(["latency.css"] if has_latency else [])]
    style = Markup("").join(map(_asset, styles))
    script = None if layers is None else _asset("report.js")
    details: tuple[RowDetails, ...] = ()
    if layers is not None and layers.details is not None:
        details = tuple(map(layers.details, range(len(layers.rows))))
    choices = _choices(document, details)
    known = {"draw": drawn, "cell": _cell, "reason": _reason, "choices": choices}
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            document=document,
            subtitle=[line for block in document.lead if _is_title(block) for line in block.lines],
            lead=[block for block in document.lead if not _is_title(block)],
            known=known,
            policy=_policy(style, script),
            style=style,
            script=script,
            data=None if layers is None else _script_data(layers, details),
        )
    )


def write_pages(folder: Path, names: tuple[str, str], document: Document) -> None:
    """Write the document as Markdown and as a page, under these two names."""
    for name, text in zip(names, (markdown(document), page(document)), strict=True):
        write_text(folder / name, text)


def drawn(drawing: Drawing) -> Markup:
    """The drawing as SVG text."""
    module = environment().get_template("plot.svg.j2").module
    draw: Callable[[Drawing], Markup] = vars(module)["draw"]
    return draw(drawing)


@lru_cache(maxsize=1)
def environment() -> Environment:
    """The templates of the pages: every text is escaped, no name may be missing."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("twofour.reports", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _asset(name: str) -> Markup:
    """A style or script from the folder of the templates, on lines of its own."""
    text = (files("twofour.reports") / "templates" / name).read_text(encoding="utf-8")
    return Markup(f"\n{text}")  # noqa: S704 -- a file of this package


def _is_title(block: Block) -> TypeGuard[Lines]:
    return isinstance(block, Lines) and block.role is Role.TEXT


def _policy(style: Markup, script: Markup | None) -> str:
    """Content Security Policy: nothing is fetched, nothing runs but what is in the page."""
    allowed = ["default-src 'none'"]
    for what, text in (("style", style), ("script", script)):
        if text is not None:
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            allowed.append(f"{what}-src 'sha256-{digest}'")
    return "; ".join((*allowed, "base-uri 'none'", "form-action 'none'"))


def _cell(column: Column, at: int) -> Markup:
    """A name may break behind its dots, a verdict is a badge, a code stands apart."""
    text, note = column.cells[at], column.note(at)
    if text is None:
        return Markup("-")
    if column.kind is Kind.VERDICT and column.slugs:
        badge = Markup('<span class="badge {}">{}</span>').format(column.slugs[at], text)
        return badge + Markup(" <em>{}</em>").format(note) if note else badge
    if column.kind is Kind.REASON:
        return _reason(text)
    shown = escape(text)
    if column.kind is Kind.NAME:  # a line may break behind a dot or a slash
        shown = shown.replace(".", Markup(".<wbr>")).replace("/", Markup("/<wbr>"))
    return shown.replace("\n", Markup("<br>"))


def _reason(text: str) -> Markup:
    found = split_code(text)
    return escape(text) if found is None else Markup("<code>{}</code>: {}").format(*found)


def _codes(details: RowDetails) -> tuple[str, ...]:
    return tuple(dict.fromkeys(code for code, _, _ in details.reasons))


def _choices(document: Document, details: Sequence[RowDetails]) -> Choices:
    """What layers can be filtered by, counted: verdicts (slug, title) and codes."""
    if not details:
        return [], []
    by_style = {table.style: table for table in document.tables}
    cards, layers = by_style["cards"].columns[0], by_style["layers"]
    found = Counter(_column(layers, "verdict").slugs)
    titles = zip(cards.slugs, cards.cells, strict=True)
    verdicts = [(slug, title or "", found[slug]) for slug, title in titles if found[slug]]
    codes = Counter(code for row in details for code in _codes(row))
    return verdicts, sorted(codes.items())


def _column(table: Table, key: str) -> Column:
    return next(column for column in table.columns if column.key == key)


def _script_data(layers: Table, details: Sequence[RowDetails]) -> Markup:
    """What the script sorts and filters by and the details it shows, as JSON that is safe here."""
    rows = [_layer_data(layers, at, row) for at, row in enumerate(details)]
    text = json.dumps(rows, separators=(",", ":"), allow_nan=False)
    # everything but ASCII is an escape already, U+2028 and lone surrogates among it
    return Markup(text.translate(_NOT_IN_JSON))  # noqa: S704 -- no character of HTML is left


def _layer_data(layers: Table, at: int, details: RowDetails) -> dict[str, object]:
    cells = {column.key: column.cells[at] for column in layers.columns}
    return {
        "name": cells["layer"],
        "status": _column(layers, "verdict").slugs[at],
        "codes": _codes(details),
        "sort": {column.key: column.values[at] for column in layers.columns},
        "size": cells["size"],
        "verdict": cells["verdict"],
        "facts": details.facts,
        "reasons": details.reasons,
        "remedy": cells["remedy"] or "",
    }
