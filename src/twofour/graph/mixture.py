"""A model with some of the constants of another: dense.onnx with chosen layers of sparse.onnx."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import onnx

from twofour.errors import BadInputError
from twofour.frozen import frozen
from twofour.graph.files import (
    SEPARATE_INITIALIZERS,
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


@frozen
class _Moved:
    """Inputs of nodes that read one constant in the base and another in the other model."""

    mine: str
    theirs: str
    name: str
    """Name of their own constant in the mixture: one that no exporter gives."""
    inputs: tuple[tuple[int, int], ...]
    """Node of the main graph, and which of its inputs."""


_Constants = dict[str | int, onnx.TensorProto]
"""The constants of a model: initializers of the main graph by name, all others by number."""


@frozen
class _Common:
    """The constants of two models. A place is a number in the first list, then in the second."""

    keys: tuple[str | int, ...]
    """Those that are in both."""
    moved: tuple[_Moved, ...]


class Mixture:
    """Two models of one graph in one folder; constants are known by their place.

    Raises BadInputError where the graphs have other constants, by name, type or shape.
    """

    def __init__(self, base: Path, other: Path) -> None:
        self.base = open_onnx(base)
        self.other = open_onnx(other)
        self._there = self.base.whole()
        self._whole_other = self.other.whole()
        self._taken = _constants(self._whole_other)
        common = _common(self._there, self._whole_other)
        if common is None:
            raise BadInputError(
                f"{base.name} and {other.name} do not have the same constants",
                hint="a model whose exported graph depends on its weights has no layers to compare",
            )
        self._common = common

    def write(self, places: Iterable[int], target: Path) -> None:
        """The base with the constants at these places from the other model.

        `target` is in the folder of the two: external data stays in its files.
        """
        mixed = onnx.ModelProto()
        mixed.CopyFrom(self._there)
        mine = _constants(mixed)
        chosen = set(places)
        for place, key in enumerate(self._common.keys):
            if place in chosen:
                mine[key].CopyFrom(self._taken[key])
        for place, moved in enumerate(self._common.moved, start=len(self._common.keys)):
            if place in chosen:
                _give_own(mixed, moved, self._whole_other, moved.theirs)
            else:  # others may read what is there now
                _give_own(mixed, moved, self._there, moved.mine)
        target.write_bytes(mixed.SerializeToString())


def changed_places(base: OpenedModel, other: OpenedModel) -> dict[str, tuple[int, ...]]:
    """Places of the constants that differ in value, by the label of the node they belong to.

    Constants that belong to no product are under "". {} for models that cannot be mixed.
    """
    # {"first": (0, 1), "": (4,)}: the weight and the bias of the product "first", and a constant
    # that is added to no product
    common = _common(base.proto, other.proto)
    if common is None:
        return {}
    mine = _constants(base.proto)
    theirs = _constants(other.proto)
    owners = _Owners(base)
    readers = _readers(base, common.moved)
    places: dict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(common.keys):
        if not _same_values(mine[key], base, theirs[key], other):
            labels = owners.weights.get(id(mine[key])) or owners.of_added(key, readers[key])
            for label in labels:
                places[label].append(place)
    for place, moved in enumerate(common.moved, start=len(common.keys)):
        nodes = [base.nodes[at] for at, _ in moved.inputs]
        for label in owners.of_added(moved.mine, nodes):
            places[label].append(place)
    return {label: tuple(numbers) for label, numbers in places.items()}


def _constants(model: onnx.ModelProto) -> _Constants:
    initializers = len(model.graph.initializer)
    constants: _Constants = {}
    for number, tensor in enumerate(tensors(model)):
        constants[tensor.name if number < initializers else number - initializers] = tensor
    return constants


def _common(base: onnx.ModelProto, other: onnx.ModelProto) -> _Common | None:
    """The constants of both; None where models differ in more than their values and sharing."""
    moved = _moved(base, other)
    if moved is None:
        return None
    mine = _constants(base)
    theirs = _constants(other)
    apart = {each.mine for each in moved}.union(each.theirs for each in moved)
    if not apart.issuperset(mine.keys() ^ theirs.keys()):
        return None
    keys = tuple(key for key in mine if key in theirs)
    if any(_differs(mine[key], theirs[key]) for key in keys):
        return None
    return _Common(keys=keys, moved=moved)


def _moved(base: onnx.ModelProto, other: onnx.ModelProto) -> tuple[_Moved, ...] | None:
    """Inputs that have a constant under another name; None where nodes differ in more than that."""
    # two products share `bias`; pruning gave the second its own, `two`: its input 2 reads `bias`
    # in the base and `two` in the other model
    if list(map(_form, base.graph.node)) != list(map(_form, other.graph.node)):
        return None
    inputs: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for at, (here, there) in enumerate(zip(base.graph.node, other.graph.node, strict=True)):
        for position, names in enumerate(zip(here.input, there.input, strict=True)):
            if names[0] != names[1]:
                inputs[names].append((at, position))
    constants = {tensor.name for tensor in other.graph.initializer}
    moved = []
    for (mine, theirs), places in inputs.items():
        if theirs not in constants:
            return None
        name = f"{theirs}/instead_of/{mine}"
        moved.append(_Moved(mine=mine, theirs=theirs, name=name, inputs=tuple(places)))
    return tuple(moved)


def _form(node: onnx.NodeProto) -> tuple[str, int]:
    return node.op_type, len(node.input)


def _give_own(
    mixed: onnx.ModelProto, moved: _Moved, source: onnx.ModelProto, constant: str
) -> None:
    """Let these inputs read a copy of an initializer; computed tensors are read as before."""
    tensor = next((t for t in source.graph.initializer if t.name == constant), None)
    if tensor is None:
        return
    own = mixed.graph.initializer.add()
    own.CopyFrom(tensor)
    own.name = moved.name
    for node, position in moved.inputs:
        mixed.graph.node[node].input[position] = moved.name
    if mixed.ir_version < SEPARATE_INITIALIZERS:
        value = onnx.helper.make_tensor_value_info(own.name, own.data_type, own.dims)
        mixed.graph.input.append(value)


def _readers(model: OpenedModel, moved: Iterable[_Moved]) -> dict[str | int, list[GraphNode]]:
    """The nodes that read each tensor, without the inputs that have another one in each model."""
    apart = {place for each in moved for place in each.inputs}
    readers: dict[str | int, list[GraphNode]] = defaultdict(list)
    for at, node in enumerate(model.nodes):
        for position, name in enumerate(node.inputs):
            if (at, position) not in apart:
                readers[name].append(node)
    return readers


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
    undefined = onnx.TensorProto.UNDEFINED  # of an attribute that is no tensor
    if _differs(one, two) or one.data_type == undefined or not is_readable(dtype_name(one)):
        return one == two
    return read_tensor(one, base.path).tobytes() == read_tensor(two, other.path).tobytes()
