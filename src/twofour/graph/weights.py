"""ONNX graph -> the weights that sparse math could use: node, axis, groups, types, constant."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import onnx

from twofour.errors import naming
from twofour.graph.constants import not_covered
from twofour.graph.files import is_external, storage_key
from twofour.graph.layers import (
    Layer,
    find_layer,
    has_weight,
    quantized_tensors,
    refusal_reason,
    weight_input,
)
from twofour.graph.scope import Node, Place, Scope, function_scopes, scopes
from twofour.graph.trace import CUTS
from twofour.records.weights import NotCovered, Pattern, Reason, ReasonCode, Weight

_SHAPES = ("Shape", "Size")
"""Ops that look at the shape of what they read alone."""
_MOST_TIED = 64
"""Names listed in tied_to: the rest would help nobody, and all of all would be quadratic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphWeights:
    """The weights of a graph, each beside the tensor of the model that holds it."""

    weights: tuple[Weight, ...]
    tensors: tuple[onnx.TensorProto | None, ...]
    """Part of the model, not a copy; beside `weights`, None where there is no constant."""
    layers: tuple[Layer, ...]
    """Beside `weights`: the node of each, and the way to its constant."""
    activation_products: int
    """MatMul nodes with two inputs that are known at run time only."""
    not_covered: tuple[NotCovered, ...]
    """Stored arrays that no weight names, those in functions of the model among them."""


def find_weights(
    model: onnx.ModelProto, pattern: Pattern | None = None, *, path: Path | None = None
) -> GraphWeights:
    """Every Conv, ConvTranspose, Gemm, MatMul and Einsum weight in graph order.

    With a `pattern`, an axis that a Reshape merged or split is accepted where groups of M stay
    whole. Raises BadInputError for a damaged graph.
    """
    with naming(path):
        opened = list(scopes(model, path))
        layers: list[Layer] = []
        products = 0
        for scope in opened:
            quantized = quantized_tensors(scope)
            for node in filter(has_weight, scope.nodes):
                position = weight_input(scope, node)
                if position is None:
                    products += node.op == "MatMul"
                    continue
                goes_on = any(name in quantized for name in node.proto.output)
                layers.append(find_layer(scope, node, position, pattern, quantized=goes_on))
        return GraphWeights(
            weights=_with_refusal(_tied(layers, opened), refusal_reason(opened)),
            tensors=tuple(layer.found.tensor for layer in layers),
            layers=tuple(layers),
            activation_products=products,
            not_covered=not_covered(
                (*opened, *function_scopes(model, path)),
                model.functions,
                frozenset(id(layer.found.tensor) for layer in layers),
                {layer.node: layer.position for layer in layers},
            ),
        )


def _with_refusal(weights: tuple[Weight, ...], refusal: Reason | None) -> tuple[Weight, ...]:
    """What keeps the whole file out of TensorRT is a reason for each of its layers."""
    if refusal is None:
        return weights
    return tuple(
        weight
        if any(reason.code is refusal.code for reason in weight.reasons)
        else replace(weight, reasons=(*weight.reasons, refusal))
        for weight in weights
    )


def _tied(layers: list[Layer], opened: list[Scope]) -> tuple[Weight, ...]:
    """The weights, each with the names of whatever else uses the same stored array."""
    known = {layer.node for layer in layers}
    known |= {step.node for layer in layers for step in layer.found.steps}
    sharing: dict[tuple[object, ...], list[Layer]] = defaultdict(list)
    for layer in layers:
        if layer.found.tensor is not None:
            sharing[storage_key(layer.found.tensor)].append(layer)
    twins: dict[tuple[object, ...], list[Place]] = defaultdict(list)
    for scope in opened:
        for name, tensor in scope.constants.items():
            if is_external(tensor):
                twins[storage_key(tensor)].append((scope, name))
    counts = Counter(name for scope in opened for name in scope.constants)
    rows = {layer.node: layer.weight for layer in layers}
    for key, group in sharing.items():
        places = {place for layer in group for place in layer.found.places}
        places.update(twins.get(key, ()))
        others = tuple(islice(_other_users(places, known), _MOST_TIED))
        parts = tuple(islice(_other_users(_other_pieces(group), known), 1))
        labels = dict.fromkeys(layer.node.label for layer in group)
        listed = tuple(islice(dict.fromkeys((*labels, *others, *parts)), _MOST_TIED + 1))
        tables = tuple(islice(dict.fromkeys(_lookups(places, known)), _MOST_TIED))
        read_by = tuple(dict.fromkeys(name for name in others if name not in tables))
        for layer in group:
            row = _in_pieces(layer, (*others, *parts))
            scope, name = layer.found.places[-1]
            rows[layer.node] = replace(
                row,
                weight=f"{scope.prefix}{name}" if counts[name] > 1 else name,
                tied_to=tuple(n for n in listed if n != layer.node.label)[:_MOST_TIED],
                looked_up_by=tables,
                read_by=() if row.axis is None else read_by,
            )
    return tuple(rows[layer.node] for layer in layers)


def _other_pieces(group: Sequence[Layer]) -> Iterator[Place]:
    """Outputs of the nodes that cut the array up, beside those that lead to a weight."""
    steps = (step for layer in group for step in layer.found.steps if step.node.op in CUTS)
    cuts = {step.node: step.scope for step in steps}  # once each: a Split may lead to thousands
    for node, scope in cuts.items():
        yield from ((scope, name) for name in node.proto.output if name)


def _in_pieces(layer: Layer, others: Sequence[str]) -> Weight:
    """A weight that is part of an array of which another part is no weight is left as it is."""
    cut = any(step.node.op in (*CUTS, "Gather") for step in layer.found.steps)
    if not cut or not others or layer.weight.axis is None:
        return layer.weight
    reason = Reason(
        code=ReasonCode.UNSUPPORTED_OP,
        message=f"it is part of the array {layer.found.constant!r}, which {others[0]} uses too:"
        " pruning would change what is no weight",
    )
    return replace(layer.weight, axis=None, reasons=(*layer.weight.reasons, reason))


def _lookups(places: Iterable[Place], known: set[Node]) -> Iterator[str]:
    """Gather nodes that take rows of the array by what is known at run time, as tokens are."""
    for scope, name in sorted(places, key=lambda place: place[1]):
        for user in scope.users.get(name, ()):
            is_lookup = user.proto.op_type == "Gather" and user.proto.input[0] == name
            if is_lookup and user not in known and not all(map(scope.is_fixed, user.proto.output)):
                yield user.label


def _other_users(places: Iterable[Place], known: set[Node]) -> Iterator[str]:
    """Users of the tensors on the way that lead to no weight: a Gather, a graph output.

    What asks for the shape alone is none of them.
    """
    for scope, name in sorted(places, key=lambda place: place[1]):
        if name in scope.outputs:
            yield f"graph output {name}"
        for user in scope.users.get(name, ()):
            if user not in known and user.op not in _SHAPES:
                yield user.label
