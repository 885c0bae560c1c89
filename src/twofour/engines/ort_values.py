"""ONNX Runtime values of the element types that numpy itself lacks (bfloat16, float8)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from twofour.engines.protocol import Untyped


def to_ort_value(array: npt.NDArray[Any]) -> Untyped:
    """The array as a value on the CPU; bfloat16 and float8 pass as their bits.

    The value may share the array's memory: keep the array until the run is over.
    """
    import onnxruntime as ort

    if array.dtype.kind != "V":
        return ort.OrtValue.ortvalue_from_numpy(array)
    from onnx import helper

    bits = array.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))
    number = int(helper.np_dtype_to_tensor_dtype(array.dtype))
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, number)


def from_ort_value(value: Untyped, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A copy of a value that lies on the CPU."""
    if dtype.kind != "V":
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.frombuffer(ctypes.string_at(value.data_ptr(), size), dtype).reshape(shape)
