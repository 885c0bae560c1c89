"""The layers of an ONNX graph in the order of calibration: their inputs, weights and biases.

Layers are taken level by level: those of one level do not depend on each other, so that one run of
the nodes between two levels gives the inputs of all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import onnx

from twofour.calibrate.input_rows import InputReading, MatrixUse, matrix_use
from twofour.calibrate.storage import StoredView, view_of
from twofour.graph.files import is_external, storage_key, subgraphs, with_subgraphs
from twofour.graph.layers import Layer
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import Node, Scope, is_standard, number, scopes
from twofour.graph.trace import Trace, trace, traced_shapes
from twofour.pruning.matrices import Layout, to_stack
from twofour.pruning.selection import Choice
from twofour.records import frozen
from twofour.records.weights import Pattern, Reason

Key = tuple[object, ...]
"""What `storage_key` gives for a stored array."""
IN_SUBGRAPH = "it is in a subgraph, whose inputs cannot be read: pruned by magnitude"
NOT_READ = "how its inputs become rows of a matrix is not known: pruned by magnitude"
FIXED_INPUT = "its input is a constant too: pruned by magnitude"


@frozen
class StoredConstant:
    """A constant in the file, and how a node sees it."""

    name: str
    """Its name in the main graph."""
    tensor: onnx.TensorProto
    view: StoredView
    shape: tuple[int, ...]
    """The shape that the node reads."""

    @property
    def key(self) -> Key:
        """Key of the stored array."""
        return storage_key(self.tensor)


@frozen
class Bias:
    """The constant that is added to one layer's output, and may be corrected."""

    node: int
    """Index of the node that adds it."""
    position: int
    """Which input of that node."""
    constant: StoredConstant
    factor: float = 1.0
    """A change of the output by 1 is a change of the bias by this."""


@frozen
class WeightUser:
    """One node whose weight is to be pruned with data."""

    row: int
    """Index of its weight among the graph's."""
    label: str
    tap: str
    """The tensor that is multiplied by the weight."""
    level: int
    weight: StoredConstant
    layout: Layout
    reading: InputReading
    bias: Bias | None
    added: str | None
    """The tensor that is added to its output, the other branch of a residual block; None: there is
    none, or not one that is known when the layer is pruned."""


@frozen
class WeightPart:
    """A stored array, or the part of one that some nodes use as the same matrices."""

    users: tuple[WeightUser, ...]

    @property
    def weight(self) -> StoredConstant:
        """The array, as the first user sees it."""
        return self.users[0].weight

    @property
    def layout(self) -> Layout:
        """How it lies in a stack of matrices."""
        return self.users[0].layout

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.layout.shape)

    @property
    def levels(self) -> set[int]:
        """Levels of its users."""
        return {user.level for user in self.users}


@frozen
class CalibrationPlan:
    """The weights of a graph that are pruned with data, in order; the others, and why not."""

    parts: tuple[WeightPart, ...]
    without: dict[int, str]
    """Rows whose arrays are pruned without data, each with the note on it."""
    behind: frozenset[str]
    """Tensors that depend on a layer that is to be pruned: the dense model has other values."""


class _NoDataError(Exception):
    """Why an array is pruned without data."""


def plan_calibration(
    graph: MainGraph, pattern: Pattern, chosen: Sequence[Choice], *, changes_graph: bool = True
) -> CalibrationPlan:
    """The plan for the weights that `choose` has chosen.

    Without `changes_graph` a bias that lies in the graph itself stays as it is.
    """
    layers = graph.opened.weights().layers
    wanted = [row for row, (_, pruned, _) in enumerate(chosen) if pruned]
    depths = graph.depths({layers[row].node for row in wanted})
    parts: list[WeightPart] = []
    without: dict[int, str] = {}
    for rows in _rows_by_array(layers, wanted):
        try:
            users = [_user(graph, row, layers[row], pattern.m, depths) for row in rows]
            if not changes_graph:
                users = list(map(_without_inline_bias, users))
            parts += _parts(users)
        except _NoDataError as why_not:
            without.update(dict.fromkeys(rows, str(why_not)))
    # the inputs of the model and what the first layers read have depth 0: both models agree there
    behind = frozenset(name for name, depth in depths.items() if depth)
    return CalibrationPlan(parts=tuple(parts), without=without, behind=behind)


def _rows_by_array(layers: Sequence[Layer], wanted: Iterable[int]) -> list[list[int]]:
    """The rows whose weights are one stored array, together."""
    arrays: dict[Key, list[int]] = defaultdict(list)
    for row in wanted:
        tensor = layers[row].origin.tensor
        assert tensor is not None, "chosen for its array"
        arrays[storage_key(tensor)].append(row)
    return [*arrays.values()]


def _without_inline_bias(user: WeightUser) -> WeightUser:
    """The user without a bias that is no array in a file of weights."""
    if user.bias is None or is_external(user.bias.constant.tensor):
        return user
    return replace(user, bias=None)


def main_graph(opened: OpenedModel) -> MainGraph:
    """The main graph, whose nodes are those that the graph's weights refer to."""
    layers = opened.weights().layers
    # a scope that is opened again has other nodes, and nodes are compared as objects
    scope = layers[0].scope if layers else next(scopes(opened.proto, opened.path))
    while scope.parent is not None:
        scope = scope.parent
    return MainGraph(opened, scope)


class MainGraph:
    """The main graph of a file: the tensors that each node reads, those of its subgraphs too."""

    def __init__(self, opened: OpenedModel, scope: Scope) -> None:
        self.opened = opened
        self.scope = scope
        self.reads = [tuple(dict.fromkeys(_reads(node.proto))) for node in scope.nodes]
        self.index = {node: at for at, node in enumerate(scope.nodes)}
        self.made_by = {name: self.index[node] for name, node in scope.producers.items()}

    def depths(self, wanted: Collection[Node]) -> dict[str, int]:
        """For each tensor the largest number of `wanted` nodes on a path to it."""
        depth: dict[str, int] = {}
        for node in self.index:
            level = _level(self, node, depth)
            if node in wanted:
                level += 1
            depth.update((name, level) for name in node.proto.output if name)
        return depth

    def needed(self, names: Iterable[str], have: Iterable[str] = ()) -> set[int]:
        """The nodes that compute the tensors from those that are there."""
        there = {*have}
        waiting = [*names]
        nodes: set[int] = set()
        # for x -> A -> B -> C with the output of A there, the output of C takes B and C
        while waiting:
            name = waiting.pop()
            at = self.made_by.get(name)
            if at is not None and at not in nodes and name not in there:
                nodes.add(at)
                waiting += self.reads[at]
        return nodes


def borders(graph: MainGraph, taps: Sequence[Collection[str]]) -> Iterator[frozenset[str]]:
    """For each level's taps, in order, the tensors that the nodes behind it start from.

    These are the taps themselves and outputs of the nodes before that are read later; constants
    are not among them, they are computed again.
    """
    # In x -> A -> B -> C and A -> D -> C, with the taps [x], [B's input], [C's input]: the border
    # behind level 1 has B's input and A's output, which D will read.
    levels = [graph.needed(level) for level in taps]
    everything = set[int]().union(*levels)
    before: set[int] = set()
    for tapped, nodes in zip(taps, levels, strict=True):
        before |= nodes
        border = {*tapped}
        for at in everything - before:
            border.update(name for name in graph.reads[at] if graph.made_by.get(name) in before)
        yield frozenset(name for name in border if not graph.scope.is_fixed(name))


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """The tensors of the graph that a node reads, also in its subgraphs."""
    yield from filter(None, node.input)
    for graph in with_subgraphs(inner for _, inner in subgraphs(node)):
        for each in graph.node:
            yield from filter(None, each.input)
        yield from (value.name for value in graph.output)


def _user(graph: MainGraph, row: int, layer: Layer, m: int, depths: dict[str, int]) -> WeightUser:
    """A node and its weight; raises _NoDataError."""
    if layer.scope.parent is not None:
        raise _NoDataError(IN_SUBGRAPH)
    tap = layer.node.proto.input[1 - layer.position]
    if graph.scope.is_fixed(tap):
        raise _NoDataError(FIXED_INPUT)
    weight = _stored(layer.origin)
    if weight is None:
        raise _NoDataError(NOT_READ)
    use = matrix_use(layer.node, layer.position, weight.shape, m)
    if use is None:
        raise _NoDataError(NOT_READ)
    level = _level(graph, layer.node, depths)
    added = _added(graph, layer, use)
    if added is not None and depths.get(added, 0) > level:
        added = None
    return WeightUser(
        row=row,
        label=layer.node.label,
        tap=tap,
        level=level,
        weight=replace(weight, view=weight.view.then(*use.moves)),
        layout=use.layout,
        reading=use.reading,
        bias=_bias(graph, layer, use.layout),
        added=added,
    )


def _level(graph: MainGraph, node: Node, depths: dict[str, int]) -> int:
    """The largest number of wanted nodes on a path to the node."""
    # In x -> A -> B -> D and x -> C -> D, all wanted: A and C have level 0, B 1 and D 2, as its
    # longest path is A, B. So one run shows the inputs of A and C; D waits until B is pruned.
    return max((depths.get(name, 0) for name in graph.reads[graph.index[node]]), default=0)


def _stored(way: Trace) -> StoredConstant | None:
    """The constant at the end of a trace; None: not to be followed."""
    if way.tensor is None:
        return None
    shapes = traced_shapes(way)
    if isinstance(shapes, Reason):
        return None
    view = view_of(way, shapes)
    if view is None:
        return None
    return StoredConstant(name=way.constant, tensor=way.tensor, view=view, shape=shapes[0])


def _parts(users: Sequence[WeightUser]) -> list[WeightPart]:
    """The parts of one array by their users; of parts that overlap, the last one counts."""
    # Two MatMuls that read one array as it is are one part: a tied weight, with the inputs of both.
    # Two MatMuls, each behind a Slice of one (8, 16) array, see columns 0:8 and 8:16: two parts.
    is_moved = any(user.weight.view.moves for user in users)
    is_alike = len({user.layout for user in users}) == 1 and not is_moved
    if len(users) == 1 or is_alike:
        return [WeightPart(users=tuple(users))]
    groups: dict[bytes, list[WeightUser]] = defaultdict(list)
    for user in users:
        places = to_stack(user.weight.view.places(), user.layout)
        groups[places.tobytes()].append(user)
    return [WeightPart(users=tuple(members)) for members in groups.values()]


def _added(graph: MainGraph, layer: Layer, use: MatrixUse) -> str | None:
    """The tensor that is added to the layer's output with its bias, where nothing else uses it.

    None: there is none, or the layer is not one matrix whose inputs are the last axis.
    """
    if len(use.layout.shape) != 2 or use.reading != InputReading(layout=use.reading.layout):
        return None
    # MatMul -> Add (its bias) -> Reshape -> Add (another branch): the second Add is looked for
    scope = layer.scope
    output = layer.node.proto.output[0]
    while output not in scope.outputs and len(users := scope.users.get(output, [])) == 1:
        user = users[0]
        if user not in graph.index or user.op not in ("Add", "Cast", "Identity", "Reshape"):
            break
        other = next((str(name) for name in user.proto.input if name != output), None)
        if user.op == "Add" and (other is None or not scope.is_fixed(other)):
            return other  # None: it is added to itself
        output = user.proto.output[0]
    return None


def _bias(graph: MainGraph, layer: Layer, layout: Layout) -> Bias | None:
    """The constant that is added to the layer's output; None for one that others use too."""
    place = _bias_place(graph, layer)
    if place is None:
        return None
    node, position = place
    name = node.proto.input[position]
    if not name or not layer.scope.is_fixed(name):
        return None
    way = trace(layer.scope, name)
    constant = _stored(way)
    factor = _bias_factor(layer)
    if constant is None or not factor or way.looked_up is not None or not _is_alone(way):
        return None
    if not _fits(layer, constant.shape, layout):
        return None
    return Bias(
        node=graph.index[node],
        position=position,
        constant=constant,
        factor=factor,
    )


def _bias_place(graph: MainGraph, layer: Layer) -> tuple[Node, int] | None:
    """The node that adds a bias, and which input of it that is; None: there is none."""
    if layer.node.op in ("Conv", "ConvTranspose", "Gemm"):
        return (layer.node, 2) if len(layer.node.proto.input) > 2 else None
    output = layer.node.proto.output[0]
    users = layer.scope.users.get(output, ())
    if output in layer.scope.outputs or len(users) != 1:
        return None
    add = users[0]
    if add.proto.op_type != "Add" or not is_standard(add.proto) or add not in graph.index:
        return None
    others = [at for at, name in enumerate(add.proto.input) if name != output]
    return (add, others[0]) if len(others) == 1 else None


def _bias_factor(layer: Layer) -> float:
    """What a change of the layer's output by 1 is in its bias; 0: the bias does nothing."""
    # The change is that of A B: Gemm gives alpha A B + beta C, so alpha 0.5 and beta 2 make it 0.25
    if layer.node.op != "Gemm":
        return 1.0
    alpha = number(layer.node.proto, "alpha", 1.0)
    beta = number(layer.node.proto, "beta", 1.0)
    return alpha / beta if beta else 0.0


def _fits(layer: Layer, shape: tuple[int, ...], layout: Layout) -> bool:
    """Whether the constant has one number for each output, along the outputs' axis."""
    parts, rows, _ = layout.stack_shape
    if layout.per_tap:  # the parts of a wide convolution are its groups times the kernel's taps
        parts //= layout.taps
    if math.prod(shape) != parts * rows or layer.node.op == "Einsum":
        return False
    if layer.node.op in ("Conv", "ConvTranspose"):
        return len(shape) == 1
    # 3 experts with 6 outputs each, their weight on the right: the bias is (3, 1, 6), as is an
    # (1, 3, 1, 6); of one matrix on the right it is (6,), read as (1, 6)
    outputs = (1, rows) if layer.position == 1 else (rows, 1)
    wanted = (*layout.shape[:-2], *outputs)
    padded = (*(1,) * (len(wanted) - len(shape)), *shape)
    return padded[-len(wanted) :] == wanted


def _is_alone(way: Trace) -> bool:
    """Whether the tensors on the path from a constant are read by one node each."""
    for scope, name in way.places:
        if name in scope.outputs or len(scope.users.get(name, ())) != 1:
            return False
    # two initializers may be one array: names of one place in a data file
    scope, name = way.places[-1]
    key = storage_key(scope.constants[name])
    return sum(storage_key(tensor) == key for tensor in scope.constants.values()) == 1
