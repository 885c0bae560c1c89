"""Any layer as matrix products: its stored weight as a stack of matrices, its inputs as rows.

A stack is (parts, rows, inputs). The inputs of one matrix are the reduction axis of the N:M rule,
for a convolution tap by tap (channels innermost, as TensorRT groups them), each run of channels
filled up with zeros to a multiple of M. Every group of a convolution is a part of its own, and so
is every matrix of a stored stack of them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from twofour.pruning.methods.problem import Array


@dataclass(frozen=True, slots=True, kw_only=True)
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
    blocks: int = 1
    """A matrix whose rows fall into this many blocks, each with inputs of its own."""
    per_tap: bool = False
    """Each tap of the kernel is a part: its Gram matrix is small where the whole would not be."""

    @property
    def channels(self) -> int:
        """Length of one run of the reduction axis, before it is filled up."""
        return self.shape[self.axis] // (self.groups if self._transposed else 1)

    @property
    def padded(self) -> int:
        """The same, filled up to a multiple of M."""
        return -(-self.channels // self.m) * self.m

    @property
    def taps(self) -> int:
        """Positions of the kernel; 1 for a matrix."""
        return math.prod(self.shape[2:]) if self.convolution else 1

    @property
    def stack_shape(self) -> tuple[int, int, int]:
        """(parts, rows, inputs)."""
        return (*self.parts_and_inputs[:1], self._rows, self.parts_and_inputs[1])

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
    def straddled(self) -> bool:
        """Whether groups of M along the stored axis reach over two groups of the convolution.

        Only in a transposed one, whose reduction axis holds its groups one after the other.
        """
        return self._transposed and self.groups > 1 and self.channels % self.m != 0

    @property
    def _transposed(self) -> bool:
        return self.convolution and self.axis == 0

    @property
    def _inputs_first(self) -> bool:
        """Whether the stored axes are (inputs, outputs) instead of (outputs, inputs)."""
        rank = len(self.shape)
        return self._transposed if self.convolution else self.axis % rank == rank - 2

    @property
    def _stacked(self) -> int:
        """Matrices that share no input: groups, blocks, or a stored stack."""
        if self.convolution:
            return self.groups
        return self.blocks * math.prod(self.shape[:-2])

    @property
    def _rows(self) -> int:
        if self._transposed:
            return self.shape[1]
        if self.convolution:
            return self.shape[0] // self.groups
        return self.shape[-1 if self._inputs_first else -2] // self.blocks


def to_stack(weight: Array, layout: Layout) -> Array:
    """The stored weight as (parts, rows, inputs); a copy where the order differs."""
    # A Conv of 8 outputs, 6 inputs in 2 groups and a 3x3 kernel, (8, 3, 3, 3), for 2:4: reshaped to
    # (2 groups, 4 rows, 3 channels, 9 taps), turned to (2, 4, 9, 3), filled up to (2, 4, 9, 4): the
    # stack is (2, 4, 36), and inputs 4k to 4k + 3 of a row are the channels of tap k.
    xp = array_namespace(weight)
    stacked, rows, taps, channels = layout._stacked, layout._rows, layout.taps, layout.channels
    if layout._inputs_first:
        by_tap = xp.reshape(weight, (stacked, channels, rows, taps))
        by_tap = xp.permute_dims(by_tap, (0, 2, 3, 1))
    else:
        by_tap = xp.reshape(weight, (stacked, rows, channels, taps))
        by_tap = xp.permute_dims(by_tap, (0, 1, 3, 2))
    by_tap = _filled(by_tap, layout)
    if layout.per_tap:
        by_tap = xp.permute_dims(by_tap, (0, 2, 1, 3))
    return xp.reshape(by_tap, layout.stack_shape)


def from_stack(stack: Array, layout: Layout) -> Array:
    """The stored weight of a stack: `to_stack` undone."""
    xp = array_namespace(stack)
    stacked, rows, taps = layout._stacked, layout._rows, layout.taps
    if layout.per_tap:
        by_tap = xp.reshape(stack, (stacked, taps, rows, layout.padded))
        by_tap = xp.permute_dims(by_tap, (0, 2, 1, 3))
    else:
        by_tap = xp.reshape(stack, (stacked, rows, taps, layout.padded))
    order = (0, 3, 1, 2) if layout._inputs_first else (0, 1, 3, 2)
    weight = xp.permute_dims(by_tap[..., : layout.channels], order)
    return xp.reshape(weight, layout.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRange:
    """Which of all calibration samples a batch has."""

    first: int
    """Number of its first sample among all."""
    samples: int
    in_all: int

    def numbers(self, items: int) -> NDArray[np.int64]:
        """The numbers of the batch's rows of a tensor among the rows of all batches."""
        return self.first * items // max(1, self.samples) + np.arange(items, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The inputs that a convolution sums over for an output, for each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Zeros before and after."""
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


def matrix_rows(x: Array, layout: Layout) -> Array:
    """The inputs of a matrix product as (parts, n, inputs): `x` is (..., inputs).

    For a stored stack of matrices (experts), `x` is (stack ..., n, inputs).
    """
    stack = math.prod(layout.shape[:-2])
    rows = math.prod(x.shape[:-1]) // max(1, stack)
    return _filled(array_namespace(x).reshape(x, (stack, rows, x.shape[-1])), layout)


def window_rows(
    x: Array, layout: Layout, window: Window, positions: NDArray[np.int64] | None = None
) -> Array:
    """The inputs of a convolution as (parts, n, inputs), sample by sample, output by output.

    `x` is (samples, channels, spatial ...). `positions` (samples, n) are flat indices of the
    outputs to take of each sample; None: all.
    """
    xp = array_namespace(x)
    samples, spatial = x.shape[0], tuple(x.shape[2:])
    index = window_index(window, spatial)
    taps, outputs = index.shape[0], index.shape[1] if positions is None else positions.shape[1]
    flat = xp.reshape(x, (samples, x.shape[1], math.prod(spatial)))
    if positions is None:
        taken = _read(flat, index.reshape(-1))
    elif samples:
        places = index[:, positions].swapaxes(0, 1).reshape(samples, -1)
        taken = xp.stack([_read(flat[at], places[at]) for at in range(samples)])
    else:
        taken = xp.zeros((0, x.shape[1], taps * outputs), dtype=x.dtype, device=device(x))
    groups, channels = layout.groups, layout.channels
    taken = xp.reshape(taken, (samples, groups, channels, taps, outputs))
    if layout.per_tap:
        rows = xp.permute_dims(taken, (1, 3, 0, 4, 2))
        return _filled(xp.reshape(rows, (groups * taps, samples * outputs, channels)), layout)
    rows = xp.permute_dims(taken, (1, 0, 4, 3, 2))
    rows = _filled(xp.reshape(rows, (groups, samples * outputs * taps, channels)), layout)
    return xp.reshape(rows, (groups, samples * outputs, taps * layout.padded))


def _read(flat: Array, index: NDArray[np.int64]) -> Array:
    """The values at these places of the last axis; 0 where an index is below 0."""
    xp = array_namespace(flat)
    place = xp.asarray(np.maximum(index, 0), device=device(flat))
    taken = xp.take(flat, place, axis=flat.ndim - 1)
    if not (index < 0).any():
        return taken
    valid = xp.asarray(index >= 0, device=device(flat))
    return xp.where(valid, taken, xp.zeros_like(taken))


def window_index(window: Window, spatial: tuple[int, ...]) -> NDArray[np.int64]:
    """(taps, outputs): the flat input position that each tap of each output reads; -1: a zero."""
    # A 1-D kernel of 3 with padding 1 over 4 positions: tap 0 reads [-1, 0, 1, 2], tap 1
    # [0, 1, 2, 3], tap 2 [1, 2, 3, -1]. A second axis of 5 positions makes 5 * first + second of
    # each pair, and -1 where either is -1.
    axes = [_axis_index(window, axis, size) for axis, size in enumerate(spatial)]
    index = np.zeros((1, 1), np.int64)
    for size, axis in zip(spatial, axes, strict=True):
        joined = index[:, None, :, None] * size + axis[None, :, None, :]
        gone = (index < 0)[:, None, :, None] | (axis < 0)[None, :, None, :]
        joined = np.where(gone, -1, joined)
        index = joined.reshape(index.shape[0] * axis.shape[0], index.shape[1] * axis.shape[1])
    return index


def _axis_index(window: Window, axis: int, size: int) -> NDArray[np.int64]:
    """(kernel, outputs) of one spatial axis."""
    kernel, stride = window.kernel[axis], window.stride[axis]
    dilation, (before, after) = window.dilation[axis], window.padding[axis]
    taps = np.arange(kernel, dtype=np.int64)[:, None] * dilation
    if window.transposed:
        extra = window.output_padding[axis] if window.output_padding else 0
        outputs = (size - 1) * stride - before - after + dilation * (kernel - 1) + extra + 1
        reach = np.arange(max(0, outputs))[None, :] + before - taps
        source = reach // stride
        return np.where((reach % stride == 0) & (source >= 0) & (source < size), source, -1)
    outputs = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
    index: NDArray[np.int64] = np.arange(max(0, outputs))[None, :] * stride - before + taps
    return np.where((index >= 0) & (index < size), index, -1)


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
    wide = layout.taps > 1 and layout.parts_and_inputs[1] > _WIDEST
    return replace(layout, per_tap=True) if wide else layout


def outputs_to_see(
    layout: Layout, window: Window, size: tuple[int, ...], share: SampleRange
) -> NDArray[np.int64] | None:
    """The outputs of each sample that are read in a convolution, (samples, n); None: all.

    `size` is the whole input's, (samples, channels, spatial ...).
    """
    inputs = layout.parts_and_inputs[1]
    most = max(_LEAST_OUTPUTS, -(-_ROWS_PER_INPUT * inputs // max(1, share.in_all)))
    outputs = window_index(window, size[2:]).shape[1]
    return sampled(outputs, most, share.numbers(size[0]))


def sampled(count: int, most: int, numbers: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """For each sample, by its number, `most` of `count` places, (samples, most); None: all.

    A walk goes over all places in steps of their golden section, which spreads any stretch of it
    evenly. Each sample has a stretch from a start of its own, so that over many samples every
    place is read as often, whatever period the samples or the held-out ones have.
    """
    if count <= most:
        return None
    step = next(k for k in itertools.count(round(count * _GOLDEN)) if math.gcd(k, count) == 1)
    starts = (numbers * _GOLDEN % 1.0 * count).astype(np.int64)
    walked = (starts[:, None] + np.arange(most)) * step % count
    return np.sort(walked, axis=1)
