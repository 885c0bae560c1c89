"""An ONNX model while its layers are pruned: which arrays changed, and pieces of it to be run.

Weights are not copied: a piece names them by their place in the model's own files, or in the files
of arrays that were changed since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from twofour.calibrate.onnx.plan import Bias, Key, MainGraph, Piece
from twofour.calibrate.onnx.storage import as_type
from twofour.errors import BadInputError
from twofour.graph.files import (
    DTYPES,
    SEPARATE_INITIALIZERS,
    Array,
    external_data,
    external_tensors,
    read_tensor,
    storage_key,
    write_tensor,
)
from twofour.graph.opened import OpenedModel, widen
from twofour.graph.scope import scopes
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.methods.magnitude import count_non_finite
from twofour.pruning.statistics import Statistics
from twofour.records.weights import Pattern

TypeAndRank = tuple[str, int]
"""numpy's name of a tensor's type, and the number of its axes."""
_CODES = {name: code for code, name in DTYPES.items()}


@dataclass(slots=True, kw_only=True)
class Changes:
    """What is different by now from the model as it came; grows while layers are pruned."""

    arrays: dict[Key, Path] = field(default_factory=dict)
    """Stored arrays that were pruned, or biases that were corrected: files with their bytes."""
    constants: dict[tuple[int, int], onnx.TensorProto] = field(default_factory=dict)
    """(node, input): the constant of a new name that it reads now."""

    def copy(self, graph: MainGraph, bias: Bias, wish: str, values: Array) -> None:
        """Let the bias's node alone read these values, under that name or one with a number."""
        body = graph.opened.proto.graph
        taken = {*graph.made_by, *(value.name for value in (*body.initializer, *body.input))}
        taken |= {tensor.name for tensor in self.constants.values()}
        name, number = wish, 0
        while name in taken:
            number += 1
            name = f"{wish}.{number}"
        self.constants[bias.node, bias.position] = onnx.TensorProto(
            name=name,
            data_type=_CODES[values.dtype.name],
            dims=values.shape,
            raw_data=np.ascontiguousarray(values).tobytes(),
        )


def in_float32(piece: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The piece with its half precision widened, all its values in it; it lies in the folder."""
    for tensor in external_tensors(piece):
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
        self._inputs = {value.name: value for value in model.graph.input}

    def piece(
        self, outputs: Sequence[str], have: Mapping[str, TypeAndRank]
    ) -> onnx.ModelProto | None:
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
        whole, constants = graph.opened, graph.scope.constants
        model = onnx.ModelProto(
            ir_version=max(whole.proto.ir_version, SEPARATE_INITIALIZERS),
            opset_import=whole.proto.opset_import,
            functions=whole.proto.functions,
        )
        model.graph.name = "piece"
        held = []
        for at in places:
            proto = graph.scope.nodes[at].proto
            if proto.op_type == "Constant" and proto.output[0] in constants:
                held.append(proto.output[0])  # an attribute's values cannot lie in another file
            else:
                self._add_node(at, proto, model.graph)
        for tensor in external_tensors(model):  # of attributes: ONNX Runtime would not find them
            _write_here(tensor, read_tensor(tensor, whole.path))
        for name in held:
            self._add_tensor(name, constants[name], model.graph)
        for name in read:
            if name in have:
                model.graph.input.append(_value(name, have[name]))
            else:
                self._add_given(name, model.graph)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
        return model

    def _add_node(self, at: int, proto: onnx.NodeProto, body: onnx.GraphProto) -> None:
        """The node, reading what it reads by now."""
        node = body.node.add()
        node.CopyFrom(proto)
        for position in range(len(proto.input)):
            other = self._changes.constants.get((at, position))
            if other is not None:
                node.input[position] = other.name
                body.initializer.append(other)

    def _add_given(self, name: str, body: onnx.GraphProto) -> None:
        """A tensor that no node of the piece makes."""
        if name in self._initial:
            self._add_tensor(name, self._initial[name], body)
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


def _value(name: str, kind: TypeAndRank) -> onnx.ValueInfoProto:
    dtype, rank = kind
    shape = [f"{name}.{axis}" for axis in range(rank)]
    return onnx.helper.make_tensor_value_info(name, _CODES[dtype], shape)


def _point(tensor: onnx.TensorProto, location: str, offset: int, length: int) -> None:
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def layer_problem(
    piece: Piece,
    pattern: Pattern,
    statistics: Statistics,
    path: Path,
    reference: OpenedModel | None = None,
) -> LayerProblem:
    """The weight as it flows into its nodes, with the rounding that storing it means.

    `path` is the model's file, `reference` the dense model where it is not that. Raises
    BadInputError for NaN and infinity in the weight, and a reference that has none like it.
    """
    stored = read_tensor(piece.tensor, path)
    if broken := count_non_finite(stored):
        raise BadInputError(
            f"{path}: weight {piece.name!r} of {piece.users[0].label!r} has {broken} values"
            " that are NaN or infinite",
            hint="repair the model, or leave the layer out with --exclude",
        )
    seen = piece.view.seen(stored)
    work = np.dtype(np.float64 if seen.dtype == np.float64 else np.float32)

    def rounded(values: Array) -> Array:
        return piece.view.flowing(_kept(piece, values, stored.dtype)).astype(work)

    return LayerProblem(
        stored=seen.astype(work),
        layout=piece.layout,
        pattern=pattern,
        statistics=statistics,
        reference=None
        if reference is None
        else piece.view.seen(_dense(reference, piece.tensor)).astype(work),
        has_bias=all(user.bias is not None for user in piece.users),
        rounded=None if stored.dtype == work and not piece.view.changes else rounded,
    )


def store_piece(piece: Piece, weight: Array, stored: Array) -> None:
    """Put a solved weight to its places in the stored array; every zero as +0.0."""
    kept = _kept(piece, weight, stored.dtype)
    piece.view.write(np.where(kept == 0, np.zeros_like(kept), kept), stored)


def _dense(reference: OpenedModel, tensor: onnx.TensorProto) -> Array:
    """The constant of the same name in the dense model."""
    found = next(scopes(reference.proto, reference.path)).constants.get(tensor.name)
    if found is None or (found.dims, found.data_type) != (tensor.dims, tensor.data_type):
        there = "there is none" if found is None else f"it is {list(found.dims)}"
        raise BadInputError(
            f"{tensor.name!r} is {list(tensor.dims)} in the model; in the dense reference {there}",
            hint="name the dense model that this one was made from",
        )
    return read_tensor(found, reference.path)


def corrected(bias: Bias, change: Array, path: Path, reference: OpenedModel | None = None) -> Array:
    """The bias with a change of its layer's outputs in it: as stored, or of a copy as seen.

    With a dense reference its bias, from whose outputs the change is reckoned.
    """
    stored = read_tensor(bias.tensor, path) if reference is None else _dense(reference, bias.tensor)
    seen = bias.view.seen(stored)
    wanted = seen.astype(np.float64) + bias.factor * np.reshape(change, bias.shape)
    if not bias.own:
        return as_type(wanted, seen.dtype)
    kept = bias.view.kept(as_type(wanted, seen.dtype))
    bias.view.write(as_type(kept, stored.dtype), stored)
    return stored


def _kept(piece: Piece, values: Array, kind: np.dtype[Any]) -> Array:
    changes = piece.view.changes
    seen = changes[-1].after if changes else kind
    return as_type(piece.view.kept(as_type(values, seen)), kind)
