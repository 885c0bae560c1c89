"""Example inputs made to fit a model: names, ranks, fixed dimensions, element types, shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twofour.engines.protocol import Arrays
from twofour.errors import BadInputError
from twofour.records.export import TensorShape


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of that name; bfloat16 and the float8 types come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        special: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return special


def fit_inputs(inputs: Arrays, wanted: Sequence[TensorShape]) -> dict[str, npt.NDArray[Any]]:
    """The inputs a model wants, contiguous and in its element types.

    Floats become the model's float type and integers its integer type where every value fits.
    Raises BadInputError for a missing or unknown name, another rank or fixed dimension, and a type
    that cannot be converted without loss of meaning.
    """
    names = {tensor.name for tensor in wanted}
    if set(inputs) != names:
        raise BadInputError(
            f"the model takes the inputs {sorted(names)}, found {sorted(inputs)}",
            hint="example inputs must have the names of the model's inputs",
        )
    return {tensor.name: _fit(np.asarray(inputs[tensor.name]), tensor) for tensor in wanted}


def _fit(array: npt.NDArray[Any], tensor: TensorShape) -> npt.NDArray[Any]:
    fits = array.ndim == len(tensor.shape) and all(
        not isinstance(dim, int) or dim == found
        for dim, found in zip(tensor.shape, array.shape, strict=True)
    )
    if not fits:
        raise BadInputError(
            f"input {tensor.name!r} has the shape {list(tensor.shape)} in the model, "
            f"found {list(array.shape)}"
        )
    if array.dtype.name == tensor.dtype:
        return np.ascontiguousarray(array)
    return np.ascontiguousarray(_convert(array, tensor))


def _convert(array: npt.NDArray[Any], tensor: TensorShape) -> npt.NDArray[Any]:
    target = numpy_dtype(tensor.dtype)
    if _is_float(array.dtype) and _is_float(target):
        return array.astype(target)
    if array.dtype.kind in "iu" and target.kind in "iu":
        converted = array.astype(target)
        if np.array_equal(converted, array):
            return converted
    raise BadInputError(
        f"input {tensor.name!r} has the type {tensor.dtype} in the model, found {array.dtype.name}"
    )


def _is_float(dtype: np.dtype[Any]) -> bool:
    # ml_dtypes' types have kind "V"; only their names tell that they are floats
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def at_shapes(inputs: Arrays, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, npt.NDArray[Any]]:
    """Inputs cut or repeated along each axis until they have the shapes asked for.

    Repeating keeps the values real; an input without a shape, or of another rank, stays as it is.
    """
    return {name: _at_shape(array, shapes.get(name)) for name, array in inputs.items()}


def _at_shape(array: npt.NDArray[Any], shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
    if shape is None or len(shape) != array.ndim or 0 in array.shape:
        return array
    for axis, length in enumerate(shape):
        if length != array.shape[axis]:
            array = array.take(np.arange(length) % array.shape[axis], axis=axis)
    return array
