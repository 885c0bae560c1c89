"""Modules as sources: what a function returns, what timm creates, and one in memory."""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from twofour.errors import BadInputError
from twofour.export.model_code import described
from twofour.inputs.examples import RANDOM
from twofour.packages import installed_version
from twofour.records import frozen
from twofour.records.options import ExampleInputs
from twofour.sources.source import (
    IN_MEMORY,
    TIMM,
    ExampleCall,
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

_LIGHTNING = "example_input_array"
"""Where modules of PyTorch Lightning have their example inputs."""
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

    what = f"a value of type {type(module).__name__}, not an nn.Module"
    hint = _RETURN_HINT
    if isinstance(module, torch.jit.ScriptModule):
        what = "a TorchScript module, which torch.onnx cannot export"
        hint = "return the nn.Module it was made from"
    elif isinstance(module, nn.Module):
        return module
    elif isinstance(module, dict):
        what = "a dict, and a state_dict has no architecture"
        hint = "build the module, call its load_state_dict, and return the module"
    raise BadInputError(f"{reference.text} returned {what}", hint=hint)


def _loaded(module: nn.Module, inputs: ExampleCall | None, seed: int) -> LoadedModule | None:
    """The module with these inputs; None where it has none, and they cannot be made up."""
    from twofour.sources.hf import (
        give_tensors,
        invented_inputs,
        is_transformers_model,
        with_free_sizes,
    )

    if is_transformers_model(module):
        inputs = inputs or invented_inputs(module, seed)
        give_tensors(module)
        return with_free_sizes(loaded_module(module, inputs))
    return loaded_module(module, inputs) if inputs else None


@frozen
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

        reference = self.reference
        made: Any = _returned(reference, self.options.seed)
        given = None
        # (net, torch.ones(2, 3)), where a list of two that are no module is refused below
        if isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module):
            made, examples = made
            given = inputs_from_value(examples, reference.text)
        module = _checked_module(reference, made)
        inputs = inputs_from_options(module, self.options) or given
        if inputs is None:
            with user_code(reference, f"raised in {_LIGHTNING}"):
                examples = getattr(module, _LIGHTNING, None)
            if examples is not None:
                inputs = inputs_from_value(examples, f"{reference.text}: {_LIGHTNING}")
        loaded = _loaded(module, inputs, self.options.seed)
        if loaded is None:
            raise BadInputError(
                f"{reference.text} returned a module without example inputs",
                hint="return (module, example_inputs); commands that run the model also take "
                "--input-shape 1x3x224x224 or --inputs FILE.npz",
            )
        return loaded


_PLAIN = (bool, int, float, complex, str, type(None), tuple, list)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSource(InMemory):
    """A module and its example inputs as the caller holds them; every load works on a copy."""

    module: nn.Module
    example_inputs: object
    options: ExampleInputs

    def __post_init__(self) -> None:
        """Raises BadInputError for TorchScript, and for lazy modules that have seen no input."""
        from twofour.pruning.torch import find_module_weights

        find_module_weights(self.module)

    @property
    def text(self) -> str:
        """The class, by which messages name it."""
        return f"{IN_MEMORY}{type(self.module).__module__}.{type(self.module).__qualname__}"

    @property
    def name(self) -> str:
        """The class's own name."""
        return safe_name(type(self.module).__name__)

    def key(self) -> str:
        """sha256 over classes and their code, settings, weights and example inputs."""
        given = self._inputs() or ExampleCall()
        numbered = {str(place): tensor for place, tensor in enumerate(given.args)}
        values = [*self.module.state_dict().items(), *numbered.items(), *given.kwargs.items()]
        contents = (f"{name} {_hash(value)}" for name, value in values)
        return key_of(*_structure(self.module), *contents, options_key(self.options))

    def load(self) -> LoadedModule:
        """A copy of the module in eval mode on the CPU, with the example inputs."""
        try:
            module = copy.deepcopy(self.module)
        except Exception as error:  # the module's own attributes may refuse in any way
            raise BadInputError(
                f"{self.text} cannot be copied: {type(error).__name__}: {error}",
                hint="write a file.py:callable that builds it, and name that",
            ) from error
        loaded = _loaded(module, self._inputs(), self.options.seed)
        if loaded is None:
            raise BadInputError(
                f"{self.text} comes without example inputs",
                hint="twofour.run(module, example_inputs): a tensor, a tuple of them by position, "
                "or a dict of them by name",
            )
        return loaded

    def _inputs(self) -> ExampleCall | None:
        if self.example_inputs is not None:
            if self.options.inputs is not None or self.options.input_shapes:
                raise BadInputError(
                    f"{self.text}: example inputs are given, and in the options too",
                    hint="give either",
                )
            return inputs_from_value(self.example_inputs, self.text)
        return inputs_from_options(self.module, self.options)


def _structure(module: nn.Module) -> Iterator[str]:
    """Path, class, code and plain values of every submodule, which its forward may depend on."""
    # "encoder.0 <class 'net.Block'> ", "scale 3.0", then the code of net.Block
    kinds = set()
    for path, part in module.named_modules():
        kinds.add(type(part))
        yield f"{path} {type(part)} {part.extra_repr()}"
        for name, value in sorted(vars(part).items()):
            if name != "training" and isinstance(value, _PLAIN):
                yield f"{name} {value!r}"
    for kind in sorted(kinds, key=str):
        if not kind.__module__.startswith("torch."):
            yield _code(kind)


def _code(kind: type) -> str:
    """The hash of the file of a class; the code of its forward where a notebook has it."""
    try:
        return sha256_file(Path(inspect.getfile(kind)))
    except (OSError, TypeError):
        code = kind.forward.__code__  # type: ignore[attr-defined]  # modules have one
        return f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}"


def _hash(value: object) -> str:
    """The hash of a tensor's type, shape and bytes; of what else is in a state_dict, its text."""
    import torch

    if not isinstance(value, torch.Tensor) or value.is_meta:  # which is refused when it is loaded
        return repr(value)
    content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return sha256_bytes(f"{value.dtype} {list(value.shape)}".encode(), content.numpy().tobytes())


def open_callable(text: str, options: ExampleInputs) -> CallableSource:
    """Read `file.py:callable` or `package.module:callable`; raises BadInputError."""
    return CallableSource(text=text, reference=parse_reference(text), options=options)


_IMAGES = 2
_PRETRAINED = {"": True, "pretrained=true": True, "pretrained=false": False}


def _create_timm(timm: ModuleType, name: str, *, pretrained: bool) -> nn.Module:
    hint = None
    if pretrained:
        hint = (
            "its trained weights are downloaded on first use; without a network, give "
            f"timm:{name}?pretrained=false for random weights, or a file.py:callable"
        )
    with described(f"timm cannot create {name!r}:", hint=hint):
        model: nn.Module = timm.create_model(name, pretrained=pretrained)
    return model


def _timm_images(model: Any, seed: int) -> ExampleCall:  # noqa: ANN401  # timm's own
    import torch

    generator = torch.Generator().manual_seed(seed)
    images = torch.randn((_IMAGES, *model.pretrained_cfg["input_size"]), generator=generator)
    return ExampleCall(args=(images,), are=RANDOM)


@frozen
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
