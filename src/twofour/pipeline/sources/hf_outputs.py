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


def give_tensors(model: PreTrainedModel) -> None:
    """Let forward return its tensors in order, without names, caches and None; one alone bare."""
    _set_config(model)

    def plain(outputs: object, inputs: Mapping[str, Any]) -> object:  # noqa: ARG001  # as embedding
        if not isinstance(outputs, (Mapping, tuple, list)):
            return outputs
        tensors = tuple(_tensors(outputs))
        return tensors[0] if len(tensors) == 1 else tensors

    _replace_forward(model, plain)


def give_embedding(model: PreTrainedModel, pooling: Pooling) -> None:
    """Let forward return the sentence embedding alone, [rows, modes * hidden size]."""
    _set_config(model)

    def embedding(outputs: ModelOutput, inputs: Mapping[str, Any]) -> torch.Tensor:
        hidden = outputs.last_hidden_state
        mask = inputs.get("attention_mask")
        if mask is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        vector = torch.cat([_POOL[mode](hidden, mask) for mode in pooling.modes], dim=-1)
        return nn.functional.normalize(vector, p=2.0, dim=-1) if pooling.normalize else vector

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


def _tensors(outputs: object) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            yield from _tensors(value)


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
