"""What a layer computes in: the type behind Cast and Quantize/DequantizeLinear, and zero points."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from twofour.graph.files import DTYPES, dtype_name, is_readable, read_tensor
from twofour.graph.scope import Node, Scope, integer
from twofour.graph.trace import DEQUANTIZE, QUANTIZE, Step, Trace
from twofour.records.weights import Reason, ReasonCode

# Ops that TensorRT fuses into the layer before them or moves a Q node across. Source: TensorRT
# developer guide, "Working with Quantized Types", Q/DQ placement and fusions.
_UP_TO_QUANTIZE = (
    "Add",
    "Cast",
    "Clip",
    "Div",
    "Dropout",
    "Elu",
    "Erf",
    "Flatten",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "MaxPool",
    "Mish",
    "Mul",
    "PRelu",
    "Relu",
    "Reshape",
    "Selu",
    "Sigmoid",
    "Softplus",
    "Squeeze",
    "Sub",
    "Tanh",
    "Transpose",
    "Unsqueeze",
)


def math_dtype(found: Trace) -> str:
    """The quantised type where a DequantizeLinear lies before the weight, else the last cast's."""
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


def zero_point_reason(found: Trace) -> Reason | None:
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


def refusal_reason(opened: Iterable[Scope]) -> Reason | None:
    """A ZERO_POINT reason for every layer of a file that TensorRT does not parse for a zero point.

    Of activations too: the parser takes 0 alone, of int8 and of uint8 (but for DLA).
    """
    for scope in opened:
        for node in scope.nodes:
            if node.proto.op_type not in (*QUANTIZE, *DEQUANTIZE):
                continue
            value = _zero_point(node, scope)
            if value:
                return Reason(
                    code=ReasonCode.ZERO_POINT,
                    message=f"TensorRT refuses the file: {node.op} node {node.label!r} has the zero"
                    f" point {value:g}, and it takes 0 alone",
                    source="onnx-tensorrt: Non-zero zero point is not supported",
                )
    return None


def quantized_tensors(scope: Scope) -> frozenset[str]:
    """Tensors that are used by QuantizeLinear alone, or reach it through ops that fuse.

    One pass from the outputs to the inputs; a tensor with any other use stays in float.
    """
    if not any(node.proto.op_type in QUANTIZE for node in scope.nodes):
        return frozenset()
    found: set[str] = set()
    for node in reversed(scope.nodes):
        for name in node.proto.output:
            users = scope.users.get(name, ())
            if users and name not in scope.outputs and all(_quantizes(u, found) for u in users):
                found.add(name)
    return frozenset(found)


def _quantizes(user: Node, found: set[str]) -> bool:
    proto = user.proto
    if proto.op_type in QUANTIZE:
        return True
    return proto.op_type in _UP_TO_QUANTIZE and bool(proto.output) and proto.output[0] in found


def _quantized_dtype(step: Step) -> str:
    """What a quantize node writes: the zero point's type, else the attribute, else uint8."""
    node = step.node.proto
    if node.op_type == "TRT_FP8QuantizeLinear":
        return "float8_e4m3fn"
    if len(node.input) > 2 and node.input[2]:
        owner = step.scope.owner(node.input[2])
        tensor = owner.constants.get(node.input[2]) if owner else None
        if tensor is not None:
            return dtype_name(tensor)
    return DTYPES.get(integer(node, "output_dtype", 2), "unknown")


def _zero_point(node: Node, scope: Scope) -> float | None:
    """The zero point that is furthest from 0; None where it is not a readable constant."""
    proto = node.proto
    if len(proto.input) < 3 or not proto.input[2]:
        return 0.0
    owner = scope.owner(proto.input[2])
    tensor = owner.constants.get(proto.input[2]) if owner else None
    if owner is None or tensor is None:
        return None
    if not is_readable(dtype_name(tensor)):
        return 0.0  # packed types are refused for their type
    values = read_tensor(tensor, owner.path).astype(np.float32).reshape(-1)
    return float(values[np.argmax(np.abs(values))]) if values.size else 0.0
