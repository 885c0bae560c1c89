"""Pruning the weights of a torch module: in its own memory, or in the files that they come from.

For a checkpoint larger than memory the module has no values; its tensors are read and written one
by one, to where they lie: the files keep their names, order, types and metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from twofour.errors import BadInputError, naming
from twofour.graph.stored import Store
from twofour.pruning.methods import without_data
from twofour.pruning.methods.magnitude import count_non_finite
from twofour.pruning.module_layers import (
    Arrays,
    ArraysInMemory,
    bits_of,
    dtype_name,
    find_module_weights,
    is_plain,
    make_permanent,
    zeros_of,
)
from twofour.pruning.selection import Choice, axis_conflict, choose
from twofour.records.weights import (
    Pattern,
    PrunedWeight,
    PruneResult,
    Selection,
    Solution,
    Weight,
    shared,
)
from twofour.store import writing

Progress = Callable[[str, int, int | None], None]
"""Called with the work in progress and the time left, how much is done, and how much there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedArray(Solution):
    """The report on one array that was pruned, and the method."""

    zeros: int
    kept_magnitude: float | None
    held_before: bool


class ModulePruning:
    """The choice of a module's weights to prune, and the report on each."""

    def __init__(
        self, module: nn.Module, arrays: Arrays, pattern: Pattern, selection: Selection
    ) -> None:
        """Raises BadInputError as `choose` does."""
        weights = find_module_weights(module)
        self.arrays, self._pattern, self._selection = arrays, pattern, selection
        self.choices = choose(weights, pattern, selection)
        self.wanted: dict[Hashable, Weight] = {}
        """Each array that is to be pruned, with its first weight."""
        for weight, pruned, _ in self.choices:
            if pruned:
                self.wanted.setdefault(arrays.key(weight), weight)

    def result(
        self,
        method: str,
        step: Progress | None = None,
    ) -> PruneResult:
        """Prune the arrays without data, and report all weights.

        Raises BadInputError for NaN and infinity; some arrays are pruned then.
        """
        done: dict[Hashable, PrunedArray] = {}
        for number, (key, weight) in enumerate(self.wanted.items(), 1):
            done[key] = self._pruned(weight, method)
            if step is not None:
                step(weight.layer, number, len(self.wanted))
        return PruneResult(
            source="",
            pattern=self._pattern,
            method=method,
            selection=self._selection,
            weights=tuple(self._row(choice, done) for choice in self.choices),
        )

    def _pruned(self, weight: Weight, method: str) -> PrunedArray:
        """One array, without data."""
        tensor = self.arrays.read(weight)
        assert tensor is not None, "it is to be pruned"
        assert weight.axis is not None
        bits = bits_of(tensor)
        prune = without_data(method)
        with naming(f"layer {weight.layer!r}"):
            outcome = prune(bits, weight.axis, self._pattern, kind=dtype_name(tensor))
        if outcome.non_finite:
            raise _not_finite(weight, outcome.non_finite)
        if tensor.device.type != "cpu":
            tensor.copy_(torch.from_numpy(bits).view(tensor.dtype))
        self.arrays.write(weight, tensor)
        return PrunedArray(
            method=method,
            zeros=outcome.zeros,
            kept_magnitude=outcome.kept_magnitude,
            held_before=outcome.held_before,
        )

    def _row(self, choice: Choice, found: Mapping[Hashable, PrunedArray]) -> PrunedWeight:
        weight, pruned, reasons = choice
        done = found.get(self.arrays.key(weight))
        if done is not None and pruned:
            return PrunedWeight(
                **shared(done, PrunedArray), weight=weight, pruned=True, reasons=reasons
            )
        zeros = 0 if done is None else done.zeros
        if done is None:
            tensor = self.arrays.read(weight)
            zeros = 0 if tensor is None or not is_plain(tensor) else zeros_of(tensor)
        return PrunedWeight(
            weight=weight, pruned=pruned, zeros=zeros, kept_magnitude=None, reasons=reasons
        )


@torch.no_grad()
def prune_module(
    model: nn.Module,
    pattern: Pattern,
    selection: Selection | None = None,
    *,
    method: str = "magnitude",
) -> PruneResult:
    """N:M in the model's own memory; weights that are computed become permanent first.

    Weights that share an array are pruned once. Raises BadInputError, with every weight as it was,
    for an unknown method, one that needs data, and as `plan_in_memory` does.
    """
    without_data(method)
    return plan_in_memory(model, pattern, selection or Selection()).result(method)


def plan_in_memory(model: nn.Module, pattern: Pattern, selection: Selection) -> ModulePruning:
    """The choice for a module, whose computed weights become permanent.

    Raises BadInputError for NaN or infinity, weights without memory (meta), lazy modules, a
    selection that does not fit, and an array that two layers need along different axes.
    """
    make_permanent(model)
    plan = ModulePruning(model, ArraysInMemory(model), pattern, selection)
    seen: dict[Hashable, tuple[Weight, bool, int | None]] = {}
    for weight, pruned, _ in plan.choices:
        tensor, key = plan.arrays.read(weight), plan.arrays.key(weight)
        if tensor is None:
            continue
        if key not in seen:
            _check_data(weight, tensor)
        # between neighbours of a group: a transposed view has another one
        step = tensor.stride(weight.axis) if pruned and weight.axis is not None else None
        first, known, first_step = seen.setdefault(key, (weight, pruned, step))
        if pruned and not known:
            seen[key] = (weight, pruned, step)
        elif pruned and step != first_step:
            raise axis_conflict(first, weight)
    return plan


def _check_data(weight: Weight, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise BadInputError(
            f"layer {weight.layer!r}: {weight.weight} is a meta tensor, without data",
            hint="load the model's weights before pruning it",
        )
    count = count_non_finite(bits_of(tensor), kind=dtype_name(tensor)) if is_plain(tensor) else 0
    if count:
        raise _not_finite(weight, count)


def _not_finite(weight: Weight, count: int) -> BadInputError:
    return BadInputError(
        f"layer {weight.layer!r}: {count} of {math.prod(weight.shape)} values of {weight.weight} "
        "are NaN or infinite",
        hint="the checkpoint is damaged or its training diverged; use another one",
    )


class StoredArrays:
    """The arrays of a module without values, in files; what is pruned goes into a copy of these."""

    def __init__(self, store: Store, copies: Store) -> None:
        """Both by the names of the module's parameters."""
        self._store, self._copies = store, copies

    def key(self, weight: Weight) -> Hashable:
        """Its place in the files."""
        if weight.weight is None:
            return None
        stored = self._store[weight.weight]
        return stored.file, stored.offset

    def read(self, weight: Weight) -> Tensor | None:
        """The array in memory of its own."""
        if weight.weight is None:
            return None
        stored = self._store[weight.weight]
        raw = np.fromfile(stored.file, np.uint8, stored.size_bytes, offset=stored.offset)
        dtype: torch.dtype = getattr(torch, stored.dtype or "")
        return torch.from_numpy(raw).view(dtype).reshape(stored.shape)

    def write(self, weight: Weight, tensor: Tensor) -> None:
        """Put the array into the copy; raises BadInputError for a full disk."""
        copy = self._copies[weight.weight or ""]
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        with writing(copy.file), copy.file.open("r+b") as handle:
            handle.seek(copy.offset)
            raw.tofile(handle)


def take_types(module: nn.Module, store: Store) -> None:
    """Give the parameters of a module without values the types that they are stored in.

    Raises BadInputError for a type that torch cannot hold.
    """
    made: dict[tuple[Path, int], nn.Parameter] = {}
    for path, part in module.named_modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is None:
                continue
            stored = store[f"{path}.{name}" if path else name]
            dtype = getattr(torch, stored.dtype or "", None)
            if not isinstance(dtype, torch.dtype):
                raise BadInputError(f"{stored.file}: {path} is of a type that torch cannot hold")
            empty = torch.empty(stored.shape, dtype=dtype, device="meta")
            place = stored.file, stored.offset
            # integers have no gradient
            trained = parameter.requires_grad and dtype.is_floating_point
            made.setdefault(place, nn.Parameter(empty, requires_grad=trained))
            part._parameters[name] = made[place]


@torch.no_grad()
def prune_stored(
    module: nn.Module, arrays: StoredArrays, asked: tuple[Pattern, Selection, str], step: Progress
) -> PruneResult:
    """N:M in the copy of the files behind a module, without data.

    Raises BadInputError for NaN or infinity in a weight, a method that needs data, and as `choose`
    does; the files are half pruned then.
    """
    pattern, selection, method = asked
    without_data(method)
    return ModulePruning(module, arrays, pattern, selection).result(method, step=step)
