"""`twofour prune` of a checkpoint larger than memory: a copy of its folder, pruned in place.

The copy has the same files, names, order and types; only the bytes of the pruned weights differ.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from twofour.errors import BadInputError
from twofour.pipeline.folder import STAGES, own_folder
from twofour.pipeline.sources.checkpoint import check_weight_file, read_checkpoint
from twofour.pipeline.sources.hf import HfSource
from twofour.pipeline.sources.source import key_of
from twofour.pipeline.stages import CHECKPOINT, PRUNE, VALIDATE, Made, Run, Stage, versions
from twofour.pipeline.torch_model import refuse_nothing_pruned
from twofour.pipeline.validating import merged, validate_shard
from twofour.pruning.methods import DEFAULT_WITHOUT_DATA
from twofour.records.pruning import PruneResult, Validation
from twofour.store import write_error

if TYPE_CHECKING:
    from torch import nn

    from twofour.pipeline.sources.calibration.data import CalibrationData
    from twofour.pipeline.sources.checkpoint import Checkpoint
    from twofour.pruning.torch_checkpoint import CheckpointFiles, StreamedModule
    from twofour.pruning.torch_finished import FinishedUnits

_UNITS_DONE = "stages/streamed.json"
"""What of the copy is pruned, while that goes on."""
_SHARE_OF_MEMORY = 0.5
"""Of what is free: larger checkpoints are streamed. In memory, float16 weights take twice their
size on disk, as they become float32."""


def is_streamed(run: Run) -> bool:
    """Whether the checkpoint goes through memory block by block: as asked, else by its size.

    Raises BadInputError where it is asked for and the source is no checkpoint of safetensors.
    """
    wanted = run.options.stream
    if wanted is False:
        return False
    why_not = _why_not(run)
    if wanted and why_not is not None:
        raise BadInputError(f"--stream: {run.source.text} {why_not}", hint="leave --stream out")
    if why_not is not None:
        return False
    size = sum(file.stat().st_size for file in _checkpoint(run).weights)
    if wanted or size > _SHARE_OF_MEMORY * psutil.virtual_memory().available:
        if run.options.method.permute_seconds:
            raise BadInputError(
                f"{run.source.text} is pruned in a copy of its files, whose channels stay in their "
                "order: --permute-seconds needs the whole model in memory",
                hint="leave --permute-seconds out, or give --no-stream where memory is enough",
            )
        if run.options.method.repair:
            raise BadInputError(
                f"{run.source.text} is pruned in a copy of its files, block by block: --repair "
                "needs the whole model in memory",
                hint="leave --repair out, or give --no-stream where memory is enough",
            )
        calibrated = run.options.calibration.data is not None
        without = " and without repair" if calibrated and run.options.method.repair is None else ""
        run.progress.note(
            f"{run.source.text} ({size / 1e9:.1f} GB) is pruned in a copy of its files, block by "
            f"block{without}"
        )
        return True
    return False


def prune(run: Run) -> Stage[PruneResult]:
    """checkpoint/, a copy of the folder with pruned weights, and prune.json."""
    from twofour.pipeline.torch_calibrating import data_key

    def work() -> Made[PruneResult]:
        result = replace(_pruned(run), source=run.source.text)
        refuse_nothing_pruned(result)
        return result, tuple(f"{CHECKPOINT}/{file.name}" for file in _copies(run))

    return Stage(
        name="prune",
        title=f"prune to {run.options.pattern}, block by block",
        record=PRUNE,
        kind=PruneResult,
        work=work,
        options=("pattern", "selection", "method", "calibration"),
        watched=lambda: run.calibration_files,
        facts={"source": run.source.key(), "streamed": True, "calibration": data_key(run)},
        packages=("torch", "transformers"),
    )


def validate(run: Run, pruned: PruneResult) -> Stage[Validation]:
    """validate.json: every shard as it was saved, read back."""
    folder = run.file(CHECKPOINT)
    names = [f"{CHECKPOINT}/{file.name}" for file in sorted(folder.glob("*.safetensors"))]

    def work() -> Made[Validation]:
        parts = [validate_shard(run.file(name), pruned, pruned.pattern) for name in names]
        named = zip(parts, names, strict=True)
        return merged([replace(part, files=(name,)) for part, name in named]), ()

    return Stage(
        name="validate",
        title="validate the saved weights",
        record=VALIDATE,
        kind=Validation,
        work=work,
        reads=(PRUNE, *names),
    )


def _why_not(run: Run) -> str | None:
    if not isinstance(run.source, HfSource):
        return "is no checkpoint folder"
    if any(file.suffix != ".safetensors" for file in _checkpoint(run).weights):
        return "holds no .safetensors files"
    return None


def _checkpoint(run: Run) -> Checkpoint:
    assert isinstance(run.source, HfSource)
    return read_checkpoint(run.source.folder)


def _copies(run: Run) -> list[Path]:
    """Where the files with weights lie in the copy."""
    checkpoint, target = _checkpoint(run), run.file(CHECKPOINT)
    within = checkpoint.model_folder.relative_to(checkpoint.folder)
    return [target / within / file.name for file in checkpoint.weights]


def _copied(run: Run) -> CheckpointFiles:
    """The copy: the whole folder, links followed, without a run folder in it."""
    from twofour.pruning.torch_checkpoint import CheckpointFiles

    run.file(_UNITS_DONE).unlink(missing_ok=True)
    checkpoint, target = _checkpoint(run), own_folder(run.file(CHECKPOINT))
    own = run.path.resolve()

    def without_own(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder, name).resolve() == own]

    try:
        shutil.copytree(checkpoint.folder, target, dirs_exist_ok=True, ignore=without_own)
    except shutil.Error as error:  # a list of what went wrong, file by file
        source, copy, why = error.args[0][0]
        raise BadInputError(
            f"cannot copy {source} to {copy}: {why}",
            hint="free some space or choose another folder with --out",
        ) from error
    except OSError as error:
        raise write_error(target, error) from error
    return CheckpointFiles(_copies(run), writable=True)


def _pruned(run: Run) -> PruneResult:
    """The module has its types from the user's files, until they are copied."""
    from twofour.pruning.torch_checkpoint import CheckpointFiles, StreamedModule
    from twofour.pruning.torch_streaming import prune_streamed

    assert isinstance(run.source, HfSource)
    options, checkpoint = run.options, _checkpoint(run)
    for file in checkpoint.weights:
        check_weight_file(file)
    streamed = StreamedModule(run.source.without_values(), CheckpointFiles(checkpoint.weights))
    try:
        if options.calibration.data is not None:
            return _by_data(run, streamed)
        streamed.files = _copied(run)
        return prune_streamed(
            streamed,
            options.pattern,
            options.selection,
            method=options.method.name or DEFAULT_WITHOUT_DATA,
            step=run.progress.step,
        )
    finally:
        streamed.close()


def _by_data(run: Run, streamed: StreamedModule) -> PruneResult:
    """What is done stays in the copy: after a kill the same command goes on behind it."""
    from twofour.pipeline.torch_calibrating import calls_of
    from twofour.pruning.torch_finished import FinishedUnits
    from twofour.pruning.torch_pruning import work_of
    from twofour.pruning.torch_streaming import prune_streamed_calibrated

    options, stages = run.options, run.file(STAGES)
    work = work_of(options.pattern, options.method)
    data = _opened(run, streamed.module)
    facts = (options.pattern, options.selection, options.method, options.calibration)
    parts = (*map(repr, (*facts, versions("torch", "transformers"))), run.source.key(), data.key())
    finished = FinishedUnits(run.file(_UNITS_DONE), key_of(*parts))
    streamed.files = _gone_on_with(run, streamed.files, finished)
    work = replace(work, progress=run.progress.step, spill_folder=stages)
    calls = calls_of(streamed.module, data)
    result = prune_streamed_calibrated(streamed, calls, work, options.selection, finished)
    finished.clear()
    return result


def _gone_on_with(run: Run, dense: CheckpointFiles, finished: FinishedUnits) -> CheckpointFiles:
    """The copy as a killed run left it, or a new one."""
    from twofour.pruning.torch_checkpoint import CheckpointFiles

    copies = _copies(run)
    if not finished.is_there or not all(file.is_file() for file in copies):
        files = _copied(run)
        finished.start()
        return files
    files = CheckpointFiles(copies, writable=True)
    for key in finished.begun:
        files.write(key, dense.read(key))
    return files


def _opened(run: Run, module: nn.Module) -> CalibrationData:
    from twofour.pipeline.sources.calibration.models import loaded_inputs
    from twofour.pipeline.sources.calibration.open import open_calibration
    from twofour.pipeline.sources.hf_io import with_made_up_inputs

    assert isinstance(run.source, HfSource)
    options = run.options
    loaded = with_made_up_inputs(module, options.seed)
    inputs = loaded_inputs(loaded, run.source.text, run.source.folder)
    data = open_calibration(options.calibration, inputs, seed=options.seed, folder=run.file(STAGES))
    run.calibration_files[:] = data.watched
    return data
