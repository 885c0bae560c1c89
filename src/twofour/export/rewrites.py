"""A module copied to float32, and the traced graph rewritten from opset 18 to 17.

TensorRT 8.6 reads opset 17 at most. ONNX's own version converter (onnx 1.23) knows no way down for
Pad and Split nor for anything inside subgraphs, and drops the metadata by which weights get names.
"""

from __future__ import annotations

import copy
from itertools import chain

import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import nn

from twofour.errors import BadInputError
from twofour.export.layer_names import module_scopes


def in_float32(module: nn.Module) -> nn.Module:
    """The module itself where its numbers are float32, else a copy in which they are.

    The copy shares every tensor that needs no conversion. Raises BadInputError for a module that
    cannot be copied.
    """
    copied = {id(t): t for t in chain(module.parameters(), module.buffers())}
    other = [t for t in copied.values() if t.is_floating_point() and t.dtype != torch.float32]
    if not other:
        return module
    for tensor in other:
        wide = tensor.detach().float()
        is_parameter = isinstance(tensor, nn.Parameter)
        copied[id(tensor)] = nn.Parameter(wide, requires_grad=False) if is_parameter else wide
    try:
        return copy.deepcopy(module, copied)
    except Exception as error:
        raise BadInputError(
            f"{type(module).__name__} cannot be copied to float32: {error}",
            hint="a module must survive copy.deepcopy to be converted; "
            "remove weight_norm and the like before, or convert it yourself",
        ) from error


OLDEST_OPSET = 17
TRACED_OPSET = 18
"""The oldest that torch.onnx.export has implementations of (torch 2.13)."""
_VALUES_OF_17 = {
    ("ScatterElements", "reduction"): {"none", "add", "mul"},
    ("ScatterND", "reduction"): {"none", "add", "mul"},
    ("Pad", "mode"): {"constant", "reflect", "edge"},
}
"""max and min came with 18; "wrap" with 19, and torch writes it in 18 all the same."""


def to_opset_17(model: ir.Model) -> None:
    """Rewrite a model of opset 18 in place; weights, names and metadata stay.

    Raises BadInputError for the first node that opset 17 has no words for.
    """
    for node in list(model.graph.all_nodes()):
        if node.domain == "":
            schema = onnx.defs.get_schema(node.op_type, TRACED_OPSET)
            if schema.since_version == TRACED_OPSET:
                _rewrite(node)
    RemoveUnusedNodesPass()(model)  # axes that were inputs
    model.opset_imports[""] = OLDEST_OPSET
    model.ir_version = onnx.helper.find_min_ir_version_for(
        [onnx.helper.make_opsetid("", OLDEST_OPSET)]
    )


def _rewrite(node: ir.Node) -> None:
    if node.op_type == "Mish":
        _spell_out_mish(node)
        return
    if node.op_type.startswith("Reduce"):
        _axes_to_attribute(node)
    if node.op_type == "Split":
        _drop_number_of_parts(node)
    try:
        older = onnx.defs.get_schema(node.op_type, OLDEST_OPSET)
    except onnx.defs.SchemaError:
        raise _cannot(node, "") from None
    _drop_later_attributes(node, older)
    _check_values(node)
    if len(node.inputs) > older.max_input:
        raise _cannot(node, " with this input")
    _check_type(node, older)


def _spell_out_mish(node: ir.Node) -> None:
    """Mish is x * tanh(softplus(x)) (Misra 2019)."""
    assert node.graph is not None, "nodes of a model are in a graph"
    softplus = ir.node("Softplus", [node.inputs[0]])
    tanh = ir.node("Tanh", [softplus.outputs[0]])
    node.graph.insert_before(node, [softplus, tanh])
    node.op_type = "Mul"
    node.resize_inputs(2)
    node.replace_input_with(1, tanh.outputs[0])


def _axes_to_attribute(node: ir.Node) -> None:
    """Axes became an input with 18; none of them mean all, unless the node does nothing then."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    found = None if axes is None else ir.convenience.get_const_tensor(axes)
    if axes is not None and found is None:
        raise _cannot(node, " over computed axes")
    listed = [] if found is None else [int(axis) for axis in found.numpy()]
    does_nothing = node.attributes.pop("noop_with_empty_axes", None)
    if not listed and does_nothing is not None and does_nothing.as_int():
        raise _cannot(node, " over no axis")
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
        raise _cannot(node, f" of {length} into {len(node.outputs)}")


def _drop_later_attributes(node: ir.Node, older: onnx.defs.OpSchema) -> None:
    """What has the value that opset 17 always means can go; the rest cannot be said."""
    newer = onnx.defs.get_schema(node.op_type, TRACED_OPSET).attributes
    for name in sorted(set(node.attributes) - set(older.attributes)):
        usual = ir.from_proto(newer[name].default_value) if newer[name].default_value.type else None
        if usual is None or node.attributes[name].value != usual.value:
            raise _cannot(node, f" with {name}")
        del node.attributes[name]


def _check_values(node: ir.Node) -> None:
    for (op, name), known in _VALUES_OF_17.items():
        value = node.attributes.get(name) if node.op_type == op else None
        if value is not None and value.as_string() not in known:
            raise _cannot(node, f" with {name} {value.as_string()}")


def _check_type(node: ir.Node, older: onnx.defs.OpSchema) -> None:
    data = node.inputs[0]
    if data is not None and data.dtype is not None:
        kind = data.dtype.name.lower()
        if f"tensor({kind})" not in older.inputs[0].types:
            raise _cannot(node, f" of {kind}")


def _cannot(node: ir.Node, what: str) -> BadInputError:
    scopes = [scope for scope in module_scopes(node.metadata_props) if scope]
    where = f"node {node.name}, module {scopes[-1]}" if scopes else f"node {node.name}"
    return BadInputError(
        f"this model cannot be written in opset {OLDEST_OPSET}: {node.op_type}{what} came later "
        f"({where})",
        hint="use --opset 20, which TensorRT 10 and 11 read",
    )
