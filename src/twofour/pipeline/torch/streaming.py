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
from twofour.pipeline.checks import refuse_nothing_pruned
from twofour.pipeline.folder import CHECKPOINT, PRUNE, STAGES, own_folder
from twofour.pipeline.stages import Run, Stage, StageOutput
from twofour.pruning.methods import DEFAULT_WITHOUT_DATA
from twofour.records.weights import PruneResult
from twofour.sources.checkpoint import check_weight_file, read_checkpoint
from twofour.sources.hf import HfSource
from twofour.store import write_error

if TYPE_CHECKING:
    from twofour.calibrate.finished_steps import FinishedSteps
    from twofour.pruning.torch.module import CheckpointFiles, StreamedModule
    from twofour.sources.checkpoint import Checkpoint

_FINISHED = "streamed"
"""Folder that says what of the copy is pruned, while that goes on."""
_COPIED = ("the copy is whole",)
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
        run.progress.note(
            f"{run.source.text} ({size / 1e9:.1f} GB) is pruned in a copy of its files, block by "
            "block"
        )
        return True
    return False


def prune(run: Run) -> Stage[PruneResult]:
    """checkpoint/, a copy of the folder with pruned weights, and prune.json."""

    def work() -> StageOutput[PruneResult]:
        result = replace(_pruned(run), source=run.source.text)
        refuse_nothing_pruned(result)
        return result, tuple(f"{CHECKPOINT}/{file.name}" for file in _copies(run))

    return Stage(
        name="prune",
        title=f"prune to {run.options.pattern}, block by block",
        record=PRUNE,
        kind=PruneResult,
        work=work,
        watched=lambda: run.calibration_files,
        depends_on=(
            *("streamed", *run.options.pruning),
            *(run.key_of(run.source), run.calibration_key()),
        ),
        packages=("torch", "transformers"),
    )


def weights(run: Run) -> tuple[str, ...]:
    """Names of the files of the copy."""
    files = sorted(run.file(CHECKPOINT).glob("*.safetensors"))
    return tuple(f"{CHECKPOINT}/{file.name}" for file in files)


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
    from twofour.pruning.torch.module import CheckpointFiles

    shutil.rmtree(run.file(STAGES) / _FINISHED, ignore_errors=True)
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
    from twofour.pruning.torch.module import CheckpointFiles, StreamedModule, prune_streamed

    assert isinstance(run.source, HfSource)
    options, checkpoint = run.options, _checkpoint(run)
    for file in checkpoint.weights:
        check_weight_file(file)
    streamed = StreamedModule(run.source.without_values(), CheckpointFiles(checkpoint.weights))
    try:
        if options.calibration.data is not None:
            return _by_data(run, streamed)
        streamed.target = _copied(run)
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
    """What is done stays in the copy: after a kill the same command continues behind it."""
    from twofour.calibrate.torch.block_loop import prune_streamed_calibrated
    from twofour.pipeline.torch.weights import calls_of, task_of_run
    from twofour.sources.calibration.kinds import calibration_record, loaded_inputs
    from twofour.sources.hf import with_made_up_inputs

    assert isinstance(run.source, HfSource)
    loaded = with_made_up_inputs(streamed.module, run.options.seed)
    data = run.open_calibration(loaded_inputs(loaded, run.source.text, run.source.folder))
    task, finished = task_of_run(run, data, with_weights=False)
    streamed.target = _gone_on_with(run, finished)
    calls, about = calls_of(streamed.module, data), calibration_record(data)
    result = prune_streamed_calibrated(streamed, calls, about, task, run.options.selection)
    finished.clear()
    return result


def _gone_on_with(run: Run, finished: FinishedSteps) -> CheckpointFiles:
    """The copy as a killed run left it, or a new one."""
    from twofour.pruning.torch.module import CheckpointFiles

    copies = _copies(run)
    if finished.load(_COPIED) is not None and all(file.is_file() for file in copies):
        return CheckpointFiles(copies, writable=True)
    files = _copied(run)
    finished.save(_COPIED, {})
    return files
