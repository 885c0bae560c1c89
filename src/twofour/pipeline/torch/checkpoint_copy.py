"""A checkpoint pruned in a copy of its folder, one weight at a time.

The copy has the same files, names, order and types, and only the bytes of the pruned weights
differ. The largest weight has to fit in memory, and with data the activations of some samples;
without data nothing is traced.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.engines.machine import available_bytes
from twofour.errors import BadInputError
from twofour.graph.stored import Store, read_stores
from twofour.inputs.fits import Array
from twofour.pipeline.checks import prune_stage
from twofour.pipeline.folder import CHECKPOINT, own_folder
from twofour.pipeline.stages import Run, Stage
from twofour.pipeline.torch.graph import GRAPH
from twofour.pipeline.torch.model import TorchModel
from twofour.pipeline.torch.pruning import prune_copied
from twofour.pruning.arrays import overwrite, prune_arrays
from twofour.pruning.methods import DEFAULT_WITHOUT_DATA
from twofour.records.weights import PruneResult
from twofour.sources.checkpoint import check_weight_file, read_checkpoint
from twofour.sources.hf import HfSource, named_store
from twofour.store import writing
from twofour.words import keys_listed

if TYPE_CHECKING:
    from torch import nn


_SHARE_OF_MEMORY = 0.5
"""Checkpoints that take more of the free memory are pruned in a copy."""


def is_streamed(run: Run) -> bool:
    """Whether the checkpoint is pruned in a copy: as asked, else by its size.

    Raises BadInputError where it is asked for and the source is no checkpoint of safetensors.
    """
    wanted = run.options.stream
    text = run.source.text
    if wanted is False:
        return False
    files: tuple[Path, ...] = ()
    if isinstance(run.source, HfSource):
        files = read_checkpoint(run.source.folder).weights
    if not files or any(file.suffix != ".safetensors" for file in files):
        if wanted:
            why_not = "has no .safetensors files" if files else "is no checkpoint folder"
            raise BadInputError(f"--stream: {text} {why_not}", hint="leave --stream out")
        return False
    size = sum(file.stat().st_size for file in files)
    if not wanted and size <= _SHARE_OF_MEMORY * available_bytes():
        return False
    run.progress.note(f"{text} ({size / 1e9:.1f} GB) is pruned in a copy")
    return True


def prune_checkpoint(run: Run) -> Stage[PruneResult]:
    """checkpoint/, a copy of the folder with pruned weights, and prune.json."""
    prune = _prune_copy
    if run.options.calibration.data is not None:
        _torch_model(run).graph(run)
        prune = _prune_copy_by_data

    def copied() -> tuple[str, ...]:
        files = sorted(file for file in run.file(CHECKPOINT).rglob("*") if file.is_file())
        return tuple(file.relative_to(run.path).as_posix() for file in files)

    return prune_stage(run, partial(prune, run), copied, (), " in a copy")


def checkpoint_files(run: Run) -> tuple[str, ...]:
    """Names of the files of the copy."""
    files = sorted(run.file(CHECKPOINT).glob("*.safetensors"))
    return tuple(f"{CHECKPOINT}/{file.name}" for file in files)


def _source(run: Run) -> HfSource:
    assert isinstance(run.source, HfSource), "only a checkpoint is pruned in a copy"
    return run.source


def _new_copy(run: Run) -> Store:
    """A copy of the whole folder, links followed, without a run folder in it; its arrays by key."""
    checkpoint = read_checkpoint(_source(run).folder)
    target = own_folder(run.file(CHECKPOINT))
    own = run.path.resolve()

    def without_own(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder, name).resolve() == own]

    with writing(target):
        try:
            shutil.copytree(checkpoint.folder, target, dirs_exist_ok=True, ignore=without_own)
        except shutil.Error as error:  # a list of what went wrong, file by file
            source, copy, why = error.args[0][0]
            raise BadInputError(
                f"cannot copy {source} to {copy}: {why}",
                hint="free some space or choose another folder with --out",
            ) from error
    within = checkpoint.model_folder.relative_to(checkpoint.folder)
    return read_stores(target / within / file.name for file in checkpoint.weights)


def _prune_copy(run: Run) -> PruneResult:
    """Prune the copy, without data one weight after the other; it is the only one in memory."""
    from twofour.pruning.torch import plan_stored

    checkpoint = read_checkpoint(_source(run).folder)
    options = run.options
    for file in checkpoint.weights:
        check_weight_file(file)
    module = _source(run).structure().module
    store = _named(run, module, read_stores(checkpoint.weights))
    plan = plan_stored(module, store, options.pattern, options.selection)
    files = _new_copy(run)
    copies = _named(run, module, files)

    def write(row: int, values: Array) -> None:
        copy = copies[plan.choices[row][0].weight or ""]
        with writing(copy.file):
            overwrite(copy.file, copy.offset, values)

    method = options.method.name or DEFAULT_WITHOUT_DATA
    pruned = prune_arrays(plan, method, write, step=run.progress.step)
    return _with_keys(pruned, copies, files)


def _prune_copy_by_data(run: Run) -> PruneResult:
    """Prune the copy by the traced graph, whose calibration runs the user's own files."""
    traced = run.models.open(run.file(GRAPH.graph))
    graph, calibrated = _torch_model(run).calibrated(run, traced)
    files = _new_copy(run)
    copies = _named(run, _source(run).structure().module, files)
    return _with_keys(prune_copied(graph, copies, run.options, calibrated), copies, files)


def _torch_model(run: Run) -> TorchModel:
    assert isinstance(run.model, TorchModel), "checkpoints are torch models"
    return run.model


def _named(run: Run, module: nn.Module, files: Store) -> Store:
    """The arrays by the module's names; raises BadInputError where some are missing."""
    store, missing = named_store(module, files)
    if missing:
        raise BadInputError(
            f"{run.source.text} has no weights for {len(missing)} parameters of "
            f"{type(module).__name__}: {keys_listed(missing)}",
            hint="config.json and the weights must belong together",
        )
    return store


def _with_keys(result: PruneResult, copies: Store, files: Store) -> PruneResult:
    """The result with weights named by their keys in the files, which are validated."""
    # model.layers.0.mlp.up_proj.weight of the module may be layers.0.mlp.up_proj.weight in the file
    keys = {(stored.file, stored.offset): key for key, stored in files.items()}
    rows = []
    for row in result.weights:
        key = None
        place = copies.get(row.weight.weight or "")
        if place is not None:
            key = keys[place.file, place.offset]
        rows.append(replace(row, weight=replace(row.weight, weight=key)))
    return replace(result, weights=tuple(rows))
