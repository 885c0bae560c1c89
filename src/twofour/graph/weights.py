"""The weights of an ONNX graph that sparse math could use, and what uses every other stored array.

The one definition of what counts: a constant of more than 1,024 elements that is a factor of a
matrix product, or may be one, counts among the weights in every share; look-ups, normalisation,
biases and other element-wise constants are listed apart. Source of which input multiplies: ONNX
operator schemas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, starmap
from math import prod
from pathlib import Path

import onnx

from twofour.errors import naming
from twofour.graph.files import is_external, shape_of, storage_key
from twofour.graph.layers import (
    Layer,
    has_weight,
    layer_of_node,
    quantized_tensors,
    refusal_reason,
    weight_input,
)
from twofour.graph.scope import Node, Place, Scope, function_scopes, scopes
from twofour.graph.trace import CUTS, DEQUANTIZE, FOLLOWED
from twofour.records import frozen
from twofour.records.weights import (
    LARGEST_PASSED_OVER,
    NotCovered,
    Reason,
    ReasonCode,
    Weight,
)

_FROZEN = Reason(
    code=ReasonCode.FROZEN,
    message="frozen (requires_grad=False), while at least 99 % of the module's values are not",
)
FROZEN_KEY = "twofour.frozen."
_SHAPES = ("Shape", "Size")
"""Ops that read only the shape of their input."""
_MOST_TIED = 64
"""Names listed in tied_to: more would help nobody, and every name for every layer is quadratic."""


@frozen
class GraphWeights:
    """The weights of a graph, each with the tensor of the model that contains it."""

    weights: tuple[Weight, ...]
    tensors: tuple[onnx.TensorProto | None, ...]
    """One for each of `weights`, part of the model and no copy; None where there is no constant."""
    layers: tuple[Layer, ...]
    """One for each of `weights`: its node, and the way to its constant."""
    activation_products: int
    """MatMul nodes both of whose inputs are known at run time only."""
    not_covered: tuple[NotCovered, ...]
    """Stored arrays that no weight names, including those in functions of the model."""


def find_weights(model: onnx.ModelProto, *, path: Path | None = None) -> GraphWeights:
    """Every Conv, ConvTranspose, Gemm, MatMul and Einsum weight in graph order.

    Raises BadInputError for a damaged graph.
    """
    with naming(path):
        opened = list(scopes(model, path))
        layers, activation_products = _layers(opened)
        weights = _refused(_tied(layers, opened), refusal_reason(opened))
        frozen = {entry.key.removeprefix(FROZEN_KEY) for entry in model.metadata_props}
        tensors = tuple(layer.origin.tensor for layer in layers)
        return GraphWeights(
            weights=with_frozen(weights, frozen),
            tensors=tensors,
            layers=tuple(layers),
            activation_products=activation_products,
            not_covered=_not_covered(
                (*opened, *function_scopes(model, path)), set(map(id, tensors))
            ),
        )


def _layers(opened: Iterable[Scope]) -> tuple[list[Layer], int]:
    """The layers, and the number of products of two activations."""
    layers: list[Layer] = []
    products = 0
    for scope in opened:
        quantized = quantized_tensors(scope)
        for node in filter(has_weight, scope.nodes):
            position = weight_input(scope, node)
            if position is not None:
                is_quantized = not quantized.isdisjoint(node.proto.output)
                layers.append(layer_of_node(scope, node, position, quantized=is_quantized))
            elif node.op in ("MatMul", "Einsum"):
                products += 1
    return layers, products


def _with_reason(weight: Weight, reason: Reason) -> Weight:
    return replace(weight, reasons=(*weight.reasons, reason))


def _refused(weights: Iterable[Weight], refusal: Reason | None) -> Iterator[Weight]:
    """The weights; TensorRT refuses the whole file, and so each of its layers."""
    for weight in weights:
        codes = {reason.code for reason in weight.reasons}
        if refusal is None or refusal.code in codes:
            yield weight
        else:
            yield _with_reason(weight, refusal)


def with_frozen(weights: Iterable[Weight], names: Collection[str]) -> tuple[Weight, ...]:
    """The weights, with that reason in those that are frozen."""
    return tuple(_with_reason(w, _FROZEN) if w.weight in names else w for w in weights)


def frozen_metadata(names: Iterable[str]) -> dict[str, str]:
    """Entries of a model's metadata_props for initializers that are frozen parameters."""
    return {FROZEN_KEY + name: "requires_grad=False" for name in names}


def _tied(layers: Sequence[Layer], opened: Sequence[Scope]) -> Iterator[Weight]:
    """The weights, each with the names of everything else that uses the same stored array."""
    # An embedding `table` is read by the Gather "embed", and behind a Transpose by the MatMul
    # "head" and the MatMul "probe": head is tied to probe and embed, and looked up by embed.
    known: set[Node] = set()
    weights: dict[Node, Weight] = {}
    groups: dict[tuple[object, ...], list[Layer]] = defaultdict(list)
    for layer in layers:
        known.add(layer.node)
        known.update(step.node for step in layer.origin.steps)
        weights[layer.node] = layer.weight
        if layer.origin.tensor is not None:
            groups[storage_key(layer.origin.tensor)].append(layer)
    twins = _external_places(opened)
    for key, group in groups.items():
        weights.update(_tied_group(group, twins[key], known))
    counts = Counter(name for scope in opened for name in scope.constants)
    for layer in layers:
        weight = weights[layer.node]
        if weight.weight is not None and counts[weight.weight] > 1:
            prefix = layer.origin.places[-1][0].prefix
            weight = replace(weight, weight=prefix + weight.weight)
        yield weight


def _external_places(opened: Iterable[Scope]) -> dict[tuple[object, ...], set[Place]]:
    """Constants by where they are in a data file: two names may be one place there."""
    places: dict[tuple[object, ...], set[Place]] = defaultdict(set)
    for scope in opened:
        for name, tensor in scope.constants.items():
            if is_external(tensor):
                places[storage_key(tensor)].add((scope, name))
    return places


def _tied_group(
    group: Sequence[Layer], places: set[Place], known: set[Node]
) -> Iterator[tuple[Node, Weight]]:
    """Nodes and weights of one stored array; `places` are further names of it."""
    for layer in group:
        places.update(layer.origin.places)
    others = dict(islice(_other_users(places, known), _MOST_TIED))
    tables = tuple(filter(others.get, others))
    read_by = tuple(label for label in others if label not in tables)
    users = [*others]
    users += [label for label, _ in islice(_other_users(_pieces(group), known), 1)]
    listed = [layer.node.label for layer in group[: _MOST_TIED + 1]] + users
    for layer in group:
        weight = _in_pieces(layer, users)
        tied_to = dict.fromkeys(listed)
        tied_to.pop(layer.node.label, None)
        tied = replace(
            weight,
            tied_to=tuple(tied_to)[:_MOST_TIED],
            looked_up_by=tables,
            read_by=() if weight.axis is None else read_by,
        )
        yield layer.node, tied


def _pieces(group: Iterable[Layer]) -> list[Place]:
    """The other outputs of a Split in the way of these layers too."""
    pieces: dict[Place, None] = {}  # one Split may lead to thousands of layers
    for layer in group:
        for step in layer.origin.steps:
            if step.node.op in CUTS and (step.scope, step.output) not in pieces:
                pieces.update(dict.fromkeys((step.scope, n) for n in step.node.proto.output if n))
    return [*pieces]


def _in_pieces(layer: Layer, others: Sequence[str]) -> Weight:
    """The layer's weight, left dense where it is part of an array that other nodes use too."""
    cut = any(step.node.op in (*CUTS, "Gather") for step in layer.origin.steps)
    if not cut or not others or layer.weight.axis is None:
        return layer.weight
    reason = Reason(
        code=ReasonCode.UNSUPPORTED_OP,
        message=f"it is part of the array {layer.origin.constant!r}, which {others[0]} uses too:"
        " pruning would change it there too",
    )
    return _with_reason(replace(layer.weight, axis=None), reason)


def _other_users(places: Iterable[Place], known: set[Node]) -> Iterator[tuple[str, bool]]:
    """Users of the tensors on the way that lead to no weight: a node, a graph output.

    With each, whether it takes rows of the array by indices known at run time, such as tokens. A
    node that reads only the shape does not count.
    """
    for scope, name in sorted(places, key=lambda place: place[1]):
        if name in scope.outputs:
            yield f"graph output {name}", False
        for user in scope.users.get(name, ()):
            if user not in known and user.op not in _SHAPES:
                is_fixed = all(map(scope.is_fixed, user.proto.output))
                is_lookup = user.op == "Gather" and user.proto.input[0] == name and not is_fixed
                yield user.label, is_lookup


# --- stored arrays that no row names --------------------------------------------------------------

_FACTORS = frozenset({
    *("Conv", "ConvInteger", "ConvTranspose", "DeformConv", "Gemm", "MatMul", "MatMulInteger"),
    *("QLinearConv", "QLinearMatMul", "Einsum", "GRU", "LSTM", "RNN", "Attention"),
})  # fmt: skip
"""Operators that multiply and sum what they are given."""
_MOVES = frozenset({*FOLLOWED, "Concat", "Expand"}) - {"Gather", *DEQUANTIZE}
"""Operators that give the values of an input, in other places."""
_MOST_MOVES = 64
_OF_LAYERS = ("Attention", "Conv", "Gemm", "Linear", "MatMul", "MoE", "QMoE")
"""Ends of the names of contributed operators that do (FusedMatMul, GroupQueryAttention...)."""


def _not_covered(opened: Iterable[Scope], covered: Collection[int]) -> tuple[NotCovered, ...]:
    """Initializers above 1,024 elements that no row names, by the op of their first consumer.

    `covered` are ids of the tensors that rows name. Factors of products come first.
    """
    groups: dict[tuple[str, bool], list[tuple[str, int, str]]] = defaultdict(list)
    for scope in opened:
        for name, tensor in scope.constants.items():
            shape = shape_of(tensor)
            if prod(shape) > LARGEST_PASSED_OVER and id(tensor) not in covered:
                user = _first_consumer(scope, name)
                label = "" if user is None else user.label
                op = "no node" if user is None else user.op
                # the bias of a Conv or a Gemm has one axis
                is_factor = len(shape) > 1 and _multiplies(op)
                groups[op, is_factor].append((name, prod(shape), label))
    rows = starmap(_not_covered_by, groups.items())
    return tuple(sorted(rows, key=lambda row: (not row.multiplies, -row.weights, row.op)))


def _multiplies(op: str) -> bool:
    return op in _FACTORS or ("::" in op and op.endswith(_OF_LAYERS))


def _not_covered_by(group: tuple[str, bool], arrays: Iterable[tuple[str, int, str]]) -> NotCovered:
    op, is_factor = group
    names, sizes, labels = zip(*arrays, strict=True)
    users = tuple(dict.fromkeys(labels))
    return NotCovered(
        op=op,
        uses=len(users),
        weights=sum(sizes),
        multiplies=is_factor,
        users=users,
        arrays=names,
    )


def _first_consumer(scope: Scope, name: str) -> Node | None:
    """The first node that reads a constant, behind nodes that only move its values."""
    # torch puts the gates of an LSTM into ONNX's order: W -> Slice -> Concat -> Unsqueeze -> LSTM
    user = None
    for _ in range(_MOST_MOVES):
        users = scope.users.get(name, ())
        if not users:
            break
        user = users[0]
        if user.op not in _MOVES:
            break
        name = user.proto.output[0]
    return user
