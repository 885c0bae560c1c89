"""The element type of every tensor in an ONNX model, from the operators' own definitions.

onnx.shape_inference (1.23) says nothing about tensors inside subgraphs and functions, and stops
where a shape cannot be found; types need no shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir

Types = dict[ir.Value, ir.DataType]
"""Tensors alone: a sequence, an optional, or what is not known has no entry."""
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")
_FIXED = {
    f"tensor({name})": ir.DataType[name.upper()] for name in ("float16", "bfloat16", "bool")
} | {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
    "tensor(string)": ir.DataType.STRING,
    **{
        f"tensor({s}int{bits})": ir.DataType[f"{s.upper()}INT{bits}"]
        for s in ("", "u")
        for bits in (8, 16, 32, 64)
    },
}
_LISTED = {
    "value_float": "FLOAT",
    "value_floats": "FLOAT",
    "value_int": "INT64",
    "value_ints": "INT64",
    "value_string": "STRING",
    "value_strings": "STRING",
}


def element_types(model: ir.Model) -> Types:
    """Types of all values: main graph, subgraphs, and functions as their calls give them."""
    found: Types = {}
    _note(found, (*model.graph.inputs, *model.graph.initializers.values()))
    _graph(model.graph, found, model, model.opset_imports)
    return found


def schema_of(node: ir.Node, opsets: dict[str, int]) -> onnx.defs.OpSchema | None:
    """The operator's definition in the opset of its graph; None for one that onnx does not know."""
    try:
        return onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return None


def type_word(parameters: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> str:
    """Type or type variable at a position ("tensor(float)", "T"); "" where there is none.

    The last parameter stands for all that follow where it is variadic.
    """
    if index < len(parameters):
        return str(parameters[index].type_str)
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    if parameters and parameters[-1].option == variadic:
        return str(parameters[-1].type_str)
    return ""


def opsets_of(model: ir.Model, function: ir.Function) -> dict[str, int]:
    """A function's imports; the model's where it leaves one out."""
    return {**model.opset_imports, **function.opset_imports}


def _note(found: Types, values: Iterable[ir.Value]) -> None:
    for value in values:
        if value.const_value is not None:
            found[value] = value.const_value.dtype
        elif isinstance(value.type, ir.TensorType):
            found.setdefault(value, value.type.dtype)


def _graph(
    graph: ir.Graph | ir.Function, found: Types, model: ir.Model, opsets: dict[str, int]
) -> None:
    for node in graph:
        if not _bodies(node, found, model, opsets):
            _infer(node, found, opsets)
        _note(found, node.outputs)  # as declared, where nothing was inferred


def _bodies(node: ir.Node, found: Types, model: ir.Model, opsets: dict[str, int]) -> bool:
    """Types inside the node's subgraphs or function, and of its outputs; False: it has neither."""
    function = model.functions.get(node.op_identifier())
    graphs = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    if function is not None:
        _pass_on(node.inputs, function.inputs, found)
        _graph(function, found, model, opsets_of(model, function))
        _pass_on(function.outputs, node.outputs, found)
        return True
    for graph in graphs:
        _note(found, (*graph.inputs, *graph.initializers.values()))
        if node.op_type == "Loop":
            _pass_on(node.inputs[2:], graph.inputs[2:], found)
        elif node.op_type == "Scan":
            skip = len(node.inputs) - len(graph.inputs)  # opset 8 has the lengths first
            _pass_on(node.inputs[max(skip, 0) :], graph.inputs, found)
        _graph(graph, found, model, opsets)
        outputs = graph.outputs[1:] if node.op_type == "Loop" else graph.outputs
        if node.domain == "" and node.op_type in ("If", "Loop", "Scan"):
            _pass_on(outputs, node.outputs, found)
    return bool(graphs)


def _pass_on(inner: Sequence[ir.Value | None], outer: Sequence[ir.Value], found: Types) -> None:
    for given, taken in zip(inner, outer, strict=False):
        if given is not None and given in found:
            found.setdefault(taken, found[given])


def _infer(node: ir.Node, found: Types, opsets: dict[str, int]) -> None:
    if node.op_type in ("Constant", "ConstantOfShape") and node.domain == "":
        found[node.outputs[0]] = _constant(node)
        return
    schema = schema_of(node, opsets)
    if schema is None:
        return
    bound = _bound(node, schema, found)
    variables = {constraint.type_param_str for constraint in schema.type_constraints}
    for index, value in enumerate(node.outputs):
        kind = type_word(schema.outputs, index)
        said = _FIXED.get(kind) or bound.get(kind)
        if said is None and kind in variables:
            said = _by_attribute(node, schema, bound)
        if said is not None:
            found[value] = said


def _bound(node: ir.Node, schema: onnx.defs.OpSchema, found: Types) -> dict[str, ir.DataType]:
    """What the operator's type variables stand for, as the inputs whose type is known say.

    An input of unknown type (made by an operator that onnx does not know) has that of its variable.
    """
    inputs = [(type_word(schema.inputs, i), v) for i, v in enumerate(node.inputs) if v is not None]
    bound: dict[str, ir.DataType] = {}
    for kind, value in inputs:
        if value in found:
            bound.setdefault(kind, found[value])
    if node.op_type not in ("Loop", "Scan"):  # whose variable stands for several types at once
        for kind, value in inputs:
            if (known := _FIXED.get(kind) or bound.get(kind)) is not None:
                found.setdefault(value, known)
    return bound


def _by_attribute(
    node: ir.Node, schema: onnx.defs.OpSchema, bound: dict[str, ir.DataType]
) -> ir.DataType | None:
    """Of an output whose type no input gives: an attribute, its default, else the first input's."""
    if node.op_type == "QuantizeLinear" and "output_dtype" not in node.attributes:
        return ir.DataType.UINT8
    for name in _TYPE_ATTRIBUTES:
        if name in node.attributes and node.attributes[name].value:
            return ir.DataType(node.attributes[name].as_int())
        if name in schema.attributes and schema.attributes[name].default_value.i:
            return ir.DataType(schema.attributes[name].default_value.i)
    like = any(name in schema.attributes for name in _TYPE_ATTRIBUTES)
    return next(iter(bound.values()), None) if like else None


def _constant(node: ir.Node) -> ir.DataType:
    if "value" in node.attributes:
        return node.attributes["value"].as_tensor().dtype
    return next(
        (ir.DataType[_LISTED[name]] for name in node.attributes if name in _LISTED),
        ir.DataType.FLOAT,
    )
