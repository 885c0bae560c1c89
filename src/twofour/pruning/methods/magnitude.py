"""Magnitude N:M: which weights of each group stay, written in place, where the array lies.

The masks are found by counting, for every weight, how many weights of its group come before it
(larger magnitude, or equal magnitude and lower index): the N with the lowest counts stay. That is
M - 1 comparisons of the array with itself, shifted, and no enumeration of the possible masks.
Everything asked of the array (zeros, kept magnitude, NaN) is found in the same pass over tiles
that stay in the cache.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.pattern import TILE, as_bits, normalize_axis, split_tail, tiles
from twofour.records.weights import Pattern

_SUMMED_SIDE_BY_SIDE = 2048
"""Partial sums of a tile, added as rows: numpy does that 3 times as fast as one long sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How the bits of a stored float order by magnitude, and what they are worth."""

    magnitude: int
    """Mask of the bits below the sign: as integers they order as the magnitudes do."""
    largest: int
    """Magnitude bits of the largest finite number; above are infinity and NaN."""
    values: Callable[[NDArray[Any]], Iterable[NDArray[Any]]]
    """Magnitude bits to magnitudes in float32 or float64, up to a constant factor, in any order.

    Each array is to be used before the next is asked for.
    """
    fnuz: bool = False
    """0x80 is the type's only NaN, not -0.0."""
    smallest_normal: int | None = None
    """Magnitude bits from which on numpy's own comparison of the type may be used: it is faster
    than that of integers, but a processor may be set to take subnormals for zero."""


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
class TileSums:
    """The same of a tile: sums of magnitudes, and counts."""

    before: float
    after: float
    nonzero_before: int
    nonzero: int
    non_finite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """A piece of an array: whole groups of `length` elements `step` apart, of which `keep` stay."""

    bits: NDArray[Any]
    length: int
    step: int
    keep: int


def prune_in_place(array: NDArray[Any], axis: int, pattern: Pattern) -> Outcome:
    """Zero all but the N largest magnitudes of every M weights along `axis`, in the array's memory.

    Ties keep the lower index; a tail shorter than M keeps at most N. Every zero is written as
    +0.0. Source: Mishra et al., "Accelerating Sparse Deep Neural Networks", section 3.1.
    Raises BadInputError for an axis the array has not, an unsupported type, and memory that cannot
    be written.
    """
    kind = array.dtype.name
    format_named(kind)
    return prune_bits_in_place(as_bits(array), axis, pattern, kind=kind)


def prune_bits_in_place(bits: NDArray[Any], axis: int, pattern: Pattern, *, kind: str) -> Outcome:
    """Like prune_in_place on the raw bits of numbers of type `kind` (a numpy name).

    For holders of types numpy lacks, such as bfloat16 in a torch tensor: no conversion, no copy.
    """
    axis = normalize_axis(bits, axis)
    if not bits.flags.writeable:
        raise BadInputError("the array is read-only and cannot be pruned in place")
    if not bits.size:
        return Outcome(kept_magnitude=None, zeros=0, zeros_before=0)
    if any(n > 1 and not stride for n, stride in zip(bits.shape, bits.strides, strict=True)):
        # an expanded array: pruning one element would prune others
        raise BadInputError("several indices of the array share one place in memory (expanded)")
    bits = as_bits(bits)
    form = format_named(kind)
    pieces = [
        _Tile(bits=tile, length=length, step=step, keep=min(pattern.n, length))
        for part, length in split_tail(bits, axis, pattern.m)
        for tile, step in tiles(part, axis, length)
    ]
    most = max(tile.bits.size for tile in pieces)
    kinds = (bits.dtype.newbyteorder("="), np.bool_, np.uint8)
    scratch = [np.empty(most, kind) for kind in kinds]  # a tile uses the front of them
    # in one thread: a second one loses more to page faults of mapped weights than it gains
    return outcome_of([_prune_tile(tile, form, scratch) for tile in pieces], bits.size)


def outcome_of(sums: Sequence[TileSums], size: int) -> Outcome:
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
    """How many elements are NaN or infinity; a healthy array is read once, at memory speed.

    Extra memory does not grow with the array. `kind` is numpy's name of the type where the array
    holds the raw bits of another one.
    """
    kind = kind or array.dtype.name
    form = format_named(kind)
    if kind.startswith(("int", "uint")):
        return 0
    pieces = tiles(np.atleast_1d(as_bits(array)), 0, 1)
    return sum(_non_finite_of_tile(tile, form) for tile, _ in pieces)


def _non_finite_of_tile(tile: NDArray[Any], form: Format) -> int:
    """The largest of the bits, taken with a sign and without, rule a healthy tile out at once."""
    sign = form.magnitude + 1
    signed = np.dtype(f"i{tile.dtype.itemsize}").newbyteorder(tile.dtype.byteorder)
    if (
        not form.fnuz
        and int(tile.max()) <= sign + form.largest
        and int(tile.view(signed).max()) <= form.largest
    ):
        return 0
    magnitudes = np.empty(tile.shape, tile.dtype.newbyteorder("="))
    _write_magnitudes(tile, form, magnitudes)
    return int(np.count_nonzero(magnitudes > form.largest))


def _prune_tile(tile: _Tile, form: Format, scratch: Sequence[NDArray[Any]]) -> TileSums:
    bits, size = tile.bits, tile.bits.size
    magnitudes, stays, ahead = (array[:size] for array in scratch)
    shaped = magnitudes.reshape(bits.shape)
    _write_magnitudes(bits, form, shaped)
    low, high = int(np.minimum.reduce(magnitudes)), int(np.maximum.reduce(magnitudes))
    before = _sum(form, magnitudes)
    broken = int(np.count_nonzero(magnitudes > form.largest)) if high > form.largest else 0
    ordered = magnitudes
    if form.smallest_normal is not None and low >= form.smallest_normal and not broken:
        ordered = magnitudes.view(f"f{magnitudes.itemsize}")
    _choose(ordered, tile, stays, ahead)
    nonzero_before, nonzero = size, size // tile.length * tile.keep
    if low == 0:
        nonzero_before = int(np.count_nonzero(magnitudes))
        np.logical_and(stays, magnitudes, out=stays)
        nonzero = int(np.count_nonzero(stays))
    # bits times 0 or 1: a zero is written as +0.0, everything else stays bit for bit
    np.multiply(bits, stays.reshape(bits.shape), out=bits)
    _write_magnitudes(bits, form, shaped)
    return TileSums(
        before=before,
        after=_sum(form, magnitudes),
        nonzero_before=nonzero_before,
        nonzero=nonzero,
        non_finite=broken,
    )


@functools.lru_cache(maxsize=2)
def _behind(
    length: int, step: int, size: int
) -> tuple[NDArray[np.uint8], tuple[NDArray[np.bool_], ...]]:
    """For each element of a flat tile, how many elements of its group lie behind it.

    Beside it, for each distance, whether so many do. A smaller tile is the front of a larger one.
    """
    later = np.empty((-(-size // (length * step)), length, step), np.uint8)
    later[...] = np.arange(length, dtype=np.uint8)[::-1, None]
    flat = later.reshape(-1)
    return flat, tuple(flat >= d for d in range(1, length))


def _choose(
    magnitudes: NDArray[Any], tile: _Tile, stays: NDArray[np.bool_], ahead: NDArray[np.uint8]
) -> None:
    """Set `stays` for the weights with fewer than `keep` weights of their group ahead of them.

    `ahead` starts as if every later weight of the group were larger; each comparison that says
    otherwise moves one count from the earlier to the later weight.
    """
    if tile.step == 1 and tile.length in {2, 4, 8} and sys.byteorder == "little":
        _choose_neighbours(magnitudes, tile, stays, ahead)
        return
    size = magnitudes.size
    later, masks = _behind(tile.length, tile.step, max(size, TILE))
    np.copyto(ahead, later[:size])
    for d in range(1, tile.length):
        shift = d * tile.step
        wins = stays[:-shift]
        np.greater_equal(magnitudes[:-shift], magnitudes[shift:], out=wins)
        np.logical_and(wins, masks[d - 1][: size - shift], out=wins)
        np.add(ahead[shift:], wins.view(np.uint8), out=ahead[shift:])
        np.subtract(ahead[:-shift], wins.view(np.uint8), out=ahead[:-shift])
    np.less(ahead, tile.keep, out=stays)


def _choose_neighbours(
    magnitudes: NDArray[Any], tile: _Tile, stays: NDArray[np.bool_], ahead: NDArray[np.uint8]
) -> None:
    """_choose for 2, 4 or 8 neighbours: the counts of a group are the bytes of one integer.

    A comparison over a distance d that holds takes 1 from its byte and adds 1 to the byte d places
    on, which is 2**(8 d) - 1 times its bit.
    """
    length, word = tile.length, np.dtype(f"u{tile.length}").type
    wins, counts = stays.view(word), ahead.view(word)
    counts.fill(int.from_bytes(bytes(reversed(range(length))), "little"))
    for d in range(1, length):
        np.greater_equal(magnitudes[:-d], magnitudes[d:], out=stays[:-d])
        np.bitwise_and(wins, word(int.from_bytes(bytes([1] * (length - d)), "little")), out=wins)
        np.multiply(wins, word((1 << 8 * d) - 1), out=wins)
        np.add(counts, wins, out=counts)
    np.less(ahead, tile.keep, out=stays)


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
    """Sum of a tile's magnitudes, in float64 where float32 overflows; always in one order."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = sum(_sum_fast(values) for values in form.values(magnitudes))
        if math.isfinite(total):
            return total
        return sum(float(values.sum(dtype=np.float64)) for values in form.values(magnitudes))


def _sum_fast(values: NDArray[Any]) -> float:
    rows = values.size - values.size % _SUMMED_SIDE_BY_SIDE
    sums = np.add.reduce(values[:rows].reshape(-1, _SUMMED_SIDE_BY_SIDE), axis=0)
    total = float(np.add.reduce(sums))
    return total if rows == values.size else total + float(np.add.reduce(values[rows:]))


def format_named(kind: str) -> Format:
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
    return Format(
        magnitude=0x7F, largest=largest, values=lambda magnitudes: (table[magnitudes],), fnuz=fnuz
    )


def _integer(bits: int, *, signed: bool) -> Format:
    return Format(
        magnitude=0 if signed else (1 << bits) - 1,
        largest=(1 << bits) - 1,
        values=lambda magnitudes: (magnitudes.astype(np.float32 if bits == 8 else np.float64),),
    )


def _widen(magnitudes: NDArray[Any], *, shift: int) -> Iterator[NDArray[Any]]:
    """16-bit floats as float32: bfloat16 by 16 places; float16 by 13, 2**-112 of its value.

    numpy converts float16 one by one; the constant factor falls out of the ratio of two sums. Two
    neighbours are read as one integer: first the lower halves are widened, then the upper ones.
    """
    half = magnitudes.size // 2
    pairs = magnitudes[: 2 * half].view(np.uint32)
    wide = np.left_shift(pairs, 16)
    if shift < 16:
        wide >>= 16 - shift
    yield wide.view(np.float32)
    np.bitwise_and(pairs, 0xFFFF_0000, out=wide)
    if shift < 16:
        wide >>= 16 - shift
    yield wide.view(np.float32)
    yield (magnitudes[2 * half :].astype(np.uint32) << shift).view(np.float32)


_FNUZ_MAGNITUDES = np.array([*range(128), 128, *range(1, 128)], np.uint8)

# largest: OCP 8-bit floating point specification 1.0, table 1 (e4m3fn, e5m2); ONNX
# documentation, "Float stored in 8 bits" (fnuz); ml_dtypes documentation (the other two).
_FORMATS = {
    "float64": Format(
        magnitude=0x7FFF_FFFF_FFFF_FFFF,
        largest=0x7FEF_FFFF_FFFF_FFFF,
        values=lambda magnitudes: (magnitudes.view(np.float64),),
        smallest_normal=0x0010_0000_0000_0000,
    ),
    "float32": Format(
        magnitude=0x7FFF_FFFF,
        largest=0x7F7F_FFFF,
        values=lambda magnitudes: (magnitudes.view(np.float32),),
        smallest_normal=0x0080_0000,
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
