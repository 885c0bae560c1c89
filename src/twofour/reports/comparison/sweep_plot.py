"""Ratio over batch: a line per pair with its intervals, named at its end, the noise shaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from twofour.records.latency import LatencyComparison, LatencyRatio, NoiseFloor
from twofour.reports.comparison.figures import ratio_words
from twofour.reports.comparison.parts import noise_of, pair_name
from twofour.reports.comparison.svg import (
    BOTTOM,
    TOP,
    WIDTH,
    Scale,
    apart,
    frame,
    log_range,
    shortened,
    ticks,
    verdict_mark,
)
from twofour.reports.words import count

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
        _shade(noise, x, y),
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


def _shade(noise: Sequence[NoiseFloor], x: Scale, y: Scale) -> str:
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
