"""Plots of a report: a bar of statuses, channels C x K, sparse against dense times.

Statuses differ by shape as well as by colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log2, log10

from twofour.eligibility.rules import LARGE_ENOUGH
from twofour.eligibility.totals import LayerStatus, status_of
from twofour.records.eligibility import Verdict
from twofour.reports.eligibility_words import name_cell, tactic_times, times_words
from twofour.reports.svg import (
    BOTTOM,
    TOP,
    Drawing,
    Scale,
    frame,
    point,
    shape,
    x_axis,
    y_axis,
)
from twofour.words import count, share

_WIDTH, _HEIGHT = 620, 420
_LEFT, _RIGHT = 70, 16
_NAMED = 8
"""Layers named in the title of a point that stands for more."""
_ASIDE = 11
"""Pixels between the marks of several statuses at one size."""
_LABEL_FROM = 0.06
"""Share of a bar below which a number does not fit into its segment."""
_SHAPES = {
    LayerStatus.RUNS: "M0-{r}L{r} {r}H-{r}Z",
    LayerStatus.CAN: "M-{r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0-{d} 0Z",
    LayerStatus.DOUBTFUL: "M-{r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0-{d} 0Z",
    LayerStatus.CANNOT: "M-{r}-{r}L{r} {r}M-{r} {r}L{r}-{r}",
    LayerStatus.ABSENT: "M0-{r}L{r} 0L0 {r}L-{r} 0Z",
    LayerStatus.UNKNOWN: "M-{r}-{r}H{r}V{r}H-{r}Z",
    LayerStatus.UNCOVERED: "M-{r} 0H{r}",
}


def marker(status: LayerStatus, *, radius: float = 5) -> Drawing:
    """The shape of a status around the origin."""
    path = _SHAPES[status].format(r=f"{radius:g}", d=f"{2 * radius:g}")
    return shape("path", css=f"mark {status.slug}", d=path)


def status_bar(numbers: Sequence[tuple[LayerStatus, int]], noun: str) -> Drawing:
    """One bar over the whole width, a segment per status; `noun` is what is counted.

    Shares are of weights on the whole page, so other things are labelled with their number.
    """
    total = sum(number for _, number in numbers)

    def part(number: int) -> str:
        return share(number, total) if noun == "weight" else f"{number:,}"

    segments, start = [], 0.0
    for status, number in numbers:
        if not number:
            continue
        width = 100 * number / total
        title = f"{status.value}: {count(number, noun)}"
        title += f" ({part(number)})" if noun == "weight" else ""
        css, x, wide = f"segment {status.slug}", f"{start:.3f}%", f"{width:.3f}%"
        inside = [shape("rect", css=css, x=x, y=0, width=wide, height=30)]
        if width >= 100 * _LABEL_FROM:
            middle = f"{start + width / 2:.3f}%"
            inside.append(shape("text", text=part(number), css="on-segment", x=middle, y=20))
        segments.append(shape("g", *inside, title=title))
        start += width
    said = ", ".join(f"{f.value} {part(n)}" for f, n in numbers if n) or "nothing"
    label = f"{noun}s: {said}"
    return shape("svg", *segments, css="bar", height=30, width="100%", role="img", aria_label=label)


def size_plot(verdicts: Sequence[Verdict]) -> Drawing | None:
    """Input against output channels, a mark per size and status; None where no size is known.

    Marks of one size stand side by side, in the order of the statuses.
    """
    sizes: dict[tuple[int, int], list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.in_channels > 0 and verdict.out_channels > 0:
            sizes.setdefault((verdict.in_channels, verdict.out_channels), []).append(verdict)
    if not sizes:
        return None
    x = _scale(_powers_of_two([c for c, _ in sizes]), _LEFT, _WIDTH - _RIGHT)
    y = _scale(_powers_of_two([k for _, k in sizes]), _HEIGHT - BOTTOM, TOP)
    parts = (
        *x_axis(x, y.start, "input channels C", values=_power_ticks(x)),
        *y_axis(y, (x.start, x.end), "output channels K", values=_power_ticks(y)),
        *_guides(x, y, LARGE_ENOUGH),
        *(
            point(title, mark, round(x.at(c) + aside, 1), y.at(k))
            for (c, k), layers in sizes.items()
            for title, mark, aside in _size_marks(f"C={c}, K={k}", layers)
        ),
    )
    label = f"channels of {count(sum(map(len, sizes.values())), 'layer')}, C across and K up"
    return frame((_WIDTH, _HEIGHT), label, parts, css="plot")


def time_plot(verdicts: Sequence[Verdict]) -> Drawing | None:
    """Fastest dense against fastest sparse tactic per layer; None where no layer has both times."""
    known = [(v, both) for v in verdicts if (both := tactic_times(v)) is not None]
    if not known:
        return None
    ends = _round_ends([ms for _, both in known for ms in both])
    x, y = _scale(ends, _LEFT, _WIDTH - _RIGHT), _scale(ends, _HEIGHT - BOTTOM, TOP)
    below, above = "below the line: sparse is faster", "above: dense is faster"
    parts = (
        *x_axis(x, y.start, "fastest dense tactic, ms"),
        *y_axis(y, (x.start, x.end), "fastest sparse tactic, ms"),
        shape("path", css="guide", d=f"M{x.start} {y.start}L{x.end} {y.end}"),
        shape("text", text=below, css="note", x=x.end - 8, y=y.start - 10, text_anchor="end"),
        shape("text", text=above, css="note", x=x.start + 8, y=y.end + 16),
        *(_timepoint(v, x.at(dense), y.at(sparse)) for v, (sparse, dense) in known),
    )
    label = f"tactic times of {count(len(known), 'layer')}, dense across and sparse up"
    return frame((_WIDTH, _HEIGHT), label, parts, css="plot")


def _size_marks(size: str, layers: Sequence[Verdict]) -> Iterator[tuple[str, Drawing, float]]:
    """Title, mark and shift of each status that layers of one size have."""
    by_status = {f: same for f in LayerStatus if (same := [v for v in layers if status_of(v) is f])}
    for number, (status, same) in enumerate(by_status.items()):
        names = [name_cell(v.layer) for v in same[:_NAMED]]
        names += [f"and {len(same) - _NAMED:,} more"] if len(same) > _NAMED else []
        title = "\n".join((f"{size}: {status.value}, {count(len(same), 'layer')}", *names))
        mark = marker(status, radius=min(10, round(5 + log2(len(same)) / 2, 1)))
        yield title, mark, _ASIDE * (number - (len(by_status) - 1) / 2)


def _timepoint(verdict: Verdict, x: float, y: float) -> Drawing:
    status = status_of(verdict)
    title = f"{name_cell(verdict.layer)}\n{status.value}\n{times_words(verdict)}"
    return point(title, marker(status), x, y)


def _scale(ends: tuple[float, float], start: float, end: float) -> Scale:
    return Scale(low=ends[0], high=ends[1], start=start, end=end)


def _powers_of_two(values: Sequence[float]) -> tuple[float, float]:
    return 2.0 ** (floor(log2(min(values))) - 1), 2.0 ** (ceil(log2(max(values))) + 1)


def _power_ticks(scale: Scale) -> list[float]:
    first, last = round(log2(scale.low)), round(log2(scale.high))
    step = max(1, ceil((last - first) / 8))
    return [2.0**e for e in range(first, last + 1) if e % step == 0 and e >= 0]


def _round_ends(values: Sequence[float]) -> tuple[float, float]:
    """The nearest 1, 2 or 5 of a decade below all values, and above."""
    low, high = min(values), max(values)
    decades = range(floor(log10(low)) - 1, ceil(log10(high)) + 2)
    steps = [step * 10.0**e for e in decades for step in (1, 2, 5)]
    return max(s for s in steps if s < low), min(s for s in steps if s > high)


def _guides(x: Scale, y: Scale, channels: int) -> Iterator[Drawing]:
    if x.low < channels < x.high:
        yield shape("path", css="guide", d=f"M{x.at(channels)} {y.start}V{y.end}")
    if y.low < channels < y.high:
        yield shape("path", css="guide", d=f"M{x.start} {y.at(channels)}H{x.end}")
