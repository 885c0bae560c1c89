"""Bytes of weights in dense and sparse formats, and what converting one of them costs here."""

from __future__ import annotations

import timeit
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from functools import partial
from math import ceil, prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twofour.eligibility.rules import holds_trivially
from twofour.engines.machine import describe_machine
from twofour.graph.files import Array, numpy_dtype
from twofour.pattern import as_bits, count_zeros, nonzero_bytes, zero_mask
from twofour.pipeline.folder import CHECKPOINT, SPARSE, WEIGHTS, is_run_folder, onnx_name
from twofour.pipeline.validating import validate_path
from twofour.records.run import Conversion, FormatSize, ModelSizes
from twofour.records.weights import HARDWARE_PATTERN, Selection, WeightCheck

_MOST = 1 << 26
"""Most values of a matrix that is converted: its COO takes 1.3 GiB in float32."""
_TILE = 1 << 15
"""Values looked at in one go: their scratch, 30 bytes for each, stays in the cache."""
Numbers = NDArray[np.int64]


def model_sizes(path: Path) -> ModelSizes:
    """The sizes of a file or folder of weights, or of what a run folder left.

    Raises BadInputError without any weight of a convolution or matrix product.
    """
    if is_run_folder(path):
        path = _weights_in(path)
    checks = validate_path(path, HARDWARE_PATTERN, Selection()).checks
    # layers that share an array have a check each
    stored = {(check.file, check.weight): check for check in checks}.values()
    total = Counter[str]()
    for check in stored:
        total.update(bytes_by_format(check))
    converted = max(stored, key=_size_to_convert)
    matrix = _matrix_like(converted)
    coo = _conversion(matrix, coo=True)
    csr = _conversion(matrix, coo=False)
    like = converted.layer
    if len(matrix) < converted.shape[0]:
        like = f"{like} (its first {len(matrix):,} rows)"
    return ModelSizes(
        source=str(path),
        weights=len(stored),
        holding=sum(not check.violations for check in stored),
        sizes=tuple(FormatSize(format=name, size_bytes=size) for name, size in total.items()),
        converted=like,
        conversions=(coo, csr),
        machine=describe_machine(),
    )


def _weights_in(folder: Path) -> Path:
    """What a run left: the weights of a module, of a checkpoint, or an ONNX file."""
    for name in (WEIGHTS, CHECKPOINT, onnx_name(SPARSE)):
        if (folder / name).exists():
            return folder / name
    return folder


def _size_to_convert(weight: WeightCheck) -> int:
    """The values of a weight; 0 of one that is too large to convert."""
    size = prod(weight.shape)
    return size if size <= _MOST else 0


def bytes_by_format(weight: WeightCheck) -> dict[str, int]:
    """The bytes of a weight in each format: its values keep their type, indices are narrow.

    Source of 2:4: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks", section 3: two
    values of each four and 2 bits for the place of each; a line ends with a whole group.
    """
    shape = weight.shape
    itemsize = numpy_dtype(str(weight.dtype)).itemsize
    size = prod(shape)
    height = shape[0]
    nonzeros = size - (weight.zeros or 0)
    compressed = size * itemsize
    if size and not holds_trivially(shape, weight.axis, HARDWARE_PATTERN):
        length = shape[weight.axis]
        groups = size // length * ceil(length / 4)
        # a group of float16: 2 values of 2 bytes, and half a byte for their places
        compressed = 2 * groups * itemsize + ceil(groups / 2)
    largest = (height - 1, size // max(1, height) - 1, nonzeros)
    row, column, start = (np.min_scalar_type(number).itemsize for number in largest)
    return {
        "dense": size * itemsize,
        "2:4": compressed,
        "bitmask": nonzeros * itemsize + ceil(size / 8),
        "COO": nonzeros * (itemsize + row + column),
        "CSR": nonzeros * (itemsize + column) + (height + 1) * start,
    }


def _matrix_like(weight: WeightCheck) -> Array:
    """Ones and zeros, in the weight's shares and type, of its shape or as many rows as may be."""
    size = prod(weight.shape)
    width = size // max(1, weight.shape[0])
    height = min(weight.shape[0], _MOST // max(1, width))
    random = np.random.default_rng(0).random((height, width), np.float32)
    share_of_zeros = (weight.zeros or 0) / max(1, size)
    return (random >= share_of_zeros).astype(numpy_dtype(str(weight.dtype)))


def _conversion(matrix: Array, *, coo: bool) -> Conversion:
    """The times of five tries, and the memory of another."""
    convert = partial(to_sparse, matrix, coo=coo)
    seconds = timeit.repeat(convert, number=1, repeat=5)
    tracemalloc.start()
    convert()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Conversion(
        format="COO" if coo else "CSR",
        samples_ms=tuple(1e3 * s for s in seconds),
        peak_bytes=peak_bytes,
    )


def to_sparse(matrix: Array, *, coo: bool) -> tuple[Numbers, Numbers, Array]:
    """Rows (COO) or where each row starts (CSR), columns and values, with torch's 64-bit indices.

    It counts the non-zeros, then goes over them once. Beside the result it needs a tile of scratch,
    and a copy of a matrix that is not contiguous. -0.0 is zero and NaN is not.
    """
    height = len(matrix)
    nonzeros = matrix.size - count_zeros(matrix)
    values = np.empty(nonzeros, as_bits(matrix).dtype)
    columns = np.empty(nonzeros, np.int64)
    rows = np.empty(nonzeros, np.int64) if coo else np.zeros(height + 1, np.int64)
    end = 0
    for tile, at, first, begins, counts in _tiles(matrix):
        here = slice(end, end + at.size)
        end = here.stop
        np.take(tile, at, out=values[here], mode="clip")  # "raise" would buffer `out`
        np.subtract(at, np.repeat(begins, counts), out=columns[here])
        if coo:
            rows[here] = np.repeat(np.arange(first, first + counts.size), counts)
        else:
            rows[first + 1 :][: counts.size] += counts
    if not coo:
        np.cumsum(rows, out=rows)
    return rows, columns, values.view(matrix.dtype)


def _tiles(matrix: Array) -> Iterator[tuple[Array, Numbers, int, Numbers, Numbers]]:
    """Tiles, places of their non-zeros, the first row, where each row begins, and its non-zeros."""
    # Of the matrix [[0, a, b], [c, 0, 0]] the tile [b, c, 0] has non-zeros at 0 and 1. Its rows
    # begin at -2 and 1 and have one of them each, so the columns are 0 - -2 = 2 and 1 - 1 = 0.
    width = matrix.shape[1]
    bits = as_bits(matrix).reshape(-1)
    mask = zero_mask(matrix.dtype)
    for begin in range(0, bits.size, _TILE):
        tile = bits[begin : begin + _TILE]
        at = np.flatnonzero(nonzero_bytes(tile, mask).view(np.bool_))
        first = begin // width
        begins = np.arange(first * width - begin, tile.size, width)
        yield tile, at, first, begins, np.diff(np.searchsorted(at, begins), append=at.size)
