"""Which tensors of a float32 file become half precision, and which must stay float32.

Element types are asked of onnx node by node: its inference over a whole model (1.23) says nothing
about tensors inside subgraphs and functions, and stops where a shape cannot be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from twofour.graph.files import Array
from twofour.graph.shapes import ONNX_ERRORS, output_types
from twofour.records.weights import LARGEST_PASSED_OVER

FLOAT = ir.DataType.FLOAT
FLOAT16_MAX = float(np.finfo(np.float16).max)
MASKED = 0.99 * float(np.finfo(np.float32).max)
"""From here on it is float32's own limit: a mask, which is float16's limit in the new file."""
LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators whose weights sparse kernels are for."""
_FLOWS = {"If", "Loop", "Scan"}
_FLOAT32_MAKERS = {
    # quantizers, whose scales TensorRT and ONNX Runtime want in float32
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    # what makes numbers out of nothing
    *("Range", "Multinomial", "EyeLike", "RandomNormal", "RandomUniform", "RandomNormalLike"),
    *("RandomUniformLike", "Bernoulli"),
    # sums of many, powers and coordinates
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
}
_MULTIPLIES = {"MatMul", "Einsum"}
"""Light as well, unless one factor is a large constant."""
_STAY_FLOAT32 = {"Resize": frozenset({1})}
"""Inputs that could be half precision and are coordinates: a region of interest."""
_PREFIX = "largest value of "
Types = dict[ir.Value, ir.DataType]
"""Tensors alone: a sequence, an optional, or what is not known has no entry."""


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
    roles: dict[ir.Value, FloatRole]
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
    nodes = [*model.graph.all_nodes()]
    reaching = [node for node in nodes if not _tensors_of(node).isdisjoint(too_large)]
    beyond = tuple(dict.fromkeys([*reaching, *_behind_small_numbers(reaching, too_large)]))
    asked = {*beyond}
    for node in nodes:
        if any(fnmatchcase(node.name or "", glob) for glob in keep):
            asked.add(node)
    for node in [*asked]:
        for body in _subgraphs(node):
            asked.update(body.all_nodes())
    plan = CastPlan(
        half=half,
        types=_types_in(model),
        asked=frozenset(asked),
        beyond=beyond,
        roles=dict.fromkeys(_angles(model), FloatRole.STAYS),
    )
    _plan_graph(plan, model.graph, model.opset_imports)
    return plan


def _tensors_of(node: ir.Node) -> set[str | None]:
    return {value.name for value in (*node.inputs, *node.outputs) if value is not None}


def _behind_small_numbers(nodes: Iterable[ir.Node], names: Sequence[str]) -> Iterator[ir.Node]:
    """Nodes that read what one of `nodes` made with a number that half precision takes for 0."""
    # in log(x + 1e-10) the sum is 1e-10 where x is 0: the logarithm has to read it in float32
    for node in nodes:
        for value in node.inputs:
            if value is None or value.name not in names or value.const_value is None:
                continue
            if value.const_value.size == 1 and abs(value.const_value.numpy().item()) < 1:
                yield from node.successors()


def _angles(model: ir.Model) -> Iterator[ir.Value]:
    """Inputs of the graph that reach a Sin or Cos by light operators alone."""
    # The time step 999 of a diffusion model times 0.93 is 929.07, in float16 929: its sine would
    # be wrong by up to 0.07, and by 0.25 where float16 has steps of 0.5
    waiting: list[ir.Value | None] = []
    for node in model.graph.all_nodes():
        if node.op_type in {"Sin", "Cos"}:
            waiting += node.inputs
    seen: set[ir.Value] = set()
    while waiting:
        value = waiting.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        maker = value.producer()
        if value.is_graph_input():
            yield value
        elif maker is not None and maker.op_type in _LIGHT:
            waiting += maker.inputs


def _plan_graph(plan: CastPlan, graph: ir.Graph, opsets: Mapping[str, int]) -> None:
    for node in graph:
        if node in plan.asked:
            continue
        for body in _subgraphs(node):
            _plan_graph(plan, body, opsets)
        if node.op_type in _FLOWS and node.domain == "":
            continue
        role = _role(plan, node)
        plan.roles.update((value, role) for value in node.outputs if plan.is_float32(value))
        if role is FloatRole.DATA and node.domain == "":
            _by_schema(plan, node, opsets)


def _subgraphs(node: ir.Node) -> list[ir.Graph]:
    kinds = node.attributes.values()
    return [a.as_graph() for a in kinds if a.type == ir.AttributeType.GRAPH]


def _role(plan: CastPlan, node: ir.Node) -> FloatRole:
    """What the outputs are for, from the operator and its float32 inputs."""
    # In a LayerNorm written out, Mul(x, x) STAYS, and with it ReduceMean, Add and Sqrt behind it;
    # they are light and meet no data. Div(x, Sqrt) has an input x of DATA, and is DATA again: the
    # variance is computed in float32 and cast where it meets x.
    op = node.op_type
    floats = [v for v in node.inputs if v is not None and plan.is_float32(v)]
    # a Cast to float32 of integers, or of a tensor that was widened on purpose
    widens = op == "Cast" and not plan.is_float32(node.inputs[0])
    squares = op == "Mul" and len(floats) == 2 and floats[0] is floats[1]
    if widens or squares or op in _FLOAT32_MAKERS:
        return FloatRole.STAYS
    computed = {plan.roles.get(v, FloatRole.DATA) for v in floats if not v.is_initializer()}
    weights = any(map(_is_weight, floats))
    light = op in _LIGHT or (op in _MULTIPLIES and not weights)
    if FloatRole.DATA in computed or not (light or _is_quantized(node, floats)):
        return FloatRole.DATA
    if FloatRole.STAYS in computed:
        return FloatRole.STAYS
    if floats and not weights:
        return FloatRole.SMALL
    return FloatRole.DATA


def _is_weight(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size > LARGEST_PASSED_OVER


def _is_quantized(node: ir.Node, floats: Sequence[ir.Value]) -> bool:
    """All that the layer computes with comes from a DequantizeLinear: its math is INT8."""
    factors = [value for value in floats if not value.is_initializer()]
    if node.op_type in LAYERS:
        factors = [*floats[:2]]
    makers = [value.producer() for value in factors]
    return bool(makers) and all(m is not None and m.op_type == "DequantizeLinear" for m in makers)


def _by_schema(plan: CastPlan, node: ir.Node, opsets: Mapping[str, int]) -> None:
    """Convert the type variables that may be half precision in this opset."""
    schema = _schema_of(node, opsets)
    if schema is None or "Sequence" in node.op_type or node.op_type.startswith("Optional"):
        return
    words = _type_words(schema.inputs, node.inputs)
    for at in _STAY_FLOAT32.get(node.op_type, ()):
        words.pop(at, None)
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    floats = _float_variables(plan, node, words) & allowed.keys()
    half = f"tensor({plan.half.name.lower()})"
    halves = {word for word in floats if half in allowed[word]}
    if floats != halves:
        plan.without[node] = f"{node.op_type} of opset {schema.since_version}"
    plan.inputs[node] = frozenset(at for at, word in words.items() if word in halves)
    made = _type_words(schema.outputs, node.outputs)
    halved = [at for at, word in made.items() if word in halves]
    plan.outputs[node] = frozenset(at for at in halved if plan.is_float32(node.outputs[at]))


def _float_variables(plan: CastPlan, node: ir.Node, words: Mapping[int, str]) -> set[str]:
    """Type variables of which all inputs are float32."""
    # Where(condition, x, y) has the words {0: "B", 1: "T", 2: "T"}: T where x and y are float32
    others = {word for at, word in words.items() if not plan.is_float32(node.inputs[at])}
    return {*words.values()} - others


def _schema_of(node: ir.Node, opsets: Mapping[str, int]) -> onnx.defs.OpSchema | None:
    """The operator's definition in the opset of its graph; None for one that onnx does not know."""
    try:
        return onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return None


def _type_words(
    parameters: Sequence[onnx.defs.OpSchema.FormalParameter], values: Sequence[ir.Value | None]
) -> dict[int, str]:
    """Type or type variable ("tensor(float)", "T") at each position that has a value.

    The last parameter stands for all that follow where it is variadic.
    """
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    words = {}
    for at, value in enumerate(values):
        if value is not None and at < len(parameters):
            words[at] = str(parameters[at].type_str)
        elif value is not None and parameters and parameters[-1].option == variadic:
            words[at] = str(parameters[-1].type_str)
    return words


def _types_in(model: ir.Model) -> Types:
    """Types of all tensors that are known."""
    types: Types = {}
    _note(types, (*model.graph.inputs, *model.graph.initializers.values()))
    _infer_graph(model.graph, types, model.opset_imports)
    return types


def _note(types: Types, values: Iterable[ir.Value]) -> None:
    for value in values:
        if value.const_value is not None:
            types[value] = value.const_value.dtype
        elif isinstance(value.type, ir.TensorType):
            types.setdefault(value, value.type.dtype)


def _infer_graph(graph: ir.Graph, types: Types, opsets: Mapping[str, int]) -> None:
    for node in graph:
        if not _bodies(node, types, opsets):
            _infer(node, types, opsets)
        _note(types, node.outputs)  # as declared, where nothing was inferred


def _bodies(node: ir.Node, types: Types, opsets: Mapping[str, int]) -> bool:
    """Types inside the node's subgraphs, and of its outputs; False: it has none."""
    graphs = _subgraphs(node)
    for graph in graphs:
        _note(types, (*graph.inputs, *graph.initializers.values()))
        if node.op_type == "Loop":
            _pass_on(node.inputs[2:], graph.inputs[2:], types)
        elif node.op_type == "Scan":
            _pass_on(node.inputs, graph.inputs, types)
        _infer_graph(graph, types, opsets)
        first = 1 if node.op_type == "Loop" else 0  # a Loop's first says whether to go on
        if node.domain == "" and node.op_type in _FLOWS:
            _pass_on(graph.outputs[first:], node.outputs, types)
    return bool(graphs)


def _pass_on(inner: Sequence[ir.Value | None], outer: Sequence[ir.Value], types: Types) -> None:
    for given, taken in zip(inner, outer, strict=False):
        if given is not None and given in types:
            types.setdefault(taken, types[given])


def _infer(node: ir.Node, types: Types, opsets: Mapping[str, int]) -> None:
    """Types of the outputs of one node; none where a type that they depend on is not known."""
    schema = _schema_of(node, opsets)
    if schema is None:
        return
    _infer_inputs(node, schema, types)
    known = {}
    for value in node.inputs:
        if value in types:
            known[value.name] = onnx.helper.make_tensor_type_proto(types[value], None)
    try:
        made = output_types(ir.to_proto(node), known, {}, opsets.get(node.domain, 1))
    except ONNX_ERRORS:
        return
    for value in node.outputs:
        if value.name in made and made[value.name].HasField("tensor_type"):
            types[value] = ir.DataType(made[value.name].tensor_type.elem_type)


def _infer_inputs(node: ir.Node, schema: onnx.defs.OpSchema, types: Types) -> None:
    """An input of unknown type (made by an operator that onnx does not know) has its variable's."""
    # in Add(y, bias), where y is the output of com.microsoft.QuickGelu, y has the type of the bias
    words = _type_words(schema.inputs, node.inputs)
    bound: dict[str, ir.DataType] = {}
    for at, word in words.items():
        if node.inputs[at] in types:
            bound.setdefault(word, types[node.inputs[at]])
    for at, word in words.items():
        if word in bound:
            types.setdefault(node.inputs[at], bound[word])


def write_with_ranges(model: ir.Model, target: Path, keep: tuple[str, ...]) -> None:
    """Write a float32 model with one more output per tensor that float16 would round.

    That is its largest magnitude. `keep` are globs of nodes that stay float32; tensors inside
    subgraphs are not asked for.
    """
    graph = model.graph
    values = plan_casts(model, ir.DataType.FLOAT16, keep).narrowed
    own = [value for value in dict.fromkeys(values) if value.graph is graph]
    for value in own:
        magnitude = ir.node("Abs", [value])
        name = f"{_PREFIX}{value.name}"
        largest = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape([]))
        reduce = ir.node("ReduceMax", magnitude.outputs, {"keepdims": 0}, outputs=[largest])
        graph.extend([magnitude, reduce])
        graph.outputs.append(largest)
    ir.save(model, target, external_data=f"{target.name}.data")


def split_ranges(outputs: Mapping[str, Array]) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The model's own outputs, and the tensors with finite values that are beyond float16."""
    own = {}
    beyond = []
    for name, array in outputs.items():
        if not name.startswith(_PREFIX):
            own[name] = array
        elif FLOAT16_MAX < float(array) < MASKED:
            beyond.append(name.removeprefix(_PREFIX))
    return own, tuple(beyond)
