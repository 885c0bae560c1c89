"""Plots of one batch: the ratio of every pair with its interval, and the samples of every variant.

Verdicts differ by shape as well as by colour; names are escaped; nothing is drawn by a library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil

from twofour.records.latency import ComparedVariant, LatencyComparison, LatencyRatio, NoiseFloor
from twofour.reports.comparison.figures import figure, ratio_words
from twofour.reports.comparison.naming import without_batch
from twofour.reports.comparison.parts import (
    measured,
    noise_of,
    over_baseline,
    pair_name,
    within_engines,
)
from twofour.reports.comparison.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    frame,
    log_range,
    row_figures,
    row_name,
    shortened,
    verdict_mark,
    verdict_slug,
    x_axis,
)
from twofour.reports.words import count, printable

_RATIO_ROW, _STRIP, _STRIP_GAP = 26, 34, 8
_NARROWEST, _WIDEST = (0.95, 1.05), (0.2, 5.0)
"""Parts of a variant's own median that the axis of samples shows at least and at most."""
_BEYOND = 7
"""Pixels outside the axis at which samples beyond it are drawn."""


def ratio_plot(comparison: LatencyComparison, batch: int | None) -> str | None:
    """A row per ratio at this batch, the noise shaded; None where there is no ratio."""
    ratios = (*over_baseline(comparison, batch), *within_engines(comparison, batch))
    if not ratios:
        return None
    noise = noise_of(comparison, batch)
    ends = [e for r in ratios for e in (r.ratio, r.low, r.high) if e is not None]
    low, high = log_range((*ends, *_band(noise)))
    x = Scale(low=low, high=high, start=LEFT, end=WIDTH - RIGHT)
    bottom = TOP + _RATIO_ROW * len(ratios)
    parts = [
        _shade(x, noise, bottom),
        x_axis(
            x,
            bottom,
            f"time / time of {shortened(printable(comparison.baseline))}: left of 1 is faster",
        ),
        f'<path class="one" d="M{x.at(1)} {TOP}V{bottom}"/>',
        *(
            _ratio_row(comparison, ratio, x, TOP + _RATIO_ROW * (number + 0.5))
            for number, ratio in enumerate(ratios)
        ),
    ]
    return frame(bottom + BOTTOM, f"{count(len(ratios), 'ratio')} with intervals", parts)


def sample_plot(comparison: LatencyComparison, batch: int | None) -> str | None:
    """A strip per variant with every sample over the variant's own median, rounds from the top.

    So two speeds, outliers and drift are seen at one scale for fast and slow variants alike. None
    where nothing was measured.
    """
    rows = [v for v in measured(comparison, batch) if v.median_ms]
    if not rows:
        return None
    low, high = _sample_range(rows)
    x = Scale(low=low, high=high, start=LEFT, end=WIDTH - RIGHT)
    bottom = TOP + (_STRIP + _STRIP_GAP) * len(rows)
    parts = [x_axis(x, bottom, "time / the variant's own median")]
    for number, row in enumerate(rows):
        parts += _strip(row, x, TOP + (_STRIP + _STRIP_GAP) * number + _STRIP_GAP / 2)
    return frame(bottom + BOTTOM, f"samples of {count(len(rows), 'variant')}", parts)


def _ratio_row(comparison: LatencyComparison, ratio: LatencyRatio, x: Scale, y: float) -> str:
    name, words = pair_name(comparison, ratio), ratio_words(ratio)
    whisker = ""
    if ratio.low is not None and ratio.high is not None and ratio.low > 0:
        left, right = x.at(ratio.low), x.at(ratio.high)
        whisker = (
            f'<path class="whisker {verdict_slug(ratio.verdict)}" '
            f'd="M{left} {y - 4}V{y + 4}M{left} {y}H{right}M{right} {y - 4}V{y + 4}"/>'
        )
    title = f"<title>{escape(f'{name}: {words}, {ratio.verdict.value}')}</title>"
    at = x.at(ratio.ratio) if ratio.ratio > 0 else x.start
    mark = verdict_mark(ratio.verdict, at, y)
    return f"<g>{title}{row_name(name, y)}{whisker}{mark}{row_figures(words, y)}</g>"


def _strip(row: ComparedVariant, x: Scale, top: float) -> Iterator[str]:
    """Name, box of the middle half, samples, those beyond the axis, the median in milliseconds."""
    assert row.median_ms is not None
    middle = top + _STRIP / 2
    parts = [sample / row.median_ms for sample in row.samples_ms]
    quarter, three_quarters = _rank(parts, 25), _rank(parts, 75)
    left = x.at(max(quarter, x.low))
    right = x.at(min(three_quarters, x.high))
    yield row_name(printable(without_batch(row.name)), middle)
    yield (
        f'<rect class="middle" x="{left}" y="{top}" width="{round(right - left, 1)}" '
        f'height="{_STRIP}"/><path class="median" d="M{x.at(1)} {top}v{_STRIP}"/>'
    )
    yield f'<path class="samples" d="{_dots(parts, x, top)}"/>'
    yield from _figures(row.median_ms, parts, x, middle)


def _figures(median_ms: float, parts: Sequence[float], x: Scale, y: float) -> Iterator[str]:
    """The median and, in a second line, how many runs are slower than the axis shows."""
    median, above = f"{figure(median_ms)} ms", sum(part > x.high for part in parts)
    if not above:
        yield row_figures(median, y)
        return
    yield row_figures(median, y - 8)
    yield row_figures(f"{above} beyond, up to {max(parts):.2f}x", y + 8)


def _dots(parts: Sequence[float], x: Scale, top: float) -> str:
    """A line of no length, which is drawn as a dot, for each sample; the first round on top."""
    step = _STRIP / len(parts)
    return "".join(
        f"M{_within(part, x)} {round(top + step * (number + 0.5), 1)}h0"
        for number, part in enumerate(parts)
    )


def _within(part: float, x: Scale) -> float:
    if part > x.high:
        return x.end + _BEYOND
    return x.at(part) if part >= x.low else x.start - _BEYOND


def _sample_range(rows: Sequence[ComparedVariant]) -> tuple[float, float]:
    """From the lowest 2nd to the highest 90th percentile of any variant, within limits."""
    parts = [[s / row.median_ms for s in row.samples_ms] for row in rows if row.median_ms]
    low = min(_rank(each, 2) for each in parts)
    high = max(_rank(each, 90) for each in parts)
    return (
        max(_WIDEST[0], min(low / 1.01, _NARROWEST[0])),
        min(_WIDEST[1], max(high * 1.01, _NARROWEST[1])),
    )


def _rank(values: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that at least so many per cent do not exceed."""
    return sorted(values)[max(1, ceil(len(values) * percent / 100)) - 1]


def _band(noise: NoiseFloor | None) -> tuple[float, ...]:
    return () if noise is None else (1 / (1 + noise.floor), 1 + noise.floor)


def _shade(x: Scale, noise: NoiseFloor | None, bottom: float) -> str:
    if noise is None:
        return ""
    left, right = map(x.at, _band(noise))
    title = escape(f"the same baseline measured twice: {ratio_words(noise)}")
    return (
        f'<rect class="noise" x="{left}" y="{TOP}" width="{round(right - left, 1)}" '
        f'height="{bottom - TOP}"><title>{title}</title></rect>'
    )
