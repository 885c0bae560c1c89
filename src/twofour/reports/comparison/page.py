"""A comparison as a section of an HTML page, and as a page of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup, escape

from twofour.records.latency import LatencyComparison, LayerContrast
from twofour.reports.comparison.answer import answer_lines
from twofour.reports.comparison.circumstances import (
    difference_lines,
    legend,
    machine_lines,
    noise_lines,
    note_lines,
)
from twofour.reports.comparison.columns import Grid, Kind
from twofour.reports.comparison.grids import batch_grids, failures_grid, sweep_grid
from twofour.reports.comparison.layer_grid import layer_grid
from twofour.reports.comparison.naming import without_batch
from twofour.reports.comparison.parts import batches
from twofour.reports.comparison.plots import ratio_plot, sample_plot
from twofour.reports.comparison.settings_grid import settings_grid
from twofour.reports.comparison.svg import VERDICT_SLUGS
from twofour.reports.comparison.sweep_plot import sweep_plot
from twofour.reports.comparison.waterfall import waterfall
from twofour.reports.page_frame import breakable, drawn, render
from twofour.reports.words import printable

STYLE = "latency.css"
_PAGE = "latency_page.html.j2"
_PAGE_STYLES = ("report.css", STYLE)
_SLUGS = {verdict.value: slug for verdict, slug in VERDICT_SLUGS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlTable:
    """A Grid as the template sets it: class of each column, cells of each row as markup."""

    title: str
    heads: tuple[tuple[str, str], ...]
    """Class and text."""
    rows: tuple[tuple[tuple[str, Markup], ...], ...]
    """Class and content."""
    legend: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with what it shows above it and how to read it beneath."""

    caption: str
    plot: Markup
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What belongs together: tables, then plots; closed at first where it is one of several."""

    title: str | None
    tables: tuple[HtmlTable, ...]
    figures: tuple[Figure, ...]
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySection:
    """The section "Latency" by the names that its template uses."""

    answer: str
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    legend: str
    blocks: tuple[Block, ...]
    noise: tuple[str, ...]
    machine: tuple[str, ...]
    notes: tuple[str, ...]


def comparison_page(comparison: LatencyComparison) -> str:
    """A whole page that fetches nothing and has no script; the same record gives the same bytes."""
    return render(
        _PAGE,
        styles=_PAGE_STYLES,
        script=None,
        source=printable(comparison.source),
        latency=latency_section(comparison),
    )


def latency_section(comparison: LatencyComparison) -> LatencySection:
    """The section as the report's page and the page of its own show it."""
    answer, *lines = answer_lines(comparison)
    return LatencySection(
        answer=answer,
        lines=tuple(lines),
        warnings=difference_lines(comparison),
        legend=legend(comparison),
        blocks=tuple(b for b in _blocks(comparison) if b.tables or b.figures),
        noise=noise_lines(comparison),
        machine=machine_lines(comparison),
        notes=note_lines(comparison),
    )


def _blocks(comparison: LatencyComparison) -> Iterator[Block]:
    """The sweep, each batch (the first one open), what failed, the layers."""
    sizes = batches(comparison)
    yield _block(None, (sweep_grid(comparison),), _sweep_figure(comparison))
    for number, batch in enumerate(sizes):
        title = f"Batch {batch}" if len(sizes) > 1 else None
        figures = _batch_figures(comparison, batch)
        yield _block(title, batch_grids(comparison, batch), figures, closed=number > 0)
    yield _block(None, (settings_grid(comparison), failures_grid(comparison)), ())
    for contrast in comparison.layers:
        yield _block(None, (layer_grid(contrast),), _waterfall_figure(contrast))


def _block(
    title: str | None,
    grids: tuple[Grid, ...],
    figures: tuple[Figure | None, ...],
    *,
    closed: bool = False,
) -> Block:
    return Block(
        title=title,
        tables=tuple(_table(made) for made in grids if made.columns),
        figures=tuple(figure for figure in figures if figure is not None),
        closed=closed,
    )


def _sweep_figure(comparison: LatencyComparison) -> tuple[Figure | None]:
    note = f"Whiskers: 95 % intervals. {_shaded(comparison)}"
    return (_figure("Ratio over batch", sweep_plot(comparison), note),)


def _batch_figures(comparison: LatencyComparison, batch: int | None) -> tuple[Figure | None, ...]:
    ratio_note = (
        f"Disc: faster; diamond: slower; ring: no difference; box: undecided. {_shaded(comparison)}"
    )
    sample_note = (
        "A dot is a run, the first round on top of its strip: a slant is drift, two columns are two"
        " speeds. Box: the middle half; at the edges: runs beyond the axis."
    )
    return (
        _figure("Time over the baseline's", ratio_plot(comparison, batch), ratio_note),
        _figure("Every run of every variant", sample_plot(comparison, batch), sample_note),
    )


def _shaded(comparison: LatencyComparison) -> str:
    others = any(without_batch(n.variant) != comparison.baseline for n in comparison.noise)
    own = "; other engines have noise of their own, see below" if others else ""
    return f"Shaded: what the baseline measured twice differs by{own}."


def _waterfall_figure(contrast: LayerContrast) -> tuple[Figure | None]:
    note = "Per cent: of the difference between both sums."
    return (_figure("From the baseline's layers to the variant's", waterfall(contrast), note),)


def _figure(caption: str, plot: str | None, note: str) -> Figure | None:
    markup = drawn(plot)
    return None if markup is None else Figure(caption=caption, plot=markup, note=note)


def _table(made: Grid) -> HtmlTable:
    kinds = tuple(column.kind for column in made.columns)
    return HtmlTable(
        title=made.title,
        heads=tuple((column.kind.value, column.head) for column in made.columns),
        rows=tuple(
            tuple((kind.value, _cell(kind, text)) for kind, text in zip(kinds, row, strict=True))
            for row in made.rows
        ),
        legend=made.legend,
    )


def _cell(kind: Kind, text: str | None) -> Markup:
    if text is None:
        return Markup("-")
    if kind is Kind.VERDICT:
        slug = _SLUGS.get(text, "none")
        return Markup('<span class="badge {}">{}</span>').format(slug, text)
    first, *others = text.split("\n")
    shown = breakable(first) if kind is Kind.NAME else escape(first)
    return Markup("<br>").join((shown, *map(escape, others)))
