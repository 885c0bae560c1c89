"""An ONNX file, opened: parsed once, its weights left on disk, and handed from step to step."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import onnx
from onnx import inliner

from twofour.errors import BadInputError, naming
from twofour.graph.files import (
    external_data,
    external_tensors,
    fill_in,
    graphs,
    is_external,
    parse_model,
    size_bytes,
    tensors,
)
from twofour.graph.scope import check_functions, scopes
from twofour.graph.weights import GraphWeights, find_weights
from twofour.records.export import ANONYMOUS, STANDARD_DOMAINS, GraphNode, TensorShape
from twofour.records.options import SizeRange
from twofour.records.weights import Pattern, Weight

_SIZE_KEY = "twofour.size."
_RANGE = re.compile(r"(\d{1,10})\.\.(\d{1,10})?")
_State = tuple[tuple[Path, int, int, int], ...]


class OpenedModel:
    """The graph of an ONNX file, and what was worked out about it, each once.

    `proto` is shared: who changes it takes `copy` or `whole`.
    """

    def __init__(self, path: Path, proto: onnx.ModelProto) -> None:
        self.path = path
        self.proto = proto
        files = (external_data(tensor, path).file for tensor in external_tensors(proto))
        self.data_files = tuple(dict.fromkeys(files))
        """Files that hold external data, resolved."""
        self._weights: dict[Pattern | None, GraphWeights] = {}
        self._state = self._state_now()

    def is_as_it_was(self) -> bool:
        """Whether the file and its data files are those that were opened, unchanged."""
        try:
            return self._state == self._state_now()
        except OSError:
            return False

    def _state_now(self) -> _State:
        """Inode, size and time of change: cheap, and wrong only for who restores all three."""
        files = (self.path, *self.data_files)
        states = ((file, file.stat()) for file in files)
        return tuple((file, s.st_ino, s.st_size, s.st_mtime_ns) for file, s in states)

    def weights(self, pattern: Pattern | None = None) -> GraphWeights:
        """As `find_weights`."""
        if pattern not in self._weights:
            self._weights[pattern] = find_weights(self.proto, pattern, path=self.path)
        return self._weights[pattern]

    @cached_property
    def nodes(self) -> tuple[GraphNode, ...]:
        """As `graph_nodes`, with the shapes that the file declares."""
        return graph_nodes(self.proto)

    @cached_property
    def inputs(self) -> tuple[TensorShape, ...]:
        """What the graph takes; initializers that stand among its inputs are left out."""
        constants = {tensor.name for tensor in self.proto.graph.initializer}
        return tuple(_shape(v) for v in self.proto.graph.input if v.name not in constants)

    @cached_property
    def outputs(self) -> tuple[TensorShape, ...]:
        """What the graph gives."""
        return tuple(map(_shape, self.proto.graph.output))

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators; 0 where the file names none."""
        imports = self.proto.opset_import
        return next((o.version for o in imports if o.domain in STANDARD_DOMAINS), 0)

    @property
    def size_ranges(self) -> dict[str, SizeRange]:
        """Ranges of free sizes by name, from the metadata that `range_metadata` made."""
        found = {}
        for entry in self.proto.metadata_props:
            match = _RANGE.fullmatch(entry.value) if entry.key.startswith(_SIZE_KEY) else None
            if match is not None:  # what reads otherwise was written by another tool
                name = entry.key.removeprefix(_SIZE_KEY)
                largest = None if match[2] is None else int(match[2])
                found[name] = SizeRange(name=name, min=int(match[1]), max=largest)
        return found

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
    try:
        with naming(path):
            return OpenedModel(path, model)
    except OSError as error:  # gone meanwhile
        raise BadInputError(f"cannot read {path}: {error.strerror or error}") from error


def graph_nodes(model: onnx.ModelProto) -> tuple[GraphNode, ...]:
    """Every node of the main graph, then of its subgraphs, with declared shapes."""
    return tuple(
        GraphNode(
            name=node.name,
            label=node.label,
            op=proto.op_type,
            domain=proto.domain,
            inputs=tuple(proto.input),
            outputs=tuple(proto.output),
            constants=tuple(name for name in proto.input if name and scope.constant(name)),
            output_shape=shapes.get(proto.output[0]) if proto.output else None,
            unnamed=not proto.name,
        )
        for scope in scopes(model, None)
        for shapes in [_declared_shapes(scope.graph)]
        for node in scope.nodes
        for proto in [node.proto]
    )


def range_metadata(ranges: Iterable[SizeRange]) -> dict[str, str]:
    """Entries of a model's metadata_props, such as twofour.size.sequence: 1..512."""
    return {
        _SIZE_KEY + size.name: f"{size.min}..{'' if size.max is None else size.max}"
        for size in ranges
    }


def _shape(value: onnx.ValueInfoProto) -> TensorShape:
    tensor = value.type.tensor_type
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    except (KeyError, ValueError):
        dtype = "unknown"
    dims = tuple(
        d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else (d.dim_param or ANONYMOUS)
        for d in tensor.shape.dim
    )
    return TensorShape(name=value.name, dtype=dtype, shape=dims)


def _declared_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int | None, ...]]:
    return {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None
            for dim in value.type.tensor_type.shape.dim
        )
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }


_MOST_BYTES = 1 << 31
"""Protobuf holds less; a constant in a function is there once for each call, once it is inlined."""


def inlined(opened: OpenedModel) -> onnx.ModelProto | None:
    """The model without functions, where that brings weights into reach of pruning; else None.

    Values that were left on disk still are.
    """
    if not _weights_in_functions(opened):
        return None
    try:
        model = inliner.inline_local_functions(opened.proto)
    except (RuntimeError, ValueError):  # operator versions that do not go together
        return None
    held = (t for t in tensors(model) if t.data_location == onnx.TensorProto.EXTERNAL)
    on_disk = sum(size_bytes(t) for t in held if not is_external(t))
    if model.ByteSize() + on_disk >= _MOST_BYTES:
        return None
    found = find_weights(model, path=opened.path)
    return model if _named(found.weights) > _named(opened.weights().weights) else None


def _weights_in_functions(opened: OpenedModel) -> bool:
    names = {f"{function.domain}::{function.name}" for function in opened.proto.functions}
    users = (
        user
        for group in opened.weights().not_covered
        if group.multiplies
        for user in (group.op, *group.users)
    )
    return bool(names) and any(
        user in names or user.startswith(tuple(f"{name}/" for name in names)) for user in users
    )


def _named(weights: Sequence[Weight]) -> int:
    return sum(weight.weight is not None for weight in weights)


_EQUATION = re.compile(rb"[A-Za-z., ]*(->[A-Za-z. ]*)?")
"""What ONNX allows: letters, commas, an ellipsis, blanks (Einsum in Operators.md)."""


def with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the shapes that follow from its own; as it is where onnx cannot tell."""
    if any(_is_odd_einsum(node) for graph in graphs(model) for node in graph.node):
        return model
    refusals = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError)
    # C++ exceptions come out as these: bad_alloc, runtime_error, invalid_argument, out_of_range
    with contextlib.suppress(*refusals, MemoryError, RuntimeError, ValueError, LookupError):
        model = onnx.shape_inference.infer_shapes(model)
    return model


def _is_odd_einsum(node: onnx.NodeProto) -> bool:
    """Onnx's inference never ends at an equation such as "ab,b1e" (found with 1.23.2)."""
    equations = (a.s for a in node.attribute if node.op_type == "Einsum" and a.name == "equation")
    return any(_EQUATION.fullmatch(equation) is None for equation in equations)
