"""Magnitude N:M against a sort, and judged by pattern.check."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.arrays import (
    PRUNED_FLOAT8,
    PRUNED_FLOATS,
    PRUNED_TYPES,
    TWO_FOUR,
    WIDE_FLOATS,
    any_layout,
    patterns,
    sorted_prune,
)

from twofour.errors import BadInputError
from twofour.pattern import TILE, check, count_zeros
from twofour.pruning.methods.magnitude import count_non_finite, prune_in_place
from twofour.records.weights import Pattern


def as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Any rank, type and layout; ties, zeros of both signs, the whole finite range."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    kind = np.dtype(draw(st.sampled_from(PRUNED_TYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        array = rng.integers(-3, 4, shape).astype(kind)
    else:
        raw = rng.bytes(int(np.prod(shape)) * kind.itemsize)
        array = np.frombuffer(raw, kind).reshape(shape).copy()
        if kind.kind not in "iu":
            with np.errstate(invalid="ignore"):
                array[~np.isfinite(array.astype(np.float64))] = -0.0
    return any_layout(draw, array)


@given(arrays(), patterns, st.data())
@settings(max_examples=200)
def test_the_mask_is_that_of_a_stable_sort(
    array: NDArray[Any], pattern: Pattern, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(-array.ndim, array.ndim - 1))
    expected = sorted_prune(array, axis, pattern)
    before = array.copy()
    outcome = prune_in_place(array, axis, pattern)
    kept = outcome.kept_magnitude
    assert (outcome.zeros_before, outcome.zeros) == (count_zeros(before), count_zeros(array))
    assert outcome.non_finite == 0
    assert check(array, axis, pattern).holds
    assert as_bytes(array).tolist() == as_bytes(expected).tolist()
    total = np.abs(before.astype(np.float64)).sum()
    if kept is None:
        assert total == 0 or total > 1e38
    else:
        assert kept == pytest.approx(np.abs(array.astype(np.float64)).sum() / total, rel=1e-5)
    again = array.copy()
    repeated = prune_in_place(again, axis, pattern)
    assert repeated.kept_magnitude in {1.0, None}
    assert repeated.held_before
    assert as_bytes(again).tolist() == as_bytes(array).tolist()


def test_most_negative_int8_is_the_largest_magnitude() -> None:
    array = np.array([127, -128, 127, -127], np.int8)
    assert prune_in_place(array, 0, TWO_FOUR).kept_magnitude == pytest.approx(255 / 509)
    assert array.tolist() == [127, -128, 0, 0]


def test_kept_magnitude_of_half_floats_of_large_arrays_and_of_all_zeros() -> None:
    for kind in (np.float16, ml_dtypes.bfloat16, *PRUNED_FLOAT8):
        array = np.array([4.0, -3.0, 2.0, 1.0], np.float32).astype(kind)
        assert prune_in_place(array, 0, TWO_FOUR).kept_magnitude == 0.7
    assert prune_in_place(np.zeros(8, np.float32), 0, TWO_FOUR).kept_magnitude is None
    for kind in (np.float32, np.float16, ml_dtypes.bfloat16):
        array = np.random.default_rng(4).normal(size=(1024, 1021)).astype(kind)
        before = np.abs(array.astype(np.float64)).sum()
        kept = prune_in_place(array, 1, TWO_FOUR).kept_magnitude
        assert kept == pytest.approx(np.abs(array.astype(np.float64)).sum() / before, rel=1e-6)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("flush", [False, True])
def test_a_subnormal_is_ordered_by_its_bits_on_a_processor_that_flushes_them(
    kind: Any, flush: bool
) -> None:
    tiny = np.finfo(kind).smallest_subnormal
    array = np.array([[1, 2, -2, 1], [tiny, -3 * tiny, 4 * tiny, -2 * tiny]], kind)
    torch.set_flush_denormal(flush)
    try:
        outcome = prune_in_place(array, 1, TWO_FOUR)
    finally:
        torch.set_flush_denormal(False)
    assert array.tolist() == [[0, 2, -2, 0], [0, -3 * tiny, 4 * tiny, 0]]
    assert (outcome.zeros_before, outcome.zeros) == (0, 4)


def test_only_the_given_view_is_written() -> None:
    whole = np.ones((8, 12), np.float32)
    prune_in_place(whole[2:6, 4:8], 1, TWO_FOUR)
    assert count_zeros(whole) == 8
    assert whole[2:6, 4:8].tolist() == [[1, 1, 0, 0]] * 4


@pytest.mark.parametrize("axis", [0, 1])
def test_scratch_is_a_few_tiles_however_large_the_weight(axis: int) -> None:
    array = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
    tracemalloc.start()
    assert count_non_finite(array) == 0
    prune_in_place(array, axis, TWO_FOUR)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * TILE * array.itemsize  # 5 % of the weight
    assert check(array, axis, TWO_FOUR).holds


@pytest.mark.parametrize("kind", PRUNED_FLOATS)
def test_non_finite_values_are_counted(kind: Any) -> None:
    codes = np.arange(1 << 8 * min(2, np.dtype(kind).itemsize), dtype=np.uint64)
    codes <<= 8 * (np.dtype(kind).itemsize - min(2, np.dtype(kind).itemsize))
    array = codes.astype(f"u{np.dtype(kind).itemsize}").view(kind)
    with np.errstate(invalid="ignore"):
        expected = int((~np.isfinite(array.astype(np.float64))).sum())
    assert expected > 0
    assert count_non_finite(array) == expected
    assert prune_in_place(array.copy(), 0, TWO_FOUR).non_finite == expected
    assert count_non_finite(np.ones(9, np.int8)) == 0


@pytest.mark.parametrize("kind", WIDE_FLOATS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_found_in_any_tile(kind: Any, value: float) -> None:
    array = np.full((5, TILE), -np.inf, np.float32)
    array[...] = np.nextafter(array, 0)
    array = array.astype(kind) if kind is np.float64 else (array / 1e35).astype(kind)
    for row in range(5):
        assert count_non_finite(array) == 0
        before, array[row, -1 - row] = array[row, -1 - row], value
        assert count_non_finite(array) == 1
        assert count_non_finite(array.T) == 1
        array[row, -1 - row] = before


@pytest.mark.parametrize(
    ("array", "axis", "message"),
    [
        (np.ones((4, 4), np.float32), 2, "axis 2"),
        (np.array(1.0, np.float32), 0, "0-d"),
        (np.ones(4, np.complex64), 0, "complex64"),
        (np.ones(4, np.bool_), 0, "bool"),
    ],
)
def test_what_cannot_be_pruned_in_place_is_refused(
    array: NDArray[Any], axis: int, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        prune_in_place(array, axis, TWO_FOUR)
