"""How times, ratios, intervals and sizes of a comparison are written."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Protocol

_MIB = 1 << 20
_DIGITS_FROM = 1000
"""From here on a figure is written without a fraction, with commas."""


class Interval(Protocol):
    """What a LatencyRatio and a NoiseFloor both say about a ratio."""

    @property
    def ratio(self) -> float: ...  # noqa: D102 -- see records.latency
    @property
    def low(self) -> float | None: ...  # noqa: D102 -- see records.latency
    @property
    def high(self) -> float | None: ...  # noqa: D102 -- see records.latency


def figure(value: float | None) -> str | None:
    """Four significant digits, trailing zeros kept: "0.08150", "4.310", "12,345"."""
    if value is None:
        return None
    if not isfinite(value) or 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    if abs(value) >= _DIGITS_FROM - 0.05:
        return f"{value:,.0f}"
    return f"{value:#.4g}"


def mebibytes(size_bytes: int | None) -> str | None:
    """Bytes in MiB, as `figure` writes them."""
    return None if size_bytes is None else figure(size_bytes / _MIB)


def ratio_word(ratio: float) -> str:
    """Three decimals, of large ratios one: "0.847", "31.2"."""
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:,.1f}"


def interval_word(of: Interval) -> str | None:
    """Both ends of the interval: "0.826 to 0.869"; None where there is none."""
    if of.low is None or of.high is None:
        return None
    return f"{ratio_word(of.low)} to {ratio_word(of.high)}"


def ratio_words(of: Interval) -> str:
    """The ratio and, where there is one, its interval: "0.847 (0.826 to 0.869)"."""
    interval = interval_word(of)
    return ratio_word(of.ratio) + ("" if interval is None else f" ({interval})")


def speed_up(of: Interval, than: str = "") -> str:
    """How many times faster or slower, than what, and the interval turned over alike.

    "1.18x faster than dense (1.15 to 1.21)": 1 / ratio below a ratio of 1, else the ratio itself.
    """
    faster = of.ratio < 1
    middle, *ends = (_turned(value, faster=faster) for value in (of.ratio, of.low, of.high))
    if middle is None:
        return f"immeasurably faster{than}"
    places = 3 if middle < 1.1 else 2
    words = f"{middle:.{places}f}x {'faster' if faster else 'slower'}{than}"
    known = sorted(end for end in ends if end is not None)
    if len(known) < len(ends):
        return words
    return f"{words} ({known[0]:.{places}f} to {known[1]:.{places}f})"


def per_cent(part: float) -> str:
    """A part as per cent with one decimal: "0.8 %"; never "-0.0 %"."""
    return f"{round(100 * part, 1) + 0.0:.1f} %"


def span(values: Sequence[float]) -> str:
    """Smallest to largest part in per cent, once where they read the same."""
    low, high = per_cent(min(values)), per_cent(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def _turned(value: float | None, *, faster: bool) -> float | None:
    if value is None or not faster:
        return value
    return 1 / value if value > 0 else None
