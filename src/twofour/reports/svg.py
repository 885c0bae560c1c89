"""Drawings in SVG's terms: shapes, scales, ticks, axes and labels, one code for all plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

WIDTH, LEFT, RIGHT = 1000, 300, 190
"""Pixels of a plot with rows and of its margins for names and figures; the page scales it."""
TOP, BOTTOM = 12, 48
_NAME_LETTERS = 38
"""That fit into the left margin in a wide font; the whole name is in the title and in the table."""
_STEPS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_DECADES = ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
_MOST = 9
"""Ticks on an axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """An SVG element: its attributes in order, a title to point at, text, elements within it."""

    tag: str
    attributes: tuple[tuple[str, str], ...] = ()
    title: str | None = None
    text: str = ""
    parts: tuple[Drawing, ...] = ()


def shape(
    tag: str,
    *parts: Drawing,
    text: str = "",
    title: str | None = None,
    **attributes: str | float,
) -> Drawing:
    """An element; `css` is its class, and "_" in the name of an attribute means "-"."""
    named = (
        ("class" if name == "css" else name.replace("_", "-"), str(value))
        for name, value in attributes.items()
    )
    return Drawing(tag=tag, attributes=tuple(named), title=title, text=text, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A logarithmic axis: values `low` to `high` on pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value, to a tenth."""
        part = log10(value / self.low) / log10(self.high / self.low)
        return round(self.start + part * (self.end - self.start), 1)


def log_range(values: Sequence[float], *, least: float = 1.02) -> tuple[float, float]:
    """A range around 1 and the positive values, wider by a twentieth on either side."""
    known = [1 / least, least, *(value for value in values if value > 0)]
    spare = (max(known) / min(known)) ** 0.05
    return min(known) / spare, max(known) * spare


def ticks(scale: Scale) -> tuple[float, ...]:
    """Round values on the axis, three to nine where there are that many."""
    low, high = scale.low, scale.high
    if high / low < 3:
        unit = 10.0 ** ceil(log10(high - low))
        for step in (s * unit for s in _STEPS):
            numbers = range(ceil(low / step), floor(high / step) + 1)
            if len(numbers) <= _MOST:
                return tuple(float(f"{number * step:.9g}") for number in numbers)
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    found: list[float] = []
    for steps in _DECADES:
        values = (float(f"{s}e{e}") for e in decades for s in steps)
        found = [value for value in values if low <= value <= high]
        if len(found) <= _MOST:
            break
    return tuple(found)


def x_axis(scale: Scale, bottom: float, title: str) -> Iterator[Drawing]:
    """Vertical lines at the ticks from the top margin down, their values, the title beneath."""
    for value in ticks(scale):
        at = scale.at(value)
        yield shape("path", css="grid", d=f"M{at} {TOP}V{bottom}")
        yield shape("text", text=f"{value:g}", x=at, y=bottom + 17, text_anchor="middle")
    middle = (scale.start + scale.end) / 2
    yield shape("path", css="axis", d=f"M{scale.start} {bottom}H{scale.end}")
    yield shape("text", text=title, css="title", x=middle, y=bottom + 38, text_anchor="middle")


def row_name(name: str, y: float) -> Drawing:
    """A name in the left margin, its middle left out where it is too long; whole in its title."""
    short = shortened(name)
    return shape(
        "text", text=short, title=name, css="name", x=LEFT - 12, y=y + 4, text_anchor="end"
    )


def shortened(name: str, letters: int = _NAME_LETTERS) -> str:
    """The name in at most so many letters, with an ellipsis for its middle."""
    if len(name) <= letters:
        return name
    half = (letters - 1) // 2
    return f"{name[: letters - 1 - half]}…{name[-half:]}"
