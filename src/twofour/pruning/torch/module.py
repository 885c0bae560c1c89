"""Pruning the weights of a torch module: in its own memory, or in the files that they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from twofour.errors import BadInputError
from twofour.pattern import count_zeros
from twofour.pruning.methods import left_to, without_data
from twofour.pruning.methods.magnitude import count_non_finite
from twofour.pruning.selection import Choice, axis_conflict, choose, naming_layer
from twofour.pruning.torch.layers import (
    StorageKey,
    dtype_name,
    find_not_covered,
    find_weights,
    is_plain,
    make_permanent,
    storage_key,
    tensor_of,
)
from twofour.records.weights import (
    Calibration,
    Pattern,
    PrunedWeight,
    PruneResult,
    Selection,
    Solution,
    Weight,
    shared,
)

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the width of each float type: numpy has no bfloat16."""
NOT_REACHED = "no calibration input reached it: pruned without data"

Progress = Callable[[str, int, int | None], None]
"""Is told what is being done, and how long the rest will take; how much is done, and of what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Solution):
    """What was done to one array, and by which method."""

    zeros: int
    kept_magnitude: float | None
    held_before: bool


class Arrays(Protocol):
    """Where the arrays of a module's weights lie."""

    def key(self, weight: Weight) -> Hashable:
        """Equal for weights of one array; None for one that is not stored."""

    def read(self, weight: Weight) -> Tensor | None:
        """The array, or a copy of it."""

    def write(self, weight: Weight, tensor: Tensor) -> None:
        """Put what `read` gave, changed since, back to its place."""


class InModule:
    """Arrays in the memory of the module itself."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def key(self, weight: Weight) -> StorageKey | None:
        """Where it lies."""
        tensor = self.read(weight)
        return None if tensor is None else storage_key(tensor)

    def read(self, weight: Weight) -> Tensor | None:
        """The parameter or the buffer."""
        return array_of(self._module, weight)

    def write(self, weight: Weight, tensor: Tensor) -> None:
        """It is there already."""


def array_of(module: nn.Module, weight: Weight) -> Tensor | None:
    """A weight's parameter or buffer; None where it is not stored."""
    if weight.weight is None:
        return None
    name = weight.weight[len(weight.layer) + 1 :] if weight.layer else weight.weight
    return tensor_of(module.get_submodule(weight.layer), name)


class Plan:
    """Which weights of a module are pruned, and what becomes of each."""

    def __init__(
        self, module: nn.Module, arrays: Arrays, pattern: Pattern, selection: Selection
    ) -> None:
        """Raises BadInputError as `choose` does."""
        weights = find_weights(module)
        self.arrays, self._pattern, self._selection = arrays, pattern, selection
        self.choices = choose(weights, pattern, selection)
        self.wanted: dict[Hashable, Weight] = {}
        """Each array that is to be pruned, with the first weight that asks for it."""
        for weight, pruned, _ in self.choices:
            if pruned:
                self.wanted.setdefault(arrays.key(weight), weight)
        self._not_covered = find_not_covered(module, weights)

    def result(
        self,
        method: str,
        solved: Mapping[str, Done] | None = None,
        calibration: Calibration | None = None,
        step: Progress | None = None,
    ) -> PruneResult:
        """Prune without data what is not `solved` (by weight) with it, and report all of it.

        Raises BadInputError for NaN and infinity; some arrays are pruned then.
        """
        left, note = left_to(method), None if solved is None else NOT_REACHED
        done: dict[Hashable, Done] = {}
        for number, (key, weight) in enumerate(self.wanted.items(), 1):
            known = None if solved is None else solved.get(weight.weight or "")
            done[key] = known or self._pruned(weight, left, note)
            if step is not None:
                step(weight.layer, number, len(self.wanted))
        return PruneResult(
            source="",
            pattern=self._pattern,
            method=method,
            selection=self._selection,
            weights=tuple(self._row(choice, done) for choice in self.choices),
            not_covered=self._not_covered,
            calibration=calibration,
        )

    def _pruned(self, weight: Weight, method: str, note: str | None) -> Done:
        """One array, without data."""
        tensor = self.arrays.read(weight)
        assert tensor is not None, "it is to be pruned"
        assert weight.axis is not None
        bits = _bits_of(tensor)
        prune = without_data(method)
        with naming_layer(weight.layer):
            outcome = prune(bits, weight.axis, self._pattern, kind=dtype_name(tensor))
        if outcome.non_finite:
            raise _not_finite(weight, outcome.non_finite)
        if tensor.device.type != "cpu":
            tensor.copy_(torch.from_numpy(bits).view(tensor.dtype))
        self.arrays.write(weight, tensor)
        return Done(
            method=method,
            zeros=outcome.zeros,
            kept_magnitude=outcome.kept_magnitude,
            held_before=outcome.held_before,
            note=note,
        )

    def _row(self, choice: Choice, found: Mapping[Hashable, Done]) -> PrunedWeight:
        weight, pruned, reasons = choice
        done = found.get(self.arrays.key(weight))
        if done is not None and pruned:
            return PrunedWeight(**shared(done, Done), weight=weight, pruned=True, reasons=reasons)
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


def plan_in_memory(model: nn.Module, pattern: Pattern, selection: Selection) -> Plan:
    """The plan for a module, whose computed weights become permanent.

    Raises BadInputError for NaN or infinity, weights without memory (meta), lazy modules, a
    selection that does not fit, and an array that two layers need along different axes.
    """
    make_permanent(model)
    plan = Plan(model, InModule(model), pattern, selection)
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
    count = count_non_finite(_bits_of(tensor), kind=dtype_name(tensor)) if is_plain(tensor) else 0
    if count:
        raise _not_finite(weight, count)


def _not_finite(weight: Weight, count: int) -> BadInputError:
    return BadInputError(
        f"layer {weight.layer!r}: {count} of {math.prod(weight.shape)} values of {weight.weight} "
        "are NaN or infinite",
        hint="the checkpoint is damaged or its training diverged; use another one",
    )


def zeros_of(tensor: Tensor) -> int:
    """Zeros in a plain tensor of floats, -0.0 included."""
    return count_zeros(_bits_of(tensor), kind=dtype_name(tensor))


def _bits_of(tensor: Tensor) -> NDArray[Any]:
    """The tensor's own memory as integers; a copy where it is on another device."""
    return tensor.detach().view(_BITS[tensor.element_size()]).cpu().numpy()
