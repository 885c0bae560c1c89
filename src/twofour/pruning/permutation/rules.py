"""What each operator demands of the channels that reach it, and what moves behind it.

An operator that stands in no table stops every channel that it reads.
Source of what an operator computes: the ONNX operator schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from twofour.graph.scope import Node, integer, integers, is_standard
from twofour.pruning.permutation import layouts, products
from twofour.pruning.permutation.channels import varying
from twofour.pruning.permutation.flow import (
    Flow,
    Moves,
    NotFollowed,
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
    "Conv": products.conv,
    "ConvTranspose": products.conv_transpose,
    "Einsum": products.einsum,
    "Gather": layouts.gather,
    "Gemm": products.gemm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LRN": _local_response_norm,
    "LpNormalization": _lp_norm,
    "MatMul": products.matmul,
    "Slice": layouts.cut,
    "Split": layouts.split,
    "TopK": _over_axis(-1, "gives out places of its channels"),
    "Transpose": layouts.transpose,
}
