"""Axes, ticks, labels and the frame of a comparison's plots, as SVG text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from twofour.records.latency import LatencyVerdict

WIDTH, LEFT, RIGHT = 1000, 300, 190
"""Pixels of a plot and of the margins for names and figures; the page scales it."""
TOP, BOTTOM = 12, 48
_NAME_LETTERS = 38
"""That fit into the left margin in a wide font; the whole name is in the title and in the table."""
_STEPS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_DECADES = ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
_FEWEST, _MOST = 3, 9
"""Ticks on an axis."""
VERDICT_SLUGS = {
    LatencyVerdict.FASTER: "faster",
    LatencyVerdict.SLOWER: "slower",
    LatencyVerdict.NO_DIFFERENCE: "same",
    LatencyVerdict.UNDECIDED: "undecided",
}
_SHAPES = {
    LatencyVerdict.FASTER: "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0Z",
    LatencyVerdict.SLOWER: "M0-6L6 0L0 6L-6 0Z",
    LatencyVerdict.NO_DIFFERENCE: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
    LatencyVerdict.UNDECIDED: "M-4-4H4V4H-4Z",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An axis: values `low` to `high` on pixels `start` to `end`, logarithmic or linear."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def at(self, value: float) -> float:
        """The pixel of a value, to a tenth."""
        if self.log:
            part = log10(value / self.low) / log10(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(self.start + part * (self.end - self.start), 1)


def log_range(values: Sequence[float], *, least: float = 1.02) -> tuple[float, float]:
    """A range around 1 and the positive values, wider by a twentieth on either side."""
    known = [1 / least, least, *(value for value in values if value > 0)]
    spare = (max(known) / min(known)) ** 0.05
    return min(known) / spare, max(known) * spare


def ticks(scale: Scale) -> tuple[float, ...]:
    """Round values on the axis, three to nine where there are that many."""
    low, high = scale.low, scale.high
    if not scale.log or high / low < 3:
        unit = 1.0 if scale.log else 10.0 ** ceil(log10(high - low))
        for step in (s * unit for s in _STEPS):
            numbers = range(ceil(low / step), floor(high / step) + 1)
            if len(numbers) <= _MOST:
                return tuple(float(f"{number * step:.9g}") for number in numbers)
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    found = []
    for steps in _DECADES:
        values = (float(f"{s}e{e}") for e in decades for s in steps)
        found = [value for value in values if low <= value <= high]
        if len(found) <= _MOST:
            break
    return tuple(found)


def x_axis(scale: Scale, bottom: float, title: str) -> str:
    """Vertical lines at the ticks from the top margin down, their values, the title beneath."""
    parts = []
    for value in ticks(scale):
        at = scale.at(value)
        parts.append(f'<path class="grid" d="M{at} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 17}" text-anchor="middle">{value:g}</text>')
    middle = (scale.start + scale.end) / 2
    parts.append(
        f'<path class="axis" d="M{scale.start} {bottom}H{scale.end}"/>'
        f'<text class="title" x="{middle}" y="{bottom + 38}" text-anchor="middle">'
        f"{escape(title)}</text>"
    )
    return "".join(parts)


def row_name(name: str, y: float) -> str:
    """A name in the left margin, its middle left out where it is too long; whole in its title."""
    return (
        f'<text class="name" x="{LEFT - 12}" y="{y + 4}" text-anchor="end">'
        f"<title>{escape(name)}</title>{escape(shortened(name))}</text>"
    )


def row_figures(text: str, y: float) -> str:
    """What a row says in the right margin."""
    return f'<text class="figures" x="{WIDTH - RIGHT + 16}" y="{y + 4}">{escape(text)}</text>'


def shortened(name: str, letters: int = _NAME_LETTERS) -> str:
    """The name in at most so many letters, with an ellipsis for its middle."""
    if len(name) <= letters:
        return name
    half = (letters - 1) // 2
    return f"{name[: letters - 1 - half]}…{name[-half:]}"


def verdict_mark(verdict: LatencyVerdict, x: float, y: float) -> str:
    """The shape of a verdict: a disc, a diamond, a ring or a box."""
    return (
        f'<path class="mark {verdict_slug(verdict)}" transform="translate({x} {y})" '
        f'd="{_SHAPES[verdict]}"/>'
    )


def verdict_slug(verdict: LatencyVerdict) -> str:
    """The verdict's name in class names."""
    return VERDICT_SLUGS[verdict]


def apart(wanted: Sequence[float], *, gap: float, low: float, high: float) -> tuple[float, ...]:
    """Places as near as may be to those wanted, `gap` from each other, between `low` and `high`."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    last = low - gap
    for i in order:
        last = placed[i] = max(wanted[i], last + gap)
    limit = high
    for i in reversed(order):
        placed[i] = min(placed[i], limit)
        limit = placed[i] - gap
    return tuple(round(place, 1) for place in placed)


def frame(height: float, label: str, body: Iterator[str] | Sequence[str]) -> str:
    """The whole plot, said in words to those who do not see it."""
    said = escape(label, quote=True)
    return (
        f'<svg class="wide plot" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{said}">'
        f"{''.join(body)}</svg>"
    )
