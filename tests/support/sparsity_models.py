"""Two small ONNX models, float16 and int8, in which the status of every layer is known beforehand.

Opset 17 and onnx.helper alone, so that TensorRT 8.6 reads them and no torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from twofour.pruning.methods.magnitude import prune_in_place
from twofour.records.weights import Pattern, ReasonCode

Floats: TypeAlias = NDArray[np.floating[Any]]

STEM, WIDE, GROUPED, BROKEN = "/stem/Conv", "/wide/Conv", "/grouped/Conv", "/broken/Conv"
MIX, HEAD = "/mix/MatMul", "/head/Gemm"
CHANNELS, WIDTH = 256, 1024
SIDE = 32
"""Of the square images: SIDE * SIDE is WIDTH."""
BATCH = 8
OPSET = 17
IR_VERSION = 8
STEP = 6 / 127
"""Quantisation step of every activation of the int8 model: they stay below 6, nearly all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsityModel:
    """A model with a 2:4 convolution, WIDE, among layers that no builder may run sparse."""

    name: str
    proto: onnx.ModelProto
    reference: onnx.ModelProto
    """The same arithmetic in float32, for onnx.reference."""
    channels: int
    """Of the input x, [batch, channels, SIDE, SIDE]."""
    layers: Mapping[str, ReasonCode | None]
    """Every node with a weight -> what rules it out; None: its weight is 2:4."""
    largest_error: float
    """Of the outputs, as a part of the largest expected value."""

    @property
    def shapes(self) -> str:
        """--shapes: a dynamic batch of 1 to BATCH, timed at BATCH."""
        image = f"x{self.channels}x{SIDE}x{SIDE}"
        return f"x=1{image}:{BATCH}{image}:{BATCH}{image}"

    def inputs(self, batch: int) -> dict[str, Floats]:
        """The same normal numbers every time."""
        shape = (batch, self.channels, SIDE, SIDE)
        return {"x": np.random.default_rng(1).normal(size=shape).astype(np.float32)}

    def expected(self, inputs: Mapping[str, Floats]) -> Floats:
        """The output y by onnx.reference."""
        (y,) = ReferenceEvaluator(self.reference).run(["y"], dict(inputs))
        return np.asarray(y)


def float16_model() -> SparsityModel:
    """Convolutions, a MatMul and a Gemm in float16 between float32 inputs and outputs."""
    return SparsityModel(
        name="float16",
        proto=_float_model(np.dtype(np.float16)),
        reference=_float_model(np.dtype(np.float32)),
        channels=3,
        layers={
            STEM: ReasonCode.AXIS_NOT_MULTIPLE,
            WIDE: None,
            GROUPED: ReasonCode.GROUPED_CONV,
            BROKEN: ReasonCode.PATTERN_BROKEN,
            MIX: None,
            HEAD: None,
        },
        largest_error=0.02,
    )


def int8_model() -> SparsityModel:
    """Two convolutions between explicit Q/DQ pairs, symmetric, the weights per output channel."""
    return SparsityModel(
        name="int8",
        proto=_quantized_model(OPSET),
        reference=_quantized_model(19),  # the first whose DequantizeLinear onnx.reference has
        channels=CHANNELS,
        layers={WIDE: None, BROKEN: ReasonCode.PATTERN_BROKEN},
        largest_error=3 / 127,  # three steps: a value on the edge of one may round either way
    )


def dense_convolution() -> onnx.ModelProto:
    """One float16 convolution that is still to be pruned."""
    nodes = [_cast("x", "x16", np.float16), *_convolution(WIDE, "x16"), _cast("w", "y", np.float32)]
    weights = {"w.weight": _weight(64, 64, 3, 3), "w.bias": np.zeros(64)}
    return _model(nodes, _stored(weights, np.dtype(np.float16)), 64, [SIDE, SIDE])


def two_of_four(values: Floats, axis: int) -> Floats:
    """The values with the two smallest of every four along the axis set to zero."""
    sparse: Floats = values.copy()
    prune_in_place(sparse, axis, Pattern(2, 4))
    return sparse


def _float_model(dtype: np.dtype[Any]) -> onnx.ModelProto:
    """Weights are rounded to float16 and stored, and computed with, as `dtype`."""
    nodes = [
        _cast("x", "x16", dtype),
        *_convolution(STEM, "x16"),
        *_convolution(WIDE, "s"),
        *_convolution(GROUPED, "w", group=4),
        *_convolution(BROKEN, "g"),
        helper.make_node("Reshape", ["b", "rows"], ["r"], name="/rows/Reshape"),
        helper.make_node("MatMul", ["r", "m.weight"], ["m"], name=MIX),
        helper.make_node("ReduceMean", ["m"], ["p"], name="/mean/ReduceMean", axes=[1], keepdims=0),
        helper.make_node("Gemm", ["p", "h.weight", "h.bias"], ["h"], name=HEAD, transB=1),
        _cast("h", "y", dtype=np.float32),
    ]
    constants = _stored(_float_weights(), dtype)
    constants.append(numpy_helper.from_array(np.array([0, CHANNELS, WIDTH]), "rows"))
    return _model(nodes, constants, 3, [])


def _float_weights() -> dict[str, Floats]:
    weights: dict[str, Floats] = {
        "s.weight": _weight(CHANNELS, 3, 3, 3),
        "w.weight": two_of_four(_weight(CHANNELS, CHANNELS, 3, 3), 1),
        "g.weight": two_of_four(_weight(CHANNELS, CHANNELS // 4, 3, 3), 1),
        "b.weight": _broken(_weight(CHANNELS, CHANNELS, 3, 3)),
        "m.weight": two_of_four(_weight(WIDTH, WIDTH), 0),
        "h.weight": two_of_four(_weight(WIDTH, WIDTH), 1),
        "h.bias": np.linspace(-1, 1, WIDTH),
    }
    return weights | {f"{name}.bias": np.linspace(-0.1, 0.1, CHANNELS) for name in "swgb"}


def _quantized_model(opset: int) -> onnx.ModelProto:
    weights = {
        "w": two_of_four(_weight(CHANNELS, CHANNELS, 3, 3), 1),
        "b": _broken(_weight(CHANNELS, CHANNELS, 3, 3)),
    }
    nodes = [
        *_quantized("x", "xq", "step", "zero"),
        *_quantized_convolution(WIDE, "xq", "wq"),
        *_quantized_convolution(BROKEN, "wq", "y"),
    ]
    constants: dict[str, NDArray[Any]] = {
        "step": np.array(STEP, np.float32),
        "zero": np.array(0, np.int8),
    }
    for name, values in weights.items():
        largest = np.abs(values).max(axis=(1, 2, 3))
        constants[f"{name}.weight"] = values.astype(np.float32)
        constants[f"{name}.scale"] = (largest / 127).astype(np.float32)
        constants[f"{name}.zero"] = np.zeros(CHANNELS, np.int8)
        constants[f"{name}.bias"] = np.linspace(-0.1, 0.1, CHANNELS, dtype=np.float32)
    stored = [numpy_helper.from_array(values, name) for name, values in constants.items()]
    return _model(nodes, stored, CHANNELS, [SIDE, SIDE], opset=opset)


def _quantized_convolution(name: str, given: str, made: str) -> list[NodeProto]:
    """`made` are the output's values after a Q/DQ pair of their own."""
    key = name[1]
    return [
        *_quantized(f"{key}.weight", f"{key}.weight.q", f"{key}.scale", f"{key}.zero"),
        *_convolution(name, given, weight=f"{key}.weight.q"),
        *_quantized(key, made, "step", "zero"),
    ]


def _quantized(given: str, made: str, scale: str, zero: str) -> list[NodeProto]:
    """QuantizeLinear and DequantizeLinear, with one scale or, of a weight, along axis 0."""
    rounded = f"{made}.int8"
    pair = [
        helper.make_node("QuantizeLinear", [given, scale, zero], [rounded], name=f"/{made}/Q"),
        helper.make_node("DequantizeLinear", [rounded, scale, zero], [made], name=f"/{made}/DQ"),
    ]
    if scale.endswith(".scale"):
        for node in pair:
            node.attribute.append(helper.make_attribute("axis", 0))
    return pair


def _convolution(
    name: str, given: str, *, group: int = 1, weight: str | None = None
) -> list[NodeProto]:
    """3x3 with padding, bias and Relu; its tensors are called after the name's first letter."""
    key = name[1]
    inputs = [given, weight or f"{key}.weight", f"{key}.bias"]
    return [
        helper.make_node("Conv", inputs, [f"{key}.sum"], name=name, pads=[1] * 4, group=group),
        helper.make_node("Relu", [f"{key}.sum"], [key], name=name.replace("Conv", "Relu")),
    ]


def _cast(given: str, made: str, dtype: Any) -> NodeProto:
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_node("Cast", [given], [made], name=f"/{made}/Cast", to=to)


def _weight(*shape: int) -> Floats:
    """Normal values scaled so that a Relu layer with half of them keeps the size of its input."""
    fan_in = int(np.prod(shape[1:]))
    values: Floats = np.random.default_rng(0).normal(scale=np.sqrt(4 / fan_in), size=shape)
    return values


def _broken(values: Floats) -> Floats:
    """2:4 along the input channels but for the first group of the first output channel."""
    sparse = two_of_four(values, 1)
    sparse[0, :4, 0, 0] = 0.05
    return sparse


def _stored(weights: Mapping[str, Floats], dtype: np.dtype[Any]) -> list[TensorProto]:
    return [
        numpy_helper.from_array(values.astype(np.float16).astype(dtype), name)
        for name, values in weights.items()
    ]


def _model(
    nodes: Sequence[NodeProto],
    constants: Sequence[TensorProto],
    channels: int,
    output_image: Sequence[int],
    *,
    opset: int = OPSET,
) -> onnx.ModelProto:
    """Float32 input x and output y; an image comes out with the channels that go in."""
    made = [channels, *output_image] if output_image else [WIDTH]
    graph = helper.make_graph(
        nodes,
        "sparsity",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", channels, SIDE, SIDE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", *made])],
        constants,
    )
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
