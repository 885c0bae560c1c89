"""From the baseline's total to the variant's, layer by layer: what each of them saves or costs."""

from __future__ import annotations

from html import escape

from twofour.records.latency import LayerContrast, LayerContrastRow
from twofour.reports.comparison.figures import figure, per_cent
from twofour.reports.comparison.layer_grid import decimal_places, layer_name, shown, signed
from twofour.reports.comparison.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    frame,
    row_figures,
    row_name,
    x_axis,
)
from twofour.reports.words import printable

NAMED = 12
"""Layers with a step of their own; the others are one step together."""
_ROW, _BAR = 24, 16
_WHOLE_FROM = 0.5
"""The axis starts at 0 where the lowest sum is below this part of the highest."""


def waterfall(contrast: LayerContrast) -> str | None:
    """None where the two do not differ: steps of a difference that is noise would explain it."""
    steps = shown(contrast, NAMED)
    if not any(step.difference_ms and step.share is not None for step in steps):
        return None
    sums = [contrast.baseline_ms]
    for step in steps:
        sums.append(sums[-1] + step.difference_ms)
    x = _scale(sums)
    bottom = TOP + _ROW * (len(steps) + 2)
    parts = [x_axis(x, bottom, _title(x)), _total(contrast.baseline, contrast.baseline_ms, x, 0)]
    places = decimal_places(contrast)
    for number, step in enumerate(steps):
        words = f"{signed(step.difference_ms, places)} ms{_share(step)}"
        parts.append(_step(step, words, (x.at(sums[number]), x.at(sums[number + 1])), number + 1))
    parts.append(_total(contrast.variant, contrast.variant_ms, x, len(steps) + 1))
    label = f"{contrast.baseline} to {contrast.variant}, {len(steps)} steps"
    return frame(bottom + BOTTOM, printable(label), parts)


def _scale(sums: list[float]) -> Scale:
    low, high = min(sums), max(sums)
    spare = 0.05 * (high - low)
    low = 0.0 if low < _WHOLE_FROM * high else low - spare
    return Scale(low=low, high=high + spare, start=LEFT, end=WIDTH - RIGHT, log=False)


def _title(x: Scale) -> str:
    return "sum of layers, ms" + ("" if x.low == 0 else " (the axis does not start at 0)")


def _total(name: str, total_ms: float, x: Scale, row: int) -> str:
    y = TOP + _ROW * (row + 0.5)
    top = y - _BAR / 2
    return (
        f"{row_name(printable(name), y)}"
        f'<path class="total" d="M{x.start} {y}H{x.at(total_ms)}M{x.at(total_ms)} {top}v{_BAR}"/>'
        f"{row_figures(f'{figure(total_ms)} ms', y)}"
    )


def _step(step: LayerContrastRow, words: str, ends: tuple[float, float], row: int) -> str:
    """A bar from one sum to the next, and a line down from where the last row ended."""
    y = TOP + _ROW * (row + 0.5)
    before, after = ends
    name, _, also = layer_name(step).partition("\n")
    slug = "faster" if step.difference_ms < 0 else "slower"
    return (
        f"<g><title>{escape(' '.join(part for part in (name, also, words) if part))}</title>"
        f"{row_name(name, y)}"
        f'<path class="guide" d="M{before} {y - _ROW + _BAR / 2}V{y - _BAR / 2}"/>'
        f'<rect class="step {slug}" x="{min(before, after)}" y="{y - _BAR / 2}" '
        f'width="{round(max(abs(after - before), 1), 1)}" height="{_BAR}"/>'
        f"{row_figures(words, y)}</g>"
    )


def _share(step: LayerContrastRow) -> str:
    return "" if step.share is None else f" ({per_cent(step.share)})"
