"""The layers that explain most of the difference between two profiles, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

from twofour.records.latency import LayerContrast, LayerContrastRow
from twofour.reports.comparison.columns import Grid, Kind, column, grid
from twofour.reports.comparison.figures import figure, per_cent, ratio_word
from twofour.reports.words import count, printable

SHOWN = 15
"""Layers with a row of their own; the others are summed up in the last row."""


def layer_grid(contrast: LayerContrast) -> Grid:
    """The layers with the largest differences, the others in one row, the sums in the title."""
    rows, places = shown(contrast, SHOWN), decimal_places(contrast)

    def ms(value: float | None) -> str | None:
        return None if value is None else f"{value:,.{places}f}"

    return grid(
        _title(contrast),
        (
            column("layer", Kind.NAME, rows, layer_name),
            column("variant ms", Kind.FIGURE, rows, lambda r: ms(r.variant_ms)),
            column("baseline ms", Kind.FIGURE, rows, lambda r: ms(r.baseline_ms)),
            column("ratio", Kind.FIGURE, rows, _ratio),
            column("difference ms", Kind.FIGURE, rows, lambda r: signed(r.difference_ms, places)),
            column("share", Kind.FIGURE, rows, _share),
        ),
        legend=f"{share_words(contrast)}; profiling makes layers slower",
    )


def share_words(contrast: LayerContrast) -> str:
    """What a share is of, or why there is none."""
    if all(row.share is None for row in contrast.rows):
        return "no share: no difference end to end, or sums that differ by less than 2 %"
    return "share: of the difference between both sums"


def shown(contrast: LayerContrast, most: int) -> tuple[LayerContrastRow, ...]:
    """The first `most` layers, and a row that sums up the others where there are several."""
    if len(contrast.rows) <= most + 1:
        return contrast.rows
    return (*contrast.rows[:most], _rest(contrast.rows[most:]))


def layer_name(row: LayerContrastRow) -> str:
    """The layer's name in the variant's engine and, where it has another there, the baseline's."""
    name, other = printable(row.layer), printable(row.baseline_layer)
    if row.variant_ms is None:
        return f"{other}\nonly in the baseline"
    if row.baseline_ms is None:
        return f"{name}\nnot in the baseline"
    if name != other:
        return f"{name}\nbaseline: {other}"
    return name if row.owner is None else f"{name}\nfor {printable(row.owner)}"


def decimal_places(contrast: LayerContrast) -> int:
    """Of all milliseconds of a contrast alike: the larger sum has five significant digits."""
    largest = max(contrast.variant_ms, contrast.baseline_ms)
    return min(7, max(1, 4 - floor(log10(largest)))) if largest > 0 else 1


def signed(difference_ms: float, places: int) -> str:
    """A difference with its sign; 0 has none."""
    text = f"{difference_ms:+,.{places}f}"
    return text if float(text.replace(",", "")) else text[1:]


def _title(contrast: LayerContrast) -> str:
    sums = f"{figure(contrast.variant_ms)} ms instead of {figure(contrast.baseline_ms)} ms"
    difference = signed(contrast.variant_ms - contrast.baseline_ms, decimal_places(contrast))
    both = f"{printable(contrast.variant)} over {printable(contrast.baseline)}"
    return f"Layers of {both}: {sums} in sum ({difference} ms)"


def _ratio(row: LayerContrastRow) -> str | None:
    return None if row.ratio is None else ratio_word(row.ratio)


def _share(row: LayerContrastRow) -> str | None:
    return None if row.share is None else per_cent(row.share)


def _rest(rows: Sequence[LayerContrastRow]) -> LayerContrastRow:
    name = f"{count(len(rows), 'more layer')}"
    variant_ms = sum(r.variant_ms or 0.0 for r in rows)
    baseline_ms = sum(r.baseline_ms or 0.0 for r in rows)
    shares = [r.share for r in rows if r.share is not None]
    return LayerContrastRow(
        layer=name,
        baseline_layer=name,
        variant_ms=variant_ms,
        baseline_ms=baseline_ms,
        ratio=variant_ms / baseline_ms if baseline_ms else None,
        difference_ms=sum(r.difference_ms for r in rows),
        share=sum(shares) if shares else None,
    )
