"""The stage that traces a torch module: its graph, and where the files have its weights.

`stages/graph.onnx` names weights in `stages/dense.safetensors`, or in the files of a checkpoint.
What changes weights works on the two, and both exported files are made of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from twofour.engines.machine import available_bytes
from twofour.errors import BadInputError
from twofour.graph.stored import Store, StoredTensor, read_stores
from twofour.inputs.fits import save_arrays, shapes_of
from twofour.pipeline.folder import INPUTS, STAGES, reference_name
from twofour.pipeline.stages import Run, Stage, StageOutput
from twofour.pipeline.torch.pruning import name_frozen
from twofour.pipeline.torch.weight_files import save_tensors
from twofour.records import frozen
from twofour.records.export import OnnxFile
from twofour.records.options import ExportOptions, Precision, RunOptions, Variant
from twofour.records.run import ExportedVariant, OtherSizes
from twofour.store import link_or_copy

if TYPE_CHECKING:
    from torch import nn

    from twofour.export.calls import BoundCall
    from twofour.export.sizes import FreeSizes
    from twofour.export.tracing import TracedModule
    from twofour.graph.opened import OpenedModel
    from twofour.records.export import LayerMap
    from twofour.sources.source import LoadedModule, TorchSource

_SPARE = 1.25
"""A module and its activations, as a multiple of its weights in float32."""


@frozen
class GraphFiles:
    """Names of the files of one traced module in the run folder."""

    graph: str = f"{STAGES}/graph.onnx"
    weights: str = f"{STAGES}/dense.safetensors"
    record: str = f"{STAGES}/graph.json"
    reference: str = reference_name(Variant.DENSE)


GRAPH = GraphFiles()
DENSE_REFERENCE = GraphFiles(
    graph=f"{STAGES}/reference.onnx",
    weights=f"{STAGES}/reference.safetensors",
    record=f"{STAGES}/reference.json",
    reference=f"{STAGES}/reference-given.npz",
)
"""Those of the module that --dense-reference names."""


class SourceModule:
    """The module of a source, loaded when a stage needs it."""

    def __init__(self, source: TorchSource, note: Callable[[str], None]) -> None:
        self.source = source
        self._note = note
        self._loaded: LoadedModule | None = None

    def loaded(self) -> LoadedModule:
        """The module with its weights, permanent ones."""
        # `described` may have made it without values
        if self._loaded is None or is_bare(self._loaded.module):
            self._loaded = self._made(self.source.load)
        return self._loaded

    def described(self) -> LoadedModule:
        """The module as it is at hand, else without values where the source can make it so."""
        if self._loaded is None:
            self._loaded = self._made(self.source.structure)
        return self._loaded

    def release(self) -> None:
        """Free the module and its memory."""
        self._loaded = None
        gc.collect()  # modules and traces lie in cycles
        give_back_memory()

    def fits(self) -> bool:
        """Whether the module with its values has room in memory; True where that is not known."""
        module = self.described().module
        return not is_bare(module) or _needed_bytes(module) <= available_bytes()

    def _made(self, make: Callable[[], LoadedModule]) -> LoadedModule:
        from twofour.pruning.torch import make_permanent

        loaded = make()
        make_permanent(loaded.module)
        for text in loaded.notes:
            self._note(text)
        return loaded


def is_bare(module: nn.Module) -> bool:
    """Whether the module, or a part of it, is without values."""
    return any(parameter.is_meta for parameter in module.parameters())


def _needed_bytes(module: nn.Module) -> float:
    """Memory that the module takes in float32 with its activations, about."""
    return _SPARE * 4 * sum(parameter.numel() for parameter in module.parameters())


def trace_stage(
    run: Run, own: SourceModule, files: GraphFiles, examples: SourceModule
) -> Stage[ExportedVariant]:
    """The graph of a module on the example inputs of `examples`, which is the module itself.

    Only with --dense-reference it is another one.
    """

    def work() -> StageOutput[ExportedVariant]:
        fits = own.fits()
        loaded = own.loaded() if fits else own.described()
        if examples is not own:  # on the inputs of the model that is pruned
            loaded = replace(examples.described(), module=loaded.module)
            examples.release()
        traced, graph = _traced(run, loaded, files, fits=fits)
        _write(run, own.source, loaded, traced, files)
        own.release()
        return graph, _left_files(run, files, graph)

    return Stage(
        name=Path(files.record).stem,
        title="trace the model",
        record=files.record,
        kind=ExportedVariant,
        work=work,
        depends_on=(
            _traced_options(run.options),
            run.options.dynamic,
            run.key_of(own.source),
            run.key_of(run.source),
        ),
    )


def _left_files(run: Run, files: GraphFiles, graph: ExportedVariant) -> tuple[str, ...]:
    """Names of the files of a trace; the weights of a checkpoint stay in its own."""
    names = [files.graph, files.weights, files.reference]
    if files == GRAPH:
        names.append(INPUTS)
    names += [other.file for other in graph.other_sizes]
    return run.there(*names)


def _traced_options(asked: RunOptions) -> ExportOptions:
    """What a trace depends on; the free sizes are found by running the module."""
    precision = Precision.FLOAT32
    if asked.precision is Precision.BFLOAT16:  # which needs a later opset
        precision = Precision.BFLOAT16
    return ExportOptions(precision=precision, opset=asked.opset, dynamic_batch=asked.dynamic_batch)


def export_options(run: Run) -> ExportOptions:
    """The options of both exports, without the free sizes, which only the trace knows."""
    asked = run.options
    options = _traced_options(asked)
    if asked.quantize:  # which starts from float32
        return replace(options, precision=Precision.FLOAT32)
    assert asked.precision is not None, "resolved for every torch model"
    return replace(options, precision=asked.precision, float32_nodes=asked.keep_float32)


def example_call(loaded: LoadedModule) -> BoundCall:
    """The call of the module on its example inputs."""
    from twofour.export.calls import bind

    return bind(loaded.module, loaded.args, loaded.kwargs)


@frozen
class FreeTrace:
    """A trace with the sizes free that the source or the user names."""

    traced: TracedModule
    options: ExportOptions
    free: FreeSizes
    notes: tuple[str, ...]


def trace_freely(loaded: LoadedModule, asked: RunOptions) -> FreeTrace:
    """Trace a module, which may be without values; a size that torch cannot leave free is dropped.

    Raises what `trace` raises, and BadInputError for a size that the user named and that is fixed.
    """
    from twofour.export.sizes import FrozenSizeError
    from twofour.export.tracing import trace

    call = example_call(loaded)
    free = _free_sizes(loaded, call, asked)
    notes = [f"{name} stays as in the example inputs: {why}" for name, why in free.fixed.items()]
    while True:
        options = replace(
            _traced_options(asked),
            dynamic=free.axes,
            ranges=free.ranges,
            input_names=loaded.input_names,
        )
        try:
            traced = trace(loaded.module, call, options)
            break
        except BadInputError as error:
            if asked.dynamic is not None or not free.axes:
                raise
            names = error.names if isinstance(error, FrozenSizeError) else None
            notes.append(f"sizes stay as in the example inputs: {error.message}")
            free = free.without(names)
    gc.collect()  # torch.export leaves cycles
    name_frozen(traced, loaded.module)
    return FreeTrace(traced=traced, options=options, free=free, notes=tuple(notes))


def _traced(
    run: Run, loaded: LoadedModule, files: GraphFiles, *, fits: bool
) -> tuple[TracedModule, ExportedVariant]:
    """The graph, and what the module itself gives where it fits in memory."""
    from twofour.export.calls import Overflow, reference_outputs
    from twofour.sources.hf import notes_on

    watched = Overflow()  # type: ignore[no-untyped-call]  # torch's own
    if fits:
        with watched:
            outputs = reference_outputs(loaded.module, example_call(loaded))
    made = trace_freely(loaded, run.options)
    notes = [*notes_on(loaded.module), *made.notes]
    if not fits:
        notes.append(_not_compared(loaded.module))
    for note in notes:
        run.progress.note(note)
    traced = made.traced
    graph = replace(
        _graph_record(made, files),
        inputs_are=loaded.inputs_are,
        overflows=watched.has_overflown,
        notes=tuple(notes),
    )
    if not fits:
        return traced, graph
    _save_named(run.file(files.reference), traced.output_names, outputs)
    other_sizes = tuple(_run_other_sizes(run, loaded, made.free, traced))
    return traced, replace(graph, reference=files.reference, other_sizes=other_sizes)


def _graph_record(made: FreeTrace, files: GraphFiles) -> ExportedVariant:
    return ExportedVariant(
        onnx=OnnxFile(variant=Variant.DENSE, file=files.graph, size_bytes=0),
        reference=None,
        precision=Precision.FLOAT32,
        opset=made.traced.model.opset_imports[""],
        inputs=(),
        outputs=(),
        layers=made.traced.layers,
        dynamic=made.options.dynamic,
        ranges=made.options.ranges,
    )


def _not_compared(module: nn.Module) -> str:
    return (
        "the module's own outputs are not compared with: they need about "
        f"{_needed_bytes(module) / 1e9:.0f} GB of memory, {available_bytes() / 1e9:.0f} are free"
    )


def described_model(
    source: TorchSource, asked: RunOptions, note: Callable[[str], None]
) -> tuple[OpenedModel, LayerMap, dict[str, tuple[int, ...]]]:
    """The graph that a run would export, without its weights, its layers, and the example's shapes.

    A source that knows its structure without its weights is not asked for them.
    """
    from twofour.export.calls import input_arrays
    from twofour.export.passes import without_weights

    loaded = SourceModule(source, note).described()
    made = trace_freely(loaded, asked)
    for text in made.notes:
        note(text)
    arrays = input_arrays(example_call(loaded))
    shapes = shapes_of(dict(zip(made.traced.input_names, arrays, strict=True)))
    return *without_weights(made.traced, made.options), shapes


def _write(
    run: Run, source: TorchSource, loaded: LoadedModule, traced: TracedModule, files: GraphFiles
) -> None:
    """Write the graph, its weights where no file has them, and the example inputs."""
    from twofour.export.calls import input_arrays
    from twofour.export.tracing import write_graph

    write_graph(traced, _stored(run, source, loaded.module, files, traced), run.file(files.graph))
    if files == GRAPH:
        arrays = input_arrays(example_call(loaded))
        _save_named(run.file(INPUTS), traced.input_names, arrays)


def _stored(
    run: Run, source: TorchSource, module: nn.Module, files: GraphFiles, traced: TracedModule
) -> Store:
    """Where files have the module's weights: its checkpoint's own, else one that is written now."""
    target = run.file(files.weights)
    known = source.stored(module)
    if known is not None:
        return _linked(known, target.with_suffix(""))
    save_tensors(module.state_dict(), target, first=traced.model.graph.initializers)
    return read_stores([target])


def _linked(store: Store, start: Path) -> Store:
    """The same arrays in links to their files, which ONNX wants beside the graph."""
    links: dict[Path, Path] = {}
    linked: dict[str, StoredTensor] = {}
    for name, stored in store.items():
        if stored.file not in links:
            # stages/dense-0.safetensors, stages/dense-1.safetensors, ...
            link = Path(f"{start}-{len(links)}.safetensors")
            link_or_copy(stored.file, link)
            links[stored.file] = link
        linked[name] = replace(stored, file=links[stored.file])
    return linked


def _free_sizes(loaded: LoadedModule, call: BoundCall, asked: RunOptions) -> FreeSizes:
    """The free sizes, found by running the module; none where only the batch may be free."""
    from twofour.export.calls import float32_module
    from twofour.export.sizes import NOTHING_FREE, find_free_sizes, refuse_fixed
    from twofour.export.tracing import fake_call, fake_values

    axes = loaded.dynamic if asked.dynamic is None else asked.dynamic
    if not axes:
        return NOTHING_FREE
    module = loaded.module
    with contextlib.ExitStack() as stack:
        if is_bare(module):
            call = fake_call(call, stack.enter_context(fake_values(module)))
        else:
            module = float32_module(module)
        free = find_free_sizes(module, call, axes, loaded.longest, batch=asked.dynamic_batch)
    if asked.dynamic is not None:
        refuse_fixed(loaded.module, axes, free.fixed)
    return free


def _run_other_sizes(
    run: Run, loaded: LoadedModule, free: FreeSizes, traced: TracedModule
) -> Iterator[OtherSizes]:
    """The module's inputs and outputs at the other sizes, for the check of the file."""
    from twofour.export.calls import input_arrays, output_arrays, reference_outputs
    from twofour.export.sizes import resized, with_batch

    if not free.axes:
        return
    module = loaded.module
    call = example_call(loaded)
    axes = with_batch(call, free.axes) if run.options.dynamic_batch else free.axes
    names = [f"input:{name}" for name in traced.input_names]
    names += [f"output:{name}" for name in traced.output_names]
    for number, sizes in enumerate(free.others):
        other = resized(call, axes, sizes)
        inputs = input_arrays(other)
        # the search for free sizes ran the module there already, unless a size was dropped since
        returned = free.returned.get(frozenset(sizes.items()))
        if returned is None:
            outputs = reference_outputs(module, other)
        else:
            outputs = output_arrays(module, returned)
        file = f"{STAGES}/sizes-{number}.npz"
        _save_named(run.file(file), names, [*inputs, *outputs])
        yield OtherSizes(sizes=sizes, file=file)


def _save_named(path: Path, names: Sequence[str], arrays: Sequence[np.ndarray]) -> None:
    save_arrays(path, dict(zip(names, arrays, strict=True)))


def give_back_memory() -> None:
    """Return freed memory to the operating system, where the C library keeps it (glibc).

    Tensors of some megabytes lie in its heaps, one of each thread: what one thread freed another
    cannot use, and holes between what is kept add up.
    """
    try:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):  # Windows has no C library without a name
        return
    if trim is not None:
        trim(0)
