"""INT8 in the form that every TensorRT reads: float weights behind QuantizeLinear."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from twofour.export.int8 import quantize_int8


def quantize(source: Path, target: Path, examples: dict[str, np.ndarray]) -> None:
    """The INT8 file of `twofour compare`, with its int8 weights written as float32 once more.

    A parser that takes int8 weights is sure only of TensorRT 10; the numbers are the same.
    """
    quantize_int8(source, target, examples)
    model = onnx.load(target)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in constants:
            nodes.append(_quantizer(node, constants))
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, target, save_as_external_data=True, location=f"{target.name}.data")


def _quantizer(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> onnx.NodeProto:
    """Make the constant float, and give what stands between it and its DequantizeLinear."""
    stored = constants[node.input[0]]
    axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
    weight, scale = numpy_helper.to_array(stored), numpy_helper.to_array(constants[node.input[1]])
    if scale.ndim:
        scale = np.expand_dims(scale, [at for at in range(weight.ndim) if at != axis])
    values = (weight * scale.astype(np.float32)).astype(np.float32)
    stored.CopyFrom(numpy_helper.from_array(values, stored.name))
    inputs, quantized = list(node.input), f"{node.input[0]}_int8"
    node.input[0] = quantized
    name = f"{node.name}_quantizer"
    return helper.make_node("QuantizeLinear", inputs, [quantized], name=name, axis=axis)
