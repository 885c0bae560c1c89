"""The layers of two engines, one against the other: a table, the steps from sum to sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import floor, log10

from twofour.records.latency import LayerContrast, LayerContrastRow
from twofour.reports.document import Kind, Table, column, figures, table
from twofour.reports.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Drawing,
    Scale,
    frame,
    row_figures,
    row_name,
    shape,
    x_axis,
)
from twofour.words import count, figure, per_cent, printable, ratio_word

SHOWN, NAMED = 15, 12
"""Layers with a row, and with a step, of their own; the others have one together."""
_STEP_ROW, _BAR = 24, 16
_WHOLE_FROM = 0.5
"""The axis starts at 0 where the lowest sum is below this part of the highest."""


def layer_table(contrast: LayerContrast) -> Table:
    """The layers with the largest differences, the others in one row, the sums in the title."""
    rows, places = _shown(contrast, SHOWN), _decimal_places(contrast)

    def ms(value: float) -> str:
        return f"{value:,.{places}f}"

    return table(
        _layers_title(contrast),
        (
            column("layer", Kind.NAME, rows, layer_name),
            figures("variant ms", rows, lambda r: r.variant_ms, ms),
            figures("baseline ms", rows, lambda r: r.baseline_ms, ms),
            figures("ratio", rows, lambda r: r.ratio, ratio_word),
            figures("difference ms", rows, lambda r: r.difference_ms, lambda d: _signed(d, places)),
            figures("share", rows, lambda r: r.share, per_cent),
        ),
        legend=f"{_share_words(contrast)}; profiling makes layers slower",
    )


def waterfall(contrast: LayerContrast) -> Drawing | None:
    """From the baseline's total to the variant's, layer by layer.

    None where the two do not differ: steps of a difference that is noise would explain it.
    """
    steps = _shown(contrast, NAMED)
    if not any(step.difference_ms and step.share is not None for step in steps):
        return None
    sums = [contrast.baseline_ms]
    for step in steps:
        sums.append(sums[-1] + step.difference_ms)
    x = _sum_scale(sums)
    bottom = TOP + _STEP_ROW * (len(steps) + 2)
    title = "sum of layers, ms" + ("" if x.low == 0 else " (the axis does not start at 0)")
    parts = [*x_axis(x, bottom, title), *_total(contrast.baseline, contrast.baseline_ms, x, 0)]
    places = _decimal_places(contrast)
    for number, step in enumerate(steps):
        share = "" if step.share is None else f" ({per_cent(step.share)})"
        words = f"{_signed(step.difference_ms, places)} ms{share}"
        parts.append(_step(step, words, (x.at(sums[number]), x.at(sums[number + 1])), number + 1))
    parts += _total(contrast.variant, contrast.variant_ms, x, len(steps) + 1)
    label = f"{contrast.baseline} to {contrast.variant}, {len(steps)} steps"
    return frame((WIDTH, bottom + BOTTOM), printable(label), parts)


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


def _share_words(contrast: LayerContrast) -> str:
    """What a share is of, or why there is none."""
    if all(row.share is None for row in contrast.rows):
        return "no share: no difference end to end, or sums that differ by less than 2 %"
    return "share: of the difference between both sums"


def _shown(contrast: LayerContrast, most: int) -> tuple[LayerContrastRow, ...]:
    """The first `most` layers, and a row that sums up the others where there are several."""
    if len(contrast.rows) <= most + 1:
        return contrast.rows
    return (*contrast.rows[:most], _rest(contrast.rows[most:]))


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


def _decimal_places(contrast: LayerContrast) -> int:
    """Of all milliseconds of a contrast alike: the larger sum has five significant digits."""
    largest = max(contrast.variant_ms, contrast.baseline_ms)
    return min(7, max(1, 4 - floor(log10(largest)))) if largest > 0 else 1


def _signed(difference_ms: float, places: int) -> str:
    """A difference with its sign; 0 has none."""
    text = f"{difference_ms:+,.{places}f}"
    return text if float(text.replace(",", "")) else text[1:]


def _layers_title(contrast: LayerContrast) -> str:
    sums = f"{figure(contrast.variant_ms)} ms instead of {figure(contrast.baseline_ms)} ms"
    difference = _signed(contrast.variant_ms - contrast.baseline_ms, _decimal_places(contrast))
    both = f"{printable(contrast.variant)} over {printable(contrast.baseline)}"
    return f"Layers of {both}: {sums} in sum ({difference} ms)"


def _sum_scale(sums: list[float]) -> Scale:
    low, high = min(sums), max(sums)
    spare = 0.05 * (high - low)
    low = 0.0 if low < _WHOLE_FROM * high else low - spare
    return Scale(low=low, high=high + spare, start=LEFT, end=WIDTH - RIGHT, log=False)


def _total(name: str, total_ms: float, x: Scale, row: int) -> Iterator[Drawing]:
    y = TOP + _STEP_ROW * (row + 0.5)
    at = x.at(total_ms)
    yield row_name(printable(name), y)
    yield shape("path", css="total", d=f"M{x.start} {y}H{at}M{at} {y - _BAR / 2}v{_BAR}")
    yield row_figures(f"{figure(total_ms)} ms", y)


def _step(step: LayerContrastRow, words: str, ends: tuple[float, float], row: int) -> Drawing:
    """A bar from one sum to the next, and a line down from where the last row ended."""
    y = TOP + _STEP_ROW * (row + 0.5)
    top, (before, after) = y - _BAR / 2, ends
    name, _, also = layer_name(step).partition("\n")
    slug = "faster" if step.difference_ms < 0 else "slower"
    width = round(max(abs(after - before), 1), 1)
    return shape(
        "g",
        row_name(name, y),
        shape("path", css="guide", d=f"M{before} {y - _STEP_ROW + _BAR / 2}V{top}"),
        shape("rect", css=f"step {slug}", x=min(before, after), y=top, width=width, height=_BAR),
        row_figures(words, y),
        title=" ".join(filter(None, (name, also, words))),
    )
