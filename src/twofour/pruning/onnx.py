"""Prune the weights of an ONNX file into a new file; everything else in it comes out unchanged.

External data stays external. Files are copied and the pruned weights rewritten in place in the
copies, one at a time, so memory holds the graph and one weight.
"""

from __future__ import annotations

import glob
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from twofour.errors import BadInputError, naming
from twofour.frozen import frozen
from twofour.graph.files import (
    Array,
    dtype_name,
    external_data,
    external_tensors,
    is_external,
    is_groupable,
    numpy_dtype,
    read_tensor,
    storage_key,
    write_tensor,
)
from twofour.graph.opened import OpenedModel, write_whole
from twofour.graph.scope import scopes
from twofour.graph.stored import Store
from twofour.graph.weights import GraphWeights, find_weights
from twofour.pattern import as_bits, count_zeros
from twofour.pruning.methods import InPlace, left_to, without_data
from twofour.pruning.methods.magnitude import Outcome
from twofour.pruning.selection import Choice, axis_conflict, choose, pruned_weight
from twofour.records.weights import (
    Calibration,
    Pattern,
    PruneResult,
    Selection,
    Solution,
    Weight,
)
from twofour.store import atomic_file

_DEFAULT_SELECTION = Selection()
_Key = tuple[object, ...]
_Save = Callable[[onnx.TensorProto, Array], None]
"""Puts new values to where a tensor of the model is kept."""
_TILE = 1 << 20


@frozen
class _Job:
    """One stored array and the first weight that asks for it to be pruned, or for its zeros."""

    weight: Weight
    tensor: onnx.TensorProto
    axis: int | None
    """None: only count its zeros."""


@frozen
class Calibrated:
    """New values for weights and biases of a file, found with calibration data."""

    calibration: Calibration
    rows: Mapping[int, Solution]
    """Row of the graph's weights -> its solution."""
    arrays: Mapping[int, Path]
    """Row -> a file with the array to be stored; rows without one are pruned here."""
    biases: Mapping[str, Path]
    """Name of a constant in the main graph -> a file with its new values."""


@frozen
class _Plan:
    """The weights of a graph, which of them are pruned, and what to do with each stored array."""

    source: Path
    pattern: Pattern
    selection: Selection
    weights: GraphWeights
    chosen: tuple[Choice, ...]
    keys: tuple[_Key | None, ...]
    """The array of each weight."""
    jobs: Mapping[_Key, _Job]


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
    prune = _without_data(method, calibrated)
    source = opened.path
    model = opened.copy()
    copies = data_copies(opened, target)
    plan = _planned(find_weights(model, path=source), source, pattern, selection)
    with written(opened, model, target, copies) as data, naming(source):

        def save(tensor: onnx.TensorProto, values: Array) -> None:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                place = external_data(tensor, source)
                _overwrite(data[place.file], place.offset, values)
            else:
                write_tensor(tensor, values)

        outcomes = _prune(plan, prune, calibrated, save)
        _correct(model, source, calibrated, save)
    return _result(plan, outcomes, method, calibrated)


def prune_store(
    opened: OpenedModel,
    places: Store,
    pattern: Pattern,
    selection: Selection = _DEFAULT_SELECTION,
    *,
    method: str = "magnitude",
    calibrated: Calibrated | None = None,
) -> PruneResult:
    """Prune the weights of a traced graph in `places`, a copy of the files that it names.

    The graph and its own files stay as they are. Raises BadInputError as `prune_onnx` does.
    """
    prune = _without_data(method, calibrated)
    plan = _planned(opened.weights(), opened.path, pattern, selection)

    def save(tensor: onnx.TensorProto, values: Array) -> None:
        place = places[tensor.name]
        _overwrite(place.file, place.offset, values)

    outcomes = _prune(plan, prune, calibrated, save)
    _correct(opened.proto, opened.path, calibrated, save)
    return _result(plan, outcomes, method, calibrated)


def _without_data(method: str, calibrated: Calibrated | None) -> InPlace:
    """What prunes the weights that have no new values."""
    if calibrated is not None:
        method = left_to(method)
    return without_data(method)


def _overwrite(file: Path, offset: int, values: Array) -> None:
    with file.open("r+b") as handle:
        handle.seek(offset)
        values.reshape(-1).view(np.uint8).tofile(handle)


def _prune(
    plan: _Plan, prune: InPlace, calibrated: Calibrated | None, save: _Save
) -> dict[_Key, Outcome]:
    """Prune the arrays of a plan, one after the other."""
    solved: dict[_Key | None, Path] = {}
    if calibrated is not None:
        solved = {plan.keys[row]: file for row, file in calibrated.arrays.items()}
    outcomes = {}
    for key, job in plan.jobs.items():
        if key in solved:
            outcomes[key] = _replace(job, plan.source, solved[key], save)
        else:
            outcomes[key] = _run(job, plan, prune, save)
    return outcomes


def only_stored(opened: OpenedModel, selection: Selection) -> Selection:
    """The selection without constants of a traced graph that are no weights of its module."""
    weights = opened.weights()
    # the positions or the scale of an attention, which tracing found in the code
    constants = {
        glob.escape(weight.layer): "being a constant of the code, no weight of the module"
        for weight, tensor in zip(weights.weights, weights.tensors, strict=True)
        if tensor is not None and not is_external(tensor)
    }
    return replace(
        selection,
        exclude=(*selection.exclude, *constants),
        said_by={**selection.said_by, **constants},
    )


def choices_of(opened: OpenedModel, pattern: Pattern, selection: Selection) -> tuple[Choice, ...]:
    """The choices that `prune_onnx` will make; raises the same errors."""
    return _planned(opened.weights(), opened.path, pattern, selection).chosen


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
            with atomic_file(temporary) as whole:
                write_whole(model, temporary, whole)


def data_copies(opened: OpenedModel, target: Path) -> dict[Path, Path]:
    """Each data file of the model, and the file beside the target that it is copied to."""
    # to sparse.onnx: sparse.onnx.data, or sparse.onnx.0.data and sparse.onnx.1.data
    files = opened.data_files
    names = [f"{target.name}.data"]
    if len(files) > 1:
        names = [f"{target.name}.{number}.data" for number in range(len(files))]
    copies = {file: target.parent / name for file, name in zip(files, names, strict=False)}
    for written in (target, *copies.values()):
        for read in (opened.path, *files):
            if written.exists() and written.samefile(read):  # a hard link too
                raise BadInputError(
                    f"writing {written} would overwrite {read}, which is being read",
                    hint="choose another name or folder for the pruned model",
                )
    return copies


def _planned(weights: GraphWeights, source: Path, pattern: Pattern, selection: Selection) -> _Plan:
    """The choices, and what to do with each array, which may be used twice."""
    with naming(source):
        chosen = choose(weights.weights, pattern, selection)
        keys = tuple(None if tensor is None else _key(tensor, source) for tensor in weights.tensors)
        jobs: dict[_Key, _Job] = {}
        for (weight, pruned, _), tensor, key in zip(chosen, weights.tensors, keys, strict=True):
            if tensor is None or key is None:
                continue
            job = _Job(weight=weight, tensor=tensor, axis=weight.axis if pruned else None)
            # a table that a Gather and a MatMul read: only the MatMul's row asks for an axis
            other = jobs.get(key)
            if other is None or other.axis is None:
                jobs[key] = job
            elif pruned and (job.axis, weight.shape) != (other.axis, other.weight.shape):
                raise axis_conflict(other.weight, weight)
    return _Plan(
        source=source,
        pattern=pattern,
        selection=selection,
        weights=weights,
        chosen=chosen,
        keys=keys,
        jobs=jobs,
    )


def _key(tensor: onnx.TensorProto, source: Path) -> _Key:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return storage_key(tensor)
    place = external_data(tensor, source)
    return ("external", place.file, place.offset)


def _run(job: _Job, plan: _Plan, prune: InPlace, save: _Save) -> Outcome:
    """Prune one array where its job says so, and write it to where it is kept."""
    source = plan.source
    if job.axis is None and not is_groupable(job.weight.dtype):
        return Outcome()
    values = read_tensor(job.tensor, source)
    if job.axis is None:
        zeros = count_zeros(values)
        return Outcome(zeros=zeros, zeros_before=zeros)
    with naming(f"layer {job.weight.layer!r}"):
        outcome = prune(as_bits(values), job.axis, plan.pattern, kind=values.dtype.name)
    if outcome.non_finite:
        raise BadInputError(
            f"{source}: weight {job.weight.weight!r} of {job.weight.layer!r} has"
            f" NaN or infinite values: {outcome.non_finite}",
            hint="repair the model, or leave the layer out with --exclude",
        )
    save(job.tensor, values)
    return outcome


def _replace(job: _Job, source: Path, solved: Path, save: _Save) -> Outcome:
    """Write new values to where an array is kept."""
    before = read_tensor(job.tensor, source)
    after = np.fromfile(solved, before.dtype).reshape(before.shape)
    save(job.tensor, after)
    kept = None
    if whole := _magnitude(before):
        kept = _magnitude(after) / whole
    return Outcome(
        kept_magnitude=kept,
        zeros=count_zeros(after),
        zeros_before=count_zeros(before),
    )


def _magnitude(values: Array) -> float:
    """Sum of |w|, tile by tile: a copy of the whole is never made."""
    flat = values.reshape(-1)
    sums = []
    for start in range(0, flat.size, _TILE):
        tile = flat[start : start + _TILE].astype(np.float64)
        sums.append(float(np.abs(tile).sum()))
    return math.fsum(sums)


def _correct(
    model: onnx.ModelProto, source: Path, calibrated: Calibrated | None, save: _Save
) -> None:
    """Put the new biases in their places."""
    if calibrated is None:
        return
    known = next(scopes(model, source)).constants
    for name, file in calibrated.biases.items():
        save(known[name], np.fromfile(file, numpy_dtype(dtype_name(known[name]))))


def _result(
    plan: _Plan, outcomes: Mapping[_Key, Outcome], method: str, calibrated: Calibrated | None
) -> PruneResult:
    solutions: Mapping[int, Solution] = {}
    if calibrated is not None:
        solutions = calibrated.rows
    weights = []
    for row, (choice, key) in enumerate(zip(plan.chosen, plan.keys, strict=True)):
        outcome = Outcome() if key is None else outcomes[key]
        weights.append(pruned_weight(choice, outcome, solutions.get(row, Solution(method=method))))
    return PruneResult(
        source=str(plan.source),
        pattern=plan.pattern,
        method=method,
        selection=plan.selection,
        weights=tuple(weights),
        not_covered=plan.weights.not_covered,
        calibration=None if calibrated is None else calibrated.calibration,
    )
