"""What each operator demands of the channels that reach it, and what moves behind it.

An operator that stands in no table stops every channel that it reads.
Source of what an operator computes: the ONNX operator schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from twofour.graph.scope import Node, attribute, integer, integers, is_standard
from twofour.pruning.permutation import layouts
from twofour.pruning.permutation.channels import Move, varying
from twofour.pruning.permutation.flow import (
    Dim,
    Flow,
    Moves,
    NotFollowed,
    Operand,
    Value,
    aligned,
    called,
    combine,
    operand,
    passing,
    reduced,
)
from twofour.pruning.permutation.layouts import Outputs, axis_of, first

Rule = Callable[[Node, Flow], Outputs]


def outputs_of(node: Node, flow: Flow) -> Outputs:
    """Moves of each output; raises NotFollowed where nothing may move through the node."""
    rule = RULES.get(node.proto.op_type) if is_standard(node.proto) else None
    if rule is None:
        raise NotFollowed(f"{called(node)}: nothing is known of what it does to channels")
    return rule(node, flow)


def _unary(node: Node, flow: Flow) -> Outputs:
    """Each value by itself; what else it reads are numbers."""
    for name in node.proto.input[1:]:
        flow.pin(flow.value(name) if name else None, f"{called(node)} reads it as a number")
    return [first(flow, node).moves] * len(node.proto.output)


def _cast_like(node: Node, flow: Flow) -> Outputs:
    return [first(flow, node).moves]


def _elementwise(node: Node, flow: Flow) -> Outputs:
    values = [flow.value(name) for name in node.proto.input]
    return [combine(flow, aligned(values), node)]


def _reads_nothing(node: Node, flow: Flow) -> Outputs:  # noqa: ARG001 - as every rule
    """Shape and Size: of where the values lie nothing is seen."""
    return [()]


def _matmul(node: Node, flow: Flow) -> Outputs:
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


def _gemm(node: Node, flow: Flow) -> Outputs:
    one, two = (flow.value(name) for name in node.proto.input[:2])
    left = (1, 0) if integer(node.proto, "transA", 0) else (0, 1)
    right = (2, 1) if integer(node.proto, "transB", 0) else (1, 2)
    moves = _contracted(node, flow, [operand(one, left, 3), operand(two, right, 3)], (0, 2))
    return [_biased(node, flow, (moves, (None, None)), _bias_at(node, flow, 2), (0, 1))]


def _bias_at(node: Node, flow: Flow, position: int) -> Value | None:
    given = node.proto.input[position:][:1]
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


def _einsum(node: Node, flow: Flow) -> Outputs:
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


def _conv(node: Node, flow: Flow) -> Outputs:
    return [_convolved(node, flow, out_axis=0, in_axis=1)]


def _conv_transpose(node: Node, flow: Flow) -> Outputs:
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
    return _biased(node, flow, (spread, shape), _bias_at(node, flow, 2), (1,))


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


def _batch_norm(node: Node, flow: Flow) -> Outputs:
    if integer(node.proto, "training_mode", 0):
        raise NotFollowed(f"{called(node)} is in training mode")
    return [_scaled(node, flow, first(flow, node).moves, node.proto.input[1:5])]


def _scaled(node: Node, flow: Flow, moves: Moves, names: Sequence[str], axis: int = 1) -> Moves:
    """Each channel along the axis with numbers of its own."""
    value = flow.value(node.proto.input[0])
    rank = value.rank
    whole = Value(name=value.name, shape=value.shape, moves=moves)
    operands = [operand(whole, range(rank), rank)]
    for name in filter(None, names):
        parameter = flow.value(name)
        operands.append(operand(parameter, (axis,) if parameter.rank else (), rank))
        if parameter.rank > 1:
            raise NotFollowed(f"{called(node)} has parameters along several axes")
    return combine(flow, operands, node)


def _instance_norm(node: Node, flow: Flow) -> Outputs:
    value = first(flow, node)
    groups = [m for m in value.moves if any(axis > 1 for axis in varying(m))]
    reason = f"{called(node)} normalises part by part"
    for move in groups:
        flow.ledger.within(move, [a for a in varying(move) if a < 2], reason)
    if any(move.shape[1] > 1 for move in groups):  # channels of a group, which has one scale
        for name in node.proto.input[1:3]:
            flow.pin(flow.value(name), f"{called(node)} uses one value of it for many channels")
        return [value.moves]
    return [_scaled(node, flow, value.moves, node.proto.input[1:3])]


def _group_norm(node: Node, flow: Flow) -> Outputs:
    value, groups = first(flow, node), integer(node.proto, "num_groups", 1)
    if any(axis > 1 for each in value.moves for axis in varying(each)):
        raise NotFollowed(f"{called(node)} mixes neighbours along its axis")
    move, names = value.along(1), node.proto.input[1:3]
    if move is not None:
        if move.shape[1] % groups or move.shape[0] > 1:
            raise NotFollowed(f"{called(node)} cuts its channels unevenly")
        each = move.shape[1] // groups
        parts = np.repeat(np.arange(groups), each).reshape(1, -1, *(1,) * (move.ndim - 2))
        flow.ledger.apart(move, parts, f"{called(node)} has {groups} groups")
    lengths = {flow.value(name).dims for name in names}
    if lengths == {value.dims[1:2]}:
        return [_scaled(node, flow, value.moves, names)]
    for name in names:  # up to opset 20 they are one a group
        flow.pin(flow.value(name), f"{called(node)} uses one value of it for many channels")
    return [value.moves]


def _layer_norm(node: Node, flow: Flow) -> Outputs:
    """Over whole axes at the end, whose order does not matter."""
    value = first(flow, node)
    if any(node.proto.output[1:]):
        raise NotFollowed(f"{called(node)} gives the mean it takes")
    axis = axis_of(node, value, -1)
    over = range(axis, value.rank)
    reason = f"{called(node)} normalises part by part"
    for move in value.moves:
        if any(a in over for a in varying(move)):
            flow.ledger.within(move, [a for a in varying(move) if a not in over], reason)
    parameters = [flow.value(name) for name in node.proto.input[1:3] if name]
    return [combine(flow, aligned([value, *parameters]), node)]


def _lp_norm(node: Node, flow: Flow) -> Outputs:
    value = first(flow, node)
    axis = axis_of(node, value, -1)
    reduced(flow, value.moves, (axis,), f"{called(node)} normalises part by part")
    return [value.moves]


def _reduce(node: Node, flow: Flow) -> Outputs:
    value = first(flow, node)
    try:
        axes = integers(node, flow.scope, 1, "axes")
    except LookupError:
        raise NotFollowed(f"{called(node)} sums over axes that are not constant") from None
    if not axes and integer(node.proto, "noop_with_empty_axes", 0):
        return [value.moves]
    over = [a % max(1, value.rank) for a in axes] if axes else list(range(value.rank))
    left = reduced(flow, value.moves, over, f"{called(node)} sums part by part")
    if integer(node.proto, "keepdims", 1):
        return [left]
    rest = [a for a in range(value.rank) if a not in over]
    return [tuple(m.reshape([m.shape[a] for a in rest]) for m in left)]


def _global_pool(node: Node, flow: Flow) -> Outputs:
    value = first(flow, node)
    over = range(2, value.rank)
    return [reduced(flow, value.moves, over, f"{called(node)} sums part by part")]


def _pool(node: Node, flow: Flow) -> Outputs:
    value = first(flow, node)
    if any(node.proto.output[1:]):
        raise NotFollowed(f"{called(node)} gives the places of what it takes")
    reason = f"{called(node)} mixes neighbours along its axis"
    return [passing(flow, value.moves, lambda m: reason if max(varying(m)) > 1 else None)]


def _over_axis(default: int, why: str) -> Rule:
    """Operators in which the order along the axis tells, or is given out."""

    def rule(node: Node, flow: Flow) -> Outputs:
        value = first(flow, node)
        old = node.proto.op_type in _FLATTENING and flow.opset < _PER_AXIS_OPSET
        axis = axis_of(node, value, 1 if old else default)
        over = range(axis, value.rank) if old else (axis,)
        reason = f"{called(node)} {why}"
        moves = passing(
            flow, value.moves, lambda m: reason if not {*over}.isdisjoint(varying(m)) else None
        )
        for name in node.proto.input[1:]:
            flow.pin(flow.value(name) if name else None, f"{called(node)} reads it as a number")
        removed = node.proto.op_type.startswith("Arg") and not integer(node.proto, "keepdims", 1)
        if removed:
            rest = [a for a in range(value.rank) if a != axis]
            moves = tuple(m.reshape([m.shape[a] for a in rest]) for m in moves)
        return [moves] * len(node.proto.output)

    return rule


_FLATTENING = ("Softmax", "LogSoftmax", "Hardmax")
_PER_AXIS_OPSET = 13
"""Before, these ran over all axes from `axis` on."""


def _local_response_norm(node: Node, flow: Flow) -> Outputs:
    value = first(flow, node)
    if value.along(1) is not None:
        raise NotFollowed(f"{called(node)} mixes neighbouring channels")
    return [value.moves]


def _quantized(node: Node, flow: Flow) -> Outputs:
    """Quantize and DequantizeLinear: by one scale, or one for each channel."""
    value, scale = flow.value(node.proto.input[0]), flow.value(node.proto.input[1])
    if scale.rank == 0 or scale.dims == (1,):
        return [flow.settle(value).moves]
    if scale.rank > 1:
        raise NotFollowed(f"{called(node)} has scales of blocks")
    axis = axis_of(node, value, 1)
    names = [name for name in node.proto.input[1:3] if name]
    rank = value.rank
    parameters = [operand(flow.value(name), (axis,), rank) for name in names]
    return [combine(flow, [operand(value, range(rank), rank), *parameters], node)]


_ORDER_TELLS = "runs along the axis of the channels"
_UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "Ceil", "Celu", "Clip"),
    *("Cos", "Cosh", "Dropout", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
    *("Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "Reciprocal", "Relu"),
    *("Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt"),
    *("Swish", "Tan", "Tanh", "ThresholdedRelu"),
)
_ELEMENTWISE = (
    *("Add", "And", "BitwiseAnd", "BitwiseOr", "Div", "Equal", "Greater", "GreaterOrEqual", "Less"),
    *("LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "PRelu", "Sub", "Sum"),
    *("Where", "Xor"),
)
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys((f"Reduce{name}" for name in _REDUCTIONS), _reduce),
    **dict.fromkeys(("Shape", "Size"), _reads_nothing),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), layouts.reshape),
    **dict.fromkeys(("Expand", "Tile"), layouts.expand),
    **dict.fromkeys(("Resize", "Upsample", "Pad"), layouts.resized),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantized),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _layer_norm),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"), _global_pool),
    **dict.fromkeys(("AveragePool", "MaxPool", "LpPool"), _pool),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _over_axis(-1, _ORDER_TELLS)),
    **dict.fromkeys(("ArgMax", "ArgMin"), _over_axis(0, "gives out places of its channels")),
    "BatchNormalization": _batch_norm,
    "CastLike": _cast_like,
    "Concat": layouts.concat,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Gather": layouts.gather,
    "Gemm": _gemm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _local_response_norm,
    "LpNormalization": _lp_norm,
    "MatMul": _matmul,
    "Slice": layouts.cut,
    "Split": layouts.split,
    "TopK": _over_axis(-1, "gives out places of its channels"),
    "Transpose": layouts.transpose,
}
