"""The permutation of a torch model: found on the exported file, put back into its weights."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from twofour.errors import BadInputError
from twofour.pipeline.folder import STAGES, own_folder
from twofour.pipeline.sources.calibration.data import Arrays, Batch, CalibrationData
from twofour.pipeline.stages import DENSE, ONE_SHOT_WEIGHTS, WEIGHTS, Run, variant_record
from twofour.pipeline.torch_calibrating import open_loaded_data, prune_by_options
from twofour.pruning.permutation.apply import Orders, same_outputs
from twofour.pruning.permutation.classes import find_classes
from twofour.pruning.permutation.judging import judged_whole
from twofour.pruning.permutation.parameters import permuted_parameters
from twofour.pruning.selection import choose
from twofour.records.export import LayerMap
from twofour.records.options import Selection
from twofour.records.pruning import PermutedModel, PruneResult
from twofour.records.run import ExportedVariant
from twofour.store import read_record

if TYPE_CHECKING:
    import torch
    from torch import nn

    from twofour.graph.opened import OpenedModel
    from twofour.pipeline.sources.source import LoadedModule
    from twofour.pipeline.torch_model import TorchModel

_ASIDE = "unpermuted"
"""Folder among the stages for what was pruned first, until it is known which is better."""


def selection_of(run: Run, opened: OpenedModel) -> Selection:
    """The layers that the options take of the module, as names of the exported file's layers."""
    from twofour.pruning.torch_layers import find_weights

    pattern = run.options.pattern
    rows = choose(find_weights(_loaded(run).module), pattern, run.options.selection)
    taken = {weight.weight for weight, is_pruned, _ in rows if is_pruned}
    constants = {row.initializer for row in _layers(run).layers if row.parameter in taken}
    names = {True: set[str](), False: set[str]()}
    for weight in opened.weights(pattern).weights:
        names[weight.weight in constants].add(glob.escape(weight.layer))
    left = names[False] - names[True]
    return Selection(all_layers=True, exclude=tuple(sorted(left)))


def layer_names(run: Run, opened: OpenedModel) -> dict[str, str]:
    """By layer of the exported file, the module's own name of it."""
    of_constant = {row.initializer: row.layer for row in _layers(run).layers}
    weights = opened.weights(run.options.pattern).weights
    return {w.layer: of_constant[w.weight] for w in weights if w.weight in of_constant}


def open_data(run: Run, opened: OpenedModel) -> CalibrationData:
    """The calibration data of the module as inputs of the exported file.

    Raises BadInputError where they do not fit its sizes.
    """
    from twofour.export.example_inputs import input_arrays
    from twofour.pipeline.sources.calibration.torch_calls import torch_call

    loaded = _loaded(run)
    data = open_loaded_data(run, loaded)
    names = [tensor.name for tensor in opened.inputs]

    def read() -> Iterator[Batch]:
        for batch in data.batches():
            call = torch_call(loaded.module, batch)
            arrays = input_arrays(loaded.module, call.args, call.kwargs)
            yield replace(batch, arrays=_fitting(opened, dict(zip(names, arrays, strict=False))))

    next(read())
    return replace(data, read=read)


def _fitting(opened: OpenedModel, arrays: Arrays) -> Arrays:
    for tensor in opened.inputs:
        found = arrays.get(tensor.name)
        shape = () if found is None else found.shape
        sizes = zip(tensor.shape, shape, strict=False)
        fits = len(shape) == len(tensor.shape)
        if not fits or any(isinstance(a, int) and a != b for a, b in sizes):
            raise BadInputError(
                f"the calibration data have {list(shape)} for input {tensor.name!r}, which is "
                f"{list(tensor.shape)} in {opened.path.name}"
            )
    return arrays


def prune_permuted(run: Run, model: TorchModel, permuted: PermutedModel) -> PruneResult:
    """Pruned in the orders that were found, or in its own where the outputs are nearer so."""
    orders, weights = permuted.orders, run.file(WEIGHTS)

    def in_order(loaded: LoadedModule) -> PruneResult:
        put_back(run, loaded, orders)
        return prune_by_options(run, loaded, orders)

    measures = run.options.calibration.data is not None and run.options.method.repair is not False
    if not measures:
        return replace(model.prune(in_order, weights), permutation=permuted.about)
    aside = own_folder(run.file(STAGES) / _ASIDE)
    plain = model.prune(lambda loaded: prune_by_options(run, loaded), aside / weights.name)
    one_shot = run.file(ONE_SHOT_WEIGHTS)
    if one_shot.exists():
        one_shot.replace(aside / one_shot.name)
    result = model.prune(in_order, weights)
    about = judged_whole(permuted.about, result.repair, plain.repair)
    if about.refused is not None:
        run.progress.note(f"the channels stay in their order: {about.refused}")
        result = plain
        model.release()  # it has the other weights
        (aside / weights.name).replace(weights)
        one_shot.unlink(missing_ok=True)
        if (aside / one_shot.name).exists():
            (aside / one_shot.name).replace(one_shot)
    shutil.rmtree(aside, ignore_errors=True)
    return replace(result, permutation=about)


def put_back(run: Run, loaded: LoadedModule, orders: Orders) -> None:
    """The module's own parameters in the orders that were found on its file.

    Raises BadInputError where a constant that moves comes from no parameter.
    """
    _fill(loaded.module, _permuted(run, loaded, orders))


def why_not_put_back(run: Run, orders: Orders) -> str | None:
    """Why the module with these orders is not what it was, or cannot have them; None: it is."""
    from twofour.export.torch_export import reference_outputs

    loaded = _loaded(run)

    def outputs() -> Arrays:
        found = reference_outputs(loaded.module, loaded.args, loaded.kwargs)
        return {f"{at} of the module": array for at, array in enumerate(found)}

    try:
        changed = _permuted(run, loaded, orders)
    except BadInputError as error:
        return error.message
    before, state = outputs(), _arrays(loaded.module)
    kept = {key: state[key].copy() for key in changed}
    _fill(loaded.module, changed)
    after = outputs()
    _fill(loaded.module, kept)
    return same_outputs(before, after, dtype="float32")


def _loaded(run: Run) -> LoadedModule:
    assert run.model is not None, "an ONNX file has stages of its own"
    return run.model.dense()


def _layers(run: Run) -> LayerMap:
    record = run.file(variant_record("export", DENSE))
    return read_record(ExportedVariant, record).layers


def _permuted(run: Run, loaded: LoadedModule, orders: Orders) -> dict[str, np.ndarray]:
    opened = run.models.open(run.file(f"{DENSE}.onnx"))
    classes = find_classes(opened, run.options.pattern)
    return permuted_parameters(opened, classes, orders, _layers(run), _arrays(loaded.module))


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    from twofour.pipeline.sources.calibration.torch_calls import array_of

    return {key: array_of(tensor) for key, tensor in _state(module).items()}


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    import torch

    state = module.state_dict()
    return {key: tensor for key, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def _fill(module: nn.Module, arrays: dict[str, np.ndarray]) -> None:
    import torch

    from twofour.pipeline.sources.calibration.torch_calls import tensor_of

    state = _state(module)
    with torch.no_grad():
        for key, array in arrays.items():
            state[key].copy_(tensor_of(array))
