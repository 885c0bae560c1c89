"""Which tensors of a float32 file become half precision, and which must stay float32.

Element types come from the operators' own definitions: onnx.shape_inference (1.23) says nothing
about tensors inside subgraphs and functions, and stops where a shape cannot be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

import onnx
import onnx_ir as ir

from twofour.graph.opened import TYPE_ATTRIBUTES
from twofour.records.weights import LARGEST_PASSED_OVER

FLOAT = ir.DataType.FLOAT
LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators whose weights sparse kernels are for."""
_FLOWS = {"If", "Loop", "Scan"}
_QUANTIZERS = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
_SOURCES = {
    *("Range", "Multinomial", "EyeLike", "RandomNormal", "RandomUniform", "RandomNormalLike"),
    *("RandomUniformLike", "Bernoulli"),
}
_SENSITIVE = {
    *("Pow", "CumSum", "CumProd", "ReduceSum", "ReduceProd", "ReduceSumSquare", "ReduceL2"),
    *("ReduceL1", "ReduceLogSum", "ReduceLogSumExp", "LpNormalization", "LpPool", "GlobalLpPool"),
    *("RoiAlign", "MaxRoiPool", "DFT", "STFT", "Det"),
}
_LIGHT = {
    *("Abs", "Add", "Sub", "Mul", "Div", "Neg", "Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos"),
    *("Tan", "Atan", "Floor", "Ceil", "Round", "Sign", "Mod", "Min", "Max", "Clip", "Pow", "Where"),
    *("Identity", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Erf", "HardSigmoid", "HardSwish"),
    *("Concat", "Split", "Slice", "Gather", "Reshape", "Flatten", "Transpose", "Squeeze"),
    *("Unsqueeze", "Expand", "Tile", "Pad", "MaxPool", "AveragePool", "GlobalAveragePool"),
    *("ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd", "Cast", "CumSum"),
    *("MatMul", "Einsum"),
}
_MULTIPLIES = {"MatMul", "Einsum"}
_STAY_FLOAT32 = {"Resize": frozenset({1})}
"""Inputs that could be half precision and are coordinates: a region of interest."""
Types = dict[ir.Value, ir.DataType]
"""Tensors alone: a sequence, an optional, or what is not known has no entry."""
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


class FloatRole(Enum):
    """What a float32 tensor of the graph as it came is for."""

    DATA = "data"
    SMALL = "made of small constants alone"
    STAYS = "float32 until it meets data"


@dataclass(slots=True, kw_only=True)
class CastPlan:
    """For each node the positions that become half precision; all others keep their type."""

    half: ir.DataType
    types: Types
    asked: frozenset[ir.Node]
    """Nodes that keep float32, because the user named them or because of `beyond`."""
    beyond: tuple[ir.Node, ...]
    """Nodes that make or read a tensor whose values do not fit."""
    kinds: dict[ir.Value, FloatRole] = field(default_factory=dict)
    inputs: dict[ir.Node, frozenset[int]] = field(default_factory=dict)
    outputs: dict[ir.Node, frozenset[int]] = field(default_factory=dict)
    without: dict[ir.Node, str] = field(default_factory=dict)
    """Nodes whose operator has no such type, and why."""

    @property
    def narrowed(self) -> Iterator[ir.Value]:
        """Computed tensors that become half precision, or are read in it."""
        for node, positions in self.outputs.items():
            yield from (node.outputs[at] for at in positions)
        for node, positions in self.inputs.items():
            read = [node.inputs[at] for at in positions]
            yield from (v for v in read if v is not None and not v.is_initializer())

    def is_float32(self, value: ir.Value | None) -> bool:
        """Whether the tensor was float32 in the file as it came."""
        return value is not None and bool(self.types.get(value) == FLOAT)


def plan_casts(
    model: ir.Model, half: ir.DataType, keep: tuple[str, ...], too_large: tuple[str, ...] = ()
) -> CastPlan:
    """Decide for every node; `keep` are globs over node names (fnmatch, case-sensitive).

    `too_large` are names of tensors whose values do not fit.
    """
    types: Types = {}
    _note(types, (*model.graph.inputs, *model.graph.initializers.values()))
    _infer_graph(model.graph, types, model.opset_imports)
    nodes, large = [*model.graph.all_nodes()], {*too_large}
    beyond = [
        node for node in nodes if large & {v.name for v in (*node.inputs, *node.outputs) if v}
    ]
    asked = beyond + [node for node in nodes for glob in keep if fnmatchcase(node.name or "", glob)]
    inside = (inner for node in asked for body in _subgraphs(node) for inner in body.all_nodes())
    made = CastPlan(
        half=half, types=types, asked=frozenset((*asked, *inside)), beyond=tuple(beyond)
    )
    made.kinds.update(dict.fromkeys(_angles(model), FloatRole.STAYS))
    _plan_graph(made, model.graph, model.opset_imports)
    return made


def _angles(model: ir.Model) -> Iterator[ir.Value]:
    """Inputs of the graph that reach a Sin or Cos by light operators alone."""
    # The time step 999 of a diffusion model times 0.93 is 929.07, in float16 929: its sine would
    # be wrong by up to 0.07, and by 0.25 where float16 has steps of 0.5
    waves = (node for node in model.graph.all_nodes() if node.op_type in {"Sin", "Cos"})
    waiting = [value for node in waves for value in node.inputs]
    seen: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        maker = value.producer()
        if value.is_graph_input():
            yield value
        elif maker is not None and maker.op_type in _LIGHT - _MULTIPLIES:
            waiting += maker.inputs


def _plan_graph(made: CastPlan, graph: ir.Graph, opsets: dict[str, int]) -> None:
    for node in graph:
        if node in made.asked:
            continue
        for body in _subgraphs(node):
            _plan_graph(made, body, opsets)
        if node.op_type in _FLOWS and node.domain == "":
            continue
        kind = _kind(made, node)
        made.kinds.update((value, kind) for value in node.outputs if made.is_float32(value))
        if kind is FloatRole.DATA and node.domain == "":
            _by_schema(made, node, opsets)


def _subgraphs(node: ir.Node) -> list[ir.Graph]:
    kinds = node.attributes.values()
    return [a.as_graph() for a in kinds if a.type == ir.AttributeType.GRAPH]


def _kind(made: CastPlan, node: ir.Node) -> FloatRole:
    """What the outputs are for, from the operator and its float32 inputs."""
    # In a LayerNorm written out, Mul(x, x) STAYS, and with it ReduceMean, Add and Sqrt behind it;
    # they are light and meet no data. Div(x, Sqrt) has an input x of DATA, and is DATA again: the
    # variance is computed in float32 and cast where it meets x.
    op = node.op_type
    floats = [v for v in node.inputs if v is not None and made.is_float32(v)]
    # a Cast to float32 of integers, or of a tensor that was widened on purpose
    made_float = op == "Cast" and not made.is_float32(node.inputs[0])
    squares = op == "Mul" and len(floats) == 2 and floats[0] is floats[1]
    if made_float or squares or op in {*_QUANTIZERS, *_SOURCES, *_SENSITIVE}:
        return FloatRole.STAYS
    computed = {made.kinds.get(v, FloatRole.DATA) for v in floats if not v.is_initializer()}
    weights = any(
        v.const_value is not None and v.const_value.size > LARGEST_PASSED_OVER for v in floats
    )
    light = op in _LIGHT and not (op in _MULTIPLIES and weights)
    if FloatRole.DATA in computed or not (light or _is_quantized(node, floats)):
        return FloatRole.DATA
    if FloatRole.STAYS in computed:
        return FloatRole.STAYS
    return FloatRole.SMALL if floats and not weights else FloatRole.DATA


def _is_quantized(node: ir.Node, floats: list[ir.Value]) -> bool:
    """All that the layer computes with comes from a DequantizeLinear: its math is INT8."""
    factors = (
        floats[:2] if node.op_type in LAYERS else [v for v in floats if not v.is_initializer()]
    )
    makers = [value.producer() for value in factors]
    return bool(makers) and all(m is not None and m.op_type == "DequantizeLinear" for m in makers)


def _by_schema(made: CastPlan, node: ir.Node, opsets: dict[str, int]) -> None:
    """Convert the type variables that may be half precision in this opset."""
    schema = _schema_of(node, opsets)
    if schema is None or "Sequence" in node.op_type or node.op_type.startswith("Optional"):
        return
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    stays = _STAY_FLOAT32.get(node.op_type, frozenset())
    inputs = [(i, v, _type_word(schema.inputs, i)) for i, v in enumerate(node.inputs)]
    inputs = [(index, value, word) for index, value, word in inputs if index not in stays]
    variables: dict[str, bool] = {}
    for _, value, word in inputs:
        if value is not None and word in allowed:
            variables[word] = variables.get(word, True) and made.is_float32(value)
    half = f"tensor({made.half.name.lower()})"
    halves = {name for name, floats in variables.items() if floats and half in allowed[name]}
    if any(floats and name not in halves for name, floats in variables.items()):
        made.without[node] = f"{node.op_type} of opset {schema.since_version}"
    made.inputs[node] = frozenset(
        index for index, value, word in inputs if word in halves and made.is_float32(value)
    )
    made.outputs[node] = frozenset(
        i
        for i, value in enumerate(node.outputs)
        if _type_word(schema.outputs, i) in halves and made.is_float32(value)
    )


def _schema_of(node: ir.Node, opsets: dict[str, int]) -> onnx.defs.OpSchema | None:
    """The operator's definition in the opset of its graph; None for one that onnx does not know."""
    try:
        return onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return None


def _type_word(parameters: Sequence[onnx.defs.OpSchema.FormalParameter], index: int) -> str:
    """Type or type variable at a position ("tensor(float)", "T"); "" where there is none.

    The last parameter stands for all that follow where it is variadic.
    """
    if index < len(parameters):
        return str(parameters[index].type_str)
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    if parameters and parameters[-1].option == variadic:
        return str(parameters[-1].type_str)
    return ""


def _note(found: Types, values: Iterable[ir.Value]) -> None:
    for value in values:
        if value.const_value is not None:
            found[value] = value.const_value.dtype
        elif isinstance(value.type, ir.TensorType):
            found.setdefault(value, value.type.dtype)


def _infer_graph(graph: ir.Graph, found: Types, opsets: dict[str, int]) -> None:
    for node in graph:
        if not _bodies(node, found, opsets):
            _infer(node, found, opsets)
        _note(found, node.outputs)  # as declared, where nothing was inferred


def _bodies(node: ir.Node, found: Types, opsets: dict[str, int]) -> bool:
    """Types inside the node's subgraphs, and of its outputs; False: it has none."""
    graphs = _subgraphs(node)
    for graph in graphs:
        _note(found, (*graph.inputs, *graph.initializers.values()))
        if node.op_type == "Loop":
            _pass_on(node.inputs[2:], graph.inputs[2:], found)
        elif node.op_type == "Scan":
            skip = len(node.inputs) - len(graph.inputs)  # opset 8 has the lengths first
            _pass_on(node.inputs[max(skip, 0) :], graph.inputs, found)
        _infer_graph(graph, found, opsets)
        outputs = graph.outputs[1:] if node.op_type == "Loop" else graph.outputs
        if node.domain == "" and node.op_type in _FLOWS:
            _pass_on(outputs, node.outputs, found)
    return bool(graphs)


def _pass_on(inner: Sequence[ir.Value | None], outer: Sequence[ir.Value], found: Types) -> None:
    for given, taken in zip(inner, outer, strict=False):
        if given is not None and given in found:
            found.setdefault(taken, found[given])


def _infer(node: ir.Node, found: Types, opsets: dict[str, int]) -> None:
    if node.op_type == "ConstantOfShape" and node.domain == "":
        value = node.attributes.get("value")
        found[node.outputs[0]] = FLOAT if value is None else value.as_tensor().dtype
        return
    schema = _schema_of(node, opsets)
    if schema is None:
        return
    bound = _bound(node, schema, found)
    variables = {constraint.type_param_str for constraint in schema.type_constraints}
    for index, value in enumerate(node.outputs):
        kind = _type_word(schema.outputs, index)
        said = _FIXED.get(kind) or bound.get(kind)
        if said is None and kind in variables:
            said = _by_attribute(node, schema, bound)
        if said is not None:
            found[value] = said


def _bound(node: ir.Node, schema: onnx.defs.OpSchema, found: Types) -> dict[str, ir.DataType]:
    """What the operator's type variables stand for, as the inputs whose type is known say.

    An input of unknown type (made by an operator that onnx does not know) has that of its variable.
    """
    inputs = [(_type_word(schema.inputs, i), v) for i, v in enumerate(node.inputs) if v is not None]
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
    """Type of an output that has none of an input: that of an attribute, else the first input's."""
    if node.op_type == "QuantizeLinear" and "output_dtype" not in node.attributes:
        return ir.DataType.UINT8
    for name in TYPE_ATTRIBUTES:
        if name in node.attributes and node.attributes[name].value:
            return ir.DataType(node.attributes[name].as_int())
        if name in schema.attributes and schema.attributes[name].default_value.i:
            return ir.DataType(schema.attributes[name].default_value.i)
    like = any(name in schema.attributes for name in TYPE_ATTRIBUTES)
    return next(iter(bound.values()), None) if like else None
