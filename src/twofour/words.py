"""Words for layers, axes, sizes, ratios and untrusted names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line says things before it knows of any record
    from twofour.records.latency import Interval
    from twofour.records.weights import Pattern, WeightedLayer

_NAMES_SHOWN = 3
_KEYS_SHOWN = 5
_ROW = re.compile(r"[^\n\t]+")


def axis_name(layer: WeightedLayer, axis: int) -> str:
    """What runs along this axis of the stored array, such as "input channels"."""
    if axis == layer.axis:
        return "input channels"
    # a Conv of [64, 32, 3, 5]: axis 0 is the output channels, axes 2 and 3 are height and width
    rank = len(layer.shape)
    first_kernel_axis = rank - len(layer.kernel)
    if layer.kernel and axis >= first_kernel_axis:
        names = ("depth", "height", "width")[-len(layer.kernel) :]
        return f"kernel {names[axis - first_kernel_axis]}"
    if layer.kernel or axis >= rank - 2:
        return "output channels"
    return f"batch axis {axis}"


def layer_size(layer: WeightedLayer) -> str:
    """C, K and kernel as the rules name them: "C=64, K=128, 3x3"."""
    words = f"C={layer.in_channels}, K={layer.out_channels}"
    return f"{words}, {times(layer.kernel)}" if layer.kernel else words


def shape_cell(layer: WeightedLayer) -> str:
    """Sizes for a narrow column: "64 x 128 3x3 g4"; "?" where an engine names no sizes."""
    if not (layer.in_channels or layer.out_channels):
        return "?"
    words = f"{layer.in_channels or '?'} x {layer.out_channels or '?'}"
    if layer.kernel:
        words += f" {times(layer.kernel)}"
    if layer.groups > 1:
        words += f" g{layer.groups}"
    return words


def times(lengths: tuple[int, ...]) -> str:
    """Lengths joined by x: "3x3"; a scalar is "1"."""
    return "x".join(map(str, lengths)) or "1"


def printable(name: str) -> str:
    """A name with everything a terminal might obey, which `str.isprintable` knows, as an escape."""
    # the bytes 1B 5B 32 4A clear the screen; they become \x1b[2J in letters
    if name.isprintable():  # nearly every name is
        return name
    return "".join(map(_escaped, name))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def name_cell(name: str) -> str:
    """A printable name that is never empty."""
    return printable(name) or "(no name)"


def printable_lines(text: str) -> str:
    """A text of several lines, printable; its line feeds and tabs stay."""
    if text.replace("\n", "").isprintable():
        return text
    return _ROW.sub(lambda row: printable(row[0]), text)


def count(number: int, noun: str) -> str:
    """Number and noun: "1 layer", "1,234 layers"."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


def nothing_pruned(pattern: Pattern, held: int) -> str:
    """Words for a model whose weights are all in the pattern already."""
    return f"already {pattern}: nothing pruned ({held} held it as they came)"


def one_of(noun: str, names: Sequence[str]) -> str:
    """`the region a`, or `one of 5 regions (a, b, c, ...)`."""
    if len(names) == 1:
        return f"the {noun} {names[0]}"
    return f"one of {count(len(names), noun)} ({listed(names)})"


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b, c and 3 more`; "" for none."""
    shown = list(names[:_NAMES_SHOWN])
    if len(names) > _NAMES_SHOWN:
        shown.append(f"{len(names) - _NAMES_SHOWN:,} more")
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def keys_listed(keys: Sequence[str]) -> str:
    """Names of weights with commas alone: "a, b" or "a, b, c, d, e and 3 more"."""
    shown = ", ".join(keys[:_KEYS_SHOWN])
    more = len(keys) - _KEYS_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


SPARSE_TO_DENSE = "sparse / dense"
"""The ratio of times, named alike everywhere: below 1 sparse is faster."""


def tactic_ratio(sparse_ms: float | None, dense_ms: float | None) -> float | None:
    """Time of the sparse tactic over that of the dense one; None where one is unknown or 0."""
    return sparse_ms / dense_ms if sparse_ms and dense_ms else None


def tactic_times_words(sparse_ms: float, dense_ms: float) -> str:
    """Both times and their ratio, where there is one."""
    words = f"sparse {sparse_ms:.4g} ms, dense {dense_ms:.4g} ms"
    ratio = tactic_ratio(sparse_ms, dense_ms)
    return words if ratio is None else f"{words}, {SPARSE_TO_DENSE} {ratio:.3f}"


def share(part: float, whole: float) -> str:
    """Per cent with one decimal; "0 %" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


TRIVIAL = "always holds"
"""The word for a pattern that no weight of such a shape can break."""
MIB = 1 << 20
"""Bytes in a MiB."""
_DIGITS_FROM = 1000
"""Smallest figure that is written without a fraction, with commas."""


def figure(value: float | None) -> str | None:
    """Four significant digits, trailing zeros kept: "0.08150", "4.310", "12,345"."""
    if value is None:
        return None
    if not isfinite(value) or 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    if abs(value) >= _DIGITS_FROM - 0.05:
        return f"{value:,.0f}"
    return f"{value:#.4g}"


def mebibytes(size_bytes: int | None) -> float | None:
    """Bytes in MiB."""
    return None if size_bytes is None else size_bytes / MIB


def ratio_word(ratio: float) -> str:
    """Three decimals, of large ratios one: "0.847", "31.2"."""
    if ratio < 10:
        return f"{ratio:.3f}"
    return f"{ratio:,.1f}"


def interval_word(of: Interval) -> str | None:
    """Both ends of the interval: "0.826 to 0.869"; None where there is none."""
    if of.low is None or of.high is None:
        return None
    return f"{ratio_word(of.low)} to {ratio_word(of.high)}"


def ratio_words(of: Interval) -> str:
    """The ratio and, where there is one, its interval: "0.847 (0.826 to 0.869)"."""
    ratio = ratio_word(of.ratio)
    interval = interval_word(of)
    return ratio if interval is None else f"{ratio} ({interval})"


def speed_up(of: Interval, than: str = "") -> str:
    """How many times faster or slower, than what, and the interval turned over alike.

    "1.18x faster than dense (1.15 to 1.21)": 1 / ratio below a ratio of 1, else the ratio itself.
    """
    if of.ratio <= 0:
        return f"immeasurably faster{than}"
    faster = of.ratio < 1
    factor, word = (1 / of.ratio, "faster") if faster else (of.ratio, "slower")
    places = 3 if factor < 1.1 else 2  # 1.034x, but 1.18x
    words = f"{factor:.{places}f}x {word}{than}"
    low, high = of.low, of.high
    if low is None or high is None:
        return words
    if faster:
        if low <= 0 or high <= 0:
            return words
        low, high = 1 / high, 1 / low
    return f"{words} ({low:.{places}f} to {high:.{places}f})"


def per_cent(part: float) -> str:
    """A part as per cent with one decimal: "0.8 %"; never "-0.0 %"."""
    return f"{round(100 * part, 1) + 0.0:.1f} %"


def span(values: Sequence[float]) -> str:
    """Smallest to largest part in per cent, once where they read the same."""
    low = per_cent(min(values))
    high = per_cent(max(values))
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def in_seconds(seconds: float) -> str:
    """A time to wait, as people say it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


def time_left(seconds: float, solving: float) -> str:
    """The rest of a calibration; the `solving` share of it does not grow with the samples."""
    half = seconds * (1 + solving) / 2
    return f"about {in_seconds(seconds)} left, {in_seconds(half)} with half the samples"
