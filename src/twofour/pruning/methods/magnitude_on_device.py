"""Magnitude N:M of a tensor that lies on another device: nothing of it is copied to the CPU.

The same counting as in magnitude.py, written against the namespace of the array. The weights come
out bit for bit as those of numpy do; tested with tensors on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from twofour.pattern import normalize_axis, split_tail
from twofour.pruning.methods.magnitude import (
    Format,
    Outcome,
    TileSums,
    format_named,
    outcome_of,
    prune_bits_in_place,
    refuse_shared_memory,
)
from twofour.records.weights import Pattern

Array = Any
"""A numpy array or a torch tensor."""

TILE = 1 << 22
"""Elements of a tile: scratch of about 100 MB, and work enough for a GPU in each step."""


def prune_where_it_lies(bits: Array, axis: int, pattern: Pattern, *, kind: str) -> Outcome:
    """Like prune_bits_in_place, for numpy arrays and for tensors on a device of their own.

    A tensor is one of signed integers of the width of `kind`, a float of 16, 32 or 64 bits.
    """
    prune = prune_bits_in_place if isinstance(bits, np.ndarray) else prune_on_device
    return prune(bits, axis, pattern, kind=kind)


def prune_on_device(
    bits: Array, axis: int, pattern: Pattern, *, kind: str, most: int = TILE
) -> Outcome:
    """The same in tiles of `most` elements; the device is waited for once, at the end."""
    axis, form = normalize_axis(bits, axis), format_named(kind)
    refuse_shared_memory(bits.shape, bits.stride())
    sums = [
        _prune_tile(tile, axis, (length, min(pattern.n, length)), kind=kind, form=form)
        for part, length in split_tail(bits, axis, pattern.m)
        for tile in tiles(part, axis, length, most)
    ]
    return outcome_of(_fetched(sums), math.prod(bits.shape))


def count_non_finite_on_device(bits: Array, *, kind: str, most: int = TILE) -> int:
    """How many elements are NaN or infinity; like magnitude.count_non_finite."""
    form = format_named(kind)
    return sum(
        int(_count((tile & form.magnitude) > form.largest)) for tile in tiles(bits, 0, 1, most)
    )


def count_zeros_on_device(bits: Array, *, kind: str, most: int = TILE) -> int:
    """Zeros, -0.0 included; like pattern.count_zeros."""
    mask = format_named(kind).magnitude
    return sum(int(_count((tile & mask) == 0)) for tile in tiles(bits, 0, 1, most))


def tiles(array: Array, axis: int, group: int, most: int = TILE) -> Iterator[Array]:
    """Views of about `most` elements, each of whole groups, by halving the longest axis."""
    size = math.prod(array.shape)
    units = [n // group if a == axis else n for a, n in enumerate(array.shape)]
    longest = max(range(len(units)), key=units.__getitem__, default=0)
    if size <= max(most, group):
        if size:
            yield array
        return
    middle = units[longest] // 2 * (group if longest == axis else 1)
    before = (slice(None),) * longest
    lower, upper = (*before, slice(None, middle)), (*before, slice(middle, None))
    yield from tiles(array[lower], axis, group, most)
    yield from tiles(array[upper], axis, group, most)


def _prune_tile(
    tile: Array, axis: int, group: tuple[int, int], *, kind: str, form: Format
) -> Array:
    """Prune one tile, a view, and give its sums as one small array on its device."""
    xp = array_namespace(tile)
    moved = xp.moveaxis(tile, axis, -1)
    length, keep = group
    groups = xp.reshape(moved, (-1, length))
    magnitudes = groups & form.magnitude
    stays = _best(magnitudes, keep)
    kept = xp.where(stays, groups, xp.zeros_like(groups))
    moved[...] = xp.reshape(kept, moved.shape)
    return xp.stack(
        [
            _sum(magnitudes, kind),
            _sum(kept & form.magnitude, kind),
            *(
                xp.astype(_count(what), xp.float64)
                for what in (magnitudes != 0, stays, magnitudes > form.largest)
            ),
        ]
    )


def _best(magnitudes: Array, keep: int) -> Array:
    """True for the `keep` largest of each row; ties keep the lower index, zeros never stay."""
    xp = array_namespace(magnitudes)
    length = magnitudes.shape[1]
    ahead = xp.zeros_like(magnitudes, dtype=xp.uint8)
    ahead += xp.arange(length - 1, -1, -1, dtype=xp.uint8, device=magnitudes.device)
    for d in range(1, length):
        wins = xp.astype(magnitudes[:, :-d] >= magnitudes[:, d:], xp.uint8)
        ahead[:, d:] += wins
        ahead[:, :-d] -= wins
    return (ahead < keep) & (magnitudes != 0)


def _sum(magnitudes: Array, kind: str) -> Array:
    """Sum of the magnitudes that bits without a sign stand for, in float64."""
    xp = array_namespace(magnitudes)
    return xp.sum(magnitudes.view(getattr(xp, kind)), dtype=xp.float64)


def _count(chosen: Array) -> Array:
    return array_namespace(chosen).count_nonzero(chosen)


def _fetched(sums: Sequence[Array]) -> list[TileSums]:
    """The tiles' sums from their device, in one transfer."""
    rows = array_namespace(sums[0]).stack(list(sums)).tolist() if sums else []
    return [
        TileSums(
            before=before,
            after=after,
            nonzero_before=int(nonzero_before),
            nonzero=int(nonzero),
            non_finite=int(non_finite),
        )
        for before, after, nonzero_before, nonzero, non_finite in rows
    ]
