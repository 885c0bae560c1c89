"""A model as the user names it: the forms of naming one, and what every source offers.

Nothing is loaded until it is asked for, and torch is not imported.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from twofour.errors import BadInputError, MissingToolError
from twofour.inputs.examples import GIVEN, RANDOM
from twofour.inputs.fits import read_arrays
from twofour.packages import how_to_install
from twofour.records import frozen
from twofour.records.options import DynamicAxis, ExampleInputs, Trust
from twofour.store import sha256_bytes, sha256_file

if TYPE_CHECKING:
    import torch
    from torch import nn

    from twofour.graph.opened import OpenedModel, OpenedModels
    from twofour.graph.stored import Store

CONFIG = "config.json"
MODULES = "modules.json"
"""A folder that has one of these is a checkpoint."""
PIPELINE = "model_index.json"
DIFFUSERS_CLASS = "_class_name"
"""The key of config.json by which diffusers knows its own."""
IN_MEMORY = "the module "
"""Begins the text of a source that only lives in one process; a class follows."""
TIMM = "timm:"
NO_CACHE = "without a cache of keys and values"
"""Begins the note on a language model."""
_STATE_DICTS = (".pt", ".pth", ".pkl", ".bin", ".ckpt", ".safetensors")
_TAKES_PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def path_of(text: str) -> Path:
    """The path that a text names; of a user that nobody knows, `~name` is a name like others."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  # pathlib's raises for such a user


def names_code(text: str, path: Path) -> bool:
    """Whether a text that names no file or folder has the colon of a callable."""
    # net.py:make, but not C:\\models\\net where there is such a folder
    return ":" in text and not path.exists()


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


@frozen
class LoadedModule:
    """A module in eval mode on the CPU; `module(*args, **kwargs)` gives tensors."""

    module: nn.Module
    args: tuple[Any, ...]
    """Example inputs by position, tensors."""
    kwargs: dict[str, Any]
    """Example inputs by name, tensors, in the order of forward's parameters."""
    input_names: tuple[str, ...] | None
    """Names of args, then kwargs; None where forward takes `*args`."""
    inputs_are: str = GIVEN
    """What the example inputs are, in words."""
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

    def structure(self) -> LoadedModule:
        """The same, without values where the source can leave them out."""

    def stored(self, module: nn.Module) -> Store | None:
        """Where files have the weights of the module, by their names in it; None: nowhere."""


class InMemory:
    """A source of modules that are made with their values: what they are is known no sooner."""

    __slots__ = ()

    def load(self) -> LoadedModule:
        """Build the module and its example inputs."""
        raise NotImplementedError

    def structure(self) -> LoadedModule:
        """The module with its values."""
        return self.load()

    def stored(self, module: nn.Module) -> Store | None:  # noqa: ARG002
        """No file has the weights yet."""
        return None


def _opened_models() -> OpenedModels:
    from twofour.graph.opened import OpenedModels

    return OpenedModels()


@frozen
class OnnxSource:
    """An ONNX file; whether it is a sound one is found when the graph is read."""

    text: str
    path: Path
    options: ExampleInputs
    models: OpenedModels = field(default_factory=_opened_models, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The file's stem."""
        return safe_name(self.path.stem)

    def key(self) -> str:
        """sha256 over the file, its external data and the options; raises what `opened` raises."""
        files = (self.path, *sorted(self.opened().data_files))
        contents = (f"{file.name} {sha256_file(file)}" for file in files)
        return key_of(*contents, options_key(self.options))

    def opened(self) -> OpenedModel:
        """The graph, parsed once while the file stays as it is; raises BadInputError."""
        return self.models.open(self.path)


def open_onnx_source(text: str, options: ExampleInputs) -> OnnxSource:
    """The source of an .onnx file."""
    return OnnxSource(text=text, path=path_of(text), options=options)


@frozen
class SourceForm:
    """One form of naming a model: how it is written, which texts have it, and what opens them."""

    written: str
    """The form that help and errors show."""
    fits: Callable[[str, Path], bool]
    """Takes the text, and the same as a path."""
    opened_by: str
    """`package.module:function` of the text and the example inputs, imported when it is used."""
    runs_code: bool = False
    """Whether the text names code of the user."""

    def open(self, text: str, options: ExampleInputs) -> OnnxSource | TorchSource:
        """The source that the text names; raises BadInputError."""
        source: OnnxSource | TorchSource = pkgutil.resolve_name(self.opened_by)(text, options)
        return source


def _is_of_diffusers(_text: str, path: Path) -> bool:
    """Whether a folder is a pipeline, or has a config.json in diffusers' words."""
    if (path / PIPELINE).is_file():
        return True
    try:
        config = json.loads((path / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):  # whoever opens it will say so
        return False
    return isinstance(config, dict) and DIFFUSERS_CLASS in config and "architectures" not in config


FORMS = (
    SourceForm(
        written="file.onnx",
        fits=lambda _text, path: path.is_file() and path.suffix.lower() == ".onnx",
        opened_by="twofour.sources.source:open_onnx_source",
    ),
    SourceForm(
        written="a diffusers model folder",
        fits=_is_of_diffusers,
        opened_by="twofour.sources.diffusers:open_diffusers",
    ),
    SourceForm(
        written="a Hugging Face checkpoint folder",
        fits=lambda _text, path: (path / CONFIG).is_file() or (path / MODULES).is_file(),
        opened_by="twofour.sources.hf:open_hf",
    ),
    SourceForm(
        written="timm:NAME",
        fits=lambda text, _path: text.startswith(TIMM),
        opened_by="twofour.sources.callable:open_timm",
    ),
    SourceForm(
        written="file.py:callable, package.module:callable",
        fits=names_code,
        opened_by="twofour.sources.callable:open_callable",
        runs_code=True,
    ),
)
"""Every source there is; the first that fits opens the text."""


def open_source(text: str, options: ExampleInputs) -> OnnxSource | TorchSource:
    """The source a text names; raises BadInputError with a hint for what comes near one."""
    if options.file is not None and not options.file.is_file():
        raise BadInputError(f"--inputs {options.inputs} is not a file")
    form = _form(text)
    if form is None:
        raise _no_model(text, path_of(text))
    return form.open(text, options)


def runs_code(text: str) -> bool:
    """Whether loading the source that a text names runs code of the user's."""
    form = _form(text)
    return form is not None and form.runs_code


def identity(text: str) -> str:
    """What a run folder belongs to: the absolute path where the source is one, else its text."""
    # net.py:make -> /home/me/net.py:make
    place = text.rpartition(":")[0] or text
    path = path_of(place)
    if not path.exists():
        return text
    return f"{path.resolve()}{text.removeprefix(place)}"


def _form(text: str) -> SourceForm | None:
    path = path_of(text)
    return next((form for form in FORMS if form.fits(text, path)), None)


def _no_model(text: str, path: Path) -> BadInputError:
    """The error for a text of no form; its hint names the nearest form, if any."""
    hint = f"a model is {', '.join(form.written for form in FORMS)}"
    what = f"there is no model {text!r}"
    if path.is_file():
        what = f"{text} is a file, but not an .onnx model"
        if path.suffix == ".py":
            hint = f"name the function that returns the model: {text}:make_model"
        elif path.suffix.lower() in _STATE_DICTS:
            hint = (
                "weights alone have no architecture; write a file.py:callable that builds the "
                "module, loads this file and returns the module, or name the folder with "
                "config.json"
            )
    elif path.is_dir():
        what = f"{text} is a folder without config.json, so it is not a checkpoint"
        for model in sorted(path.glob("*.onnx"))[:1]:
            hint = f"name the file: {model}"
    elif path.suffix:
        what = f"{text} does not exist"
    elif text.count("/") == 1:
        hint = f"download it with `hf download` and name the folder ({hint})"
    return BadInputError(what, hint=hint)


def refuse_untrusted(folder: Path, source: str, trust: Trust) -> None:
    """Raise BadInputError where a folder's source is code that `trust` does not reach."""
    if trust.everything or not runs_code(source):
        return
    if any(source in (named, identity(named)) for named in trust.sources):
        return
    raise BadInputError(
        f"{folder}/run.json names code that this command would run: {source}",
        hint=f"if you know that code, name it too (--source {source}), or allow whatever the "
        "folder names (--trust)",
    )


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
    # "net one" -> "net-one"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "model"


def options_key(options: ExampleInputs) -> str:
    """sha256 over the options and the content of the file with the inputs."""
    shapes = f"{options.input_shapes} {options.input_shape_names}"
    file = options.file
    content = "" if file is None else f"{file.suffix} {sha256_file(file)}"
    return key_of(content, shapes, str(options.seed))


def key_of(*parts: str) -> str:
    """sha256 over texts, each kept apart from the next."""
    return sha256_bytes(*(part.encode() for part in parts))


@frozen
class ExampleCall:
    """The example inputs as arguments for one call of forward."""

    args: tuple[torch.Tensor, ...] = ()
    kwargs: dict[str, torch.Tensor] = field(default_factory=dict)
    are: str = GIVEN
    """What they are, in words."""


def positional_parameters(module: nn.Module) -> list[inspect.Parameter]:
    """The parameters of forward that take an argument by its place."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter for parameter in parameters if parameter.kind in _TAKES_PLACES]


def loaded_module(module: nn.Module, inputs: ExampleCall, *, bare: bool = False) -> LoadedModule:
    """The module in eval mode on the CPU; raises BadInputError for inputs that do not fit it.

    `bare`: it may be without values.
    """
    if not bare:
        _refuse_without_values(module)
        module.to("cpu")
    module.eval()
    signature = inspect.signature(module.forward)
    # {"mask": ..., "ids": ...} for forward(ids, mask) becomes ids, mask: exporters that
    # name the inputs go by this order
    known = [name for name in signature.parameters if name in inputs.kwargs]
    ordered = {name: inputs.kwargs[name] for name in (*known, *inputs.kwargs)}
    try:
        signature.bind(*inputs.args, **ordered)
    except TypeError as error:
        raise BadInputError(
            f"the example inputs do not fit {type(module).__name__}.forward, which takes "
            f"({', '.join(signature.parameters)}): {error}",
            hint="give one example input for each argument of forward that has no default",
        ) from error
    names = [parameter.name for parameter in positional_parameters(module)]
    named = len(inputs.args) <= len(names)
    return LoadedModule(
        module=module,
        args=tuple(tensor.detach().cpu() for tensor in inputs.args),
        kwargs={name: tensor.detach().cpu() for name, tensor in ordered.items()},
        input_names=(*names[: len(inputs.args)], *ordered) if named else None,
        inputs_are=inputs.are,
    )


def _refuse_without_values(module: nn.Module) -> None:
    from torch import nn

    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta or nn.parameter.is_lazy(tensor):
            raise BadInputError(
                f"{name} has no values (it is lazy, or on the meta device)",
                hint="load the trained weights before you return the module",
            )


def inputs_from_options(module: nn.Module, options: ExampleInputs) -> ExampleCall | None:
    """What --inputs or --input-shape say; None where the user gave neither."""
    if options.input_shapes:
        return _random_inputs(options)
    if options.file is not None:
        return _inputs_of_file(module, options.file)
    return None


def _random_inputs(options: ExampleInputs) -> ExampleCall:
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    tensors = []
    for shape in options.input_shapes:
        if min(shape, default=1) < 1:
            raise BadInputError(f"input shape {shape} has a dimension below 1")
        tensors.append(torch.randn(shape, generator=generator))
    if options.input_shape_names:
        named = dict(zip(options.input_shape_names, tensors, strict=True))
        return ExampleCall(kwargs=named, are=RANDOM)
    return ExampleCall(args=tuple(tensors), are=RANDOM)


def _inputs_of_file(module: nn.Module, file: Path) -> ExampleCall:
    if file.suffix != ".npz":
        raise BadInputError(
            f"{file} cannot be used as inputs of {type(module).__name__}",
            hint="give an .npz file; sentences in a .txt file are for Hugging Face text models",
        )
    # float64 is numpy's default, not a choice: it becomes float32 unless the model has float64
    is_double = any(str(p.dtype) == "torch.float64" for p in module.parameters())
    tensors = {}
    for name, array in read_arrays(file).items():
        tensor = _as_tensor(array, f"array {name!r}")
        if array.dtype == np.float64 and not is_double:
            tensor = tensor.float()
        tensors[name] = tensor
    args: list[torch.Tensor] = []
    # numpy.savez calls arrays that were given without a name arr_0, arr_1, ...
    while (name := f"arr_{len(args)}") in tensors:
        args.append(tensors.pop(name))
    return ExampleCall(args=tuple(args), kwargs=tensors)


def inputs_from_value(value: object, where: str) -> ExampleCall:
    """Example inputs as user code gives them: a tensor, a tuple or list of them, or a dict."""
    import torch

    if isinstance(value, Mapping) and value:
        named = {
            str(name): _as_tensor(part, f"{where}: example input {name!r}")
            for name, part in value.items()
        }
        return ExampleCall(kwargs=named)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = (value,)
    if not isinstance(value, (tuple, list)) or not value:
        raise BadInputError(
            f"{where}: the example inputs are of type {type(value).__name__}",
            hint="give a tensor, a tuple of tensors, or a dict of tensors by name",
        )
    args = [_as_tensor(part, f"{where}: example input #{i}") for i, part in enumerate(value)]
    return ExampleCall(args=tuple(args))


def _as_tensor(value: object, where: str) -> torch.Tensor:
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.copy())
        except TypeError as error:
            raise BadInputError(f"{where} has numpy type {value.dtype}, not a number") from error
    hint = "give what is not a tensor a default in forward, or set it in the callable"
    if isinstance(value, (tuple, list, Mapping)):
        hint = (
            "wrap the model in a module whose forward takes tensors and puts them together; "
            "give keyword arguments of forward as a dict, not inside a tuple"
        )
    raise BadInputError(f"{where} is of type {type(value).__name__}, not a tensor", hint=hint)
