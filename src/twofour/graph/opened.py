"""An opened ONNX file, parsed once with its weights left on disk, and changed copies of it.

Source: protobuf's "Encoding" (tags, wire types, varints).
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.descriptor import Descriptor  # type: ignore[import-untyped]  # no stubs here
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]  # likewise
from onnx import inliner, numpy_helper

from twofour.errors import BadInputError, naming, system_errors
from twofour.graph.files import (
    DTYPES,
    LEFT_OUT,
    PROTOBUF_LIMIT_BYTES,
    REEXPORT,
    external_data,
    external_tensors,
    fill_in,
    graphs,
    leave_out,
    left_out,
    size_bytes,
    tensors,
)
from twofour.graph.layers import graph_runs, multiply_adds, repeated
from twofour.graph.scope import Node, Scope, check_functions, opset_of, scopes
from twofour.graph.weights import GraphWeights, find_weights
from twofour.records.export import ANONYMOUS, GraphNode, TensorShape
from twofour.records.options import SizeRange
from twofour.records.weights import Weight

_LARGE_FILE_BYTES = 1 << 24
"""A larger file is parsed without its large tensors, a smaller one as it is."""
_LARGE_TENSOR_BYTES = 1 << 16
_OWN = "no exporter writes it: export the model again, without that entry"
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].full_name
_SIZE_KEY = "twofour.size."
_RANGE = re.compile(r"(\d{1,10})\.\.(\d{1,10})?")
_State = tuple[tuple[Path, int, int, int], ...]


class OpenedModel:
    """The graph of an ONNX file and the facts about it, each worked out once.

    `proto` is shared: code that changes the model takes `copy` or `whole`.
    """

    def __init__(self, path: Path, proto: onnx.ModelProto) -> None:
        self.path = path
        self.proto = proto
        files = dict.fromkeys(external_data(each, path).file for each in external_tensors(proto))
        self.data_files = tuple(files)
        """Files that hold external data, resolved."""
        self._weights: GraphWeights | None = None
        self._state = self._state_now() if path.is_file() else ()

    def is_as_it_was(self) -> bool:
        """Whether the file and its data files are unchanged since they were opened."""
        try:
            return self._state == self._state_now()
        except OSError:
            return False

    def _state_now(self) -> _State:
        """Inode, size and time of change: cheap, and wrong only if someone restores all three."""
        states = []
        for file in (self.path, *self.data_files):
            stat = file.stat()
            states.append((file, stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return tuple(states)

    def weights(self) -> GraphWeights:
        """The result of `find_weights`."""
        if self._weights is None:
            self._weights = find_weights(self.proto, path=self.path)
        return self._weights

    @cached_property
    def nodes(self) -> tuple[GraphNode, ...]:
        """The result of `graph_nodes`, at the shapes that the file declares."""
        return graph_nodes(self.proto)

    @cached_property
    def inputs(self) -> tuple[TensorShape, ...]:
        """Inputs of the graph, without the initializers that are listed among them."""
        constants = {tensor.name for tensor in self.proto.graph.initializer}
        return tuple(_shape(v) for v in self.proto.graph.input if v.name not in constants)

    @cached_property
    def outputs(self) -> tuple[TensorShape, ...]:
        """Outputs of the graph."""
        return tuple(map(_shape, self.proto.graph.output))

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators; 0 where the file names none."""
        return opset_of(self.proto)

    @property
    def size_ranges(self) -> dict[str, SizeRange]:
        """Ranges of free sizes by name, from the metadata that `range_metadata` made."""
        ranges = {}
        for entry in self.proto.metadata_props:
            match = _RANGE.fullmatch(entry.value)
            if match is None or not entry.key.startswith(_SIZE_KEY):
                continue  # another tool wrote it
            name = entry.key.removeprefix(_SIZE_KEY)
            largest = None if match[2] is None else int(match[2])
            ranges[name] = SizeRange(name=name, min=int(match[1]), max=largest)
        return ranges

    def copy(self) -> onnx.ModelProto:
        """The graph to be changed, its weights still on disk."""
        copied = onnx.ModelProto()
        copied.CopyFrom(self.proto)
        return copied

    def whole(self) -> onnx.ModelProto:
        """The model to be changed, with all that lies in its own file; external data stays out."""
        copied = self.copy()
        fill_in(copied, self.path)
        return copied


class OpenedModels:
    """The ONNX files of one command: each parsed once, for as long as it stays as it is."""

    def __init__(self) -> None:
        self._opened: dict[Path, OpenedModel] = {}

    def open(self, path: Path) -> OpenedModel:
        """The file as it is now; raises what `open_onnx` raises."""
        known = self._opened.get(path)
        if known is None or not known.is_as_it_was():
            known = self._opened[path] = open_onnx(path)
        return known


def open_onnx(path: Path) -> OpenedModel:
    """Parse an ONNX file; no weight is read; raises BadInputError."""
    model = parse_model(path)
    check_functions(model, path)
    with system_errors(f"cannot read {path}"), naming(path):  # it may be gone meanwhile
        return OpenedModel(path, model)


def graph_nodes(model: onnx.ModelProto) -> tuple[GraphNode, ...]:
    """Every node of the main graph, then of its subgraphs."""
    opened = list(scopes(model, None))
    nodes: list[GraphNode] = []
    for scope, runs in graph_runs(opened).items():
        nodes += [_graph_node(scope, node, runs) for node in scope.nodes]
    return tuple(nodes)


def _graph_node(scope: Scope, node: Node, runs: int | None) -> GraphNode:
    proto = node.proto
    return GraphNode(
        name=node.name,
        label=node.label,
        op=proto.op_type,
        domain=proto.domain,
        inputs=tuple(proto.input),
        outputs=tuple(proto.output),
        constants=tuple(name for name in proto.input if name and scope.constant(name)),
        multiply_adds=repeated(multiply_adds(scope, node), runs),
        unnamed=not proto.name,
    )


def range_metadata(ranges: Iterable[SizeRange]) -> dict[str, str]:
    """Entries of a model's metadata_props, such as twofour.size.sequence: 1..512."""
    entries = {}
    for size in ranges:
        largest = "" if size.max is None else size.max
        entries[_SIZE_KEY + size.name] = f"{size.min}..{largest}"
    return entries


def _shape(value: onnx.ValueInfoProto) -> TensorShape:
    tensor = value.type.tensor_type
    dims: list[int | str] = []
    for dim in tensor.shape.dim:
        is_number = dim.HasField("dim_value") and dim.dim_value >= 0
        dims.append(dim.dim_value if is_number else dim.dim_param or ANONYMOUS)
    dtype = DTYPES.get(tensor.elem_type, "unknown")
    return TensorShape(name=value.name, dtype=dtype, shape=tuple(dims))


_MOST_BYTES = 1 << 31
"""Protobuf's limit; an inlined function's constants are in the model once for each call."""


def inlined(opened: OpenedModel) -> onnx.ModelProto | None:
    """The model without functions, if more weights can be pruned then; else None.

    Values that were left on disk stay there.
    """
    if not opened.proto.functions:
        return None
    try:
        model = inliner.inline_local_functions(opened.proto)
    except (RuntimeError, ValueError):  # operator versions that do not go together
        return None
    on_disk = 0
    for tensor in tensors(model):
        if left_out(tensor) is not None:
            on_disk += size_bytes(tensor)
    if model.ByteSize() + on_disk >= _MOST_BYTES:
        return None
    inlined_weights = find_weights(model, path=opened.path).weights
    if _constant_weights(inlined_weights) > _constant_weights(opened.weights().weights):
        return model
    return None


def _constant_weights(weights: Iterable[Weight]) -> int:
    return sum(each.weight is not None for each in weights)


HALF = frozenset(code for code, name in DTYPES.items() if name in {"float16", "bfloat16"})
"""The half precision types, as ONNX numbers them."""
TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
"""Attributes whose integer is a type of ONNX (in Cast, random numbers, windows)."""


def has_half(model: onnx.ModelProto) -> bool:
    """Whether a tensor of the model is float16 or bfloat16, or a node makes some."""
    if any(tensor.data_type in HALF for tensor in tensors(model)):
        return True
    return any(attribute.i in HALF for attribute in _types(model))


def _types(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    for graph in graphs(model):
        for node in graph.node:
            yield from (each for each in node.attribute if each.name in TYPE_ATTRIBUTES)


def widen(model: onnx.ModelProto) -> None:
    """Turn float16 and bfloat16 into float32 in place; weights must be in the model's own file."""
    for tensor in tensors(model):
        if tensor.data_type in HALF:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for attribute in _types(model):
        if attribute.i in HALF:
            attribute.i = onnx.TensorProto.FLOAT
    for graph in graphs(model):
        del graph.value_info[:]  # types between nodes; who needs them infers them again
        if isinstance(graph, onnx.GraphProto):
            for value in (*graph.input, *graph.output):
                if value.type.tensor_type.elem_type in HALF:
                    value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT


def parse_model(path: Path) -> onnx.ModelProto:
    """Parse the graph alone; raises BadInputError for a file that is not an ONNX model.

    The large weights of a large file are not read: `read_tensor` reads one, `fill_in` all of them.
    """
    model = onnx.ModelProto()
    try:
        with system_errors(f"cannot read {path}"):
            _parse_into(model, path)
    except (DecodeError, UnicodeDecodeError, ValueError) as error:
        raise BadInputError(f"{path} is not an ONNX model: {error}", hint=REEXPORT) from error
    if not model.HasField("graph") or model.ir_version < 1:
        raise BadInputError(
            f"{path} is not an ONNX model: it has no graph or no IR version", hint=REEXPORT
        )
    if not all(isinstance(text, str) for text in _texts(model)):
        raise BadInputError(f"{path}: a name in the graph is not UTF-8 text", hint=REEXPORT)
    return model


def _parse_into(model: onnx.ModelProto, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise BadInputError(f"{path} is empty", hint=REEXPORT)
        if size > PROTOBUF_LIMIT_BYTES:
            raise BadInputError(
                f"{path} is not an ONNX model: {size} bytes, and protobuf ends at 2 GiB",
                hint="save the model with its weights as external data",
            )
        with (
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as view,
            naming(path),
        ):
            is_large = size > _LARGE_FILE_BYTES
            model.ParseFromString(without_weights(view) if is_large else _without_key(bytes(view)))


def _texts(message: Message) -> Iterator[object]:
    """Every text but documentation; protobuf gives bytes where one is not UTF-8."""
    for field, value in message.ListFields():
        values = value
        if isinstance(value, (str, bytes, Message)):
            values = (value,)
        if field.type == field.TYPE_STRING and field.name != "doc_string":
            yield from values
        elif field.message_type is not None:
            for inner in values:
                yield from _texts(inner)


def without_weights(view: memoryview) -> bytes:
    """The model to parse; unchanged where its fields cannot be followed: the parser says why.

    Raises BadInputError for a file that marks values as left out itself.
    """
    try:
        return b"".join(_leave_out(view, onnx.ModelProto.DESCRIPTOR, 0, len(view)))
    except (ValueError, LookupError, RecursionError):
        return _without_key(bytes(view))


def _without_key(piece: bytes) -> bytes:
    """Bytes of a file as they are; raises BadInputError where our key is among them."""
    if LEFT_OUT.encode() in piece:
        raise BadInputError(f"the model contains {LEFT_OUT!r}, a word of twofour's own", hint=_OWN)
    return piece


def _leave_out(view: memoryview, kind: Descriptor, start: int, end: int) -> Iterator[bytes]:
    """The bytes of one message without large raw_data; large messages in it are treated alike."""
    # A TensorProto with 1 MiB of raw_data at byte 5000 of the file, in bytes:
    #     0A 01 77   tag 0A is field 1 << 3 | wire type 2 (a length follows); here the name "w"
    #     4A 80 80 40 ...   field 9, raw_data: the length 0x40 << 14 = 1 MiB as a varint
    # becomes its name alone and an entry in external_data, "twofour.left-out": "5004 1048576".
    # Every message around it is written again with the shorter length.
    at = start
    copied = start  # the bytes before it are in the result already
    place: tuple[int, int] | None = None
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
        yield _without_key(bytes(view[copied:field]))
        copied = at
        if known.message_type:
            inside = b"".join(_leave_out(view, known.message_type, at - length, at))
            yield _written(tag) + _written(len(inside)) + inside
        else:
            place = (at - length, length)
    yield _without_key(bytes(view[copied:end]))
    if place is not None:
        mark = onnx.TensorProto()
        leave_out(mark, *place)
        yield mark.SerializeToString()


def write_whole(model: onnx.ModelProto, values: Path, target: Path) -> None:
    """Write a model; the values that were left out of it are copied from `values` one by one.

    The model itself is used up.
    """
    # In bytes: all of the model but its graph, then 3A (field 7) and the length of the graph, the
    # graph without its initializers, and each of these as 2A (field 5), its length, what is known
    # of it, and for values that were left out 4A (field 9), their length, and the values.
    parts = [_initializer(tensor) for tensor in model.graph.initializer]
    del model.graph.initializer[:]
    fill_in(model, values)
    graph = model.graph.SerializeToString()
    size = len(graph) + sum(len(head) + length for head, _, length in parts)
    model.ClearField("graph")
    with values.open("rb") as source, target.open("wb") as file:
        file.write(model.SerializeToString() + b"\x3a" + _written(size) + graph)
        for head, offset, length in parts:
            source.seek(offset)
            file.write(head)
            file.write(source.read(length))


def _initializer(tensor: onnx.TensorProto) -> tuple[bytes, int, int]:
    """The bytes before the values of a tensor, and offset and length of these in another file."""
    offset, length = left_out(tensor) or (0, 0)
    raw = b""
    if length:
        tensor.ClearField("data_location")
        del tensor.external_data[:]
        raw = b"\x4a" + _written(length)
    head = tensor.SerializeToString() + raw
    return b"\x2a" + _written(len(head) + length) + head, offset, length


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """A varint, a number of at most ten bytes, and where it ends."""
    # AC 02 is 300: seven bits of each byte, the lowest first, 0x2C + (0x02 << 7); the top bit says
    # that another byte follows
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


def _written(number: int) -> bytes:
    """The number as a varint."""
    if number <= 0x7F:
        return bytes((number,))
    return bytes((number & 0x7F | 0x80,)) + _written(number >> 7)
