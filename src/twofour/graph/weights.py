"""The weights of an ONNX graph that sparse math could use, and what uses every other stored array.

The one definition of what counts: a constant of more than 1,024 elements that is a factor of a
matrix product, or may be one, counts among the weights in every share; look-ups, normalisation,
biases and other element-wise constants are listed apart. Source of which input multiplies: ONNX
operator schemas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from pathlib import Path

import onnx

from twofour.errors import naming
from twofour.graph.files import is_external, shape_of, storage_key, subgraphs, with_subgraphs
from twofour.graph.layers import (
    Layer,
    has_weight,
    layer_of_node,
    quantized_tensors,
    refusal_reason,
    weight_input,
)
from twofour.graph.scope import Node, Place, Scope, function_scopes, is_standard, scopes
from twofour.graph.trace import CUTS, DEQUANTIZE, FOLLOWED, LOOKUPS, QUANTIZE, STACK
from twofour.records.weights import (
    LARGEST_PASSED_OVER,
    NotCovered,
    Pattern,
    Reason,
    ReasonCode,
    Weight,
)

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
        return GraphWeights(
            weights=weights,
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

_MOST_STEPS = 512
"""Most tensors looked at from one constant: the search stays linear in the graph."""
_FACTORS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "DeformConv"), (1,)),
    **dict.fromkeys(("Gemm", "MatMul", "MatMulInteger"), (0, 1)),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), (1, 2)),
    "Attention": (0, 1, 2),
    "QLinearConv": (3,),
    "QLinearMatMul": (0, 3),
}
"""Inputs that are multiplied and summed; those of Einsum are all such."""
_BIASES = {"Conv": 2, "ConvTranspose": 2, "GRU": 3, "Gemm": 2, "LSTM": 3, "RNN": 3}
_MOVES = {*FOLLOWED, "Expand", "Pad", "SequenceAt", "SplitToSequence", "Tile"} - {"Gather"}
"""Ops whose outputs are the values of input 0, moved, repeated, cut or of another type."""
_NO_PRODUCTS = ("Bias", "Embed", "Gather", "Gelu", "Norm", "Rotary")
"""Parts of names of contributed ops that add, scale or look up (BiasGelu, SkipLayerNorm...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Consumer:
    """A node that uses a constant up, or the output of the model."""

    op: str
    user: str
    multiplies: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Constant:
    """One stored array: a tensor of a graph, or an attribute of a node that is no Constant."""

    name: str
    shape: tuple[int, ...]
    holder: Scope | Node


_NOWHERE = _Consumer(op="no node", user="", multiplies=False)


def not_covered(
    opened: Sequence[Scope],
    functions: Sequence[onnx.FunctionProto],
    covered: Collection[int],
    weight_at: Mapping[Node, int],
) -> tuple[NotCovered, ...]:
    """Constants above 1,024 elements by use; factors of products first.

    `covered`: ids of the tensors that rows name; `weight_at`: which input of a row's node.
    """
    walk = _Walk(opened, functions, weight_at)
    groups: dict[tuple[bool, str], list[_Constant]] = defaultdict(list)
    users: dict[tuple[bool, str], dict[str, None]] = defaultdict(dict)
    for scope in opened:
        for constant in _constants(scope, covered):
            ends = tuple(walk.consumers(constant))
            first = next((end for end in ends if end.multiplies), ends[0] if ends else _NOWHERE)
            use = first.multiplies, first.op
            groups[use].append(constant)
            users[use].update((end.user, None) for end in ends if (end.multiplies, end.op) == use)
    rows = (
        NotCovered(
            op=op,
            uses=max(1, len(users[multiplies, op])),
            weights=sum(prod(constant.shape) for constant in group),
            multiplies=multiplies,
            users=tuple(users[multiplies, op]),
            arrays=tuple(constant.name for constant in group),
        )
        for (multiplies, op), group in groups.items()
    )
    return tuple(sorted(rows, key=lambda row: (not row.multiplies, -row.weights, row.op)))


def _may_multiply(node: onnx.NodeProto) -> bool:
    if is_standard(node):
        return node.op_type in _FACTORS or node.op_type == "Einsum"
    return not any(part in node.op_type for part in _NO_PRODUCTS)


def _constants(scope: Scope, covered: Collection[int]) -> Iterator[_Constant]:
    """Initializers and Constant nodes, sparse ones at their dense size, tensors in attributes."""
    for name, tensor in scope.constants.items():
        if id(tensor) not in covered:
            yield from _large(name, shape_of(tensor), scope)
    for sparse in scope.graph.sparse_initializer:
        yield from _large(sparse.values.name, tuple(sparse.dims), scope)
    for node in scope.nodes:
        for held in node.proto.attribute:
            if node.proto.op_type != "Constant" or not is_standard(node.proto):
                for tensor in (*([held.t] if held.HasField("t") else []), *held.tensors):
                    yield from _large(tensor.name or held.name, shape_of(tensor), node)
            elif held.name != "value" and node.proto.output:
                length = len(held.floats) or len(held.ints) or len(held.strings)
                sparse_dims = tuple(held.sparse_tensor.dims)
                yield from _large(node.proto.output[0], sparse_dims or (length,), scope)


def _large(name: str, shape: tuple[int, ...], holder: Scope | Node) -> Iterator[_Constant]:
    if prod(shape) > LARGEST_PASSED_OVER:
        yield _Constant(name=name, shape=shape, holder=holder)


class _Walk:
    """Follows constants to the nodes that use them up, through the whole model."""

    def __init__(
        self,
        opened: Sequence[Scope],
        functions: Sequence[onnx.FunctionProto],
        weight_at: Mapping[Node, int],
    ) -> None:
        self._weight_at = weight_at
        self._scope_of = {node: scope for scope in opened for node in scope.nodes}
        self._inner = {id(scope.graph): scope for scope in opened}
        self._around = {
            id(graph): node for node in self._scope_of for _, graph in subgraphs(node.proto)
        }
        """The node that contains a subgraph, by id of the graph."""
        self._multiplying = _multiplying({(f.domain, f.name): f for f in functions})

    def consumers(self, constant: _Constant) -> Iterator[_Consumer]:
        """Where the values end up, behind ops that only move them or compute with constants."""
        if isinstance(constant.holder, Node):
            node = constant.holder
            yield _Consumer(op=node.op, user=node.label, multiplies=_may_multiply(node.proto))
        else:
            yield from self._ends((constant.holder, constant.name), len(constant.shape))

    def _ends(self, start: Place, rank: int) -> Iterator[_Consumer]:
        """Consumers of a tensor of this rank (1: looked-up parts of it are no matrices)."""
        # W -> Transpose -> t -> Loop(body input x -> MatMul): the places are (graph, "W"),
        # (graph, "t") and (body, "x"), and the one consumer is the MatMul in the body.
        waiting, seen = [start], {start}
        for scope, name in waiting:
            there = self._outside(scope, name)
            if name in scope.outputs and id(scope.graph) not in self._around:
                yield _Consumer(op="output of the model", user=name, multiplies=False)
            for user in scope.users.get(name, ()):
                moved = self._moved(user, name)
                if moved is None:
                    yield self._looked_up(user, name, rank) or self._consumer(user, name)
                elif len(seen) > _MOST_STEPS:
                    yield _Consumer(op=user.op, user=user.label, multiplies=True)
                else:
                    there += moved
            new = dict.fromkeys(place for place in there if place not in seen)
            waiting += new
            seen.update(new)

    def _outside(self, scope: Scope, name: str) -> list[Place]:
        """The output of the node around a subgraph, where the tensor is the subgraph's output."""
        node = self._around.get(id(scope.graph))
        if node is None or name not in scope.outputs:
            return []
        at = [value.name for value in scope.graph.output].index(name)
        at -= node.proto.op_type == "Loop"  # the first output of its body is the condition
        outer = self._scope_of[node]
        return [(outer, node.proto.output[at])] if 0 <= at < len(node.proto.output) else []

    def _moved(self, user: Node, name: str) -> list[Place] | None:
        """Tensors that have the values behind a node; None for a node that uses them up."""
        scope, proto = self._scope_of[user], user.proto
        if proto.op_type in (*QUANTIZE, *DEQUANTIZE) and proto.input[0] != name:
            return None  # a scale or zero point
        outputs = [(scope, output) for output in proto.output if output]
        if outputs and all(scope.is_fixed(output) for _, output in outputs):
            return outputs
        if proto.op_type in _MOVES and proto.input[0] == name:
            return outputs
        if proto.op_type not in ("Loop", "Scan") or not is_standard(proto):
            return None
        bodies = [self._inner[id(graph)] for _, graph in subgraphs(proto)]
        given = [at for at, read in enumerate(proto.input) if read == name]
        return [
            (body, body.graph.input[at].name)
            for body in bodies
            for at in given
            if at < len(body.graph.input)
        ]

    def _looked_up(self, user: Node, name: str, rank: int) -> _Consumer | None:
        """A product with matrices that are looked up in a stack, such as experts; else None."""
        is_stack = user.proto.op_type in LOOKUPS and is_standard(user.proto) and rank >= STACK
        if not is_stack or user.proto.input[0] != name:
            return None
        scope = self._scope_of[user]
        behind = (end for out in user.proto.output for end in self._ends((scope, out), 1))
        found = next((end for end in behind if end.multiplies), None)
        return found and replace(found, op=f"gathered {found.op}")

    def _consumer(self, user: Node, name: str) -> _Consumer:
        proto, op = user.proto, user.op
        at = list(proto.input).index(name)
        multiplies = self._multiplying.get((proto.domain, proto.op_type), _may_multiply(proto))
        if is_standard(proto):
            weight = self._weight_at.get(user)
            multiplies &= at in _FACTORS.get(proto.op_type, (at,)) and weight in (None, at)
        if not multiplies and proto.op_type in _FACTORS:
            op += " bias" if at == _BIASES.get(proto.op_type) else " input"
        return _Consumer(op=op, user=user.label, multiplies=multiplies)


def _multiplying(
    bodies: Mapping[tuple[str, str], onnx.FunctionProto],
) -> dict[tuple[str, str], bool]:
    """Whether each function multiplies, or calls one that does; linear in their nodes."""
    callers: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    products: dict[tuple[str, str], None] = {}
    for key, body in bodies.items():
        for node in (node for graph in with_subgraphs([body]) for node in graph.node):
            called = (node.domain, node.op_type)
            if called in bodies:
                callers[called].append(key)
            elif _may_multiply(node):
                products[key] = None
    for key in (waiting := list(products)):
        fresh = [caller for caller in callers[key] if caller not in products]
        products.update(dict.fromkeys(fresh))
        waiting += dict.fromkeys(fresh)
    return {key: key in products for key in bodies}
