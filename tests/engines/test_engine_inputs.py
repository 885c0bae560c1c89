from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.engines.inputs import at_shapes, fit_inputs, numpy_dtype
from twofour.errors import BadInputError
from twofour.records.export import TensorShape


def wanted(dtype: str, shape: tuple[int | str, ...] = ("n", 4)) -> tuple[TensorShape, ...]:
    return (TensorShape(name="x", dtype=dtype, shape=shape),)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float32"])
def test_floats_become_the_models_float_type(dtype: str) -> None:
    x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    fitted = fit_inputs({"x": x}, wanted(dtype))["x"]
    assert fitted.dtype == numpy_dtype(dtype)
    np.testing.assert_array_equal(fitted, x.astype(numpy_dtype(dtype)))


def test_an_array_that_fits_is_not_copied() -> None:
    x = np.zeros((2, 4), np.float32)
    assert fit_inputs({"x": x}, wanted("float32"))["x"] is x


def test_a_transposed_array_becomes_contiguous() -> None:
    x = np.arange(8, dtype=np.float32).reshape(4, 2).T
    fitted = fit_inputs({"x": x}, wanted("float32"))["x"]
    assert fitted.flags.c_contiguous
    np.testing.assert_array_equal(fitted, x)


def test_integers_are_converted_where_every_value_fits() -> None:
    x = np.array([[0, 1, -5, 2**31 - 1]], np.int64)
    assert fit_inputs({"x": x}, wanted("int32"))["x"].dtype == np.int32


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.array([[0, 0, 0, 2**31]], np.int64), "int32"),
        (np.array([[-1, 0, 0, 0]], np.int64), "uint8"),
        (np.zeros((1, 4), np.float32), "int64"),
        (np.zeros((1, 4), np.int64), "float32"),
        (np.zeros((1, 4), bool), "int64"),
    ],
)
def test_a_conversion_that_would_change_values_is_bad_input(
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], dtype: str
) -> None:
    with pytest.raises(BadInputError, match=f"type {dtype} in the model, found {array.dtype}"):
        fit_inputs({"x": array}, wanted(dtype))


@pytest.mark.parametrize("shape", [(2, 5), (2, 4, 1), ()])
def test_another_rank_or_fixed_dimension_is_bad_input(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadInputError, match="has the shape"):
        fit_inputs({"x": np.zeros(shape, np.float32)}, wanted("float32"))


@pytest.mark.parametrize("names", [(), ("y",), ("x", "y")])
def test_missing_and_unknown_names_are_bad_input(names: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError, match=r"takes the inputs \['x'\]"):
        fit_inputs({name: np.zeros((1, 4), np.float32) for name in names}, wanted("float32"))


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=3).map(
        lambda pairs: tuple(zip(*pairs, strict=True))
    )
)
def test_inputs_are_cut_or_repeated_to_the_shape(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    before, after = shapes
    x = np.arange(np.prod(before)).reshape(before)
    found = at_shapes({"x": x}, {"x": after})["x"]
    assert found.shape == after
    for index in np.ndindex(*after):
        assert found[index] == x[tuple(i % n for i, n in zip(index, before, strict=True))]


def test_inputs_without_a_shape_stay_as_they_are() -> None:
    x = np.zeros((2, 4), ml_dtypes.bfloat16)
    assert at_shapes({"x": x}, {"y": (1, 4)})["x"] is x
