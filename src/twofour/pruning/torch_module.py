"""Pruning the weights of a torch module in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.pattern import count_zeros
from twofour.pruning.methods import InPlace, without_data
from twofour.pruning.methods.magnitude import Outcome, count_non_finite
from twofour.pruning.methods.magnitude_on_device import (
    count_non_finite_on_device,
    count_zeros_on_device,
)
from twofour.pruning.methods.problem import Array
from twofour.pruning.selection import Choice, axis_conflict, choose
from twofour.pruning.torch_layers import (
    StorageKey,
    dtype_name,
    find_not_covered,
    find_weights,
    is_plain,
    make_permanent,
    storage_key,
    tensor_of,
)
from twofour.records.options import Selection
from twofour.records.pruning import OutputError, PrunedWeight, PruneResult
from twofour.records.weights import Pattern, Weight, shared

_WHERE_THEY_LIE = frozenset({"cuda"})
"""Types of device whose tensors are pruned there, by torch."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the width of each float type: numpy has no bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What was done to one array, and by which method."""

    method: str
    zeros: int
    kept_magnitude: float | None
    held_before: bool
    output_error: OutputError | None = None
    damping: float | None = None
    refit_steps: int = 0
    bias_corrected: bool = False
    note: str | None = None


ByData = Callable[[nn.Module, Sequence[tuple[Weight, Tensor]]], Mapping[StorageKey, Done]]
"""Prunes weights of a model with calibration data, each array once, or changes nothing at all.

What the data did not reach it leaves to the method that needs none.
"""


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
    model: nn.Module,
    pattern: Pattern,
    selection: Selection | None = None,
    *,
    source: str = "",
    method: str = "magnitude",
    by_data: ByData | None = None,
) -> PruneResult:
    """N:M in the model's own memory; weights that are computed become permanent first.

    Weights that share an array are pruned once. With `by_data` `method` is for those that the data
    did not reach. Raises BadInputError, with every weight as it was, for an unknown method, NaN or
    infinity, weights without memory (meta), lazy modules, a selection that does not fit, an array
    that two layers need along different axes, and what `by_data` refuses.
    """
    selection, prune = selection or Selection(), without_data(method)
    make_permanent(model)
    weights = find_weights(model)
    stored = [
        _Stored(choice, _tensor(model, choice[0])) for choice in choose(weights, pattern, selection)
    ]
    _check_storage(stored)
    arrays = _arrays(stored)
    done = {} if by_data is None else dict(by_data(model, list(arrays.values())))
    note = None if by_data is None else NOT_REACHED
    for key, array in arrays.items():
        if key not in done:
            outcome = prune_tensor(*array, pattern, prune)
            done[key] = done_without_data(outcome, method, note)
    return PruneResult(
        source=source,
        pattern=pattern,
        method=method,
        selection=selection,
        weights=tuple(_row(item, done) for item in stored),
        not_covered=find_not_covered(model, weights),
    )


NOT_REACHED = "no calibration input reached it: pruned without data"


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
    bits, kind = bits_of(tensor), dtype_name(tensor)
    if isinstance(bits, np.ndarray):
        count = count_non_finite(bits, kind=kind)
    else:
        count = count_non_finite_on_device(bits, kind=kind)
    if count:
        raise not_finite(weight, count)


def not_finite(weight: Weight, count: int) -> BadInputError:
    """The error for a weight of which `count` values are NaN or infinite."""
    return BadInputError(
        f"layer {weight.layer!r}: {count} of {math.prod(weight.shape)} values of {weight.weight} "
        "are NaN or infinite",
        hint="the checkpoint is damaged or its training diverged; use another one",
    )


def _arrays(stored: Sequence[_Stored]) -> dict[StorageKey, tuple[Weight, Tensor]]:
    """Each array that is to be pruned, with the first weight that asks for it."""
    found: dict[StorageKey, tuple[Weight, Tensor]] = {}
    for item in stored:
        if item.pruned and item.tensor is not None and item.weight.axis is not None:
            found.setdefault(storage_key(item.tensor), (item.weight, item.tensor))
    return found


def prune_tensor(weight: Weight, tensor: Tensor, pattern: Pattern, prune: InPlace) -> Outcome:
    """One array in its own memory, without data."""
    assert weight.axis is not None
    bits = bits_of(tensor)
    outcome = prune(bits, weight.axis, pattern, kind=dtype_name(tensor))
    if isinstance(bits, np.ndarray) and tensor.device.type != "cpu":
        tensor.copy_(torch.from_numpy(bits).view(tensor.dtype))
    return outcome


def done_without_data(outcome: Outcome, method: str, note: str | None) -> Done:
    """What is reported of an array that a method without data has changed."""
    return Done(
        method=method,
        zeros=outcome.zeros,
        kept_magnitude=outcome.kept_magnitude,
        held_before=outcome.held_before,
        note=note,
    )


def _row(item: _Stored, outcomes: Mapping[StorageKey, Done]) -> PrunedWeight:
    done = None if item.tensor is None else outcomes.get(storage_key(item.tensor))
    return row_of(item.choice, done, lambda: item.tensor)


def row_of(choice: Choice, done: Done | None, tensor: Callable[[], Tensor | None]) -> PrunedWeight:
    """What is reported of a weight; `tensor` is asked for where nothing was done to its array."""
    weight, pruned, reasons = choice
    if done is not None and pruned:
        return PrunedWeight(**shared(done, Done), weight=weight, pruned=True, reasons=reasons)
    stored = None if done is not None else tensor()
    zeros = 0 if stored is None or not is_plain(stored) else zeros_of(stored)
    return PrunedWeight(
        weight=weight,
        pruned=pruned,
        zeros=zeros if done is None else done.zeros,
        kept_magnitude=None,
        reasons=reasons,
    )


def zeros_of(tensor: Tensor) -> int:
    """Zeros in a plain tensor of floats, -0.0 included, counted where it lies."""
    bits, kind = bits_of(tensor), dtype_name(tensor)
    if isinstance(bits, np.ndarray):
        return count_zeros(bits, kind=kind)
    return count_zeros_on_device(bits, kind=kind)


def bits_of(tensor: Tensor) -> Array:
    """The tensor's own memory as integers: a numpy array on the CPU, a tensor on a GPU.

    A copy on the CPU for other devices: not all of them add in float64.
    """
    bits = tensor.detach().view(_BITS[tensor.element_size()])
    return bits if bits.device.type in _WHERE_THEY_LIE else bits.cpu().numpy()
