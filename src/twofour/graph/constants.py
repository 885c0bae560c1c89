"""Every stored array of an ONNX file that no row names, by what uses it in the end.

The one definition of what counts: a constant of more than 1,024 elements that is a factor of a
matrix product, or may be one, belongs to the weights that shares are shares of; look-ups,
normalisation, biases and other element-wise constants are listed apart. Source of which input
multiplies: ONNX operator schemas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx
from onnx import numpy_helper

from twofour.graph.files import DTYPES, graphs, shape_of, subgraphs, tensors, with_subgraphs
from twofour.graph.scope import Node, Place, Scope, is_standard
from twofour.graph.trace import FOLLOWED, LOOKUPS, STACK
from twofour.records.weights import LARGEST_PASSED_OVER, NotCovered

_MOST_STEPS = 512
"""Tensors looked at from one constant; the bound keeps the search linear in the graph."""
_FACTORS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "DeformConv"), (1,)),
    **dict.fromkeys(("Gemm", "MatMul", "MatMulInteger"), (0, 1)),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), (1, 2)),
    "Attention": (0, 1, 2),
    "QLinearConv": (3,),
    "QLinearMatMul": (0, 3),
}
"""Inputs that are multiplied and summed; of Einsum all are."""
_BIASES = {"Conv": 2, "ConvTranspose": 2, "GRU": 3, "Gemm": 2, "LSTM": 3, "RNN": 3}
_MOVES = {*FOLLOWED, "Expand", "Pad", "SequenceAt", "SplitToSequence", "Tile"} - {"Gather"}
"""Ops whose outputs are the values of input 0, moved, repeated, cut or of another type."""
_NO_PRODUCTS = ("Bias", "Embed", "Gather", "Gelu", "Norm", "Rotary")
"""Parts of names of contributed ops that add, scale or look up (BiasGelu, SkipLayerNorm...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """What becomes of a constant at one node, or at the output of the model."""

    op: str
    user: str
    multiplies: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Constant:
    """One stored array: a tensor of a graph, or an attribute of a node that is no Constant."""

    name: str
    shape: tuple[int, ...]
    holder: Scope | Node


@dataclass(frozen=True, slots=True, kw_only=True)
class _Map:
    """What the walk needs to know of the whole model."""

    scope_of: Mapping[Node, Scope]
    inner: Mapping[int, Scope]
    around: Mapping[int, Node]
    """The node that holds a subgraph, by id of the graph."""
    weight_at: Mapping[Node, int]
    """Which input is the weight of a row."""
    multiplying: Mapping[tuple[str, str], bool]
    """The model's own functions, by domain and name: whether there is a product inside."""


@dataclass(slots=True)
class _Group:
    users: dict[str, None] = field(default_factory=dict)
    arrays: list[str] = field(default_factory=list)
    weights: int = 0


def not_covered(
    opened: Sequence[Scope],
    functions: Sequence[onnx.FunctionProto],
    covered: Collection[int],
    weight_at: Mapping[Node, int],
) -> tuple[NotCovered, ...]:
    """Constants above 1,024 elements by use; factors of products first.

    `covered`: ids of the tensors that rows name; `weight_at`: which input of a row's node.
    """
    known = _map(opened, functions, weight_at)
    groups: dict[tuple[bool, str], _Group] = defaultdict(_Group)
    for scope in opened:
        for constant in _constants(scope, covered):
            uses = tuple(_uses(constant, known))
            first = next((use for use in uses if use.multiplies), uses[0] if uses else _UNUSED)
            group = groups[first.multiplies, first.op]
            same = (u for u in uses if (u.multiplies, u.op) == (first.multiplies, first.op))
            group.users.update(dict.fromkeys(use.user for use in same))
            group.arrays.append(constant.name)
            group.weights += prod(constant.shape)
    ranked = sorted(groups.items(), key=lambda item: (not item[0][0], -item[1].weights, item[0][1]))
    return tuple(
        NotCovered(
            op=op,
            uses=max(1, len(group.users)),
            weights=group.weights,
            multiplies=multiplies,
            users=tuple(group.users),
            arrays=tuple(group.arrays),
        )
        for (multiplies, op), group in ranked
    )


_UNUSED = _Use(op="no node", user="", multiplies=False)


def _map(
    opened: Sequence[Scope],
    functions: Sequence[onnx.FunctionProto],
    weight_at: Mapping[Node, int],
) -> _Map:
    around = {
        id(graph): node
        for scope in opened
        for node in scope.nodes
        for _, graph in subgraphs(node.proto)
    }
    bodies = {(f.domain, f.name): f for f in functions}
    return _Map(
        scope_of={node: scope for scope in opened for node in scope.nodes},
        inner={id(scope.graph): scope for scope in opened},
        around=around,
        weight_at=weight_at,
        multiplying=_multiplying(bodies),
    )


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


def _uses(constant: _Constant, known: _Map) -> Iterator[_Use]:
    """Where the values end up, behind the ops that only move them or compute with constants."""
    if isinstance(constant.holder, Node):
        node = constant.holder
        yield _Use(op=node.op, user=node.label, multiplies=_may_multiply(node.proto))
    else:
        yield from _ends((constant.holder, constant.name), len(constant.shape), known)


def _ends(start: Place, rank: int, known: _Map) -> Iterator[_Use]:
    """Uses of a tensor of this rank (1: looked-up parts of it are no matrices)."""
    waiting, seen = [start], {start}
    for scope, name in waiting:
        there = _outside(scope, name, known)
        if name in scope.outputs and id(scope.graph) not in known.around:
            yield _Use(op="output of the model", user=name, multiplies=False)
        for user in scope.users.get(name, ()):
            moved = _moved(user, name, known)
            if moved is None:
                yield _looked_up(user, name, rank, known) or _use(user, name, known)
            elif len(seen) > _MOST_STEPS:
                yield _Use(op=user.op, user=user.label, multiplies=True)
            else:
                there += moved
        new = dict.fromkeys(place for place in there if place not in seen)
        waiting += new
        seen.update(new)


def _outside(scope: Scope, name: str, known: _Map) -> list[Place]:
    """What the node around a subgraph gives out, where the tensor is an output of the subgraph."""
    node = known.around.get(id(scope.graph))
    if node is None or name not in scope.outputs:
        return []
    at = [value.name for value in scope.graph.output].index(name)
    at -= node.proto.op_type == "Loop"  # its body gives out the condition first
    outer = known.scope_of[node]
    return [(outer, node.proto.output[at])] if 0 <= at < len(node.proto.output) else []


def _moved(user: Node, name: str, known: _Map) -> list[Place] | None:
    """Tensors in which the values go on behind a node; None for a node that uses them up."""
    scope, proto = known.scope_of[user], user.proto
    outputs = [(scope, output) for output in proto.output if output]
    if outputs and all(scope.is_fixed(output) for _, output in outputs):
        return outputs
    if proto.op_type in _MOVES and proto.input[0] == name:
        return outputs
    if proto.op_type not in ("Loop", "Scan") or not is_standard(proto):
        return None
    bodies = [known.inner[id(graph)] for _, graph in subgraphs(proto)]
    given = [at for at, read in enumerate(proto.input) if read == name]
    return [
        (body, body.graph.input[at].name)
        for body in bodies
        for at in given
        if at < len(body.graph.input)
    ]


def _looked_up(user: Node, name: str, rank: int, known: _Map) -> _Use | None:
    """A product with matrices that are looked up in a stack of them, as experts are; else None."""
    is_stack = user.proto.op_type in LOOKUPS and is_standard(user.proto) and rank >= STACK
    if not is_stack or user.proto.input[0] != name:
        return None
    scope = known.scope_of[user]
    behind = (u for out in user.proto.output for u in _ends((scope, out), 1, known))
    found = next((use for use in behind if use.multiplies), None)
    if found is None:
        return None
    return _Use(op=f"gathered {found.op}", user=found.user, multiplies=True)


def _use(user: Node, name: str, known: _Map) -> _Use:
    """What a node does with one of its inputs."""
    proto, op = user.proto, user.op
    at = list(proto.input).index(name)
    multiplies = known.multiplying.get((proto.domain, proto.op_type), _may_multiply(proto))
    if is_standard(proto):
        weight = known.weight_at.get(user)
        multiplies &= at in _FACTORS.get(proto.op_type, (at,)) and weight in (None, at)
    if not multiplies and proto.op_type in _FACTORS:
        op += " bias" if at == _BIASES.get(proto.op_type) else " input"
    return _Use(op=op, user=user.label, multiplies=multiplies)


HALF = frozenset(code for code, name in DTYPES.items() if name in {"float16", "bfloat16"})
"""As ONNX numbers the types."""
TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
"""Attributes whose integer is a type of ONNX (Cast, random numbers, windows)."""


def has_half(model: onnx.ModelProto) -> bool:
    """Whether a tensor of the model is float16 or bfloat16, or a node makes some."""
    if any(tensor.data_type in HALF for tensor in tensors(model)):
        return True
    return any(
        attribute.name in TYPE_ATTRIBUTES and attribute.i in HALF
        for graph in graphs(model)
        for node in graph.node
        for attribute in node.attribute
    )


def widen(model: onnx.ModelProto) -> None:
    """Make float16 and bfloat16 to float32 in place; weights must be at hand, not external."""
    for tensor in tensors(model):
        if tensor.data_type in HALF:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for graph in graphs(model):
        del graph.value_info[:]  # types of the tensors between; whoever needs them infers them anew
        if isinstance(graph, onnx.GraphProto):
            for value in (*graph.input, *graph.output):
                if value.type.tensor_type.elem_type in HALF:
                    value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in TYPE_ATTRIBUTES and attribute.i in HALF:
                    attribute.i = onnx.TensorProto.FLOAT
