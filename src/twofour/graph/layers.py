"""A node with a weight as a layer: reduction axis, groups, channels, types of its math."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from math import prod

import numpy as np
import onnx

from twofour.errors import BadInputError
from twofour.graph.files import DTYPES, dtype_name, is_groupable, is_readable, read_tensor, shape_of
from twofour.graph.scope import Node, Scope, attribute, integer, is_standard, tensor_shape
from twofour.graph.trace import (
    DEQUANTIZE,
    QUANTIZE,
    STACK,
    Trace,
    TraceStep,
    land,
    trace,
    traced_shapes,
)
from twofour.records import frozen
from twofour.records.weights import Reason, ReasonCode, Weight, shared

_OPS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum")
_TERM = re.compile(r"[A-Za-z]*(?:\.\.\.)?[A-Za-z]*")
_DOTS = "..."
_OPERANDS = 2
_RECURRENT = ("GRU", "LSTM", "RNN")
_COUNTED = (*_OPS, *_RECURRENT, "ConvInteger", "DeformConv", "MatMulInteger")
# Ops that TensorRT fuses into the layer before them or moves a Q node across. Source: TensorRT
# developer guide, "Working with Quantized Types", Q/DQ placement and fusions.
FLOAT_ON_PURPOSE = "twofour.float-on-purpose"
"""Key in the metadata of a product that an export did not round, or whose output it did not."""
_UP_TO_QUANTIZE = (
    *("Add", "Cast", "Clip", "Div", "Dropout", "Elu", "Erf", "Flatten", "Gelu", "HardSigmoid"),
    *("HardSwish", "Identity", "LeakyRelu", "MaxPool", "Mish", "Mul", "PRelu", "Relu", "Reshape"),
    *("Selu", "Sigmoid", "Softplus", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze"),
)


@frozen
class EinsumWeight:
    """The axes of one operand: the one that is summed over, and those of the outputs."""

    axis: int
    out_axes: tuple[int, ...]
    batch_axes: tuple[int, ...]
    """Axes shared with the other operand and the output: a stack of weights, such as experts."""


def einsum_weight(equation: str, position: int) -> EinsumWeight | None:
    """The operand at `position` as a weight; None where the equation is no product with one.

    In a product exactly one letter is in both operands and not in the output. No letter is twice
    in an operand, or in one operand alone, and the weight has no dots.
    """
    # "bek,ekn->ben" with the weight "ekn" at position 1: k (axis 1) is in both operands and not in
    # the output, so it is summed over; n (axis 2) is in the weight alone, an output axis; e (axis
    # 0) is in both operands and in the output: one matrix for each e, a stack of weights.
    terms = einsum_terms(equation)
    if terms is None:
        return None
    weight, other, output = terms[position], terms[1 - position], terms[2]
    if _DOTS in weight or len({*weight}) < len(weight) or len({*other}) < len(other):
        return None
    gone = {*weight, *other}.difference(output)
    summed = gone.intersection(weight, other)
    if len(summed) != 1 or gone != summed:
        return None
    return EinsumWeight(
        axis=weight.index(summed.pop()),
        out_axes=tuple(a for a, x in enumerate(weight) if x not in other),
        batch_axes=tuple(a for a, x in enumerate(weight) if x in other and x in output),
    )


def einsum_terms(equation: str) -> tuple[tuple[str, ...], ...] | None:
    """Letters of both operands and of the output ("..." is one); None for other equations."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if len(operands) != _OPERANDS or not all(map(_TERM.fullmatch, (*operands, right))):
        return None
    first, second = map(_letters, operands)
    if arrow:
        return first, second, _letters(right)
    # without an arrow the output has the dots, then each letter that is there once: "ij,jk" is ik
    dots = {_DOTS}.intersection(first + second)
    once = {*first}.symmetric_difference(second) - dots
    return first, second, (*dots, *sorted(once))


def _letters(term: str) -> tuple[str, ...]:
    before, dots, after = term.partition(_DOTS)
    return (*before, *filter(None, [dots]), *after)


@frozen
class Layer:
    """A node with its weight, and the way to the weight's constant."""

    node: Node
    scope: Scope
    """The graph that contains the node."""
    weight: Weight
    origin: Trace
    position: int
    """Which input of the node is the weight."""


@frozen
class _LayerSize:
    """Axis and channels of a weight as its node reads it."""

    axis: int | None
    groups: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...] = ()
    form: str | None = None


def has_weight(node: Node) -> bool:
    """Whether the op is one that sparse math knows."""
    return node.proto.op_type in _OPS and is_standard(node.proto)


def weight_input(scope: Scope, node: Node) -> int | None:
    """Which input is the weight; None for a product of two activations, or an Einsum without one.

    Raises BadInputError for a node that has no second input.
    """
    inputs = node.proto.input
    if node.op == "Einsum":
        fits = [at for at in range(len(inputs)) if _einsum(node, at) is not None]
        return _constant_input(scope, node, reversed(fits))
    if len(inputs) < 2 or not (inputs[0] and inputs[1]):
        raise BadInputError(
            f"{node.op} node {node.label!r} has fewer than two inputs: the model is damaged"
        )
    if node.op in ("Conv", "ConvTranspose"):
        return 1
    position = _constant_input(scope, node, (1, 0))
    if position is None and node.op == "Gemm":
        return 1
    return position


def _einsum(node: Node, position: int) -> EinsumWeight | None:
    return einsum_weight(attribute_text(node, "equation"), position)


def attribute_text(node: Node, name: str) -> str:
    """The text attribute of that name; "" where the node has none."""
    given = attribute(node.proto, name)
    return "" if given is None else given.s.decode(errors="replace")


def _constant_input(scope: Scope, node: Node, positions: Iterable[int]) -> int | None:
    """The first constant input, else the first that is picked from a stack of constant matrices."""
    names = {at: node.proto.input[at] for at in positions}
    for at, name in names.items():
        if scope.is_fixed(name):
            return at
    for at, name in names.items():
        stored = trace(scope, name).tensor
        if stored is not None and len(stored.dims) >= STACK:
            return at
    return None


def layer_of_node(scope: Scope, node: Node, position: int, *, quantized: bool) -> Layer:
    """The Weight of a node; `quantized` says whether its output goes to QuantizeLinear."""
    name = node.proto.input[position]
    origin = trace(scope, name)
    if origin.stopped is not None:
        size = _size(node, position, tensor_shape(scope, name)) or _unknown(node)
        weight = _describe(node, replace(size, axis=None), origin, (origin.stopped,))
    elif origin.looked_up is not None:
        weight = _picked_weight(node, position, origin, origin.looked_up.node)
    else:
        weight = _constant_weight(node, position, origin)
        marks = {entry.key for entry in node.proto.metadata_props}
        weight = replace(weight, float_on_purpose=FLOAT_ON_PURPOSE in marks)
        if weight.math_dtype == "int8":
            weight = replace(weight, output_quantized=quantized)
    return Layer(node=node, scope=scope, weight=weight, origin=origin, position=position)


def _picked_weight(node: Node, position: int, origin: Trace, pick: Node) -> Weight:
    """A weight without an axis: each run picks another part of the array."""
    assert origin.tensor is not None
    size = None
    if len(origin.steps) == 1:
        size = _size(node, position, shape_of(origin.tensor))
    reason = Reason(
        code=ReasonCode.PICKED_AT_RUN_TIME,
        message=f"the weight is picked from {origin.constant!r} at run time by"
        f" {pick.op} node {pick.label!r}",
    )
    return _describe(node, replace(size or _unknown(node), axis=None), origin, (reason,))


def _constant_weight(node: Node, position: int, origin: Trace) -> Weight:
    assert origin.tensor is not None
    shapes = traced_shapes(origin)
    if isinstance(shapes, Reason):
        return _describe(node, _unknown(node), origin, (shapes,))
    size = _size(node, position, shapes[0])
    if size is None:
        message = f"a weight of shape {list(shapes[0])} does not fit {node.op}"
        misfit = Reason(code=ReasonCode.UNSUPPORTED_OP, message=message)
        return _describe(node, _unknown(node), origin, (misfit,))
    reasons = []
    axis = None
    assert size.axis is not None
    landing = land(origin, shapes, size.axis)
    if isinstance(landing, Reason):
        reasons.append(landing)
    else:
        axis = landing
    stored = dtype_name(origin.tensor)
    if not is_groupable(stored):
        message = f"weight {origin.constant!r} is stored as {stored}"
        reasons.append(Reason(code=ReasonCode.DTYPE, message=message))
    asymmetric = _zero_point_reason(origin)
    if asymmetric is not None:
        reasons.append(asymmetric)
    if reasons:
        axis = None
    return _describe(node, replace(size, axis=axis), origin, tuple(reasons))


def _size(node: Node, position: int, shape: tuple[int, ...] | None) -> _LayerSize | None:
    """Axis and channels of a weight of this shape; None where it does not fit the op."""
    if shape is None:
        return None
    if node.op in ("Conv", "ConvTranspose"):
        return _convolution(node, shape)
    if node.op == "Einsum":
        return _einsum_size(node, position, shape)
    return _matrix_size(node, position, shape)


def _matrix_size(node: Node, position: int, shape: tuple[int, ...]) -> _LayerSize | None:
    # MatMul x @ w with w (12, 64, 32): axis 1, 64 inputs, 32 outputs, a stack of 12 matrices.
    # w @ x with w (32, 64): axis 1, 64 inputs, 32 outputs. Gemm with transB=1: axis 1 of (32, 64).
    rank = len(shape)
    if rank == 0 or (node.op == "Gemm" and rank != 2):
        return None
    axis = max(rank - 2, 0) if position else rank - 1
    if node.op == "Gemm" and integer(node.proto, "transB" if position else "transA", 0):
        axis = 1 - axis
    out_channels = 1
    if rank > 1:
        other = 2 * rank - 3 - axis  # of the last two axes, rank - 2 and rank - 1
        out_channels = shape[other]
    form = None if position else "a weight on the left of its product"
    if prod(shape[:-2]) > 1:
        form = "a stack of matrices"
    return _LayerSize(
        axis=axis, groups=1, in_channels=shape[axis], out_channels=out_channels, form=form
    )


def _einsum_size(node: Node, position: int, shape: tuple[int, ...]) -> _LayerSize | None:
    used = _einsum(node, position)
    if used is None or len(shape) != 1 + len(used.out_axes) + len(used.batch_axes):
        return None
    return _LayerSize(
        axis=used.axis,
        groups=1,
        in_channels=shape[used.axis],
        out_channels=prod(shape[axis] for axis in used.out_axes),
    )


def _convolution(node: Node, shape: tuple[int, ...]) -> _LayerSize | None:
    # Conv (64, 8, 3, 3) in 4 groups: axis 1, 32 input channels. ConvTranspose (64, 8, 3, 3) in 4
    # groups: axis 0 of 64 input channels, 32 output channels.
    groups = integer(node.proto, "group", 1)
    if len(shape) < 2 or groups < 1:
        return None
    axis = 1 if node.op == "Conv" else 0
    channels = [shape[0], shape[1] * groups]
    return _LayerSize(
        axis=axis,
        groups=groups,
        in_channels=channels[axis],
        out_channels=channels[1 - axis],
        kernel=shape[2:],
    )


def _unknown(node: Node) -> _LayerSize:
    """What the attributes alone say; channels that are not known are 0."""
    kernel = attribute(node.proto, "kernel_shape")
    return _LayerSize(
        axis=None,
        groups=max(1, integer(node.proto, "group", 1)),
        in_channels=0,
        out_channels=0,
        kernel=() if kernel is None else tuple(kernel.ints),
    )


def _describe(node: Node, size: _LayerSize, origin: Trace, reasons: tuple[Reason, ...]) -> Weight:
    weight = Weight(
        **shared(size, _LayerSize),
        layer=node.label,
        node=node.name,
        weight=None,
        op=node.op,
        shape=(),
        dtype="unknown",
        math_dtype=_math_dtype(origin),
        trace=tuple(step.node.op for step in origin.steps),
        reasons=reasons,
    )
    stored = origin.tensor
    if stored is None:
        return weight
    dtype = dtype_name(stored)
    return replace(weight, weight=origin.constant, shape=tuple(stored.dims), dtype=dtype)


def _math_dtype(origin: Trace) -> str:
    """The type of the math: quantised behind a DequantizeLinear, else what the last Cast makes."""
    # int8 -> DequantizeLinear: int8. float32 -> QuantizeLinear (int8) -> DequantizeLinear: int8.
    # float16 -> Cast to float32 -> Cast to bfloat16: bfloat16. The steps begin at the node.
    cast = None
    is_dequantized = False
    for step in origin.steps:
        proto = step.node.proto
        if is_dequantized and proto.op_type in QUANTIZE:
            return quantized_dtype(step)
        is_dequantized = is_dequantized or proto.op_type in DEQUANTIZE
        if proto.op_type == "Cast" and cast is None:
            cast = DTYPES.get(integer(proto, "to", 0), "unknown")
    if cast is not None and not is_dequantized:
        return cast
    return "unknown" if origin.tensor is None else dtype_name(origin.tensor)


def _zero_point_reason(origin: Trace) -> Reason | None:
    """A ZERO_POINT reason where a stored zero is not a real zero: int8 must be symmetric."""
    for step in origin.steps:
        if step.node.proto.op_type not in (*QUANTIZE, *DEQUANTIZE):
            continue
        value = _zero_point(step.node, step.scope)
        if value != 0:
            number = "not a constant" if value is None else f"{value:g}"
            return Reason(
                code=ReasonCode.ZERO_POINT,
                message=f"{step.node.op} node {step.node.label!r} of weight {origin.constant!r}"
                f" has the zero point {number}; sparse math needs 0: quantise symmetrically",
            )
    return None


def multiply_adds(scope: Scope, node: Node) -> int | None:
    """Multiply-adds of a node at the declared shapes; None: another op, or shapes not known."""
    # MatMul (2, 7, 64) @ (64, 32): 2 * 7 * 32 outputs, 64 for each. Conv of (1, 16, 9, 9) by
    # (32, 16, 3, 3): 1 * 32 * 7 * 7 outputs, 16 * 3 * 3 for each. LSTM: all weights at each step.
    if node.op not in _COUNTED:
        return None
    proto = node.proto
    is_recurrent = node.op in _RECURRENT
    names = proto.input[: 3 if is_recurrent else 2]
    shapes = [shape for name in names if (shape := tensor_shape(scope, name)) is not None]
    if len(shapes) < max(len(names), _OPERANDS):
        return None
    data, weight, *_ = shapes
    if is_recurrent:
        return prod(data[:2]) * sum(map(prod, shapes[1:]))
    output: tuple[int, ...] | None = data
    if node.op != "ConvTranspose":
        output = tensor_shape(scope, (*proto.output, "")[0])
    length = _summed(node, data, weight)
    return None if output is None or length is None else prod(output) * length


def _summed(node: Node, data: tuple[int, ...], weight: tuple[int, ...]) -> int | None:
    """How many products are summed for each output."""
    if node.op == "Einsum":
        return _einsum_length(attribute_text(node, "equation"), (data, weight))
    if "Conv" in node.op:
        return prod(weight[1:])
    if node.op == "Gemm" and integer(node.proto, "transA", 0):
        return prod(data[:1])
    return prod(data[-1:])


def _einsum_length(equation: str, shapes: Iterable[tuple[int, ...]]) -> int | None:
    """The sizes of the letters that are not in the output, multiplied."""
    # "...ab,abc->...c" of (2, 5, 3, 4) and (3, 4, 6): a is 3 and b is 4, counted from the end
    terms = einsum_terms(equation)
    if terms is None:
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=False):
        for pairs in (zip(term, shape, strict=False), zip(term[::-1], shape[::-1], strict=False)):
            sizes.update(takewhile(lambda pair: pair[0] != _DOTS, pairs))
    return prod(size for letter, size in sizes.items() if letter not in terms[2])


def graph_runs(opened: Sequence[Scope]) -> dict[Scope, int | None]:
    """How often each graph runs in one run of the model: 0 for the lighter branch of an If.

    None: it is not known how often a loop runs, or which branch is the heavier one. `opened` has
    each graph before the graphs inside it.
    """
    # a Loop of 10 trips whose body has an If with branches of 64 and 96 multiply-adds: in one run
    # of its graph the body runs 10 times, the branches 0 times and once; of the model 10, 0 and 10
    times: dict[Scope, int | None] = {}
    work: dict[Scope, int | None] = {}
    for scope in reversed(opened):
        numbers = [multiply_adds(scope, node) for node in scope.nodes if node.op in _COUNTED]
        for node, bodies in scope.bodies.items():
            inner = [work[body] for body in bodies]
            often = _branches(inner) if node.op == "If" else [_trips(scope, node, bodies[0])]
            times.update(zip(bodies, often, strict=False))
            numbers += map(repeated, inner, often)
        work[scope] = None if None in numbers else sum(filter(None, numbers))
    runs: dict[Scope, int | None] = {opened[0]: 1}
    for scope in opened[1:]:
        runs[scope] = repeated(times.get(scope), runs[scope.parent or scope])
    return runs


def repeated(number: int | None, times: int | None) -> int | None:
    """The product; None where one of them is not known."""
    return None if number is None or times is None else number * times


def _branches(work: Sequence[int | None]) -> list[int | None]:
    """1 for the branch with the most multiply-adds, 0 for the other; None if one is not known."""
    known = [number for number in work if number is not None]
    if len(known) < len(work):
        return [None] * len(work)
    heaviest = known.index(max(known))
    return [int(at == heaviest) for at in range(len(known))]


def _trips(scope: Scope, node: Node, body: Scope) -> int | None:
    """How often a Loop runs its body; None where that depends on the input, and for a Scan."""
    if node.op != "Loop":
        return None
    try:
        goes_on = trace(body, body.graph.output[0].name)
        ends_early = goes_on.tensor is None and goes_on.constant != body.graph.input[1].name
        trips = scope.constant(node.proto.input[0])
    except LookupError:
        return None
    if ends_early or trips is None or trips.data_type != onnx.TensorProto.INT64:
        return None
    counts = read_tensor(trips, scope.path).reshape(-1).tolist()
    return counts[0] if counts else None


def refusal_reason(opened: Iterable[Scope]) -> Reason | None:
    """A ZERO_POINT reason where TensorRT refuses to parse the whole file."""
    for scope in opened:
        for node in scope.nodes:
            if node.proto.op_type not in (*QUANTIZE, *DEQUANTIZE):
                continue
            value = _zero_point(node, scope)
            if value:
                return Reason(
                    code=ReasonCode.ZERO_POINT,
                    message=f"TensorRT refuses the file: {node.op} node {node.label!r} has the zero"
                    f" point {value:g}, and it accepts only 0",
                    source="onnx-tensorrt: Non-zero zero point is not supported",
                )
    return None


def quantized_tensors(scope: Scope) -> frozenset[str]:
    """Tensors that QuantizeLinear alone uses, directly or behind ops that TensorRT fuses."""
    # conv -> relu -> QuantizeLinear: from the end, relu's output is one, and so is conv's
    quantized: set[str] = set()
    for node in reversed(scope.nodes):
        for name in node.proto.output:
            users = scope.users.get(name, ())
            if not users or name in scope.outputs:
                continue
            if all(_is_quantizing(user.proto, quantized) for user in users):
                quantized.add(name)
    return frozenset(quantized)


def _is_quantizing(user: onnx.NodeProto, quantized: set[str]) -> bool:
    if user.op_type in QUANTIZE:
        return True
    return user.op_type in _UP_TO_QUANTIZE and quantized.issuperset(user.output[:1])


def quantized_dtype(step: TraceStep) -> str:
    """The type that a quantize node writes: the zero point's, else the attribute's, else uint8."""
    node = step.node.proto
    if node.op_type == "TRT_FP8QuantizeLinear":
        return "float8_e4m3fn"
    if len(node.input) > 2 and node.input[2]:
        tensor = step.scope.constant(node.input[2])
        if tensor is not None:
            return dtype_name(tensor)
    return DTYPES.get(integer(node, "output_dtype", 0) or onnx.TensorProto.UINT8, "unknown")


def _zero_point(node: Node, scope: Scope) -> float | None:
    """The zero point that is furthest from 0; None where it is not a readable constant."""
    proto = node.proto
    if len(proto.input) < 3 or not proto.input[2]:
        return 0.0
    tensor = scope.constant(proto.input[2])
    if tensor is None:
        return None
    if not is_readable(dtype_name(tensor)):
        return 0.0  # packed types are refused for their type
    values = read_tensor(tensor, scope.path).astype(np.float32).reshape(-1)
    return float(values[np.argmax(np.abs(values))]) if values.size else 0.0
