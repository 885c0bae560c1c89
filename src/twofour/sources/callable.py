"""Modules as sources: what a function returns, what timm creates, and one in memory."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from twofour.errors import BadInputError
from twofour.export.model_code import described
from twofour.inputs.examples import RANDOM
from twofour.packages import installed_version
from twofour.records.options import ExampleInputs
from twofour.sources.source import (
    IN_MEMORY,
    TIMM,
    Arguments,
    InMemory,
    LoadedModule,
    import_extra,
    inputs_from_options,
    inputs_from_value,
    key_of,
    loaded_module,
    options_key,
    safe_name,
)
from twofour.sources.user_code import (
    CodeReference,
    call,
    code_key,
    import_attribute,
    parse_reference,
    seed_everything,
    user_code,
)
from twofour.store import sha256_bytes, sha256_file

if TYPE_CHECKING:
    from torch import nn

_RETURN_HINT = "return an nn.Module, or a tuple (module, example_inputs)"


def _returned(reference: CodeReference, seed: int) -> object:
    """What the reference names, where that is a module, else what it returns."""
    from torch import nn

    seed_everything(seed)  # a module may be built while the file is imported
    target = import_attribute(reference)
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        raise BadInputError(
            f"{reference.text} is of type {type(target).__name__}, not a callable",
            hint=f"name a function that takes no arguments; {_RETURN_HINT}",
        )
    hint = "name a function that takes none, and let it call this one"
    return call(reference, target, seed, hint=hint)


def _checked_module(reference: CodeReference, module: object) -> nn.Module:
    import torch
    from torch import nn

    if isinstance(module, torch.jit.ScriptModule):
        what = "a TorchScript module, which torch.onnx cannot export"
        hint = "return the nn.Module it was made from"
    elif isinstance(module, nn.Module):
        return module
    elif isinstance(module, dict) and any(isinstance(v, torch.Tensor) for v in module.values()):
        what = "a state_dict, which has no architecture"
        hint = "build the module, call its load_state_dict, and return the module"
    else:
        what, hint = f"a value of type {type(module).__name__}, not an nn.Module", _RETURN_HINT
    raise BadInputError(f"{reference.text} returned {what}", hint=hint)


def _own_inputs(reference: CodeReference, module: nn.Module, options: ExampleInputs) -> Arguments:
    """Example inputs that the module has: from its config, Lightning's, or dummy_inputs."""
    from twofour.sources.hf import invented_inputs, is_transformers_model

    if is_transformers_model(module):
        return invented_inputs(module, options.seed)
    for name in ("example_input_array", "dummy_inputs"):
        with user_code(reference, f"raised in {name}"):
            value = getattr(module, name, None)
        if value is not None:
            return inputs_from_value(value, f"{reference.text}: {name}")
    raise BadInputError(
        f"{reference.text} returned a module without example inputs",
        hint="return (module, example_inputs), or give --input-shape 1x3x224x224 or "
        "--inputs FILE.npz",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallableSource(InMemory):
    """User code that returns a module, or a module and example inputs."""

    text: str
    reference: CodeReference
    options: ExampleInputs

    @property
    def name(self) -> str:
        """File or module, and callable: two files often both have a `make`."""
        file = self.reference.file
        module = file.stem if file is not None else self.reference.target.rpartition(".")[2]
        return safe_name(f"{module}-{self.reference.attribute}")

    def key(self) -> str:
        """sha256 over the file that the user named and the options."""
        return key_of(code_key(self.reference), options_key(self.options))

    def load(self) -> LoadedModule:
        """Import and call it, with all random numbers seeded; a module is taken as it is."""
        from torch import nn

        from twofour.sources.hf import give_tensors, is_transformers_model, with_free_sizes

        reference, options = self.reference, self.options
        made: Any = _returned(reference, options.seed)
        given = None
        if isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module):
            made, given = made[0], inputs_from_value(made[1], reference.text)
        module = _checked_module(reference, made)
        inputs = (
            inputs_from_options(module, options) or given or _own_inputs(reference, module, options)
        )
        if not is_transformers_model(module):
            return loaded_module(module, inputs)
        give_tensors(module)
        return with_free_sizes(loaded_module(module, inputs))


_PLAIN = (bool, int, float, complex, str, type(None))


class ModuleSource(InMemory):
    """A module and its example inputs as the caller holds them; every load works on a copy."""

    def __init__(self, module: nn.Module, example_inputs: object, options: ExampleInputs) -> None:
        """Raises BadInputError for TorchScript, and for lazy modules that have seen no input."""
        from twofour.pruning.module_layers import find_module_weights

        find_module_weights(module)
        self._module = module
        self._example_inputs = example_inputs
        self._options = options
        self._key: str | None = None

    @property
    def text(self) -> str:
        """The class, by which messages name it."""
        return f"{IN_MEMORY}{type(self._module).__module__}.{type(self._module).__qualname__}"

    @property
    def name(self) -> str:
        """The class's own name."""
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
        """A copy of the module in eval mode on the CPU, with the example inputs."""
        from twofour.sources.hf import give_tensors, invented_inputs, is_transformers_model

        try:
            module = copy.deepcopy(self._module)
        except Exception as error:  # the module's own attributes may refuse in any way
            raise BadInputError(
                f"{self.text} cannot be copied: {type(error).__name__}: {error}",
                hint="write a file.py:callable that builds it, and name that",
            ) from error
        inputs = self._inputs()
        if is_transformers_model(module):
            inputs = inputs or invented_inputs(module, self._options.seed)
            give_tensors(module)
        if inputs is None:
            raise BadInputError(
                f"{self.text} comes without example inputs",
                hint="twofour.run(module, example_inputs): a tensor, a tuple of them by position, "
                "or a dict of them by name",
            )
        return loaded_module(module, inputs)

    def _inputs(self) -> Arguments | None:
        if self._example_inputs is not None:
            if self._options.inputs is not None or self._options.input_shapes:
                raise BadInputError(
                    f"{self.text}: example inputs are given, and in the options too",
                    hint="give either",
                )
            return inputs_from_value(self._example_inputs, self.text)
        return inputs_from_options(self._module, self._options)


def _structure(module: nn.Module) -> Iterator[str]:
    """Path, class, code and plain values of every submodule, which its forward may depend on."""
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
    """Hash of a tensor's type, shape and bytes; the text of what else a state_dict may contain."""
    import torch

    if not isinstance(value, torch.Tensor) or value.is_meta:  # which is refused when it is loaded
        return repr(value)
    plain = value.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.zeros(0)
    return sha256_bytes(f"{value.dtype} {list(value.shape)}".encode(), content.tobytes())


def open_callable(text: str, options: ExampleInputs) -> CallableSource:
    """Read `file.py:callable` or `package.module:callable`; raises BadInputError."""
    return CallableSource(text=text, reference=parse_reference(text), options=options)


_ROWS = 2
_PRETRAINED = {"": True, "pretrained=true": True, "pretrained=false": False}


def _create_timm(timm: ModuleType, name: str, *, pretrained: bool) -> nn.Module:
    hint = (
        "its trained weights are downloaded on first use; without a network, give "
        f"timm:{name}?pretrained=false for random weights, or a file.py:callable"
    )
    with described(f"timm cannot create {name!r}:", hint=hint if pretrained else None):
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    return model


def _timm_images(model: nn.Module, seed: int) -> Arguments:
    import torch

    settings = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = settings.get("input_size") if isinstance(settings, dict) else None
    if not size:
        raise BadInputError(
            f"{type(model).__name__} does not say which images it takes",
            hint="give --input-shape 2x3x224x224",
        )
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn((_ROWS, *size), generator=generator)
    return Arguments(args=(images,), are=RANDOM)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimmSource(InMemory):
    """A model of the timm library by its name."""

    text: str
    model: str
    pretrained: bool
    options: ExampleInputs

    @property
    def name(self) -> str:
        """The name timm knows it by."""
        return safe_name(self.model)

    def key(self) -> str:
        """sha256 over timm's version, the name and the options."""
        version = installed_version("timm") or "none"
        return key_of(version, self.model, str(self.pretrained), options_key(self.options))

    def load(self) -> LoadedModule:
        """The model, with 2 random images as example inputs unless the user gives others."""
        timm = import_extra("timm", "a timm: model")
        if not timm.is_model(self.model.partition(".")[0]):
            close = difflib.get_close_matches(self.model, timm.list_models(), n=3)
            raise BadInputError(
                f"timm {timm.__version__} has no model {self.model!r}",
                hint=f"did you mean {', '.join(close)}?" if close else "see timm.list_models()",
            )
        seed_everything(self.options.seed)
        model = _create_timm(timm, self.model, pretrained=self.pretrained)
        inputs = inputs_from_options(model, self.options) or _timm_images(model, self.options.seed)
        return loaded_module(model, inputs)


def open_timm(text: str, options: ExampleInputs) -> TimmSource:
    """Read `timm:NAME`; raises BadInputError for another option than pretrained."""
    name, _, query = text.removeprefix(TIMM).partition("?")
    if not name or query not in _PRETRAINED:
        raise BadInputError(
            f"{text!r} names no timm model",
            hint="write timm:resnet50, or timm:resnet50?pretrained=false for random weights",
        )
    return TimmSource(text=text, model=name, pretrained=_PRETRAINED[query], options=options)
