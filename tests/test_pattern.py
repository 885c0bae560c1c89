"""pattern.py against a plain-Python statement of the rule."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.arrays import FLOAT8, FLOATS, TWO_FOUR, TYPES, WIDE_FLOATS, any_layout, patterns

from twofour.errors import BadInputError
from twofour.pattern import TILE, check, count_zeros, holds_along
from twofour.records.weights import Pattern, PatternCheck


def counted(groups: int, violations: int, first: tuple[int, ...] | None = None) -> PatternCheck:
    return PatternCheck(groups_checked=groups, violations=violations, first_violation=first)


def obvious(array: NDArray[Any], axis: int, pattern: Pattern) -> PatternCheck:
    """Read the rule out loud: group by group, element by element."""
    axis %= array.ndim
    groups, violating = 0, []
    steps = [range(0, n, pattern.m if a == axis else 1) for a, n in enumerate(array.shape)]
    for corner in itertools.product(*steps):
        at: list[Any] = list(corner)
        at[axis] = slice(corner[axis], corner[axis] + pattern.m)
        groups += 1
        if sum(bool(value != 0) for value in array[tuple(at)].tolist()) > pattern.n:
            violating.append(corner)
    return counted(groups, len(violating), violating[0] if violating else None)


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[Any]:
    """Any rank, type and memory layout, with plenty of zeros of both signs."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    zeros = draw(st.sampled_from([0.2, 0.5, 0.8]))
    values = rng.integers(-3, 4, shape) * (rng.random(shape) > zeros)
    signed = values * np.where(rng.random(shape) > 0.5, 1.0, -1.0)
    return any_layout(draw, signed.astype(draw(st.sampled_from((*TYPES, np.bool_)))))


@given(arrays(), patterns, st.data())
def test_check_says_what_the_rule_says(
    array: NDArray[Any], pattern: Pattern, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(-array.ndim, array.ndim - 1))
    assert check(array, axis, pattern) == obvious(array, axis, pattern)


@given(arrays())
def test_zeros_are_those_of_comparing_each_value(array: NDArray[Any]) -> None:
    assert count_zeros(array) == int((array.astype(np.float64) == 0).sum())


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("pattern", [TWO_FOUR, Pattern(3, 7)])
def test_a_single_violation_is_found_among_many_tiles(axis: int, pattern: Pattern) -> None:
    array = np.zeros((70, 77, 63), np.float32)
    assert array.size > 2 * TILE
    at = [69, 76, 62]
    at[axis] = 56  # a multiple of both 4 and 7
    group = tuple(slice(i, i + (pattern.n + 1 if a == axis else 1)) for a, i in enumerate(at))
    array[group] = 1
    found = check(array, axis, pattern)
    assert (found.violations, found.first_violation) == (1, tuple(at))
    turned = check(array.transpose(2, 0, 1), (axis + 1) % 3, pattern)
    assert turned.first_violation == (at[2], at[0], at[1])


def test_groups_never_straddle_two_tiles() -> None:
    wide = np.zeros((3, 2 * TILE + 12), np.float32)
    wide[:, 0::4] = wide[:, 3::4] = 1
    assert check(wide, 1, TWO_FOUR).holds
    tall = np.ascontiguousarray(wide.T)
    assert check(tall, 0, TWO_FOUR) == counted(3 * (2 * TILE + 12) // 4, 0)


def nonzero(array: NDArray[Any]) -> list[bool]:
    return [count_zeros(array[i : i + 1]) == 0 for i in range(array.size)]


@pytest.mark.parametrize("kind", FLOATS)
def test_minus_zero_is_zero_and_nan_is_not(kind: Any) -> None:
    array = np.array([-0.0, 0.0, np.nan, 1.0], np.float32).astype(kind)
    assert nonzero(array) == [False, False, True, True]


@pytest.mark.parametrize("kind", FLOAT8)
def test_every_float8_code_but_the_zeros_is_nonzero(kind: Any) -> None:
    codes = np.arange(256).astype(np.uint8).view(kind)
    expected = codes.astype(np.float32) != 0
    assert nonzero(codes) == expected.tolist()


def test_the_smallest_subnormal_and_the_most_negative_int8_are_nonzero() -> None:
    for kind in WIDE_FLOATS:
        smallest = np.array([1, 0x80 << 8 * (np.dtype(kind).itemsize - 1)], np.uint64)
        codes = smallest.astype(f"u{np.dtype(kind).itemsize}").view(kind)
        assert nonzero(codes) == [True, False]
    assert nonzero(np.array([-128, 0, 127], np.int8)) == [True, False, True]


def test_big_endian_arrays_are_read_in_their_own_byte_order() -> None:
    array = np.array([-0.0, 1.0, 2.0, 3.0], ">f4")
    assert check(array, 0, TWO_FOUR).violations == 1
    assert count_zeros(array) == 1


def test_holds_along_names_the_other_axis() -> None:
    array = np.zeros((8, 8, 3), np.float32)
    array[:, 0:3] = 1
    array[2:4] = array[6:8] = 0
    assert check(array, 1, TWO_FOUR).violations == 12
    assert holds_along(array, TWO_FOUR, except_axis=1) == 0
    assert holds_along(array, TWO_FOUR, except_axis=-2) == 0
    assert holds_along(np.ones((8, 8), np.float32), TWO_FOUR, except_axis=0) is None


def test_an_axis_shorter_than_m_proves_nothing() -> None:
    kernel_1x1 = np.ones((8, 8, 1, 1), np.float32)
    assert check(kernel_1x1, 2, TWO_FOUR).holds
    assert holds_along(kernel_1x1, TWO_FOUR, except_axis=1) is None


@pytest.mark.parametrize(
    ("array", "axis", "message"),
    [
        (np.float32(1.0).reshape(()), 0, "0-d"),
        (np.ones((4, 4), np.float32), 2, "axis 2"),
        (np.ones((4, 4), np.float32), -3, "axis -3"),
        (np.ones(4, np.complex128), 0, "complex128"),
        (np.array([None] * 4), 0, "object"),
        (np.ones(4, ml_dtypes.float8_e8m0fnu), 0, "float8_e8m0fnu"),
    ],
)
def test_what_cannot_be_judged_is_refused(array: NDArray[Any], axis: int, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        check(array, axis, TWO_FOUR)


@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_does_not_grow_with_the_array(order: Any) -> None:
    array = np.ones((2048, 2048), np.float32, order=order)
    tracemalloc.start()
    found = check(array, 1, TWO_FOUR)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.violations == 2048 * 512
    assert peak < array.nbytes / 8
