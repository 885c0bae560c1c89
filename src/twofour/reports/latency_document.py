"""A latency comparison as a document: the answer, tables and plots, what they rest on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from twofour.latency.naming import without_batch
from twofour.records.latency import LatencyComparison, LayerContrast
from twofour.reports.document import (
    Block,
    Details,
    Document,
    Lines,
    Plot,
    Role,
    Section,
    present,
    section,
)
from twofour.reports.latency_grids import (
    batch_grids,
    failures_grid,
    layer_grid,
    settings_grid,
    sweep_grid,
    times_grid,
)
from twofour.reports.latency_parts import batches
from twofour.reports.latency_plots import ratio_plot, sample_plot, sweep_plot, waterfall
from twofour.reports.latency_words import (
    answer_lines,
    difference_lines,
    legend,
    machine_lines,
    noise_lines,
    note_lines,
)
from twofour.words import printable


def latency_document(comparison: LatencyComparison) -> Document:
    """A document of its own."""
    name = printable(comparison.source)
    return Document(
        name=name,
        about="latency",
        title=f"Latency of {name}",
        blocks=(latency_section(comparison, None),),
    )


def latency_section(comparison: LatencyComparison, title: str | None) -> Section:
    """The comparison as a part of a document."""
    answer, *more = answer_lines(comparison)
    return Section(
        title=title,
        style="latency",
        blocks=present(
            Lines(lines=(answer,), role=Role.ANSWER),
            Lines(lines=tuple(more), role=Role.LIST),
            *_measured(comparison),
            Lines(lines=(legend(comparison),), role=Role.LEGEND),
            Lines(lines=noise_lines(comparison), role=Role.LIST),
            Lines(lines=difference_lines(comparison), role=Role.WARNING),
            section("Measured on", Lines(lines=machine_lines(comparison), role=Role.LIST)),
            *(block for contrast in comparison.layers for block in _layers(contrast)),
            section("Notes", Lines(lines=note_lines(comparison), role=Role.NOTE)),
        ),
    )


def build_times(comparison: LatencyComparison) -> tuple[Block, ...]:
    """The part that a run shows of its own times: the answer, the times, what failed."""
    return present(
        Lines(lines=answer_lines(comparison), role=Role.ANSWER),
        *(times_grid(comparison, batch) for batch in batches(comparison)),
        failures_grid(comparison),
        Lines(lines=note_lines(comparison), role=Role.NOTE),
    )


def _measured(comparison: LatencyComparison) -> Iterator[Block | None]:
    """The sweep, each batch (the first one open), settings, what failed."""
    sizes = batches(comparison)
    yield sweep_grid(comparison)
    yield Plot(
        caption="Ratio over batch",
        draw=partial(sweep_plot, comparison),
        note=f"Whiskers: 95 % intervals. {_shaded(comparison)}",
    )
    for number, batch in enumerate(sizes):
        blocks = present(*batch_grids(comparison, batch), *_batch_plots(comparison, batch))
        if len(sizes) > 1:
            yield Details(title=f"Batch {batch}", blocks=blocks, is_open=number == 0)
        else:
            yield from blocks
    yield settings_grid(comparison)
    yield failures_grid(comparison)


def _batch_plots(comparison: LatencyComparison, batch: int | None) -> Iterator[Plot]:
    yield Plot(
        caption="Time over the baseline's",
        draw=partial(ratio_plot, comparison, batch),
        note="Disc: faster; diamond: slower; ring: no difference; box: undecided. "
        f"{_shaded(comparison)}",
    )
    yield Plot(
        caption="Every run of every variant",
        draw=partial(sample_plot, comparison, batch),
        note="A dot is a run, the first round on top of its strip: a slant is drift, two columns "
        "are two speeds. Box: the middle half; at the edges: runs beyond the axis.",
    )


def _layers(contrast: LayerContrast) -> Iterator[Block | None]:
    yield layer_grid(contrast)
    yield Plot(
        caption="From the baseline's layers to the variant's",
        draw=partial(waterfall, contrast),
        note="Per cent: of the difference between both sums.",
    )


def _shaded(comparison: LatencyComparison) -> str:
    others = any(without_batch(n.variant) != comparison.baseline for n in comparison.noise)
    own = "; other engines have noise of their own, see below" if others else ""
    return f"Shaded: what the baseline measured twice differs by{own}."
