"""A node with a weight as a layer: reduction axis, groups, channels, types of its math."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from math import prod

import numpy as np

from twofour.errors import BadInputError
from twofour.graph.files import DTYPES, dtype_name, is_groupable, is_readable, read_tensor, shape_of
from twofour.graph.scope import Node, Scope, attribute, integer, integers, is_standard, tensor_shape
from twofour.graph.trace import (
    DEQUANTIZE,
    QUANTIZE,
    STACK,
    Landing,
    Trace,
    TraceStep,
    crossing,
    land,
    trace,
    traced_shapes,
)
from twofour.records.weights import Pattern, Reason, ReasonCode, Weight, shared

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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    summed = [letter for letter in weight if letter in other and letter not in output]
    lost = [x for x in (*weight, *other) if x not in output and x not in summed]
    if len(summed) != 1 or lost or _DOTS in weight:
        return None
    if any(len(set(term)) != len(term) for term in (weight, other)):
        return None
    return EinsumWeight(
        axis=weight.index(summed[0]),
        out_axes=tuple(a for a, x in enumerate(weight) if x not in other),
        batch_axes=tuple(a for a, x in enumerate(weight) if x in other and x in output),
    )


def einsum_terms(equation: str) -> tuple[tuple[str, ...], ...] | None:
    """Letters of both operands and of the output ("..." is one); None for other equations."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    given = left.split(",")
    if len(given) != _OPERANDS or not all(_TERM.fullmatch(term) for term in (*given, right)):
        return None
    first, second = map(_letters, given)
    if arrow:
        return first, second, _letters(right)
    every = [*first, *second]
    once = sorted(x for x in set(every) if every.count(x) == 1 and x != _DOTS)
    return first, second, (*([_DOTS] if _DOTS in every else []), *once)


def _letters(term: str) -> tuple[str, ...]:
    before, dots, after = term.partition(_DOTS)
    return (*before, *([_DOTS] if dots else []), *after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A node with its weight, and the way to the weight's constant."""

    node: Node
    scope: Scope
    """The graph that contains the node."""
    weight: Weight
    found: Trace
    position: int
    """Which input of the node is the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
        fits = [at for at in (1, 0) if at < len(inputs) and _einsum(node, at) is not None]
        fixed = (at for at in fits if scope.is_fixed(inputs[at]))
        picked = (at for at in fits if _is_picked(scope, inputs[at]))
        return next(chain(fixed, picked), None)
    if len(inputs) < 2 or not (inputs[0] and inputs[1]):
        raise BadInputError(
            f"{node.op} node {node.label!r} has fewer than two inputs: the model is damaged"
        )
    if node.op in ("Conv", "ConvTranspose") or scope.is_fixed(inputs[1]):
        return 1
    if scope.is_fixed(inputs[0]):
        return 0
    if node.op == "Gemm":
        return 1
    return next((at for at in (1, 0) if _is_picked(scope, inputs[at])), None)


def _einsum(node: Node, position: int) -> EinsumWeight | None:
    return einsum_weight(attribute_text(node, "equation"), position)


def attribute_text(node: Node, name: str) -> str:
    """The text attribute of that name; "" where the node has none."""
    found = attribute(node.proto, name)
    return "" if found is None else found.s.decode(errors="replace")


def _is_picked(scope: Scope, name: str) -> bool:
    """Whether the tensor is a matrix picked at run time from a stack of constant ones."""
    if scope.is_fixed(name):
        return False
    found = trace(scope, name)
    return found.tensor is not None and len(found.tensor.dims) >= STACK


def layer_of_node(
    scope: Scope, node: Node, position: int, pattern: Pattern | None, *, quantized: bool
) -> Layer:
    """The Weight of a node; `quantized` says whether its output goes to QuantizeLinear."""
    name = node.proto.input[position]
    found = trace(scope, name)
    if found.tensor is None:
        assert found.stopped is not None
        seen = _size(node, position, tensor_shape(scope, name)) or _unknown(node)
        weight = _describe(node, replace(seen, axis=None), found, (found.stopped,))
    elif found.looked_up is not None:
        weight = _picked_weight(node, position, found, found.looked_up.node)
    else:
        weight = _constant_weight(node, position, found, pattern)
        marks = {entry.key for entry in node.proto.metadata_props}
        weight = replace(weight, float_on_purpose=FLOAT_ON_PURPOSE in marks)
        if weight.math_dtype == "int8":
            weight = replace(weight, output_quantized=quantized)
    return Layer(node=node, scope=scope, weight=weight, found=found, position=position)


def _picked_weight(node: Node, position: int, found: Trace, pick: Node) -> Weight:
    """A weight without an axis: each run picks another part of the array."""
    assert found.tensor is not None
    seen = _size(node, position, shape_of(found.tensor)) if len(found.steps) == 1 else None
    reason = Reason(
        code=ReasonCode.PICKED_AT_RUN_TIME,
        message=f"the weight is picked from {found.constant!r} at run time by"
        f" {pick.op} node {pick.label!r}",
    )
    return _describe(node, replace(seen or _unknown(node), axis=None), found, (reason,))


def _constant_weight(node: Node, position: int, found: Trace, pattern: Pattern | None) -> Weight:
    assert found.tensor is not None
    known = traced_shapes(found)
    if isinstance(known, Reason):
        return _describe(node, _unknown(node), found, (known,))
    seen = _size(node, position, known[0])
    if seen is None:
        reason = Reason(
            code=ReasonCode.UNSUPPORTED_OP,
            message=f"a weight of shape {list(known[0])} does not fit {node.op}",
        )
        return _describe(node, _unknown(node), found, (reason,))
    landing = _landing(node, seen, found, known, pattern)
    stored, unfit = dtype_name(found.tensor), None
    if not is_groupable(stored):
        said = f"weight {found.constant!r} is stored as {stored}"
        unfit = Reason(code=ReasonCode.DTYPE, message=said)
    against = (landing, unfit, _zero_point_reason(found))
    reasons = tuple(reason for reason in against if isinstance(reason, Reason))
    axis = None if reasons or isinstance(landing, Reason) else landing.axis
    return _describe(node, replace(seen, axis=axis), found, reasons)


def _landing(
    node: Node,
    seen: _LayerSize,
    found: Trace,
    known: tuple[tuple[int, ...], ...],
    pattern: Pattern | None,
) -> Landing | Reason:
    """Where the reduction axis is stored, unless groups of the pattern would be cut there."""
    assert seen.axis is not None
    run = None
    if node.op == "ConvTranspose" and seen.groups > 1 and pattern is not None:
        # along its axis 0 are the input channels of all groups, one group after the other
        run = seen.in_channels // seen.groups
        if run % pattern.m:
            return Reason(
                code=ReasonCode.AXIS_NOT_MULTIPLE,
                message=f"each of the {seen.groups} groups has {run} input channels along"
                f" axis 0, no multiple of {pattern.m}",
            )
    landing = land(found, known, Landing(axis=seen.axis, run=run))
    if isinstance(landing, Reason) or landing.run is None:
        return landing
    if pattern is None or landing.run % pattern.m:
        return crossing(found, landing)
    return landing


def _size(node: Node, position: int, shape: tuple[int, ...] | None) -> _LayerSize | None:
    """Axis and channels of a weight of this shape; None where it does not fit the op."""
    if shape is None:
        return None
    if node.op in ("Conv", "ConvTranspose"):
        return _convolution(node, shape)
    if node.op == "Einsum":
        return _einsum_size(node, position, shape)
    if node.op == "Gemm":
        if len(shape) != 2:
            return None
        flipped = bool(integer(node.proto, "transB" if position else "transA", 0))
        axis = int(flipped) if position else int(not flipped)
        width, out = shape[axis], shape[1 - axis]
    else:
        if not shape:
            return None
        axis = max(len(shape) - 2, 0) if position else len(shape) - 1
        other = shape[-1] if position else shape[-2:][0]
        width, out = shape[axis], other if len(shape) > 1 else 1
    form = None if position else "a weight on the left of its product"
    if prod(shape[:-2]) > 1:
        form = "a stack of matrices"
    return _LayerSize(axis=axis, groups=1, in_channels=width, out_channels=out, form=form)


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
    groups = integer(node.proto, "group", 1)
    if len(shape) < 2 or groups < 1:
        return None
    axis, width, out = 1, shape[1] * groups, shape[0]
    if node.op == "ConvTranspose":
        axis, width, out = 0, shape[0], shape[1] * groups
    return _LayerSize(
        axis=axis, groups=groups, in_channels=width, out_channels=out, kernel=shape[2:]
    )


def _unknown(node: Node) -> _LayerSize:
    """What the attributes alone say; channels that are not known are 0."""
    kernel = attribute(node.proto, "kernel_shape")
    return _LayerSize(
        axis=None,
        groups=max(1, integer(node.proto, "group", 1)),
        in_channels=0,
        out_channels=0,
        kernel=tuple(kernel.ints) if kernel is not None else (),
    )


def _describe(node: Node, seen: _LayerSize, found: Trace, reasons: tuple[Reason, ...]) -> Weight:
    stored = found.tensor
    return Weight(
        **shared(seen, _LayerSize),
        layer=node.label,
        node=node.name,
        weight=None if stored is None else found.constant,
        op=node.op,
        shape=() if stored is None else tuple(stored.dims),
        dtype="unknown" if stored is None else dtype_name(stored),
        math_dtype=_math_dtype(found),
        trace=tuple(step.node.op for step in found.steps),
        reasons=reasons,
    )


def _math_dtype(found: Trace) -> str:
    """The type of the math: quantised behind a DequantizeLinear, else what the last Cast makes."""
    stored = "unknown" if found.tensor is None else dtype_name(found.tensor)
    ops = [step.node.proto.op_type for step in found.steps]
    quantized = next((at for at, op in enumerate(ops) if op in DEQUANTIZE), None)
    if quantized is not None:
        behind = (s for s in found.steps[quantized:] if s.node.proto.op_type in QUANTIZE)
        step = next(behind, None)
        return stored if step is None else _quantized_dtype(step)
    for step in found.steps:
        if step.node.proto.op_type == "Cast":
            return DTYPES.get(integer(step.node.proto, "to", 0), "unknown")
    return stored


def _zero_point_reason(found: Trace) -> Reason | None:
    """A ZERO_POINT reason where a stored zero is not a real zero: int8 must be symmetric."""
    for step in found.steps:
        if step.node.proto.op_type not in (*QUANTIZE, *DEQUANTIZE):
            continue
        value = _zero_point(step.node, step.scope)
        if value != 0:
            said = "not a constant" if value is None else f"{value:g}"
            return Reason(
                code=ReasonCode.ZERO_POINT,
                message=f"{step.node.op} node {step.node.label!r} of weight {found.constant!r}"
                f" has the zero point {said}; sparse math needs 0: quantise symmetrically",
            )
    return None


def multiply_adds(scope: Scope, node: Node) -> int | None:
    """Multiply-adds of a node at the declared shapes; None: another op, or shapes not known."""
    proto, op = node.proto, node.op
    names = proto.input[: 3 if op in _RECURRENT else 2]
    shapes = [shape for name in names if (shape := tensor_shape(scope, name)) is not None]
    if op not in _COUNTED or len(shapes) < len(names) or len(shapes) < _OPERANDS:
        return None
    data, weight, *_ = shapes
    if op in _RECURRENT:
        return prod(data[:2]) * sum(map(prod, shapes[1:]))
    output = data if op == "ConvTranspose" else tensor_shape(scope, (*proto.output, "")[0])
    if op == "Einsum":
        length = _einsum_length(attribute_text(node, "equation"), shapes)
    elif "Conv" in op:
        length = prod(weight[1:])
    else:
        axis = 0 if op == "Gemm" and integer(proto, "transA", 0) else len(data) - 1
        length = prod(data[axis : axis + 1])
    return None if output is None or length is None else prod(output) * length


def _einsum_length(equation: str, shapes: Iterable[tuple[int, ...]]) -> int | None:
    """The sizes of the letters that are not in the output, multiplied."""
    # "...ab,abc->...c" of (2, 5, 3, 4) and (3, 4, 6): a is 3 and b is 4, counted from the end
    terms = einsum_terms(equation) or ()
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=False):
        for pairs in (zip(term, shape, strict=False), zip(term[::-1], shape[::-1], strict=False)):
            sizes.update(takewhile(lambda pair: pair[0] != _DOTS, pairs))
    return prod(size for x, size in sizes.items() if x not in terms[2]) if terms else None


def graph_runs(opened: Sequence[Scope]) -> dict[Scope, int | None]:
    """How often each graph runs in one run of the model: 0 for the lighter branch of an If.

    None: it is not known how often a loop runs, or which branch is the heavier one. `opened` has
    each graph before the graphs inside it.
    """
    each: dict[Scope, int | None] = {}
    work: dict[Scope, int | None] = {}
    for scope in reversed(opened):
        numbers = [multiply_adds(scope, node) for node in scope.nodes if node.op in _COUNTED]
        for node, bodies in scope.bodies.items():
            found = [work[body] for body in bodies]
            own = _branches(found) if node.op == "If" else [_trips(scope, node, bodies[0])]
            each |= zip(bodies, own, strict=False)
            numbers += map(repeated, found, own)
        work[scope] = None if None in numbers else sum(filter(None, numbers))
    runs: dict[Scope, int | None] = {opened[0]: 1}
    for scope in opened[1:]:
        runs[scope] = repeated(each.get(scope), runs[scope.parent or scope])
    return runs


def repeated(number: int | None, times: int | None) -> int | None:
    """The product; None where one of them is not known."""
    return None if number is None or times is None else number * times


def _branches(work: Sequence[int | None]) -> list[int | None]:
    """1 for the branch with the most multiply-adds, 0 for the other; None if one is not known."""
    known = [number for number in work if number is not None]
    if len(known) < len(work):
        return [None] * len(work)
    return [int(at == known.index(max(known))) for at in range(len(known))]


def _trips(scope: Scope, node: Node, body: Scope) -> int | None:
    """How often a Loop runs its body; None where that depends on the input, and for a Scan."""
    if node.op != "Loop":
        return None
    try:
        goes_on = trace(body, body.graph.output[0].name)
        ends_early = goes_on.tensor is None and goes_on.constant != body.graph.input[1].name
        counts = integers(node, scope, 0, "")
    except LookupError:
        return None
    return counts[0] if counts and not ends_early else None


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
    if not any(node.proto.op_type in QUANTIZE for node in scope.nodes):
        return frozenset()
    found: set[str] = set()
    for node in reversed(scope.nodes):
        for name in node.proto.output:
            users = scope.users.get(name, ())
            quantized = (
                user.op_type in QUANTIZE
                or (user.op_type in _UP_TO_QUANTIZE and found.issuperset(user.output[:1]))
                for user in (each.proto for each in users)
            )
            if users and name not in scope.outputs and all(quantized):
                found.add(name)
    return frozenset(found)


def _quantized_dtype(step: TraceStep) -> str:
    """The type that a quantize node writes: the zero point's, else the attribute's, else uint8."""
    node = step.node.proto
    if node.op_type == "TRT_FP8QuantizeLinear":
        return "float8_e4m3fn"
    if len(node.input) > 2 and node.input[2]:
        tensor = step.scope.constant(node.input[2])
        if tensor is not None:
            return dtype_name(tensor)
    return DTYPES.get(integer(node, "output_dtype", 2), "unknown")


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
