"""A model with some of the constants of another: dense.onnx with chosen layers of sparse.onnx."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from twofour.errors import BadInputError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """Inputs of nodes that read one constant in the base and another in the other model."""

    mine: str
    theirs: str
    name: str
    """Name of their own constant in the mixture: one that no exporter gives."""
    inputs: tuple[tuple[int, int], ...]
    """Node of the main graph, and which of its inputs."""


_Pairs = tuple[tuple[tuple[int, int], ...], tuple[_Moved, ...]]
"""The constants of two models: numbers of a tensor in the base and the other, then `_Moved` ones.
A place is a number in the first list, and then in the second."""


class Mixture:
    """Two models of one graph in one folder; constants are known by their place.

    Raises BadInputError where the graphs have other constants, by name, type or shape.
    """

    def __init__(self, base: Path, other: Path) -> None:
        self.base, self.other = open_onnx(base), open_onnx(other)
        self._there, self._whole_other = self.base.whole(), self.other.whole()
        self._taken = list(tensors(self._whole_other))
        pairs = _pairs(self._there, self._whole_other)
        if pairs is None:
            raise BadInputError(
                f"{base.name} and {other.name} do not have the same constants",
                hint="a model whose exported graph depends on its weights has no layers to compare",
            )
        self._same, self._moved = pairs

    def write(self, places: Iterable[int], target: Path) -> None:
        """The base with the constants at these places from the other model.

        `target` is in the folder of the two: external data stays in its files.
        """
        mixed = onnx.ModelProto()
        mixed.CopyFrom(self._there)
        mine, chosen = list(tensors(mixed)), set(places)
        for place, (here, there) in enumerate(self._same):
            if place in chosen:
                mine[here].CopyFrom(self._taken[there])
        for place, moved in enumerate(self._moved, start=len(self._same)):
            if place in chosen:
                _give_own(mixed, moved, self._whole_other, moved.theirs)
            else:  # others may read what is there now
                _give_own(mixed, moved, self._there, moved.mine)
        target.write_bytes(mixed.SerializeToString())


def changed_places(base: OpenedModel, other: OpenedModel) -> dict[str, tuple[int, ...]]:
    """Places of the constants that differ in value, by the label of the node they belong to.

    Constants that belong to no product are under "". {} for models that cannot be mixed.
    """
    pairs = _pairs(base.proto, other.proto)
    if pairs is None:
        return {}
    same, apart = pairs
    mine, theirs = list(tensors(base.proto)), list(tensors(other.proto))
    owners, added = _owners(base, apart), _Added(base)
    found: dict[str, list[int]] = defaultdict(list)
    for place, (here, there) in enumerate(same):
        if not _same_values(mine[here], base, theirs[there], other):
            for label in owners.get(here, [""]):
                found[label].append(place)
    for place, moved in enumerate(apart, start=len(same)):
        nodes = (base.nodes[at] for at, _ in moved.inputs)
        for label in sorted({x for node in nodes for x in added.to(node, moved.mine)}) or [""]:
            found[label].append(place)
    return {label: tuple(places) for label, places in found.items()}


def _pairs(base: onnx.ModelProto, other: onnx.ModelProto) -> _Pairs | None:
    """The constants in pairs; None where models differ in more than their values and sharing."""
    moved = _moved(base, other)
    if moved is None:
        return None
    mine, theirs = list(tensors(base)), list(tensors(other))
    names = [{t.name for t in model.graph.initializer} for model in (base, other)]
    apart = {m.mine for m in moved}, {m.theirs for m in moved}
    if names[0] - names[1] - apart[0] or names[1] - names[0] - apart[1]:
        return None
    here = _common(mine, len(base.graph.initializer), names[1])
    there = _common(theirs, len(other.graph.initializer), names[0])
    if len(here) != len(there):
        return None
    pairs = tuple(zip(here, there, strict=True))
    if any(_differs(mine[i], theirs[j]) for i, j in pairs):
        return None
    return pairs, moved


def _common(found: Sequence[onnx.TensorProto], initializers: int, known: set[str]) -> list[int]:
    """Numbers of the tensors without initializers that the other model does not know."""
    return [i for i, t in enumerate(found) if i >= initializers or t.name in known]


def _moved(base: onnx.ModelProto, other: onnx.ModelProto) -> tuple[_Moved, ...] | None:
    """Inputs that have a constant under another name; None where nodes differ in more than that."""
    mine, theirs = base.graph.node, other.graph.node
    if len(mine) != len(theirs):
        return None
    found: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    constants = {tensor.name for tensor in other.graph.initializer}
    for at, (one, two) in enumerate(zip(mine, theirs, strict=True)):
        if one.op_type != two.op_type or len(one.input) != len(two.input):
            return None
        for position, (here, there) in enumerate(zip(one.input, two.input, strict=True)):
            if here == there:
                continue
            if there not in constants:
                return None
            found[here, there].append((at, position))
    return tuple(
        _Moved(mine=here, theirs=there, name=f"{there}/instead_of/{here}", inputs=tuple(inputs))
        for (here, there), inputs in found.items()
    )


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


def _owners(model: OpenedModel, moved: Iterable[_Moved]) -> dict[int, list[str]]:
    """Labels of the nodes that each constant belongs to, by its number."""
    found: dict[int, list[str]] = defaultdict(list)
    numbers = {id(tensor): number for number, tensor in enumerate(tensors(model.proto))}
    apart = {place for each in moved for place in each.inputs}
    by_weight = model.weights()
    for weight, tensor in zip(by_weight.weights, by_weight.tensors, strict=True):
        if tensor is not None:
            found[numbers[id(tensor)]].append(weight.node or weight.layer)
    added = _Added(model)
    readers: dict[str, set[str]] = defaultdict(set)
    for at, node in enumerate(model.nodes):
        for position, name in enumerate(node.inputs):
            if (at, position) not in apart:
                readers[name].update(added.to(node, name))
    for tensor in model.proto.graph.initializer:
        number = numbers[id(tensor)]
        if number not in found:
            found[number] = sorted(readers[tensor.name])
    return {number: of for number, of in found.items() if of}


class _Added:
    """Products of a graph, and what is added to them."""

    def __init__(self, model: OpenedModel) -> None:
        self._products = {weight.node for weight in model.weights().weights}
        self._labels = {name: node.label for node in model.nodes for name in node.outputs}

    def to(self, node: GraphNode, name: str) -> Iterator[str]:
        """The node, if it is a product and the input its bias; or the products it adds this to."""
        if node.label in self._products:
            yield node.label
        elif node.op in _CARRIED_ON:
            makers = (self._labels.get(other) for other in node.inputs if other != name)
            yield from (maker for maker in makers if maker is not None and maker in self._products)


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
    a, b = read_tensor(one, base.path), read_tensor(two, other.path)
    return a.tobytes() == b.tobytes()
