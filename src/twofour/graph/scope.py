"""The tensors that nodes read and where they are made, in subgraphs and functions too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from twofour.errors import BadInputError
from twofour.graph.files import shape_of, subgraphs, with_subgraphs
from twofour.records import frozen
from twofour.records.export import STANDARD_DOMAINS, qualified_op

_RANDOM = ("Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike")


@frozen(eq=False)
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


@frozen(eq=False)
class Scope:
    """One graph; names that it does not define are looked up in the graph around it."""

    graph: onnx.GraphProto
    parent: Scope | None
    path: Path | None
    """The model's file, whose folder contains the external data."""
    opset: int
    """Version of ONNX's own operators; 0 where the file names none."""
    nodes: tuple[Node, ...]
    constants: dict[str, onnx.TensorProto]
    """Initializers and the tensors of Constant nodes. An initializer that is a graph input too
    counts as a constant, as it does for TensorRT's parser."""
    producers: dict[str, Node]
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
        # the body of a Loop reads its own input "x", not the initializer "x" of the main graph
        scope: Scope | None = self
        while scope is not None:
            if name in scope.producers or name in scope.fixed or name in scope.inputs:
                return scope
            scope = scope.parent
        return None

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
    yield from _with_subgraphs(_open(model.graph, "", path=path, opset=opset_of(model)))


def function_scopes(model: onnx.ModelProto, path: Path | None) -> Iterator[Scope]:
    """The bodies of the model's own functions, once each, with their subgraphs."""
    for function in model.functions:
        body = onnx.GraphProto(name=function.name, node=function.node)
        for name in function.input:
            body.input.add(name=name)
        for name in function.output:
            body.output.add(name=name)
        prefix = f"{function.domain}::{function.name}/"
        yield from _with_subgraphs(_open(body, prefix, path=path, opset=opset_of(model)))


def _with_subgraphs(outermost: Scope) -> Iterator[Scope]:
    waiting = [outermost]
    for scope in waiting:
        yield scope
        for node in scope.nodes:
            for name, graph in subgraphs(node.proto):
                prefix = f"{node.label}.{name}/"  # If:3.then_branch/
                body = _open(graph, prefix, path=scope.path, opset=scope.opset, parent=scope)
                scope.bodies.setdefault(node, []).append(body)
                waiting.append(body)


def opset_of(model: onnx.ModelProto) -> int:
    """Version of ONNX's own operators; 0 where the file names none."""
    own = (each.version for each in model.opset_import if each.domain in STANDARD_DOMAINS)
    return next(own, 0)


def is_standard(node: onnx.NodeProto) -> bool:
    """Whether the op is one of ONNX's own: other domains may mean anything by the same name."""
    return node.domain in STANDARD_DOMAINS


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    """The attribute of that name, or None."""
    return next((each for each in node.attribute if each.name == name), None)


def integer(node: onnx.NodeProto, name: str, default: int) -> int:
    """The integer attribute of that name, or the default."""
    given = attribute(node, name)
    return default if given is None else given.i


def number(node: onnx.NodeProto, name: str, default: float) -> float:
    """The attribute of that name, a float, or the default."""
    given = attribute(node, name)
    return default if given is None else float(given.f)


def evaluate(
    node: onnx.NodeProto, given: Mapping[str, NDArray[Any]], opset: int
) -> dict[str, NDArray[Any]]:
    """The outputs by name of one of ONNX's own operators, from all its inputs by name.

    It is evaluated in Python: a damaged node raises anything.
    """
    from onnx.reference import ReferenceEvaluator

    names = [*filter(None, node.output)]
    opsets = [onnx.helper.make_opsetid("", opset)]
    body = onnx.helper.make_function("f", "f", [*given], names, [node], opsets)
    results: Any = ReferenceEvaluator(body).run(None, dict(given), attributes={})
    return dict(zip(names, results, strict=True))


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
    if not kind.tensor_type.HasField("shape"):
        return None
    sizes = []
    for dim in kind.tensor_type.shape.dim:
        if not dim.HasField("dim_value") or dim.dim_value < 0:
            return None
        sizes.append(dim.dim_value)
    return tuple(sizes)


def _open(
    graph: onnx.GraphProto,
    prefix: str,
    *,
    path: Path | None,
    opset: int,
    parent: Scope | None = None,
) -> Scope:
    nodes = _nodes(graph, prefix)
    constants = _constants(graph)
    producers = {}
    for node in nodes:
        producers.update(dict.fromkeys(filter(None, node.proto.output), node))
    scope = Scope(
        graph=graph,
        parent=parent,
        path=path,
        opset=opset,
        nodes=nodes,
        constants=constants,
        producers=producers,
        values={value.name: value for value in (*graph.output, *graph.value_info, *graph.input)},
        inputs=frozenset(value.name for value in graph.input),
        outputs=frozenset(value.name for value in graph.output),
        fixed={*constants, *(sparse.values.name for sparse in graph.sparse_initializer)},
        users={},
        prefix=prefix,
    )
    _connect(scope)
    return scope


def _nodes(graph: onnx.GraphProto, prefix: str) -> tuple[Node, ...]:
    nodes = []
    for number, proto in enumerate(graph.node):
        name = proto.name or f"{proto.op_type}:{number}"  # Conv:12
        nodes.append(Node(proto=proto, name=name, label=prefix + name))
    return tuple(nodes)


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "Constant" or not is_standard(node):
            continue
        for value in node.attribute:
            if value.HasField("t"):
                constants.update(dict.fromkeys(node.output, value.t))
            elif value.name in ("value_int", "value_ints"):
                array = np.array(onnx.helper.get_attribute_value(value), np.int64)
                constants.update(dict.fromkeys(node.output, numpy_helper.from_array(array)))
    return constants


def _connect(scope: Scope) -> None:
    """Fill in the users of each tensor, and the tensors that depend on constants alone."""
    for node in scope.nodes:
        names = dict.fromkeys(filter(None, node.proto.input))
        for name in names:
            owner = scope.owner(name)
            if owner is not None:
                owner.users.setdefault(name, []).append(node)
        # nodes come in topological order: constant inputs make constant outputs
        computed = names and node.proto.op_type not in _RANDOM and not any(subgraphs(node.proto))
        if node.proto.op_type == "Constant" or (computed and all(map(scope.is_fixed, names))):
            scope.fixed.update(filter(None, node.proto.output))


_DEEPEST = 100
_MOST_NODES = 100_000
"""Nodes of the model with every call expanded; graphs of large language models have 20,000."""
_HINT = "export the model without functions: onnx.inliner.inline_local_functions expands them"

_Key = tuple[str, str, str]
"""Domain, name and overload of a function."""


def check_functions(model: onnx.ModelProto, path: Path) -> None:
    """Raise BadInputError for functions that no library could expand, in time linear in the file.

    Those are functions that call themselves, nest calls deeper than 100, or make more than 100,000
    nodes of the model.
    """
    called = {_key(body): _calls(body) for body in model.functions}
    try:
        innermost_first = [*TopologicalSorter(called).static_order()]
    except CycleError as error:
        name = error.args[1][0][1]
        raise BadInputError(f"{path}: the function {name} calls itself", hint=_HINT) from error
    # A calls B twice and adds a Relu, B is a MatMul and an Add: B counts 3, A 1 + 3 + 3 + 1
    nodes = dict.fromkeys(innermost_first, 1)
    depths = dict.fromkeys(innermost_first, 0)
    for key in innermost_first:
        for inner in called.get(key, ()):
            nodes[key] += nodes[inner]
            depths[key] = max(depths[key], depths[inner] + 1)
    size = sum(nodes.get(key, 1) for key in _calls(model.graph))
    if size > _MOST_NODES or max(depths.values(), default=0) > _DEEPEST:
        raise BadInputError(
            f"{path}: its functions nest calls deeper than {_DEEPEST}, or make more than "
            f"{_MOST_NODES:,} nodes once they are expanded",
            hint=_HINT,
        )


def _key(called: onnx.FunctionProto | onnx.NodeProto) -> _Key:
    name = called.name if isinstance(called, onnx.FunctionProto) else called.op_type
    domain = "" if called.domain == "ai.onnx" else called.domain
    return domain, name, called.overload


def _calls(body: onnx.GraphProto | onnx.FunctionProto) -> tuple[_Key, ...]:
    return tuple(_key(node) for graph in with_subgraphs([body]) for node in graph.node)
