"""A node of an ONNX graph as a matrix product: its weight as matrices, its input as rows.

Source of the operators' attributes: ONNX, "Operator Schemas" (Conv, ConvTranspose, Gemm, MatMul,
Einsum).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twofour.calibrate.onnx.storage import Move
from twofour.graph.files import Array
from twofour.graph.layers import attribute_text, einsum_terms, einsum_weight
from twofour.graph.scope import Node, attribute, integer
from twofour.pruning.matrices import (
    Layout,
    SampleRange,
    Window,
    cut_where_wide,
    matrix_rows,
    outputs_to_see,
    padded_outputs,
    window_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spatial:
    """The attributes of a convolution; padding may depend on the size of its input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    auto_pad: str
    transposed: bool
    output_padding: tuple[int, ...]
    output_shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReading:
    """How a node's input becomes rows; equal for nodes that share a Gram matrix."""

    layout: Layout
    """A layout with one output: only the inputs matter."""
    spatial: Spatial | None = None
    """None: a matrix product."""
    turned: bool = False
    """Whether the inputs are the axis before the last one."""
    letters: tuple[str, ...] = ()
    """The letters of an Einsum's other operand, such as ("b", "...", "k"); (): another operator."""
    stack: tuple[str, ...] = ()
    summed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixUse:
    """A node's weight and input as matrices."""

    reading: InputReading
    layout: Layout
    moves: tuple[Move, ...] = ()
    """Steps that bring the weight into the layout's shape."""


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


def matrix_use(node: Node, position: int, shape: tuple[int, ...], m: int) -> MatrixUse | None:
    """The node with a weight of that shape at input `position`; None where it is no layer."""
    if node.op in ("Conv", "ConvTranspose"):
        return _convolution(node, shape, m)
    if node.op == "Einsum":
        return _einsum(node, position, shape, m)
    if node.op == "Gemm":
        flipped = bool(integer(node.proto, "transB" if position else "transA", 0))
        other = bool(integer(node.proto, "transA" if position else "transB", 0))
        axis = int(flipped) if position else int(not flipped)
        # x is (n, inputs); beside a weight on the left it is (inputs, n)
        return _product(shape, axis, m, turned=other if position else not other)
    if len(shape) == 1:
        moves: tuple[Move, ...] = (lambda values: values.reshape(1, -1),)
        return replace(_product((1, *shape), 1, m, turned=not position), moves=moves)
    return _product(shape, len(shape) - (2 if position else 1), m, turned=not position)


def _product(shape: tuple[int, ...], axis: int, m: int, *, turned: bool) -> MatrixUse:
    layout = Layout(shape=shape, axis=axis, m=m)
    read = (*shape[:-2], 1, shape[axis])
    return MatrixUse(
        reading=InputReading(layout=Layout(shape=read, axis=len(read) - 1, m=m), turned=turned),
        layout=layout,
    )


def _convolution(node: Node, shape: tuple[int, ...], m: int) -> MatrixUse:
    groups = integer(node.proto, "group", 1)
    transposed = node.op == "ConvTranspose"
    axis = 0 if transposed else 1
    layout = cut_where_wide(Layout(shape=shape, axis=axis, m=m, groups=groups, convolution=True))
    one = (shape[0], 1, *shape[2:]) if transposed else (groups, *shape[1:])
    return MatrixUse(
        reading=InputReading(
            layout=replace(layout, shape=one),
            spatial=_spatial(node, shape[2:], transposed=transposed),
        ),
        layout=layout,
    )


def _spatial(node: Node, kernel: tuple[int, ...], *, transposed: bool) -> Spatial:
    rank = len(kernel)
    pads = _listed(node, "pads", (0,) * (2 * rank))
    output_shape = _listed(node, "output_shape", ())
    return Spatial(
        kernel=kernel,
        stride=_listed(node, "strides", (1,) * rank),
        dilation=_listed(node, "dilations", (1,) * rank),
        pads=tuple(zip(pads[:rank], pads[rank:], strict=True)),
        auto_pad=attribute_text(node, "auto_pad") or "NOTSET",
        transposed=transposed,
        output_padding=_listed(node, "output_padding", (0,) * rank),
        output_shape=output_shape[-rank:] if output_shape and rank else None,
    )


def _listed(node: Node, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    found = attribute(node.proto, name)
    return default if found is None or not found.ints else tuple(found.ints)


def _einsum(node: Node, position: int, shape: tuple[int, ...], m: int) -> MatrixUse | None:
    equation = attribute_text(node, "equation")
    used, terms = einsum_weight(equation, position), einsum_terms(equation)
    if used is None or terms is None:
        return None
    own, other = terms[position], terms[1 - position]
    order = (*used.batch_axes, *used.out_axes, used.axis)
    stack = tuple(shape[a] for a in used.batch_axes)
    seen = (*stack, math.prod(shape[a] for a in used.out_axes), shape[used.axis])
    base = _product(seen, len(seen) - 1, m, turned=False)
    return replace(
        base,
        reading=replace(
            base.reading,
            letters=other,
            stack=tuple(own[a] for a in used.batch_axes),
            summed=own[used.axis],
        ),
        moves=(lambda values: values.transpose(order), lambda values: values.reshape(seen)),
    )


def rows_of(
    x: Array, reading: InputReading, marks: BatchMarks
) -> tuple[Array, NDArray[np.float64]]:
    """The inputs as (parts, n, inputs), and the factor of each of the n rows.

    Rows of padding are left out. A row belongs to the sample that its first axis says, or the
    second one, or the part of the first axis where samples were laid behind each other.
    """
    if reading.spatial is not None:
        return _convolution_rows(x, reading, marks)
    rows = _stacked(_aligned(x, reading), reading.layout)
    padding = _padding(x.shape, marks)
    counts = np.ones((1,) * x.ndim, np.bool_) if padding is None else ~padding
    whole = (np.broadcast_to(mark, x.shape) for mark in (_factors(x.shape, marks), counts))
    # a stack's matrices have rows of the same samples: what is said of the first holds for all
    factors, counted = (
        _stacked(_aligned(mark, reading)[..., :1], reading.layout)[0, :, 0] for mark in whole
    )
    if not counted.all():
        rows, factors = rows[:, counted], factors[counted]
    shaped = rows.reshape(*reading.layout.shape[:-2], rows.shape[1], rows.shape[2])
    return matrix_rows(shaped, reading.layout), factors


def _aligned(x: Array, reading: InputReading) -> Array:
    """X as the left operand of a MatMul: (..., stack ..., n, inputs)."""
    # Einsum "bhqd,hdk->bhqk", the weight (h, d, k): letters b h q d, stack (h), summed d. So x is
    # transposed to (b, q, h, d), and with an axis for one row to (b, q, h, 1, d).
    if not reading.letters:
        if x.ndim == 1:
            return x[None]
        return x.swapaxes(-1, -2) if reading.turned else x
    free = x.ndim - len([letter for letter in reading.letters if letter != "..."])
    names: list[str] = []
    for letter in reading.letters:
        names += [f"...{k}" for k in range(free)] if letter == "..." else [letter]
    last = (*reading.stack, reading.summed)
    rest = [name for name in names if name not in last]
    x = x.transpose([names.index(name) for name in (*rest, *last)])
    return x[..., None, :]


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
    sizes = tuple(size for size in stack if size != 1)
    x = np.broadcast_to(x, (*sizes, *x.shape[len(sizes) :]))
    return x.reshape(math.prod(stack), -1, x.shape[-1])


def _factors(shape: tuple[int, ...], marks: BatchMarks) -> Array:
    """The samples' factors, along the axis of the samples."""
    rank, samples = len(shape), marks.samples
    if rank > 1 and shape[0] % samples and shape[1] == samples:
        return marks.factors.reshape(1, -1, *[1] * (rank - 2))
    first = shape[0] if rank > 1 else 1
    if first % samples:  # rows that belong to no single sample count as seen
        return np.broadcast_to(marks.factors.max(), (1,) * rank)
    return np.repeat(marks.factors, first // samples).reshape(-1, *[1] * (rank - 1))


def _padding(shape: tuple[int, ...], marks: BatchMarks) -> Array | None:
    """The mask along the axes that it is for; None where x has no such axes."""
    if marks.padding is None:
        return None
    padding: Array = marks.padding
    (samples, positions), rank = padding.shape, len(shape)
    if rank > 2 and samples != positions and shape[:2] == (positions, samples):
        padding = padding.T
    elif shape[:2] != (samples, positions) or rank == 2:
        if rank < 2 or shape[0] != samples * positions:
            return None
        return np.reshape(padding, (-1, *[1] * (rank - 1)))
    return np.reshape(padding, (*padding.shape, *[1] * (rank - 2)))


def _convolution_rows(
    x: Array, reading: InputReading, marks: BatchMarks
) -> tuple[Array, NDArray[np.float64]]:
    assert reading.spatial is not None
    window = window_of(reading.spatial, tuple(x.shape[2:]))
    samples = x.shape[0]
    of_all = SampleRange(first=marks.first, samples=marks.samples, in_all=marks.in_all)
    places = outputs_to_see(reading.layout, window, tuple(x.shape), of_all)
    rows = window_rows(x, reading.layout, window, places)
    outputs = rows.shape[1] // max(1, samples)
    factors = np.broadcast_to(_factors((samples, 1), marks), (samples, outputs)).reshape(-1)
    if marks.padding is None:
        return rows, factors
    padded = padded_outputs(marks.padding, window, tuple(x.shape), places)
    if padded is None:
        return rows, factors
    counted = ~padded.reshape(-1)
    return rows[:, counted], factors[counted]


def window_of(spatial: Spatial, size: tuple[int, ...]) -> Window:
    """The window over an input of that spatial size."""
    axes = range(len(size))
    return Window(
        kernel=spatial.kernel,
        stride=spatial.stride,
        dilation=spatial.dilation,
        padding=tuple(_padding_of(spatial, axis, size[axis]) for axis in axes),
        transposed=spatial.transposed,
        output_padding=spatial.output_padding if spatial.transposed else (),
    )


def _padding_of(spatial: Spatial, axis: int, size: int) -> tuple[int, int]:
    """Before and after, of one axis. Source: ONNX, Conv and ConvTranspose, `auto_pad`."""
    stride, reach = spatial.stride[axis], spatial.dilation[axis] * (spatial.kernel[axis] - 1) + 1
    asked = spatial.output_shape if spatial.transposed else None
    if asked is None and spatial.auto_pad not in ("SAME_UPPER", "SAME_LOWER"):
        return (0, 0) if spatial.auto_pad == "VALID" else spatial.pads[axis]
    if spatial.transposed:
        wanted = size * stride if asked is None else asked[axis]
        total = stride * (size - 1) + spatial.output_padding[axis] + reach - wanted
    else:
        total = max(0, (-(-size // stride) - 1) * stride + reach - size)
    small = total // 2
    upper = spatial.auto_pad == "SAME_UPPER"
    return (small, total - small) if upper else (total - small, small)
