"""The source of `twofour.run(module, example_inputs)`: a module in memory, which stays as it is."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from twofour.errors import BadInputError
from twofour.pipeline.sources.hf_io import (
    give_tensors,
    invented_inputs,
    is_transformers_model,
)
from twofour.pipeline.sources.inputs import (
    Arguments,
    inputs_from_options,
    inputs_from_value,
)
from twofour.pipeline.sources.source import (
    IN_MEMORY,
    LoadedModule,
    key_of,
    loaded_module,
    options_key,
    safe_name,
)
from twofour.pruning.torch_layers import find_weights
from twofour.records.options import ExampleInputs
from twofour.store import sha256_bytes, sha256_file

_PLAIN = (bool, int, float, complex, str, type(None))


class ModuleSource:
    """A module and its example inputs as the caller holds them; every load works on a copy."""

    def __init__(self, module: nn.Module, example_inputs: object, options: ExampleInputs) -> None:
        """Raises BadInputError for TorchScript, and for lazy modules that have seen no input."""
        find_weights(module)
        self._module = module
        self._example_inputs = example_inputs
        self._options = options
        self._key: str | None = None

    @property
    def text(self) -> str:
        """The class, which is all there is to call it by."""
        return f"{IN_MEMORY}{type(self._module).__module__}.{type(self._module).__qualname__}"

    @property
    def name(self) -> str:
        """Name of the class."""
        return safe_name(type(self._module).__name__)

    def key(self) -> str:
        """sha256 over classes and their code, settings, weights and example inputs."""
        if self._key is None:
            given = self._inputs() or Arguments()
            tensors = (*self._module.state_dict().items(), *enumerate(given.args))
            self._key = key_of(
                *_structure(self._module),
                *(f"{name} {_hash(value)}" for name, value in (*tensors, *given.kwargs.items())),
                options_key(self._options),
            )
        return self._key

    def load(self) -> LoadedModule:
        """A copy of the module in eval mode on the CPU, with the example inputs.

        Raises BadInputError for a module that cannot be copied and example inputs that do not fit.
        """
        try:
            module = copy.deepcopy(self._module)
        except Exception as error:  # the module's own attributes may refuse in any way
            raise BadInputError(
                f"{self.text} cannot be copied: {type(error).__name__}: {error}",
                hint="write a file.py:callable that builds it, and name that",
            ) from error
        inputs = self._inputs() or self._own_inputs(module)
        if is_transformers_model(module):
            give_tensors(module)
        return loaded_module(module, inputs.args, inputs.kwargs)

    def _inputs(self) -> Arguments | None:
        if self._example_inputs is not None:
            if self._options.inputs is not None or self._options.input_shapes:
                raise BadInputError(
                    f"{self.text}: example inputs are given, and in the options too",
                    hint="give either",
                )
            return inputs_from_value(self._example_inputs, self.text)
        return inputs_from_options(self._module, self._options)

    def _own_inputs(self, module: nn.Module) -> Arguments:
        if is_transformers_model(module):
            return invented_inputs(module, self._options.seed)
        raise BadInputError(
            f"{self.text} comes without example inputs",
            hint="twofour.run(module, example_inputs): a tensor, a tuple of them by position, or a "
            "dict of them by name",
        )


def _structure(module: nn.Module) -> Iterator[str]:
    """Of every submodule: path, class, code, and the plain values that its forward may go by."""
    for path, part in module.named_modules():
        settings = {
            name: repr(value)
            for name, value in vars(part).items()
            if name != "training" and isinstance(value, (*_PLAIN, tuple, list))
        }
        yield f"{path} {type(part).__module__}.{type(part).__qualname__} {part.extra_repr()}"
        yield json.dumps(settings, sort_keys=True)
    for kind in sorted({type(part) for part in module.modules()}, key=str):
        if not kind.__module__.startswith("torch."):
            yield _code(kind)


def _code(kind: type) -> str:
    """Hash of the file of a class, or its source where it was typed into a notebook."""
    try:
        file = inspect.getsourcefile(kind)
        if file is not None and Path(file).is_file():
            return sha256_file(Path(file))
        return inspect.getsource(kind)
    except (OSError, TypeError):
        code = getattr(getattr(kind, "forward", None), "__code__", None)
        return "" if code is None else f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}"


def _hash(value: object) -> str:
    """Of a tensor's type, shape and bytes; of what else a state_dict may hold, its text."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if value.is_meta:  # refused when it is loaded
        return "meta"
    plain = value.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.zeros(0)
    return sha256_bytes(f"{value.dtype} {list(value.shape)}".encode(), content.tobytes())
