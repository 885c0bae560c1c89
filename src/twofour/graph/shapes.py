"""Shapes that onnx works out for a model, asked so that it always answers."""

from __future__ import annotations

import contextlib
import re

import onnx

from twofour.graph.files import graphs

_EQUATION = re.compile(rb"[A-Za-z., ]*(->[A-Za-z. ]*)?")
"""What ONNX allows: letters, commas, an ellipsis, blanks (Einsum in Operators.md)."""


def with_shapes(model: onnx.ModelProto, *, data_prop: bool = False) -> onnx.ModelProto:
    """The model with the shapes that follow from its own; as it is where onnx cannot tell.

    `data_prop`: from the values of small constants too, as a Reshape takes them.
    """
    if any(_is_odd_einsum(node) for graph in graphs(model) for node in graph.node):
        return model
    refusals = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError)
    # C++ exceptions come out as these: bad_alloc, runtime_error, invalid_argument, out_of_range
    with contextlib.suppress(*refusals, MemoryError, RuntimeError, ValueError, LookupError):
        model = onnx.shape_inference.infer_shapes(model, data_prop=data_prop)
    return model


def _is_odd_einsum(node: onnx.NodeProto) -> bool:
    """Onnx's inference never ends at an equation such as "ab,b1e" (found with 1.23.2)."""
    equations = (a.s for a in node.attribute if node.op_type == "Einsum" and a.name == "equation")
    return any(_EQUATION.fullmatch(equation) is None for equation in equations)
