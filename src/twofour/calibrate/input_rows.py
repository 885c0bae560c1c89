"""A node of an ONNX graph as a matrix product: its weight as matrices, its input as rows.

Source of the operators' attributes: ONNX, "Operator Schemas" (Conv, ConvTranspose, Gemm, MatMul).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twofour.graph.files import Array
from twofour.graph.layers import attribute_text
from twofour.graph.scope import Node, attribute, integer
from twofour.pruning.matrices import (
    Layout,
    SampleRange,
    Window,
    cut_where_wide,
    matrix_rows,
    outputs_to_see,
    window_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReading:
    """How a node's input becomes rows; equal for nodes that share a Gram matrix."""

    layout: Layout
    """A layout with one output: only the inputs matter."""
    window: Window | None = None
    """That of a convolution, with the padding that `pads` gives; None: a matrix product."""
    auto_pad: str = "NOTSET"
    """Otherwise the padding depends on the size of the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMarks:
    """What the samples of a batch count for, and its positions that are padding."""

    samples: int
    factors: NDArray[np.float64]
    """(samples,): those of `SampleSplit`."""
    first: int = 0
    """Number of its first sample among all."""
    in_all: int = 1
    """Samples of all batches."""
    padding: NDArray[np.bool_] | None = None
    """(samples, positions): True where a position is padding."""


def matrix_use(
    node: Node, position: int, shape: tuple[int, ...], m: int
) -> tuple[InputReading, Layout] | None:
    """How the node reads its input, and a weight of that shape at `position`; None: not known."""
    if node.op in ("Conv", "ConvTranspose"):
        return _convolution(node, shape, m)
    if node.op == "Einsum" or position == 0 or len(shape) == 1 or integer(node.proto, "transA", 0):
        return None
    # the weight of x W is (inputs, outputs); with transB it is (outputs, inputs)
    axis = len(shape) - 1 if integer(node.proto, "transB", 0) else len(shape) - 2
    one_output = (*shape[:-2], 1, shape[axis])
    read = Layout(shape=one_output, axis=len(shape) - 1, m=m)
    return InputReading(layout=read), Layout(shape=shape, axis=axis, m=m)


def _convolution(node: Node, shape: tuple[int, ...], m: int) -> tuple[InputReading, Layout] | None:
    auto_pad = attribute_text(node, "auto_pad") or "NOTSET"
    transposed = node.op == "ConvTranspose"
    if transposed and (auto_pad != "NOTSET" or attribute(node.proto, "output_shape")):
        return None  # whose padding follows from a size
    groups = integer(node.proto, "group", 1)
    axis = 1
    one_output = (groups, *shape[1:])
    if transposed:
        axis = 0
        one_output = (shape[0], 1, *shape[2:])
    layout = Layout(shape=shape, axis=axis, m=m, groups=groups, convolution=True)
    if axis == 0 and groups > 1 and layout.channels % m:
        return None  # the file's groups of M reach over two groups, with inputs of their own
    layout = cut_where_wide(layout)
    read = replace(layout, shape=one_output)
    window = _window(node, shape[2:])
    return InputReading(layout=read, window=window, auto_pad=auto_pad), layout


def _window(node: Node, kernel: tuple[int, ...]) -> Window:
    rank = len(kernel)
    pads = _listed(node, "pads", (0,) * (2 * rank))
    return Window(
        kernel=kernel,
        stride=_listed(node, "strides", (1,) * rank),
        dilation=_listed(node, "dilations", (1,) * rank),
        padding=tuple(zip(pads[:rank], pads[rank:], strict=True)),
        transposed=node.op == "ConvTranspose",
        output_padding=_listed(node, "output_padding", (0,) * rank),
    )


def _listed(node: Node, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    given = attribute(node.proto, name)
    if given is None or not given.ints:
        return default
    return tuple(given.ints)


def rows_of(
    x: Array, reading: InputReading, marks: BatchMarks
) -> tuple[Array, NDArray[np.float64]]:
    """The inputs as (parts, n, inputs), and the factor of each of the n rows.

    Rows of padding are left out of products. A row belongs to the sample that its first axis says,
    or the second one, or the part of the first axis where samples were laid behind each other.
    """
    if reading.window is not None:
        return _convolution_rows(x, reading, reading.window, marks)
    rows = _stacked(x, reading.layout)
    factors = _row_marks(_factors(x.shape, marks), x, reading.layout)
    padding = _padding(x.shape, marks.padding)
    if padding is not None:
        counted = ~_row_marks(padding, x, reading.layout)
        rows = rows[:, counted]
        factors = factors[counted]
    shaped = rows.reshape(*reading.layout.shape[:-2], *rows.shape[1:])
    return matrix_rows(shaped, reading.layout), factors


def _row_marks(marks: Array, x: Array, layout: Layout) -> Array:
    """Marks along some axes of x as one for each row."""
    whole = np.broadcast_to(marks, x.shape)
    stacked = _stacked(whole[..., :1], layout)
    # a stack's matrices have rows of the same samples: the marks of the first are those of all
    of_rows: Array = stacked[0, :, 0]
    return of_rows


def _stacked(x: Array, layout: Layout) -> Array:
    """(..., stack ..., n, inputs) as (matrices, rows, inputs); x may have no axes of the stack."""
    # With a stack of 4 experts and x (2, 4, 5, 8), 2 samples of 5 rows: lead is 1, the experts are
    # axis 1 (own), so x becomes (4, 2, 5, 8) and then (4, 10, 8). An x of (5, 8) that all experts
    # share becomes (1, 5, 8), and is repeated to (4, 5, 8).
    stack = layout.shape[:-2]
    while x.ndim < len(stack) + 2:
        x = x[None]
    lead = x.ndim - 2 - len(stack)
    own = [lead + at for at, size in enumerate(stack) if size != 1]
    rest = [at for at in range(x.ndim - 2) if at not in own]
    x = x.transpose([*own, *rest, x.ndim - 2, x.ndim - 1])
    sizes = [size for size in stack if size != 1]
    x = np.broadcast_to(x, (*sizes, *x.shape[len(sizes) :]))
    return x.reshape(math.prod(stack), -1, x.shape[-1])


def _factors(shape: tuple[int, ...], marks: BatchMarks) -> Array:
    """The samples' factors, along the axis of the samples."""
    # 3 samples of 4 positions: x may be (3, 4, 8), (4, 3, 8), or (12, 8) with 4 rows for each
    rank = len(shape)
    samples = marks.samples
    if rank > 1 and shape[0] % samples and shape[1] == samples:
        return _along(marks.factors[None], rank)
    first = shape[0] if rank > 1 else 1
    if first % samples:  # rows that belong to no single sample count as seen
        return np.broadcast_to(marks.factors.max(), (1,) * rank)
    return _along(np.repeat(marks.factors, first // samples), rank)


def _padding(shape: tuple[int, ...], padding: Array | None) -> Array | None:
    """The mask along the axes that it is for; None where x has no such axes."""
    if padding is None:
        return None
    rank = len(shape)
    samples, positions = padding.shape
    if rank > 2 and shape[:2] == (samples, positions):
        return _along(padding, rank)
    if rank > 2 and shape[:2] == (positions, samples):
        return _along(padding.T, rank)
    if rank > 1 and shape[0] == samples * positions:
        return _along(padding.reshape(-1), rank)
    return None


def _along(marks: Array, rank: int) -> Array:
    """Marks of the first axes, with an axis of length 1 for each of the others."""
    spread: Array = marks.reshape(*marks.shape, *[1] * (rank - marks.ndim))
    return spread


def _convolution_rows(
    x: Array, reading: InputReading, window: Window, marks: BatchMarks
) -> tuple[Array, NDArray[np.float64]]:
    size = tuple(x.shape)
    padding = [_padding_of(window, reading.auto_pad, *axis) for axis in enumerate(size[2:])]
    window = replace(window, padding=tuple(padding))
    of_all = SampleRange(first=marks.first, samples=marks.samples, in_all=marks.in_all)
    places = outputs_to_see(reading.layout, window, size, of_all)
    rows = window_rows(x, reading.layout, window, places)
    outputs = rows.shape[1] // max(1, size[0])
    of_samples = _factors((size[0], 1), marks)
    return rows, np.broadcast_to(of_samples, (size[0], outputs)).reshape(-1)


def _padding_of(window: Window, auto_pad: str, axis: int, size: int) -> tuple[int, int]:
    """Before and after, of one axis. Source: ONNX, Conv, `auto_pad`."""
    # SAME_UPPER over 9 positions, a kernel of 4, stride 2: 5 outputs reach over 4 x 2 + 4 = 12, so
    # 3 zeros are added, 1 before and 2 after; SAME_LOWER has 2 before and 1 after
    if auto_pad == "VALID":
        return 0, 0
    if auto_pad == "NOTSET":
        return window.padding[axis]
    stride = window.stride[axis]
    reach = window.dilation[axis] * (window.kernel[axis] - 1) + 1
    outputs = -(-size // stride)
    total = max(0, (outputs - 1) * stride + reach - size)
    small = total // 2
    if auto_pad == "SAME_UPPER":
        return small, total - small
    return total - small, small
