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
    """Of a convolution."""
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
    def straddled(self) -> bool:
        """Whether groups of M along the stored axis reach over two groups of the convolution.

        Only in a transposed one, whose reduction axis holds its groups one after the other.
        """
        return self._transposed and self.groups > 1 and self.channels % self.m != 0

    @property
    def _transposed(self) -> bool:
        return self.convolution and self.axis == 0

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
        return self.shape[-1 if self.axis % len(self.shape) == len(self.shape) - 2 else -2] // (
            self.blocks
        )


def to_stack(weight: Array, layout: Layout) -> Array:
    """The stored weight as (parts, rows, inputs); a copy where the order differs."""
    xp = array_namespace(weight)
    taps = _by_tap(weight, layout)  # (stacked, rows, taps, channels)
    fill = layout.padded - layout.channels
    if fill:
        zeros = xp.zeros((*taps.shape[:-1], fill), dtype=taps.dtype, device=device(taps))
        taps = xp.concat([taps, zeros], axis=-1)
    if layout.per_tap:
        taps = xp.permute_dims(taps, (0, 2, 1, 3))
    return xp.reshape(taps, layout.stack_shape)


def from_stack(stack: Array, layout: Layout) -> Array:
    """The stored weight of a stack: what `to_stack` gave, taken back."""
    xp = array_namespace(stack)
    stacked, rows = layout._stacked, layout._rows
    if layout.per_tap:
        taps = xp.reshape(stack, (stacked, layout.taps, rows, layout.padded))
        taps = xp.permute_dims(taps, (0, 2, 1, 3))
    else:
        taps = xp.reshape(stack, (stacked, rows, layout.taps, layout.padded))
    taps = taps[..., : layout.channels]
    if layout._transposed:
        taps = xp.permute_dims(taps, (0, 3, 1, 2))
    elif layout.convolution:
        taps = xp.permute_dims(taps, (0, 1, 3, 2))
    elif layout.axis % len(layout.shape) == len(layout.shape) - 2:
        taps = xp.permute_dims(taps, (0, 3, 1, 2))
    return xp.reshape(taps, layout.shape)


def _by_tap(weight: Array, layout: Layout) -> Array:
    """(stacked, rows, taps, channels)."""
    xp = array_namespace(weight)
    stacked, rows, taps, channels = layout._stacked, layout._rows, layout.taps, layout.channels
    if layout._transposed:
        shaped = xp.reshape(weight, (stacked, channels, rows, taps))
        return xp.permute_dims(shaped, (0, 2, 3, 1))
    if layout.convolution:
        shaped = xp.reshape(weight, (stacked, rows, channels, taps))
        return xp.permute_dims(shaped, (0, 1, 3, 2))
    if layout.axis % len(layout.shape) == len(layout.shape) - 2:
        shaped = xp.reshape(weight, (stacked, channels, rows, 1))
        return xp.permute_dims(shaped, (0, 2, 3, 1))
    return xp.reshape(weight, (stacked, rows, 1, channels))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRange:
    """Which of all calibration samples a batch has."""

    first: int
    """Number of its first sample among all."""
    samples: int
    in_all: int

    def numbers(self, items: int) -> NDArray[np.int64]:
        """Of the batch's rows of a tensor among those of all batches: as many of each sample."""
        return self.first * items // max(1, self.samples) + np.arange(items, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which inputs a convolution joins to an output, for each spatial axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    """Before and after."""
    mode: str = "zeros"
    """torch's words for what the padding holds: zeros, reflect, replicate, circular."""
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


def matrix_rows(x: Array, layout: Layout) -> Array:
    """The inputs of a matrix product as (parts, n, inputs): `x` is (..., inputs).

    For a stored stack of matrices (experts), `x` is (stack ..., n, inputs), or what the product
    would broadcast to that.
    """
    xp = array_namespace(x)
    stack = layout.shape[:-2]
    if stack:
        full = (*stack, *x.shape[-2:]) if x.ndim <= len(stack) + 2 else None
        if full is None:  # batches in front of the stack join the rows
            lead = x.ndim - len(stack) - 2
            order = (*range(lead, x.ndim - 2), *range(lead), x.ndim - 2, x.ndim - 1)
            x = xp.permute_dims(x, order)
        else:
            x = xp.broadcast_to(x, full)
    count = math.prod(x.shape[:-1]) // max(1, math.prod(stack))
    rows = xp.reshape(x, (math.prod(stack), count, x.shape[-1]))
    return _filled(rows, layout)


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
    """(taps, outputs): which flat input position each tap of each output reads; -1 for a zero."""
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
    if window.mode == "circular":
        index %= size
        return index
    if window.mode == "replicate":
        return index.clip(0, size - 1)
    if window.mode == "reflect":
        turned = np.abs(index) % max(1, 2 * (size - 1))
        return np.where(turned >= size, 2 * (size - 1) - turned, turned)
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
"""Outputs of a convolution that are looked at, for each input: a Gram matrix has settled then."""
_LEAST_OUTPUTS = 64
"""Of each sample."""
_GOLDEN = (5**0.5 - 1) / 2


def cut_where_wide(layout: Layout) -> Layout:
    """The layout, with a Gram matrix for each tap where one of all taps would be too large."""
    wide = layout.taps > 1 and layout.parts_and_inputs[1] > _WIDEST
    return replace(layout, per_tap=True) if wide else layout


def outputs_to_see(
    layout: Layout, window: Window, size: tuple[int, ...], share: SampleRange
) -> NDArray[np.int64] | None:
    """Which outputs of each sample are looked at in a convolution, (samples, n); None: all.

    `size` is the whole input's, (samples, channels, spatial ...).
    """
    inputs = layout.parts_and_inputs[1]
    most = max(_LEAST_OUTPUTS, -(-_ROWS_PER_INPUT * inputs // max(1, share.in_all)))
    outputs = window_index(window, size[2:]).shape[1]
    return sampled(outputs, most, share.numbers(size[0]))


def padded_outputs(
    padding: NDArray[np.bool_],
    window: Window,
    size: tuple[int, ...],
    seen: NDArray[np.int64] | None,
) -> NDArray[np.bool_] | None:
    """Which outputs of a filter over texts stand where padding does, (samples, n).

    `padding` is (samples, positions), `size` the whole input's, `seen` what `outputs_to_see` gave.
    None: the outputs are not the positions that the padding is of.
    """
    outputs = window_index(window, size[2:]).shape[1]
    if padding.shape != (size[0], outputs) or size[2:] != (outputs,):
        return None
    return padding if seen is None else np.take_along_axis(padding, seen, axis=1)


def sampled(count: int, most: int, numbers: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Of each sample, by its number, `most` of `count` places, (samples, most); None: all.

    A walk goes over all places in steps of their golden section, which spreads any stretch of it
    evenly. Each sample has a stretch from a start of its own, so that over many samples every
    place is looked at as often, whatever period the samples or the held-out ones have.
    """
    if count <= most:
        return None
    step = next(k for k in itertools.count(round(count * _GOLDEN)) if math.gcd(k, count) == 1)
    starts = (numbers * _GOLDEN % 1.0 * count).astype(np.int64)
    walked = (starts[:, None] + np.arange(most)) * step % count
    return np.sort(walked, axis=1)
