"""Model-local functions of an ONNX file: each defined once, none calling itself, bounded work.

Libraries expand functions call by call: of twenty that call the next one twice, the last stands
there a million times. Source of the rules: onnx.proto (FunctionProto, ModelProto.functions);
onnx.checker refuses calls that are nested deeper than 100.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from twofour.errors import BadInputError
from twofour.graph_files import with_subgraphs

_DEEPEST = 100
_MOST_NODES = 100_000
"""Of the model with every call expanded; the graphs of large language models have some 20,000."""
_HINT = "export the model without functions (onnx.inliner.inline_local_functions takes them apart)"

_Key = tuple[str, str, str]
_Calls = Mapping[_Key, int]


@dataclass(frozen=True, slots=True)
class _Expanded:
    nodes: int
    depth: int


def check_functions(model: onnx.ModelProto, path: Path) -> None:
    """Raise BadInputError for functions that no library could expand, in time linear in the file.

    Those are functions that stand there twice, call themselves (through others or not), are nested
    deeper than 100, or make more than 100,000 nodes of the model.
    """
    if not model.functions:
        return
    named = Counter(_key(f) for f in model.functions)
    twice = next((key for key, count in named.items() if count > 1), None)
    if twice is not None:
        raise BadInputError(f"{path}: the function {_name(twice)} stands there twice", hint=_HINT)
    bodies = {_key(f): _body(with_subgraphs([f]), named) for f in model.functions}
    expanded: dict[_Key, _Expanded] = {}
    for key in bodies:
        for inner in _callees_first(key, bodies, expanded, path):
            expanded[inner] = _expand(*bodies[inner], expanded)
            _check(expanded[inner], f"the function {_name(inner)}", path)
    graph = _body(with_subgraphs([model.graph]), named)
    _check(_expand(*graph, expanded), "the graph", path)


def _key(called: onnx.FunctionProto | onnx.NodeProto) -> _Key:
    name = called.name if isinstance(called, onnx.FunctionProto) else called.op_type
    domain = "" if called.domain == "ai.onnx" else called.domain
    return domain, name, called.overload


def _name(key: _Key) -> str:
    return "::".join(part for part in key if part)


def _body(
    graphs: Iterable[onnx.GraphProto | onnx.FunctionProto], known: Mapping[_Key, int]
) -> tuple[int, _Calls]:
    """Number of nodes, those of subgraphs too, and of calls of each function."""
    keys = [_key(node) for graph in graphs for node in graph.node]
    return len(keys), Counter(key for key in keys if key in known)


def _callees_first(
    start: _Key,
    bodies: Mapping[_Key, tuple[int, _Calls]],
    known: Mapping[_Key, _Expanded],
    path: Path,
) -> Iterator[_Key]:
    """The function and all it calls, each after what it calls itself; `known` are left out.

    Without recursion: a chain may be longer than Python's stack is deep.
    """
    way = {start: iter(bodies[start][1])}
    while way:
        key, inner = next(reversed(way.items()))
        called = next(inner, None)
        if called is None:
            del way[key]
            yield key
        elif called in way:
            through = "" if called == key else f" (through {_name(key)})"
            raise BadInputError(
                f"{path}: the function {_name(called)} calls itself{through}", hint=_HINT
            )
        elif called not in known:
            way[called] = iter(bodies[called][1])


def _expand(nodes: int, calls: _Calls, known: Mapping[_Key, _Expanded]) -> _Expanded:
    return _Expanded(
        nodes=nodes + sum(count * known[key].nodes for key, count in calls.items()),
        depth=1 + max((known[key].depth for key in calls), default=0),
    )


def _check(found: _Expanded, what: str, path: Path) -> None:
    if found.depth > _DEEPEST:
        raise BadInputError(f"{path}: {what} nests calls deeper than {_DEEPEST}", hint=_HINT)
    if found.nodes > _MOST_NODES and found.depth > 1:
        raise BadInputError(
            f"{path}: {what} has more than {_MOST_NODES} nodes once its calls are expanded",
            hint=_HINT,
        )
