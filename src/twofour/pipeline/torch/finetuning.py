"""The stage that trains pruned weights until the model gives the dense outputs again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from twofour.errors import BadInputError
from twofour.export.calls import output_arrays
from twofour.export.model_code import described
from twofour.inputs.fits import Array, Arrays
from twofour.inputs.samples import TRAINING_SAMPLES, Batch, CalibrationData, ModelInputs
from twofour.pipeline.checks import metric_key
from twofour.pipeline.folder import FINETUNE, FINETUNED, PRUNE, STAGES, WEIGHTS, refuse_changed
from twofour.pipeline.stages import Run, Stage, StageOutput, versions
from twofour.pipeline.torch.graph import SourceModule
from twofour.pipeline.torch.weight_files import load_weights, save_tensors
from twofour.records.options import CalibrationOptions, TrainingOptions
from twofour.records.run import Finetuning
from twofour.records.weights import Pattern, PruneResult
from twofour.sources.calibration.kinds import calibration_key, loaded_inputs, open_calibration
from twofour.sources.calibration.loaders import torch_call
from twofour.sources.source import OnnxSource, key_of
from twofour.sources.user_code import run_metric
from twofour.store import read_record, sha256_file
from twofour.training.distillation import TrainingTask, distil
from twofour.words import count

if TYPE_CHECKING:
    from torch import nn

    from twofour.sources.source import LoadedModule, Source, TorchSource

_CHECKPOINT = f"{STAGES}/finetune.pt"


def refuse_untrainable(source: Source, folder: Path, training: TrainingOptions) -> None:
    """Raise BadInputError where nothing is pruned, for an ONNX file, and without samples."""
    if isinstance(source, OnnxSource):
        what = f"{source.text} is an ONNX file, which cannot be trained"
        raise BadInputError(what, hint="fine-tune the torch model that it was exported from")
    if training.data is None:
        raise BadInputError("finetune needs training samples", hint="add --train file.py:batches")
    if not (folder / WEIGHTS).is_file():
        first = f"run `twofour prune {source.text} --out {folder}` first"
        raise BadInputError(f"{folder} has no {WEIGHTS}, where training starts", hint=first)


def finetune(run: Run) -> Stage[Finetuning]:
    """finetuned.safetensors and finetune.json, from the weights that `prune` left in the folder."""
    options = run.options
    refuse_changed(run.path, [PRUNE, WEIGHTS])
    data = CalibrationOptions(
        data=options.training.data, samples=TRAINING_SAMPLES, option="--train"
    )
    facts = (
        options.seed,
        run.key_of(run.source),
        run.key_of(run.dense_source),
        calibration_key(data, run.described_in, seed=options.seed),
        versions(),
    )

    def work() -> StageOutput[Finetuning]:
        key = key_of(sha256_file(run.file(WEIGHTS)), *map(repr, facts))
        return _train(run, data, key), (FINETUNED,)

    return Stage(
        name="finetune",
        title="fine-tune",
        record=FINETUNE,
        kind=Finetuning,
        work=work,
        depends_on=(*facts, options.training, metric_key(options)),
        reads=(PRUNE, WEIGHTS),
    )


def _train(run: Run, data: CalibrationOptions, key: str) -> Finetuning:
    """Train, and write the weights; training that was cut off goes on where the key is the same."""
    loaded = _loaded(run, run.source)
    dense = _loaded(run, run.dense_source)
    load_weights(loaded.module, run.file(WEIGHTS))
    inputs = loaded_inputs(loaded, run.source.text, run.described_in)
    samples = open_calibration(data, inputs, seed=run.options.seed, folder=run.file(STAGES))
    pruned = read_record(PruneResult, run.file(PRUNE))
    _advise(run, pruned, samples)
    metrics = {
        "dense": _figures(run, dense.module, inputs),
        "pruned": _figures(run, loaded.module, inputs),
    }
    trained = distil(loaded.module, dense.module, samples, _task(run, pruned.pattern, key))
    metrics["fine-tuned"] = _figures(run, loaded.module, inputs)
    _save(loaded.module, run.file(FINETUNED), pruned)
    run.file(_CHECKPOINT).unlink(missing_ok=True)
    return replace(trained, source=run.source.text, metrics=metrics)


def _advise(run: Run, pruned: PruneResult, data: CalibrationData) -> None:
    """Say where more samples for pruning bring more than training, and where it saw these."""
    used = 0
    if pruned.calibration is not None:
        used = pruned.calibration.samples
        if pruned.calibration.source == data.source:
            run.progress.note(
                f"pruning was calibrated with {data.source} too: on its held-out samples the "
                "figures are better than on data that are new to both"
            )
    usual = CalibrationOptions().samples
    if used < min(usual, data.samples) and pruned.method != "keep":
        how = f"with {count(used, 'calibration sample')}" if used else "without calibration samples"
        run.progress.note(
            f"pruned {how}: `twofour prune --calibrate DATA` "
            f"with up to {usual:,} first brings more than training does in the same time"
        )


def _save(module: nn.Module, target: Path, pruned: PruneResult) -> None:
    """Write the weights, tied ones under the names that prune.json gives them."""
    names = {row.weight.weight or "" for row in pruned.weights}
    save_tensors(module.state_dict(), target, first=names)


def _task(run: Run, pattern: Pattern, key: str) -> TrainingTask:
    return TrainingTask(
        pattern=pattern,
        minutes=run.options.training.minutes,
        seed=run.options.seed,
        checkpoint=run.file(_CHECKPOINT),
        resumes=run.options.resume,
        key=key,
        report=run.progress.step,
        note=run.progress.note,
    )


def _loaded(run: Run, source: Source) -> LoadedModule:
    """The module of a source, its weights permanent, on a GPU where there is one."""
    import torch

    loaded = SourceModule(cast("TorchSource", source), run.progress.note).loaded()
    if torch.cuda.is_available():
        loaded.module.cuda()
    return loaded


def _figures(run: Run, module: nn.Module, inputs: ModelInputs) -> dict[str, float]:
    """The user's figures of a module; {} without --metric."""
    import torch

    def outputs(arrays: Arrays) -> dict[str, Array]:
        call = torch_call(module, Batch(arrays=arrays, samples=1))
        with torch.no_grad(), described("forward fails on what predict was given:"):
            returned = module(*call.args, **call.kwargs)
        numbered = enumerate(output_arrays(module, returned))
        return {str(number): array for number, array in numbered}

    if run.options.metric is None:
        return {}
    return run_metric(run.options.metric, inputs.positional, outputs, seed=run.options.seed)
