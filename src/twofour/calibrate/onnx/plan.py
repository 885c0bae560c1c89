"""What calibration needs of an ONNX graph: which tensors feed its layers, in which order, and what
may be changed with a weight.

Layers are taken level by level: those of one level hang on none of each other, so that one run of
the nodes between two levels shows all of them their inputs.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from twofour.calibrate.onnx.rows import Reading, use_of
from twofour.calibrate.onnx.storage import StoredView, view_of
from twofour.graph.files import Array, storage_key, with_subgraphs
from twofour.graph.layers import Layer
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import Node, Scope, is_standard, number, scopes
from twofour.graph.trace import shapes, trace
from twofour.pruning.matrices import Layout, to_stack
from twofour.pruning.selection import Choice
from twofour.records.weights import Pattern, Reason

Key = tuple[object, ...]
IN_SUBGRAPH = "it lies in a subgraph, whose inputs cannot be looked at: pruned by magnitude"
NOT_READ = "how its inputs become rows of a matrix is not known: pruned by magnitude"
OVERLAPS = "layers use different parts of its array that overlap: pruned by magnitude"
FIXED_INPUT = "its input is a constant too: pruned by magnitude"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """The constant that is added to a layer's output, and may be corrected."""

    node: int
    """The node that adds it, by its place in the graph."""
    position: int
    """Which input of that node."""
    name: str
    """The constant's, in the main graph."""
    tensor: onnx.TensorProto
    view: StoredView
    shape: tuple[int, ...]
    """As the node sees it."""
    own: bool
    """Nothing else uses it; else the layer gets a copy."""
    factor: float = 1.0
    """A change of the output by 1 is a change of the bias by this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One node whose weight is to be pruned with data."""

    row: int
    """Of the graph's weights."""
    label: str
    tap: str
    """The tensor that is multiplied by the weight."""
    level: int
    reading: Reading
    bias: Bias | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stored array, or the part of one that some nodes see as the same matrices."""

    key: Key
    """Of the array."""
    name: str
    """The array's, in the main graph."""
    tensor: onnx.TensorProto
    view: StoredView
    """As the first user sees it, in the shape of `layout`."""
    layout: Layout
    users: tuple[Target, ...]

    @property
    def level(self) -> int:
        """Where the inputs of all users are known."""
        return max(user.level for user in self.users)

    @property
    def is_tied(self) -> bool:
        """Whether layers of several levels use it."""
        return len({user.level for user in self.users}) > 1

    @property
    def size(self) -> int:
        """Of the array's elements, those that it has."""
        return math.prod(self.layout.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPlan:
    """What of a graph is pruned with data, in which order; what cannot be, and why."""

    pieces: tuple[Piece, ...]
    levels: tuple[int, ...]
    without: dict[int, str]
    """Rows whose arrays are pruned without data, each with what is to be said of it."""
    behind: frozenset[str]
    """Tensors that depend on a layer that is to be pruned: the dense model has other values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _User:
    target: Target
    layer: Layer
    view: StoredView
    layout: Layout


def plan_calibration(
    graph: MainGraph, pattern: Pattern, chosen: Sequence[Choice]
) -> CalibrationPlan:
    """Which tensors to look at for the weights that are to be pruned, as `choose` says."""
    found = graph.opened.weights(pattern)
    wanted = [row for row, (_, pruned, _) in enumerate(chosen) if pruned]
    nodes = {found.layers[row].node for row in wanted}
    levels = graph.levels(nodes)
    users: dict[Key, list[_User]] = defaultdict(list)
    keys: dict[int, Key] = {}
    without: dict[Key, str] = {}
    for row in wanted:
        layer = found.layers[row]
        assert layer.found.tensor is not None, "chosen for its array"
        key = keys[row] = storage_key(layer.found.tensor)
        user = _user(graph, row, layer, pattern, levels)
        if isinstance(user, str):
            without[key] = user
        else:
            users[key].append(user)
    pieces = []
    for key, group in users.items():
        if key in without:
            continue
        parts = _pieces(key, group)
        if parts is None:
            without[key] = OVERLAPS
        else:
            pieces += parts
    return CalibrationPlan(
        pieces=tuple(pieces),
        levels=tuple(sorted({user.level for piece in pieces for user in piece.users})),
        without={row: without[keys[row]] for row in wanted if keys[row] in without},
        behind=frozenset(name for name, depth in graph.depths(nodes).items() if depth),
    )


def main_graph(opened: OpenedModel, pattern: Pattern) -> MainGraph:
    """The main graph, made of the same nodes as the graph's weights are."""
    layers = opened.weights(pattern).layers
    scope = layers[0].scope if layers else next(scopes(opened.proto, opened.path))
    while scope.parent is not None:
        scope = scope.parent
    return MainGraph(opened, scope)


class MainGraph:
    """The main graph of a file: which nodes read what, subgraphs included, and in which order."""

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
        """For each tensor that a node makes how many of these nodes lie on a way to it, at most."""
        depth: dict[str, int] = {}
        for node, at in self.index.items():
            level = max((depth.get(name, 0) for name in self.reads[at]), default=0)
            level += node in wanted
            depth.update((name, level) for name in node.proto.output if name)
        return depth

    def levels(self, wanted: Collection[Node]) -> dict[Node, int]:
        """For each of the nodes how many of them lie before it, at most, on a way to it."""
        depth = self.depths(wanted)
        return {
            node: max((depth.get(name, 0) for name in self.reads[at]), default=0)
            for node, at in self.index.items()
            if node in wanted
        }

    def needed(self, names: Iterable[str], have: Iterable[str] = ()) -> set[int]:
        """The nodes that it takes to make the tensors from those that are there."""
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
    """For each level's taps, in order, the tensors that the nodes behind it go on from.

    These are the taps themselves and what of the nodes before is read later; constants are not
    among them, they are made again.
    """
    everything = graph.needed(itertools.chain.from_iterable(taps))
    done: set[int] = set()
    for level in taps:
        done |= graph.needed(level)
        later = {name for at in everything - done for name in graph.reads[at]}
        made = {name for name in later if graph.made_by.get(name, -1) in done}
        yield frozenset(name for name in {*made, *level} if not graph.is_fixed(name))


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors of the graph around it that a node reads, those of its subgraphs among them."""
    yield from (name for name in node.input if name)
    for attr in node.attribute:
        inner = [*([attr.g] if attr.HasField("g") else []), *attr.graphs]
        for graph in with_subgraphs(inner):
            yield from (name for each in graph.node for name in each.input if name)
            yield from (value.name for value in graph.output)


def _user(
    graph: MainGraph, row: int, layer: Layer, pattern: Pattern, levels: dict[Node, int]
) -> _User | str:
    """What is known of a node and its weight; else why it is pruned without data."""
    if layer.scope.parent is not None:
        return IN_SUBGRAPH
    tap = layer.node.proto.input[1 - layer.position]
    if graph.is_fixed(tap):
        return FIXED_INPUT
    known, view = shapes(layer.found), view_of(layer.found)
    use = None
    if view is not None and not isinstance(known, Reason):
        use = use_of(layer.node, layer.position, known[0], pattern.m)
    if use is None or view is None:
        return NOT_READ
    target = Target(
        row=row,
        label=layer.node.label,
        tap=tap,
        level=levels[layer.node],
        reading=use.reading,
        bias=bias_of(graph, layer, use.layout),
    )
    return _User(target=target, layer=layer, view=view.then(*use.moves), layout=use.layout)


def _pieces(key: Key, users: Sequence[_User]) -> list[Piece] | None:
    """The parts of one array that its users see; None where some overlap without being one."""
    if len(users) == 1 or all(_is_plain(user, users[0]) for user in users):
        return [_piece(key, users)]
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
    return [_piece(key, members) for _, members in groups]


def _is_plain(user: _User, first: _User) -> bool:
    return not user.view.moves and user.layout == first.layout


def _piece(key: Key, users: Sequence[_User]) -> Piece:
    first = users[0]
    assert first.layer.found.tensor is not None
    return Piece(
        key=key,
        name=first.layer.found.constant,
        tensor=first.layer.found.tensor,
        view=first.view,
        layout=first.layout,
        users=tuple(user.target for user in users),
    )


def bias_of(graph: MainGraph, layer: Layer, layout: Layout) -> Bias | None:
    """The constant that is added to what the layer gives, and to nothing else."""
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


def _bias(graph: MainGraph, layer: Layer, node: Node, position: int, layout: Layout) -> Bias | None:
    scope, name = layer.scope, node.proto.input[position]
    if not scope.is_fixed(name):
        return None
    found = trace(scope, name)
    known = None if found.tensor is None else shapes(found)
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
    """Whether the constant has one number for each output, along the axis that outputs lie in."""
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
    """Whether the tensors on the way to a constant lead to this node alone."""
    way = [*places]
    for at, (scope, name) in enumerate(way):
        users = scope.users.get(name, ())
        if name in scope.outputs or len(users) != 1 or (at == 0 and users[0] is not node):
            return False
    scope, name = way[-1]
    key = storage_key(scope.constants[name])
    return sum(storage_key(tensor) == key for tensor in scope.constants.values()) == 1
