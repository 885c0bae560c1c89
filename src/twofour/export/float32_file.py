"""A float32 ONNX file read for a change of its precision: named, with its weights still on disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from twofour.errors import BadInputError
from twofour.graph_files import parse_model, verify_external
from twofour.graph_scope import scopes

_SEPARATE_INITIALIZERS = 4
"""The first IR version in which an initializer need not be a graph input."""


def load_float32(source: Path) -> ir.Model:
    """The model, every node with a name, external data mapped and checked.

    Raises BadInputError for a damaged file, and for what onnx_ir cannot keep.
    """
    proto = parse_model(source)
    verify_external(proto, source)
    sparse = next((t for s in scopes(proto, source) for t in s.graph.sparse_initializer), None)
    if sparse is not None or proto.training_info:
        what = "training information" if sparse is None else "sparse initializers"
        raise BadInputError(
            f"{source} has {what}, which a change of precision would lose",
            hint="write them as dense tensors (onnxruntime or onnx-simplifier do), or leave "
            "--precision out",
        )
    # nodes without a name are known by their place, which casts would change
    for scope in scopes(proto, source):
        for node in scope.nodes:
            node.proto.name = node.name
    model = ir.from_proto(proto)
    for tensor in external_tensors(model):
        tensor.base_dir = str(source.parent)
    for node in all_nodes(model):
        _as_tensor(node)
    _refuse_recursion(model, source)
    _free_initializers(model)
    return model


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Every tensor whose data lies in another file."""
    for graph in all_graphs(model):
        if isinstance(graph, ir.Graph):
            for value in graph.initializers.values():
                if isinstance(value.const_value, ir.ExternalTensor):
                    yield value.const_value
    for node in all_nodes(model):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                if isinstance(tensor, ir.ExternalTensor):
                    yield tensor


def _as_tensor(node: ir.Node) -> None:
    """Constants in one form: their values as a tensor, and none of them in a file of its own."""
    if node.op_type != "Constant" or node.domain != "":
        return
    for name in ("value_float", "value_floats"):
        if name in node.attributes:
            values = np.array(node.attributes.pop(name).value, np.float32)
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(values))
    value = node.attributes.get("value")
    if value is not None and isinstance(value.as_tensor(), ir.ExternalTensor):
        read = ir.Tensor(np.array(value.as_tensor().numpy()), dtype=value.as_tensor().dtype)
        node.attributes["value"] = ir.AttrTensor("value", read)


def _refuse_recursion(model: ir.Model, source: Path) -> None:
    calls = {
        identifier: {n.op_identifier() for n in function.all_nodes()} & set(model.functions)
        for identifier, function in model.functions.items()
    }
    while done := [i for i, called in calls.items() if not called & set(calls)]:
        for identifier in done:
            del calls[identifier]
    if calls:
        domain, name, _ = next(iter(calls))
        raise BadInputError(f"{source}: the function {domain}::{name} calls itself")


def _free_initializers(model: ir.Model) -> None:
    """Constants that old files list among the inputs, too: as inputs they would keep their type."""
    inputs = model.graph.inputs
    for value in [v for v in inputs if v.const_value is not None]:
        inputs.remove(value)
        model.ir_version = max(model.ir_version, _SEPARATE_INITIALIZERS)


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node, in subgraphs and functions too."""
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def all_graphs(model: ir.Model) -> Iterator[ir.Graph | ir.Function]:
    """The main graph, the functions, and the graphs inside of them."""
    yield model.graph
    yield from model.functions.values()
    for node in all_nodes(model):
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield attribute.as_graph()
            elif attribute.type == ir.AttributeType.GRAPHS:
                yield from attribute.as_graphs()
