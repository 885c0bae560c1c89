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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.inputs.fits import numpy_type
from twofour.pattern import TILE, as_bits, normalize_axis, split_tail, tiles
from twofour.records import frozen
from twofour.records.weights import Pattern


@frozen
class Format:
    """How the bits of a stored number order by magnitude, and what they are worth."""

    magnitude: int
    """Mask of the bits below the sign: as integers they order as the magnitudes do."""
    largest: int
    """Magnitude bits of the largest finite number; above are infinity and NaN."""
    values: Callable[[NDArray[Any]], NDArray[Any]]
    """Magnitude bits to magnitudes in float32 or float64, up to a constant factor."""


@frozen
class Outcome:
    """What pruning did to one array."""

    kept_magnitude: float | None = None
    """Sum |w| after over before; None where the sum before is 0 or not finite."""
    zeros: int = 0
    zeros_before: int = 0
    """-0.0 is one too."""
    non_finite: int = 0
    """Elements that were NaN or infinite: then what the array holds now is of no use."""

    @property
    def held_before(self) -> bool:
        """Whether nothing was taken from it: the array came in N:M."""
        return self.zeros == self.zeros_before


@frozen
class _TileSums:
    """The same of a tile: sums of magnitudes, and counts."""

    before: float
    after: float
    nonzero_before: int
    nonzero: int
    non_finite: int


@frozen
class _Tile:
    """A piece of an array: whole groups of `length` elements `step` apart, of which `keep` stay."""

    bits: NDArray[Any]
    length: int
    step: int
    keep: int


@frozen
class _Scratch:
    """Flat memory for one tile; a smaller tile uses the front of it."""

    magnitudes: NDArray[Any]
    stays: NDArray[np.bool_]
    ahead: NDArray[np.uint8]


def prune_in_place(values: NDArray[Any], axis: int, pattern: Pattern) -> Outcome:
    """Zero all but the N largest magnitudes of every M weights along `axis`, in the array's memory.

    The raw bits are compared, also those of types that numpy lacks, such as bfloat16: no
    conversion, no copy. Ties keep the lower index; a tail shorter than M keeps at most N. Every
    zero is written as +0.0. Source: Mishra et al., "Accelerating Sparse Deep Neural Networks",
    section 3.1. Raises BadInputError for an axis the array has not, and an unsupported type.
    """
    form = format_named(values.dtype.name)
    axis = normalize_axis(values, axis)
    if not values.size:
        return Outcome()
    bits = as_bits(values)
    pieces = []
    for part, length in split_tail(bits, axis, pattern.m):
        for tile, step in tiles(part, axis, length):
            keep = min(pattern.n, length)
            pieces.append(_Tile(bits=tile, length=length, step=step, keep=keep))
    most = max(tile.bits.size for tile in pieces)
    scratch = _Scratch(
        magnitudes=np.empty(most, bits.dtype.newbyteorder("=")),
        stays=np.empty(most, np.bool_),
        ahead=np.empty(most, np.uint8),
    )
    # in one thread: a second one loses more to page faults of mapped weights than it gains
    return _outcome([_prune_tile(tile, form, scratch) for tile in pieces], bits.size)


def _outcome(sums: Sequence[_TileSums], size: int) -> Outcome:
    """What the tiles of an array of `size` elements add up to."""
    before = math.fsum(tile.before for tile in sums)
    kept = None
    if 0 < before < math.inf:
        kept = math.fsum(tile.after for tile in sums) / before
    return Outcome(
        kept_magnitude=kept,
        zeros=size - sum(tile.nonzero for tile in sums),
        zeros_before=size - sum(tile.nonzero_before for tile in sums),
        non_finite=sum(tile.non_finite for tile in sums),
    )


def count_non_finite(array: NDArray[Any]) -> int:
    """How many elements are NaN or infinity; extra memory does not grow with the array."""
    kind = array.dtype.name
    form = format_named(kind)
    if kind.startswith(("int", "uint")):
        return 0
    count = 0
    for tile, _ in tiles(np.atleast_1d(as_bits(array)), 0, 1):
        magnitudes = np.empty(tile.shape, tile.dtype.newbyteorder("="))
        _write_magnitudes(tile, form, magnitudes)
        count += _count(magnitudes > form.largest)
    return count


def _count(flags: NDArray[Any]) -> int:
    return int(np.count_nonzero(flags))


def _signed(bits: NDArray[Any]) -> NDArray[Any]:
    """The same bits as integers with a sign."""
    return bits.view(np.dtype(f"i{bits.itemsize}").newbyteorder(bits.dtype.byteorder))


def _prune_tile(tile: _Tile, form: Format, scratch: _Scratch) -> _TileSums:
    """Prune a tile in place."""
    bits = tile.bits
    size = bits.size
    magnitudes = scratch.magnitudes[:size]
    stays = scratch.stays[:size]
    shaped = magnitudes.reshape(bits.shape)
    _write_magnitudes(bits, form, shaped)
    before = _sum(form, magnitudes)
    lowest = int(np.minimum.reduce(magnitudes))
    highest = int(np.maximum.reduce(magnitudes))
    non_finite = 0
    if highest > form.largest:
        non_finite = _count(magnitudes > form.largest)
    _choose(magnitudes, tile, stays, scratch.ahead[:size])
    nonzero_before = size
    nonzero = size // tile.length * tile.keep
    if lowest == 0:
        nonzero_before = _count(magnitudes)
        np.logical_and(stays, magnitudes, out=stays)
        nonzero = _count(stays)
    # bits times 0 or 1: a zero is written as +0.0, everything else stays bit for bit
    np.multiply(bits, stays.reshape(bits.shape), out=bits)
    _write_magnitudes(bits, form, shaped)
    return _TileSums(
        before=before,
        after=_sum(form, magnitudes),
        nonzero_before=nonzero_before,
        nonzero=nonzero,
        non_finite=non_finite,
    )


def _choose(
    magnitudes: NDArray[Any], tile: _Tile, stays: NDArray[np.bool_], ahead: NDArray[np.uint8]
) -> None:
    """Set `stays` for the weights with fewer than `keep` weights of their group ahead of them.

    `ahead` starts as if every later weight of the group were larger; each comparison that says
    otherwise moves one count from the earlier to the later weight.
    """
    # 2:4 of (5, 1, 7, 5): the counts start as (3, 2, 1, 0). 5 >= 1 and 7 >= 5 (distance 1),
    # 5 >= 5 (distance 3) move a count each: (1, 3, 0, 2), so that 5 and 7 stay.
    # Groups of 4 of a 3x3 convolution, step 9: a comparison over the distance 2 is one of elements
    # 18 apart, and the mask leaves out those of the last two weights of a group with the next one.
    size = magnitudes.size
    later, masks = _behind(tile.length, tile.step, max(size, TILE))
    np.copyto(ahead, later[:size])
    for distance in range(1, tile.length):
        shift = distance * tile.step
        won = stays[:-shift]
        np.greater_equal(magnitudes[:-shift], magnitudes[shift:], out=won)
        np.logical_and(won, masks[distance - 1][: size - shift], out=won)
        np.add(ahead[shift:], won.view(np.uint8), out=ahead[shift:])
        np.subtract(ahead[:-shift], won.view(np.uint8), out=ahead[:-shift])
    np.less(ahead, tile.keep, out=stays)


@functools.lru_cache(maxsize=2)
def _behind(
    length: int, step: int, size: int
) -> tuple[NDArray[np.uint8], tuple[NDArray[np.bool_], ...]]:
    """For each element of a flat tile, how many elements of its group lie behind it.

    Beside it, for each distance, whether so many do. A smaller tile is the front of a larger one.
    """
    # groups of 4, step 2: 3 3 2 2 1 1 0 0, again and again
    later = np.empty((-(-size // (length * step)), length, step), np.uint8)
    later[...] = np.arange(length, dtype=np.uint8)[::-1, None]
    flat = later.reshape(-1)
    return flat, tuple(flat >= distance for distance in range(1, length))


def _write_magnitudes(bits: NDArray[Any], form: Format, out: NDArray[Any]) -> None:
    """Unsigned integers that order as |w| does, into `out`."""
    if form.magnitude:
        np.bitwise_and(bits, bits.dtype.type(form.magnitude), out=out)
    else:
        # two's complement: |-128| wraps to -128, whose bits are 128 unsigned
        np.absolute(_signed(bits), out=_signed(out))


def _sum(form: Format, magnitudes: NDArray[Any]) -> float:
    """Sum of a tile's magnitudes, always in one order."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sum(form.values(magnitudes)))


@functools.cache
def format_named(kind: str) -> Format:
    """The format of a numpy type's name; raises BadInputError where there is none."""
    import ml_dtypes

    if kind not in _TYPES:
        raise BadInputError(
            f"weights of type {kind} cannot be pruned by magnitude",
            hint=f"supported: {', '.join(_TYPES)}",
        )
    dtype = numpy_type(kind)
    bits = 8 * dtype.itemsize
    if dtype.kind in "iu":
        every = (1 << bits) - 1
        return Format(
            magnitude=0 if dtype.kind == "i" else every,
            largest=every,
            values=lambda magnitudes: magnitudes.astype(np.float64),
        )
    largest = np.array(ml_dtypes.finfo(dtype).max, dtype)  # type: ignore[no-untyped-call]  # its own
    return Format(
        magnitude=(1 << (bits - 1)) - 1,
        largest=int(as_bits(largest)),
        values=functools.partial(_values, dtype),
    )


def _values(dtype: np.dtype[Any], magnitudes: NDArray[Any]) -> NDArray[Any]:
    """Floats in float32 or float64.

    16 bits are moved to where a float32 has them: numpy would convert them one by one. A float16 is
    2**-112 of its value then, and the constant factor falls out of the ratio of two sums.
    """
    # float16 1.0 is 0x3C00; 0x3C00 << 13 = 0x07800000 is the float32 2**-112
    if dtype.name in _PLACES:
        return (magnitudes.astype(np.uint32) << _PLACES[dtype.name]).view(np.float32)
    values = magnitudes.view(dtype)
    return values.astype(np.float32) if dtype.itemsize == 1 else values


_PLACES = {"float16": 13, "bfloat16": 16}
_TYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
)
