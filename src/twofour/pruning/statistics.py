"""What calibration tells of a layer's inputs: Gram matrices and means, summed in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import overload

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array
from numpy.typing import NDArray

from twofour.pruning.methods.problem import Array
from twofour.pruning.threads import one_blas_thread, side_by_side

HELD_OUT = 10
"""Every tenth sample is kept from the methods, to judge what they did."""
_WIDE = 4096
"""Inputs from which on the sums are float32: float64 would take 128 MiB and more."""
_COLUMNS = 512
"""Of a Gram matrix, summed at a time by one thread: the triangle above alone is worked out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Sums over input rows of one layer."""

    gram: Array
    """(parts, inputs, inputs): the sum of x xᵀ."""
    total: Array
    """(parts, inputs): the sum of x."""
    rows: int
    """Input rows of each part."""

    @property
    def mean_gram(self) -> Array:
        """The mean of x xᵀ; zeros where no row came."""
        return self.gram / max(1, self.rows)

    @property
    def mean(self) -> Array:
        """The mean input; zeros where no row came."""
        return self.total / max(1, self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of one layer: what the method sees, and what it is judged by."""

    seen: Inputs
    held_out: Inputs | None
    """None: too few samples to hold any out."""


def held_out_samples(first: int, count: int) -> NDArray[np.bool_]:
    """Which of the samples `first`, `first` + 1, ... are held out."""
    mask: NDArray[np.bool_] = np.arange(first, first + count) % HELD_OUT == HELD_OUT - 1
    return mask


class InputSums:
    """Adds up the input rows of one layer; users of a tied weight add to the same one."""

    def __init__(self) -> None:
        self._seen: Inputs | None = None
        self._held_out: Inputs | None = None

    def add(self, rows: Array, held_out: NDArray[np.bool_]) -> None:
        """Rows as `matrix_rows` or `window_rows` give them, (parts, n, inputs).

        `held_out` says it of each of the n rows: all rows of one sample belong together.
        """
        if not held_out.any():
            self._seen = _plus(self._seen, rows)
        elif held_out.all():
            self._held_out = _plus(self._held_out, rows)
        else:
            xp = array_namespace(rows)
            for mask, name in ((~held_out, "_seen"), (held_out, "_held_out")):
                where = xp.asarray(np.flatnonzero(mask), device=device(rows))
                setattr(self, name, _plus(getattr(self, name), xp.take(rows, where, axis=1)))

    def statistics(self) -> Statistics | None:
        """None: no input ever reached the layer."""
        if self._seen is None:
            return None
        for inputs in filter(None, (self._seen, self._held_out)):
            _mirror(inputs.gram)
        return Statistics(seen=self._seen, held_out=self._held_out)


def _plus(before: Inputs | None, rows: Array) -> Inputs:
    """With more rows; the Gram matrices grow in place."""
    xp = array_namespace(rows)
    rows = xp.astype(rows, xp.float32) if rows.dtype != xp.float64 else rows
    parts, count, inputs = rows.shape
    wide = xp.float32 if inputs > _WIDE else xp.float64
    total = xp.sum(rows, axis=1, dtype=wide)
    if before is None:
        gram = xp.zeros((parts, inputs, inputs), dtype=wide, device=device(rows))
        before = Inputs(gram=gram, total=xp.zeros_like(total), rows=0)
    _add_products(before.gram, rows)
    return replace(before, total=before.total + total, rows=before.rows + count)


def _add_products(gram: Array, rows: Array) -> None:
    """XᵀX of each part, with the same bits for any number of threads.

    On the CPU only blocks on the diagonal and above it: `_mirror` makes the others.
    """
    xp = array_namespace(rows)
    if not is_numpy_array(rows):
        gram += xp.matmul(xp.matrix_transpose(rows), rows)
        return

    def add(piece: tuple[int, int]) -> None:
        part, first = piece
        some = slice(first, first + _COLUMNS)
        gram[part, : some.stop, some] += np.matmul(
            rows[part, :, : some.stop].T, rows[part, :, some]
        )

    pieces = [(p, i) for p in range(rows.shape[0]) for i in range(0, rows.shape[-1], _COLUMNS)]
    with one_blas_thread():
        side_by_side(add, pieces)


def _mirror(gram: Array) -> None:
    """Fill in the blocks below the diagonal."""
    if is_numpy_array(gram):
        for first in range(_COLUMNS, gram.shape[-1], _COLUMNS):
            some = slice(first, first + _COLUMNS)
            gram[:, some, :first] = np.swapaxes(gram[:, :first, some], 1, 2)


@overload
def both(one: Statistics, other: Statistics) -> Statistics: ...


@overload
def both(one: Statistics | None, other: Statistics | None) -> Statistics | None: ...


def both(one: Statistics | None, other: Statistics | None) -> Statistics | None:
    """Of two users of one array, added up; None: no input ever reached them."""
    if one is None or other is None:
        return one or other
    held_out = one.held_out or other.held_out
    if one.held_out is not None and other.held_out is not None:
        held_out = _added(one.held_out, other.held_out)
    return Statistics(seen=_added(one.seen, other.seen), held_out=held_out)


def _added(one: Inputs, other: Inputs) -> Inputs:
    """The sums over the rows of both."""
    return Inputs(
        gram=one.gram + other.gram, total=one.total + other.total, rows=one.rows + other.rows
    )
