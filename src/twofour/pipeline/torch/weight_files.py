"""Weights of a torch model in files: saved, read back, or pruned in a copy of a large checkpoint.

safetensors refuses tensors that share memory, so a tied weight is written under one of its keys and
the header's metadata maps the other keys to it. `twofour prune` prunes a checkpoint larger than
memory block by block in a copy of its folder: the copy has the same files, names, order and types,
and only the bytes of the pruned weights differ.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from twofour.errors import BadInputError
from twofour.inputs.samples import CalibrationData
from twofour.pipeline.checks import refuse_nothing_pruned
from twofour.pipeline.folder import CHECKPOINT, PRUNE, STAGES, own_folder
from twofour.pipeline.stages import Run, Stage, StageOutput, versions
from twofour.pruning.methods import DEFAULT_WITHOUT_DATA
from twofour.records.weights import Calibration, LoadedWeights, PruneResult, Selection
from twofour.sources.calibration.kinds import calibration_record, loaded_inputs, module_inputs
from twofour.sources.checkpoint import check_weight_file, read_checkpoint
from twofour.sources.hf import HfSource
from twofour.sources.source import key_of
from twofour.store import writing
from twofour.words import keys_listed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from twofour.calibrate.torch.block_loop import CalibrationTask
    from twofour.pruning.torch.calls import Call
    from twofour.pruning.torch.module import CheckpointFiles, StreamedModule
    from twofour.sources.checkpoint import Checkpoint
    from twofour.sources.source import LoadedModule

_COPIED = ("the copy is whole",)
_SHARE_OF_MEMORY = 0.5
"""Checkpoints that take more of the free memory are streamed. In memory, float16 weights take twice
their size on disk, because they become float32."""
_ANOTHER_MODEL = (
    "load them into the model that was pruned, in the type it had then; for another model name "
    "another --out"
)


def save_tensors(state: Mapping[str, Tensor], target: Path, *, first: Collection[str] = ()) -> None:
    """Write tensors by key; of keys that share a tensor, one of `first` is written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    written: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for key in sorted(state, key=lambda k: (k not in first, k)):
        same = written.setdefault(_memory_of(state[key]), key)
        if same != key:
            aliases[key] = same
    tensors = {key: state[key] for key in sorted(written.values())}
    try:
        save_file(_separate(tensors), str(target), metadata=aliases or None)
    except SafetensorError as error:  # a full disk, among others
        raise OSError(f"safetensors: {str(error).splitlines()[0]}") from error
    _sort_metadata(target)


def _sort_metadata(file: Path) -> None:
    """Sort the keys of the header's metadata, which the library writes in the order of its hashes.

    Format: docs of safetensors, "Format": 8 bytes of length, the header in JSON, blanks behind it.
    """
    # Example: 58 00.. {"__metadata__":{"b":"w","a":"w"},"w":{...}} becomes the same with "a" first;
    # the header keeps its length, so that the tensors behind it stay where they are.
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        if len(header.get("__metadata__", ())) < 2:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size, "the same texts, written as shortly"
        stream.seek(8)
        stream.write(text.ljust(size))


def load_weights(module: nn.Module, path: Path) -> LoadedWeights:
    """Fill every parameter and buffer of a module in place, or none of them.

    Weights that the module computes (parametrizations, weight norm, masks) become plain ones first,
    because it would compute the dense ones again. Raises BadInputError when keys, shapes, types or
    ties do not fit.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    from twofour.pruning.torch.module_layers import make_permanent

    permanent = make_permanent(module)
    state = {k: v for k, v in module.state_dict().items() if isinstance(v, torch.Tensor)}
    try:
        with safe_open(str(path), framework="pt") as file:
            saved_as = _saved_as(state, set(file.keys()), file.metadata() or {}, path)
            for key, name in saved_as.items():  # all is checked before anything is changed
                found, wanted = (
                    f"{list(t.shape)} {t.dtype}" for t in (file.get_tensor(name), state[key])
                )
                if found != wanted:
                    what = f"{path}: {key} is {found}, the model has {wanted}"
                    raise BadInputError(what, hint=_ANOTHER_MODEL)
            _check_ties(state, saved_as, file.get_tensor, path)
            with torch.no_grad():
                for key, name in saved_as.items():
                    state[key].copy_(file.get_tensor(name))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise BadInputError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    return LoadedWeights(
        path=str(path),
        keys=tuple(state),
        tied={key: name for key, name in saved_as.items() if key != name},
        made_permanent=permanent,
    )


def _saved_as(
    state: Mapping[str, Tensor], saved: set[str], aliases: Mapping[str, str], path: Path
) -> dict[str, str]:
    """The key in the file of each tensor of the module."""
    places = {_memory_of(tensor): key for key, tensor in state.items() if key in saved}
    found: dict[str, str] = {}
    missing: list[str] = []
    for key, tensor in state.items():
        same = places.get(_memory_of(tensor))
        name = key if key in saved else aliases.get(key, same)
        if name is None or name not in saved:
            missing.append(key)
        else:
            found[key] = name
    unexpected = sorted(saved - {*found.values()})
    if missing or unexpected:
        words = (("missing", missing), ("not in the model", unexpected))
        said = "; ".join(f"{word}: {keys_listed(keys)}" for word, keys in words if keys)
        raise BadInputError(f"{path} does not fit the model: {said}", hint=_ANOTHER_MODEL)
    return found


def _check_ties(
    state: Mapping[str, Tensor],
    saved_as: Mapping[str, str],
    read: Callable[[str], Tensor],
    path: Path,
) -> None:
    """Raise BadInputError where the file has two values for one tensor of the module."""
    import torch

    first: dict[tuple[object, ...], str] = {}
    for key, name in saved_as.items():
        other = first.setdefault(_memory_of(state[key]), key)
        if saved_as[other] != name and not torch.equal(read(saved_as[other]), read(name)):
            raise BadInputError(
                f"{path}: {other} and {key} differ, but are one tensor in the model",
                hint="untie them in the model before you load the weights",
            )


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch checkpoint (.pt, .pth, .bin), read without running its code.

    A state_dict, or a dict that has one under "state_dict" or "model". Raises BadInputError for a
    damaged file, a pickle that wants to call something, and a file without tensors.
    """
    import torch

    from twofour.sources.checkpoint import load_pickle

    content = load_pickle(path)
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping):
        content = {}
    tensors = {str(k): v for k, v in content.items() if isinstance(v, torch.Tensor)}
    if not tensors:
        raise BadInputError(f"{path} contains no named tensors", hint="save model.state_dict()")
    return tensors


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    """A value that is equal for tensors that are the same view of the same memory."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors made contiguous, and copied where two different views still share memory."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        whole = tensor.is_contiguous() and memory not in seen
        apart[key] = tensor if whole else tensor.clone().contiguous()
        seen.add(memory)
    return apart


def calibration_of_run(
    run: Run,
    loaded: LoadedModule,
    folder: Path | None,
    load_dense: Callable[[], nn.Module] | None = None,
    *,
    with_weights: bool = True,
) -> tuple[Iterator[Call], Calibration, CalibrationTask]:
    """The run's calibration data as calls of its module, what they are, and what to do with them.

    The `folder` may describe a tokenizer; `load_dense` loads the dense model, where that is not the
    pruned one. After a kill the same command continues behind the task's finished steps, which
    contain the pruned weights too (`with_weights`), and which the caller clears.
    """
    from twofour.calibrate.finished_steps import FinishedSteps
    from twofour.calibrate.torch.block_loop import calibration_task

    options, stages = run.options, run.file(STAGES)
    data = run.open_calibration(loaded_inputs(loaded, run.source.text, folder))
    facts = (*options.pruning, versions("torch", "transformers"))
    keys = (run.source.key(), data.key(), run.refit_key)
    finished = FinishedSteps(
        folder=stages / ("calibration" if with_weights else "streamed"),
        key=key_of(*map(repr, facts), *keys),
        with_weights=with_weights,
    )
    task = replace(
        calibration_task(options.pattern, options.method),
        progress=run.progress.step,
        finished=finished,
        spill_folder=stages,
    )
    if load_dense is not None and options.refits_a_mask:
        task = replace(task, dense_model=load_dense())
    return calls_of(loaded.module, data), calibration_record(data), task


def prune_by_batches(
    module: nn.Module, batches: tuple[object, int], task: CalibrationTask, selection: Selection
) -> PruneResult:
    """Prune a module in place with the caller's batches, up to a number of samples.

    Raises BadInputError where they do not fit the module's forward.
    """
    from twofour.calibrate.torch.block_loop import prune_calibrated
    from twofour.pruning.torch.module_layers import find_module_weights
    from twofour.sources.calibration.loaders import calibration_from_value

    find_module_weights(module)  # a module without weights is refused before the data are read
    value, samples = batches
    data = calibration_from_value(value, module_inputs(module), samples=samples)
    record = calibration_record(data)
    return prune_calibrated(module, calls_of(module, data), record, task, selection)


def calls_of(module: nn.Module, data: CalibrationData) -> Iterator[Call]:
    """The data's batches as calls of the module, read when they are needed."""
    from twofour.sources.calibration.loaders import torch_call

    return (torch_call(module, batch) for batch in data.batches())


# --- a checkpoint larger than memory --------------------------------------------------------------


def is_streamed(run: Run) -> bool:
    """Whether the checkpoint goes through memory block by block: as asked, else by its size.

    Raises BadInputError where it is asked for and the source is no checkpoint of safetensors.
    """
    wanted, text = run.options.stream, run.source.text
    if wanted is False:
        return False
    files = _checkpoint(run).weights if isinstance(run.source, HfSource) else ()
    if not files or any(file.suffix != ".safetensors" for file in files):
        if wanted:
            why_not = "has no .safetensors files" if files else "is no checkpoint folder"
            raise BadInputError(f"--stream: {text} {why_not}", hint="leave --stream out")
        return False
    size = sum(file.stat().st_size for file in files)
    if not wanted and size <= _SHARE_OF_MEMORY * psutil.virtual_memory().available:
        return False
    run.progress.note(f"{text} ({size / 1e9:.1f} GB) is pruned block by block in a copy")
    return True


def prune_checkpoint(run: Run) -> Stage[PruneResult]:
    """checkpoint/, a copy of the folder with pruned weights, and prune.json."""

    def work() -> StageOutput[PruneResult]:
        result = replace(_prune_copy(run), source=run.source.text)
        refuse_nothing_pruned(result)
        found = sorted(file for file in run.file(CHECKPOINT).rglob("*") if file.is_file())
        return result, tuple(file.relative_to(run.path).as_posix() for file in found)

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


def checkpoint_files(run: Run) -> tuple[str, ...]:
    """Names of the files of the copy."""
    files = sorted(run.file(CHECKPOINT).glob("*.safetensors"))
    return tuple(f"{CHECKPOINT}/{file.name}" for file in files)


def _checkpoint(run: Run) -> Checkpoint:
    assert isinstance(run.source, HfSource)
    return read_checkpoint(run.source.folder)


def _copies(run: Run) -> list[Path]:
    """Paths of the files with weights in the copy."""
    checkpoint, target = _checkpoint(run), run.file(CHECKPOINT)
    within = checkpoint.model_folder.relative_to(checkpoint.folder)
    return [target / within / file.name for file in checkpoint.weights]


def _new_copy(run: Run) -> CheckpointFiles:
    """A copy of the whole folder, links followed, without a run folder in it."""
    from twofour.pruning.torch.module import CheckpointFiles

    shutil.rmtree(run.file(STAGES) / "streamed", ignore_errors=True)
    checkpoint, target = _checkpoint(run), own_folder(run.file(CHECKPOINT))
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
    return CheckpointFiles(_copies(run), writable=True)


def _prune_copy(run: Run) -> PruneResult:
    """Prune the copy; the module has its types from the user's files, until they are copied."""
    from twofour.pruning.torch.module import CheckpointFiles, StreamedModule, prune_streamed

    assert isinstance(run.source, HfSource)
    options, checkpoint = run.options, _checkpoint(run)
    for file in checkpoint.weights:
        check_weight_file(file)
    streamed = StreamedModule(run.source.without_values(), CheckpointFiles(checkpoint.weights))
    try:
        if options.calibration.data is not None:
            return _prune_copy_by_data(run, streamed)
        streamed.target = _new_copy(run)
        return prune_streamed(
            streamed,
            options.pattern,
            options.selection,
            method=options.method.name or DEFAULT_WITHOUT_DATA,
            step=run.progress.step,
        )
    finally:
        streamed.close()


def _prune_copy_by_data(run: Run, streamed: StreamedModule) -> PruneResult:
    """Prune with calibration data; after a kill the same command continues in the copy."""
    from twofour.calibrate.torch.block_loop import prune_streamed_calibrated
    from twofour.pruning.torch.module import CheckpointFiles
    from twofour.sources.hf import with_made_up_inputs

    assert isinstance(run.source, HfSource)
    loaded = with_made_up_inputs(streamed.module, run.options.seed)
    calls, record, task = calibration_of_run(run, loaded, run.source.folder, with_weights=False)
    assert task.finished is not None, "a run keeps its finished steps"
    copies = _copies(run)
    if task.finished.load(_COPIED) is not None and all(file.is_file() for file in copies):
        streamed.target = CheckpointFiles(copies, writable=True)
    else:
        streamed.target = _new_copy(run)
        task.finished.save(_COPIED, {})
    result = prune_streamed_calibrated(streamed, calls, record, task, run.options.selection)
    task.finished.clear()
    return result
