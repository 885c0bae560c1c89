"""Fine-tuning: pruned weights of a run, or a module, trained to give the dense outputs again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from twofour.errors import BadInputError
from twofour.export.torch_export import output_arrays
from twofour.inputs.samples import TRAINING_SAMPLES, Batch, CalibrationData, ModelInputs
from twofour.pipeline.checks import metric_key
from twofour.pipeline.folder import FINETUNE, FINETUNED, PRUNE, STAGES, WEIGHTS, refuse_changed
from twofour.pipeline.stages import Run, Stage, StageOutput, versions
from twofour.pipeline.torch.weight_files import calls_of, load_weights, save_tensors
from twofour.records.options import CalibrationOptions
from twofour.records.run import Finetuning
from twofour.records.weights import PruneResult
from twofour.sources.calibration.kinds import (
    calibration_key,
    calibration_record,
    loaded_inputs,
    module_inputs,
    open_calibration,
)
from twofour.sources.calibration.loaders import calibration_from_value, torch_call
from twofour.sources.source import OnnxSource, key_of
from twofour.sources.user_code import run_metric
from twofour.store import atomic_file, read_record, sha256_file

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from twofour.sources.source import LoadedModule, TorchSource
    from twofour.training.distillation import TrainingTask

_CHECKPOINT = f"{STAGES}/finetune.pt"


def finetune(run: Run) -> Stage[Finetuning]:
    """finetuned.safetensors and finetune.json, from the weights that `prune` left in the folder.

    After a kill the same command continues at the last checkpoint. Raises BadInputError where
    nothing is pruned, and for an ONNX file.
    """
    options = run.options
    if isinstance(run.source, OnnxSource):
        raise BadInputError(
            f"{run.source.text} is an ONNX file, which cannot be trained",
            hint="fine-tune the torch model that it was exported from",
        )
    if options.training.data is None:
        raise BadInputError("finetune needs training samples", hint="add --train file.py:batches")
    if not run.file(WEIGHTS).is_file():
        raise BadInputError(
            f"{run.shown} has no pruned weights", hint="run `twofour prune` with this --out first"
        )
    refuse_changed(run.path, [PRUNE, WEIGHTS])
    data = CalibrationOptions(data=options.training.data, samples=TRAINING_SAMPLES)
    facts = (
        *(options.seed, run.key_of(run.source), run.key_of(run.dense_source)),
        calibration_key(data, run.described_in, seed=options.seed),
    )
    watched: list[Path] = []

    def work() -> StageOutput[Finetuning]:
        loaded, dense = map(_loaded, cast("list[TorchSource]", [run.source, run.dense_source]))
        inputs = loaded_inputs(loaded, run.source.text, run.described_in)
        opened = open_calibration(data, inputs, seed=options.seed, folder=run.file(STAGES))
        watched.extend(opened.watched)
        key = key_of(sha256_file(run.file(WEIGHTS)), *map(repr, facts), repr(versions("torch")))
        return _finetuned(run, loaded.module, dense.module, (inputs, opened, key)), (FINETUNED,)

    return Stage(
        name="finetune",
        title="fine-tune",
        record=FINETUNE,
        kind=Finetuning,
        work=work,
        watched=lambda: watched,
        depends_on=(*facts, options.training, metric_key(options)),
        packages=("torch",),
        reads=(PRUNE, WEIGHTS),
    )


def _finetuned(
    run: Run, module: nn.Module, dense: nn.Module, data: tuple[ModelInputs, CalibrationData, str]
) -> Finetuning:
    """Train the module from the weights of the run, and save it; the figures of all three."""
    from twofour.training.distillation import TrainingTask

    load_weights(module, run.file(WEIGHTS))
    (inputs, opened, key), pruned = data, read_record(PruneResult, run.file(PRUNE))
    task = TrainingTask(
        pattern=pruned.pattern,
        minutes=run.options.training.minutes,
        seed=run.options.seed,
        checkpoint=run.file(_CHECKPOINT),
        key=key,
        report=run.progress.step,
    )
    metrics = {"dense": _figures(run, dense, inputs), "pruned": _figures(run, module, inputs)}
    result = _trained(module, dense, opened, task)
    metrics["fine-tuned"] = _figures(run, module, inputs)
    names = {row.weight.weight or "" for row in pruned.weights}
    with atomic_file(run.file(FINETUNED)) as temporary:
        save_tensors(module.state_dict(), temporary, first=names)
    run.file(_CHECKPOINT).unlink(missing_ok=True)
    return replace(result, source=run.source.text, metrics=metrics if run.options.metric else {})


def finetune_module(
    module: nn.Module, dense: nn.Module, batches: object, task: TrainingTask
) -> Finetuning:
    """Train a pruned module in place with the caller's batches.

    Raises BadInputError where they do not fit, and where no weight is pruned.
    """
    inputs = module_inputs(module)
    opened = calibration_from_value(batches, inputs, samples=TRAINING_SAMPLES, where="batches")
    return _trained(module, dense, opened, task)


def _trained(
    module: nn.Module, dense: nn.Module, data: CalibrationData, task: TrainingTask
) -> Finetuning:
    import torch

    from twofour.pruning.torch.calls import KeptCalls, device_of, tree_store
    from twofour.training.distillation import Distillation

    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if kinds - {torch.float32, torch.float64}:
        raise BadInputError(
            f"{type(module).__name__} has weights of {', '.join(sorted(map(str, kinds)))}, which "
            "are too coarse for the steps of training",
            hint="make it float32 before: model.float()",
        )
    within = None if task.checkpoint is None else task.checkpoint.parent
    with tree_store(within=within) as kept:
        calls = KeptCalls(calls_of(module, data), device_of(module), kept)
        training = Distillation(module, dense, calls, task)
        held_out = sum(calls.without_inputs(number).samples for number in training.held_out)
        record = replace(calibration_record(data), held_out=held_out)
        return replace(training.run(), train=record)


def _loaded(source: TorchSource) -> LoadedModule:
    """The module of a source, its weights permanent, on a GPU where there is one."""
    import torch

    from twofour.pruning.torch.module_layers import make_permanent

    loaded: LoadedModule = source.load()
    make_permanent(loaded.module)
    if torch.cuda.is_available():
        loaded.module.cuda()
    return loaded


def _figures(run: Run, module: nn.Module, inputs: ModelInputs) -> dict[str, float]:
    """The user's figures of a module; {} without --metric."""
    import torch

    from twofour.pruning.torch.calls import device_of, forward, moved

    if run.options.metric is None:
        return {}

    def outputs(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        call = moved(torch_call(module, Batch(arrays=arrays, samples=1)), device_of(module))
        with torch.no_grad():
            found = output_arrays(module, forward(module, call, 0))
        return {str(number): array for number, array in enumerate(found)}

    return run_metric(run.options.metric, inputs.positional, outputs, seed=run.options.seed)
