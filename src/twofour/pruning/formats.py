"""COO and CSR of a matrix, with little memory beside the result, and the bytes of every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.pattern import as_bits, count_zeros, nonzero_bytes, zero_mask
from twofour.records.run import ArraySize

_TILE = 1 << 15
"""Values looked at in one go: their scratch, 30 bytes for each, stays in the cache."""
Numbers = NDArray[np.int64]


def to_sparse(matrix: NDArray[Any], *, coo: bool) -> tuple[Numbers, Numbers, NDArray[Any]]:
    """Rows (COO) or where each row starts (CSR), columns and values, with torch's 64-bit indices.

    It counts the non-zeros, then goes over them once. Beside the result it needs a tile of scratch,
    and a copy of a matrix that is not contiguous. -0.0 is zero and NaN is not.
    """
    height, width = matrix.shape
    bits, mask = as_bits(matrix).reshape(-1), zero_mask(matrix.dtype.name, matrix.dtype.itemsize)
    size, end = matrix.size - count_zeros(matrix), 0
    columns, values = np.empty(size, np.int64), np.empty(size, bits.dtype)
    rows = np.empty(size, np.int64) if coo else np.zeros(height + 1, np.int64)
    # Of the matrix [[0, a, b], [c, 0, 0]] the tile [b, c, 0] has non-zeros at 0 and 1. Its rows
    # begin at -2 and 1 and have one of them each, so the columns are 0 - -2 = 2 and 1 - 1 = 0.
    for begin in range(0, bits.size, _TILE):
        tile, first = bits[begin : begin + _TILE], begin // width
        at = np.flatnonzero(nonzero_bytes(tile, mask).view(np.bool_))
        here = slice(end, end := end + at.size)
        begins = np.arange(first * width - begin, tile.size, width)
        counts = np.diff(np.searchsorted(at, begins), append=at.size)
        np.take(tile, at, out=values[here], mode="clip")  # "raise" would buffer `out`
        np.subtract(at, np.repeat(begins, counts), out=columns[here])
        if coo:
            rows[here] = np.repeat(np.arange(first, first + counts.size), counts)
        else:
            rows[first + 1 :][: counts.size] += counts
    return rows if coo else np.cumsum(rows, out=rows), columns, values.view(matrix.dtype)


def array_size(
    name: tuple[str, str], shape: tuple[int, ...], nonzeros: int, itemsize: int, axis: int | None
) -> ArraySize:
    """The bytes of an array in each format; `name` is its layer and kind, 2:4 runs along `axis`.

    Source of 2:4: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks", section 3: two
    values of each four and 2 bits for the place of each; a line ends with a whole group.
    """
    size, values, height = prod(shape), nonzeros * itemsize, shape[0]
    most = height - 1, size // max(1, height) - 1, nonzeros
    row, column, start = (np.min_scalar_type(number).itemsize for number in most)
    groups = size // shape[axis] * -(-shape[axis] // 4) if axis is not None and size else 0
    metadata = -(-groups // 2)
    return ArraySize(
        layer=name[0],
        kind=name[1],
        values=size,
        nonzeros=nonzeros,
        dense_bytes=size * itemsize,
        compressed_bytes=2 * groups * itemsize + metadata if groups else size * itemsize,
        metadata_bytes=metadata,
        bitmask_bytes=values + -(-size // 8),
        coo_bytes=values + nonzeros * (row + column),
        coo_memory_bytes=values + nonzeros * 16,
        csr_bytes=values + nonzeros * column + (height + 1) * start,
        csr_memory_bytes=values + nonzeros * 8 + (height + 1) * 8,
    )


def total_size(name: tuple[str, str], of: Sequence[ArraySize]) -> ArraySize:
    """The sums over arrays, under a layer and kind of their own."""
    names = [f.name for f in fields(ArraySize) if f.name not in ("layer", "kind", "holds")]
    sums = {name: sum(getattr(one, name) for one in of) for name in names}
    return replace(of[0], layer=name[0], kind=name[1], holds=None, **sums)
