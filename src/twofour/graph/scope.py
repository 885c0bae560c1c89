"""The tensors that nodes read and where they are made, in subgraphs and functions too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from twofour.errors import BadInputError
from twofour.graph.files import read_tensor, shape_of, subgraphs, with_subgraphs
from twofour.records.export import STANDARD_DOMAINS, qualified_op

_RANDOM = ("Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike")
_MOST_INTEGERS = 64
"""Axes and shapes are shorter; a longer tensor is none, however it is used."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """A node and what to call it; two nodes are the same when they are the same object."""

    proto: onnx.NodeProto
    name: str
    """Its name, or op type and index ("Conv:12") where it has none."""
    label: str
    """The name, preceded by the subgraphs that it is in ("If:3.then_branch/")."""

    @property
    def op(self) -> str:
        """Op type, with its domain unless that is ONNX's own."""
        return qualified_op(self.proto.op_type, self.proto.domain)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scope:
    """One graph; names that it does not define are looked up in the graph around it."""

    graph: onnx.GraphProto
    parent: Scope | None
    path: Path | None
    """The model's file, whose folder contains the external data."""
    nodes: tuple[Node, ...]
    constants: dict[str, onnx.TensorProto]
    """Initializers and the tensors of Constant nodes. An initializer that is a graph input too
    counts as a constant, as it does for TensorRT's parser."""
    producers: dict[str, Node]
    output_at: dict[str, int]
    """Which output of its node a tensor is."""
    values: dict[str, onnx.ValueInfoProto]
    """Graph outputs, value_info and graph inputs."""
    inputs: frozenset[str]
    outputs: frozenset[str]
    fixed: set[str]
    """Tensors that depend on constants alone."""
    users: dict[str, list[Node]]
    """Nodes of this graph and of its subgraphs that read the tensor."""
    prefix: str = ""
    """The graphs around this one, with which labels of its nodes begin."""
    bodies: dict[Node, list[Scope]] = field(default_factory=dict)
    """The graphs that an If, Loop or Scan of this one runs."""

    def owner(self, name: str) -> Scope | None:
        """The innermost graph around this point that defines the name; None where none does."""
        scope: Scope | None = self
        while scope is not None and not (
            name in scope.producers or name in scope.fixed or name in scope.inputs
        ):
            scope = scope.parent
        return scope

    def constant(self, name: str) -> onnx.TensorProto | None:
        """The dense constant of that name; None where the name means something else here."""
        owner = self.owner(name)
        return None if owner is None else owner.constants.get(name)

    def is_fixed(self, name: str) -> bool:
        """Whether the tensor depends on constants alone."""
        owner = self.owner(name)
        return owner is not None and name in owner.fixed


Place = tuple[Scope, str]
"""A tensor: the graph that defines it, and its name there."""


def scopes(model: onnx.ModelProto, path: Path | None) -> Iterator[Scope]:
    """The main graph and, after the graph around them, all subgraphs of If, Loop and Scan."""
    yield from _with_subgraphs(_open(model.graph, None, path, ""))


def function_scopes(model: onnx.ModelProto, path: Path | None) -> Iterator[Scope]:
    """The bodies of the model's own functions, once each, with their subgraphs."""
    for function in model.functions:
        body = onnx.GraphProto(name=function.name, node=function.node)
        body.input.extend(onnx.ValueInfoProto(name=name) for name in function.input)
        body.output.extend(onnx.ValueInfoProto(name=name) for name in function.output)
        prefix = f"{function.domain}::{function.name}/"
        yield from _with_subgraphs(_open(body, None, path, prefix))


def _with_subgraphs(outermost: Scope) -> Iterator[Scope]:
    waiting = [outermost]
    for scope in waiting:
        yield scope
        for node in scope.nodes:
            for name, graph in subgraphs(node.proto):
                waiting.append(_open(graph, scope, scope.path, f"{node.label}.{name}/"))
                scope.bodies.setdefault(node, []).append(waiting[-1])


def is_standard(node: onnx.NodeProto) -> bool:
    """Whether the op is one of ONNX's own: other domains may mean anything by the same name."""
    return node.domain in STANDARD_DOMAINS


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    """The attribute of that name, or None."""
    return next((a for a in node.attribute if a.name == name), None)


def integer(node: onnx.NodeProto, name: str, default: int) -> int:
    """The integer attribute of that name, or the default."""
    found = attribute(node, name)
    return default if found is None else found.i


def number(node: onnx.NodeProto, name: str, default: float) -> float:
    """The attribute of that name, a float, or the default."""
    found = attribute(node, name)
    return default if found is None else float(found.f)


def integers(node: Node, scope: Scope, position: int, name: str) -> tuple[int, ...] | None:
    """A list such as axes, given as input `position` (newer opsets) or as attribute `name`.

    None where the node has neither. Raises LookupError where the input is not a readable constant.
    """
    proto = node.proto
    if position < len(proto.input) and proto.input[position]:
        return _constant_integers(scope, proto.input[position])
    found = attribute(proto, name)
    return None if found is None else tuple(found.ints)


def tensor_shape(scope: Scope, name: str) -> tuple[int, ...] | None:
    """Shape of a constant, or as declared; None unless every dimension is a number."""
    constant = scope.constant(name)
    if constant is not None:
        return shape_of(constant)
    owner = scope.owner(name)
    value = owner.values.get(name) if owner else None
    return None if value is None else fixed_dims(value.type)


def fixed_dims(kind: onnx.TypeProto) -> tuple[int, ...] | None:
    """Shape of a type of tensors; None unless every dimension is a number."""
    dims = kind.tensor_type.shape.dim
    known = all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in dims)
    is_shape = known and kind.tensor_type.HasField("shape")
    return tuple(dim.dim_value for dim in dims) if is_shape else None


def _constant_integers(scope: Scope, name: str) -> tuple[int, ...]:
    owner = scope.owner(name)
    tensor = owner.constants.get(name) if owner else None
    if tensor is not None:
        small = len(tensor.dims) <= 1 and all(0 <= dim <= _MOST_INTEGERS for dim in tensor.dims)
        if small and tensor.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.INT32):
            return tuple(int(value) for value in read_tensor(tensor, scope.path).reshape(-1))
    elif owner and name in owner.producers and owner.producers[name].proto.op_type == "Constant":
        node = owner.producers[name].proto
        listed, single = attribute(node, "value_ints"), attribute(node, "value_int")
        if listed is not None and len(listed.ints) <= _MOST_INTEGERS:
            return tuple(listed.ints)
        if single is not None:
            return (single.i,)
    raise LookupError(name)


def _open(graph: onnx.GraphProto, parent: Scope | None, path: Path | None, prefix: str) -> Scope:
    names = (proto.name or f"{proto.op_type}:{at}" for at, proto in enumerate(graph.node))
    nodes = tuple(
        Node(proto=proto, name=name, label=prefix + name)
        for proto, name in zip(graph.node, names, strict=True)
    )
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in nodes:
        value = attribute(node.proto, "value") if node.proto.op_type == "Constant" else None
        if value is not None and value.HasField("t") and is_standard(node.proto):
            constants.update(dict.fromkeys(node.proto.output, value.t))
    scope = Scope(
        graph=graph,
        parent=parent,
        path=path,
        nodes=nodes,
        constants=constants,
        producers={name: node for node in nodes for name in node.proto.output if name},
        output_at={name: at for node in nodes for at, name in enumerate(node.proto.output)},
        values={value.name: value for value in (*graph.output, *graph.value_info, *graph.input)},
        inputs=frozenset(value.name for value in graph.input),
        outputs=frozenset(value.name for value in graph.output),
        fixed={*constants, *(sparse.values.name for sparse in graph.sparse_initializer)},
        users={},
        prefix=prefix,
    )
    _connect(scope)
    return scope


def _connect(scope: Scope) -> None:
    for node in scope.nodes:
        names = [name for name in node.proto.input if name]
        for name in dict.fromkeys(names):
            owner = scope.owner(name)
            if owner is not None:
                owner.users.setdefault(name, []).append(node)
        # nodes come in topological order: constant inputs make constant outputs
        computed = names and node.proto.op_type not in _RANDOM and not [*subgraphs(node.proto)]
        if node.proto.op_type == "Constant" or (computed and all(map(scope.is_fixed, names))):
            scope.fixed.update(name for name in node.proto.output if name)


_DEEPEST = 100
_MOST_NODES = 100_000
"""Nodes of the model with every call expanded; graphs of large language models have 20,000."""
_HINT = "export the model without functions: onnx.inliner.inline_local_functions expands them"

_Key = tuple[str, str, str]
_Bodies = Mapping[_Key, tuple[_Key, ...]]


def check_functions(model: onnx.ModelProto, path: Path) -> None:
    """Raise BadInputError for functions that no library could expand, in time linear in the file.

    Those are functions that call themselves, nest calls deeper than 100, or make more than 100,000
    nodes of the model.
    """
    if not model.functions:
        return
    called = {_key(body): _calls(body) for body in model.functions}
    called[("", "", "")] = _calls(model.graph)  # no function has an empty name
    known: dict[_Key, tuple[int, int]] = {}
    for key in called:
        _expanded(key, called, known, path, above=0)


def _key(called: onnx.FunctionProto | onnx.NodeProto) -> _Key:
    name = called.name if isinstance(called, onnx.FunctionProto) else called.op_type
    return "" if called.domain == "ai.onnx" else called.domain, name, called.overload


def _calls(body: onnx.GraphProto | onnx.FunctionProto) -> tuple[_Key, ...]:
    return tuple(_key(node) for graph in with_subgraphs([body]) for node in graph.node)


def _expanded(
    key: _Key, called: _Bodies, known: dict[_Key, tuple[int, int]], path: Path, *, above: int
) -> tuple[int, int]:
    """Nodes and depth of a body with its calls expanded; `above`: how deep it is called here."""
    if key in known:
        return known[key]
    nodes, depth = len(called[key]), 1
    if above <= _DEEPEST:
        for inner in filter(called.__contains__, called[key]):
            more, below = _expanded(inner, called, known, path, above=above + 1)
            nodes, depth = nodes + more, max(depth, below + 1)
    what = f"the function {'::'.join(filter(None, key))}" if any(key) else "the graph"
    if max(above, depth) > _DEEPEST:
        raise BadInputError(
            f"{path}: {what} nests calls deeper than {_DEEPEST}, or calls itself", hint=_HINT
        )
    if nodes > _MOST_NODES and depth > 1:
        raise BadInputError(
            f"{path}: {what} has more than {_MOST_NODES} nodes once its calls are expanded",
            hint=_HINT,
        )
    known[key] = nodes, depth
    return known[key]
