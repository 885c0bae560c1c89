"""The shapes of a graph at given sizes of its inputs, as far as onnx can infer them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from twofour.graph.files import graphs, shape_of, subgraphs
from twofour.graph.scope import attribute, evaluate, fixed_dims, is_standard, opset_of
from twofour.records.weights import LARGEST_PASSED_OVER

_EQUATION = re.compile(rb"[A-Za-z., ]*(->[A-Za-z. ]*)?")
"""What ONNX allows: letters, commas, an ellipsis, blanks (Einsum in Operators.md)."""


ONNX_ERRORS = (
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    onnx.defs.SchemaError,
    # C++ exceptions come out as these: bad_alloc, runtime_error, invalid_argument, out_of_range
    *(MemoryError, RuntimeError, ValueError, LookupError, TypeError),
)
"""What onnx's inference raises at a graph that is damaged or newer than itself."""


def with_shapes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """The model, changed in place, with these free sizes and all shapes that onnx infers from them.

    A first dimension of an input that has no name is the batch, and 1.
    """
    _set_sizes(model.graph, sizes)
    # onnx's inference never ends at an equation such as "ab,b1e" (found with 1.23.2)
    if not all(map(_EQUATION.fullmatch, _equations(model))):
        return model
    with contextlib.suppress(*ONNX_ERRORS):
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        _infer_by_value(model, model.graph, _Known({}, {}))
    return model


def _set_sizes(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    for value in graph.input:
        for batch in value.type.tensor_type.shape.dim[:1]:
            if not batch.WhichOneof("value"):
                batch.dim_value = 1
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value"):
                continue
            size = sizes.get(dim.dim_param)
            dim.Clear()  # sequence*batch is inferred again, as a number
            if size is not None:
                dim.dim_value = size


def _equations(model: onnx.ModelProto) -> Iterator[bytes]:
    for graph in graphs(model):
        for node in graph.node:
            equation = attribute(node, "equation")
            if node.op_type == "Einsum" and equation is not None:
                yield equation.s


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of tensors by name, in a graph and the graphs around it."""

    types: dict[str, onnx.TypeProto]
    values: dict[str, NDArray[Any]]
    """The values of small tensors that depend on the inputs' shapes alone."""


def _infer_by_value(model: onnx.ModelProto, graph: onnx.GraphProto, outer: _Known) -> _Known:
    """Declare the shapes that depend on small computed tensors, such as the target of a Reshape.

    onnx alone follows these through few ops (not Div, Where, Range); its evaluator has them all.
    """
    # x (1, 24, 64) -> Shape -> [1, 24, 64] -> Gather -> 24 -> Div by 4 -> 6 -> Concat -> [6, -1]
    # -> Reshape: each tensor up to here is in `values`, so that onnx can say (6, 256)
    known = _declared(graph, outer)
    for node in graph.node:
        bodies = {}
        for name, body in subgraphs(node):
            inside = _infer_by_value(model, body, known)
            bodies[name] = [inside.types[output.name] for output in body.output]
        if not is_standard(node) or not known.types.keys() >= {*filter(None, node.input)}:
            continue
        # the evaluator is written in Python: a damaged node raises anything
        with contextlib.suppress(Exception), np.errstate(all="ignore"):
            if node.op_type == "If":
                _declare(graph, node, _types_of_if(node, bodies, known), known)
            elif not bodies:
                kinds = output_types(node, known.types, known.values, opset_of(model))
                _declare(graph, node, kinds, known)
                _evaluate(model, node, known)
    return known


def _declared(graph: onnx.GraphProto, outer: _Known) -> _Known:
    """What a graph says of its tensors before any node is looked at, and what is known outside."""
    types = {v.name: v.type for v in (*graph.output, *graph.value_info, *graph.input)}
    known = _Known({**outer.types, **types}, dict(outer.values))
    for tensor in graph.initializer:
        kind = onnx.helper.make_tensor_type_proto(tensor.data_type, shape_of(tensor))
        known.types[tensor.name] = kind
        if _is_small(kind) and tensor.data_location != tensor.EXTERNAL:
            known.values[tensor.name] = numpy_helper.to_array(tensor)
    return known


def _types_of_if(
    node: onnx.NodeProto, branches: Mapping[str, list[onnx.TypeProto]], known: _Known
) -> dict[str, onnx.TypeProto]:
    """Types of an If's outputs: those of the branch that runs, or where both give the same."""
    condition = known.values.get(node.input[0])
    if condition is not None:
        chosen = "then_branch" if condition.all() else "else_branch"
        return dict(zip(node.output, branches[chosen], strict=True))
    then, other = branches["then_branch"], branches["else_branch"]
    outputs = zip(node.output, then, other, strict=True)
    return {name: kind for name, kind, second in outputs if kind == second}


def _declare(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    kinds: Mapping[str, onnx.TypeProto],
    known: _Known,
) -> None:
    """Add the types of the node's outputs, to the graph too."""
    for name in filter(None, node.output):
        is_open = name not in known.types or fixed_dims(known.types[name]) is None
        if is_open and name in kinds:
            known.types[name] = kinds[name]
            graph.value_info.append(onnx.helper.make_value_info(name, kinds[name]))


def output_types(
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    values: Mapping[str, NDArray[Any]],
    opset: int,
) -> dict[str, onnx.TypeProto]:
    """Types of the node's outputs by name; `values` are those of its inputs that are known.

    `opset` is that of its domain. Raises one of ONNX_ERRORS.
    """
    given = {name: types[name] for name in filter(None, node.input)}
    data = {name: numpy_helper.from_array(values[name], name) for name in given if name in values}
    return onnx.shape_inference.infer_node_outputs(
        onnx.defs.get_schema(node.op_type, opset, node.domain),
        node,
        given,
        data,
        opset_imports=[onnx.helper.make_opsetid(node.domain, opset)],
    )


def _evaluate(model: onnx.ModelProto, node: onnx.NodeProto, known: _Known) -> None:
    """Add the values of the node's outputs, if they are small and those of its inputs are known."""
    inputs = {*filter(None, node.input)}
    feeds = {name: known.values[name] for name in inputs if name in known.values}
    if node.op_type in ("Shape", "Size"):  # an array of that shape that takes no memory
        dims = fixed_dims(known.types[node.input[0]])
        feeds = {} if dims is None else {node.input[0]: np.broadcast_to(np.int8(0), dims)}
    if len(feeds) < len(inputs) or not all(_is_small(known.types[n]) for n in node.output if n):
        return
    known.values.update(evaluate(node, feeds, opset_of(model)))


def _is_small(kind: onnx.TypeProto) -> bool:
    dims = fixed_dims(kind)
    return dims is not None and prod(dims) <= LARGEST_PASSED_OVER
