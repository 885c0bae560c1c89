"""How layers, axes, sizes and untrusted names are put into words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_NAMES_SHOWN = 3


class Shaped(Protocol):
    """What a Weight and a Verdict both say about the shape of a layer."""

    @property
    def op(self) -> str: ...  # noqa: D102 -- see records.Weight
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102 -- see records.Weight
    @property
    def axis(self) -> int | None: ...  # noqa: D102 -- see records.Weight
    @property
    def groups(self) -> int: ...  # noqa: D102 -- see records.Weight
    @property
    def in_channels(self) -> int: ...  # noqa: D102 -- see records.Weight
    @property
    def out_channels(self) -> int: ...  # noqa: D102 -- see records.Weight
    @property
    def kernel(self) -> tuple[int, ...]: ...  # noqa: D102 -- see records.Weight


def axis_name(layer: Shaped, axis: int) -> str:
    """What runs along this axis of the stored array, such as "input channels"."""
    if axis == layer.axis:
        return "input channels"
    rank = len(layer.shape)
    first_kernel_axis = rank - len(layer.kernel)
    if layer.kernel and axis >= first_kernel_axis:
        names = ("depth", "height", "width")[-len(layer.kernel) :]
        return f"kernel {names[axis - first_kernel_axis]}"
    if layer.kernel or axis >= rank - 2:
        return "output channels"
    return f"batch axis {axis}"


def layer_size(layer: Shaped) -> str:
    """C, K and kernel as the rules name them: "C=64, K=128, 3x3"."""
    kernel = f", {times(layer.kernel)}" if layer.kernel else ""
    return f"C={layer.in_channels}, K={layer.out_channels}{kernel}"


def shape_cell(layer: Shaped) -> str:
    """The same for a narrow column: "64 x 128 3x3 g4"; "?" where an engine names no sizes."""
    if not (layer.in_channels or layer.out_channels):
        return "?"
    kernel = f" {times(layer.kernel)}" if layer.kernel else ""
    groups = f" g{layer.groups}" if layer.groups > 1 else ""
    return f"{layer.in_channels or '?'} x {layer.out_channels or '?'}{kernel}{groups}"


def times(lengths: tuple[int, ...]) -> str:
    """Lengths joined by x: "3x3"; a scalar is "1"."""
    return "x".join(map(str, lengths)) or "1"


def printable(name: str) -> str:
    """A name from a model with everything a terminal might obey written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def count(number: int, noun: str) -> str:
    """Number and noun: "1 layer", "1,234 layers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def one_of(noun: str, names: Sequence[str]) -> str:
    """`the region a`, or `one of 5 regions (a, b, c, ...)`."""
    if len(names) == 1:
        return f"the {noun} {names[0]}"
    return f"one of {count(len(names), noun)} ({listed(names)})"


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b, c and 3 more`."""
    more = len(names) - _NAMES_SHOWN
    shown = [*names] if more <= 0 else [*names[:_NAMES_SHOWN], f"{more:,} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


SPARSE_TO_DENSE = "sparse / dense"
"""The ratio of times, named alike everywhere: below 1 sparse is faster."""


def tactic_ratio(sparse_ms: float | None, dense_ms: float | None) -> float | None:
    """Time of the sparse tactic over that of the dense one; None where one is unknown or 0."""
    return sparse_ms / dense_ms if sparse_ms and dense_ms else None


def tactic_times_words(sparse_ms: float, dense_ms: float) -> str:
    """Both times and their ratio, where there is one."""
    ratio = tactic_ratio(sparse_ms, dense_ms)
    said = "" if ratio is None else f", {SPARSE_TO_DENSE} {ratio:.3f}"
    return f"sparse {sparse_ms:.4g} ms, dense {dense_ms:.4g} ms{said}"


def share(part: float, whole: float) -> str:
    """Per cent with one decimal; "0 %" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
