from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.export.agreement import BOUND_FACTORS, agreement
from twofour.records.export import OutputAgreement
from twofour.records.options import Precision

Floats = NDArray[np.float32]
arrays = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
)


def compare(
    reference: object, other: object, bounds: Precision | None = Precision.FLOAT32
) -> OutputAgreement:
    (row,) = agreement({"y": np.asarray(reference)}, {"y": np.asarray(other)}, bounds=bounds)
    return row


@given(arrays)
def test_an_array_agrees_with_itself(array: Floats) -> None:
    row = compare(array, array)
    assert (row.max_abs_error, row.within, row.shape) == (0.0, True, array.shape)
    assert row.not_finite == np.count_nonzero(~np.isfinite(array))
    if not np.isfinite(array).any():
        assert math.isnan(row.cosine)
        assert math.isnan(row.row_cosine_min)
        return
    assert math.isclose(row.cosine, 1.0, abs_tol=1e-9)
    assert math.isclose(row.row_cosine_min, 1.0, abs_tol=1e-9)


@given(arrays, st.data())
def test_every_figure_is_in_its_range_where_there_is_a_finite_value(
    array: Floats, data: st.DataObject
) -> None:
    other = data.draw(hnp.arrays(np.float32, array.shape, elements=st.floats(width=32)))
    row = compare(array, other)
    assert row.max_abs_error >= 0
    if not (np.isfinite(array) & np.isfinite(other)).any():
        assert math.isnan(row.cosine)
        return
    for cosine in (row.cosine, row.row_cosine_min, row.row_cosine_mean):
        assert -1.0 <= cosine <= 1.0
    assert row.row_cosine_min <= row.row_cosine_mean + 1e-12


def test_figures_by_hand() -> None:
    row = compare([[3.0, 4.0], [1.0, 0.0]], [[3.0, 4.5], [0.0, 1.0]])
    assert row.max_abs_error == 1.0
    first = (9 + 18) / (5 * math.hypot(3, 4.5))
    assert math.isclose(row.row_cosine_mean, first / 2, rel_tol=1e-6)
    assert row.row_cosine_min == 0.0
    assert math.isclose(row.cosine, 27 / (math.sqrt(26) * math.sqrt(30.25)), rel_tol=1e-6)


def test_the_relative_error_sees_the_scale_that_a_cosine_does_not() -> None:
    boxes = np.array([[7.6, 3.0], [2.0, 9.5]])
    row = compare(boxes, 0.57 * boxes)
    assert row.cosine == pytest.approx(1.0)
    assert row.relative_error == pytest.approx(0.43)
    assert (row.is_far, row.dense_largest) == (True, 9.5)
    row = compare([3.0, math.nan, 4.0], [3.0, 1.0, 4.5])
    assert row.relative_error == pytest.approx(0.1)
    assert compare([0.0], [1.0]).relative_error == math.inf


def test_an_output_near_zero_is_not_judged() -> None:
    row = compare([1e-6, 5e-5], [5e-5, -5e-5])
    assert (row.is_near_zero, row.judged, row.is_far) == (True, None, False)
    assert compare([1e-4, 1.0], [1e-4, 0.5]).judged == pytest.approx(0.5)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_in_one_only_is_an_infinite_error(broken: float) -> None:
    for row in (compare([1.0, 2.0], [1.0, broken]), compare([1.0, broken], [1.0, 2.0])):
        assert row.max_abs_error == math.inf
        assert not row.within
    assert compare([1.0, broken], [1.0, broken]).max_abs_error == 0.0


def test_the_bound_grows_with_the_output_and_with_coarser_types() -> None:
    reference = np.array([0.0, -50.0])
    for precision in Precision:
        bound = compare(reference, reference, precision).bound
        assert bound == pytest.approx(50 * BOUND_FACTORS[precision])
    assert sorted(BOUND_FACTORS.values()) == [BOUND_FACTORS[p] for p in Precision]
    assert compare([0.0], [0.0]).bound == 1e-3 * BOUND_FACTORS[Precision.FLOAT32]


def test_another_shape_or_number_of_outputs_is_an_error() -> None:
    with pytest.raises(BadInputError, match="output y: shape"):
        compare(np.zeros(2), np.zeros(3))
    with pytest.raises(BadInputError, match="compared with y"):
        agreement({"y": np.zeros(2)}, {}, bounds=None)


def test_whole_numbers_are_counted_and_like_outputs_without_bounds_are_not_judged() -> None:
    assert compare([1.0], [9.0], None).bound is None
    row = compare(np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 900]]))
    assert row.equal == 0.75
    assert math.isnan(row.cosine)
    assert (row.max_abs_error, row.bound, row.within) == (896.0, None, True)
    assert compare([True, False], [True, True]).equal == 0.5
    assert compare(np.zeros(0, np.int64), np.zeros(0, np.int64)).equal == 1.0
    assert compare([1.0], [1.0]).equal is None
