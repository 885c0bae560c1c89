"""ONNX graph -> its nodes by name, in graph order, to be joined with the layers of an engine."""

from __future__ import annotations

from math import prod

import onnx

from twofour.graph.scope import Node, Scope, scopes
from twofour.records.export import GraphNode

_TOO_MANY_VALUES = 1 << 63


def graph_nodes(model: onnx.ModelProto) -> tuple[GraphNode, ...]:
    """Every node of the main graph and then of its subgraphs, under the names of find_weights.

    Shapes are those the file declares (graph inputs, outputs and value_info); none is inferred.
    """
    return tuple(
        _record(node, scope, shapes)
        for scope in scopes(model, None)
        for shapes in [_declared_shapes(scope.graph)]
        for node in scope.nodes
    )


def _record(node: Node, scope: Scope, shapes: dict[str, tuple[int | None, ...]]) -> GraphNode:
    proto = node.proto
    outputs = tuple(proto.output)
    return GraphNode(
        name=node.name,
        label=node.label,
        op=proto.op_type,
        domain=proto.domain,
        inputs=tuple(proto.input),
        outputs=outputs,
        constants=tuple(name for name in proto.input if name and _is_constant(scope, name)),
        output_shape=shapes.get(outputs[0]) if outputs else None,
        unnamed=not proto.name,
    )


def _is_constant(scope: Scope, name: str) -> bool:
    owner = scope.owner(name)
    return owner is not None and name in owner.constants


def _declared_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int | None, ...]]:
    declared = {
        value.name: tuple(
            dim.dim_value if dim.HasField("dim_value") else None
            for dim in value.type.tensor_type.shape.dim
        )
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    return {name: shape for name, shape in declared.items() if _is_possible(shape)}


def _is_possible(shape: tuple[int | None, ...]) -> bool:
    """No memory holds a tensor of 2^63 values; a damaged file may well declare one."""
    known = [size for size in shape if size is not None]
    return all(size >= 0 for size in known) and prod(known) < _TOO_MANY_VALUES
