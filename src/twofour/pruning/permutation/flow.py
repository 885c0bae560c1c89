"""Values on their way through a graph: their shapes, and how operators mix what moves in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from twofour.graph.files import dtype_name, is_readable, shape_of
from twofour.graph.scope import Node, Scope
from twofour.pruning.permutation.channels import Ledger, Move, varying

Dim = int | str | None
"""A length, its name, or neither."""
Moves = tuple[Move, ...]
_LONGEST_AXIS = 1 << 22
"""Of a constant whose channels are told apart: a damaged file may well name more."""


class NotFollowed(Exception):  # noqa: N818 - no error: the channels stay where they are
    """Why no permutation gets through a node."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Value:
    """A tensor of the graph, as far as a permutation is concerned."""

    name: str
    shape: tuple[Dim, ...] | None
    """None: not even the rank is known."""
    moves: Moves = ()
    """Along no axis more than one of them; what none of them covers stays."""
    is_new: bool = False
    """A constant that nothing was said of yet."""
    stopped: str | None = None
    """Why nothing moves in it, where something might have."""

    @property
    def rank(self) -> int:
        """Number of axes; raises NotFollowed where it is not known."""
        return len(self.dims)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The shape; raises NotFollowed where it is not known."""
        if self.shape is None:
            why = "" if self.stopped is None else f" ({self.stopped})"
            raise NotFollowed(f"the shape of {self.name!r} is not known{why}")
        return self.shape

    @property
    def in_words(self) -> str:
        """Its name and, where it is known, why it does not move."""
        why = "" if self.stopped is None or self.moves else f" ({self.stopped})"
        return f"{self.name!r}, which does not move with it{why}"

    def with_moves(self, moves: Moves, stopped: str | None) -> Value:
        """The same tensor, and what moves in it, or why nothing does."""
        moves = tuple(move for move in moves if move.size > 1)
        return replace(self, moves=moves, is_new=False, stopped=None if moves else stopped)

    def along(self, axis: int) -> Move | None:
        """What moves along the axis."""
        return next((m for m in self.moves if m.shape[axis] > 1), None)


@dataclass(slots=True, kw_only=True, eq=False)
class Flow:
    """What is known so far while a graph is walked through."""

    scope: Scope
    ledger: Ledger
    shapes: Mapping[str, tuple[Dim, ...]]
    storage: Mapping[str, str]
    """The name under which the array of a constant is known: one for all that share bytes."""
    groups: Mapping[str, int]
    """Weights that only a grouped convolution reads, and its groups."""
    opset: int
    values: dict[str, Value] = field(default_factory=dict)

    def value(self, name: str) -> Value:
        """The tensor of that name; a constant has a channel for each place of every axis."""
        known = self.values.get(name)
        if known is not None:
            return known
        tensor = self.scope.constants.get(name)
        if tensor is None:
            stopped = f"graph input {name!r}" if name in self.scope.inputs else None
            return Value(name=name, shape=self.shapes.get(name), stopped=stopped)
        if not is_readable(dtype_name(tensor)) or max(shape_of(tensor), default=0) > _LONGEST_AXIS:
            stopped = f"{name!r} is stored as {dtype_name(tensor)} of shape {shape_of(tensor)}"
            return Value(name=name, shape=shape_of(tensor), stopped=stopped)
        stored = self.storage.get(name, name)
        if stored != name:
            return replace(self.value(stored), name=name)
        return Value(name=name, shape=shape_of(tensor), is_new=True)

    def inputs(self, node: Node) -> list[Value | None]:
        """The values a node reads; None for one it leaves out."""
        return [self.value(name) if name else None for name in node.proto.input]

    def settle(self, value: Value, like: Sequence[Move] = ()) -> Value:
        """Give a new constant its channels: along single axes, or together as `like` has them."""
        stored = self.storage.get(value.name, value.name)
        if not value.is_new:
            return value
        if stored in self.values:
            return replace(self.values[stored], name=value.name)
        dims = [int(length) for length in value.dims if isinstance(length, int)]
        joint = [axes for axes in map(varying, like) if len(axes) > 1]
        alone = [(a,) for a in range(len(dims)) if not any(a in axes for axes in joint)]
        moves: list[Move] = []
        groups = self.groups.get(value.name)
        if groups is not None:
            moves, alone = [self._each_group(stored, dims, groups)], [(0,)]
        for axes in (*alone, *joint):
            lengths = [length if a in axes else 1 for a, length in enumerate(dims)]
            if np.prod(lengths) > 1:
                moves.append(self.ledger.fresh(lengths, f"axes {list(axes)} of {value.name!r}"))
        settled = Value(name=stored, shape=tuple(dims), moves=tuple(moves))
        self.values[stored] = settled
        return replace(settled, name=value.name)

    def _each_group(self, name: str, dims: Sequence[int], groups: int) -> Move:
        """Input channels of a grouped convolution's weight: others in the rows of each group."""
        each = self.ledger.fresh((groups, 1, dims[1]), f"input channels of {name!r}")
        rows = np.broadcast_to(each, (groups, dims[0] // groups, dims[1]))
        return rows.reshape(dims[0], dims[1], *(1,) * (len(dims) - 2))

    def pin(self, value: Value | None, reason: str) -> None:
        """Nothing moves in the value."""
        if value is not None:
            for move in self.settle(value).moves:
                self.ledger.pin(move, reason)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operand:
    """A value laid out along the axes of an operation; 1 where it has no such axis."""

    value: Value
    dims: tuple[Dim, ...]
    places: tuple[int, ...]
    """Which axis of the operation each of its own axes is."""

    def lay(self, move: Move) -> Move:
        """The value's move along the axes of the operation."""
        shape = [1] * len(self.dims)
        for axis, place in enumerate(self.places):
            shape[place] *= move.shape[axis]
        along = [self.places[axis] for axis in varying(move)]
        if along != sorted(along):
            raise NotFollowed(f"{self.value.name!r} holds channels along axes in another order")
        if list(self.places) != sorted(self.places):
            move = move.transpose(np.argsort(self.places))
        return move.reshape(shape)


def operand(value: Value, places: Sequence[int], rank: int) -> Operand:
    """The value with its axes at `places` of an operation over `rank` axes."""
    dims: list[Dim] = [1] * rank
    for axis, place in enumerate(places):
        dims[place] = value.dims[axis]
    return Operand(value=value, dims=tuple(dims), places=tuple(places))


def aligned(values: Sequence[Value]) -> list[Operand]:
    """Values whose last axes are the same, as numpy broadcasts them."""
    rank = max(value.rank for value in values)
    return [operand(v, range(rank - v.rank, rank), rank) for v in values]


def combine(flow: Flow, operands: Sequence[Operand], node: Node) -> Moves:
    """What moves in a result of which each entry depends on the operands' entries at its place.

    What moves in one must move in all that differ along those axes, or stay within them.
    """
    laid = _laid(flow, operands)
    result: list[Move] = []
    waiting = [(at, move) for at, moves in enumerate(laid) for move in moves]
    while waiting:
        group = [waiting.pop(0)]
        axes = set(varying(group[0][1]))
        while True:
            more = [w for w in waiting if not axes.isdisjoint(varying(w[1]))]
            if not more:
                break
            waiting = [w for w in waiting if axes.isdisjoint(varying(w[1]))]
            group += more
            axes |= {axis for _, move in more for axis in varying(move)}
        result.append(_mixed(flow, operands, group, tuple(sorted(axes)), node))
    return tuple(move for move in result if not flow.ledger.is_pinned(move))


def passing(flow: Flow, moves: Moves, refused: Callable[[Move], str | None]) -> Moves:
    """Those that get through; the others stay, for the reason given.

    Raises NotFollowed where there is nothing left.
    """
    reasons = [refused(move) for move in moves]
    for move, reason in zip(moves, reasons, strict=True):
        if reason is not None:
            flow.ledger.pin(move, reason)
    left = tuple(m for m, reason in zip(moves, reasons, strict=True) if reason is None)
    first = next((reason for reason in reasons if reason is not None), None)
    if first is not None and not left:
        raise NotFollowed(first)
    return left


def _laid(flow: Flow, operands: Sequence[Operand]) -> list[list[Move]]:
    """Moves along the operation's axes; new constants take after what is there already."""
    known = [m for o in operands if not o.value.is_new for m in map(o.lay, o.value.moves)]
    shapes = {move.shape: move for move in known}  # few: a Sum may have thousands of operands
    laid = []
    for each in operands:
        like = []
        for move in shapes.values() if each.value.is_new else ():
            own = [move.shape[place] if each.dims[place] != 1 else 1 for place in each.places]
            if sum(length > 1 for length in own) == len(varying(move)) > 1:
                like.append(np.broadcast_to(np.int64(0), own))
        settled = flow.settle(each.value, like)
        laid.append([each.lay(move) for move in settled.moves])
    return laid


def _mixed(
    flow: Flow,
    operands: Sequence[Operand],
    group: Sequence[tuple[int, Move]],
    axes: tuple[int, ...],
    node: Node,
) -> Move:
    """One move of the result, from those of the operands that lie along the same axes."""
    lead = next((move for _, move in group if varying(move) == axes), None)
    if lead is None or len({at for at, _ in group}) < len(group):
        raise NotFollowed(f"{called(node)} mixes channels along several axes")
    moving = set()
    for at, move in group:
        if max(varying(move)) < max(axes):  # to tie the outer axis would tie the inner one up
            flow.ledger.pin(move, f"{called(node)} uses one value of it for many channels")
        else:
            flow.ledger.same(lead, move)
            moving.add(at)
    for at, each in enumerate(operands):
        fixed = [a for a in axes if each.dims[a] != 1]
        if at not in moving and fixed:
            reason = f"{called(node)} mixes it with {each.value.in_words}"
            flow.ledger.within(lead, fixed, reason)
    return lead


def reduced(flow: Flow, moves: Moves, axes: Sequence[int], reason: str) -> Moves:
    """What still moves once the axes are summed over, or made alike; lengths become 1."""
    left = []
    for move in moves:
        along = varying(move)
        if any(axis in axes for axis in along):
            flow.ledger.within(move, [a for a in along if a not in axes], reason)
        else:
            left.append(move)
    return tuple(left)


def called(node: Node) -> str:
    """Op and label of a node, for a reason."""
    return f"{node.op} node {node.label!r}"
