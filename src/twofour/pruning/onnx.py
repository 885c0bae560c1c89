"""Prune the weights of an ONNX file into a new file; everything else in it comes out unchanged.

External data stays external. Files are copied and the pruned weights rewritten in place in the
copies, one at a time, so memory holds the graph and one weight.
"""

from __future__ import annotations

import glob
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

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
from twofour.pruning.arrays import (
    WITHOUT_DATA,
    ArrayPlan,
    Calibrated,
    Place,
    Write,
    overwrite,
    plan_arrays,
    prune_arrays,
)
from twofour.pruning.selection import Choice
from twofour.records.weights import Pattern, PruneResult, Selection
from twofour.store import atomic_file

_Save = Callable[[onnx.TensorProto, Array], None]
"""Puts new values to where a tensor of the model is kept."""
_DEFAULT_SELECTION = Selection()


def prune_onnx(
    opened: OpenedModel,
    target: Path,
    pattern: Pattern,
    selection: Selection = _DEFAULT_SELECTION,
    *,
    method: str = "magnitude",
    calibrated: Calibrated = WITHOUT_DATA,
) -> PruneResult:
    """Write the model to `target` with the selected weights pruned to N:M.

    With `calibrated`, weights get the values that were found with calibration data, for the same
    pattern and selection, and `method` prunes only what is left.

    Inline weights stay inline; external ones lie in `<target>.data` (`<target>.0.data`, ... where
    the model has several files). Raises BadInputError for an unknown method, a damaged graph, a
    target that would overwrite the model, NaN or infinity in a weight, and an array that two
    nodes need pruned along different axes; nothing is left behind then.
    """
    source = opened.path
    model = opened.copy()
    graph = find_weights(model, path=source)
    plan = _planned(graph, source, pattern, selection)
    with _written(opened, model, target) as data, naming(source):

        def save(tensor: onnx.TensorProto, values: Array) -> None:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                place = external_data(tensor, source)
                overwrite(data[place.file], place.offset, values)
            else:
                write_tensor(tensor, values)

        result = prune_arrays(plan, method, _by_row(graph, save), calibrated)
        _correct(model, source, calibrated, save)
    return replace(result, source=str(source), not_covered=graph.not_covered)


def prune_store(
    opened: OpenedModel,
    places: Store,
    pattern: Pattern,
    selection: Selection = _DEFAULT_SELECTION,
    *,
    method: str = "magnitude",
    calibrated: Calibrated = WITHOUT_DATA,
) -> PruneResult:
    """Prune the weights of a traced graph in `places`, a copy of the files that it names.

    The graph and its own files stay as they are. Raises BadInputError as `prune_onnx` does.
    """
    graph = opened.weights()
    plan = _planned(graph, opened.path, pattern, selection)

    def save(tensor: onnx.TensorProto, values: Array) -> None:
        place = places[tensor.name]
        overwrite(place.file, place.offset, values)

    with naming(opened.path):
        result = prune_arrays(plan, method, _by_row(graph, save), calibrated)
        _correct(opened.proto, opened.path, calibrated, save)
    return replace(result, source=str(opened.path), not_covered=graph.not_covered)


def _by_row(graph: GraphWeights, save: _Save) -> Write:
    """Saves the tensor of a row, which is there because it is to be pruned."""
    return lambda row, values: save(cast("onnx.TensorProto", graph.tensors[row]), values)


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
    return _planned(opened.weights(), opened.path, pattern, selection).choices


def copy_onnx(opened: OpenedModel, target: Path, model: onnx.ModelProto | None = None) -> None:
    """Copy a model as it is, external data included, to files named as `prune_onnx` does.

    With `model`, another graph of the same stored values, that one. Raises BadInputError for a
    target that would overwrite the model.
    """
    with _written(opened, model or opened.copy(), target):
        pass


@contextmanager
def _written(
    opened: OpenedModel, model: onnx.ModelProto, target: Path
) -> Iterator[dict[Path, Path]]:
    """Copies, to change, of the model's file and its data files; `model` may be changed too.

    It is written only then: copies keep every byte, and take no memory.
    """
    copies = _data_copies(opened, target)
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


def _data_copies(opened: OpenedModel, target: Path) -> dict[Path, Path]:
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


def _planned(
    graph: GraphWeights, source: Path, pattern: Pattern, selection: Selection
) -> ArrayPlan:
    with naming(source):
        places = []
        for weight, tensor in zip(graph.weights, graph.tensors, strict=True):
            place = None
            if tensor is not None and is_groupable(weight.dtype):
                place = Place(
                    key=_key(tensor, source),
                    step=math.prod(weight.shape[(weight.axis or 0) + 1 :]),
                    read=partial(read_tensor, tensor, source),
                )
            places.append(place)
        return plan_arrays(graph.weights, places, pattern, selection)


def _key(tensor: onnx.TensorProto, source: Path) -> tuple[object, ...]:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return storage_key(tensor)
    place = external_data(tensor, source)
    return ("external", place.file, place.offset)


def _correct(model: onnx.ModelProto, source: Path, calibrated: Calibrated, save: _Save) -> None:
    """Put the new biases in their places."""
    if not calibrated.biases:
        return
    known = next(scopes(model, source)).constants
    for name, file in calibrated.biases.items():
        save(known[name], np.fromfile(file, numpy_dtype(dtype_name(known[name]))))
