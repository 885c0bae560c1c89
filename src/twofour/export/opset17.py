"""Opset 18 rewritten as 17, the newest that TensorRT 8.5 and 8.6 read.

Done here because ONNX's own version converter (onnx 1.23) knows no way down for Pad and Split nor
for anything inside subgraphs, and drops the metadata by which weights get their names. Operators
are those whose definition changed with 18 (onnx.defs); all others are the same in both.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from twofour.errors import BadInputError

OPSET = 17
_BEFORE = 18
_REDUCTIONS_OF_17 = frozenset({"none", "add", "mul"})
"""What scattered values may do with those they meet; max and min came with 18."""


def to_opset_17(model: ir.Model) -> None:
    """Rewrite a model of opset 18 in place; weights, names and metadata stay.

    Raises BadInputError for the first node that opset 17 has no words for.
    """
    for node in model.graph.all_nodes():
        if node.domain == "" and _changed_with_18(node.op_type):
            _rewrite(node)
    RemoveUnusedNodesPass()(model)  # axes that were inputs
    model.opset_imports[""] = OPSET
    model.ir_version = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", OPSET)])


def _changed_with_18(op: str) -> bool:
    return bool(onnx.defs.get_schema(op, _BEFORE).since_version == _BEFORE)


def _rewrite(node: ir.Node) -> None:
    if node.op_type.startswith("Reduce"):
        _axes_to_attribute(node)
    if node.op_type == "Split":
        _drop_number_of_parts(node)
    try:
        older = onnx.defs.get_schema(node.op_type, OPSET)
    except onnx.defs.SchemaError:
        raise _cannot(node, f"{node.op_type} came with opset 18") from None
    _drop_later_attributes(node, older)
    if len(node.inputs) > older.max_input:
        raise _cannot(node, f"{node.op_type} has an input that came with opset 18")
    reduction = node.attributes.get("reduction")
    if reduction is not None and reduction.as_string() not in _REDUCTIONS_OF_17:
        raise _cannot(node, f"{node.op_type} with {reduction.as_string()} came with opset 18")


def _axes_to_attribute(node: ir.Node) -> None:
    """Axes became an input with 18; none of them mean all, unless the node does nothing then."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    found = None if axes is None else ir.convenience.get_const_tensor(axes)
    if axes is not None and found is None:
        raise _cannot(node, f"{node.op_type} computes its axes")
    listed = [] if found is None else [int(axis) for axis in found.numpy()]
    does_nothing = node.attributes.pop("noop_with_empty_axes", None)
    if not listed and does_nothing is not None and does_nothing.as_int():
        raise _cannot(node, f"{node.op_type} over no axis came with opset 18")
    node.resize_inputs(1)
    if listed:
        node.attributes["axes"] = ir.AttrInt64s("axes", listed)


def _drop_number_of_parts(node: ir.Node) -> None:
    """Without a number, the outputs are as many equal parts."""
    if node.attributes.pop("num_outputs", None) is None:
        return
    data, axis = node.inputs[0], node.attributes.get("axis")
    length = None
    if data is not None and data.shape is not None:
        length = data.shape[axis.as_int() if axis is not None else 0]
    if not isinstance(length, int) or length % len(node.outputs):
        raise _cannot(node, f"Split of {length} into {len(node.outputs)} came with opset 18")


def _drop_later_attributes(node: ir.Node, older: onnx.defs.OpSchema) -> None:
    """What has the value that opset 17 always means can go; the rest cannot be said."""
    newer = onnx.defs.get_schema(node.op_type, _BEFORE).attributes
    for name in sorted(set(node.attributes) - set(older.attributes)):
        usual = ir.from_proto(newer[name].default_value) if newer[name].default_value.type else None
        if usual is None or node.attributes[name].value != usual.value:
            raise _cannot(node, f"{node.op_type} with {name} came with opset 18")
        del node.attributes[name]


def _cannot(node: ir.Node, why: str) -> BadInputError:
    return BadInputError(
        f"this model cannot be written in opset {OPSET}: {why} (node {node.name})",
        hint=f"use --opset {_BEFORE} or later, which TensorRT 10 and 11 read",
    )
