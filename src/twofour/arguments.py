"""What the functions of the Python API are given, checked before anything is done with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.errors import BadInputError

if TYPE_CHECKING:
    from torch import nn

    from twofour.records.weights import Pattern


def path_of(value: object, what: str, *, hint: str | None = None) -> Path:
    """A path given as text or path; raises BadInputError for anything else."""
    if isinstance(value, (str, os.PathLike)) and not isinstance(value, bytes):
        return Path(value)
    raise wrong(value, what, "a path, as text or pathlib.Path", hint)


def globs_of(value: object, what: str) -> tuple[str, ...]:
    """One glob, or several: a text alone is not a sequence of letters here."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Sequence) and all(isinstance(glob, str) for glob in value):
        return tuple(value)
    raise wrong(value, what, "a glob over layer names, or a list of them")


def pattern_of(value: object) -> Pattern:
    """A Pattern, or one as text; raises BadInputError."""
    from twofour.records.weights import Pattern

    if isinstance(value, Pattern):
        return value
    if isinstance(value, str):
        return Pattern.parse(value)
    raise wrong(value, "pattern", "a text such as '2:4', or a Pattern")


def is_module(value: object) -> bool:
    """Whether it is a torch module; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def module_of(value: object, *, hint: str | None = None) -> nn.Module:
    """A torch module; raises BadInputError for anything else."""
    if not is_module(value):
        raise wrong(value, "model", "a torch.nn.Module in memory", hint)
    module: nn.Module = value  # type: ignore[assignment]  # is_module says so
    return module


def wrong(value: object, what: str, expected: str, hint: str | None = None) -> BadInputError:
    """The error for an argument of another type than expected."""
    return BadInputError(
        f"{what} must be {expected}, found {value!r:.200} of type {type(value).__name__}", hint=hint
    )
