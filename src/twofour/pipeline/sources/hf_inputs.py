"""Example inputs of a transformers model: real sentences, random token ids or random images."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from twofour.errors import BadInputError
from twofour.pipeline.sources.arrays import read_sentences
from twofour.pipeline.sources.blame import describe
from twofour.pipeline.sources.checkpoint import Checkpoint
from twofour.pipeline.sources.examples import ExampleInputs, inputs_from_options
from twofour.pipeline.sources.json_file import read_json_object
from twofour.pipeline.sources.source import SourceOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ROWS = 2
_RANDOM_TOKENS = 16
_MOST_TOKENS = 512
"""Bound where neither tokenizer nor config names one."""
_USUAL_IMAGE = 224


def checkpoint_inputs(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    options: SourceOptions,
) -> ExampleInputs:
    """The user's inputs; else tokenised sentences, random ids without a tokenizer, or images.

    Raises BadInputError where the inputs do not suit the model, or none can be made up for it.
    """
    sentences = options.inputs is not None and options.inputs.suffix == ".txt"
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
        return _with_decoder(model, _tokenised(model, checkpoint, options.inputs))
    given = inputs_from_options(model, options)
    return given or invented_inputs(model, options.seed, _image_size(model, checkpoint))


def invented_inputs(
    model: PreTrainedModel,
    seed: int,
    image_size: tuple[int, int] | None = None,
) -> ExampleInputs:
    """Random token ids (2x16) or images (2 x channels x height x width), from the config.

    Raises BadInputError for a model whose main input is something else, such as sound.
    """
    generator = torch.Generator().manual_seed(seed)
    if _takes(model, "input_ids"):
        text = model.config.get_text_config()
        length = min(_RANDOM_TOKENS, getattr(text, "max_position_embeddings", _RANDOM_TOKENS))
        ids = torch.randint(0, text.vocab_size, (_ROWS, length), generator=generator)
        return _with_decoder(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    if _takes(model, "pixel_values"):
        channels = getattr(model.config, "num_channels", 3)
        height, width = image_size or _config_image_size(model)
        shape = (_ROWS, channels, height, width)
        return ExampleInputs(kwargs={"pixel_values": torch.randn(shape, generator=generator)})
    raise BadInputError(
        f"no example inputs can be made up for {type(model).__name__}, which reads "
        f"{getattr(model, 'main_input_name', 'an unknown input')!r}",
        hint="give them with --inputs FILE.npz",
    )


def _takes(model: PreTrainedModel, name: str) -> bool:
    return getattr(model, "main_input_name", None) == name


def _with_decoder(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> ExampleInputs:
    """Only what forward takes; the decoder of an encoder-decoder model gets the same ids."""
    accepted = inspect.signature(model.forward).parameters
    kwargs = {name: tensor for name, tensor in inputs.items() if name in accepted}
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        kwargs["decoder_input_ids"] = kwargs["input_ids"].clone()
    return ExampleInputs(kwargs=kwargs)


def _tokenised(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    file: Path | None,
) -> dict[str, torch.Tensor]:
    """Token ids, mask and so on, [sentences, longest sentence], padded to that length."""
    sentences = read_sentences(file)
    if checkpoint.pooling is not None and checkpoint.pooling.lower_case:
        sentences = tuple(sentence.lower() for sentence in sentences)
    try:
        tokenizer = _tokenizer(checkpoint.model_folder)
        encoded = tokenizer(
            list(sentences),
            padding=True,
            truncation=True,
            max_length=_longest(model, checkpoint, tokenizer),
            return_tensors="pt",
        )
    except Exception as error:
        raise BadInputError(
            f"the tokenizer in {checkpoint.model_folder} cannot be used: {describe(error)}",
            hint="give token ids with --inputs FILE.npz",
        ) from error
    return dict(encoded)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if tokenizer.pad_token is None:  # decoders have none; the mask hides whatever stands there
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _longest(
    model: PreTrainedModel, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase
) -> int:
    limits = [tokenizer.model_max_length, _MOST_TOKENS]
    limits.append(getattr(model.config, "max_position_embeddings", None))
    limits.append(checkpoint.pooling.max_tokens if checkpoint.pooling else None)
    return min(int(limit) for limit in limits if limit is not None)


def _image_size(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Size from preprocessor_config.json, for models whose config has none (ResNet)."""
    file = checkpoint.model_folder / "preprocessor_config.json"
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


def _config_image_size(model: PreTrainedModel) -> tuple[int, int]:
    size = getattr(model.config, "image_size", None) or _USUAL_IMAGE
    if isinstance(size, int):
        return (size, size)
    height, width = size
    return (height, width)
