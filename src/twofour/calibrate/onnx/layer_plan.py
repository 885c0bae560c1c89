"""The layers of an ONNX graph in the order of calibration: their inputs, weights and biases.

Layers are taken level by level: those of one level do not depend on each other, so that one run of
the nodes between two levels gives the inputs of all of them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from twofour.calibrate.onnx.input_rows import InputReading, matrix_use
from twofour.calibrate.onnx.storage import StoredView, rounded_to, view_of
from twofour.errors import BadInputError
from twofour.graph.files import Array, is_external, read_tensor, storage_key, with_subgraphs
from twofour.graph.layers import Layer
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import Node, Scope, is_standard, number, scopes
from twofour.graph.trace import trace, traced_shapes
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout, to_stack
from twofour.pruning.methods.magnitude import count_non_finite
from twofour.pruning.selection import Choice
from twofour.pruning.statistics import Statistics
from twofour.records.weights import Pattern, Reason

Key = tuple[object, ...]
IN_SUBGRAPH = "it is in a subgraph, whose inputs cannot be read: pruned by magnitude"
NOT_READ = "how its inputs become rows of a matrix is not known: pruned by magnitude"
OVERLAPS = "layers use different parts of its array that overlap: pruned by magnitude"
FIXED_INPUT = "its input is a constant too: pruned by magnitude"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """The constant that is added to a layer's output, and may be corrected."""

    node: int
    """Index of the node that adds it."""
    position: int
    """Which input of that node."""
    name: str
    """The constant's name in the main graph."""
    tensor: onnx.TensorProto
    view: StoredView
    shape: tuple[int, ...]
    """The shape that the node reads."""
    own: bool
    """True: nothing else uses it. False: the layer gets a copy."""
    factor: float = 1.0
    """A change of the output by 1 is a change of the bias by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUser:
    """One node whose weight is to be pruned with data."""

    row: int
    """Index of its weight among the graph's."""
    label: str
    tap: str
    """The tensor that is multiplied by the weight."""
    level: int
    reading: InputReading
    bias: Bias | None
    added: str | None
    """The tensor that is added to its output, the other branch of a residual block; None: there is
    none, or not one that is known when the layer is pruned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """A stored array, or the part of one that some nodes use as the same matrices."""

    key: Key
    """Key of the array."""
    name: str
    """Name of the array in the main graph."""
    tensor: onnx.TensorProto
    view: StoredView
    """The view of the first user, in the shape of `layout`."""
    layout: Layout
    users: tuple[WeightUser, ...]

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.layout.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPlan:
    """The weights of a graph that are pruned with data, in order; the others, and why not."""

    parts: tuple[WeightPart, ...]
    levels: tuple[int, ...]
    without: dict[int, str]
    """Rows whose arrays are pruned without data, each with the note on it."""
    behind: frozenset[str]
    """Tensors that depend on a layer that is to be pruned: the dense model has other values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _User:
    """A node with its weight, before users of one array are put together."""

    user: WeightUser
    layer: Layer
    view: StoredView
    layout: Layout


def plan_calibration(
    graph: MainGraph, pattern: Pattern, chosen: Sequence[Choice], *, copies_biases: bool = True
) -> CalibrationPlan:
    """The plan for the weights that `choose` has chosen; see `OnnxCalibration`."""
    found = graph.opened.weights(pattern)
    wanted = [row for row, (_, pruned, _) in enumerate(chosen) if pruned]
    nodes = {found.layers[row].node for row in wanted}
    depths = graph.depths(nodes)
    users: dict[Key, list[_User]] = defaultdict(list)
    keys: dict[int, Key] = {}
    without: dict[Key, str] = {}
    for row in wanted:
        layer = found.layers[row]
        assert layer.found.tensor is not None, "chosen for its array"
        key = keys[row] = storage_key(layer.found.tensor)
        user = _user(graph, row, layer, pattern, depths)
        if isinstance(user, str):
            without[key] = user
            continue
        bias = user.user.bias
        if not copies_biases and bias is not None and not (bias.own and is_external(bias.tensor)):
            user = replace(user, user=replace(user.user, bias=None))
        users[key].append(user)
    parts = []
    for key, group in users.items():
        if key in without:
            continue
        found_parts = _parts(key, group)
        if found_parts is None:
            without[key] = OVERLAPS
        else:
            parts += found_parts
    return CalibrationPlan(
        parts=tuple(parts),
        levels=tuple(sorted({user.level for part in parts for user in part.users})),
        without={row: without[keys[row]] for row in wanted if keys[row] in without},
        behind=frozenset(name for name, depth in depths.items() if depth),
    )


def main_graph(opened: OpenedModel, pattern: Pattern) -> MainGraph:
    """The main graph, whose nodes are those that the graph's weights refer to."""
    layers = opened.weights(pattern).layers
    scope = layers[0].scope if layers else next(scopes(opened.proto, opened.path))
    while scope.parent is not None:
        scope = scope.parent
    return MainGraph(opened, scope)


class MainGraph:
    """The main graph of a file: the tensors that each node reads, those of its subgraphs too."""

    def __init__(self, opened: OpenedModel, scope: Scope) -> None:
        self.opened = opened
        self.scope = scope
        nodes = scope.nodes
        self.reads = [tuple(dict.fromkeys(_reads(node.proto))) for node in nodes]
        self.index = {node: at for at, node in enumerate(nodes)}
        self.made_by = {
            name: at for at, node in enumerate(nodes) for name in node.proto.output if name
        }

    def depths(self, wanted: Collection[Node]) -> dict[str, int]:
        """For each tensor the largest number of `wanted` nodes on a path to it."""
        depth: dict[str, int] = {}
        for node, at in self.index.items():
            level = max((depth.get(name, 0) for name in self.reads[at]), default=0)
            level += node in wanted
            depth.update((name, level) for name in node.proto.output if name)
        return depth

    def needed(self, names: Iterable[str], have: Iterable[str] = ()) -> set[int]:
        """The nodes that compute the tensors from those that are there."""
        there, waiting = {*have}, [*names]
        found: set[int] = set()
        while waiting:
            name = waiting.pop()
            at = None if name in there else self.made_by.get(name)
            if at is not None and at not in found:
                found.add(at)
                waiting += self.reads[at]
        return found

    def is_fixed(self, name: str) -> bool:
        """Whether the tensor depends on constants alone."""
        return self.scope.is_fixed(name)


def borders(graph: MainGraph, taps: Sequence[Collection[str]]) -> Iterator[frozenset[str]]:
    """For each level's taps, in order, the tensors that the nodes behind it start from.

    These are the taps themselves and outputs of the nodes before that are read later; constants
    are not among them, they are computed again.
    """
    everything = graph.needed(itertools.chain.from_iterable(taps))
    done: set[int] = set()
    for level in taps:
        done |= graph.needed(level)
        later = {name for at in everything - done for name in graph.reads[at]}
        made = {name for name in later if graph.made_by.get(name, -1) in done}
        yield frozenset(name for name in {*made, *level} if not graph.is_fixed(name))


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors of the graph that a node reads, also in its subgraphs."""
    yield from (name for name in node.input if name)
    for attr in node.attribute:
        inner = [*([attr.g] if attr.HasField("g") else []), *attr.graphs]
        for graph in with_subgraphs(inner):
            yield from (name for each in graph.node for name in each.input if name)
            yield from (value.name for value in graph.output)


def _user(
    graph: MainGraph, row: int, layer: Layer, pattern: Pattern, depths: dict[str, int]
) -> _User | str:
    """A node and its weight; a text: why the weight is pruned without data."""
    if layer.scope.parent is not None:
        return IN_SUBGRAPH
    tap = layer.node.proto.input[1 - layer.position]
    if graph.is_fixed(tap):
        return FIXED_INPUT
    known, view = traced_shapes(layer.found), view_of(layer.found)
    use = None
    if view is not None and not isinstance(known, Reason):
        use = matrix_use(layer.node, layer.position, known[0], pattern.m)
    if use is None or view is None:
        return NOT_READ
    # In x -> A -> B -> D and x -> C -> D, all wanted: A and C have level 0, B 1 and D 2, as its
    # longest path is A, B. So one run shows the inputs of A and C; D waits until B is pruned.
    level = max(depths.get(name, 0) for name in graph.reads[graph.index[layer.node]])
    is_plain = use.reading == InputReading(layout=use.reading.layout) and len(use.layout.shape) == 2
    added = _added(graph, layer) if is_plain else None
    user = WeightUser(
        row=row,
        label=layer.node.label,
        tap=tap,
        level=level,
        reading=use.reading,
        bias=bias_of(graph, layer, use.layout),
        added=None if added is None or depths.get(added, 0) > level else added,
    )
    return _User(user=user, layer=layer, view=view.then(*use.moves), layout=use.layout)


def _parts(key: Key, users: Sequence[_User]) -> list[WeightPart] | None:
    """The parts of one array by their users; None where two differ and overlap."""
    # Two MatMuls, each behind a Slice of one (8, 16) array, see columns 0:8 and 8:16: two parts. A
    # third one behind columns 4:12 shares elements with both: then there is no set of parts.
    layouts = {user.layout for user in users}
    if len(users) == 1 or (len(layouts) == 1 and not any(user.view.moves for user in users)):
        return [_part(key, users)]
    groups: list[tuple[Array, list[_User]]] = []
    for user in users:
        places = to_stack(user.view.places(), user.layout)
        for known, members in groups:
            if np.array_equal(known, places):
                members.append(user)
                break
        else:
            groups.append((places, [user]))
    every = np.concatenate([user[0].view.places().reshape(-1) for _, user in groups])
    if np.unique(every).size != every.size:
        return None
    return [_part(key, members) for _, members in groups]


def _part(key: Key, users: Sequence[_User]) -> WeightPart:
    first = users[0]
    assert first.layer.found.tensor is not None
    return WeightPart(
        key=key,
        name=first.layer.found.constant,
        tensor=first.layer.found.tensor,
        view=first.view,
        layout=first.layout,
        users=tuple(each.user for each in users),
    )


def bias_of(graph: MainGraph, layer: Layer, layout: Layout) -> Bias | None:
    """The constant that is added to the layer's output, and to nothing else."""
    scope, proto = layer.scope, layer.node.proto
    if layer.node.op in ("Conv", "ConvTranspose", "Gemm"):
        if len(proto.input) < 3 or not proto.input[2]:
            return None
        return _bias(graph, layer, layer.node, 2, layout)
    output = proto.output[0]
    users = scope.users.get(output, ())
    if output in scope.outputs or len(users) != 1:
        return None
    add = users[0]
    if add.proto.op_type != "Add" or not is_standard(add.proto) or add not in graph.index:
        return None
    others = [at for at, name in enumerate(add.proto.input) if name != output]
    return _bias(graph, layer, add, others[0], layout) if len(others) == 1 else None


def _added(graph: MainGraph, layer: Layer) -> str | None:
    """The tensor that is added to the layer's output with its bias, where nothing else uses it."""
    scope, output = layer.scope, layer.node.proto.output[0]
    while output not in scope.outputs and len(users := scope.users.get(output, [])) == 1:
        user = users[0]
        other = next((str(name) for name in user.proto.input if name != output), None)
        if user not in graph.index or user.op not in ("Add", "Cast", "Identity", "Reshape"):
            break
        if user.op == "Add" and (other is None or not scope.is_fixed(other)):
            return other  # None: it is added to itself
        output = user.proto.output[0]
    return None


def _bias(graph: MainGraph, layer: Layer, node: Node, position: int, layout: Layout) -> Bias | None:
    scope, name = layer.scope, node.proto.input[position]
    if not scope.is_fixed(name):
        return None
    found = trace(scope, name)
    known = None if found.tensor is None else traced_shapes(found)
    view = None if found.tensor is None else view_of(found)
    if known is None or view is None or isinstance(known, Reason):
        return None
    if found.looked_up is not None or not _fits(layer, known[0], layout):
        return None
    factor = 1.0
    if layer.node.op == "Gemm":
        alpha, beta = (number(layer.node.proto, name, 1.0) for name in ("alpha", "beta"))
        if not beta:
            return None
        factor = alpha / beta
    assert found.tensor is not None
    return Bias(
        node=graph.index[node],
        position=position,
        name=found.constant,
        tensor=found.tensor,
        view=view,
        own=_is_alone(found.places, node),
        factor=factor,
        shape=known[0],
    )


def _fits(layer: Layer, shape: tuple[int, ...], layout: Layout) -> bool:
    """Whether the constant has one number for each output, along the outputs' axis."""
    parts, rows, _ = layout.stack_shape
    outputs = rows * (parts // layout.taps if layout.per_tap else parts)
    if math.prod(shape) != outputs or layer.node.op == "Einsum":
        return False
    if layer.node.op in ("Conv", "ConvTranspose"):
        return len(shape) == 1
    on_right, stack = layer.position == 1, layout.shape[:-2]
    wanted = (*stack, 1, rows) if on_right else (*stack, rows, 1)
    padded = (*(1,) * (len(wanted) - len(shape)), *shape)
    return padded[-len(wanted) :] == wanted


def _is_alone(places: Iterable[tuple[Scope, str]], node: Node) -> bool:
    """Whether the tensors on the path from a constant are read by this node alone."""
    path = [*places]
    for at, (scope, name) in enumerate(path):
        users = scope.users.get(name, ())
        if name in scope.outputs or len(users) != 1 or (at == 0 and users[0] is not node):
            return False
    scope, name = path[-1]
    key = storage_key(scope.constants[name])
    return sum(storage_key(tensor) == key for tensor in scope.constants.values()) == 1


def layer_problem(
    part: WeightPart,
    pattern: Pattern,
    statistics: Statistics,
    path: Path,
    dense_model: OpenedModel | None = None,
) -> LayerProblem:
    """The weight that its nodes see, with a function for the rounding of its stored type.

    `path` is the model's file, `dense_model` the dense model where that is another one. Raises
    BadInputError for NaN and infinity in the weight, and a dense model without such a weight.
    """
    stored = read_tensor(part.tensor, path)
    if broken := count_non_finite(stored):
        raise BadInputError(
            f"{path}: weight {part.name!r} of {part.users[0].label!r} has NaN or "
            f"infinite values: {broken}",
            hint="repair the model, or leave the layer out with --exclude",
        )
    seen = part.view.seen(stored)
    work = np.dtype(np.float64 if seen.dtype == np.float64 else np.float32)

    def rounded(values: Array) -> Array:
        return part.view.flowing(_kept(part, values, stored.dtype)).astype(work)

    return LayerProblem(
        stored=seen.astype(work),
        layout=part.layout,
        pattern=pattern,
        statistics=statistics,
        unpruned=None if dense_model is None else dense_weight(part, path, dense_model),
        has_bias=all(user.bias is not None for user in part.users),
        rounded=None if stored.dtype == work and not part.view.changes else rounded,
    )


def dense_weight(part: WeightPart, path: Path, dense_model: OpenedModel | None) -> Array:
    """The weight that its nodes see in the dense model, in float32 or float64."""
    tensor, dense = part.tensor, dense_model
    seen = part.view.seen(read_tensor(tensor, path) if dense is None else _dense(dense, tensor))
    return seen if seen.dtype == np.float64 else seen.astype(np.float32)


def store_part(part: WeightPart, weight: Array, stored: Array) -> None:
    """Write a solved weight into the stored array; every zero as +0.0."""
    kept = _kept(part, weight, stored.dtype)
    part.view.write(np.where(kept == 0, np.zeros_like(kept), kept), stored)


def _dense(dense_model: OpenedModel, tensor: onnx.TensorProto) -> Array:
    """The constant of the same name in the dense model."""
    found = next(scopes(dense_model.proto, dense_model.path)).constants.get(tensor.name)
    if found is None or (found.dims, found.data_type) != (tensor.dims, tensor.data_type):
        there = "there is none" if found is None else f"it is {list(found.dims)}"
        raise BadInputError(
            f"{tensor.name!r} is {list(tensor.dims)} in the model; in the dense reference {there}",
            hint="name the dense model that this one was made from",
        )
    return read_tensor(found, dense_model.path)


def corrected(
    bias: Bias, change: Array, stored: Array, path: Path, dense: OpenedModel | None = None
) -> Array:
    """The bias changed by a change of its layer's outputs: the stored array, or that of a copy.

    `stored` is the array as it is now: other layers' parts of it may be changed already. With a
    dense model its bias is changed, because the change is computed from its outputs.
    """
    before = read_tensor(bias.tensor, path) if dense is None else _dense(dense, bias.tensor)
    seen = bias.view.seen(before)
    wanted = seen.astype(np.float64) + bias.factor * np.reshape(change, bias.shape)
    if not bias.own:
        return rounded_to(wanted, seen.dtype)
    kept = bias.view.kept(rounded_to(wanted, seen.dtype))
    bias.view.write(rounded_to(kept, stored.dtype), stored)
    return stored


def _kept(part: WeightPart, values: Array, kind: np.dtype[Any]) -> Array:
    """The numbers to store for values that the nodes see."""
    changes = part.view.changes
    seen = changes[-1].after if changes else kind
    return rounded_to(part.view.kept(rounded_to(values, seen)), kind)
