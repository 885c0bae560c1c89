"""The N:M rule itself: whether an array keeps it along an axis. The one judge; numpy only."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.records.weights import Pattern, PatternCheck

TILE = 1 << 17
"""Elements looked at in one go: scratch of a tile stays in a core's L2 cache (1 to 2 MiB)."""

# The bits of a stored number that are all clear in a zero: all but the sign for the floats. The
# fnuz float8 types have no -0.0 (0x80 is their NaN), and no integer has one. float8_e8m0fnu is
# left out on purpose: it has no zero at all.
# Source: OCP 8-bit floating point specification 1.0, table 1; ONNX documentation, "Float stored
# in 8 bits", for the fnuz types; ml_dtypes for the names.
_ALL_BITS = re.compile(r"u?int(8|16|32|64)|bool|float8_\w+fnuz")
_ALL_BUT_SIGN = re.compile(r"float(16|32|64)|bfloat16|float8_(e3m4|e4m3|e4m3fn|e5m2)")


def count_zeros(array: NDArray[Any]) -> int:
    """Zeros in the array, -0.0 included; NaN and the smallest subnormal are none.

    The bits are looked at, so a processor set to flush subnormals changes nothing. Extra memory
    does not grow with the array. Raises BadInputError for a type that is not a number's or has no
    zero.
    """
    mask = zero_mask(array.dtype)
    zeros = array.size
    for tile, _ in tiles(np.atleast_1d(as_bits(array)), 0, 1):
        zeros -= int(np.count_nonzero(nonzero_bytes(tile, mask)))
    return zeros


def check(array: NDArray[Any], axis: int, pattern: Pattern) -> PatternCheck:
    """Count the groups along `axis` and those with more than N non-zeros.

    A tail shorter than M is a group of its own. Extra memory does not grow with the array. Raises
    BadInputError for an axis the array does not have, a 0-d array, or an unsupported type.
    """
    axis = normalize_axis(array, axis)
    length = array.shape[axis]
    lines = array.size // length if length else 0
    violations = sum(_violations(array, axis, pattern))
    first = None
    if violations:
        first = _first_violation(array, axis, pattern)
    return PatternCheck(
        groups_checked=lines * ceil_divided(length, pattern.m),
        violations=violations,
        first_violation=first,
    )


def holds_along(array: NDArray[Any], pattern: Pattern, *, except_axis: int) -> int | None:
    """The first other axis along which the pattern holds, or None.

    Axes shorter than M are passed over: the few elements of a tail prove nothing.
    """
    skipped = normalize_axis(array, except_axis)
    for axis, length in enumerate(array.shape):
        if axis == skipped or length < pattern.m:
            continue
        if not any(_violations(array, axis, pattern)):
            return axis
    return None


def normalize_axis(array: NDArray[Any], axis: int) -> int:
    """`axis` counted from the front; raises BadInputError where the array has no such axis."""
    if not array.ndim:
        raise BadInputError("a 0-d array has no axis to group along")
    if not -array.ndim <= axis < array.ndim:
        raise BadInputError(
            f"axis {axis} is not an axis of an array of shape {array.shape}",
            hint=f"use {-array.ndim} to {array.ndim - 1}",
        )
    return axis % array.ndim


def as_bits(array: NDArray[Any]) -> NDArray[Any]:
    """A view of the array as unsigned integers of the same width and byte order."""
    kind = array.dtype
    unsigned = np.dtype(f"u{kind.itemsize}")  # u2 for float16
    return array.view(unsigned.newbyteorder(kind.byteorder))


def split_tail(array: NDArray[Any], axis: int, m: int) -> Iterator[tuple[NDArray[Any], int]]:
    """The full groups and the tail, each a view with its group length; empty parts are left out."""
    length = array.shape[axis]
    tail = length % m  # 10 in groups of 4: two groups and a tail of 2
    full = length - tail
    if full:
        yield array[_along(axis, 0, full)], m
    if tail:
        yield array[_along(axis, full, length)], tail


def tiles(array: NDArray[Any], axis: int, group: int) -> Iterator[tuple[NDArray[Any], int]]:
    """Views that part the array into pieces of about TILE elements, each of whole groups.

    `group` must divide the length of `axis`. The axes of a view are in the order of memory; beside
    it comes the distance between neighbours of one group once the view is copied contiguously.
    """
    # a transposed [8, 4] has strides (4, 32) in float32: memory has its axis 1 first
    order = sorted(range(array.ndim), key=lambda a: -abs(array.strides[a]))
    array = array.transpose(order)
    axis = order.index(axis)
    pieces = _pieces(array.shape, axis, group)
    cuts = []
    for length, piece in zip(array.shape, pieces, strict=True):
        cuts.append([slice(start, start + piece) for start in range(0, length, piece)])
    for corner in itertools.product(*cuts):
        tile = array[corner]
        yield tile, math.prod(tile.shape[axis + 1 :])


def _pieces(shape: tuple[int, ...], axis: int, group: int) -> list[int]:
    """Length of a tile along each axis, filled from the last axis on, never cutting a group."""
    # 2:4 along axis 1 of [4096, 1024, 3, 3] has room for 32768 groups: 3 and 3 of them fill axes
    # 3 and 2, room for 3640 is left; all 256 groups of axis 1 fit in it, so there is room for 14
    # rows of axis 0. These make 293 tiles, of 14 rows each: [14, 1024, 3, 3].
    room = max(1, TILE // group)
    pieces = [1] * len(shape)
    for a in reversed(range(len(shape))):
        unit = group if a == axis else 1
        units = max(1, shape[a] // unit)
        count = ceil_divided(units, min(room, units))
        taken = ceil_divided(units, count)
        pieces[a] = unit * taken
        room = max(1, room // taken)
    return pieces


def ceil_divided(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)


def _violations(array: NDArray[Any], axis: int, pattern: Pattern) -> Iterator[int]:
    """Violating groups, tile by tile."""
    mask = zero_mask(array.dtype)
    for part, group in split_tail(as_bits(array), axis, pattern.m):
        if group <= pattern.n:
            continue
        # The sums are taken at every element; only those at the first element of a group count.
        # M = 4 along an axis of step 2: elements 0 and 1 are the first of the groups (0, 2, 4, 6)
        # and (1, 3, 5, 7), so `starts` is 1 1 0 0 0 0 0 0, again and again.
        starts = np.empty(0, np.bool_)
        known_step = 0
        for tile, step in tiles(part, axis, group):
            if step != known_step or starts.size < tile.size:
                marks = np.zeros((tile.size // (step * group), group, step), np.bool_)
                marks[:, 0] = True
                starts = marks.reshape(-1)
                known_step = step
            violating = _group_sums(nonzero_bytes(tile, mask), step, group) > pattern.n
            violating &= starts[: violating.size]
            yield int(np.count_nonzero(violating))


def nonzero_bytes(tile: NDArray[Any], mask: np.unsignedinteger[Any]) -> NDArray[np.uint8]:
    """1 where the tile is non-zero, flat, in the order of the tile's axes."""
    magnitude = np.empty(tile.shape, tile.dtype.newbyteorder("="))
    np.bitwise_and(tile, mask, out=magnitude)
    ones: NDArray[np.uint8] = (magnitude.reshape(-1) != 0).view(np.uint8)
    return ones


def _group_sums(ones: NDArray[np.uint8], step: int, group: int) -> NDArray[np.uint8]:
    """At each index the sum of `group` elements `step` apart, by doubling: log2(M) additions."""
    # M = 4, step 1: sums of 2 of [1, 0, 1, 1, 0] are [1, 1, 2, 1], those of 4 are [3, 2]
    if group == 1:
        return ones
    half = group // 2 * step
    sums = _group_sums(ones, step, group // 2)
    sums = sums[:-half] + sums[half:]
    if group % 2:
        sums = sums[:-step] + ones[2 * half :]
    return sums


def _first_violation(array: NDArray[Any], axis: int, pattern: Pattern) -> tuple[int, ...]:
    """Halve the array along each axis in turn; it must hold a violation.

    The group whose first element comes first in C order is found whatever the memory layout.
    """
    index = []
    for dim in range(array.ndim):
        unit = pattern.m if dim == axis else 1
        first = 0
        while array.shape[dim] > unit:
            half = array.shape[dim] // (2 * unit) * unit or unit
            lower = array[_along(dim, 0, half)]
            if any(_violations(lower, axis, pattern)):
                array = lower
            else:
                array = array[_along(dim, half, array.shape[dim])]
                first += half
        index.append(first)
    return tuple(index)


def _along(axis: int, start: int, stop: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(start, stop))


def zero_mask(dtype: np.dtype[Any]) -> np.unsignedinteger[Any]:
    """The bits that are clear in a zero; raises BadInputError for a type without a known zero."""
    kind = dtype.name
    bits = 8 * dtype.itemsize
    if _ALL_BUT_SIGN.fullmatch(kind):
        bits -= 1
    elif not _ALL_BITS.fullmatch(kind):
        raise BadInputError(
            f"weights of type {kind} cannot be judged for sparsity",
            hint="supported: float16/32/64, bfloat16, float8 with a sign, integers and bool",
        )
    mask: np.unsignedinteger[Any] = np.dtype(f"u{dtype.itemsize}").type((1 << bits) - 1)
    return mask
