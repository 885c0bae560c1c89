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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from twofour.errors import BadInputError, naming
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
_Save = Callable[[onnx.TensorProto, Array], None]
"""Puts new values to where a tensor of the model is kept."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """How weights are to be pruned."""

    pattern: Pattern
    selection: Selection
    method: str
    calibrated: Calibrated | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The weights of a graph, which of them are pruned, and what to do with each stored array."""

    asked: _Asked
    source: Path
    found: GraphWeights
    chosen: tuple[Choice, ...]
    keys: tuple[_Key | None, ...]
    """The array of each weight."""
    jobs: Mapping[_Key, _Job]


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
    without_data(left_to(method) if calibrated else method)
    asked = _Asked(pattern=pattern, selection=selection, method=method, calibrated=calibrated)
    source, model = opened.path, opened.copy()
    copies = data_copies(opened, target)
    plan = _planned(find_weights(model, pattern, path=source), source, asked)
    with written(opened, model, target, copies) as data, naming(source):

        def save(tensor: onnx.TensorProto, values: Array) -> None:
            write_back(tensor, values, source, data)

        return _prune(plan, model, save)


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
    asked = _Asked(pattern=pattern, selection=selection, method=method, calibrated=calibrated)

    def save(tensor: onnx.TensorProto, values: Array) -> None:
        place = places[tensor.name]
        with place.file.open("r+b") as file:
            file.seek(place.offset)
            values.reshape(-1).view(np.uint8).tofile(file)

    plan = _planned(opened.weights(pattern), opened.path, asked)
    return _prune(plan, opened.proto, save)


def _prune(plan: _Plan, model: onnx.ModelProto, save: _Save) -> PruneResult:
    """Prune the arrays of a plan, one after the other."""
    asked, calibrated = plan.asked, plan.asked.calibrated
    prune = without_data(left_to(asked.method) if calibrated else asked.method)
    arrays = {} if calibrated is None else calibrated.arrays
    solved = {plan.keys[row]: file for row, file in arrays.items()}
    outcomes = {}
    for key, job in plan.jobs.items():
        if key in solved:
            outcomes[key] = _replace(job, plan.source, solved[key], save)
        else:
            outcomes[key] = _run(job, plan, prune, save)
    if calibrated is not None:
        _correct(model, plan.source, calibrated, save)
    return PruneResult(
        source=str(plan.source),
        pattern=asked.pattern,
        method=asked.method,
        selection=asked.selection,
        weights=tuple(_rows(plan, outcomes)),
        not_covered=plan.found.not_covered,
        calibration=None if calibrated is None else calibrated.calibration,
    )


def only_stored(opened: OpenedModel, pattern: Pattern, selection: Selection) -> Selection:
    """The selection without constants of a traced graph that are no weights of its module."""
    found = opened.weights(pattern)
    constants = {
        glob.escape(weight.layer): "being a constant of the code, no weight of the module"
        for weight, tensor in zip(found.weights, found.tensors, strict=True)
        if tensor is not None and not is_external(tensor)
    }
    return replace(
        selection,
        exclude=(*selection.exclude, *constants),
        said_by={**selection.said_by, **constants},
    )


def choices_of(opened: OpenedModel, pattern: Pattern, selection: Selection) -> tuple[Choice, ...]:
    """The choices that `prune_onnx` will make; raises the same errors."""
    asked = _Asked(pattern=pattern, selection=selection, method="", calibrated=None)
    return _planned(opened.weights(pattern), opened.path, asked).chosen


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


def _planned(found: GraphWeights, source: Path, asked: _Asked) -> _Plan:
    """The choices, and what to do with each array, which may be used twice."""
    with naming(source):
        chosen = choose(found.weights, asked.pattern, asked.selection)
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
        return _Plan(asked=asked, source=source, found=found, chosen=chosen, keys=keys, jobs=jobs)


def _key(tensor: onnx.TensorProto, source: Path) -> _Key:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return storage_key(tensor)
    place = external_data(tensor, source)
    return ("external", place.file, place.offset)


def _run(job: _Job, plan: _Plan, prune: InPlace, save: _Save) -> Outcome:
    """Prune one array where its job says so, and write it to where it is kept."""
    source, pattern = plan.source, plan.asked.pattern
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
    save(job.tensor, values)
    return outcome


def _replace(job: _Job, source: Path, solved: Path, save: _Save) -> Outcome:
    """Write new values to where an array is kept."""
    before = read_tensor(job.tensor, source)
    after = np.fromfile(solved, before.dtype).reshape(before.shape)
    save(job.tensor, after)
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


def _correct(model: onnx.ModelProto, source: Path, calibrated: Calibrated, save: _Save) -> None:
    """Biases in their places."""
    known = next(scopes(model, source)).constants
    for name, file in calibrated.biases.items():
        kind = numpy_dtype(dtype_name(known[name]))
        save(known[name], np.fromfile(file, kind))


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


def _rows(plan: _Plan, outcomes: Mapping[_Key, Outcome]) -> Iterator[PrunedWeight]:
    asked = plan.asked
    solutions = {} if asked.calibrated is None else asked.calibrated.rows
    for row, ((weight, pruned, reasons), key) in enumerate(
        zip(plan.chosen, plan.keys, strict=True)
    ):
        outcome = _NOTHING if key is None else outcomes[key]
        solution = Solution()
        if pruned:
            solution = solutions.get(row, Solution(method=asked.method))
        yield PrunedWeight(
            weight=weight,
            pruned=pruned,
            zeros=outcome.zeros,
            kept_magnitude=outcome.kept_magnitude if pruned else None,
            held_before=pruned and outcome.held_before,
            reasons=reasons,
            **shared(solution, Solution),
        )
