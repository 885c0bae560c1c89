"""Any layer as matrix products: its stored weight as a stack of matrices, its inputs as rows.

A stack is (parts, rows, inputs). The inputs of one matrix are the reduction axis of the N:M rule,
for a convolution tap by tap (channels innermost, as TensorRT groups them), each run of channels
filled up with zeros to a multiple of M. Every group of a convolution is a part of its own, and so
is every matrix of a stored stack of them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from twofour.pruning.methods.problem import Array
from twofour.records import frozen


@frozen
class Layout:
    """How a stored weight of `shape` lies in the stack, and where its reduction axis is."""

    shape: tuple[int, ...]
    axis: int
    m: int
    groups: int = 1
    """Groups of a convolution."""
    convolution: bool = False
    """(outputs, inputs, kernel ...), or with axis 0 (inputs, outputs, kernel ...) of a transposed
    one; else a matrix, or a stack of matrices in its last two axes."""
    per_tap: bool = False
    """Each tap of the kernel is a part: its Gram matrix is small where the whole would not be."""

    @property
    def channels(self) -> int:
        """Length of one run of the reduction axis, before it is filled up."""
        if self._transposed:
            return self.shape[0] // self.groups
        return self.shape[self.axis]

    @property
    def padded(self) -> int:
        """The same, filled up to a multiple of M."""
        return -(-self.channels // self.m) * self.m

    @property
    def taps(self) -> int:
        """Positions of the kernel; 1 for a matrix."""
        if not self.convolution:
            return 1
        return math.prod(self.shape[2:])

    @property
    def stack_shape(self) -> tuple[int, int, int]:
        """(parts, rows, inputs)."""
        parts, inputs = self.parts_and_inputs
        return parts, self._rows, inputs

    @property
    def parts_and_inputs(self) -> tuple[int, int]:
        """How many Gram matrices the layer has, and the side of each."""
        if self.per_tap:
            return self._stacked * self.taps, self.padded
        return self._stacked, self.taps * self.padded

    @property
    def narrows(self) -> bool:
        """Whether each matrix has no more outputs than inputs."""
        return self._rows <= self.parts_and_inputs[1]

    @property
    def _transposed(self) -> bool:
        return self.convolution and self.axis == 0

    @property
    def _inputs_first(self) -> bool:
        """Whether the stored axes are (inputs, outputs) instead of (outputs, inputs)."""
        if self.convolution:
            return self._transposed
        return self.axis == len(self.shape) - 2

    @property
    def _stacked(self) -> int:
        """Matrices that share no input: groups, or a stored stack."""
        if self.convolution:
            return self.groups
        return math.prod(self.shape[:-2])

    @property
    def _rows(self) -> int:
        if self._transposed:
            return self.shape[1]
        if self.convolution:
            return self.shape[0] // self.groups
        if self._inputs_first:
            return self.shape[-1]
        return self.shape[-2]


def to_stack(weight: Array, layout: Layout) -> Array:
    """The stored weight as (parts, rows, inputs); a copy where the order differs."""
    # A Conv of 8 outputs, 6 inputs in 2 groups and a 3x3 kernel, (8, 3, 3, 3), for 2:4: reshaped to
    # (2 groups, 4 rows, 3 channels, 9 taps), turned to (2, 4, 9, 3), filled up to (2, 4, 9, 4): the
    # stack is (2, 4, 36), and inputs 4k to 4k + 3 of a row are the channels of tap k.
    # With `per_tap` it is (2, 9, 4, 4) and the stack (18, 4, 4): 9 parts for each group.
    xp = array_namespace(weight)
    rows = layout._rows
    taps = layout.taps
    if layout._inputs_first:
        by_tap = xp.reshape(weight, (layout._stacked, layout.channels, rows, taps))
        by_tap = xp.permute_dims(by_tap, (0, 2, 3, 1))
    else:
        by_tap = xp.reshape(weight, (layout._stacked, rows, layout.channels, taps))
        by_tap = xp.permute_dims(by_tap, (0, 1, 3, 2))
    by_tap = _filled(by_tap, layout)
    if layout.per_tap:
        by_tap = xp.permute_dims(by_tap, (0, 2, 1, 3))
    return xp.reshape(by_tap, layout.stack_shape)


def from_stack(stack: Array, layout: Layout) -> Array:
    """The stored weight of a stack: `to_stack` undone."""
    # the stack (2, 4, 36) above: to (2, 4, 9, 4), cut to (2, 4, 9, 3), turned to (2, 4, 3, 9)
    xp = array_namespace(stack)
    rows = layout._rows
    taps = layout.taps
    if layout.per_tap:
        by_tap = xp.reshape(stack, (layout._stacked, taps, rows, layout.padded))
        by_tap = xp.permute_dims(by_tap, (0, 2, 1, 3))
    else:
        by_tap = xp.reshape(stack, (layout._stacked, rows, taps, layout.padded))
    order = (0, 1, 3, 2)
    if layout._inputs_first:
        order = (0, 3, 1, 2)
    weight = xp.permute_dims(by_tap[..., : layout.channels], order)
    return xp.reshape(weight, layout.shape)


@frozen
class SampleRange:
    """Which of all calibration samples a batch has."""

    samples: int
    first: int = 0
    """Number of its first sample among all."""
    in_all: int = 1
    """Samples of all batches."""

    def numbers(self, items: int) -> NDArray[np.int64]:
        """The numbers of the batch's rows of a tensor among the rows of all batches."""
        # a batch of samples 16 to 23 whose tensor has 32 rows: 64, 65, ... 95
        return self.first * items // self.samples + np.arange(items, dtype=np.int64)


@frozen
class Window:
    """The inputs that a convolution sums over for an output, for each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Zeros before and after."""
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    auto_pad: str = "NOTSET"
    """ONNX's word for padding that depends on the size of the input."""
    output_shape: tuple[int, ...] = ()
    """Sizes that a transposed convolution is asked for; (): none."""


def matrix_rows(x: Array, layout: Layout) -> Array:
    """The inputs of a matrix product as (parts, n, inputs): `x` is (..., inputs).

    For a stored stack of matrices (experts), `x` is (stack ..., n, inputs).
    """
    stack = math.prod(layout.shape[:-2])
    rows = math.prod(x.shape[:-1]) // max(1, stack)
    return _filled(x.reshape(stack, rows, x.shape[-1]), layout)


def window_rows(
    x: Array, layout: Layout, window: Window, positions: NDArray[np.int64] | None = None
) -> Array:
    """The inputs of a convolution as (parts, n, inputs), sample by sample, output by output.

    `x` is (samples, channels, spatial ...). `positions` (samples, n) are flat indices of the
    outputs to take of each sample; None: all.
    """
    # 2 samples of 6 channels, 5 x 5 positions, and a 3x3 kernel without padding: 9 outputs. The
    # index (9 taps, 9 outputs) takes (2, 6, 81) of (2, 6, 25): as rows (1, 18, 9 * 8) for 2:4.
    samples = x.shape[0]
    index = window_index(window, x.shape[2:])
    flat = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    taken = _read_some(flat, index, positions)
    taps = index.shape[0]
    outputs = taken.shape[2] // taps
    by_tap = taken.reshape(samples, layout.groups, layout.channels, taps, outputs)
    order = (1, 0, 4, 3, 2)
    if layout.per_tap:
        order = (1, 3, 0, 4, 2)
    parts, inputs = layout.parts_and_inputs
    return _filled(by_tap.transpose(order), layout).reshape(parts, samples * outputs, inputs)


def _read_some(flat: Array, index: NDArray[np.int64], positions: NDArray[np.int64] | None) -> Array:
    """What each tap of the outputs at `positions` reads, (samples, channels, taps * n)."""
    if positions is None:
        return _read(flat, index.reshape(-1))
    places = index[:, positions].swapaxes(0, 1).reshape(len(flat), -1)
    return np.stack([_read(sample, place) for sample, place in zip(flat, places, strict=True)])


def _read(flat: Array, index: NDArray[np.int64]) -> Array:
    """The values at these places of the last axis; 0 where an index is below 0."""
    taken = np.take(flat, np.maximum(index, 0), axis=-1)
    outside = index < 0
    if outside.any():
        taken[..., outside] = 0
    return taken


def window_index(window: Window, spatial: tuple[int, ...]) -> NDArray[np.int64]:
    """(taps, outputs): the flat input position that each tap of each output reads; -1: a zero."""
    # A 1-D kernel of 3 with padding 1 over 4 positions: tap 0 reads [-1, 0, 1, 2], tap 1
    # [0, 1, 2, 3], tap 2 [1, 2, 3, -1]. A second axis of 5 positions makes 5 * first + second of
    # each pair, and -1 where either is -1.
    index = np.zeros((1, 1), np.int64)
    for axis, size in enumerate(spatial):
        own = _axis_index(window, axis, size)
        before = index[:, None, :, None]
        after = own[None, :, None, :]
        joined = np.where((before < 0) | (after < 0), -1, before * size + after)
        index = joined.reshape(index.shape[0] * own.shape[0], index.shape[1] * own.shape[1])
    return index


def _axis_index(window: Window, axis: int, size: int) -> NDArray[np.int64]:
    """(kernel, outputs) of one spatial axis."""
    before, after = window.padding[axis]
    stride = window.stride[axis]
    reach = window.dilation[axis] * (window.kernel[axis] - 1)
    taps = np.arange(window.kernel[axis], dtype=np.int64)[:, None] * window.dilation[axis]
    if not window.transposed:
        outputs = (size + before + after - reach - 1) // stride + 1
        source = np.arange(max(0, outputs)) * stride - before + taps
        return _inside(source, size)
    # Stride 2 and a kernel of 3 over 4 positions without padding: 9 outputs. Output 5 is 2 * 2 + 1,
    # so that tap 1 reads position 2 for it; taps 0 and 2 would read 2.5 and 1.5: a zero.
    outputs = (size - 1) * stride - before - after + reach + 1
    if window.output_padding:
        outputs += window.output_padding[axis]
    distance = np.arange(max(0, outputs)) + before - taps
    return np.where(distance % stride == 0, _inside(distance // stride, size), -1)


def _inside(source: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Positions, with -1 for those outside of the axis."""
    return np.where((source >= 0) & (source < size), source, -1)


def _filled(rows: Array, layout: Layout) -> Array:
    """The last axis filled up with zeros to a multiple of M."""
    fill = layout.padded - layout.channels
    if not fill:
        return rows
    xp = array_namespace(rows)
    zeros = xp.zeros((*rows.shape[:-1], fill), dtype=rows.dtype, device=device(rows))
    return xp.concat([rows, zeros], axis=-1)


_WIDEST = 8192
"""Inputs of one output of a convolution up to which its taps share a Gram matrix (512 MiB)."""
_ROWS_PER_INPUT = 8
"""Outputs of a convolution that are read, for each input: more change its Gram matrix little."""
_LEAST_OUTPUTS = 64
"""Outputs of each sample that are read at least."""
_GOLDEN = (5**0.5 - 1) / 2


def cut_where_wide(layout: Layout) -> Layout:
    """The layout, with a Gram matrix for each tap where one of all taps would be too large."""
    if layout.taps > 1 and layout.parts_and_inputs[1] > _WIDEST:
        return replace(layout, per_tap=True)
    return layout


def outputs_to_see(
    layout: Layout, window: Window, size: tuple[int, ...], share: SampleRange
) -> NDArray[np.int64] | None:
    """The outputs of each sample that are read in a convolution, (samples, n); None: all.

    `size` is the whole input's, (samples, channels, spatial ...).
    """
    # A 3x3 kernel over 64 channels has 576 inputs, which asks for 4,608 rows: with 32 samples 144
    # outputs of each, where an image of 56 x 56 has 3,136.
    inputs = layout.parts_and_inputs[1]
    most = max(_LEAST_OUTPUTS, math.ceil(_ROWS_PER_INPUT * inputs / share.in_all))
    outputs = window_index(window, size[2:]).shape[1]
    return sampled(outputs, most, share.numbers(size[0]))


def padded_outputs(
    padding: NDArray[np.bool_],
    window: Window,
    size: tuple[int, ...],
    seen: NDArray[np.int64] | None,
) -> NDArray[np.bool_] | None:
    """Which outputs of a filter over texts are at positions of padding, (samples, n).

    `padding` is (samples, positions), `size` the whole input's, `seen` the result of
    `outputs_to_see`. None: outputs and positions are not the same.
    """
    outputs = window_index(window, size[2:]).shape[1]
    if padding.shape != (size[0], outputs) or size[2:] != (outputs,):
        return None
    if seen is None:
        return padding
    return np.take_along_axis(padding, seen, axis=1)


def sampled(count: int, most: int, numbers: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """For each sample, by its number, `most` of `count` places, (samples, most); None: all.

    A walk goes over all places in steps of their golden section, which spreads any stretch of it
    evenly. Each sample has a stretch from a start of its own, so that over many samples every
    place is read as often, whatever period the samples or the held-out ones have.
    """
    # 4 of 10 places: the step is 7, the first number from 6 on without a common divisor with 10.
    # A start of 6 walks 6 * 7, 7 * 7, ...: 2, 9, 6, 3.
    if count <= most:
        return None
    step = next(k for k in itertools.count(round(count * _GOLDEN)) if math.gcd(k, count) == 1)
    starts = (numbers * _GOLDEN % 1.0 * count).astype(np.int64)
    walked = (starts[:, None] + np.arange(most)) * step % count
    return np.sort(walked, axis=1)
