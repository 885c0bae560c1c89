"""Reports in their formats, as the commands print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from twofour.eligibility.totals import LayerStatus
from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.latency import LatencyComparison, LayerContrast
from twofour.records.log import BuildLog
from twofour.reports import (
    csv,
    eligibility_plots,
    html,
    latency_layers,
    latency_plots,
    markdown,
    terminal,
)
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.latency_document import latency_document
from twofour.reports.log_document import log_document
from twofour.reports.svg import Drawing


def eligibility_table(report: EligibilityReport) -> RenderableType:
    return terminal.render(eligibility_document(report))


def to_markdown(report: EligibilityReport) -> str:
    return markdown.render(eligibility_document(report))


def to_html(report: EligibilityReport, **more: Any) -> str:
    return html.render(eligibility_document(report, **more))


def to_csv(report: EligibilityReport) -> str:
    return csv.render(eligibility_document(report))


def comparison_text(comparison: LatencyComparison) -> RenderableType:
    return terminal.render(latency_document(comparison))


def comparison_markdown(comparison: LatencyComparison) -> str:
    return markdown.render(latency_document(comparison))


def comparison_page(comparison: LatencyComparison) -> str:
    return html.render(latency_document(comparison))


def log_text(log: BuildLog) -> str:
    return terminal.plain_text(terminal.render(log_document(log)))


def ratio_plot(comparison: LatencyComparison, batch: int | None) -> str | None:
    return _drawn(latency_plots.ratio_plot(comparison, batch))


def sample_plot(comparison: LatencyComparison, batch: int | None) -> str | None:
    return _drawn(latency_plots.sample_plot(comparison, batch))


def sweep_plot(comparison: LatencyComparison) -> str | None:
    return _drawn(latency_plots.sweep_plot(comparison))


def waterfall(contrast: LayerContrast) -> str | None:
    return _drawn(latency_layers.waterfall(contrast))


def status_bar(numbers: Sequence[tuple[LayerStatus, int]], noun: str) -> str:
    return html.drawn(eligibility_plots.status_bar(numbers, noun))


def size_plot(verdicts: Sequence[Verdict]) -> str | None:
    return _drawn(eligibility_plots.size_plot(verdicts))


def time_plot(verdicts: Sequence[Verdict]) -> str | None:
    return _drawn(eligibility_plots.time_plot(verdicts))


def _drawn(drawing: Drawing | None) -> str | None:
    return None if drawing is None else html.drawn(drawing)
