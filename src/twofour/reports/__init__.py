"""Records -> one Document -> a format of it; no torch, onnx, tensorrt.

A record has the function that makes its document here by name, and a format the function that makes
it of a document.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pkgutil import resolve_name
from typing import TYPE_CHECKING, TypeAlias

from twofour.errors import BadInputError
from twofour.packages import missing

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import RenderableType

    from twofour.records.weights import Report
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
DOCUMENTS = {
    "BuildLog": "log_document:log_document",
    "EligibilityReport": "eligibility_document:eligibility_document",
    "Fleet": "fleet_document:fleet_document",
    "Forecast": "forecast_document:forecast_document",
    "LatencyComparison": "latency_document:latency_document",
    "ModelSizes": "pruning_document:sizes_document",
    "PruneResult": "pruning_document:prune_document",
    "SensitivityResult": "pruning_document:sensitivity_document",
    "Validation": "pruning_document:validation_document",
}


def document_of(record: Report) -> Document:
    """The document of a record."""
    maker = DOCUMENTS[type(record).__name__]
    document: Document = resolve_name(f"{__name__}.{maker}")(record)
    return document


def data_frame(record: Report) -> DataFrame:
    """The rows of the record's CSV; raises MissingToolError without pandas."""
    from twofour.reports.text import rows_of

    try:
        from pandas import DataFrame
    except ModuleNotFoundError as error:
        raise missing(error) or error from error
    heads, *rows = rows_of(document_of(record))
    return DataFrame(map(list, rows), columns=list(heads))


def framed_page(record: Report) -> str:
    """The record's page in a frame, so that its style stays its own."""
    page = escape(str(renderer("html")(document_of(record))))
    return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


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
