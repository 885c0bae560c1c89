"""A half-precision ONNX graph in float32: the same values, so that INT8 can be made from it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from twofour.graph_tensors import DTYPES

_HALF = frozenset(code for code, name in DTYPES.items() if name in {"float16", "bfloat16"})
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})
"""Attributes whose integer is a type of ONNX (Cast, ConstantOfShape's kin, random numbers)."""


def widen(model: onnx.ModelProto) -> None:
    """Make float16 and bfloat16 to float32 in place: tensors, casts, inputs, outputs, subgraphs.

    Weights must be at hand, not external. Values stay what they are; sums gain the digits that half
    precision would have lost.
    """
    for graph in _graphs(model.graph):
        del graph.value_info[:]  # types of the tensors between; whoever needs them infers them anew
        for tensor in graph.initializer:
            _widen_tensor(tensor)
        for value in (*graph.input, *graph.output):
            if value.type.tensor_type.elem_type in _HALF:
                value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        for node in graph.node:
            for attribute in node.attribute:
                _widen_attribute(attribute)


def is_half(model: onnx.ModelProto) -> bool:
    """Whether an initializer of the main graph is float16 or bfloat16."""
    return any(tensor.data_type in _HALF for tensor in model.graph.initializer)


def _widen_attribute(attribute: onnx.AttributeProto) -> None:
    if attribute.name in _TYPE_ATTRIBUTES and attribute.i in _HALF:
        attribute.i = onnx.TensorProto.FLOAT
    for tensor in (attribute.t, *attribute.tensors):
        _widen_tensor(tensor)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _HALF:
        values = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    yield from _graphs(inner)
