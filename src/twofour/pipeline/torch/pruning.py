"""Pruning the stored weights that a traced graph names; rows are named as in the module."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.errors import BadInputError, TwofourError
from twofour.graph.files import dtype_name, external_data, external_tensors, shape_of
from twofour.graph.opened import OpenedModel, open_onnx
from twofour.graph.stored import Store, StoredTensor, copy_store, read_header, read_stores
from twofour.graph.weights import frozen_metadata
from twofour.inputs.fits import check_fit, shapes_of
from twofour.pipeline.folder import WEIGHTS
from twofour.pipeline.stages import Progress, Settings, Silent
from twofour.pipeline.torch.weight_files import load_weights, save_tensors
from twofour.pruning.methods import method_named
from twofour.pruning.onnx import only_stored, prune_store
from twofour.records.options import DynamicAxis, ExportOptions
from twofour.records.weights import PrunedWeight, PruneResult
from twofour.sources.calibration.kinds import module_inputs
from twofour.store import atomic_file

if TYPE_CHECKING:
    from torch import nn

    from twofour.export.tracing import TracedModule
    from twofour.inputs.samples import Batch, CalibrationData
    from twofour.pruning.arrays import Calibrated

_OTHER_BATCHES = "give batches of the sizes that the model takes"


def prune_into(
    graph: OpenedModel, target: Path, options: Settings, calibrated: Calibrated
) -> PruneResult:
    """Write the weights of a traced graph to `target`, pruned; raises what `prune_store` raises."""
    names = frozenset(tensor.name for tensor in external_tensors(graph.proto))
    with atomic_file(target) as temporary:
        copy_store(stored_in(graph), temporary, names)
        return prune_copied(graph, read_header(temporary), options, calibrated)


def prune_copied(
    graph: OpenedModel, places: Store, options: Settings, calibrated: Calibrated
) -> PruneResult:
    """Prune the copies of a traced graph's weights, in place."""
    from twofour.export.layer_names import AGAIN

    names = frozenset(tensor.name for tensor in external_tensors(graph.proto))
    pruned = prune_store(
        graph,
        places,
        options.pattern,
        only_stored(graph, options.selection),
        method=options.method_name,
        calibrated=calibrated,
    )
    rows: dict[tuple[str, str | None], PrunedWeight] = {}
    # one row for a layer that runs twice, and of projections in one array for that which loses most
    for row in pruned.weights:
        if row.weight.weight not in (None, *names):  # a constant of the code
            continue
        weight = replace(row.weight, layer=row.weight.layer.partition(AGAIN)[0], node=None)
        renamed = replace(row, weight=weight)
        before = rows.setdefault((weight.layer, weight.weight), renamed)
        if _lost(renamed) > _lost(before):
            rows[weight.layer, weight.weight] = renamed
    return replace(pruned, selection=options.selection, weights=tuple(rows.values()))


def _lost(row: PrunedWeight) -> float:
    return 0.0 if row.output_error is None else row.output_error.judged


def calibrate_graph(
    graph: OpenedModel,
    data: CalibrationData,
    options: Settings,
    folder: Path,
    progress: Progress,
    *,
    dense_model: OpenedModel | None = None,
) -> Calibrated:
    """New values for the weights of a traced graph; `folder` is for what calibration keeps."""
    from twofour.pipeline.onnx.calibrating import CalibrationTask, calibrate

    selection = only_stored(graph, options.selection)
    task = CalibrationTask(
        opened=graph,
        options=replace(options, selection=selection),
        folder=folder,
        progress=progress,
        dense_model=dense_model,
        changes_graph=False,
    )
    return calibrate(task, data)


def stored_in(graph: OpenedModel) -> Store:
    """The arrays that a traced graph names, by its names, and the others of the same files.

    In the files of a checkpoint keys may begin otherwise than the names of the module.
    """
    named = {}
    for tensor in external_tensors(graph.proto):
        place = external_data(tensor, graph.path)
        named[tensor.name] = StoredTensor(
            file=place.file, dtype=dtype_name(tensor), shape=shape_of(tensor), offset=place.offset
        )
    places = {(stored.file, stored.offset) for stored in named.values()}
    others = {
        key: stored
        for key, stored in read_stores(graph.data_files).items()
        if (stored.file, stored.offset) not in places
    }
    return others | named


def prune_by_batches(module: nn.Module, batches: object, options: Settings) -> PruneResult:
    """Prune a module in place with the caller's batches, up to the options' number of samples.

    Raises BadInputError where they do not fit the module's forward, and where torch cannot export
    the module; nothing is changed then.
    """
    from twofour.pruning.solve import LayerSolver
    from twofour.pruning.torch import find_module_weights, plan_in_memory
    from twofour.sources.calibration.loaders import calibration_from_value

    find_module_weights(module)  # a module without weights is refused before the data are read
    LayerSolver(method_named(options.method_name), options.method)
    samples = options.calibration.samples
    data = calibration_from_value(batches, module_inputs(module), samples=samples)
    plan_in_memory(module, options.pattern, options.selection)
    with tempfile.TemporaryDirectory(prefix="twofour-") as folder:
        pruned = _prune_in(Path(folder), module, data, options)
        load_weights(module, Path(folder, WEIGHTS))
    return replace(pruned, source="")


def _prune_in(
    folder: Path, module: nn.Module, data: CalibrationData, options: Settings
) -> PruneResult:
    """The pruned weights of a module in a file of the folder."""
    traced = traced_on(module, data)
    dense = folder / "dense.safetensors"
    save_tensors(module.state_dict(), dense, first=traced.model.graph.initializers)
    graph = written_graph(traced, read_stores([dense]), folder / "graph.onnx")
    try:
        calibrated = calibrate_graph(graph, data, options, folder / "calibration", Silent())
        return prune_into(graph, folder / WEIGHTS, options, calibrated)
    except TwofourError as error:  # the user does not know the file
        error.message = error.message.replace(f"{graph.path}: ", "", 1)
        raise


def written_graph(traced: TracedModule, store: Store, target: Path) -> OpenedModel:
    """The graph as a file beside its weights."""
    from twofour.export.tracing import write_graph

    write_graph(traced, store, target)
    return open_onnx(target)


def name_frozen(traced: TracedModule, module: nn.Module) -> None:
    """Name the frozen weights of a module in the metadata of its graph."""
    from twofour.pruning.torch import frozen_weights

    traced.model.metadata_props.update(frozen_metadata(frozen_weights(module)))


def traced_on(module: nn.Module, data: CalibrationData) -> TracedModule:
    """The module's graph for calibration data; sizes that differ among its batches are free.

    Raises BadInputError for batches that one graph cannot take, and as `trace` does.
    """
    from twofour.export.calls import EXAMPLES, bind
    from twofour.export.sizes import FrozenSizeError
    from twofour.export.tracing import trace
    from twofour.sources.calibration.loaders import torch_call

    first = next(data.batches())
    call = torch_call(module, first)
    axes = differing_axes(data.batches())
    options = ExportOptions(input_names=tuple(first.arrays), dynamic=axes)
    try:
        with _without_caches(module):
            traced = trace(module, bind(module, call.args, call.kwargs), options)
    except FrozenSizeError as error:
        why = f"{data.source} has batches of several sizes, and {error.message}"
        raise BadInputError(why, hint=_OTHER_BATCHES) from error
    except BadInputError as error:
        if EXAMPLES in error.message:
            error.message = error.message.replace(EXAMPLES, f"the first batch of {data.source}")
            error.hint = _OTHER_BATCHES
        raise
    name_frozen(traced, module)
    return traced


def takes(graph: OpenedModel, data: CalibrationData) -> bool:
    """Whether the graph runs on every batch as it is: each has all inputs, and every fixed size."""
    names = {tensor.name for tensor in graph.inputs}
    for batch in data.batches():
        if {*batch.arrays} != names:
            return False
        try:
            check_fit(graph.inputs, shapes_of(batch.arrays), data.source)
        except BadInputError:
            return False
    return True


def differing_axes(batches: Iterable[Batch]) -> tuple[DynamicAxis, ...]:
    """Axes behind the first whose sizes differ among batches; those of one size have one name."""
    # ids 8 x 16 and 8 x 20, mask 8 x 16 and 8 x 20: both axes 1 are the sizes (16, 20), "size_0"
    sizes: dict[tuple[str, int], list[int]] = defaultdict(list)
    first: dict[str, int] = {}
    sample = 1
    for batch in batches:
        axes = {name: array.ndim for name, array in batch.arrays.items()}
        first = first or axes
        if axes != first:
            raise BadInputError(
                f"calibration sample {sample} has the inputs {_with_axes(axes)}, "
                f"the first one {_with_axes(first)}",
                hint="give every batch the same inputs, with as many axes",
            )
        sample += batch.samples
        for name, array in batch.arrays.items():
            for axis in range(1, array.ndim):
                sizes[name, axis].append(array.shape[axis])
    names: dict[tuple[int, ...], str] = {}
    free = []
    for (name, axis), every in sizes.items():
        if len({*every}) > 1:
            of_these = names.setdefault(tuple(every), f"size_{len(names)}")
            free.append(DynamicAxis(input=name, axis=axis, name=of_these))
    return tuple(free)


def _with_axes(inputs: Mapping[str, int]) -> str:
    return ", ".join(f"{name} of {number} axes" for name, number in inputs.items())


@contextlib.contextmanager
def _without_caches(module: nn.Module) -> Iterator[None]:
    """Within it models of transformers give no cache of keys and values, which is no tensor."""
    configs = [getattr(part, "config", None) for part in module.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    with contextlib.ExitStack() as stack:
        for config in caching:
            stack.callback(setattr, config, "use_cache", True)
            setattr(config, "use_cache", False)  # noqa: B010  # of any class
        yield
