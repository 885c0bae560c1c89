"""Names that users of the file meet: those of its inputs and outputs."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence

import onnx_ir as ir
from torch import nn
from torch.utils import _pytree as pytree

_OUTPUT = "output"


def leaf_name(path: Sequence[object]) -> str:
    """Keys, fields and places of a tensor in what holds it, joined as in a variable's name."""
    return re.sub(r"\W", "_", "_".join(map(_part, path)))


def name_outputs(model: ir.Model, structure: pytree.TreeSpec, module: nn.Module) -> None:
    """Name the outputs after what the forward returned.

    That is the keys of a dict or ModelOutput, the fields of a named tuple, or the variables in its
    return statements where all of them name the same; else output_0, output_1, ...
    """
    outputs = model.graph.outputs
    if structure.num_leaves != len(outputs):
        return
    taken = {v.name for v in (*model.graph.inputs, *model.graph.initializers.values())}
    taken |= {v.name for node in model.graph.all_nodes() for v in node.outputs}
    taken -= {value.name for value in outputs}
    places = pytree.tree_flatten_with_path(structure.unflatten(range(structure.num_leaves)))[0]
    variables = returned_variables(module)
    for at, (value, (path, _)) in enumerate(zip(outputs, places, strict=True)):
        if value.producer() is None:
            continue
        wanted = (_from_place(path, variables), f"{_OUTPUT}_{at}", f"{value.name}_{_OUTPUT}")
        value.name = next((n for n in wanted if n and n not in taken), value.name)
        taken.add(value.name)


def returned_variables(module: nn.Module) -> tuple[str, ...]:
    """Variables that forward returns, one alone or in a tuple; () where its source does not tell.

    The source is read, not run. Several return statements must agree.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return ()
    found = {_variables(statement) for statement in _returns(function)}
    return found.pop() if len(found) == 1 else ()


def _part(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _from_place(path: Sequence[object], variables: Sequence[str]) -> str | None:
    """None for a place that no one has named."""
    if not path:
        return variables[0] if len(variables) == 1 else None
    if isinstance(getattr(path[0], "idx", None), int):
        at = path[0].idx  # type: ignore[attr-defined]  # a SequenceKey, as just found
        if at >= len(variables):
            return None
        return "_".join((variables[at], *(leaf_name(path[1:]) for _ in path[1:2])))
    return leaf_name(path)


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    """Of this function, not of those inside it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _returns(child)


def _variables(statement: ast.Return) -> tuple[str, ...]:
    value = statement.value
    if isinstance(value, ast.Name):
        return (value.id,)
    if isinstance(value, ast.Tuple | ast.List):
        names = tuple(e.id for e in value.elts if isinstance(e, ast.Name))
        return names if len(names) == len(value.elts) else ()
    return ()
