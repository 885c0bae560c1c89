"""Make a transformers model return plain tensors, without changing the paths of its modules.

A wrapper module would put its own name before every weight ("model.encoder.layer.0..."), and
pruned weights could not be stored under the names of the checkpoint. So the object is given a
subclass of its own class, made at run time, whose forward passes on to the original one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from twofour.pipeline.sources.pooling import Pooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput


EMBEDDING = "sentence_embedding"


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
        return {EMBEDDING: vector}

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


def _sum_and_count(hidden: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The count is at least 1, so that a row of padding alone gives zeros, in float16 too."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(dim=1), weights.sum(dim=1).clamp(min=1.0)


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    total, count = _sum_and_count(hidden, mask)
    return total / count


def _mean_sqrt(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    total, count = _sum_and_count(hidden, mask)
    return total / count.sqrt()


_POOL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
}
