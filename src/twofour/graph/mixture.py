"""A model with some of the constants of another: dense.onnx with chosen layers of sparse.onnx."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import onnx

from twofour.errors import BadInputError
from twofour.graph.files import (
    dtype_name,
    is_external,
    is_readable,
    read_tensor,
    tensors,
)
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.records.export import GraphNode

_CARRIED_ON = ("Add", "Cast", "Reshape", "Identity")
"""Ops between a product and its bias."""


_Constants = dict[str | int, onnx.TensorProto]
"""The constants of a model: initializers of the main graph by name, all others by number."""


class Mixture:
    """Two models of one graph in one folder; constants are known by their place.

    Raises BadInputError where the graphs have other constants, by name, type or shape.
    """

    def __init__(self, base: Path, other: Path) -> None:
        self.base = open_onnx(base)
        self.other = open_onnx(other)
        self._there = self.base.whole()
        other_model = self.other.whole()
        self._taken = _constants(other_model)
        keys = _common(self._there, other_model)
        if keys is None:
            raise BadInputError(
                f"{base.name} and {other.name} do not have the same constants",
                hint="a model whose exported graph depends on its weights has no layers to compare",
            )
        self._keys = keys

    def write(self, places: Iterable[int], target: Path) -> None:
        """The base with the constants at these places from the other model.

        `target` is in the folder of the two: external data stays in its files.
        """
        mixed = onnx.ModelProto()
        mixed.CopyFrom(self._there)
        mine = _constants(mixed)
        for place in places:
            key = self._keys[place]
            mine[key].CopyFrom(self._taken[key])
        target.write_bytes(mixed.SerializeToString())


def changed_places(base: OpenedModel, other: OpenedModel) -> dict[str, tuple[int, ...]]:
    """Places of the constants that differ in value, by the label of the node they belong to.

    Constants that belong to no product are under "". {} for models that cannot be mixed.
    """
    # {"first": (0, 1), "": (4,)}: the weight and the bias of the product "first", and a constant
    # that is added to no product
    keys = _common(base.proto, other.proto)
    if keys is None:
        return {}
    mine = _constants(base.proto)
    theirs = _constants(other.proto)
    owners = _Owners(base)
    readers: dict[str | int, list[GraphNode]] = defaultdict(list)
    for node in base.nodes:
        for name in node.inputs:
            readers[name].append(node)
    places: dict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        if not _same_values(mine[key], base, theirs[key], other):
            labels = owners.weights.get(id(mine[key])) or owners.of_added(key, readers[key])
            for label in labels:
                places[label].append(place)
    return {label: tuple(numbers) for label, numbers in places.items()}


def _constants(model: onnx.ModelProto) -> _Constants:
    initializers = len(model.graph.initializer)
    constants: _Constants = {}
    for number, tensor in enumerate(tensors(model)):
        constants[tensor.name if number < initializers else number - initializers] = tensor
    return constants


def _common(base: onnx.ModelProto, other: onnx.ModelProto) -> tuple[str | int, ...] | None:
    """The constants of both, in order; None where models differ in more than their values."""
    mine = _constants(base)
    theirs = _constants(other)
    if mine.keys() != theirs.keys() or any(_differs(mine[key], theirs[key]) for key in mine):
        return None
    if list(map(_form, base.graph.node)) != list(map(_form, other.graph.node)):
        return None
    return tuple(mine)


def _form(node: onnx.NodeProto) -> tuple[str, tuple[str, ...]]:
    return node.op_type, tuple(node.input)


class _Owners:
    """The products of a graph that its constants belong to."""

    def __init__(self, model: OpenedModel) -> None:
        graph = model.weights()
        self.weights: dict[int, list[str]] = defaultdict(list)
        """Labels of the products that each tensor is a weight of, by the id of the tensor."""
        for weight, tensor in zip(graph.weights, graph.tensors, strict=True):
            self.weights[id(tensor)].append(weight.node or weight.layer)
        self._products = {weight.node for weight in graph.weights}
        self._makers: dict[str, str] = {}
        for node in model.nodes:
            self._makers.update(dict.fromkeys(node.outputs, node.label))

    def of_added(self, name: str | int, nodes: Iterable[GraphNode]) -> list[str]:
        """The products that these readers of a constant add it to; [""] where it is added to none.

        A reader may be the product itself, which reads its bias.
        """
        labels: set[str] = set()
        for node in nodes:
            if node.label in self._products:
                labels.add(node.label)
            elif node.op in _CARRIED_ON:
                for other in {*node.inputs} - {name}:
                    maker = self._makers.get(other, "")
                    if maker in self._products:
                        labels.add(maker)
        return sorted(labels) or [""]


def _differs(one: onnx.TensorProto, other: onnx.TensorProto) -> bool:
    return (one.name, one.data_type, one.dims) != (other.name, other.data_type, other.dims)


def _same_values(
    one: onnx.TensorProto, base: OpenedModel, two: onnx.TensorProto, other: OpenedModel
) -> bool:
    if not is_external(one) and one == two and one.HasField("raw_data"):
        return True
    if not is_readable(dtype_name(one)):
        return one == two
    return read_tensor(one, base.path).tobytes() == read_tensor(two, other.path).tobytes()
