"""Half precision in an ONNX model: whether it has any, and the same model in float32."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from twofour.graph.files import DTYPES, graphs, tensors

HALF = frozenset(code for code, name in DTYPES.items() if name in {"float16", "bfloat16"})
"""As ONNX numbers the types."""
TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
"""Attributes whose integer is a type of ONNX (Cast, random numbers, windows)."""


def has_half(model: onnx.ModelProto) -> bool:
    """Whether a tensor of the model is float16 or bfloat16, or a node makes some."""
    if any(tensor.data_type in HALF for tensor in tensors(model)):
        return True
    return any(
        attribute.name in TYPE_ATTRIBUTES and attribute.i in HALF
        for graph in graphs(model)
        for node in graph.node
        for attribute in node.attribute
    )


def widen(model: onnx.ModelProto) -> None:
    """Make float16 and bfloat16 to float32 in place: tensors, casts, inputs, outputs, functions.

    Weights must be at hand, not external. Values stay what they are; sums gain the digits that half
    precision would have lost.
    """
    for tensor in tensors(model):
        if tensor.data_type in HALF:
            values = numpy_helper.to_array(tensor).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for graph in graphs(model):
        del graph.value_info[:]  # types of the tensors between; whoever needs them infers them anew
        if isinstance(graph, onnx.GraphProto):
            for value in (*graph.input, *graph.output):
                if value.type.tensor_type.elem_type in HALF:
                    value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.name in TYPE_ATTRIBUTES and attribute.i in HALF:
                    attribute.i = onnx.TensorProto.FLOAT
