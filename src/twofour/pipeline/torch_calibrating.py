"""Pruning a torch module as the options say: with calibration data as calls of its forward."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.pipeline.folder import STAGES
from twofour.pipeline.sources.calibration.data import CalibrationData
from twofour.pipeline.sources.calibration.models import loaded_inputs, module_inputs
from twofour.pipeline.sources.calibration.open import calibration_key, open_calibration
from twofour.pipeline.sources.hf import HfSource
from twofour.pipeline.sources.source import key_of
from twofour.pipeline.stages import ONE_SHOT_WEIGHTS, versions
from twofour.records.options import Selection
from twofour.records.pruning import PruneResult
from twofour.store import atomic_file

if TYPE_CHECKING:
    from torch import nn

    from twofour.pipeline.sources.source import LoadedModule
    from twofour.pipeline.stages import Run
    from twofour.pruning.torch_calibration import Work
    from twofour.pruning.torch_calls import Call
    from twofour.pruning.torch_pruning import CalibrationCalls


_FINISHED = "calibration"


def prune_by_options(
    run: Run, loaded: LoadedModule, orders: Mapping[str, Sequence[int]] | None = None
) -> PruneResult:
    """Prune the run's module in place, with its calibration data where it has some.

    `orders`: those that its channels were put in before.
    """
    from twofour.pruning.torch_module import prune_module

    options = run.options
    if options.calibration.data is None:
        return prune_module(
            loaded.module, options.pattern, options.selection, method=options.method_name
        )
    return _prune_by_data(run, loaded, orders or {})


def prune_by_batches(
    module: nn.Module, batches: tuple[object, int], work: Work, selection: Selection
) -> PruneResult:
    """Prune a module in place with batches of the caller, of which so many samples are used.

    Raises BadInputError where they do not fit the module's forward.
    """
    from twofour.pruning.torch_layers import find_weights
    from twofour.pruning.torch_pruning import prune_calibrated

    find_weights(module)  # what has none that could be told is refused before the data are read
    data = data_of(module, *batches)
    return prune_calibrated(module, calls_of(module, data), work, selection)


def data_key(run: Run) -> str:
    """sha256 over the run's calibration data; "" without any."""
    return calibration_key(run.options.calibration, _described_in(run), seed=run.options.seed)


def _prune_by_data(
    run: Run, loaded: LoadedModule, orders: Mapping[str, Sequence[int]]
) -> PruneResult:
    """What is done is kept in the run folder: after a kill the same command goes on from there.

    `forget_finished` comes when all is done.
    """
    from twofour.pruning.torch_finished import FinishedSteps
    from twofour.pruning.torch_pruning import prune_calibrated, work_of

    options, folder = run.options, run.file(STAGES)
    data = open_loaded_data(run, loaded)
    unrepaired = replace(options.method, repair=None)  # repair comes after what is kept here
    facts = (options.pattern, options.selection, unrepaired, options.calibration, orders)
    sources = (run.source.key(), refitted_to_key(run))
    parts = (*map(repr, (*facts, versions("torch"))), *sources, data.key())
    finished = FinishedSteps(folder=folder / _FINISHED, key=key_of(*parts))
    one_shot = run.file(ONE_SHOT_WEIGHTS)
    work = replace(
        work_of(options.pattern, options.method),
        progress=run.progress.step,
        finished=finished,
        spill_folder=folder,
        before_repair=lambda: _save(loaded.module, one_shot),
        reference=_refitted_to(run),
    )
    result = prune_calibrated(loaded.module, calls_of(loaded.module, data), work, options.selection)
    if result.repair is not None and result.repair.taken is None:
        one_shot.unlink()
    return result


def forget_finished(run: Run) -> None:
    """Steps of a pruning that is done and saved are needed no more."""
    shutil.rmtree(run.file(STAGES) / _FINISHED, ignore_errors=True)


def refitted_to_key(run: Run) -> str:
    """Of the dense reference, where the weights hang on it."""
    return run.dense_source.key() if run.options.refits_a_mask else ""


def _refitted_to(run: Run) -> nn.Module | None:
    """The dense reference, where a mask that came with the model is to be refitted."""
    if run.reference_model is None or not run.options.refits_a_mask:
        return None
    return run.reference_model.dense().module


def _save(module: nn.Module, target: Path) -> None:
    from twofour.pipeline.torch_model import save_tensors

    with atomic_file(target) as temporary:
        save_tensors(module.state_dict(), temporary)


def open_loaded_data(run: Run, loaded: LoadedModule) -> CalibrationData:
    """The run's calibration data, found to fit its module."""
    inputs = loaded_inputs(loaded, run.source.text, _described_in(run))
    options = run.options
    data = open_calibration(options.calibration, inputs, seed=options.seed, folder=run.file(STAGES))
    run.calibration_files[:] = data.watched
    return data


def _described_in(run: Run) -> Path | None:
    """Where the tokenizer and the image processor of a checkpoint are described."""
    return run.source.folder if isinstance(run.source, HfSource) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """The data's batches in forward's order, read anew each time that they are gone through."""

    module: nn.Module
    data: CalibrationData

    def __iter__(self) -> Iterator[Call]:
        from twofour.pipeline.sources.calibration.torch_calls import torch_call

        for batch in self.data.batches():
            yield torch_call(self.module, batch)


def calls_of(module: nn.Module, data: CalibrationData) -> CalibrationCalls:
    """The data's batches in forward's order, read as they are asked for."""
    from twofour.pruning.torch_pruning import CalibrationCalls

    return CalibrationCalls(calls=_Calls(module=module, data=data), about=data.about)


def data_of(module: nn.Module, value: object, samples: int) -> CalibrationData:
    """Batches of the caller; raises BadInputError where they do not fit the module's forward."""
    from twofour.pipeline.sources.calibration.values import calibration_from_value

    return calibration_from_value(value, module_inputs(module), samples=samples)
