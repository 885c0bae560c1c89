"""What a source gives: a module, its example inputs, and the sizes it allows."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from twofour.errors import BadInputError
from twofour.export.model_code import described
from twofour.records.options import DynamicAxis

SEQUENCE, DECODER_SEQUENCE = "sequence", "decoder_sequence"
_IMAGE_RANK = 4


def free_axes(module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[DynamicAxis, ...]:
    """Length of text and sound, height and width of images, for the inputs that have them.

    What the architecture does not allow after all (positions of one image size, sound of 30
    seconds) is found by running it.
    """
    lengths: dict[int, str] = {}
    found = []
    for name, tensor in inputs.items():
        axes = dict(_axes(module, name, tensor))
        if not axes and tensor.dim() == 2 and tensor.shape[1] in lengths:
            axes = {1: lengths[tensor.shape[1]]}  # a mask, or ids beside the main input
        for axis, size in axes.items():
            lengths.setdefault(int(tensor.shape[axis]), size)
            found.append(DynamicAxis(input=name, axis=axis, name=size))
    return tuple(found)


def longest_sequences(module: Any) -> dict[str, int | None]:  # noqa: ANN401 - a PreTrainedModel
    """Most tokens of a sequence, by name of the size; None: the architecture sets no limit."""
    text = module.config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and most > 0:
        most -= _offset(module)
    else:
        most = None
    return {SEQUENCE: most, DECODER_SEQUENCE: most}


def _axes(module: nn.Module, name: str, tensor: torch.Tensor) -> Iterator[tuple[int, str]]:
    rank = tensor.dim()
    if name in {"input_ids", "inputs_embeds"} and rank > 1:
        yield 1, SEQUENCE
    elif name.startswith("decoder_") and rank > 1:
        yield 1, DECODER_SEQUENCE
    elif name == "pixel_values" and rank == _IMAGE_RANK:
        yield from ((2, "height"), (3, "width"))
    elif name == "input_values" and rank > 1:
        yield 1, "samples" if rank == 2 else "frames"
    elif name == "input_features" and rank == 3:
        bins = getattr(getattr(module, "config", None), "num_mel_bins", None)
        yield (2 if tensor.shape[1] == bins else 1), "frames"


def _offset(module: nn.Module) -> int:
    """RoBERTa and its kin count positions from behind the padding id, in a table of that length."""
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            return 0 if part.padding_idx is None else part.padding_idx + 1
    return 0


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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
    examples: int
    """Rows of the first example input."""
    notes: tuple[str, ...] = ()
    """What the user should know about how the model was loaded."""
    dynamic: tuple[DynamicAxis, ...] = ()
    """Axes besides the batch whose size is free by the architecture, where nobody says else."""
    longest: Mapping[str, int | None] = field(default_factory=dict)
    """Greatest size by name; None: no limit is known."""


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
    tensors = (*args, *ordered.values())
    return LoadedModule(
        module=module,
        args=tuple(t.detach().cpu() for t in args),
        kwargs={name: t.detach().cpu() for name, t in ordered.items()},
        input_names=_names(signature, len(args), tuple(ordered)),
        examples=tensors[0].shape[0] if tensors and tensors[0].dim() else 1,
        notes=notes,
    )


def with_free_sizes(loaded: LoadedModule) -> LoadedModule:
    """The transformers model with the sizes that its architecture leaves free."""
    tensors = (*loaded.args, *loaded.kwargs.values())
    named = dict(zip(loaded.input_names or (), tensors, strict=False))
    return replace(
        loaded,
        dynamic=free_axes(loaded.module, named),
        longest=longest_sequences(loaded.module),
    )


def run_forward(loaded: LoadedModule) -> object:
    """Outputs of the module on its example inputs, without gradients.

    Raises BadInputError naming the inputs and the user's line when forward fails.
    """
    try:
        with torch.no_grad(), contextlib.redirect_stdout(sys.stderr):
            outputs: object = loaded.module(*loaded.args, **loaded.kwargs)
    except (Exception, SystemExit) as error:  # the user's forward may raise anything
        raise BadInputError(
            f"{type(loaded.module).__name__}.forward fails on the example inputs "
            f"({_shapes(loaded)}): {described(error)}",
            hint="give inputs that fit the model with --inputs FILE.npz or --input-shape",
        ) from error
    return outputs


def _check_weights(module: nn.Module) -> None:
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


def _shapes(loaded: LoadedModule) -> str:
    tensors = (*loaded.args, *loaded.kwargs.values())
    names = loaded.input_names or tuple(f"#{i}" for i in range(len(tensors)))
    return ", ".join(
        f"{name} {'x'.join(map(str, t.shape)) or 'scalar'} {str(t.dtype).removeprefix('torch.')}"
        for name, t in zip(names, tensors, strict=True)
    )
