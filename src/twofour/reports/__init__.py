"""Records -> one Document -> a format of it; no torch, onnx, tensorrt.

A format has a name here, and a function that makes it of a document.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, TypeAlias

from twofour.errors import BadInputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twofour.reports.document import Document

Renderer: TypeAlias = "Callable[[Document], RenderableType]"
"""A text, or what rich draws to the width of the terminal."""

TABLE = "table"
FORMATS: dict[str, str | Renderer] = {
    TABLE: "twofour.reports.terminal:render",
    "markdown": "twofour.reports.text:markdown",
    "csv": "twofour.reports.text:csv",
    "html": "twofour.reports.html:page",
}
"""Modules are imported when they are asked for."""


def renderer(name: str) -> Renderer:
    """What makes this format of a document; raises BadInputError for a name that none has."""
    maker = FORMATS.get(name)
    if maker is None:
        raise BadInputError(
            f"--format: there is no format {name!r}", hint=f"one of {', '.join(FORMATS)}"
        )
    if not isinstance(maker, str):
        return maker
    render: Renderer = resolve_name(maker)
    return render
