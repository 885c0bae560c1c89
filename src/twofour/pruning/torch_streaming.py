"""Pruning a checkpoint that is larger than memory, in its own files, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from twofour.errors import BadInputError
from twofour.pruning.methods import InPlace, without_data
from twofour.pruning.methods.magnitude import Outcome
from twofour.pruning.selection import Choice, axis_conflict, choose
from twofour.pruning.torch_checkpoint import StreamedModule
from twofour.pruning.torch_module import (
    bits_of,
    dtype_name,
    find_not_covered,
    find_weights,
    zeros_of,
)
from twofour.records.options import Selection
from twofour.records.pruning import PrunedWeight, PruneResult
from twofour.records.weights import Pattern, Weight

Step = Callable[[str, int, int], None]
"""Told of each layer: its name, how many are done, of how many."""


@torch.no_grad()
def prune_streamed(
    streamed: StreamedModule,
    pattern: Pattern,
    selection: Selection,
    *,
    method: str,
    step: Step,
) -> PruneResult:
    """N:M in the files behind the module, without data; memory holds one tensor at a time.

    Raises BadInputError for NaN or infinity in a weight, a method that needs data, and as `choose`
    does; the files are half pruned then.
    """
    prune = without_data(method)
    weights = find_weights(streamed.module)
    choices = choose(weights, pattern, selection)
    wanted = _by_key(streamed, choices)
    outcomes: dict[str, Outcome] = {}
    for done, (key, weight) in enumerate(wanted.items(), 1):
        outcomes[key] = _prune_one(streamed, key, weight, pattern, prune)
        step(weight.layer, done, len(wanted))
    rows = tuple(_row(streamed, choice, outcomes, method) for choice in choices)
    return PruneResult(
        source="",
        pattern=pattern,
        method=method,
        selection=selection,
        weights=rows,
        not_covered=find_not_covered(streamed.module, weights),
    )


def _by_key(streamed: StreamedModule, choices: Sequence[Choice]) -> dict[str, Weight]:
    """What is to be pruned, each stored tensor once; raises BadInputError for two axes of one."""
    found: dict[str, Weight] = {}
    for weight, pruned, _ in choices:
        if pruned and weight.weight is not None:
            first = found.setdefault(streamed.key_of(weight.weight), weight)
            if first.axis != weight.axis:
                raise axis_conflict(first, weight)
    return found


def _prune_one(
    streamed: StreamedModule, key: str, weight: Weight, pattern: Pattern, prune: InPlace
) -> Outcome:
    assert weight.axis is not None
    tensor = streamed.files.read(key)
    outcome = prune(bits_of(tensor), weight.axis, pattern, kind=dtype_name(tensor))
    if outcome.non_finite:
        raise BadInputError(
            f"layer {weight.layer!r}: {outcome.non_finite} of {tensor.numel()} values of {key} "
            "are NaN or infinite",
            hint="the checkpoint is damaged or its training diverged; use another one",
        )
    streamed.files.write(key, tensor)
    return outcome


def _row(
    streamed: StreamedModule, choice: Choice, outcomes: dict[str, Outcome], method: str
) -> PrunedWeight:
    weight, pruned, reasons = choice
    key = None if weight.weight is None else streamed.key_of(weight.weight)
    outcome = None if key is None else outcomes.get(key)
    zeros = 0 if key is None or outcome is not None else zeros_of(streamed.files.read(key))
    taken = outcome if pruned else None
    return PrunedWeight(
        weight=replace(weight, weight=key),
        pruned=pruned,
        zeros=zeros if outcome is None else outcome.zeros,
        kept_magnitude=taken.kept_magnitude if taken else None,
        reasons=reasons,
        held_before=taken is not None and taken.held_before,
        method=method if pruned else None,
    )
