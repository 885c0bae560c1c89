"""What moves behind operators that only lay values out anew: reshape, transpose, concat, cuts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from twofour.graph.files import read_tensor, shape_of
from twofour.graph.scope import Node, attribute, integer, integers
from twofour.pruning.permutation.channels import Move, varying
from twofour.pruning.permutation.flow import (
    Dim,
    Flow,
    Moves,
    NotFollowed,
    Value,
    called,
    combine,
    operand,
    passing,
)

_LARGEST = 1 << 24
"""Places of a move that is spelled out; more would take memory for what nobody does."""
_SCALES_FIRST = 10
"""The opset in which Resize was new, and had its scales where later ones have a region."""
_Block = tuple[range, range]
Outputs = Sequence[Moves]


def axis_of(node: Node, value: Value, default: int, name: str = "axis") -> int:
    """An axis attribute, counted from the front."""
    axis = integer(node.proto, name, default)
    if not -value.rank <= axis < max(1, value.rank):
        raise NotFollowed(f"{called(node)} names axis {axis} of {value.rank}")
    return axis % max(1, value.rank)


def out_shape(flow: Flow, node: Node, at: int = 0) -> tuple[Dim, ...]:
    """The shape of an output; raises NotFollowed where it is not known."""
    return Value(name=node.proto.output[at], shape=flow.shapes.get(node.proto.output[at])).dims


def first(flow: Flow, node: Node) -> Value:
    """The first input, its channels settled."""
    return flow.settle(flow.value(node.proto.input[0]))


def reshape(node: Node, flow: Flow) -> Outputs:
    """Reshape, Flatten, Squeeze and Unsqueeze: by lengths before and after."""
    value = first(flow, node)
    if not value.moves:
        return [()]
    blocks = _blocks(value.dims, out_shape(flow, node))
    return [_reshaped(flow, node, value, blocks)]


def _reshaped(flow: Flow, node: Node, value: Value, blocks: Sequence[_Block]) -> Moves:
    left = list(value.moves)
    for source, _ in blocks:
        inside = sorted(
            (m for m in left if any(axis in source for axis in varying(m))),
            key=lambda move: max(varying(move)),
        )
        for outer in inside[:-1]:  # the innermost keeps its freedom
            flow.ledger.pin(outer, f"{called(node)} merges its axis with another that moves")
            left = [m for m in left if m is not outer]
    after = out_shape(flow, node)
    moves = []
    for move in left:
        tied = _tied_parts(flow, move, value.dims, (after, blocks))
        moves.append(_one_reshaped(node, move, value.dims, after, blocks) if tied is None else tied)
    return tuple(moves)


def _tied_parts(
    flow: Flow,
    move: Move,
    before: tuple[Dim, ...],
    target: tuple[tuple[Dim, ...], Sequence[_Block]],
) -> Move | None:
    """Channels along the last axis of a block of unknown size, as heads beside a batch are.

    Cut into equal parts, these must all move alike; put together, they do so as they are. None for
    what is not laid out so.
    """
    after, blocks = target
    inside = [b for b in blocks if not set(varying(move)).isdisjoint(b[0])]
    if len(inside) != 1 or not inside[0][1] or varying(move) != (inside[0][0][-1],):
        return None
    at, to = inside[0][0][-1], inside[0][1][-1]
    length, wanted = move.shape[at], after[to]
    known = all(isinstance(n, int) for n in [before[axis] for axis in inside[0][0]])
    if known or not isinstance(wanted, int) or wanted < 2:
        return None
    channels = move.reshape(-1)
    if length % wanted == 0:
        parts = channels.reshape(-1, wanted)
        flow.ledger.same(parts, parts[:1])
        channels = parts[0]
    elif wanted % length == 0:
        channels = np.tile(channels, wanted // length)
    else:
        return None
    return channels.reshape([wanted if axis == to else 1 for axis in range(len(after))])


def _one_reshaped(
    node: Node,
    move: Move,
    before: tuple[Dim, ...],
    after: tuple[Dim, ...],
    blocks: Sequence[_Block],
) -> Move:
    """C order is kept: the move is spelled out over every block that it varies in."""
    along = set(varying(move))
    full, lengths = [1] * len(before), [1] * len(after)
    for source, target in blocks:
        if along.isdisjoint(source):
            continue
        known = [before[a] for a in source] + [after[a] for a in target]
        if not all(isinstance(length, int) for length in known):
            raise NotFollowed(f"{called(node)} merges channels with axes of unknown length")
        for shape, axes, dims in ((full, source, before), (lengths, target, after)):
            for axis in axes:
                length = dims[axis]
                assert isinstance(length, int)
                shape[axis] = length
    if prod(full) != prod(lengths) or prod(full) > _LARGEST:
        raise NotFollowed(f"{called(node)} takes the axis of the channels apart")
    return _squeezed(np.broadcast_to(move, full).reshape(lengths))


def _squeezed(move: Move) -> Move:
    """1 long along every axis along which nothing differs."""
    for axis, length in enumerate(move.shape):
        start: Move = move.take([0], axis)
        if length > 1 and bool((move == start).all()):
            move = start
    return move


def _blocks(before: tuple[Dim, ...], after: tuple[Dim, ...]) -> list[_Block]:
    """Runs of axes that hold the same values before and after a reshape, as small as can be told.

    Lengths that are named are taken to be equal where the names are; what cannot be matched from
    either end is one block.
    """
    found: list[_Block] = []
    b, a = len(before), len(after)
    while (run := _run(before[:b], after[:a], last=True)) is not None:
        found.append((range(b - run[0], b), range(a - run[1], a)))
        b, a = b - run[0], a - run[1]
    start_b, start_a = 0, 0
    while (run := _run(before[start_b:b], after[start_a:a], last=False)) is not None:
        found.append((range(start_b, start_b + run[0]), range(start_a, start_a + run[1])))
        start_b, start_a = start_b + run[0], start_a + run[1]
    if start_b < b or start_a < a:
        found.append((range(start_b, b), range(start_a, a)))
    return found


def _run(before: Sequence[Dim], after: Sequence[Dim], *, last: bool) -> tuple[int, int] | None:
    """How many axes at the end (else the start) make the smallest block of equal size."""
    if last:
        before, after = before[::-1], after[::-1]
    if before and after and isinstance(before[0], str) and before[0] == after[0]:
        return 1, 1
    sizes, taken = [1, 1], [0, 0]
    sides = (before, after)
    while not all(taken) or sizes[0] != sizes[1]:
        side = int(sizes[1] < sizes[0]) if all(taken) else int(bool(taken[0]))
        if taken[side] == len(sides[side]):
            return None
        length = sides[side][taken[side]]
        if not isinstance(length, int) or length == 0:
            return None
        sizes[side] *= length
        taken[side] += 1
    return taken[0], taken[1]


def transpose(node: Node, flow: Flow) -> Outputs:
    """Axes in another order."""
    value = first(flow, node)
    given = next((tuple(a.ints) for a in node.proto.attribute if a.name == "perm"), ())
    perm = given or tuple(reversed(range(value.rank)))
    if sorted(perm) != list(range(value.rank)):
        raise NotFollowed(f"{called(node)} has no possible perm")
    return [tuple(_transposed(flow, move, perm) for move in value.moves)]


def _transposed(flow: Flow, move: Move, perm: Sequence[int]) -> Move:
    turned: Move = move.transpose(perm)
    kept = [axis for axis in perm if move.shape[axis] > 1]
    if kept != sorted(kept):
        at = np.arange(move.size).reshape(move.shape).transpose(perm)
        flow.ledger.copied(move, at, turned, None)
    return turned


def expand(node: Node, flow: Flow) -> Outputs:
    """Expand and Tile: repeated along axes where nothing moves."""
    value, after = first(flow, node), out_shape(flow, node)
    added = len(after) - value.rank

    def refused(move: Move) -> str | None:
        kept = all(after[axis + added] == move.shape[axis] for axis in varying(move))
        return None if kept else f"{called(node)} repeats the channels"

    left = passing(flow, value.moves, refused)
    return [tuple(move.reshape((1,) * added + move.shape) for move in left)]


def concat(node: Node, flow: Flow) -> Outputs:
    """Channels of one input behind those of the other; what does not move stays in its place."""
    values = [flow.value(name) for name in node.proto.input]
    rank = max(value.rank for value in values)
    axis = axis_of(node, values[0], 0)
    known = [m for v in values if not v.is_new for m in v.moves]
    joint = [np.broadcast_to(np.int64(0), m.shape) for m in known if m.shape[axis] == 1]
    values = [flow.settle(value, joint) for value in values]
    if not any(value.moves for value in values):
        return [()]
    lengths = [value.dims[axis] for value in values]
    along = [move for value in values if (move := value.along(axis)) is not None]
    across = [
        Value(name=v.name, shape=v.shape, moves=tuple(m for m in v.moves if m.shape[axis] == 1))
        for v in values
    ]
    others = combine(flow, [operand(v, range(rank), rank) for v in across], node)
    if not along:
        return [others]
    axes = sorted({a for move in along for a in varying(move)})
    if any(a in axes for move in others for a in varying(move)):
        raise NotFollowed(f"{called(node)} joins channels that lie along several axes")
    return [(*others, _joined(flow, node, values, axis, (axes, lengths)))]


def _joined(
    flow: Flow,
    node: Node,
    values: Sequence[Value],
    axis: int,
    along: tuple[Sequence[int], Sequence[Dim]],
) -> Move:
    axes, lengths = along
    sizes = {a: max(m.shape[a] for v in values for m in v.moves) for a in axes if a != axis}
    pieces: list[tuple[Move, Move]] = []
    for value, length in zip(values, lengths, strict=True):
        if not isinstance(length, int):
            raise NotFollowed(f"{called(node)} joins channels with an axis of unknown length")
        shape = [sizes.get(a, length if a == axis else 1) for a in range(value.rank)]
        move = value.along(axis)
        if move is None:
            move = flow.ledger.fresh(shape, f"{value.name!r} at {called(node)}")
            reason = f"{called(node)} joins it with {value.in_words}"
            flow.ledger.pin(move, f"{value.name!r} does not move")
            for a in sizes:
                for other in (m for v in values if (m := v.along(axis)) is not None):
                    if other.shape[a] > 1 and value.dims[a] != 1:
                        flow.ledger.within(other, [a], reason)
        pieces.append((move, np.broadcast_to(move, shape)))
    whole: Move = np.concatenate([piece for _, piece in pieces], axis)
    places, start = np.arange(whole.size).reshape(whole.shape), 0
    for move, piece in pieces:
        at = places.take(range(start, start + piece.shape[axis]), axis)
        origin = np.broadcast_to(np.arange(move.size).reshape(move.shape), piece.shape)
        flow.ledger.copied(move, origin, whole, at)
        start += piece.shape[axis]
    return whole


def split(node: Node, flow: Flow) -> Outputs:
    """Each output has its part of the channels."""
    value = first(flow, node)
    axis, start, outputs = axis_of(node, value, 0), 0, []
    for at in range(len(node.proto.output)):
        length: Dim = None
        if value.along(axis) is not None:
            length = out_shape(flow, node, at)[axis]
            if not isinstance(length, int):
                raise NotFollowed(f"{called(node)} cuts channels at a place that is not known")
        stop = start + length if isinstance(length, int) else start
        outputs.append(tuple(_cut(flow, move, axis, range(start, stop)) for move in value.moves))
        start = stop
    whole = value.along(axis)
    if whole is not None and start != whole.shape[axis]:
        raise NotFollowed(f"{called(node)} does not cut its input up")
    return outputs


def cut(node: Node, flow: Flow) -> Outputs:
    """Slice: the part of the channels that is kept."""
    value = first(flow, node)
    moves = value.moves
    if not moves:
        return [()]
    try:
        starts = integers(node, flow.scope, 1, "starts") or ()
        ends = integers(node, flow.scope, 2, "ends") or ()
        steps = integers(node, flow.scope, 4, "steps") or (1,) * len(starts)
    except LookupError:
        starts = ends = steps = ()
    try:
        axes = integers(node, flow.scope, 3, "axes")
    except LookupError:
        raise NotFollowed(f"{called(node)} cuts along axes that are not constant") from None
    for at, axis in enumerate(range(len(starts or value.dims)) if axes is None else axes):
        whole = next((m for m in moves if m.shape[axis] > 1), None)
        if whole is None:
            continue
        if at >= min(len(starts), len(ends), len(steps)):
            raise NotFollowed(f"{called(node)} cuts channels at a place that is not known")
        kept = range(*slice(starts[at], ends[at], steps[at]).indices(whole.shape[axis]))
        moves = tuple(_cut(flow, move, axis, kept) for move in moves)
    return [moves]


def _cut(flow: Flow, move: Move, axis: int, kept: range) -> Move:
    if move.shape[axis] == 1 or kept == range(move.shape[axis]):
        return move
    part: Move = move.take(kept, axis)
    at = np.arange(move.size).reshape(move.shape).take(kept, axis)
    flow.ledger.copied(move, at, part, None)
    return part


def gather(node: Node, flow: Flow) -> Outputs:
    """Along the axis of the indices nothing may move, unless they are constant."""
    value, indices = first(flow, node), flow.value(node.proto.input[1])
    flow.pin(indices, f"{called(node)} looks up by it")
    axis = axis_of(node, value, 0)
    moves = []
    for move in value.moves:
        if move.shape[axis] > 1:
            moves.append(_taken(flow, node, move, axis))
        else:
            shape = (*move.shape[:axis], *(1,) * indices.rank, *move.shape[axis + 1 :])
            moves.append(move.reshape(shape))
    return [tuple(m for m in moves if m is not None)]


def _taken(flow: Flow, node: Node, move: Move, axis: int) -> Move | None:
    tensor = flow.scope.constant(node.proto.input[1])
    if tensor is None or prod(shape_of(tensor)) * (move.size // move.shape[axis]) > _LARGEST:
        others = [a for a in varying(move) if a != axis]
        reason = f"{called(node)} looks up rows by number"
        if not others:
            flow.ledger.pin(move, reason)
            return None
        raise NotFollowed(reason)
    numbers = read_tensor(tensor, flow.scope.path)
    part = np.take(move, numbers, axis)
    at = np.take(np.arange(move.size).reshape(move.shape), numbers, axis)
    flow.ledger.copied(move, at, part, None)
    return part


def resized(node: Node, flow: Flow) -> Outputs:
    """Resize, Upsample, Pad: along axes that stay as long as they are, nothing is mixed."""
    value = first(flow, node)
    after = out_shape(flow, node) if value.moves else ()

    def refused(move: Move) -> str | None:
        kept = all(
            after[axis] == move.shape[axis] and _keeps(node, flow, axis, value.rank)
            for axis in varying(move)
        )
        return None if kept else f"{called(node)} changes the axis of the channels"

    return [passing(flow, value.moves, refused)]


def _keeps(node: Node, flow: Flow, axis: int, rank: int) -> bool:
    """Whether an axis whose length stays also keeps its values in place."""
    if node.proto.op_type != "Pad":
        return _is_scaled_by_one(node, flow, axis, rank)
    try:
        pads = integers(node, flow.scope, 1, "pads") or ()
        axes = integers(node, flow.scope, 3, "axes") or tuple(range(rank))
    except LookupError:
        return False
    ends = dict(zip(axes, zip(pads, pads[len(axes) :], strict=False), strict=False))
    return bool(pads) and all(pair == (0, 0) for a, pair in ends.items() if a % rank == axis)


def _is_scaled_by_one(node: Node, flow: Flow, axis: int, rank: int) -> bool:
    """Eight channels scaled by 1.1 are eight again, of which some stand twice."""
    texts: dict[str, bytes] = {a.name: a.s for a in node.proto.attribute}
    if texts.get("coordinate_transformation_mode") == b"tf_crop_and_resize":
        return False
    given = [*node.proto.input, "", "", ""]
    if node.proto.op_type == "Resize" and given[3]:  # sizes, of which the scales follow
        return texts.get("keep_aspect_ratio_policy", b"stretch") == b"stretch"
    name = given[2] if node.proto.op_type == "Resize" and flow.opset > _SCALES_FIRST else given[1]
    tensor = flow.scope.constant(name)
    scales = attribute(node.proto, "scales") if tensor is None else None
    values: list[float] = list(scales.floats) if scales is not None else []
    if tensor is not None:
        values = read_tensor(tensor, flow.scope.path).reshape(-1).tolist()
    axes = attribute(node.proto, "axes")
    places = range(rank) if axes is None else [a % rank for a in axes.ints]
    own = [scale for a, scale in zip(places, values, strict=False) if a == axis]
    return bool(values) and set(own) <= {1.0}
