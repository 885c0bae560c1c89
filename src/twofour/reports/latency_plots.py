"""Plots of a latency comparison."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil

from twofour.latency.naming import without_batch
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    LayerContrast,
    LayerContrastRow,
    NoiseFloor,
)
from twofour.reports.latency_document import (
    measured,
    noise_of,
    over_baseline,
    pair_name,
    within_engines,
)
from twofour.reports.latency_grids import decimal_places, layer_name, shown, signed
from twofour.reports.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scale,
    apart,
    frame,
    log_range,
    row_figures,
    row_name,
    shortened,
    ticks,
    verdict_mark,
    verdict_slug,
    x_axis,
)
from twofour.words import count, figure, per_cent, printable, ratio_words

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


_LEFT, _RIGHT, _LABEL = 64, 330, 16
"""Pixels of the axis of ratios, of the names, and between two names."""
_LEAST_HEIGHT = 320
_COLOURS, _ASIDE = 8, 5
"""Colours before a dashed line begins them again; pixels between lines at one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One pair over the batches, in order of the batch."""

    number: int
    name: str
    ratios: tuple[LatencyRatio, ...]
    places: tuple[tuple[float, float], ...]

    @property
    def css(self) -> str:
        """Its colour and how it is dashed, as classes."""
        return f"s{self.number % _COLOURS} d{self.number // _COLOURS % 3}"


def sweep_plot(comparison: LatencyComparison) -> str | None:
    """None where fewer than two batches have ratios."""
    pairs = _pairs(comparison)
    sizes = sorted({b for points in pairs.values() for b in points})
    if len(sizes) < 2:
        return None
    bottom = TOP + max(_LEAST_HEIGHT, _LABEL * len(pairs))
    noise = tuple(n for size in sizes if (n := noise_of(comparison, size)) is not None)
    low, high = log_range(tuple(_values(pairs, noise)))
    x = Scale(low=sizes[0], high=sizes[-1], start=_LEFT + 40, end=WIDTH - _RIGHT - 40)
    y = Scale(low=low, high=high, start=bottom, end=TOP)
    lines = tuple(_placed(pairs, x, y))
    labels = apart([line.places[-1][1] for line in lines], gap=_LABEL, low=TOP + 6, high=bottom - 2)
    parts = (
        _sweep_plot_shade(noise, x, y),
        _axes(sizes, x, y),
        *(_line(line, y) for line in lines),
        *(_label(line, at) for line, at in zip(lines, labels, strict=True)),
    )
    return frame(bottom + BOTTOM, f"{count(len(lines), 'ratio')} over batch", parts)


def _pairs(comparison: LatencyComparison) -> dict[str, dict[int, LatencyRatio]]:
    """Ratios by pair and batch."""
    pairs: dict[str, dict[int, LatencyRatio]] = {}
    for ratio in comparison.ratios:
        if ratio.batch is not None and ratio.batch > 0 and ratio.ratio > 0:
            pairs.setdefault(pair_name(comparison, ratio), {})[ratio.batch] = ratio
    return pairs


def _placed(pairs: dict[str, dict[int, LatencyRatio]], x: Scale, y: Scale) -> Iterator[_Line]:
    """The lines side by side at each batch, as far as there is room, so that no whisker hides."""
    for number, (name, points) in enumerate(pairs.items()):
        aside = _ASIDE * (number - (len(pairs) - 1) / 2) if len(pairs) <= _COLOURS else 0.0
        ratios = tuple(points[batch] for batch in sorted(points))
        places = tuple((round(x.at(r.batch or 1) + aside, 1), y.at(r.ratio)) for r in ratios)
        yield _Line(number=number, name=name, ratios=ratios, places=places)


def _values(
    pairs: dict[str, dict[int, LatencyRatio]], noise: Sequence[NoiseFloor]
) -> Iterator[float]:
    for points in pairs.values():
        for ratio in points.values():
            yield from (e for e in (ratio.ratio, ratio.low, ratio.high) if e is not None)
    for one in noise:
        yield from (1 / (1 + one.floor), 1 + one.floor)


def _axes(sizes: Sequence[int], x: Scale, y: Scale) -> str:
    left, right = _LEFT, WIDTH - _RIGHT
    parts = []
    for value in ticks(y):
        at = y.at(value)
        parts.append(f'<path class="grid" d="M{left} {at}H{right}"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4}" text-anchor="end">{value:g}</text>')
    for size in sizes:
        at = x.at(size)
        parts.append(f'<path class="grid" d="M{at} {y.end}V{y.start}"/>')
        parts.append(f'<text x="{at}" y="{y.start + 17}" text-anchor="middle">{size}</text>')
    parts.append(
        f'<path class="one" d="M{left} {y.at(1)}H{right}"/>'
        f'<text class="title" x="{(left + right) / 2}" y="{y.start + 38}" text-anchor="middle">'
        "batch</text>"
        f'<text class="title" transform="translate(16 {(y.start + y.end) / 2}) rotate(-90)" '
        'text-anchor="middle">time / baseline: below 1 is faster</text>'
    )
    return "".join(parts)


def _sweep_plot_shade(noise: Sequence[NoiseFloor], x: Scale, y: Scale) -> str:
    """The band between 1 / (1 + floor) and 1 + floor from batch to batch."""
    if not noise:
        return ""
    ranked = sorted(noise, key=lambda n: n.batch or 0)
    upper = [f"{x.at(n.batch or 1)} {y.at(1 + n.floor)}" for n in ranked]
    lower = [f"{x.at(n.batch or 1)} {y.at(1 / (1 + n.floor))}" for n in reversed(ranked)]
    return f'<path class="noise" d="M{"L".join((*upper, *lower))}Z"/>'


def _line(line: _Line, y: Scale) -> str:
    both = tuple(zip(line.ratios, line.places, strict=True))
    whiskers = "".join(
        f"M{at} {y.at(r.low)}V{y.at(r.high)}"
        for r, (at, _) in both
        if r.low is not None and r.high is not None and r.low > 0
    )
    said = ", ".join(f"batch {r.batch} {ratio_words(r)}" for r in line.ratios)
    marks = "".join(verdict_mark(r.verdict, *place) for r, place in both)
    way = "L".join(f"{a} {b}" for a, b in line.places)
    return (
        f'<g class="{line.css}"><title>{escape(f"{line.name}: {said}")}</title>'
        f'<path class="series" d="M{way}"/><path class="whisker" d="{whiskers}"/>{marks}</g>'
    )


def _label(line: _Line, placed: float) -> str:
    left = WIDTH - _RIGHT + 20
    x, y = line.places[-1]
    return (
        f'<g class="{line.css}"><path class="leader" '
        f'd="M{round(x + 8, 1)} {y}L{left - 14} {placed}H{left - 4}"/>'
        f'<text class="name" x="{left}" y="{placed + 4}"><title>{escape(line.name)}</title>'
        f"{escape(shortened(line.name))}</text></g>"
    )


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
