"""Reports in their formats, as the commands print them."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from twofour.records.eligibility import EligibilityReport
from twofour.records.latency import LatencyComparison
from twofour.records.log import BuildLog
from twofour.reports import html, terminal
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.latency_document import latency_document
from twofour.reports.log_document import log_document
from twofour.reports.text import csv, markdown


def eligibility_table(report: EligibilityReport) -> RenderableType:
    return terminal.render(eligibility_document(report))


def to_markdown(report: EligibilityReport) -> str:
    return markdown(eligibility_document(report))


def to_html(report: EligibilityReport, **more: Any) -> str:
    return html.page(eligibility_document(report, **more))


def to_csv(report: EligibilityReport) -> str:
    return csv(eligibility_document(report))


def comparison_text(comparison: LatencyComparison) -> RenderableType:
    return terminal.render(latency_document(comparison))


def comparison_markdown(comparison: LatencyComparison) -> str:
    return markdown(latency_document(comparison))


def comparison_page(comparison: LatencyComparison) -> str:
    return html.page(latency_document(comparison))


def log_text(log: BuildLog) -> str:
    return terminal.plain_text(terminal.render(log_document(log)))
