"""What of a float32 file must stay float32 in another precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import onnx_ir as ir

from twofour.errors import BadInputError
from twofour.export.element_types import Types, opsets_of, schema_of, type_word
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import scopes
from twofour.records.weights import LARGEST_PASSED_OVER

_SEPARATE_INITIALIZERS = 4
"""The first IR version in which an initializer need not be a graph input."""


def load_float32(opened: OpenedModel) -> ir.Model:
    """The model, every node with a name, external data mapped.

    Raises BadInputError for what onnx_ir cannot keep.
    """
    source, proto = opened.path, opened.whole()
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


FLOAT = ir.DataType.FLOAT
LAYERS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators whose weights sparse kernels are for."""
FLOWS = frozenset({"If", "Loop", "Scan"})
_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_SOURCES = frozenset(
    {
        "Range",
        "Multinomial",
        "EyeLike",
        "RandomNormal",
        "RandomUniform",
        "RandomNormalLike",
        "RandomUniformLike",
        "Bernoulli",
    }
)
_SENSITIVE = frozenset(
    {
        "Pow",
        "CumSum",
        "CumProd",
        "ReduceSum",
        "ReduceProd",
        "ReduceSumSquare",
        "ReduceL2",
        "ReduceL1",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "LpNormalization",
        "LpPool",
        "GlobalLpPool",
        "RoiAlign",
        "MaxRoiPool",
        "DFT",
        "STFT",
        "Det",
    }
)
# fmt: off
_LIGHT = frozenset(
    {
        "Abs", "Add", "Sub", "Mul", "Div", "Neg", "Sqrt", "Reciprocal", "Exp", "Log", "Sin",
        "Cos", "Tan", "Atan", "Floor", "Ceil", "Round", "Sign", "Mod", "Min", "Max", "Clip",
        "Pow", "Where", "Identity", "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Erf",
        "HardSigmoid", "HardSwish", "Concat", "Split", "Slice", "Gather", "Reshape",
        "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Tile", "Pad", "MaxPool",
        "AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceMax", "ReduceMin",
        "ReduceSum", "ReduceProd", "Cast", "CumSum", "MatMul", "Einsum",
    }
)
# fmt: on
_MULTIPLIES = frozenset({"MatMul", "Einsum"})
_STAY_FLOAT32 = {"Resize": frozenset({1})}
"""Inputs that could be half precision and are coordinates: a region of interest."""


class Kind(Enum):
    """What a float32 tensor of the graph as it came is taken for."""

    DATA = "data"
    SMALL = "made of small constants alone"
    STAYS = "float32 until it meets data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """For each node the positions that become half precision; all others keep their type."""

    inputs: Mapping[ir.Node, frozenset[int]]
    outputs: Mapping[ir.Node, frozenset[int]]
    functions: frozenset[ir.OperatorIdentifier]
    """Functions that take and give half precision; the bodies of others stay as they are."""
    asked: frozenset[ir.Node]
    """Nodes that the user named to keep float32."""
    without: Mapping[ir.Node, str]
    """Nodes whose operator has no such type, and why."""


@dataclass(slots=True, kw_only=True)
class _Planning:
    model: ir.Model
    types: Types
    half: str
    asked: frozenset[ir.Node]
    functions: frozenset[ir.OperatorIdentifier]
    kinds: dict[ir.Value, Kind] = field(default_factory=dict)
    inputs: dict[ir.Node, frozenset[int]] = field(default_factory=dict)
    outputs: dict[ir.Node, frozenset[int]] = field(default_factory=dict)
    without: dict[ir.Node, str] = field(default_factory=dict)


def plan(model: ir.Model, types: Types, half: ir.DataType, keep: tuple[str, ...]) -> Plan:
    """Decide for every node; `keep` are globs over node names (fnmatch, case-sensitive)."""
    asked = frozenset(_asked(model, keep))
    state = _Planning(
        model=model,
        types=types,
        half=f"tensor({half.name.lower()})",
        asked=asked,
        functions=_convertible_functions(model, types, asked),
    )
    _graph(state, model.graph, model.opset_imports)
    for identifier in state.functions:
        function = model.functions[identifier]
        _graph(state, function, opsets_of(model, function))
    return Plan(
        inputs=state.inputs,
        outputs=state.outputs,
        functions=state.functions,
        asked=asked,
        without=state.without,
    )


def is_constant(value: ir.Value) -> bool:
    """Whether the tensor is an initializer or what a Constant node gives."""
    return constant_tensor(value) is not None


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The values of an initializer, or of a Constant node that holds a tensor."""
    if value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is not None and node.op_type == "Constant" and "value" in node.attributes:
        return node.attributes["value"].as_tensor()
    return None


def named(node: ir.Node, globs: Iterable[str]) -> bool:
    """Whether a glob matches the node's name."""
    return any(fnmatchcase(node.name or "", glob) for glob in globs)


def _asked(model: ir.Model, globs: tuple[str, ...]) -> Iterator[ir.Node]:
    """The nodes that a glob names, and all that lies in their subgraphs."""
    for graph in (model.graph, *model.functions.values()):
        for node in graph.all_nodes():
            if named(node, globs):
                yield node
                for attribute in node.attributes.values():
                    if attribute.type == ir.AttributeType.GRAPH:
                        yield from attribute.as_graph().all_nodes()


def _convertible_functions(
    model: ir.Model, types: Types, asked: frozenset[ir.Node]
) -> frozenset[ir.OperatorIdentifier]:
    """Functions whose every call gives the same types and lies where things are converted."""
    calls: dict[ir.OperatorIdentifier, list[tuple[ir.OperatorIdentifier | None, ir.Node]]] = {}
    for place, graph in ((None, model.graph), *model.functions.items()):
        for node in graph.all_nodes():
            if node.op_identifier() in model.functions:
                calls.setdefault(node.op_identifier(), []).append((place, node))
    found = set(calls)
    while dropped := {i for i in found if not _agree(calls[i], found, types, asked)}:
        found -= dropped
    return frozenset(found)


def _agree(
    calls: list[tuple[ir.OperatorIdentifier | None, ir.Node]],
    converted: set[ir.OperatorIdentifier],
    types: Types,
    asked: frozenset[ir.Node],
) -> bool:
    signatures = {tuple(types.get(v) if v else None for v in node.inputs) for _, node in calls}
    return len(signatures) == 1 and all(
        node not in asked and (place is None or place in converted) for place, node in calls
    )


def _graph(state: _Planning, graph: ir.Graph | ir.Function, opsets: dict[str, int]) -> None:
    for node in graph:
        if node in state.asked:
            continue
        if node.op_identifier() in state.functions:
            _convert(state, node, range(len(node.inputs)), range(len(node.outputs)))
            continue
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                _graph(state, attribute.as_graph(), opsets)
        _node(state, node, opsets)


def _node(state: _Planning, node: ir.Node, opsets: dict[str, int]) -> None:
    if node.op_type in FLOWS and node.domain == "":
        return
    kind = _kind(state, node)
    for value in node.outputs:
        if state.types.get(value) == FLOAT:
            state.kinds[value] = kind
    if kind is Kind.DATA and node.domain == "":
        _by_schema(state, node, opsets)


def _kind(state: _Planning, node: ir.Node) -> Kind:
    """What the outputs are, from the operator and its float32 inputs."""
    op = node.op_type
    floats = [v for v in node.inputs if v is not None and state.types.get(v) == FLOAT]
    if op in _QUANTIZERS or op in _SOURCES or _made_float(state, node) or _squares(node, floats):
        return Kind.STAYS
    computed = {state.kinds.get(v, Kind.DATA) for v in floats if not is_constant(v)}
    weights = any(_size(v) > LARGEST_PASSED_OVER for v in floats if is_constant(v))
    light = op in _LIGHT and not (op in _MULTIPLIES and weights)
    if Kind.DATA in computed or not (light or _is_quantized(node, floats)):
        return Kind.DATA
    if Kind.STAYS in computed:
        return Kind.STAYS
    return Kind.SMALL if floats and not weights else Kind.DATA


def _made_float(state: _Planning, node: ir.Node) -> bool:
    """A Cast to float32 of what is none: integers, or a tensor that was widened on purpose."""
    if node.op_type != "Cast" or node.inputs[0] is None:
        return False
    return bool(state.types.get(node.inputs[0]) != FLOAT)


def _squares(node: ir.Node, floats: list[ir.Value]) -> bool:
    if node.op_type == "Mul" and len(floats) == 2:
        return floats[0] is floats[1]
    return node.op_type in _SENSITIVE


def _is_quantized(node: ir.Node, floats: list[ir.Value]) -> bool:
    """All that the layer computes with comes from a DequantizeLinear: its math is INT8."""
    factors = floats[:2] if node.op_type in LAYERS else [v for v in floats if not is_constant(v)]
    makers = [value.producer() for value in factors]
    return bool(makers) and all(m is not None and m.op_type == "DequantizeLinear" for m in makers)


def _size(value: ir.Value) -> int:
    tensor = constant_tensor(value)
    return 0 if tensor is None else int(tensor.size)


def _by_schema(state: _Planning, node: ir.Node, opsets: dict[str, int]) -> None:
    """Convert the type variables that may be half precision in this opset."""
    schema = schema_of(node, opsets)
    if schema is None or "Sequence" in node.op_type or node.op_type.startswith("Optional"):
        return
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    variables: dict[str, bool] = {}
    for index, value in enumerate(node.inputs):
        word = type_word(schema.inputs, index)
        if value is not None and word in allowed and index not in _stays(node):
            variables[word] = variables.get(word, True) and state.types.get(value) == FLOAT
    halves = {name for name, floats in variables.items() if floats and state.half in allowed[name]}
    if any(floats and name not in halves for name, floats in variables.items()):
        state.without[node] = f"{node.op_type} of opset {schema.since_version}"
    _convert(
        state,
        node,
        (i for i, _ in enumerate(node.inputs) if type_word(schema.inputs, i) in halves),
        (i for i, _ in enumerate(node.outputs) if type_word(schema.outputs, i) in halves),
    )


def _convert(
    state: _Planning, node: ir.Node, inputs: Iterable[int], outputs: Iterable[int]
) -> None:
    state.inputs[node] = frozenset(
        i for i in inputs if i not in _stays(node) and _is_float32(state, node.inputs[i])
    )
    state.outputs[node] = frozenset(i for i in outputs if _is_float32(state, node.outputs[i]))


def _stays(node: ir.Node) -> frozenset[int]:
    return _STAY_FLOAT32.get(node.op_type, frozenset()) if node.domain == "" else frozenset()


def _is_float32(state: _Planning, value: ir.Value | None) -> bool:
    return value is not None and bool(state.types.get(value) == FLOAT)
