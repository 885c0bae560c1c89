"""The tensors of an ONNX file on disk: found, checked, and read one at a time (onnx.proto)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from twofour.errors import BadInputError, naming
from twofour.records import frozen

Array = np.ndarray[Any, np.dtype[Any]]

DTYPES: dict[int, str] = {
    **{code: helper.tensor_dtype_to_np_dtype(code).name for code in helper.get_all_tensor_dtypes()},
    onnx.TensorProto.STRING: "string",
}
"""TensorProto.DataType -> numpy's name (the packed types have none that numpy could read)."""

_PACKED_BITS = {"uint4": 4, "int4": 4, "float4_e2m1fn": 4, "uint2": 2, "int2": 2}
_TYPED_FIELDS = ("float_data", "double_data", "int32_data", "int64_data", "uint64_data")
_LARGEST_RANK = 32
PROTOBUF_LIMIT_BYTES = 2**31 - 1
SEPARATE_INITIALIZERS = 4
"""The first IR version in which an initializer need not be a graph input."""
REEXPORT = "the file is damaged or is not an ONNX model: export or copy it again"
LEFT_OUT = "twofour.left-out"
"""Key of the entry in external_data with offset and length of values that parsing left out."""


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
    """Bytes that shape and type need (packed types rounded up to whole bytes)."""
    # float16 (3, 5): 15 * 2 = 30 bytes; int4 (3, 5): 60 bits, 8 bytes
    name = dtype_name(tensor)
    if name == "string":
        raise BadInputError(f"tensor {tensor.name!r} contains strings, which have no fixed size")
    count = prod(shape_of(tensor))
    if name in _PACKED_BITS:
        return -(-count * _PACKED_BITS[name] // 8)
    return count * numpy_dtype(name).itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of that name; bfloat16 and float8 come from ml_dtypes.

    Raises BadInputError for strings, where numbers are wanted.
    """
    import ml_dtypes  # noqa: F401 - registers its types with numpy

    try:
        return np.dtype(name)
    except TypeError:
        raise BadInputError(
            f"a tensor of {name}s is used where numbers are needed", hint=REEXPORT
        ) from None


def is_groupable(name: str) -> bool:
    """Whether single weights of the type can be judged and zeroed (float8_e8m0fnu has no 0)."""
    return is_readable(name) and not name.startswith(("bool", "complex", "float8_e8m0fnu"))


def is_readable(name: str) -> bool:
    """Whether numpy can store the type element by element (not strings, not packed types)."""
    return name != "string" and name not in _PACKED_BITS


def _typed_content(tensor: onnx.TensorProto) -> Array:
    """The bytes of a tensor with its values in float_data, int32_data and the like."""
    try:
        values = numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise BadInputError(f"tensor {tensor.name!r}: {error}", hint=REEXPORT) from error
    return values.reshape(-1).view(np.uint8)


def write_tensor(tensor: onnx.TensorProto, values: Array) -> None:
    """Replace values that are stored in the model itself; name, shape and type stay."""
    for name in _TYPED_FIELDS:
        tensor.ClearField(name)
    tensor.raw_data = values.tobytes()


@frozen
class ExternalData:
    """Where the bytes of one tensor are on disk; checked against the file that is there."""

    location: str
    """The path in the model, relative to the model's folder."""
    file: Path
    """The same path, absolute and with links followed."""
    offset: int
    size_bytes: int


def fill_in(model: onnx.ModelProto, path: Path) -> None:
    """Read the values that parsing left out of a large file; external data stays where it is."""
    _read_into((tensor for tensor in tensors(model) if left_out(tensor) is not None), path)


def load_external(model: onnx.ModelProto, path: Path) -> None:
    """Read every external tensor of the model into it, as raw_data."""
    _read_into(external_tensors(model), path)


def _read_into(stored: Iterable[onnx.TensorProto], path: Path) -> None:
    for tensor in stored:
        place = external_data(tensor, path)
        with place.file.open("rb") as file:
            file.seek(place.offset)
            tensor.raw_data = file.read(place.size_bytes)
        tensor.ClearField("data_location")
        del tensor.external_data[:]


def point_at(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    """Say that the tensor's values are in a file beside the model."""
    _set_external(tensor, {"location": location, "offset": str(offset), "length": str(length)})


def point_at_itself(model: onnx.ModelProto, path: Path) -> None:
    """Say that values which parsing left out are in another file: the model's own."""
    with naming(path):
        for tensor in tensors(model):
            region = left_out(tensor)
            if region is not None:
                _check_size(tensor, region[1])
                point_at(tensor, path.name, *region)


def leave_out(tensor: onnx.TensorProto, offset: int, length: int) -> None:
    """Mark the tensor's values as left out: they are there in a file that goes with the model."""
    _set_external(tensor, {LEFT_OUT: f"{offset} {length}"})


def _set_external(tensor: onnx.TensorProto, entries: Mapping[str, str]) -> None:
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)


def storage_key(tensor: onnx.TensorProto) -> tuple[object, ...]:
    """A key that is equal for tensors stored in the same place of the model or its data file."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return ("inline", id(tensor))
    region = left_out(tensor)
    if region is not None:
        return ("left out", region)
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return ("external", entries.get("location", ""), entries.get("offset", "0"))


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the model whose data is in another file."""
    return (t for t in tensors(model) if is_external(t))


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the values are in another file than the model."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL and left_out(tensor) is None


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the model: initializers and attributes, in subgraphs and functions too."""
    for graph in graphs(model):
        if isinstance(graph, onnx.GraphProto):
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield sparse.values
                yield sparse.indices
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """The main graph first, then every function and subgraph."""
    return with_subgraphs([model.graph, *model.functions])


def with_subgraphs(
    outermost: Iterable[onnx.GraphProto | onnx.FunctionProto],
) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """The graphs and, after them, every graph inside a node of them."""
    waiting = [*outermost]
    for graph in waiting:
        yield graph
        for node in graph.node:
            waiting += [inner for _, inner in subgraphs(node)]


def subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """Name and graph of each graph attribute (the branches of If, the bodies of Loop and Scan)."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g


def read_tensor(tensor: onnx.TensorProto, path: Path | None) -> Array:
    """A writable copy of the values; `path`, the model's file, is needed for external data.

    Raises BadInputError where the data is missing or does not fit shape and type.
    """
    dtype = numpy_dtype(dtype_name(tensor))
    data = _content(tensor, path)
    _check_size(tensor, data.nbytes)
    return data.view(dtype).reshape(shape_of(tensor))


def _check_size(tensor: onnx.TensorProto, there: int) -> None:
    if there != size_bytes(tensor):
        raise BadInputError(
            f"tensor {tensor.name!r} of shape {list(tensor.dims)} and type {dtype_name(tensor)}"
            f" needs {size_bytes(tensor)} bytes, the file contains {there}",
            hint=REEXPORT,
        )


def check_inline(model: onnx.ModelProto, path: Path) -> None:
    """Raise BadInputError for a tensor in the model whose values do not fit shape and type."""
    with naming(path):
        for tensor in tensors(model):
            if tensor.data_location == onnx.TensorProto.EXTERNAL or dtype_name(tensor) == "string":
                continue
            if tensor.HasField("raw_data"):
                _check_size(tensor, len(tensor.raw_data))
            elif is_readable(dtype_name(tensor)):
                _check_size(tensor, _typed_content(tensor).nbytes)


def map_tensor(tensor: onnx.TensorProto, path: Path) -> Array:
    """The values, read only: external data is mapped, so reading takes no memory."""
    if not is_external(tensor):
        return read_tensor(tensor, path)
    place = external_data(tensor, path)
    dtype = numpy_dtype(dtype_name(tensor))
    return map_region(place.file, place.offset, dtype, shape_of(tensor))


def map_region(file: Path, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Part of a file as a read-only array; the caller has checked that the file is long enough."""
    if not prod(shape):  # an empty region cannot be mapped
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", offset, shape)


def external_data(tensor: onnx.TensorProto, path: Path) -> ExternalData:
    """Where the tensor's bytes are; raises BadInputError unless they are all there, in the folder.

    A link is followed as long as it stays in the folder of the model, or of what the model's own
    path links to (the cache of the Hugging Face hub links both to one folder).
    """
    region = left_out(tensor)
    if region is not None:
        return ExternalData(location=path.name, file=path, offset=region[0], size_bytes=region[1])
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"{path}: external data of {tensor.name!r}"
    file = _resolve(location, path, where)
    offset = _number(entries.get("offset", "0"), where)
    size = size_bytes(tensor)
    length = _number(entries.get("length", str(size)), where)
    if length != size:
        raise BadInputError(
            f"{where}: {length} bytes are given, shape {list(tensor.dims)} needs {size}",
            hint=REEXPORT,
        )
    there = file.stat().st_size
    if offset + size > there:
        raise BadInputError(
            f"{where} ends at byte {offset + size}, but {file} has only {there}",
            hint="the data file is truncated or belongs to another model: copy it again",
        )
    return ExternalData(location=location, file=file, offset=offset, size_bytes=size)


def _resolve(location: str, path: Path, where: str) -> Path:
    unsafe = BadInputError(
        f"{where} points outside the model's folder: {location!r}",
        hint="put the data file into the model's folder, and save a relative location in the model",
    )
    # refused on every system alike: C:\data, \\host\share, /etc/passwd, ../outside.bin
    windows = PureWindowsPath(location)
    is_absolute = windows.drive or windows.root or PurePosixPath(location).is_absolute()
    if is_absolute or ".." in windows.parts:
        raise unsafe
    missing = BadInputError(
        f"{where} is missing: {path.parent / location}",
        hint="copy the model's data file into the model's folder, under that name",
    )
    try:
        file = (path.parent / location).resolve(strict=True)
        folders = {path.parent.resolve(), path.resolve().parent}
    except (OSError, RuntimeError, ValueError) as error:
        raise missing from error
    if not file.is_file():
        raise missing
    if not folders & {*file.parents}:
        raise unsafe
    return file


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise BadInputError(f"{where} has {text[:40]!r} where a number is needed", hint=REEXPORT)
    return int(text)


def _content(tensor: onnx.TensorProto, path: Path | None) -> Array:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if path is None:
            raise BadInputError(
                f"the data of {tensor.name!r} is in another file, and its folder is not known"
            )
        place = external_data(tensor, path)
        return np.fromfile(place.file, np.uint8, place.size_bytes, offset=place.offset)
    if tensor.HasField("raw_data"):
        return np.frombuffer(bytearray(tensor.raw_data), np.uint8)
    return _typed_content(tensor)


def left_out(tensor: onnx.TensorProto) -> tuple[int, int] | None:
    """Offset and length of values that parsing left in the model's own file; None: others."""
    entries = tensor.external_data
    if len(entries) != 1 or entries[0].key != LEFT_OUT:  # others name a file
        return None
    offset, length = entries[0].value.split()
    return int(offset), int(length)
