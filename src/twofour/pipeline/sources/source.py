"""What every model source offers: its name, its key, and the model with example inputs."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from twofour.errors import BadInputError, MissingToolError
from twofour.records.options import DynamicAxis, ExampleInputs
from twofour.store import sha256_bytes, sha256_file

if TYPE_CHECKING:
    import torch
    from torch import nn

IN_MEMORY = "the module "
"""Begins the text of a source that only lives in one process; a class follows."""
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def path_of(text: str) -> Path:
    """The path that a text names; of a user that nobody knows, `~name` is a name like others."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # pathlib's answer
        return Path(text)


class Source(Protocol):
    """A model as the user named it; nothing is loaded yet."""

    @property
    def text(self) -> str:
        """What the user wrote."""

    @property
    def name(self) -> str:
        """Default name of the run folder: letters, digits, dot, dash and underscore only."""

    def key(self) -> str:
        """sha256 over all that determines the model and its example inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModule:
    """A module in eval mode on the CPU; `module(*args, **kwargs)` gives tensors."""

    module: nn.Module
    args: tuple[Any, ...]
    """Example inputs by position, tensors."""
    kwargs: dict[str, Any]
    """Example inputs by name, tensors, in the order of forward's parameters."""
    input_names: tuple[str, ...] | None
    """Of args, then kwargs; None where forward takes `*args`."""
    notes: tuple[str, ...] = ()
    """What the user should know about how the model was loaded."""
    dynamic: tuple[DynamicAxis, ...] = ()
    """Axes besides the batch whose size is free by the architecture, where nobody says else."""
    longest: Mapping[str, int | None] = field(default_factory=dict)
    """Greatest size by name; None: no limit is known."""


class TorchSource(Source, Protocol):
    """A source that gives a torch module."""

    def load(self) -> LoadedModule:
        """Build the module and its example inputs; the same on every call.

        Raises BadInputError, and MissingToolError where an extra is not installed.
        """


def import_extra(package: str, extra: str, who: str) -> ModuleType:
    """A package that only an extra installs; raises MissingToolError naming that extra."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingToolError(
            f"{who} needs the package {package}: {error}", hint=f"pip install 'twofour[{extra}]'"
        ) from error


def safe_name(text: str) -> str:
    """The text as a folder name on any file system; "model" where nothing of it can be kept."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"


def options_key(options: ExampleInputs) -> str:
    """sha256 over the options and the content of the file with the inputs.

    Raises BadInputError when that file cannot be read.
    """
    content = "" if options.file is None else sha256_file(options.file)
    suffix = "" if options.file is None else options.file.suffix
    names = (str(options.input_shape_names),) if options.input_shape_names else ()
    return key_of(content, suffix, str(options.input_shapes), *names, str(options.seed))


def key_of(*parts: str) -> str:
    """sha256 over texts, each kept apart from the next."""
    return sha256_bytes(*(part.encode() for part in parts))


def loaded_module(
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, torch.Tensor],
    notes: tuple[str, ...] = (),
) -> LoadedModule:
    """Put the module into eval mode on the CPU and match the inputs to its forward.

    Raises BadInputError for inputs that forward does not take, and for weights without values.
    """
    _check_weights(module)
    signature = inspect.signature(module.forward)
    module.to("cpu").eval()
    ordered = _in_order(signature, kwargs)
    _check_inputs(module, signature, args, ordered)
    return LoadedModule(
        module=module,
        args=tuple(t.detach().cpu() for t in args),
        kwargs={name: t.detach().cpu() for name, t in ordered.items()},
        input_names=_names(signature, len(args), tuple(ordered)),
        notes=notes,
    )


def _check_weights(module: nn.Module) -> None:
    from torch import nn

    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise BadInputError(
                f"{name} has no shape yet (a lazy module)",
                hint="run the module once on example inputs before you return it",
            )
        if tensor.is_meta:
            raise BadInputError(
                f"{name} has no values (it is on the meta device)",
                hint="load the trained weights before you return the module",
            )


def _in_order(
    signature: inspect.Signature, kwargs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """By forward's parameters: exporters that name the inputs go by this order."""
    known = [name for name in signature.parameters if name in kwargs]
    return {name: kwargs[name] for name in (*known, *(n for n in kwargs if n not in known))}


def _check_inputs(
    module: nn.Module,
    signature: inspect.Signature,
    args: tuple[torch.Tensor, ...],
    kwargs: Mapping[str, torch.Tensor],
) -> None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join((*(f"#{i}" for i in range(len(args))), *kwargs)) or "nothing"
        raise BadInputError(
            f"{type(module).__name__}.forward takes ({', '.join(signature.parameters)}) "
            f"and is given {given}: {error}",
            hint="give one example input for each argument of forward that has no default",
        ) from error


def _names(
    signature: inspect.Signature, count: int, keywords: tuple[str, ...]
) -> tuple[str, ...] | None:
    by_position = [p.name for p in signature.parameters.values() if p.kind in _BY_POSITION]
    if len(by_position) < count:
        return None
    return (*by_position[:count], *keywords)
