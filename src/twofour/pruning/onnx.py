"""Prune the weights of an ONNX file into a new file; everything else in it comes out unchanged.

External data stays external. Files are copied and the pruned weights rewritten in place in the
copies, one at a time, so memory holds the graph and one weight.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from twofour.errors import BadInputError, naming
from twofour.graph.files import (
    SEPARATE_INITIALIZERS,
    Array,
    dtype_name,
    external_data,
    external_tensors,
    fill_in,
    is_groupable,
    numpy_dtype,
    read_tensor,
    storage_key,
    write_tensor,
)
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import scopes
from twofour.graph.weights import GraphWeights, find_weights
from twofour.pattern import as_bits, count_zeros
from twofour.pruning.methods import InPlace, left_to, without_data
from twofour.pruning.methods.magnitude import Outcome
from twofour.pruning.selection import Choice, axis_conflict, choose
from twofour.records.weights import (
    Calibration,
    Pattern,
    PrunedWeight,
    PruneResult,
    Selection,
    Solution,
    Weight,
    shared,
)
from twofour.store import atomic_file

_DEFAULT_SELECTION = Selection()
_Key = tuple[object, ...]
_TILE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One stored array and the first weight that asks for it to be pruned, or for its zeros."""

    weight: Weight
    tensor: onnx.TensorProto
    axis: int | None
    """None: only count its zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """New values for weights and biases of a file, found with calibration data."""

    calibration: Calibration
    rows: Mapping[int, Solution]
    """Row of the graph's weights -> its solution."""
    arrays: Mapping[int, Path]
    """Row -> a file with the array to be stored; rows without one are pruned here."""
    biases: Mapping[str, Path]
    """Name of a constant in the main graph -> a file with its new values."""
    constants: Mapping[tuple[int, int], onnx.TensorProto]
    """(node of the main graph, input of it): a constant of a new name that it is to read."""


_NOTHING = Outcome(kept_magnitude=None, zeros=0, zeros_before=0)


def prune_onnx(
    opened: OpenedModel,
    target: Path,
    pattern: Pattern,
    selection: Selection = _DEFAULT_SELECTION,
    *,
    method: str = "magnitude",
    calibrated: Calibrated | None = None,
) -> PruneResult:
    """Write the model to `target` with the selected weights pruned to N:M.

    With `calibrated`, weights get the values that were found with calibration data, for the same
    pattern and selection, and `method` prunes only what is left.

    Inline weights stay inline; external ones lie in `<target>.data` (`<target>.0.data`, ... where
    the model has several files). Raises BadInputError for an unknown method, a damaged graph, a
    target that would overwrite the model, NaN or infinity in a weight, and an array that two
    nodes need pruned along different axes; nothing is left behind then.
    """
    prune = without_data(left_to(method) if calibrated else method)
    source, model = opened.path, opened.copy()
    copies = data_copies(opened, target)
    found = find_weights(model, pattern, path=source)
    chosen, keys, jobs = _jobs(found, source, pattern, selection)
    arrays = {} if calibrated is None else calibrated.arrays
    solved = {key: file for row, file in arrays.items() if (key := keys[row]) is not None}
    with written(opened, model, target, copies) as data, naming(source):
        outcomes = {
            key: _run(job, source, data, pattern, prune)
            if key not in solved
            else _replace(job, source, data, solved[key])
            for key, job in jobs.items()
        }
        if calibrated is not None:
            _correct(model, source, data, calibrated)
    return PruneResult(
        source=str(source),
        pattern=pattern,
        method=method,
        selection=selection,
        weights=tuple(_rows(chosen, keys, outcomes, method, calibrated)),
        not_covered=found.not_covered,
        calibration=None if calibrated is None else calibrated.calibration,
    )


def choices_of(opened: OpenedModel, pattern: Pattern, selection: Selection) -> tuple[Choice, ...]:
    """The choices that `prune_onnx` will make; raises the same errors."""
    return _jobs(opened.weights(pattern), opened.path, pattern, selection)[0]


def copy_onnx(opened: OpenedModel, target: Path, model: onnx.ModelProto | None = None) -> None:
    """Copy a model as it is, external data included, to files named as `prune_onnx` does.

    With `model`, another graph of the same stored values, that one. Raises BadInputError for a
    target that would overwrite the model.
    """
    copies = data_copies(opened, target)
    with written(opened, model or opened.copy(), target, copies):
        pass


@contextmanager
def written(
    opened: OpenedModel, model: onnx.ModelProto, target: Path, copies: Mapping[Path, Path]
) -> Iterator[dict[Path, Path]]:
    """Copies, to change, of the model's file and its data files; `model` may be changed too.

    It is written only then: copies keep every byte, and take no memory.
    """
    with ExitStack() as stack:
        # left in reverse: data files are in place before the model that names them
        temporary = stack.enter_context(atomic_file(target))
        data = {file: stack.enter_context(atomic_file(copy)) for file, copy in copies.items()}
        data[opened.path] = temporary
        for file, copy in data.items():
            shutil.copyfile(file, copy)
        yield data
        for tensor in external_tensors(model):
            file = external_data(tensor, opened.path).file
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = copies[file].name
        if model != opened.proto:
            fill_in(model, temporary)
            temporary.write_bytes(model.SerializeToString())


def data_copies(opened: OpenedModel, target: Path) -> dict[Path, Path]:
    """Each data file of the model, and the file beside the target that it is copied to."""
    source, files = opened.path, opened.data_files
    names = [f"{target.name}.data"]
    if len(files) > 1:
        names = [f"{target.name}.{number}.data" for number in range(len(files))]
    copies = {file: target.parent / name for file, name in zip(files, names, strict=False)}
    for written in (target, *copies.values()):
        for read in (source, *files):
            is_same = written.exists() and written.samefile(read)  # a hard link
            if is_same or written.resolve() == read.resolve():
                raise BadInputError(
                    f"writing {written} would overwrite {read}, which is being read",
                    hint="choose another name or folder for the pruned model",
                )
    return copies


def _jobs(
    found: GraphWeights, source: Path, pattern: Pattern, selection: Selection
) -> tuple[tuple[Choice, ...], tuple[_Key | None, ...], dict[_Key, _Job]]:
    """The choices, the array of each, and what to do with an array, which may be used twice."""
    with naming(source):
        chosen = choose(found.weights, pattern, selection)
        keys = tuple(None if tensor is None else _key(tensor, source) for tensor in found.tensors)
        jobs: dict[_Key, _Job] = {}
        for (weight, pruned, _), tensor, key in zip(chosen, found.tensors, keys, strict=True):
            if tensor is None or key is None:
                continue
            job = _Job(weight=weight, tensor=tensor, axis=weight.axis if pruned else None)
            other = jobs.get(key)
            if other is None or other.axis is None:
                jobs[key] = job
            elif job.axis is not None and (job.axis, weight.shape, weight.dtype) != (
                other.axis,
                other.weight.shape,
                other.weight.dtype,
            ):
                raise axis_conflict(other.weight, weight)
        return chosen, keys, jobs


def _key(tensor: onnx.TensorProto, source: Path) -> _Key:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return storage_key(tensor)
    place = external_data(tensor, source)
    return ("external", place.file, place.offset)


def _run(
    job: _Job, source: Path, data: Mapping[Path, Path], pattern: Pattern, prune: InPlace
) -> Outcome:
    """Prune one array where its job says so, and write it to where it is kept."""
    if job.axis is None and not is_groupable(job.weight.dtype):
        return _NOTHING
    with naming(source):
        values = read_tensor(job.tensor, source)
    if job.axis is None:
        zeros = count_zeros(values)
        return Outcome(kept_magnitude=None, zeros=zeros, zeros_before=zeros)
    with naming(f"layer {job.weight.layer!r}"):
        outcome = prune(as_bits(values), job.axis, pattern, kind=values.dtype.name)
    if outcome.non_finite:
        raise BadInputError(
            f"{source}: weight {job.weight.weight!r} of {job.weight.layer!r} has"
            f" NaN or infinite values: {outcome.non_finite}",
            hint="repair the model, or leave the layer out with --exclude",
        )
    write_back(job.tensor, values, source, data)
    return outcome


def _replace(job: _Job, source: Path, data: Mapping[Path, Path], solved: Path) -> Outcome:
    """Write new values to where an array is kept."""
    before = read_tensor(job.tensor, source)
    after = np.fromfile(solved, before.dtype).reshape(before.shape)
    write_back(job.tensor, after, source, data)
    whole = _magnitude(before)
    return Outcome(
        kept_magnitude=_magnitude(after) / whole if 0 < whole < math.inf else None,
        zeros=count_zeros(after),
        zeros_before=count_zeros(before),
    )


def _magnitude(values: Array) -> float:
    """Sum of |w|, tile by tile: a copy of the whole is never made."""
    flat = values.reshape(-1)
    starts = range(0, flat.size, _TILE)
    parts = (np.abs(flat[at : at + _TILE].astype(np.float64)).sum() for at in starts)
    return math.fsum(map(float, parts))


def _correct(
    model: onnx.ModelProto, source: Path, data: Mapping[Path, Path], calibrated: Calibrated
) -> None:
    """Biases in their places, and as new constants where others use the old ones."""
    known = next(scopes(model, source)).constants
    for name, file in calibrated.biases.items():
        kind = numpy_dtype(dtype_name(known[name]))
        write_back(known[name], np.fromfile(file, kind), source, data)
    for (node, position), tensor in calibrated.constants.items():
        model.graph.node[node].input[position] = tensor.name
        model.graph.initializer.append(tensor)
        if model.ir_version < SEPARATE_INITIALIZERS:
            model.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            )


def write_back(
    tensor: onnx.TensorProto, values: Array, source: Path, data: Mapping[Path, Path]
) -> None:
    """Replace a tensor's values: in the model, or in the copy of its data file (as `written`)."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        write_tensor(tensor, values)
        return
    place = external_data(tensor, source)
    with data[place.file].open("r+b") as file:
        file.seek(place.offset)
        values.reshape(-1).view(np.uint8).tofile(file)


def _rows(
    chosen: Sequence[Choice],
    keys: Sequence[_Key | None],
    outcomes: Mapping[_Key, Outcome],
    method: str,
    calibrated: Calibrated | None,
) -> Iterator[PrunedWeight]:
    solutions = {} if calibrated is None else calibrated.rows
    for row, ((weight, pruned, reasons), key) in enumerate(zip(chosen, keys, strict=True)):
        outcome = _NOTHING if key is None else outcomes[key]
        solution = solutions.get(row, Solution(method=method)) if pruned else Solution()
        yield PrunedWeight(
            weight=weight,
            pruned=pruned,
            zeros=outcome.zeros,
            kept_magnitude=outcome.kept_magnitude if pruned else None,
            held_before=pruned and outcome.held_before,
            reasons=reasons,
            **shared(solution, Solution),
        )
