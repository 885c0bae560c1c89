"""The shapes of a graph at given sizes of its inputs, as far as onnx can infer them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from twofour.graph.files import graphs, shape_of, subgraphs
from twofour.graph.scope import fixed_dims, is_standard
from twofour.records.export import STANDARD_DOMAINS
from twofour.records.weights import LARGEST_PASSED_OVER

_EQUATION = re.compile(rb"[A-Za-z., ]*(->[A-Za-z. ]*)?")
"""What ONNX allows: letters, commas, an ellipsis, blanks (Einsum in Operators.md)."""


def with_shapes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """The model, changed in place, with these free sizes and all shapes that onnx infers from them.

    A first dimension of an input that has no name is the batch, and 1.
    """
    graph = model.graph
    first = (dim for v in graph.input for dim in v.type.tensor_type.shape.dim[:1])
    nameless = [dim for dim in first if not dim.WhichOneof("value")]
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):  # sequence*batch is inferred again, as a number
                size = sizes.get(dim.dim_param)
                dim.Clear()
                if size is not None:
                    dim.dim_value = size
    for dim in nameless:
        dim.dim_value = 1
    nodes = (node for graph in graphs(model) for node in graph.node if node.op_type == "Einsum")
    equations = (a.s for node in nodes for a in node.attribute if a.name == "equation")
    # onnx's inference never ends at an equation such as "ab,b1e" (found with 1.23.2)
    if not all(map(_EQUATION.fullmatch, equations)):
        return model
    own = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError)
    # C++ exceptions come out as these: bad_alloc, runtime_error, invalid_argument, out_of_range
    with contextlib.suppress(*own, MemoryError, RuntimeError, ValueError, LookupError, TypeError):
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        _infer_by_value(model)
    return model


def _infer_by_value(model: onnx.ModelProto) -> None:
    """Declare the shapes that depend on small computed tensors, such as the target of a Reshape.

    onnx alone follows these through few ops (not Div, Where, Range); its evaluator has them all.
    """
    # x (1, 24, 64) -> Shape -> [1, 24, 64] -> Gather -> 24 -> Div by 4 -> 6 -> Concat -> [6, -1]
    # -> Reshape: each tensor up to here is in `values`, so that onnx can say (6, 256)
    graph = model.graph
    types = {v.name: v.type for v in (*graph.output, *graph.value_info, *graph.input)}
    values: dict[str, NDArray[Any]] = {}
    for tensor in graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, shape_of(tensor))
        if _is_small(types[tensor.name]) and tensor.data_location != tensor.EXTERNAL:
            values[tensor.name] = numpy_helper.to_array(tensor)
    for node in graph.node:
        known = types.keys() >= {name for name in node.input if name}
        if known and is_standard(node) and not any(subgraphs(node)):
            # the evaluator is written in Python: a damaged node raises anything
            with contextlib.suppress(Exception), np.errstate(all="ignore"):
                _follow(model, node, types, values)


def _follow(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    types: dict[str, onnx.TypeProto],
    values: dict[str, NDArray[Any]],
) -> None:
    """Add the types of a node's outputs, and their values where they are small."""
    from onnx.reference import ReferenceEvaluator

    inputs, outputs = ({name for name in names if name} for names in (node.input, node.output))
    feeds = {name: values[name] for name in inputs if name in values}
    opsets = list(model.opset_import)
    if any(name not in types or fixed_dims(types[name]) is None for name in outputs):
        version = next(o.version for o in opsets if o.domain in STANDARD_DOMAINS)
        schema, given = onnx.defs.get_schema(node.op_type, version), {n: types[n] for n in inputs}
        data = {name: numpy_helper.from_array(value, name) for name, value in feeds.items()}
        found = onnx.shape_inference.infer_node_outputs(
            schema, node, given, data, opset_imports=opsets, ir_version=model.ir_version
        )
        for name, kind in found.items():
            if name not in types or fixed_dims(kind) is not None:
                types[name] = kind
                model.graph.value_info.append(onnx.helper.make_value_info(name, kind))
    if node.op_type in ("Shape", "Size"):  # an array of that shape that takes no memory
        dims = fixed_dims(types[node.input[0]])
        feeds = {} if dims is None else {node.input[0]: np.broadcast_to(np.int8(0), dims)}
    if len(feeds) == len(inputs) and all(_is_small(types[name]) for name in outputs):
        body = onnx.helper.make_function("f", "f", [*feeds], list(node.output), [node], opsets)
        results: Any = ReferenceEvaluator(body).run(None, feeds, attributes={})
        values.update(zip(node.output, results, strict=True))


def _is_small(kind: onnx.TypeProto) -> bool:
    dims = fixed_dims(kind)
    return dims is not None and prod(dims) <= LARGEST_PASSED_OVER
