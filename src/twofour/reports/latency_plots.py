"""Plots of a comparison: ratios with intervals, every sample, ratios over batch.

Verdicts differ by shape as well as by colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from twofour.latency.variants import without_batch
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    LatencyVerdict,
    NoiseFloor,
)
from twofour.reports.latency_words import (
    measured,
    noise_of,
    over_baseline,
    pair_name,
    within_engines,
)
from twofour.reports.svg import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Drawing,
    Scale,
    apart,
    frame,
    log_range,
    row_figures,
    row_name,
    shape,
    shortened,
    x_axis,
    y_axis,
)
from twofour.words import count, figure, printable, ratio_words

VERDICT_SLUGS = {
    LatencyVerdict.FASTER: "faster",
    LatencyVerdict.SLOWER: "slower",
    LatencyVerdict.NO_DIFFERENCE: "same",
    LatencyVerdict.UNDECIDED: "undecided",
}
"""Verdicts in class names."""
_SHAPES = {
    LatencyVerdict.FASTER: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0Z",
    LatencyVerdict.SLOWER: "M0-6L6 0L0 6L-6 0Z",
    LatencyVerdict.NO_DIFFERENCE: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    LatencyVerdict.UNDECIDED: "M-4-4H4V4H-4Z",
}
_RATIO_ROW, _STRIP, _STRIP_GAP = 26, 34, 8
_NARROWEST, _WIDEST = (0.95, 1.05), (0.2, 5.0)
"""Parts of a variant's own median that the axis of samples shows at least and at most."""
_BEYOND = 7
"""Pixels outside the axis at which samples beyond it are drawn."""
_SWEEP_LEFT, _SWEEP_RIGHT, _LABEL = 64, 330, 16
"""Pixels of a sweep's axis of ratios, of the names, and between two names."""
_LEAST_HEIGHT = 320
_COLOURS, _ASIDE = 8, 5
"""Colours before a dashed line begins them again; pixels between lines at one batch."""


def ratio_plot(comparison: LatencyComparison, batch: int | None) -> Drawing | None:
    """A row per ratio at this batch, the noise shaded; None where there is no ratio."""
    ratios = (*over_baseline(comparison, batch), *within_engines(comparison, batch))
    if not ratios:
        return None
    noise = noise_of(comparison, batch)
    ends = [e for r in ratios for e in (r.ratio, r.low, r.high) if e is not None]
    low, high = log_range((*ends, *_band(noise)))
    x = Scale(low=low, high=high, start=LEFT, end=WIDTH - RIGHT)
    bottom = TOP + _RATIO_ROW * len(ratios)
    baseline = shortened(printable(comparison.baseline))
    parts = (
        *_shade(x, noise, bottom),
        *x_axis(x, bottom, f"time / time of {baseline}: left of 1 is faster"),
        shape("path", css="one", d=f"M{x.at(1)} {TOP}V{bottom}"),
        *(
            _ratio_row(comparison, ratio, x, TOP + _RATIO_ROW * (number + 0.5))
            for number, ratio in enumerate(ratios)
        ),
    )
    label = f"{count(len(ratios), 'ratio')} with intervals"
    return frame((WIDTH, bottom + BOTTOM), label, parts)


def sample_plot(comparison: LatencyComparison, batch: int | None) -> Drawing | None:
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
    parts = [*x_axis(x, bottom, "time / the variant's own median")]
    for number, row in enumerate(rows):
        parts += _strip(row, x, TOP + (_STRIP + _STRIP_GAP) * number + _STRIP_GAP / 2)
    return frame((WIDTH, bottom + BOTTOM), f"samples of {count(len(rows), 'variant')}", parts)


def sweep_plot(comparison: LatencyComparison) -> Drawing | None:
    """A line per pair over the batches; None where fewer than two batches have ratios."""
    pairs = _pairs(comparison)
    sizes = sorted({b for points in pairs.values() for b in points})
    if len(sizes) < 2:
        return None
    left, right = _SWEEP_LEFT, WIDTH - _SWEEP_RIGHT
    bottom = TOP + max(_LEAST_HEIGHT, _LABEL * len(pairs))
    noise = tuple(n for size in sizes if (n := noise_of(comparison, size)) is not None)
    low, high = log_range(tuple(_values(pairs, noise)))
    x = Scale(low=sizes[0], high=sizes[-1], start=left + 40, end=right - 40)
    y = Scale(low=low, high=high, start=bottom, end=TOP)
    lines = tuple(_placed(pairs, x, y))
    labels = apart([line.places[-1][1] for line in lines], gap=_LABEL, low=TOP + 6, high=bottom - 2)
    parts = (
        *_shade_over_batch(noise, x, y),
        *y_axis(y, (left, right), "time / baseline: below 1 is faster"),
        *x_axis(x, bottom, "batch", values=sizes),
        shape("path", css="one", d=f"M{left} {y.at(1)}H{right}"),
        *(_line(line, y) for line in lines),
        *(_label(line, at) for line, at in zip(lines, labels, strict=True)),
    )
    return frame((WIDTH, bottom + BOTTOM), f"{count(len(lines), 'ratio')} over batch", parts)


def _mark(verdict: LatencyVerdict, x: float, y: float) -> Drawing:
    """The shape of a verdict: a disc, a diamond, a ring or a box."""
    place = f"translate({x} {y})"
    return shape("path", css=f"mark {VERDICT_SLUGS[verdict]}", transform=place, d=_SHAPES[verdict])


def _ratio_row(comparison: LatencyComparison, ratio: LatencyRatio, x: Scale, y: float) -> Drawing:
    name, words = pair_name(comparison, ratio), ratio_words(ratio)
    whiskers = []
    if ratio.low is not None and ratio.high is not None and ratio.low > 0:
        left, right = x.at(ratio.low), x.at(ratio.high)
        way = f"M{left} {y - 4}V{y + 4}M{left} {y}H{right}M{right} {y - 4}V{y + 4}"
        whiskers.append(shape("path", css=f"whisker {VERDICT_SLUGS[ratio.verdict]}", d=way))
    at = x.at(ratio.ratio) if ratio.ratio > 0 else x.start
    mark = _mark(ratio.verdict, at, y)
    title = f"{name}: {words}, {ratio.verdict.value}"
    return shape("g", row_name(name, y), *whiskers, mark, row_figures(words, y), title=title)


def _strip(row: ComparedVariant, x: Scale, top: float) -> Iterator[Drawing]:
    """Name, box of the middle half, samples, those beyond the axis, the median in milliseconds."""
    assert row.median_ms is not None
    middle = top + _STRIP / 2
    parts = [sample / row.median_ms for sample in row.samples_ms]
    quarter, three_quarters = _rank(parts, 25), _rank(parts, 75)
    left = x.at(max(quarter, x.low))
    width = round(x.at(min(three_quarters, x.high)) - left, 1)
    yield row_name(printable(without_batch(row.name)), middle)
    yield shape("rect", css="middle", x=left, y=top, width=width, height=_STRIP)
    yield shape("path", css="median", d=f"M{x.at(1)} {top}v{_STRIP}")
    yield shape("path", css="samples", d=_dots(parts, x, top))
    yield from _figures(row.median_ms, parts, x, middle)


def _figures(median_ms: float, parts: Sequence[float], x: Scale, y: float) -> Iterator[Drawing]:
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


def _shade(x: Scale, noise: NoiseFloor | None, bottom: float) -> Iterator[Drawing]:
    if noise is None:
        return
    left, right = map(x.at, _band(noise))
    title = f"the same baseline measured twice: {ratio_words(noise)}"
    width = round(right - left, 1)
    yield shape("rect", css="noise", title=title, x=left, y=TOP, width=width, height=bottom - TOP)


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
        yield from _band(one)


def _shade_over_batch(noise: Sequence[NoiseFloor], x: Scale, y: Scale) -> Iterator[Drawing]:
    """The band between 1 / (1 + floor) and 1 + floor from batch to batch."""
    if not noise:
        return
    ranked = sorted(noise, key=lambda n: n.batch or 0)
    upper = [f"{x.at(n.batch or 1)} {y.at(1 + n.floor)}" for n in ranked]
    lower = [f"{x.at(n.batch or 1)} {y.at(1 / (1 + n.floor))}" for n in reversed(ranked)]
    yield shape("path", css="noise", d=f"M{'L'.join((*upper, *lower))}Z")


def _line(line: _Line, y: Scale) -> Drawing:
    both = tuple(zip(line.ratios, line.places, strict=True))
    whiskers = "".join(
        f"M{at} {y.at(r.low)}V{y.at(r.high)}"
        for r, (at, _) in both
        if r.low is not None and r.high is not None and r.low > 0
    )
    said = ", ".join(f"batch {r.batch} {ratio_words(r)}" for r in line.ratios)
    way = "L".join(f"{a} {b}" for a, b in line.places)
    return shape(
        "g",
        shape("path", css="series", d=f"M{way}"),
        shape("path", css="whisker", d=whiskers),
        *(_mark(r.verdict, *place) for r, place in both),
        title=f"{line.name}: {said}",
        css=line.css,
    )


def _label(line: _Line, placed: float) -> Drawing:
    left = WIDTH - _SWEEP_RIGHT + 20
    x, y = line.places[-1]
    way = f"M{round(x + 8, 1)} {y}L{left - 14} {placed}H{left - 4}"
    short = shortened(line.name)
    name = shape("text", text=short, title=line.name, css="name", x=left, y=placed + 4)
    return shape("g", shape("path", css="leader", d=way), name, css=line.css)
