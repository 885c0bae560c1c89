"""Pruning the weights of a torch module: in its own memory, or in the files that they come from.

For a checkpoint larger than memory the module has no values; its tensors are read and written one
by one, to where they lie: the files keep their names, order, types and metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from twofour.errors import BadInputError, naming
from twofour.graph.stored import Store
from twofour.inputs.fits import torch_type_name
from twofour.pattern import count_zeros
from twofour.pruning.methods import InPlace, without_data
from twofour.pruning.methods.magnitude import Outcome, count_non_finite
from twofour.pruning.module_layers import (
    Arrays,
    ArraysInMemory,
    bits_of,
    find_module_weights,
    is_plain,
    make_permanent,
)
from twofour.pruning.selection import axis_conflict, choose, pruned_weight
from twofour.records.weights import (
    Pattern,
    PruneResult,
    Selection,
    Solution,
    Weight,
)
from twofour.store import writing

Progress = Callable[[str, int, int | None], None]
"""Called with the work in progress and the time left, how much is done, and how much there is."""


class ModulePruning:
    """The choice of a module's weights to prune, and the report on each."""

    def __init__(
        self, module: nn.Module, arrays: Arrays, pattern: Pattern, selection: Selection
    ) -> None:
        """Raises BadInputError as `choose` does."""
        weights = find_module_weights(module)
        self.arrays = arrays
        self._pattern = pattern
        self._selection = selection
        self.choices = choose(weights, pattern, selection)
        self.wanted: dict[Hashable, Weight] = {}
        """Each array that is to be pruned, with its first weight."""
        for weight, pruned, _ in self.choices:
            if pruned:
                self.wanted.setdefault(arrays.key(weight), weight)

    def result(self, method: str, step: Progress | None = None) -> PruneResult:
        """Prune the arrays without data, and report all weights.

        Raises BadInputError for NaN and infinity; some arrays are pruned then.
        """
        prune = without_data(method)
        outcomes: dict[Hashable, Outcome] = {}
        for number, (key, weight) in enumerate(self.wanted.items(), 1):
            outcomes[key] = self._pruned(weight, prune)
            if step is not None:
                step(weight.layer, number, len(self.wanted))
        rows = []
        for choice in self.choices:
            outcome = outcomes.get(self.arrays.key(choice[0]))
            if outcome is None:
                outcome = Outcome(zeros=self._zeros(choice[0]))
            rows.append(pruned_weight(choice, outcome, Solution(method=method)))
        return PruneResult(
            source="",
            pattern=self._pattern,
            method=method,
            selection=self._selection,
            weights=tuple(rows),
        )

    def _pruned(self, weight: Weight, prune: InPlace) -> Outcome:
        """One array, without data."""
        tensor = self.arrays.read(weight)
        assert tensor is not None, "it is to be pruned"
        assert weight.axis is not None
        bits = bits_of(tensor)
        with naming(f"layer {weight.layer!r}"):
            outcome = prune(bits, weight.axis, self._pattern, kind=torch_type_name(tensor))
        if outcome.non_finite:
            raise _not_finite(weight, outcome.non_finite)
        if tensor.device.type != "cpu":
            tensor.copy_(torch.from_numpy(bits).view(tensor.dtype))
        self.arrays.write(weight, tensor)
        return outcome

    def _zeros(self, weight: Weight) -> int:
        """Zeros of an array that stays as it is."""
        tensor = self.arrays.read(weight)
        if tensor is None or not is_plain(tensor):
            return 0
        return count_zeros(bits_of(tensor), kind=torch_type_name(tensor))


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
    without_data(method)  # refused before a weight is changed
    return plan_in_memory(model, pattern, selection or Selection()).result(method)


def plan_in_memory(model: nn.Module, pattern: Pattern, selection: Selection) -> ModulePruning:
    """The choice for a module, whose computed weights become permanent.

    Raises BadInputError for NaN or infinity, weights without memory (meta), lazy modules, a
    selection that does not fit, and an array that two layers need along different axes.
    """
    make_permanent(model)
    plan = ModulePruning(model, ArraysInMemory(model), pattern, selection)
    checked: set[Hashable] = set()
    steps: dict[Hashable, tuple[Weight, int]] = {}
    for weight, pruned, _ in plan.choices:
        tensor = plan.arrays.read(weight)
        if tensor is None:
            continue
        key = plan.arrays.key(weight)
        if key not in checked:
            _check_data(weight, tensor)
            checked.add(key)
        if not pruned:
            continue
        assert weight.axis is not None
        # between neighbours of a group: a transposed view has another one
        step = tensor.stride(weight.axis)
        first, first_step = steps.setdefault(key, (weight, step))
        if step != first_step:
            raise axis_conflict(first, weight)
    return plan


def _check_data(weight: Weight, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise BadInputError(
            f"layer {weight.layer!r}: {weight.weight} is a meta tensor, without data",
            hint="load the model's weights before pruning it",
        )
    if not is_plain(tensor):
        return
    count = count_non_finite(bits_of(tensor), kind=torch_type_name(tensor))
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
            place = (stored.file, stored.offset)
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
    return ModulePruning(module, arrays, pattern, selection).result(method, step=step)
