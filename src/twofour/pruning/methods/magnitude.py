"""Magnitude N:M: which weights of each group stay, written in place. numpy only.

The masks are found by counting, for every weight, how many weights of its group come before it
(larger magnitude, or equal magnitude and lower index): the N with the lowest counts stay. That is
M - 1 comparisons of the array with itself, shifted, and no enumeration of the possible masks.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.pattern import as_bits, normalize_axis, split_tail, tiles
from twofour.records.weights import Pattern

_MOST_THREADS = 4
"""Each thread has scratch of its own (about 2 MiB); memory bandwidth is used up by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How the bits of a stored float order by magnitude, and what they are worth."""

    magnitude: int
    """Mask of the bits below the sign: as integers they order as the magnitudes do."""
    largest: int
    """Magnitude bits of the largest finite number; above are infinity and NaN."""
    values: Callable[[NDArray[Any]], NDArray[Any]]
    """Magnitude bits to magnitudes in float32 or float64, up to a constant factor."""
    fnuz: bool = False
    """0x80 is the type's only NaN, not -0.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What pruning did to one array."""

    kept_magnitude: float | None
    """Sum |w| after over before; None where the sum before is 0 or no finite float64."""
    zeros: int
    zeros_before: int
    """-0.0 is one too."""
    non_finite: int = 0
    """Elements that were NaN or infinite: then what the array holds now is of no use."""

    @property
    def held_before(self) -> bool:
        """Whether nothing was taken from it: the array came in N:M."""
        return self.zeros == self.zeros_before


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """The same of a tile: sums of magnitudes, and counts."""

    before: float
    after: float
    nonzero_before: int
    nonzero: int
    non_finite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The groups of a contiguous tile: `length` elements `step` apart, and how many may stay."""

    length: int
    step: int
    keep: int


def prune_in_place(
    array: NDArray[Any], axis: int, pattern: Pattern, *, threads: int | None = None
) -> Outcome:
    """Zero all but the N largest magnitudes of every M weights along `axis`, in the array's memory.

    Ties keep the lower index; a tail shorter than M keeps at most N. Every zero is written as
    +0.0. The result is the same for any number of `threads`. Source of the rule: Mishra et al.,
    "Accelerating Sparse Deep Neural Networks", section 3.1. Raises BadInputError for an axis the
    array has not, an unsupported type, and memory that cannot be written.
    """
    kind = array.dtype.name
    _format(kind)
    return prune_bits_in_place(as_bits(array), axis, pattern, kind=kind, threads=threads)


def prune_bits_in_place(
    bits: NDArray[Any], axis: int, pattern: Pattern, *, kind: str, threads: int | None = None
) -> Outcome:
    """Like prune_in_place on the raw bits of numbers of type `kind` (a numpy name).

    For holders of types numpy lacks, such as bfloat16 in a torch tensor: no conversion, no copy.
    """
    axis = normalize_axis(bits, axis)
    if not bits.flags.writeable:
        raise BadInputError("the array is read-only and cannot be pruned in place")
    if not bits.size:
        return Outcome(kept_magnitude=None, zeros=0, zeros_before=0)
    if any(n > 1 and not stride for n, stride in zip(bits.shape, bits.strides, strict=True)):
        raise BadInputError("several indices of the array share one place in memory (expanded)")
    bits = as_bits(bits)
    form = _format(kind)
    sums: list[_Sums] = []
    for part, length in split_tail(bits, axis, pattern.m):
        jobs = [
            (tile, _Group(length=length, step=step, keep=min(pattern.n, length)))
            for tile, step in tiles(part, axis, length)
        ]
        sums.extend(_in_threads(jobs, form, threads))
    return _outcome(sums, bits.size)


def _outcome(sums: Sequence[_Sums], size: int) -> Outcome:
    """What the tiles of an array of `size` elements add up to."""
    finite = all(math.isfinite(tile.before) for tile in sums)
    before = math.fsum(tile.before for tile in sums) if finite else 0.0
    after = math.fsum(tile.after for tile in sums) if finite else 0.0
    return Outcome(
        kept_magnitude=after / before if 0 < before < math.inf else None,
        zeros=size - sum(tile.nonzero for tile in sums),
        zeros_before=size - sum(tile.nonzero_before for tile in sums),
        non_finite=sum(tile.non_finite for tile in sums),
    )


def count_non_finite(array: NDArray[Any], *, kind: str | None = None) -> int:
    """How many elements are NaN or infinity; one pass, extra memory does not grow.

    `kind` is numpy's name of the type where the array holds the raw bits of another one.
    """
    kind = kind or array.dtype.name
    form = _format(kind)
    if kind.startswith(("int", "uint")):
        return 0
    count = 0
    for tile, _ in tiles(np.atleast_1d(as_bits(array)), 0, 1):
        magnitudes = np.empty(tile.shape, tile.dtype.newbyteorder("="))
        _write_magnitudes(tile, form, magnitudes)
        count += int(np.count_nonzero(magnitudes > form.largest))
    return count


def _in_threads(
    jobs: Sequence[tuple[NDArray[Any], _Group]], form: Format, threads: int | None
) -> list[_Sums]:
    """Prune the tiles, in order or in a few runs side by side; their sums in the tiles' order."""
    if threads is None:
        threads = min(_MOST_THREADS, os.cpu_count() or 1)
    threads = max(1, min(threads, len(jobs) // 2))
    prune = functools.partial(_prune_tiles, form=form, later=functools.lru_cache(4)(_later))
    if threads == 1:
        return prune(jobs)
    cuts = [len(jobs) * k // threads for k in range(threads + 1)]
    runs = (jobs[a:b] for a, b in itertools.pairwise(cuts))
    with ThreadPoolExecutor(threads) as pool:
        return [pair for run in pool.map(prune, runs) for pair in run]


def _later(length: int, step: int, size: int) -> NDArray[np.uint8]:
    """For each element of a flat tile, how many elements of its group lie behind it."""
    later = np.empty((size // (length * step), length, step), np.uint8)
    later[...] = np.arange(length, dtype=np.uint8)[::-1, None]
    return later.reshape(-1)


def _prune_tiles(
    jobs: Sequence[tuple[NDArray[Any], _Group]],
    *,
    form: Format,
    later: Callable[[int, int, int], NDArray[np.uint8]],
) -> list[_Sums]:
    """Prune tiles one after the other with one set of scratch arrays."""
    if not jobs:
        return []
    largest = max(tile.size for tile, _ in jobs)
    native = jobs[0][0].dtype.newbyteorder("=")
    magnitudes, keep = np.empty(largest, native), np.empty(largest, native)
    stays, ahead = np.empty(largest, np.bool_), np.empty(largest, np.uint8)
    sums = []
    for tile, group in jobs:
        n = tile.size
        flat = magnitudes[:n]
        _write_magnitudes(tile, form, flat.reshape(tile.shape))
        _choose(flat, group, later(group.length, group.step, n), stays[:n], ahead[:n])
        np.copyto(keep[:n], stays[:n])
        before, nonzero_before = _sum(form, flat), int(np.count_nonzero(flat))
        broken = int(np.count_nonzero(flat > form.largest)) if flat.max() > form.largest else 0
        np.multiply(flat, keep[:n], out=flat)
        # bits times 0 or 1: a zero is written as +0.0, everything else stays bit for bit
        np.multiply(tile, keep[:n].reshape(tile.shape), out=tile)
        sums.append(
            _Sums(
                before=before,
                after=_sum(form, flat),
                nonzero_before=nonzero_before,
                nonzero=int(np.count_nonzero(stays[:n])),
                non_finite=broken,
            )
        )
    return sums


def _choose(
    magnitudes: NDArray[Any],
    group: _Group,
    later: NDArray[np.uint8],
    stays: NDArray[np.bool_],
    ahead: NDArray[np.uint8],
) -> None:
    """Set `stays` for the non-zero weights with fewer than `keep` weights ahead of them.

    `ahead` starts as if every later weight of the group were larger; each comparison that says
    otherwise moves one count from the earlier to the later weight.
    """
    np.copyto(ahead, later)
    inside = np.empty(ahead.size, np.bool_)
    for d in range(1, group.length):
        shift = d * group.step
        wins = stays[:-shift]
        np.greater_equal(magnitudes[:-shift], magnitudes[shift:], out=wins)
        np.greater_equal(later, d, out=inside)
        np.logical_and(wins, inside[:-shift], out=wins)
        np.add(ahead[shift:], wins.view(np.uint8), out=ahead[shift:])
        np.subtract(ahead[:-shift], wins.view(np.uint8), out=ahead[:-shift])
    np.less(ahead, group.keep, out=stays)
    np.logical_and(stays, np.not_equal(magnitudes, 0, out=inside), out=stays)


def _write_magnitudes(bits: NDArray[Any], form: Format, out: NDArray[Any]) -> None:
    """Unsigned integers that order as |w| does, into `out`."""
    if form.fnuz:
        np.take(_FNUZ_MAGNITUDES, bits, out=out, mode="clip")
    elif form.magnitude:
        np.bitwise_and(bits, bits.dtype.type(form.magnitude), out=out)
    else:
        # two's complement: |-128| wraps to -128, whose bits are 128 unsigned
        signed = np.dtype(f"i{bits.dtype.itemsize}")
        np.absolute(bits.view(signed.newbyteorder(bits.dtype.byteorder)), out=out.view(signed))


def _sum(form: Format, magnitudes: NDArray[Any]) -> float:
    """Sum of a tile's magnitudes: numpy's pairwise sum, in float64 where float32 overflows."""
    values = form.values(magnitudes)
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(values.sum())
        return total if math.isfinite(total) else float(values.sum(dtype=np.float64))


def _format(kind: str) -> Format:
    """The format of a numpy type's name; raises BadInputError where there is none."""
    if kind in _FORMATS:
        return _FORMATS[kind]
    raise BadInputError(
        f"weights of type {kind} cannot be pruned by magnitude",
        hint=f"supported: {', '.join(_FORMATS)}",
    )


def _float8(mantissa: int, bias: int, largest: int, *, fnuz: bool = False) -> Format:
    """A float8 format from its layout; values by table."""
    codes = np.arange(129)
    exponent, fraction = codes >> mantissa, codes & ((1 << mantissa) - 1)
    significand = fraction + ((exponent > 0) << mantissa)
    table = (significand * np.exp2(np.maximum(exponent, 1) - bias - mantissa)).astype(np.float32)
    table[largest + 1 :] = np.inf
    return Format(magnitude=0x7F, largest=largest, values=table.__getitem__, fnuz=fnuz)


def _integer(bits: int, *, signed: bool) -> Format:
    return Format(
        magnitude=0 if signed else (1 << bits) - 1,
        largest=(1 << bits) - 1,
        values=lambda magnitudes: magnitudes.astype(np.float32 if bits == 8 else np.float64),
    )


def _widen(magnitudes: NDArray[Any], *, shift: int) -> NDArray[Any]:
    """16-bit floats as float32: bfloat16 by 16 places; float16 by 13, 2**-112 of its value.

    numpy converts float16 one by one; the constant factor falls out of the ratio of two sums.
    """
    wide = magnitudes.astype(np.uint32)
    wide <<= shift
    return wide.view(np.float32)


_FNUZ_MAGNITUDES = np.array([*range(128), 128, *range(1, 128)], np.uint8)

# largest: OCP 8-bit floating point specification 1.0, table 1 (e4m3fn, e5m2); ONNX
# documentation, "Float stored in 8 bits" (fnuz); ml_dtypes documentation (the other two).
_FORMATS = {
    "float64": Format(
        magnitude=0x7FFF_FFFF_FFFF_FFFF,
        largest=0x7FEF_FFFF_FFFF_FFFF,
        values=lambda magnitudes: magnitudes.view(np.float64),
    ),
    "float32": Format(
        magnitude=0x7FFF_FFFF,
        largest=0x7F7F_FFFF,
        values=lambda magnitudes: magnitudes.view(np.float32),
    ),
    "float16": Format(
        magnitude=0x7FFF,
        largest=0x7BFF,
        values=functools.partial(_widen, shift=13),
    ),
    "bfloat16": Format(
        magnitude=0x7FFF,
        largest=0x7F7F,
        values=functools.partial(_widen, shift=16),
    ),
    "float8_e3m4": _float8(4, 3, 0x6F),
    "float8_e4m3": _float8(3, 7, 0x77),
    "float8_e4m3fn": _float8(3, 7, 0x7E),
    "float8_e5m2": _float8(2, 15, 0x7B),
    "float8_e4m3b11fnuz": _float8(3, 11, 0x7F, fnuz=True),
    "float8_e4m3fnuz": _float8(3, 8, 0x7F, fnuz=True),
    "float8_e5m2fnuz": _float8(2, 16, 0x7F, fnuz=True),
    **{f"int{bits}": _integer(bits, signed=True) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": _integer(bits, signed=False) for bits in (8, 16, 32, 64)},
}
