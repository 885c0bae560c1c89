"""Records of every kind in the formats of their reports, as the commands print them."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from twofour.records.eligibility import EligibilityReport
from twofour.records.log import BuildLog
from twofour.records.weights import Report
from twofour.reports import document_of, html, terminal
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.text import csv, markdown


def to_table(record: Report) -> RenderableType:
    return terminal.render(document_of(record))


def to_markdown(record: Report) -> str:
    return markdown(document_of(record))


def to_csv(record: Report) -> str:
    return csv(document_of(record))


def to_html(record: Report, **more: Any) -> str:
    """`more` is what a run knows beside a report of verdicts."""
    if isinstance(record, EligibilityReport):
        return html.page(eligibility_document(record, **more))
    return html.page(document_of(record))


def log_text(log: BuildLog) -> str:
    return terminal.plain_text(to_table(log))
