"""A model with some of the constants of another: dense.onnx with chosen layers of sparse.onnx."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx

from twofour.errors import BadInputError
from twofour.graph.files import dtype_name, is_external, is_readable, read_tensor, tensors
from twofour.graph.opened import OpenedModel, open_onnx

_CARRIED_ON = ("Add", "Cast", "Reshape", "Identity")
"""Ops between a product and its bias."""


class Mixture:
    """Two models of one graph in one folder; constants are known by their place in it.

    Raises BadInputError where the graphs have other constants, by name, type or shape.
    """

    def __init__(self, base: Path, other: Path) -> None:
        self.base, self.other = open_onnx(base), open_onnx(other)
        self._there = self.base.whole()
        self._taken = list(tensors(self.other.whole()))
        mine = list(tensors(self._there))
        if len(mine) != len(self._taken) or any(map(_differs, mine, self._taken)):
            raise BadInputError(
                f"{base.name} and {other.name} do not have the same constants",
                hint="a model whose exported graph depends on its weights has no layers to compare",
            )

    def write(self, places: Iterable[int], target: Path) -> None:
        """The base with the constants at these places from the other model.

        `target` lies beside the two: external data stays in the files that it is in.
        """
        mixed = onnx.ModelProto()
        mixed.CopyFrom(self._there)
        mine = list(tensors(mixed))
        for place in places:
            mine[place].CopyFrom(self._taken[place])
        target.write_bytes(mixed.SerializeToString())


def changed_places(base: OpenedModel, other: OpenedModel) -> dict[str, tuple[int, ...]]:
    """Places of the constants that differ in value, by the label of the node they belong to.

    A weight belongs to the node that multiplies by it, a bias to the one it is added to; what
    belongs to neither is under "".
    """
    pairs = list(zip(tensors(base.proto), tensors(other.proto), strict=False))
    changed = {i for i, (a, b) in enumerate(pairs) if not _same_values(a, base, b, other)}
    owners = _owners(base)
    found: dict[str, list[int]] = defaultdict(list)
    for place in sorted(changed):
        for label in owners.get(place, [""]):
            found[label].append(place)
    return {label: tuple(places) for label, places in found.items()}


def _owners(model: OpenedModel) -> dict[int, list[str]]:
    """Labels of the nodes that each constant belongs to, by its place."""
    found: dict[int, list[str]] = defaultdict(list)
    places = {id(tensor): place for place, tensor in enumerate(tensors(model.proto))}
    by_weight = model.weights()
    for weight, tensor in zip(by_weight.weights, by_weight.tensors, strict=True):
        if tensor is not None:
            found[places[id(tensor)]].append(weight.node or weight.layer)
    products = {weight.node for weight in by_weight.weights}
    labels = {name: node.label for node in model.nodes for name in node.outputs}
    for tensor in model.proto.graph.initializer:
        place = places[id(tensor)]
        if place not in found:
            found[place] = sorted(set(_added_to(tensor.name, model, labels, products)))
    return {place: of for place, of in found.items() if of}


def _added_to(
    name: str, model: OpenedModel, labels: Mapping[str, str], products: set[str | None]
) -> Iterator[str]:
    """Products that have this constant as an input beside the weight, or to which it is added."""
    for node in model.nodes:
        if name not in node.inputs:
            continue
        if node.label in products:
            yield node.label
        elif node.op in _CARRIED_ON:
            makers = (labels.get(other) for other in node.inputs if other != name)
            yield from (maker for maker in makers if maker in products and maker is not None)


def _differs(one: onnx.TensorProto, other: onnx.TensorProto) -> bool:
    there, here = ((t.name, t.data_type, tuple(t.dims)) for t in (one, other))
    return there != here


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
