"""Which sizes of a transformers model are free by its architecture, and how long a sequence is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from twofour.records.options import DynamicAxis

if TYPE_CHECKING:
    import torch

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
