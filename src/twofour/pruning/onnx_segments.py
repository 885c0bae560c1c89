"""Pieces of an ONNX graph as files of their own, to be run one after the other.

Weights are not copied: a piece names them by their place in the model's own files, or in the files
of arrays that were changed since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from twofour.graph.files import (
    SEPARATE_INITIALIZERS,
    Array,
    external_data,
    read_tensor,
    storage_key,
    subgraphs,
    tensors,
    write_tensor,
)
from twofour.graph.half import widen
from twofour.pruning.onnx_calibration import Key, MainGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Type of a tensor that goes from one piece to the next, as ONNX numbers it, and its rank."""

    dtype: int
    rank: int


@dataclass(slots=True, kw_only=True)
class Changes:
    """What is different by now from the model as it came; grows while layers are pruned."""

    arrays: dict[Key, Path]
    """Stored arrays that were pruned, or biases that were corrected: files with their bytes."""
    constants: dict[tuple[int, int], onnx.TensorProto]
    """(node, input): the constant of a new name that it reads now."""


def unused_name(graph: MainGraph, changes: Changes, wish: str) -> str:
    """The name for another constant: as wished, or with a number behind it."""
    body = graph.opened.proto.graph
    taken = {*graph.made_by, *(value.name for value in (*body.initializer, *body.input))}
    taken |= {tensor.name for tensor in changes.constants.values()}
    name, number = wish, 0
    while name in taken:
        number += 1
        name = f"{wish}.{number}"
    return name


def in_float32(piece: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The piece with its half precision widened, all its values in it; it lies in the folder."""
    for tensor in tensors(piece):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _write_here(tensor, read_tensor(tensor, folder / "piece"))
    widen(piece)
    return piece


def _write_here(tensor: onnx.TensorProto, values: Array) -> None:
    """The values in the model itself."""
    tensor.ClearField("data_location")
    del tensor.external_data[:]
    write_tensor(tensor, values)


class Segments:
    """Cuts pieces out of a graph, for a folder that they lie in."""

    def __init__(self, graph: MainGraph, changes: Changes, files: Mapping[Path, str]) -> None:
        """`files`: the names that the model's files have in the folder of the pieces."""
        self._graph = graph
        self._changes = changes
        self._files = files
        model = graph.opened.proto
        self._initial = {tensor.name: tensor for tensor in model.graph.initializer}
        self._sparse = {each.values.name: each for each in model.graph.sparse_initializer}
        self._inputs = {value.name: value for value in model.graph.input}

    def piece(self, outputs: Sequence[str], have: Mapping[str, Kind]) -> onnx.ModelProto | None:
        """The nodes that make `outputs` from tensors that are there; None where it takes none.

        Inputs are those of `have` that the nodes read, and inputs of the graph.
        """
        graph = self._graph
        wanted = [name for name in outputs if name not in have and name in graph.made_by]
        if not wanted:
            return None
        places = sorted(graph.needed(wanted, have))
        made = {name for at in places for name in graph.scope.nodes[at].proto.output}
        read = dict.fromkeys(n for at in places for n in graph.reads[at] if n not in made)
        model = self._empty()
        for at in places:
            self._add_node(at, model.graph)
        for name in read:
            if name in have:
                model.graph.input.append(_value(name, have[name]))
            else:
                self._add_given(name, model.graph)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        return model

    def _empty(self) -> onnx.ModelProto:
        whole = self._graph.opened.proto
        model = onnx.ModelProto(
            ir_version=max(whole.ir_version, SEPARATE_INITIALIZERS),
            opset_import=whole.opset_import,
            functions=whole.functions,
        )
        model.graph.name = "piece"
        for function in model.functions:
            for node in function.node:
                self._fill(node)
        return model

    def _add_node(self, at: int, body: onnx.GraphProto) -> None:
        """The node, reading what it reads by now."""
        proto = self._graph.scope.nodes[at].proto
        constants = self._graph.scope.constants
        if proto.op_type == "Constant" and proto.output[0] in constants:
            # in an attribute its values could not lie in another file
            self._add_tensor(proto.output[0], constants[proto.output[0]], body)
            return
        node = body.node.add()
        node.CopyFrom(proto)
        self._fill(node)
        for position in range(len(proto.input)):
            other = self._changes.constants.get((at, position))
            if other is not None:
                node.input[position] = other.name
                body.initializer.append(other)

    def _add_given(self, name: str, body: onnx.GraphProto) -> None:
        """A tensor that no node of the piece makes."""
        if name in self._initial:
            self._add_tensor(name, self._initial[name], body)
        elif name in self._sparse:
            body.sparse_initializer.append(self._sparse[name])
        elif name in self._inputs:
            body.input.append(self._inputs[name])

    def _add_tensor(self, name: str, tensor: onnx.TensorProto, body: onnx.GraphProto) -> None:
        """The constant under its name, its values where they lie by now."""
        changed = self._changes.arrays.get(storage_key(tensor))
        added = body.initializer.add()
        if changed is None and tensor.data_location != onnx.TensorProto.EXTERNAL:
            added.CopyFrom(tensor)
            added.name = name
            return
        added.name, added.data_type = name, tensor.data_type
        added.dims.extend(tensor.dims)
        if changed is not None:
            _point(added, changed.name, 0, changed.stat().st_size)
        else:
            place = external_data(tensor, self._graph.opened.path)
            _point(added, self._files[place.file], place.offset, place.size_bytes)

    def _fill(self, node: onnx.NodeProto) -> None:
        """Read what its attributes have in other files: ONNX Runtime would not look for it."""
        for tensor in _tensors_in(node):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                _write_here(tensor, read_tensor(tensor, self._graph.opened.path))


def _value(name: str, kind: Kind) -> onnx.ValueInfoProto:
    shape = [f"{name}.{axis}" for axis in range(kind.rank)]
    return onnx.helper.make_tensor_value_info(name, kind.dtype, shape)


def _tensors_in(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    """Those of its attributes, in its subgraphs too."""
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
    for _, inner in subgraphs(node):
        yield from inner.initializer
        for each in inner.node:
            yield from _tensors_in(each)


def _point(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
