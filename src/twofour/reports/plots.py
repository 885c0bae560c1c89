"""Plots of a report as SVG text: a bar of fates, channels C x K, sparse against dense times.

Fates differ by shape as well as by colour; names are escaped; nothing is drawn by a library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import ceil, floor, log2, log10

from twofour.eligibility.cells import name_cell, tactic_times, times_words
from twofour.eligibility.rules import LARGE_ENOUGH
from twofour.eligibility.totals import Fate, fate_of
from twofour.records.eligibility import Verdict
from twofour.reports.svg import Scale
from twofour.words import count, share

_Rounding = Callable[[float, float], tuple[float, float]]
_Ticks = Callable[[float, float], list[float]]
_WIDTH, _HEIGHT = 620, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 16, 54
_NAMED = 8
"""Layers named in the title of a point that stands for more."""
_ASIDE = 11
"""Pixels between the marks of several fates at one size."""
_FINE_DECADES = 2
"""Decades of an axis up to which there is room for ticks at 2 and 5."""
_LABEL_FROM = 0.06
"""Share of a bar below which a number does not fit into its segment."""
_SHAPES = {
    Fate.RUNS: "M0-{r}L{r} {r}H-{r}Z",
    Fate.CAN: "M-{r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0-{d} 0Z",
    Fate.DOUBTFUL: "M-{r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0-{d} 0Z",
    Fate.CANNOT: "M-{r}-{r}L{r} {r}M-{r} {r}L{r}-{r}",
    Fate.ABSENT: "M0-{r}L{r} 0L0 {r}L-{r} 0Z",
    Fate.UNKNOWN: "M-{r}-{r}H{r}V{r}H-{r}Z",
    Fate.UNCOVERED: "M-{r} 0H{r}",
}


def marker(fate: Fate, *, radius: float = 5) -> str:
    """The shape of a fate around the origin."""
    path = _SHAPES[fate].format(r=f"{radius:g}", d=f"{2 * radius:g}")
    return f'<path class="mark {fate.slug}" d="{path}"/>'


def fate_bar(numbers: Sequence[tuple[Fate, int]], noun: str) -> str:
    """One bar over the whole width, a segment per fate; `noun` is what is counted.

    Shares are of weights on the whole page, so other things are labelled with their number.
    """
    total = sum(number for _, number in numbers)

    def part(number: int) -> str:
        return share(number, total) if noun == "weight" else f"{number:,}"

    parts, start = [], 0.0
    for fate, number in numbers:
        if not number:
            continue
        width = 100 * number / total
        title = f"{fate.value}: {count(number, noun)}"
        title += f" ({part(number)})" if noun == "weight" else ""
        parts.append(
            f'<g><title>{escape(title)}</title><rect class="segment {fate.slug}" '
            f'x="{start:.3f}%" y="0" width="{width:.3f}%" height="30"/>'
        )
        if width >= 100 * _LABEL_FROM:
            x = start + width / 2
            parts.append(f'<text class="on-segment" x="{x:.3f}%" y="20">{part(number)}</text>')
        parts.append("</g>")
        start += width
    said = ", ".join(f"{f.value} {part(n)}" for f, n in numbers if n) or "nothing"
    label = escape(f"{noun}s: {said}", quote=True)
    body = "".join(parts)
    return f'<svg class="bar" height="30" width="100%" role="img" aria-label="{label}">{body}</svg>'


def size_plot(verdicts: Sequence[Verdict]) -> str | None:
    """Input against output channels, a mark per size and fate; None where no size is known.

    Marks of one size stand side by side, in the order of the fates.
    """
    sizes: dict[tuple[int, int], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.in_channels > 0 and verdict.out_channels > 0:
            sizes.setdefault((verdict.in_channels, verdict.out_channels), []).append(verdict)
    if not sizes:
        return None
    x, y = _axes([c for c, _ in sizes], [k for _, k in sizes], _powers_of_two)
    points = (
        _point(title, mark, round(x.at(c) + aside, 1), y.at(k))
        for (c, k), layers in sizes.items()
        for title, mark, aside in _size_marks(f"C={c}, K={k}", layers)
    )
    label = f"channels of {count(sum(map(len, sizes.values())), 'layer')}, C across and K up"
    frame = _frame(x, y, _power_ticks, ("input channels C", "output channels K"))
    return _plot(label, frame + _guides(x, y, LARGE_ENOUGH) + "".join(points))


def time_plot(verdicts: Sequence[Verdict]) -> str | None:
    """Fastest dense against fastest sparse tactic per layer; None where no layer has both times."""
    known = [(v, both) for v in verdicts if (both := tactic_times(v)) is not None]
    if not known:
        return None
    figures = [ms for _, both in known for ms in both]
    x, y = _axes(figures, figures, _decades)
    diagonal = (
        f'<path class="guide" d="M{x.start} {y.start}L{x.end} {y.end}"/>'
        f'<text class="note" x="{x.end - 8}" y="{y.start - 10}" text-anchor="end">'
        "below the line: sparse is faster</text>"
        f'<text class="note" x="{x.start + 8}" y="{y.end + 16}">above: dense is faster</text>'
    )
    points = "".join(_time_point(v, x.at(dense), y.at(sparse)) for v, (sparse, dense) in known)
    label = f"tactic times of {count(len(known), 'layer')}, dense across and sparse up"
    frame = _frame(x, y, _decade_ticks, ("fastest dense tactic, ms", "fastest sparse tactic, ms"))
    return _plot(label, frame + diagonal + points)


def _size_marks(size: str, layers: Sequence[Verdict]) -> Iterator[tuple[str, str, float]]:
    """Title, mark and shift of each fate that layers of one size have."""
    by_fate = {f: same for f in Fate if (same := [v for v in layers if fate_of(v) is f])}
    for number, (fate, same) in enumerate(by_fate.items()):
        names = [name_cell(v.layer) for v in same[:_NAMED]]
        names += [f"and {len(same) - _NAMED:,} more"] if len(same) > _NAMED else []
        title = "\n".join((f"{size}: {fate.value}, {count(len(same), 'layer')}", *names))
        mark = marker(fate, radius=min(10, round(5 + log2(len(same)) / 2, 1)))
        yield title, mark, _ASIDE * (number - (len(by_fate) - 1) / 2)


def _time_point(verdict: Verdict, x: float, y: float) -> str:
    fate = fate_of(verdict)
    title = f"{name_cell(verdict.layer)}\n{fate.value}\n{times_words(verdict)}"
    return _point(title, marker(fate), x, y)


def _point(title: str, shape: str, x: float, y: float) -> str:
    place = f"translate({x} {y})"
    return f'<g class="point" transform="{place}"><title>{escape(title)}</title>{shape}</g>'


def _axes(xs: Sequence[float], ys: Sequence[float], rounded: _Rounding) -> tuple[Scale, Scale]:
    x_low, x_high = rounded(min(xs), max(xs))
    y_low, y_high = rounded(min(ys), max(ys))
    return (
        Scale(low=x_low, high=x_high, start=_LEFT, end=_WIDTH - _RIGHT),
        Scale(low=y_low, high=y_high, start=_HEIGHT - _BOTTOM, end=_TOP),
    )


def _powers_of_two(low: float, high: float) -> tuple[float, float]:
    return 2.0 ** (floor(log2(low)) - 1), 2.0 ** (ceil(log2(high)) + 1)


def _power_ticks(low: float, high: float) -> list[float]:
    first, last = round(log2(low)), round(log2(high))
    step = max(1, ceil((last - first) / 8))
    return [2.0**e for e in range(first, last + 1) if e % step == 0 and e >= 0]


def _decades(low: float, high: float) -> tuple[float, float]:
    ticks = _decade_values(low / 10, high * 10, (1, 2, 5))
    return max(t for t in ticks if t < low), min(t for t in ticks if t > high)


def _decade_ticks(low: float, high: float) -> list[float]:
    steps = (1, 2, 5) if log10(high / low) <= _FINE_DECADES else (1,)
    values = _decade_values(low, high, steps)
    return [t for t in values if low * 0.999 <= t <= high * 1.001]


def _decade_values(low: float, high: float, steps: tuple[int, ...]) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [step * 10.0**e for e in decades for step in steps]


def _frame(x: Scale, y: Scale, ticks: _Ticks, titles: tuple[str, str]) -> str:
    parts = []
    for value in ticks(x.low, x.high):
        at = x.at(value)
        parts.append(f'<path class="grid" d="M{at} {y.start}V{y.end}"/>')
        parts.append(f'<text x="{at}" y="{y.start + 17}" text-anchor="middle">{value:g}</text>')
    for value in ticks(y.low, y.high):
        at = y.at(value)
        parts.append(f'<path class="grid" d="M{x.start} {at}H{x.end}"/>')
        parts.append(f'<text x="{x.start - 7}" y="{at + 4}" text-anchor="end">{value:g}</text>')
    parts.append(f'<path class="axis" d="M{x.start} {y.end}V{y.start}H{x.end}"/>')
    middle_x, middle_y = (x.start + x.end) / 2, (y.start + y.end) / 2
    parts.append(
        f'<text class="title" x="{middle_x}" y="{_HEIGHT - 10}" text-anchor="middle">'
        f"{titles[0]}</text>"
        f'<text class="title" transform="translate(16 {middle_y}) rotate(-90)" '
        f'text-anchor="middle">{titles[1]}</text>'
    )
    return "".join(parts)


def _guides(x: Scale, y: Scale, channels: int) -> str:
    parts = []
    if x.low < channels < x.high:
        parts.append(f'<path class="guide" d="M{x.at(channels)} {y.start}V{y.end}"/>')
    if y.low < channels < y.high:
        parts.append(f'<path class="guide" d="M{x.start} {y.at(channels)}H{x.end}"/>')
    return "".join(parts)


def _plot(label: str, body: str) -> str:
    said = escape(label, quote=True)
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{said}">'
        f"{body}</svg>"
    )
