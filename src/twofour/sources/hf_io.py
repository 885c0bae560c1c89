"""Example inputs, free sizes and outputs of a Hugging Face model."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twofour.errors import BadInputError
from twofour.export.model_code import described
from twofour.records.options import DynamicAxis, ExampleInputs
from twofour.sources.checkpoint import (
    PREPROCESSOR,
    Checkpoint,
    Pooling,
    open_tokenizer,
    read_json_object,
    read_sentences,
    reading,
)
from twofour.sources.source import Arguments, LoadedModule, inputs_from_options

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


_ROWS = 2
_RANDOM_TOKENS = 16
_MOST_TOKENS = 512
"""Bound where neither tokenizer nor config names one."""
_USUAL_IMAGE = 224
_EMBEDDING = "sentence_embedding"
_IMAGE_RANK = 4
_SEQUENCE, _DECODER_SEQUENCE = "sequence", "decoder_sequence"


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a Hugging Face class made it; whoever built it has imported transformers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def checkpoint_inputs(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    options: ExampleInputs,
) -> Arguments:
    """The user's inputs; else tokenised sentences, random ids without a tokenizer, or images."""
    sentences = options.file is not None and options.file.suffix == ".txt"
    if _takes(model, "input_ids") and options.input_shapes:
        raise BadInputError(
            f"{type(model).__name__} reads token ids; --input-shape makes floating-point inputs",
            hint="give sentences with --inputs FILE.txt, or ids with --inputs FILE.npz",
        )
    if sentences and not checkpoint.has_tokenizer:
        raise BadInputError(
            f"{checkpoint.model_folder} has no tokenizer, so {options.inputs} cannot be read",
            hint="copy the tokenizer files into the folder, or give ids with --inputs FILE.npz",
        )
    if (
        _takes(model, "input_ids")
        and checkpoint.has_tokenizer
        and (sentences or options.inputs is None)
    ):
        return _with_decoder(model, _tokenised(checkpoint.model_folder, options.file))
    given = inputs_from_options(model, options)
    return given or invented_inputs(model, options.seed, _image_size(model, checkpoint))


def invented_inputs(
    model: PreTrainedModel,
    seed: int,
    image_size: tuple[int, int] | None = None,
) -> Arguments:
    """Random token ids (2x16) or images, from the config; raises BadInputError for others."""
    generator = torch.Generator().manual_seed(seed)
    if _takes(model, "input_ids"):
        text = model.config.get_text_config()
        length = min(_RANDOM_TOKENS, getattr(text, "max_position_embeddings", _RANDOM_TOKENS))
        ids = torch.randint(0, text.vocab_size, (_ROWS, length), generator=generator)
        return _with_decoder(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    if _takes(model, "pixel_values"):
        channels = getattr(model.config, "num_channels", 3)
        size = image_size or getattr(model.config, "image_size", None) or _USUAL_IMAGE
        height, width = (size, size) if isinstance(size, int) else size
        shape = (_ROWS, channels, height, width)
        return Arguments(kwargs={"pixel_values": torch.randn(shape, generator=generator)})
    raise BadInputError(
        f"no example inputs can be made up for {type(model).__name__}, which reads "
        f"{getattr(model, 'main_input_name', 'an unknown input')!r}",
        hint="give them with --inputs FILE.npz",
    )


def with_made_up_inputs(model: Any, seed: int) -> LoadedModule:  # noqa: ANN401  # a PreTrainedModel
    """A model without values and inputs from its config alone: what data for it must be like."""
    inputs = invented_inputs(model, seed)
    loaded = LoadedModule(
        module=model, args=inputs.args, kwargs=inputs.kwargs, input_names=tuple(inputs.kwargs)
    )
    return with_free_sizes(loaded)


def _takes(model: PreTrainedModel, name: str) -> bool:
    return getattr(model, "main_input_name", None) == name


def _with_decoder(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> Arguments:
    """Only what forward takes; the decoder of an encoder-decoder model gets the same ids."""
    accepted = inspect.signature(model.forward).parameters
    kwargs = {name: tensor for name, tensor in inputs.items() if name in accepted}
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        kwargs["decoder_input_ids"] = kwargs["input_ids"].clone()
    return Arguments(kwargs=kwargs)


def _tokenised(folder: Path, file: Path | None) -> dict[str, torch.Tensor]:
    """Token ids, mask and so on, [sentences, longest sentence], padded to that length."""
    sentences = read_sentences(file)
    try:
        tokenizer = open_tokenizer(folder)
        longest, lower_case = reading(folder, tokenizer, _MOST_TOKENS)
        encoded = tokenizer(
            [sentence.lower() if lower_case else sentence for sentence in sentences],
            padding=True,
            truncation=True,
            max_length=longest,
            return_tensors="pt",
        )
    except Exception as error:
        raise BadInputError(
            f"the tokenizer in {folder} cannot be used: {described(error)}",
            hint="give token ids with --inputs FILE.npz",
        ) from error
    return dict(encoded)


def _image_size(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Size from preprocessor_config.json, for models whose config has none (ResNet)."""
    file = checkpoint.model_folder / PREPROCESSOR
    if hasattr(model.config, "image_size") or not file.is_file():
        return None
    settings = read_json_object(file)
    for name in ("crop_size", "size"):
        size = settings.get(name)
        if isinstance(size, int):
            return (size, size)
        if isinstance(size, dict) and isinstance(size.get("height"), int):
            return (size["height"], size["width"])
        if isinstance(size, dict) and isinstance(size.get("shortest_edge"), int):
            return (size["shortest_edge"], size["shortest_edge"])
    return None


def with_free_sizes(loaded: LoadedModule) -> LoadedModule:
    """The transformers model with the sizes that its architecture leaves free.

    What it does not allow after all (positions of one image size) is found by running it.
    """
    tensors = (*loaded.args, *loaded.kwargs.values())
    lengths: dict[int, str] = {}
    found = []
    for name, tensor in zip(loaded.input_names or (), tensors, strict=False):
        axes = dict(_free_axes(loaded.module, name, tensor))
        if not axes and tensor.dim() == 2 and tensor.shape[1] in lengths:
            axes = {1: lengths[tensor.shape[1]]}  # a mask, or ids beside the main input
        for axis, size in axes.items():
            lengths.setdefault(int(tensor.shape[axis]), size)
            found.append(DynamicAxis(input=name, axis=axis, name=size))
    config: Any = loaded.module.config
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    most = most - _offset(loaded.module) if isinstance(most, int) and most > 0 else None
    longest = {_SEQUENCE: most, _DECODER_SEQUENCE: most}
    return replace(loaded, dynamic=tuple(found), longest=longest)


def _free_axes(module: nn.Module, name: str, tensor: torch.Tensor) -> Iterator[tuple[int, str]]:
    rank = tensor.dim()
    if name in {"input_ids", "inputs_embeds"} and rank > 1:
        yield 1, _SEQUENCE
    elif name.startswith("decoder_") and rank > 1:
        yield 1, _DECODER_SEQUENCE
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


def give_tensors(model: PreTrainedModel) -> None:
    """Let forward return its tensors by name (the ONNX outputs'), without caches and None."""
    _set_config(model)

    def plain(outputs: object, inputs: Mapping[str, Any]) -> object:  # noqa: ARG001  # as embedding
        return dict(_named(outputs)) if isinstance(outputs, Mapping) else outputs

    _replace_forward(model, plain)


def give_embedding(model: PreTrainedModel, pooling: Pooling) -> None:
    """Let forward return `sentence_embedding` alone, [rows, modes * hidden size]."""
    _set_config(model)

    def embedding(outputs: ModelOutput, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        hidden = outputs.last_hidden_state
        mask = inputs.get("attention_mask")
        if mask is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        vector = torch.cat([_POOL[mode](hidden, mask) for mode in pooling.modes], dim=-1)
        if pooling.normalize:
            vector = nn.functional.normalize(vector, p=2.0, dim=-1)
        return {_EMBEDDING: vector}

    _replace_forward(model, embedding)


def _set_config(model: PreTrainedModel) -> None:
    """No key-value cache among the outputs; named outputs inside, which decoders rely on."""
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
        config.return_dict = True


def _replace_forward(
    model: PreTrainedModel, finish: Callable[[Any, Mapping[str, Any]], object]
) -> None:
    base = type(model)
    names = tuple(inspect.signature(base.forward).parameters)[1:]

    # wraps: exporters and shape options look up the names of forward's parameters.
    @functools.wraps(base.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401  # as the original
        inputs = dict(zip(names, args, strict=False)) | kwargs
        return finish(base.forward(self, *args, **kwargs), inputs)

    members = {"forward": forward, "__module__": base.__module__}
    model.__class__ = type(base.__name__, (base,), members)


def _named(outputs: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors under their names; those of a tuple (hidden states of each layer) numbered."""
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (tuple, list)):
            numbered = {f"{name}_{number}": item for number, item in enumerate(value)}
            yield from _named(numbered)


def _first(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The first token that is no padding (some tokenizers pad on the left)."""
    index = mask.to(torch.int32).argmax(dim=1).reshape(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
    return torch.gather(hidden, 1, index).squeeze(1)


def _max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    lowest = torch.finfo(hidden.dtype).min
    return hidden.masked_fill(mask.unsqueeze(-1) == 0, lowest).max(dim=1).values


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The count is at least 1, so that a row of padding alone gives zeros, in float16 too."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)


_POOL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
}
