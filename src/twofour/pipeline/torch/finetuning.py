"""The stage that trains pruned weights until the model gives the dense outputs again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from twofour.errors import BadInputError
from twofour.export.calls import output_arrays
from twofour.export.model_code import described
from twofour.inputs.samples import TRAINING_SAMPLES, Batch, ModelInputs
from twofour.pipeline.checks import metric_key
from twofour.pipeline.folder import FINETUNE, FINETUNED, PRUNE, STAGES, WEIGHTS, refuse_changed
from twofour.pipeline.stages import Run, Stage, StageOutput, versions
from twofour.pipeline.torch.weight_files import load_weights, save_tensors
from twofour.records.options import CalibrationOptions, TrainingOptions
from twofour.records.run import Finetuning
from twofour.records.weights import PruneResult
from twofour.sources.calibration.kinds import calibration_key, loaded_inputs, open_calibration
from twofour.sources.calibration.loaders import torch_call
from twofour.sources.source import OnnxSource, key_of
from twofour.sources.user_code import run_metric
from twofour.store import atomic_file, read_record, sha256_file

if TYPE_CHECKING:
    import numpy as np
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
        raise BadInputError(f"{folder} has no pruned weights", hint="run `twofour prune` first")


def finetune(run: Run) -> Stage[Finetuning]:
    """finetuned.safetensors and finetune.json, from the weights that `prune` left in the folder."""
    options, training = run.options, run.options.training
    refuse_changed(run.path, [PRUNE, WEIGHTS])
    data = CalibrationOptions(data=training.data, samples=TRAINING_SAMPLES, option="--train")
    facts = (
        *(options.seed, run.key_of(run.source), run.key_of(run.dense_source)),
        *(calibration_key(data, run.described_in, seed=options.seed), versions("torch")),
    )

    def work() -> StageOutput[Finetuning]:
        from twofour.training.distillation import TrainingTask, distil

        loaded, dense = map(_loaded, cast("list[TorchSource]", [run.source, run.dense_source]))
        load_weights(loaded.module, run.file(WEIGHTS))
        inputs = loaded_inputs(loaded, run.source.text, run.described_in)
        opened = open_calibration(data, inputs, seed=options.seed, folder=run.file(STAGES))
        pruned, checkpoint = read_record(PruneResult, run.file(PRUNE)), run.file(_CHECKPOINT)
        task = TrainingTask(
            pattern=pruned.pattern,
            minutes=training.minutes,
            seed=options.seed,
            checkpoint=checkpoint,
            resumes=options.resume,
            key=key_of(sha256_file(run.file(WEIGHTS)), *map(repr, facts)),
            report=run.progress.step,
            note=run.progress.note,
        )
        models = {"dense": dense.module, "pruned": loaded.module}
        metrics = {name: _figures(run, module, inputs) for name, module in models.items()}
        result = distil(loaded.module, dense.module, opened, task)
        metrics["fine-tuned"] = _figures(run, loaded.module, inputs)
        names = {row.weight.weight or "" for row in pruned.weights}
        with atomic_file(run.file(FINETUNED)) as temporary:
            save_tensors(loaded.module.state_dict(), temporary, first=names)
        checkpoint.unlink(missing_ok=True)
        return replace(result, source=run.source.text, metrics=metrics), (FINETUNED,)

    return Stage(
        name="finetune",
        title="fine-tune",
        record=FINETUNE,
        kind=Finetuning,
        work=work,
        depends_on=(*facts, training, metric_key(options)),
        reads=(PRUNE, WEIGHTS),
    )


def _loaded(source: TorchSource) -> LoadedModule:
    """The module of a source, its weights permanent, on a GPU where there is one."""
    import torch

    from twofour.pruning.torch.module_layers import make_permanent

    loaded = source.load()
    make_permanent(loaded.module)
    if torch.cuda.is_available():
        loaded.module.cuda()
    return loaded


def _figures(run: Run, module: nn.Module, inputs: ModelInputs) -> dict[str, float]:
    """The user's figures of a module; {} without --metric."""
    import torch

    def outputs(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        call = torch_call(module, Batch(arrays=arrays, samples=1))
        with torch.no_grad(), described("forward fails on what predict was given:"):
            found = module(*call.args, **call.kwargs)
        named = enumerate(output_arrays(module, found))
        return {str(number): array for number, array in named}

    if run.options.metric is None:
        return {}
    return run_metric(run.options.metric, inputs.positional, outputs, seed=run.options.seed)
