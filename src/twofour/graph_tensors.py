"""One ONNX tensor: its type, shape and size as declared, and the values kept in the model itself.

Source of the rules: onnx.proto (TensorProto).
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx

from twofour.errors import BadInputError

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "string",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
    21: "uint4",
    22: "int4",
    23: "float4_e2m1fn",
    24: "float8_e8m0fnu",
    25: "uint2",
    26: "int2",
}
"""TensorProto.DataType -> numpy's name (the packed types have none that numpy could read)."""

_PACKED_BITS = {"uint4": 4, "int4": 4, "float4_e2m1fn": 4, "uint2": 2, "int2": 2}
_TYPED_FIELDS = {
    "float32": "float_data",
    "float64": "double_data",
    "int64": "int64_data",
    "uint32": "uint64_data",
    "uint64": "uint64_data",
}
_LARGEST_RANK = 32


def dtype_name(tensor: onnx.TensorProto) -> str:
    """Numpy's name of the stored type; raises BadInputError for a type ONNX does not have."""
    try:
        return DTYPES[tensor.data_type]
    except KeyError:
        raise BadInputError(
            f"tensor {tensor.name!r} has the unknown data type {tensor.data_type}"
        ) from None


def shape_of(tensor: onnx.TensorProto) -> tuple[int, ...]:
    """Shape as stored; raises BadInputError for a negative dimension or an absurd rank."""
    if len(tensor.dims) > _LARGEST_RANK or any(dim < 0 for dim in tensor.dims):
        raise BadInputError(
            f"tensor {tensor.name!r} has no possible shape: {list(tensor.dims[:8])}"
        )
    return tuple(tensor.dims)


def size_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes that shape and type demand (packed types rounded up to whole bytes)."""
    name = dtype_name(tensor)
    if name == "string":
        raise BadInputError(f"tensor {tensor.name!r} holds strings, which have no fixed size")
    count = prod(shape_of(tensor))
    if name in _PACKED_BITS:
        return -(-count * _PACKED_BITS[name] // 8)
    return count * numpy_dtype(name).itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of that name; bfloat16 and float8 come from ml_dtypes."""
    import ml_dtypes  # noqa: F401 - registers its types with numpy

    return np.dtype(name)


def is_groupable(name: str) -> bool:
    """Whether single weights of the type can be judged and zeroed (float8_e8m0fnu has no 0)."""
    return is_readable(name) and not name.startswith(("bool", "complex", "float8_e8m0fnu"))


def is_readable(name: str) -> bool:
    """Whether the type is one that numpy holds element by element (not strings, not packed)."""
    return name != "string" and name not in _PACKED_BITS


def typed_content(tensor: onnx.TensorProto) -> Array:
    """The bytes of a tensor that holds its values in float_data, int32_data and the like."""
    name = dtype_name(tensor)
    values = np.array(getattr(tensor, _TYPED_FIELDS.get(name, "int32_data")))
    if name in _TYPED_FIELDS:
        return np.ascontiguousarray(values.astype(name)).view(np.uint8)
    # int32_data holds small integers as they are, and 16- and 8-bit floats as bit patterns
    bits = np.dtype(f"u{numpy_dtype(name).itemsize}")
    return values.astype(np.int64).astype(bits).view(np.uint8)


def write_tensor(tensor: onnx.TensorProto, values: Array) -> None:
    """Replace the values that are stored in the model itself, keeping name, shape and type."""
    for name in {*_TYPED_FIELDS.values(), "int32_data"}:
        tensor.ClearField(name)
    tensor.raw_data = values.tobytes()
