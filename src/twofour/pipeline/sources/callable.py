"""A function that returns a module, as a source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.pipeline.sources.inputs import Arguments, inputs_from_options, inputs_from_value
from twofour.pipeline.sources.seeding import seed_everything
from twofour.pipeline.sources.source import (
    LoadedModule,
    key_of,
    loaded_module,
    options_key,
    safe_name,
)
from twofour.pipeline.sources.user_code import (
    CodeReference,
    call,
    import_attribute,
    parse_reference,
    reference_key,
    user_code,
)
from twofour.records.options import ExampleInputs

if TYPE_CHECKING:
    from torch import nn


_RETURN_HINT = "return an nn.Module, or a tuple (module, example_inputs)"


def _call(reference: CodeReference, target: object, seed: int) -> object:
    if not callable(target):
        raise BadInputError(
            f"{reference.text} is of type {type(target).__name__}, not a callable",
            hint=f"name a function that takes no arguments; {_RETURN_HINT}",
        )
    hint = "name a function that takes none, and let it call this one"
    return call(reference, target, seed, hint=hint)


def _split(reference: CodeReference, made: object) -> tuple[object, Arguments | None]:
    """What was returned, and the example inputs where it is a pair that begins with a module."""
    from torch import nn

    if isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], inputs_from_value(made[1], reference.text)
    return made, None


def _checked_module(reference: CodeReference, module: object) -> nn.Module:
    import torch
    from torch import nn

    if isinstance(module, torch.jit.ScriptModule):
        raise BadInputError(
            f"{reference.text} returned a TorchScript module, which torch.onnx cannot export",
            hint="return the nn.Module it was made from",
        )
    if isinstance(module, dict) and any(isinstance(v, torch.Tensor) for v in module.values()):
        raise BadInputError(
            f"{reference.text} returned a state_dict, which says nothing of the architecture",
            hint="build the module, call its load_state_dict, and return the module",
        )
    if not isinstance(module, nn.Module):
        raise BadInputError(
            f"{reference.text} returned {_kind(module)}, no torch.nn.Module", hint=_RETURN_HINT
        )
    return module


def _kind(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {', '.join(type(v).__name__ for v in value)}"
    return f"a value of type {type(value).__name__}"


def _own_inputs(reference: CodeReference, module: nn.Module, options: ExampleInputs) -> Arguments:
    """Example inputs the module itself knows: by its config, as Lightning's or as dummy_inputs."""
    from twofour.pipeline.sources.hf_io import invented_inputs, is_transformers_model

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
class CallableSource:
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
        """sha256 over the user's code (what it imports of their own included) and the options.

        Data the code reads when it runs is not seen. Raises BadInputError for a missing module.
        """
        return key_of(reference_key(self.reference), options_key(self.options))

    def load(self) -> LoadedModule:
        """Import and call it, with all random numbers seeded; a module is taken as it is.

        Raises BadInputError for code that fails, wants arguments, returns no module, or leaves the
        example inputs unknown.
        """
        from torch import nn

        from twofour.pipeline.sources.hf_io import (
            give_tensors,
            is_transformers_model,
            with_free_sizes,
        )

        reference, options = self.reference, self.options
        seed_everything(options.seed)  # a module may be built while the file is imported
        target = import_attribute(reference)
        made = target if isinstance(target, nn.Module) else _call(reference, target, options.seed)
        returned, given = _split(reference, made)
        module = _checked_module(reference, returned)
        inputs = (
            inputs_from_options(module, options) or given or _own_inputs(reference, module, options)
        )
        if not is_transformers_model(module):
            return loaded_module(module, inputs.args, inputs.kwargs)
        give_tensors(module)
        return with_free_sizes(loaded_module(module, inputs.args, inputs.kwargs))


def open_callable(text: str, options: ExampleInputs) -> CallableSource:
    """The reference, not imported; raises BadInputError for one that is not well formed."""
    return CallableSource(text=text, reference=parse_reference(text), options=options)
