"""Options that belong together as one parameter of a command: a dataclass, an option per field."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def with_groups(command: Callable[..., T]) -> Callable[..., T]:
    """The command as Typer is to see it: in place of each dataclass the options it is made of."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    @functools.wraps(command)
    def run(**given: object) -> T:
        made = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**given, **made)

    options = [
        option
        for name, parameter in signature.parameters.items()
        for option in (_options(groups[name]) if name in groups else (parameter,))
    ]
    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]  # what inspect reads
    return run


def _options(group: Any) -> Iterator[inspect.Parameter]:  # noqa: ANN401  # a dataclass
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=hints[field.name],
        )


def _default(field: Field[Any]) -> object:
    return inspect.Parameter.empty if field.default is MISSING else field.default
