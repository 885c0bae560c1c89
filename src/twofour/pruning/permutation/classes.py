"""Which channels of an ONNX graph may change places, and why others stay where they are.

The graph is walked through once, from inputs to outputs. Constants of the main graph have channels,
inputs have none; what operators demand of them is in `rules`. Only what is proven safe moves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
from numpy.typing import NDArray

from twofour.errors import BadInputError, naming
from twofour.graph.files import subgraphs, with_subgraphs
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import Node, is_standard, scopes
from twofour.graph.shapes import with_shapes
from twofour.pruning.permutation.channels import Ledger, Move, Solved, ranks
from twofour.pruning.permutation.flow import Dim, Flow, NotFollowed, called
from twofour.pruning.permutation.rules import outputs_of
from twofour.pruning.permutation.storage import first_names, grouped_weights, overlapping
from twofour.records.weights import Pattern

_REFUSED = (NotFollowed, BadInputError, ArithmeticError, LookupError, TypeError, ValueError)
_READ_AS_NUMBERS = (
    *("Expand", "Pad", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Tile", "Unsqueeze"),
    *("CumSum", "ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"),
    "Upsample",
)
"""Ops whose inputs behind the first are lengths and axes."""
_WITHOUT_INFERENCE = ("GroupNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
"""Ops whose result is as large as what they read, which onnx itself does not work out."""
_IN_A_SUBGRAPH = "it lies in a subgraph, where nothing moves"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Where in a constant the channels of classes stand, along some of its axes."""

    shape: tuple[int, ...]
    """1 along the axes that stay."""
    group: NDArray[np.int64]
    """Class of each place, -1 for one that stays; of `shape`."""
    slot: NDArray[np.int64]
    """Which channel of its class stands there."""
    rank: NDArray[np.int64]
    """Which of the places of that channel it is, in C order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A layer's weight whose groups of M lie along an axis of a constant."""

    layer: str
    constant: str
    axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelClass:
    """Channels any order of which gives the same model."""

    key: str
    """The same for the same graph."""
    size: int
    readers: tuple[Reader, ...]
    """Weights that sum over these channels: to them the order matters."""
    constants: tuple[str, ...]
    """All that move with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """A weight whose input channels stay where they are, or some of them."""

    layer: str
    constant: str | None
    channels: int
    """That stay; 0 where their number is not known."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Classes:
    """What of a graph may be permuted."""

    classes: tuple[ChannelClass, ...]
    fixed: tuple[Fixed, ...]
    placements: Mapping[str, tuple[Placement, ...]]
    """By name of the constant, those that have a channel of a class."""
    tensors: Mapping[str, onnx.TensorProto]
    """Of the opened model, not copies."""


def find_classes(opened: OpenedModel, pattern: Pattern) -> Classes:
    """The classes of channels that some weight sums over, and the weights that are left.

    Raises BadInputError for a damaged graph.
    """
    with naming(opened.path):
        walk = _Walk(opened)
        walk.run()
        return walk.found(pattern)


class _Walk:
    """One way through the main graph."""

    def __init__(self, opened: OpenedModel) -> None:
        self.opened = opened
        self.scope = next(scopes(opened.proto, opened.path))
        storage = first_names(self.scope)
        self.flow = Flow(
            scope=self.scope,
            ledger=Ledger(),
            shapes=_shapes(opened.proto),
            storage=storage,
            groups=grouped_weights(self.scope, storage),
            opset=opened.opset,
        )

    def run(self) -> None:
        for node in self.scope.nodes:
            if node.proto.op_type != "Constant" or not is_standard(node.proto):
                self._visit(node)
        for name in self.scope.outputs:
            self.flow.pin(self.flow.value(name), f"graph output {name!r}")
        for name in overlapping(self.opened, self.scope):
            self.flow.pin(self.flow.value(name), f"{name!r} shares bytes with another constant")

    def _visit(self, node: Node) -> None:
        moves: Sequence[tuple[Move, ...]] = ()
        before = (self.flow.value(name).stopped for name in node.proto.input if name)
        stopped = next((why for why in before if why is not None), None)
        try:
            if any(True for _ in subgraphs(node.proto)):
                raise NotFollowed(f"{called(node)} has subgraphs")
            moves = outputs_of(node, self.flow)
            if node.proto.op_type in _READ_AS_NUMBERS:
                self._pin_inputs(node.proto.input[1:], f"{called(node)} reads it as numbers")
        except _REFUSED as error:
            stopped = str(error) if isinstance(error, NotFollowed) else f"{called(node)}: {error}"
            self._pin_inputs([*node.proto.input, *_captured(node.proto)], stopped)
            moves = ()
        for at, name in enumerate(node.proto.output):
            if name:
                value = self.flow.value(name)
                kept = moves[at] if at < len(moves) else ()
                self.flow.values[name] = value.with_moves(kept, stopped)

    def _pin_inputs(self, names: Sequence[str], reason: str) -> None:
        for name in filter(None, names):
            if self.scope.owner(name) is not None:
                self.flow.pin(self.flow.value(name), reason)

    def found(self, pattern: Pattern) -> Classes:
        solved = self.flow.ledger.solve()
        moved = {
            name: self.flow.values[name].moves
            for name in self.scope.constants
            if name in self.flow.values
        }
        names = {id(tensor): name for name, tensor in self.scope.constants.items()}
        weights = self.opened.weights(pattern)
        readers, fixed = [], []
        for weight, tensor in zip(weights.weights, weights.tensors, strict=True):
            name = names.get(id(tensor)) if tensor is not None else None
            name = self.flow.storage.get(name, name) if name else None
            if weight.axis is None:
                reason = weight.reasons[0].message if weight.reasons else "it has no axis of groups"
                fixed.append(Fixed(layer=weight.layer, constant=name, channels=0, reason=reason))
            elif name is None:
                fixed.append(
                    Fixed(layer=weight.layer, constant=None, channels=0, reason=_IN_A_SUBGRAPH)
                )
            else:
                readers.append(Reader(layer=weight.layer, constant=name, axis=weight.axis))
        return _Result(solved, moved, self.scope.constants).classes(readers, fixed)


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """The channels that a reader sums over."""

    reader: Reader
    roots: NDArray[np.int64]


class _Result:
    """Classes, from what the walk left behind."""

    def __init__(
        self,
        solved: Solved,
        moved: Mapping[str, tuple[Move, ...]],
        tensors: Mapping[str, onnx.TensorProto],
    ) -> None:
        self.solved, self.moved, self.tensors = solved, moved, tensors

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        """Number of channels in each cell."""
        return np.bincount(self.solved.cell)

    def classes(self, readers: Sequence[Reader], fixed: Sequence[Fixed]) -> Classes:
        axes = [_Axis(reader=reader, roots=self._along(reader)) for reader in readers]
        cells: dict[int, list[Reader]] = {}
        for axis in axes:
            for cell in np.unique(self.solved.cell[axis.roots]):
                if self._sizes[cell] > 1:
                    cells.setdefault(int(cell), []).append(axis.reader)
        placements = self._placements(list(cells))
        made = [
            self._class(number, cell, cells[cell], placements) for number, cell in enumerate(cells)
        ]
        return Classes(
            classes=tuple(made),
            fixed=(*fixed, *self._left(axes)),
            placements=placements,
            tensors={name: self.tensors[name] for name in placements},
        )

    def _along(self, reader: Reader) -> NDArray[np.int64]:
        """Roots of all channels along the reader's axis."""
        found = [m for m in self.moved.get(reader.constant, ()) if m.shape[reader.axis] > 1]
        empty: NDArray[np.int64] = np.zeros(0, np.int64)
        return np.unique(np.concatenate([empty, *(self.solved.root[m].reshape(-1) for m in found)]))

    def _left(self, axes: Sequence[_Axis]) -> Iterator[Fixed]:
        for axis in axes:
            alone = axis.roots[self._sizes[self.solved.cell[axis.roots]] == 1]
            if len(alone):
                why = self.solved.why[alone]
                first = int(why[why >= 0].min(initial=len(self.solved.reasons)))
                known = first < len(self.solved.reasons)
                yield Fixed(
                    layer=axis.reader.layer,
                    constant=axis.reader.constant,
                    channels=len(alone),
                    reason=self.solved.reasons[first]
                    if known
                    else "it is the only one of its kind",
                )

    def _placements(self, cells: Sequence[int]) -> dict[str, tuple[Placement, ...]]:
        number = np.full(len(self._sizes), -1, np.int64)
        number[list(cells)] = np.arange(len(cells))
        slots = np.zeros(len(self.solved.cell), np.int64)
        for cell in cells:
            members = np.flatnonzero(self.solved.cell == cell)
            slots[members] = np.arange(len(members))
        placed = {}
        for name, moves in self.moved.items():
            found = []
            for move in moves:
                roots = self.solved.root[move]
                group = number[self.solved.cell[roots]]
                if (group >= 0).any():
                    rank = ranks(roots)
                    found.append(
                        Placement(
                            shape=move.shape,
                            group=group,
                            slot=slots[roots],
                            rank=np.zeros(move.shape, np.int64) if rank is None else rank,
                        )
                    )
            if found:
                placed[name] = tuple(found)
        return placed

    def _class(
        self,
        number: int,
        cell: int,
        readers: Sequence[Reader],
        placements: Mapping[str, tuple[Placement, ...]],
    ) -> ChannelClass:
        digest, constants = hashlib.sha256(), []
        for name, placed in sorted(placements.items()):
            for at, placement in enumerate(placed):
                places = np.flatnonzero(placement.group == number)
                if len(places):
                    constants.append(name)
                    slots = placement.slot.reshape(-1)[places]
                    digest.update(f"{name} {at} {placement.shape}".encode())
                    digest.update(places.tobytes() + slots.tobytes())
        return ChannelClass(
            key=digest.hexdigest()[:16],
            size=int(self._sizes[cell]),
            readers=tuple(readers),
            constants=tuple(dict.fromkeys(constants)),
        )


def _shapes(model: onnx.ModelProto) -> dict[str, tuple[Dim, ...]]:
    """Shapes of the main graph's values: declared, and what follows from them."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    for node in plain.graph.node:
        if node.op_type in _WITHOUT_INFERENCE and is_standard(node):
            made = onnx.helper.make_node("Identity", node.input[:1], node.output[:1])
            node.CopyFrom(made)
    constants = {tensor.name for tensor in plain.graph.initializer}
    for at, output in reversed(list(enumerate(plain.graph.output))):
        if output.name in constants:  # what an output does not declare hides what is stored
            del plain.graph.output[at]
    graph = with_shapes(plain, data_prop=True).graph
    return {
        value.name: tuple(
            d.dim_value if d.HasField("dim_value") else (d.dim_param or None)
            for d in value.type.tensor_type.shape.dim
        )
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }


def _captured(node: onnx.NodeProto) -> Iterator[str]:
    """Names that subgraphs of the node may read from around it."""
    for graph in with_subgraphs(inner for _, inner in subgraphs(node)):
        for each in graph.node:
            yield from each.input
        if isinstance(graph, onnx.GraphProto):
            yield from (value.name for value in graph.output)
