"""What every model source offers: its name, its key, and the model with example inputs."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError, MissingToolError
from twofour.inputs.examples import refuse_large_example
from twofour.inputs.fits import read_arrays
from twofour.packages import how_to_install
from twofour.records.options import DynamicAxis, ExampleInputs
from twofour.store import sha256_bytes, sha256_file

if TYPE_CHECKING:
    import torch
    from torch import nn

CONFIG = "config.json"
MODULES = "modules.json"
"""A folder that has one of these is a checkpoint."""
IN_MEMORY = "the module "
"""Begins the text of a source that only lives in one process; a class follows."""
_FLOAT_BYTES = 4
_POSITIONAL = re.compile(r"arr_(\d+)")
"""How numpy.savez calls arrays that were given without a name."""
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def path_of(text: str) -> Path:
    """The path that a text names; of a user that nobody knows, `~name` is a name like others."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # pathlib's answer
        return Path(text)


def names_code(text: str, path: Path) -> bool:
    """Whether a text that names no file or folder has the colon of a callable."""
    return ":" in text and not path.exists()


def state_of(path: Path) -> str:
    """Size and time of change: cheap, and wrong only for who restores both."""
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} bytes, {status.st_mtime_ns}"


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
        """Build the module and its example inputs; the same on every call."""


def import_extra(package: str, who: str) -> ModuleType:
    """A package that not everybody installs; raises MissingToolError naming how to."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingToolError(
            f"{who} needs the package {package}: {error}", hint=how_to_install(package)
        ) from error


def safe_name(text: str) -> str:
    """The text as a folder name on any file system; "model" where nothing of it can be kept."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"


def options_key(options: ExampleInputs) -> str:
    """sha256 over the options and the content of the file with the inputs."""
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
    """The module in eval mode on the CPU; raises BadInputError for inputs that do not fit it."""
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
    signature = inspect.signature(module.forward)
    module.to("cpu").eval()
    known = [name for name in signature.parameters if name in kwargs]
    # by forward's parameters: exporters that name the inputs go by this order
    ordered = {name: kwargs[name] for name in (*known, *(n for n in kwargs if n not in known))}
    try:
        signature.bind(*args, **ordered)
    except TypeError as error:
        given = ", ".join((*(f"#{i}" for i in range(len(args))), *ordered)) or "nothing"
        raise BadInputError(
            f"{type(module).__name__}.forward takes ({', '.join(signature.parameters)}) "
            f"and is given {given}: {error}",
            hint="give one example input for each argument of forward that has no default",
        ) from error
    places = [p.name for p in signature.parameters.values() if p.kind in _BY_POSITION]
    return LoadedModule(
        module=module,
        args=tuple(t.detach().cpu() for t in args),
        kwargs={name: t.detach().cpu() for name, t in ordered.items()},
        input_names=None if len(places) < len(args) else (*places[: len(args)], *ordered),
        notes=notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments for one call of forward."""

    args: tuple[torch.Tensor, ...] = ()
    kwargs: dict[str, torch.Tensor] = field(default_factory=dict)


def inputs_from_options(module: nn.Module, options: ExampleInputs) -> Arguments | None:
    """What --inputs or --input-shape say; None where the user gave neither."""
    if options.input_shapes:
        made = _random_tensors(options)
        if options.input_shape_names:
            return Arguments(kwargs=dict(zip(options.input_shape_names, made, strict=True)))
        return Arguments(args=made)
    if options.file is None:
        return None
    if options.file.suffix != ".npz":
        raise BadInputError(
            f"{options.inputs} cannot be used as inputs of {type(module).__name__}",
            hint="give an .npz file; sentences in a .txt file are for Hugging Face text models",
        )
    arrays = read_arrays(options.file)
    tensors = {name: _tensor(module, name, array) for name, array in arrays.items()}
    by_position = sorted(
        (int(match[1]), name) for name in tensors if (match := _POSITIONAL.fullmatch(name))
    )
    args = tuple(tensors.pop(name) for _, name in by_position)
    return Arguments(args=args, kwargs=tensors)


def inputs_from_value(value: object, where: str) -> Arguments:
    """Example inputs as user code gives them: a tensor, a tuple or list of them, or a dict."""
    import torch

    if isinstance(value, (torch.Tensor, np.ndarray)):
        return Arguments(args=(_as_tensor(value, where),))
    if isinstance(value, (tuple, list)) and value:
        return Arguments(
            args=tuple(_as_tensor(v, f"{where}: example input #{i}") for i, v in enumerate(value))
        )
    if isinstance(value, Mapping) and value:
        kwargs = {str(n): _as_tensor(v, f"{where}: example input {n!r}") for n, v in value.items()}
        return Arguments(kwargs=kwargs)
    raise BadInputError(
        f"{where}: the example inputs are {_kind(value)}",
        hint="give a tensor, a tuple of tensors, or a dict of tensors by name",
    )


def _random_tensors(options: ExampleInputs) -> tuple[torch.Tensor, ...]:
    import torch

    total = 0
    for shape in options.input_shapes:
        if any(size < 1 for size in shape):
            raise BadInputError(f"input shape {shape} has a dimension below 1")
        total += prod(shape) * _FLOAT_BYTES
        refuse_large_example("--input-shape", shape, total)
    generator = torch.Generator().manual_seed(options.seed)
    return tuple(torch.randn(shape, generator=generator) for shape in options.input_shapes)


def _tensor(module: nn.Module, name: str, array: NDArray[Any]) -> torch.Tensor:
    """float64 is numpy's default, not a choice: it becomes float32 unless the model has float64."""
    import torch

    is_double = any(p.dtype == torch.float64 for p in module.parameters())
    if array.dtype == np.float64 and not is_double:
        array = array.astype(np.float32)
    return _as_tensor(array, f"array {name!r}")


def _as_tensor(value: object, where: str) -> torch.Tensor:
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except TypeError as error:
            raise BadInputError(f"{where} has numpy type {value.dtype}, not a number") from error
    hint = "give what is not a tensor a default in forward, or set it in the callable"
    if isinstance(value, (tuple, list, Mapping)):
        hint = (
            "wrap the model in a module whose forward takes tensors and puts them together; "
            "keyword arguments of forward are given as a dict that stands in no tuple"
        )
    raise BadInputError(f"{where} is {_kind(value)}, not a tensor", hint=hint)


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list, Mapping)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"of type {type(value).__name__}"
