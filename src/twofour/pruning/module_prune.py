"""Prune a torch module: its weights are overwritten in place, and a row says what was done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.pattern import count_zeros
from twofour.pruning.masks import count_non_finite_bits, prune_bits_in_place
from twofour.pruning.module_layers import (
    StorageKey,
    dtype_name,
    find_not_covered,
    find_weights,
    is_plain,
    make_permanent,
    storage_key,
    tensor_of,
)
from twofour.pruning.selection import Choice, axis_conflict, choose
from twofour.records.options import Selection
from twofour.records.pruning import PrunedWeight, PruneResult
from twofour.records.weights import Pattern, Weight

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the width of each float type: numpy has no bfloat16."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """A row, its choice, and the tensor that holds its weight (None: not stored as an array)."""

    choice: Choice
    tensor: Tensor | None

    @property
    def weight(self) -> Weight:
        return self.choice[0]

    @property
    def pruned(self) -> bool:
        return self.choice[1]


@torch.no_grad()
def prune_module(
    model: nn.Module, pattern: Pattern, selection: Selection | None = None, *, source: str = ""
) -> PruneResult:
    """Magnitude N:M in the model's own memory; weights that are computed become permanent first.

    Weights that share an array are pruned once. Raises BadInputError, with every weight as it
    was, for NaN or infinity, weights without memory (meta), lazy modules, a selection that does
    not fit, and an array that two layers need along different axes.
    """
    selection = selection or Selection()
    make_permanent(model)
    weights = find_weights(model)
    stored = [
        _Stored(choice, _tensor(model, choice[0])) for choice in choose(weights, pattern, selection)
    ]
    _check_storage(stored)
    kept, held = _prune(stored, pattern)
    rows = tuple(_row(item, kept, held) for item in stored)
    return PruneResult(
        source=source,
        pattern=pattern,
        method="magnitude",
        selection=selection,
        weights=rows,
        not_covered=find_not_covered(model, weights),
    )


def _tensor(model: nn.Module, weight: Weight) -> Tensor | None:
    if weight.weight is None:
        return None
    name = weight.weight[len(weight.layer) + 1 :] if weight.layer else weight.weight
    return tensor_of(model.get_submodule(weight.layer), name)


def _check_storage(stored: Sequence[_Stored]) -> None:
    """Refuse what cannot be pruned, before anything is."""
    seen: dict[StorageKey, _Stored] = {}
    for item in stored:
        if item.tensor is None:
            continue
        _check_data(item.weight, item.tensor, finite=storage_key(item.tensor) in seen)
        first = seen.setdefault(storage_key(item.tensor), item)
        if item.pruned and not first.pruned:
            seen[storage_key(item.tensor)] = item
        elif item.pruned and _stride(first) != _stride(item):
            raise axis_conflict(first.weight, item.weight)


def _stride(item: _Stored) -> int:
    """Distance in memory between neighbours of a group: a transposed view has another."""
    assert item.tensor is not None
    assert item.weight.axis is not None
    return item.tensor.stride(item.weight.axis)


def _check_data(weight: Weight, tensor: Tensor, *, finite: bool) -> None:
    """Raises for a weight without data and, unless known to be `finite`, for NaN and infinity."""
    if tensor.is_meta:
        raise BadInputError(
            f"layer {weight.layer!r}: {weight.weight} is a meta tensor, without data",
            hint="load the model's weights before pruning it",
        )
    if finite or not is_plain(tensor):
        return
    count = count_non_finite_bits(_bits(tensor), kind=dtype_name(tensor))
    if count:
        raise BadInputError(
            f"layer {weight.layer!r}: {count} of {tensor.numel()} values of {weight.weight} are "
            "NaN or infinite",
            hint="the checkpoint is damaged or its training diverged; use another one",
        )


def _prune(
    stored: Sequence[_Stored], pattern: Pattern
) -> tuple[dict[StorageKey, float | None], set[StorageKey]]:
    """Prune each array once; gives the kept magnitude by array, and the arrays that held before."""
    kept: dict[StorageKey, float | None] = {}
    held: set[StorageKey] = set()
    for item in stored:
        tensor, axis = item.tensor, item.weight.axis
        if not item.pruned or tensor is None or axis is None or storage_key(tensor) in kept:
            continue
        bits = _bits(tensor)
        zeros = count_zeros(bits, kind=dtype_name(tensor))
        ratio = prune_bits_in_place(bits, axis, pattern, kind=dtype_name(tensor))
        if count_zeros(bits, kind=dtype_name(tensor)) == zeros:
            held.add(storage_key(tensor))
        if tensor.device.type != "cpu":
            integers = torch.from_numpy(bits)
            tensor.copy_(integers.view(tensor.dtype))
        kept[storage_key(tensor)] = ratio
    return kept, held


def _row(
    item: _Stored, kept: dict[StorageKey, float | None], held: set[StorageKey]
) -> PrunedWeight:
    weight, pruned, reasons = item.choice
    tensor = item.tensor
    zeros, ratio = 0, None
    if tensor is not None and is_plain(tensor):
        zeros = count_zeros(_bits(tensor), kind=dtype_name(tensor))
        ratio = kept.get(storage_key(tensor)) if pruned else None
    return PrunedWeight(
        weight=weight,
        pruned=pruned,
        zeros=zeros,
        kept_magnitude=ratio,
        reasons=reasons,
        held_before=pruned and tensor is not None and storage_key(tensor) in held,
    )


def _bits(tensor: Tensor) -> NDArray[Any]:
    """The tensor's own memory as integers; a copy of it where it lies on another device."""
    bits: NDArray[Any] = tensor.detach().cpu().view(_BITS[tensor.element_size()]).numpy()
    return bits
