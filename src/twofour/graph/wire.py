"""A serialized ONNX model without its large weights, each replaced by its place in the file.

Sources: protobuf's "Encoding" (tags, wire types, varints); onnx.proto (TensorProto).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from google.protobuf.descriptor import Descriptor  # type: ignore[import-untyped]  # no stubs here

LEFT_OUT = "twofour.left-out"
"""Key of the entry in external_data that holds offset and length of the values."""
_LARGE_TENSOR_BYTES = 1 << 16
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].full_name


def without_weights(view: memoryview) -> memoryview | bytes:
    """The model to parse; as it is where it cannot be walked through: the parser says why."""
    try:
        return b"".join(_leave_out(view, onnx.ModelProto.DESCRIPTOR, 0, len(view)))
    except (ValueError, LookupError, RecursionError):
        return view


def _leave_out(view: memoryview, kind: Descriptor, start: int, end: int) -> Iterator[bytes]:
    """The fields of one message; those of large messages inside it are gone through likewise."""
    copied = at = start
    left_out: list[tuple[int, int]] = []
    while at < end:
        field = at
        tag, at = _varint(view, at)
        length, at = _field_size(view, tag & 7, at)
        at += length
        if at > end:
            raise ValueError(at)
        if length <= _LARGE_TENSOR_BYTES:
            continue
        known = kind.fields_by_number.get(tag >> 3)
        if known is None or not (known.message_type or known.full_name == _RAW_DATA):
            continue
        yield bytes(view[copied:field])
        copied = at
        if known.message_type:
            inside = b"".join(_leave_out(view, known.message_type, at - length, at))
            yield _tagged(tag, inside)
        else:
            left_out.append((at - length, length))
    yield bytes(view[copied:end])
    if left_out:
        place = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
        place.external_data.add(key=LEFT_OUT, value="{} {}".format(*left_out[-1]))
        yield place.SerializeToString()


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """A number of at most ten bytes, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (view[at] & 0x7F) << shift
        at += 1
        if view[at - 1] <= 0x7F:
            return value, at
    raise ValueError(at)


def _field_size(view: memoryview, wire_type: int, at: int) -> tuple[int, int]:
    """Bytes of a field's value, and where it starts."""
    if wire_type == 0:
        return _varint(view, at)[1] - at, at
    if wire_type == 2:
        return _varint(view, at)
    return {1: 8, 5: 4}[wire_type], at


def _tagged(tag: int, content: bytes) -> bytes:
    """A field with a length."""
    return _written(tag) + _written(len(content)) + content


def _written(number: int) -> bytes:
    """A varint."""
    if number <= 0x7F:
        return bytes((number,))
    return bytes((number & 0x7F | 0x80,)) + _written(number >> 7)
