"""Small ONNX models built by hand, one per way in which a weight can be stored and used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from twofour.graph.files import DTYPES, load_external
from twofour.graph.opened import open_onnx

Array = NDArray[Any]
CODES = {name: code for code, name in DTYPES.items()}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def weights(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    """Normal values without a zero; integers between -127 and 127."""
    values: Array = np.random.default_rng(seed).normal(size=shape)
    if np.dtype(dtype).kind == "i":
        values = np.sign(values) * (1 + np.abs(values * 30).clip(0, 126).round())
    return values.astype(dtype)


def tensor(name: str, values: Array) -> TensorProto:
    """A tensor with raw data, of any type numpy holds."""
    return helper.make_tensor(
        name, CODES[values.dtype.name], values.shape, values.tobytes(), raw=True
    )


def graph(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, Array],
    *,
    inputs: Mapping[str, Sequence[int | str]] | None = None,
    outputs: Sequence[str] = ("y",),
    output_shape: Sequence[int | str] | None = None,
    dtype: Any = np.float32,
) -> onnx.GraphProto:
    """Inputs and outputs are of that type; outputs declare `output_shape`, or no shape."""
    kind = CODES[np.dtype(dtype).name]
    return helper.make_graph(
        list(nodes),
        "graph",
        [
            helper.make_tensor_value_info(key, kind, list(shape))
            for key, shape in (inputs or {}).items()
        ],
        [helper.make_tensor_value_info(key, kind, output_shape) for key in outputs],
        [tensor(key, values) for key, values in constants.items()],
    )


def model(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, Array],
    *,
    inputs: Mapping[str, Sequence[int | str]] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 21,
    dtype: Any = np.float32,
) -> onnx.ModelProto:
    """A model around one graph."""
    body = graph(nodes, constants, inputs=inputs, outputs=outputs, dtype=dtype)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def matmul(weight: Array, *, rank: int = 2) -> onnx.ModelProto:
    """x @ w, where x has `rank` dimensions."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")
    width = weight.shape[-2] if weight.ndim > 1 else weight.shape[0]
    return model([node], {"w": weight}, inputs={"x": [2] * (rank - 1) + [width]})


def gemm(weight: Array, *, trans_b: int) -> onnx.ModelProto:
    """Gemm with the weight as B."""
    node = helper.make_node("Gemm", ["x", "w"], ["y"], name="fc", transB=trans_b)
    return model([node], {"w": weight}, inputs={"x": [2, weight.shape[trans_b]]})


def conv(weight: Array, *, groups: int = 1, op: str = "Conv") -> onnx.ModelProto:
    """A convolution of any rank, named "conv"."""
    node = helper.make_node(op, ["x", "w"], ["y"], name="conv", group=groups)
    channels = weight.shape[1] * groups if op == "Conv" else weight.shape[0]
    return model([node], {"w": weight}, inputs={"x": [1, channels, *[8] * (weight.ndim - 2)]})


def one_layer(
    path: Path,
    op: str,
    weight: Array,
    shapes: tuple[Sequence[int | str], Sequence[int | str]],
    **attributes: Any,
) -> Path:
    """A file of one node: x, of the first shape -> y, of the second; both of the weight's type."""
    name = {"Conv": "conv"}.get(op, "fc")
    node = helper.make_node(op, ["x", "w"], ["y"], name=name, **attributes)
    x, y = shapes
    made = graph([node], {"w": weight}, inputs={"x": x}, output_shape=y, dtype=weight.dtype)
    opset = helper.make_opsetid("", 17)
    return save(helper.make_model(made, opset_imports=[opset], ir_version=8), path)


def before_matmul(
    steps: Sequence[onnx.NodeProto], constants: Mapping[str, Array], width: int
) -> onnx.ModelProto:
    """`steps` make "v" from the constants; then x @ v."""
    node = helper.make_node("MatMul", ["x", "v"], ["y"], name="fc")
    return model([*steps, node], constants, inputs={"x": [2, width]})


def quantized_conv(
    weight: Array, *, zero_point: Array | None, quantize_output: bool
) -> onnx.ModelProto:
    """Integers -> DequantizeLinear -> Conv -> Add -> Relu (-> QuantizeLinear -> Dequantize)."""
    zeros = {} if zero_point is None else {"zp": zero_point}
    names = ["w", "scale", *zeros]
    nodes = [
        helper.make_node("DequantizeLinear", names, ["wf"], name="dq"),
        helper.make_node("Conv", ["x", "wf"], ["c"], name="conv"),
        helper.make_node("Add", ["c", "bias"], ["b"], name="add"),
        helper.make_node("Relu", ["b"], ["r" if quantize_output else "y"], name="relu"),
    ]
    if quantize_output:
        nodes += [
            helper.make_node("QuantizeLinear", ["r", "scale", "zero"], ["q"], name="q"),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="dq2"),
        ]
    constants = {
        "w": weight,
        "scale": np.array(0.02, np.float32),
        "bias": np.ones((1, weight.shape[0], 1, 1), np.float32),
        "zero": np.array(0, np.int8),
        **zeros,
    }
    return model(nodes, constants, inputs={"x": [1, weight.shape[1], 8, 8]})


def two_weights() -> onnx.ModelProto:
    """Conv and Gemm with one weight each, for tests about files."""
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight"], ["c"], name="conv"),
        helper.make_node("GlobalAveragePool", ["c"], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "fc.weight", "fc.bias"], ["y"], name="fc", transB=1),
    ]
    constants = {
        "conv.weight": weights(16, 8, 3, 3),
        "fc.weight": weights(64, 16, seed=1),
        "fc.bias": weights(64, seed=2),
    }
    return model(nodes, constants, inputs={"x": [1, 8, 6, 6]})


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Write the model with its weights inside."""
    path.write_bytes(model.SerializeToString())
    return path


def load(path: Path) -> onnx.ModelProto:
    """The model with all of its values in memory."""
    model = open_onnx(path).whole()
    load_external(model, path)
    return model


def save_external(
    model: onnx.ModelProto, path: Path, *, location: str = "weights.bin", padding: int = 0
) -> Path:
    """Write the model with every initializer in one data file, each after `padding` bytes."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    data = bytearray()
    for value in copy.graph.initializer:
        data += b"\xab" * padding
        make_external(value, location, offset=len(data))
        raw = next(t for t in model.graph.initializer if t.name == value.name).raw_data
        data += raw
    (path.parent / location).write_bytes(data)
    return save(copy, path)


def make_external(
    value: TensorProto, location: str, *, offset: int = 0, length: int | None = None
) -> None:
    """Turn an inline tensor into a reference to a data file."""
    size = len(value.raw_data) if length is None else length
    value.ClearField("raw_data")
    value.data_location = TensorProto.EXTERNAL
    del value.external_data[:]
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(size))):
        value.external_data.add(key=key, value=text)
