"""A node of an ONNX graph as a matrix product: its weight as matrices, its input as rows.

Source of the operators' attributes: ONNX, "Operator Schemas" (Conv, ConvTranspose, Gemm, MatMul,
Einsum).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from twofour.graph.files import Array
from twofour.graph.layers import attribute_text, einsum_terms, einsum_weight
from twofour.graph.scope import Node, attribute, integer
from twofour.graph.trace import Move
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
from twofour.records import frozen


@frozen
class InputReading:
    """How a node's input becomes rows; equal for nodes that share a Gram matrix."""

    layout: Layout
    """A layout with one output: only the inputs matter."""
    window: Window | None = None
    """The one that the attributes give, for any size of the input; None: a matrix product."""
    turned: bool = False
    """Whether the inputs are the axis before the last one."""
    letters: tuple[str, ...] = ()
    """The letters of an Einsum's other operand, such as ("b", "...", "k"); (): another operator."""
    stack: tuple[str, ...] = ()
    summed: str = ""


@frozen
class MatrixUse:
    """A node's weight and input as matrices."""

    reading: InputReading
    layout: Layout
    moves: tuple[Move, ...] = ()
    """Steps that bring the weight into the layout's shape."""


@frozen
class BatchMarks(SampleRange):
    """What the samples of a batch count for, and its positions that are padding."""

    factors: NDArray[np.float64]
    """(samples,): those of `SampleSplit`."""
    padding: NDArray[np.bool_] | None = None
    """(samples, positions): True where a position is padding."""


def matrix_use(node: Node, position: int, shape: tuple[int, ...], m: int) -> MatrixUse | None:
    """The node with a weight of that shape at input `position`; None where it is no layer."""
    if node.op in ("Conv", "ConvTranspose"):
        return _convolution(node, shape, m)
    if node.op == "Einsum":
        return _einsum(node, position, shape, m)
    on_left = position == 0
    if node.op == "Gemm":
        own, other = ("transA", "transB") if on_left else ("transB", "transA")
        is_flipped = bool(integer(node.proto, own, 0))
        # x is (n, inputs); beside a weight on the left it is (inputs, n)
        turned = bool(integer(node.proto, other, 0)) != on_left
        return _product(shape, int(is_flipped != on_left), m, turned=turned)
    if len(shape) == 1:
        use = _product((1, *shape), 1, m, turned=on_left)
        return replace(use, moves=(lambda values: values.reshape(1, -1),))
    return _product(shape, len(shape) - (1 if on_left else 2), m, turned=on_left)


def _product(shape: tuple[int, ...], axis: int, m: int, *, turned: bool) -> MatrixUse:
    one_output = (*shape[:-2], 1, shape[axis])
    read = Layout(shape=one_output, axis=len(shape) - 1, m=m)
    return MatrixUse(
        reading=InputReading(layout=read, turned=turned),
        layout=Layout(shape=shape, axis=axis, m=m),
    )


def _convolution(node: Node, shape: tuple[int, ...], m: int) -> MatrixUse | None:
    groups = integer(node.proto, "group", 1)
    axis = 1
    one_output = (groups, *shape[1:])
    if node.op == "ConvTranspose":
        axis = 0
        one_output = (shape[0], 1, *shape[2:])
    layout = Layout(shape=shape, axis=axis, m=m, groups=groups, convolution=True)
    if axis == 0 and groups > 1 and layout.channels % m:
        return None  # the file's groups of M reach over two groups, with inputs of their own
    layout = cut_where_wide(layout)
    reading = InputReading(
        layout=replace(layout, shape=one_output),
        window=_window(node, shape[2:]),
    )
    return MatrixUse(reading=reading, layout=layout)


def _window(node: Node, kernel: tuple[int, ...]) -> Window:
    rank = len(kernel)
    pads = _listed(node, "pads", (0,) * (2 * rank))
    sizes = _listed(node, "output_shape", ())
    return Window(
        kernel=kernel,
        stride=_listed(node, "strides", (1,) * rank),
        dilation=_listed(node, "dilations", (1,) * rank),
        padding=tuple(zip(pads[:rank], pads[rank:], strict=True)),
        transposed=node.op == "ConvTranspose",
        output_padding=_listed(node, "output_padding", (0,) * rank),
        auto_pad=attribute_text(node, "auto_pad") or "NOTSET",
        output_shape=sizes[-rank:] if rank else (),
    )


def _listed(node: Node, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    given = attribute(node.proto, name)
    if given is None or not given.ints:
        return default
    return tuple(given.ints)


def _einsum(node: Node, position: int, shape: tuple[int, ...], m: int) -> MatrixUse | None:
    equation = attribute_text(node, "equation")
    used = einsum_weight(equation, position)
    terms = einsum_terms(equation)
    if used is None or terms is None:
        return None
    # "bni,hid->bhnd" with the weight (3, 12, 2): i is summed over, h and d are outputs. In the
    # order h, d, i it is (3, 2, 12), and as a matrix of 6 outputs (6, 12).
    own = terms[position]
    order = (*used.batch_axes, *used.out_axes, used.axis)
    stack = tuple(shape[axis] for axis in used.batch_axes)
    outputs = math.prod(shape[axis] for axis in used.out_axes)
    seen = (*stack, outputs, shape[used.axis])
    use = _product(seen, len(seen) - 1, m, turned=False)
    reading = replace(
        use.reading,
        letters=terms[1 - position],
        stack=tuple(own[axis] for axis in used.batch_axes),
        summed=own[used.axis],
    )
    return replace(
        use,
        reading=reading,
        moves=(lambda values: values.transpose(order), lambda values: values.reshape(seen)),
    )


def rows_of(
    x: Array, reading: InputReading, marks: BatchMarks
) -> tuple[Array, NDArray[np.float64]]:
    """The inputs as (parts, n, inputs), and the factor of each of the n rows.

    Rows of padding are left out. A row belongs to the sample that its first axis says, or the
    second one, or the part of the first axis where samples were laid behind each other.
    """
    if reading.window is not None:
        return _convolution_rows(x, reading.layout, reading.window, marks)
    rows = _stacked(_aligned(x, reading), reading.layout)
    factors = _row_marks(_factors(x.shape, marks), x, reading)
    padding = _padding(x.shape, marks.padding)
    if padding is not None:
        counted = ~_row_marks(padding, x, reading)
        rows = rows[:, counted]
        factors = factors[counted]
    shaped = rows.reshape(*reading.layout.shape[:-2], *rows.shape[1:])
    return matrix_rows(shaped, reading.layout), factors


def _row_marks(marks: Array, x: Array, reading: InputReading) -> Array:
    """Marks along some axes of x as one for each row."""
    whole = np.broadcast_to(marks, x.shape)
    stacked = _stacked(_aligned(whole, reading)[..., :1], reading.layout)
    # a stack's matrices have rows of the same samples: the marks of the first are those of all
    of_rows: Array = stacked[0, :, 0]
    return of_rows


def _aligned(x: Array, reading: InputReading) -> Array:
    """X as the left operand of a MatMul: (..., stack ..., n, inputs)."""
    # Einsum "bhqd,hdk->bhqk", the weight (h, d, k): letters b h q d, stack (h), summed d. So x is
    # transposed to (b, q, h, d), and with an axis for one row to (b, q, h, 1, d).
    if not reading.letters:
        return x.swapaxes(-1, -2) if reading.turned and x.ndim > 1 else x
    free = x.ndim - len(reading.letters) + reading.letters.count("...")
    names: list[str] = []
    for letter in reading.letters:
        if letter == "...":
            names += [f"...{axis}" for axis in range(free)]
        else:
            names.append(letter)
    last = [*reading.stack, reading.summed]
    rest = [name for name in names if name not in last]
    order = [names.index(name) for name in (*rest, *last)]
    return np.expand_dims(x.transpose(order), -2)


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
    x: Array, layout: Layout, window: Window, marks: BatchMarks
) -> tuple[Array, NDArray[np.float64]]:
    size = tuple(x.shape)
    window = _padded(window, size[2:])
    places = outputs_to_see(layout, window, size, marks)
    rows = window_rows(x, layout, window, places)
    outputs = rows.shape[1] // max(1, size[0])
    of_samples = _factors((size[0], 1), marks)
    factors = np.broadcast_to(of_samples, (size[0], outputs)).reshape(-1)
    if marks.padding is None:
        return rows, factors
    padded = padded_outputs(marks.padding, window, size, places)
    if padded is None:
        return rows, factors
    counted = ~padded.reshape(-1)
    return rows[:, counted], factors[counted]


def _padded(window: Window, size: tuple[int, ...]) -> Window:
    """The window over an input of that spatial size."""
    padding = (_padding_of(window, axis, length) for axis, length in enumerate(size))
    return replace(window, padding=tuple(padding))


def _padding_of(window: Window, axis: int, size: int) -> tuple[int, int]:
    """Before and after, of one axis. Source: ONNX, Conv and ConvTranspose, `auto_pad`."""
    # SAME_UPPER over 9 positions, a kernel of 4, stride 2: 5 outputs reach over 4 x 2 + 4 = 12, so
    # 3 zeros are added, 1 before and 2 after; SAME_LOWER has 2 before and 1 after
    asked = window.output_shape if window.transposed else ()
    if not asked and window.auto_pad == "VALID":
        return 0, 0
    if not asked and window.auto_pad == "NOTSET":
        return window.padding[axis]
    stride = window.stride[axis]
    reach = window.dilation[axis] * (window.kernel[axis] - 1) + 1
    if window.transposed:
        wanted = asked[axis] if asked else size * stride
        total = stride * (size - 1) + window.output_padding[axis] + reach - wanted
    else:
        outputs = -(-size // stride)
        total = max(0, (outputs - 1) * stride + reach - size)
    small = total // 2
    if window.auto_pad == "SAME_UPPER":
        return small, total - small
    return total - small, small
