"""A torch module pruned with calibration data, in memory or in its files: which weights and biases.

A checkpoint that is larger than memory is pruned in its own files. Without data memory holds one
tensor at a time; with data one block of the model, its Gram matrices, and what the calibration data
became in front of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from twofour.calibrate.torch.calibration import Work, calibrate, calls_kept
from twofour.calibrate.torch.weights import (
    CalibratedWeight,
    FromFiles,
    InMemory,
    calibrated_weight,
    fellow,
)
from twofour.pruning.methods import method_named, without_data
from twofour.pruning.resources import give_back_large_arrays
from twofour.pruning.solve import solve_layers
from twofour.pruning.torch.calls import Call, put_back
from twofour.pruning.torch.layers import storage_key
from twofour.pruning.torch.module import Plan, Progress, plan_in_memory
from twofour.pruning.torch.streamed import StreamedModule
from twofour.records.options import MethodOptions
from twofour.records.weights import Calibration, Pattern, PruneResult, Selection


@torch.no_grad()
def prune_calibrated(
    model: nn.Module,
    calls: Iterable[Call],
    about: Calibration,
    work: Work,
    selection: Selection,
) -> PruneResult:
    """N:M in the model's own memory by a method that has data, in the order of its own forward.

    What no input reached is pruned without data. All or nothing: raises BadInputError like
    `plan_in_memory`, like `calibrate`, and for data that the model cannot run on, pruned or not,
    with every weight and bias as it was.
    """
    with calls_kept(model, calls, work) as kept:
        plan = plan_in_memory(model, work.pattern, selection)
        weights = [calibrated_weight(model, w, work.pattern) for w in plan.wanted.values()]
        held = InMemory(model, weights, work.reference)
        try:
            if work.reference is not None and work.options.bias_correction:
                for weight in weights:
                    _take_biases(model, weight, work.reference)
            done = calibrate(held, kept, work) if weights else {}
            return plan.result(work.name, done, about)
        except BaseException:
            put_back(held.before)
            raise


@torch.no_grad()
def prune_streamed(
    streamed: StreamedModule, pattern: Pattern, selection: Selection, *, method: str, step: Progress
) -> PruneResult:
    """N:M in the copy of the files behind the module, without data.

    Raises BadInputError for NaN or infinity in a weight, a method that needs data, and as `choose`
    does; the files are half pruned then.
    """
    without_data(method)
    plan = Plan(streamed.module, streamed, pattern, selection)
    return _by_key(streamed, plan.result(method, step=step))


@torch.no_grad()
def prune_streamed_calibrated(
    streamed: StreamedModule,
    calls: Iterable[Call],
    about: Calibration,
    work: Work,
    selection: Selection,
) -> PruneResult:
    """The same by a method that has data: later blocks see what earlier ones became."""
    plan = Plan(streamed.module, streamed, work.pattern, selection)
    give_back_large_arrays()
    weights = FromFiles(streamed, plan.wanted.values(), work.pattern)
    with calls_kept(streamed.module, calls, work) as kept:
        done = calibrate(weights, kept, work)
    return _by_key(streamed, plan.result(work.name, done, about))


def _by_key(streamed: StreamedModule, result: PruneResult) -> PruneResult:
    """Weights are named by the keys in the files, which are validated."""
    rows = (
        replace(row, weight=replace(row.weight, weight=streamed.key(row.weight)))
        for row in result.weights
    )
    return replace(result, weights=tuple(rows))


def _take_biases(model: nn.Module, weight: CalibratedWeight, reference: nn.Module) -> None:
    """The dense model's: what the correction adds is reckoned from its outputs."""
    fellow(reference, weight.target.name, weight.target.tensor)
    state = model.state_dict()
    for bias in weight.biases:
        for name, tensor in state.items():
            if storage_key(tensor) == storage_key(bias):
                with torch.no_grad():
                    bias.copy_(fellow(reference, name, bias))


def work_of(pattern: Pattern, options: MethodOptions) -> Work:
    """The method that the options name, with data; raises BadInputError for an unknown one.

    And for a refit or damping that no layer can be solved with: the data are not read yet.
    """
    work = Work(pattern=pattern, options=options)
    solve_layers((), method_named(work.name), options)
    return work
