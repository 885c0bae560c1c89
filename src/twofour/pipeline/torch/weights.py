"""Weights of torch models: saved, read back into a module, read from checkpoints.

safetensors refuses tensors that share memory, so a tied weight is written under one of its keys
and the header's metadata maps the other keys to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.errors import BadInputError
from twofour.inputs.samples import CalibrationData
from twofour.pipeline.folder import STAGES
from twofour.pipeline.stages import versions
from twofour.records.weights import Calibration, LoadedWeights, PruneResult, Selection
from twofour.sources.calibration.kinds import (
    calibration_record,
    loaded_inputs,
    module_inputs,
)
from twofour.sources.source import key_of
from twofour.words import keys_listed

if TYPE_CHECKING:
    from torch import Tensor, nn

    from twofour.calibrate.torch.block_loop import CalibrationTask
    from twofour.pipeline.stages import Run
    from twofour.pruning.torch.calls import Call
    from twofour.sources.source import LoadedModule

_ANOTHER_MODEL = (
    "it must be the model that was pruned, in the type it had then; a source that gives another "
    "one needs another --out"
)


def save_tensors(state: Mapping[str, Tensor], target: Path, *, first: Collection[str] = ()) -> None:
    """Write tensors by key; of keys that share a tensor, one of `first` is written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    written: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for key in sorted(state, key=lambda k: (k not in first, k)):
        same = written.setdefault(_place(state[key]), key)
        if same != key:
            aliases[key] = same
    tensors = {key: state[key] for key in sorted(written.values())}
    try:
        save_file(_apart(tensors), str(target), metadata=aliases or None)
    except SafetensorError as error:  # a full disk, among others
        raise OSError(f"safetensors: {str(error).splitlines()[0]}") from error
    _put_in_order(target)


def _put_in_order(file: Path) -> None:
    """The keys of the header's metadata by name: the library writes them as its hashes fall.

    Format: docs of safetensors, "Format": 8 bytes of length, the header in JSON, blanks behind it.
    """
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

    Weights that the module computes (parametrizations, weight norm, masks) become plain ones first:
    loading into their parts would leave the dense weight in force. Raises BadInputError when keys,
    shapes, types or ties do not fit.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    from twofour.pruning.torch.layers import make_permanent

    permanent = make_permanent(module)
    state = {k: v for k, v in module.state_dict().items() if isinstance(v, torch.Tensor)}
    try:
        with safe_open(str(path), framework="pt") as file:
            saved_as = _saved_as(state, set(file.keys()), file.metadata() or {}, path)
            for key, name in saved_as.items():  # all is checked before anything is changed
                _check_fits(state[key], file.get_tensor(name), key, path)
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
    """Under which key of the file each tensor of the module lies."""
    places = {_place(tensor): key for key, tensor in state.items() if key in saved}
    found: dict[str, str] = {}
    missing: list[str] = []
    for key, tensor in state.items():
        same = places.get(_place(tensor))
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
    """One tensor of the module cannot hold two that differ."""
    import torch

    first: dict[tuple[object, ...], str] = {}
    for key, name in saved_as.items():
        other = first.setdefault(_place(state[key]), key)
        if saved_as[other] != name and not torch.equal(read(saved_as[other]), read(name)):
            raise BadInputError(
                f"{path}: {other} and {key} differ, and are one tensor in the model",
                hint="untie them in the model before you load the weights",
            )


def read_checkpoint(path: Path) -> dict[str, Tensor]:
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
        raise BadInputError(f"{path} holds no tensors by name", hint="save model.state_dict()")
    return tensors


def _check_fits(target: Tensor, saved: Tensor, key: str, path: Path) -> None:
    if (target.shape, target.dtype) != (saved.shape, saved.dtype):
        raise BadInputError(
            f"{path}: {key} is {list(saved.shape)} {saved.dtype}, the model has "
            f"{list(target.shape)} {target.dtype}",
            hint=_ANOTHER_MODEL,
        )


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same view of the same memory."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and copied where two different views still share memory."""
    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        whole = tensor.is_contiguous() and memory not in seen
        apart[key] = tensor if whole else tensor.clone().contiguous()
        seen.add(memory)
    return apart


def calibration_of_run(
    run: Run, loaded: LoadedModule, reference: Callable[[], nn.Module] | None
) -> tuple[Iterator[Call], Calibration, CalibrationTask]:
    """The run's calibration data as calls of its module, what they are, and what to do with them.

    `reference` loads the dense model, where there is another one.
    """
    data = run.open_calibration(loaded_inputs(loaded, run.source.text, run.described_in))
    task = task_of_run(run, data, refitted_to_key(run))
    if reference is not None and run.options.refits_a_mask:
        task = replace(task, reference=reference())
    return calls_of(loaded.module, data), calibration_record(data), task


def prune_by_batches(
    module: nn.Module, batches: tuple[object, int], task: CalibrationTask, selection: Selection
) -> PruneResult:
    """Prune a module in place with batches of the caller, of which so many samples are used.

    Raises BadInputError where they do not fit the module's forward.
    """
    from twofour.calibrate.torch.block_loop import prune_calibrated
    from twofour.pruning.torch.layers import find_weights
    from twofour.sources.calibration.loaders import calibration_from_value

    find_weights(module)  # what has none that could be told is refused before the data are read
    value, samples = batches
    data = calibration_from_value(value, module_inputs(module), samples=samples)
    about = calibration_record(data)
    return prune_calibrated(module, calls_of(module, data), about, task, selection)


def task_of_run(
    run: Run, data: CalibrationData, *more: str, with_weights: bool = True
) -> CalibrationTask:
    """The options' task, with the finished steps of a run of the same data, model and `more`.

    After a kill the same command continues behind these steps, which the caller clears.
    `with_weights`: they contain the weights too.
    """
    from twofour.calibrate.finished_steps import FinishedSteps
    from twofour.calibrate.torch.block_loop import calibration_task

    options, folder = run.options, run.file(STAGES)
    facts = (options.pattern, options.selection, options.method, options.calibration)
    parts = (*map(repr, (*facts, versions("torch", "transformers"))), run.source.key(), data.key())
    finished = FinishedSteps(
        folder=folder / ("calibration" if with_weights else "streamed"),
        key=key_of(*parts, *more),
        with_weights=with_weights,
    )
    task = calibration_task(options.pattern, options.method)
    return replace(task, progress=run.progress.step, finished=finished, spill_folder=folder)


def refitted_to_key(run: Run) -> str:
    """Key of the dense reference, where the weights depend on it."""
    return run.dense_source.key() if run.options.refits_a_mask else ""


def calls_of(module: nn.Module, data: CalibrationData) -> Iterator[Call]:
    """The data's batches in forward's order, read as they are asked for."""
    from twofour.sources.calibration.loaders import torch_call

    return (torch_call(module, batch) for batch in data.batches())
