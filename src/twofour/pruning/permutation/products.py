"""What products demand of the channels that reach them: MatMul, Gemm, Einsum, convolutions.

A product sums over one axis of both operands: there they must have the same order, and the result
has none of it. Source of what an operator computes: the ONNX operator schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from twofour.graph.scope import Node, attribute, integer
from twofour.pruning.permutation.channels import Move, varying
from twofour.pruning.permutation.flow import (
    Dim,
    Flow,
    Moves,
    NotFollowed,
    Operand,
    Value,
    called,
    combine,
    operand,
    reduced,
)
from twofour.pruning.permutation.layouts import Outputs, first


def matmul(node: Node, flow: Flow) -> Outputs:
    """The last axis of one with the last but one of the other; batches broadcast."""
    one, two = (flow.value(name) for name in node.proto.input[:2])
    if not one.rank or not two.rank:
        raise NotFollowed(f"{called(node)} multiplies with a scalar")
    batch = max(one.rank, two.rank, 2) - 2
    rows, inner, columns = batch, batch + 1, batch + 2
    left = [*range(batch - max(0, one.rank - 2), batch), rows, inner][-one.rank :]
    right = [*range(batch - max(0, two.rank - 2), batch), inner, columns]
    right = right if two.rank > 1 else [inner]
    kept = [a for a in range(batch + 3) if a != inner]
    kept = [a for a in kept if (a != rows or one.rank > 1) and (a != columns or two.rank > 1)]
    operands = [operand(one, left, batch + 3), operand(two, right, batch + 3)]
    return [_contracted(node, flow, operands, kept)]


def _contracted(node: Node, flow: Flow, operands: Sequence[Operand], kept: Sequence[int]) -> Moves:
    """A sum of products over the axes that are not `kept`; the result has these, in this order."""
    moves = combine(flow, operands, node)
    summed = [a for a in range(len(operands[0].dims)) if a not in kept]
    left = reduced(flow, moves, summed, f"{called(node)} multiplies part by part")
    order = [*kept, *summed]
    for move in left:
        along = [order.index(a) for a in varying(move)]
        if along != sorted(along):
            raise NotFollowed(f"{called(node)} lays its channels along axes in another order")
    return tuple(m.transpose(order).reshape([m.shape[a] for a in kept]) for m in left)


def gemm(node: Node, flow: Flow) -> Outputs:
    """By its trans flags, with its bias."""
    one, two = (flow.value(name) for name in node.proto.input[:2])
    left = (1, 0) if integer(node.proto, "transA", 0) else (0, 1)
    right = (2, 1) if integer(node.proto, "transB", 0) else (1, 2)
    moves = _contracted(node, flow, [operand(one, left, 3), operand(two, right, 3)], (0, 2))
    return [_biased(node, flow, (moves, (None, None)), _bias_of(node, flow), (0, 1))]


def _bias_of(node: Node, flow: Flow) -> Value | None:
    given = node.proto.input[2:3]
    return flow.value(given[0]) if given and given[0] else None


def _biased(
    node: Node,
    flow: Flow,
    result: tuple[Moves, tuple[Dim, ...]],
    bias: Value | None,
    places: Sequence[int],
) -> Moves:
    """A result with a bias added, whose last axes stand at the last of `places`."""
    if bias is None:
        return result[0]
    value = Value(name=node.proto.output[0], shape=result[1], moves=result[0])
    rank = len(result[1])
    own = places[len(places) - bias.rank :] if bias.rank else ()
    operands = [operand(value, range(rank), rank), operand(bias, own, rank)]
    return combine(flow, operands, node)


def einsum(node: Node, flow: Flow) -> Outputs:
    """A plain product of terms; others stop their channels."""
    equation = attribute(node.proto, "equation")
    left, arrow, right = (b"" if equation is None else equation.s).decode().partition("->")
    terms = [term.strip().replace(" ", "") for term in left.split(",")]
    right = right.replace(" ", "")
    letters = sorted({*"".join(terms)})
    plain = all(term.isalpha() and len({*term}) == len(term) for term in (*terms, right or "a"))
    if not (arrow and plain and {*right} <= {*letters}) or len(terms) != len(node.proto.input):
        raise NotFollowed(f"{called(node)} has an equation that is no plain product")
    # letters in the order of the first term that has them, so that joint axes keep their order
    order = list(dict.fromkeys("".join(terms)))
    values = [flow.value(name) for name in node.proto.input]
    operands = [
        operand(value, [order.index(letter) for letter in term], len(order))
        for value, term in zip(values, terms, strict=True)
    ]
    return [_contracted(node, flow, operands, [order.index(letter) for letter in right])]


def conv(node: Node, flow: Flow) -> Outputs:
    """Over the input channels of each group."""
    return [_convolved(node, flow, out_axis=0, in_axis=1)]


def conv_transpose(node: Node, flow: Flow) -> Outputs:
    """Likewise, of a weight whose first axis is that of the inputs."""
    return [_convolved(node, flow, out_axis=1, in_axis=0)]


def _convolved(node: Node, flow: Flow, *, out_axis: int, in_axis: int) -> Moves:
    value, weight = first(flow, node), flow.settle(flow.value(node.proto.input[1]))
    for move in (*value.moves, *weight.moves):
        if any(axis > 1 for axis in varying(move)):
            flow.ledger.pin(move, f"{called(node)} mixes neighbours along its axis")
    channels, filters = _first_two(value), _first_two(weight)
    if integer(node.proto, "group", 1) == 1:  # over batch, outputs, inputs
        operands = [operand(channels, (0, 2), 3), operand(filters, _at(out_axis), 3)]
        moves = _contracted(node, flow, operands, (0, 1))
    else:
        moves = _grouped(node, flow, channels, filters, is_conv=in_axis == 1)
    spread = tuple(m.reshape((*m.shape, *(1,) * (value.rank - 2))) for m in moves)
    shape = (None,) * value.rank
    return _biased(node, flow, (spread, shape), _bias_of(node, flow), (1,))


def _at(out_axis: int) -> tuple[int, int]:
    return (1, 2) if out_axis == 0 else (2, 1)


def _first_two(value: Value) -> Value:
    """The first two axes alone, and what moves along them and no other."""
    if value.rank < 2:
        raise NotFollowed(f"{value.name!r} has no channel axis")
    moves = (m for m in value.moves if all(axis < 2 for axis in varying(m)))
    return replace(value, shape=value.dims[:2], moves=tuple(m.reshape(m.shape[:2]) for m in moves))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Groups:
    """A grouped convolution: what moves over groups x outputs x inputs of a group."""

    arriving: Move | None
    inner: Move | None
    """Of the weight's axis of inputs."""
    outer: Move | None
    """Of the weight's axis of outputs."""
    shape: tuple[int, int, int]


def _grouped(node: Node, flow: Flow, value: Value, filters: Value, *, is_conv: bool) -> Moves:
    """Channels of a group stay in it; with one channel a group, outputs go with their inputs."""
    seen = _groups(node, value, filters, is_conv=is_conv)
    groups, each_out, each_in = seen.shape
    reason = f"{called(node)} has {groups} groups"
    pin, apart = flow.ledger.pin, np.arange(groups).reshape(-1, 1, 1)
    if seen.arriving is not None and seen.inner is not None:
        flow.ledger.same(seen.arriving, seen.inner)
    elif seen.inner is not None:
        pin(seen.inner, f"{called(node)} reads {value.in_words}")
    elif seen.arriving is not None and each_in > 1:
        pin(seen.arriving, f"{called(node)} reads {filters.in_words}")
    if seen.arriving is not None and each_in > 1:
        flow.ledger.apart(seen.arriving, apart, reason)
    leaving = _conv_leaving if is_conv else _transpose_leaving
    result = leaving(node, flow, seen)
    if result is None:
        return ()
    if result.shape[0] == groups and (each_in > 1 or seen.arriving is None):
        flow.ledger.apart(result, apart, reason)
    return (np.broadcast_to(result, (groups, each_out, 1)).reshape(1, groups * each_out),)


def _conv_leaving(node: Node, flow: Flow, seen: _Groups) -> Move | None:
    if seen.shape[2] == 1 and seen.arriving is not None:
        if seen.outer is None:
            flow.ledger.pin(seen.arriving, f"the weight of {called(node)} does not move")
        else:
            flow.ledger.same(seen.arriving, seen.outer)
    return seen.outer


def _transpose_leaving(node: Node, flow: Flow, seen: _Groups) -> Move | None:
    """Axis 1 of the weight serves all groups, unless each has but one input."""
    if seen.shape[2] > 1:
        return seen.outer
    if seen.outer is not None:
        flow.ledger.pin(seen.outer, f"{called(node)} repeats it for each of its inputs")
    return seen.arriving


def _groups(node: Node, value: Value, filters: Value, *, is_conv: bool) -> _Groups:
    groups, arriving = integer(node.proto, "group", 1), value.along(1)
    rows, columns = filters.dims
    if not (isinstance(rows, int) and isinstance(columns, int)) or rows % max(1, groups):
        raise NotFollowed(f"{called(node)} has a weight whose shape is not known or does not fit")
    if arriving is not None and varying(arriving) != (1,):
        raise NotFollowed(f"{called(node)} reads channels along several axes")
    each = rows // groups
    by_row = next((m for m in filters.moves if varying(m) == (0,)), None)
    by_column = next((m for m in filters.moves if m.shape[1] > 1), None)
    if is_conv:
        outer = None if by_row is None else by_row.reshape(groups, each, 1)
        inner = (
            None
            if by_column is None
            else by_column.reshape(*((groups, each) if by_column.shape[0] > 1 else (1, 1)), columns)
        )
        shape = (groups, each, columns)
    else:
        inner = None if by_row is None else by_row.reshape(groups, 1, each)
        outer = None if by_column is None else by_column.reshape(1, columns, 1)
        shape = (groups, columns, each)
    if arriving is not None:
        arriving = arriving.reshape(groups, 1, shape[2])
    return _Groups(arriving=arriving, inner=inner, outer=outer, shape=shape)
