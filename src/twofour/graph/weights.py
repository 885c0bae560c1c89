"""The weights of an ONNX graph that sparse math could use, and what uses every other stored array.

The one definition of what counts: a constant of more than 1,024 elements that is a factor of a
matrix product, or may be one, counts among the weights in every share; look-ups, normalisation,
biases and other element-wise constants are listed apart. Source of which input multiplies: ONNX
operator schemas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
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
from twofour.records.weights import (
    LARGEST_PASSED_OVER,
    NotCovered,
    Pattern,
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
                    products += node.op in ("MatMul", "Einsum")
                    continue
                goes_on = any(name in quantized for name in node.proto.output)
                layers.append(layer_of_node(scope, node, position, pattern, quantized=goes_on))
        weights, refusal = _tied(layers, opened), refusal_reason(opened)
        if refusal is not None:  # TensorRT refuses the whole file, and so each of its layers
            known = ({reason.code for reason in weight.reasons} for weight in weights)
            weights = tuple(
                weight
                if refusal.code in codes
                else replace(weight, reasons=(*weight.reasons, refusal))
                for weight, codes in zip(weights, known, strict=True)
            )
        frozen = {entry.key.removeprefix(FROZEN_KEY) for entry in model.metadata_props}
        return GraphWeights(
            weights=with_frozen(weights, frozen),
            tensors=tuple(layer.found.tensor for layer in layers),
            layers=tuple(layers),
            activation_products=products,
            not_covered=not_covered(
                (*opened, *function_scopes(model, path)),
                frozenset(id(layer.found.tensor) for layer in layers),
            ),
        )


def with_frozen(weights: Iterable[Weight], names: Collection[str]) -> tuple[Weight, ...]:
    """The weights, with that reason in those that are frozen."""
    return tuple(
        replace(weight, reasons=(*weight.reasons, _FROZEN)) if weight.weight in names else weight
        for weight in weights
    )


def frozen_metadata(names: Iterable[str]) -> dict[str, str]:
    """Entries of a model's metadata_props for initializers that are frozen parameters."""
    return {FROZEN_KEY + name: "requires_grad=False" for name in names}


def _tied(layers: list[Layer], opened: list[Scope]) -> tuple[Weight, ...]:
    """The weights, each with the names of everything else that uses the same stored array."""
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
        steps = (s for layer in group for s in layer.found.steps if s.node.op in CUTS)
        cut_by = {step.node: step.scope for step in steps}  # a Split may lead to thousands
        pieces = [(at, name) for node, at in cut_by.items() for name in node.proto.output if name]
        parts = tuple(islice(_other_users(pieces, known), 1))
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


def _in_pieces(layer: Layer, others: Sequence[str]) -> Weight:
    """The layer's weight, left dense where it is part of an array that other nodes use too."""
    cut = any(step.node.op in (*CUTS, "Gather") for step in layer.found.steps)
    if not cut or not others or layer.weight.axis is None:
        return layer.weight
    reason = Reason(
        code=ReasonCode.UNSUPPORTED_OP,
        message=f"it is part of the array {layer.found.constant!r}, which {others[0]} uses too:"
        " pruning would change it there too",
    )
    return replace(layer.weight, axis=None, reasons=(*layer.weight.reasons, reason))


def _lookups(places: Iterable[Place], known: set[Node]) -> Iterator[str]:
    """Gather nodes that take rows of the array by indices known at run time, such as tokens."""
    for scope, name in sorted(places, key=lambda place: place[1]):
        for user in scope.users.get(name, ()):
            is_lookup = user.proto.op_type == "Gather" and user.proto.input[0] == name
            if is_lookup and user not in known and not all(map(scope.is_fixed, user.proto.output)):
                yield user.label


def _other_users(places: Iterable[Place], known: set[Node]) -> Iterator[str]:
    """Users of the tensors on the way that lead to no weight: a Gather, a graph output.

    A node that reads only the shape does not count.
    """
    for scope, name in sorted(places, key=lambda place: place[1]):
        if name in scope.outputs:
            yield f"graph output {name}"
        for user in scope.users.get(name, ()):
            if user not in known and user.op not in _SHAPES:
                yield user.label


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


def not_covered(opened: Sequence[Scope], covered: Collection[int]) -> tuple[NotCovered, ...]:
    """Initializers above 1,024 elements that no row names, by the op of their first consumer.

    `covered` are ids of the tensors that rows name. Factors of products come first.
    """
    groups: dict[str, list[tuple[str, int, str]]] = defaultdict(list)
    for scope in opened:
        for name, tensor in scope.constants.items():
            size = prod(shape_of(tensor))
            if size > LARGEST_PASSED_OVER and id(tensor) not in covered:
                user = _first_consumer(scope, name)
                op, label = ("no node", "") if user is None else (user.op, user.label)
                groups[op].append((name, size, label))
    found = []
    for op, constants in groups.items():
        labels = tuple(dict.fromkeys(label for _, _, label in constants))
        row = NotCovered(
            op=op,
            uses=len(labels),
            weights=sum(size for _, size, _ in constants),
            multiplies=op in _FACTORS or ("::" in op and op.endswith(_OF_LAYERS)),
            users=labels,
            arrays=tuple(name for name, _, _ in constants),
        )
        found.append(row)
    return tuple(sorted(found, key=lambda row: (not row.multiplies, -row.weights, row.op)))


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
