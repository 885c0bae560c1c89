"""The stage that traces a torch module: its graph, and where the files have its weights.

`stages/graph.onnx` names weights in `stages/dense.safetensors`, or in the files of a checkpoint.
What changes weights works on the two, and both exported files are made of them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from twofour.engines.machine import available_bytes
from twofour.errors import BadInputError
from twofour.graph.stored import Store, StoredTensor, read_stores
from twofour.inputs.fits import save_arrays
from twofour.pipeline.folder import INPUTS, STAGES, reference_name
from twofour.pipeline.stages import Run, Stage, StageOutput
from twofour.pipeline.torch.pruning import name_frozen
from twofour.pipeline.torch.weight_files import save_tensors
from twofour.pruning.resources import give_back_memory
from twofour.records.export import OnnxFile
from twofour.records.options import ExportOptions, Precision, RunOptions, Variant
from twofour.records.run import ExportedVariant, OtherSizes
from twofour.store import atomic_file, link_or_copy

if TYPE_CHECKING:
    from torch import nn

    from twofour.export.sizes import FreeSizes
    from twofour.export.tracing import TracedModule
    from twofour.graph.opened import OpenedModel
    from twofour.records.export import LayerMap
    from twofour.sources.source import LoadedModule, TorchSource

EXPORTERS = ("torch", "onnx", "onnxscript", "onnx-ir", "transformers", "diffusers", "timm")
_SPARE = 1.25
"""A module and its activations, as a multiple of its weights in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(slots=True, kw_only=True)
class SourceModule:
    """The module of a source, loaded when a stage needs it."""

    source: TorchSource
    note: Callable[[str], None]
    _loaded: LoadedModule | None = None

    def loaded(self) -> LoadedModule:
        """The module with its weights, permanent ones."""
        if self._loaded is None or self._is_bare(self._loaded):
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
        if not self._is_bare(self.described()):
            return True
        sizes = {id(p): p.numel() for p in module.parameters()}
        return _SPARE * 4 * sum(sizes.values()) <= available_bytes()

    @staticmethod
    def _is_bare(loaded: LoadedModule) -> bool:
        return any(parameter.is_meta for parameter in loaded.module.parameters())

    def _made(self, make: Callable[[], LoadedModule]) -> LoadedModule:
        from twofour.pruning.torch.module_layers import make_permanent

        loaded = make()
        make_permanent(loaded.module)
        for text in loaded.notes:
            self.note(text)
        return loaded


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
        store = _stored(run, own.source, loaded.module, files, traced)
        written = _write(run, loaded, traced, store, files)
        own.release()
        others = tuple(other.file for other in graph.other_sizes)
        if files == GRAPH:
            written = (*written, INPUTS)
        return graph, (*written, *others)

    return Stage(
        name=Path(files.record).stem,
        title="trace the model",
        record=files.record,
        kind=ExportedVariant,
        work=work,
        depends_on=(
            *(_traced_options(run.options), run.options.dynamic),
            *(run.key_of(own.source), run.key_of(run.source)),
        ),
        packages=EXPORTERS,
    )


def _traced_options(asked: RunOptions) -> ExportOptions:
    """What a trace depends on; the free sizes are found by running the module."""
    precision = Precision.FLOAT32
    if asked.precision is Precision.BFLOAT16:  # which needs a later opset
        precision = Precision.BFLOAT16
    return ExportOptions(precision=precision, opset=asked.opset, dynamic_batch=asked.dynamic_batch)


def export_options(run: Run) -> ExportOptions:
    """The options of both exports, without the free sizes, which only the trace knows."""
    asked = run.options
    assert asked.first_precision is not None, "resolved for every torch model"
    return ExportOptions(
        precision=asked.first_precision,
        float32_nodes=() if asked.quantize else asked.keep_float32,
        opset=asked.opset,
        dynamic_batch=asked.dynamic_batch,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
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

    free = _free_sizes(loaded, asked)
    notes = [f"{name} stays as in the example inputs: {why}" for name, why in free.fixed.items()]
    while True:
        options = replace(
            _traced_options(asked),
            dynamic=free.axes,
            ranges=free.ranges,
            input_names=loaded.input_names,
        )
        try:
            traced = trace(loaded.module, loaded.args, loaded.kwargs, options)
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

    outputs, watched = None, Overflow()  # type: ignore[no-untyped-call]  # torch's own
    if fits:
        with watched:
            outputs = reference_outputs(loaded.module, loaded.args, loaded.kwargs)
    made = trace_freely(loaded, run.options)
    notes = (*notes_on(loaded.module), *made.notes)
    if not fits:
        size = sum(p.numel() for p in loaded.module.parameters()) * 4 * _SPARE
        why = (
            "the module's own outputs are not compared with: they need about "
            f"{size / 1e9:.0f} GB of memory, {available_bytes() / 1e9:.0f} are free"
        )
        notes = (*notes, why)
    for note in notes:
        run.progress.note(note)
    traced, free = made.traced, made.free
    if outputs is not None:
        _save_named(run.file(files.reference), traced.output_names, outputs)
    return traced, ExportedVariant(
        onnx=OnnxFile(variant=Variant.DENSE, file=files.graph, size_bytes=0),
        precision=Precision.FLOAT32,
        opset=traced.model.opset_imports[""],
        inputs=(),
        outputs=(),
        layers=traced.layers,
        dynamic=made.options.dynamic,
        ranges=made.options.ranges,
        inputs_are=loaded.inputs_are,
        reference=None if outputs is None else files.reference,
        overflows=watched.found,
        other_sizes=_run_other_sizes(run, loaded, free, traced) if fits else (),
        notes=notes,
    )


def described_model(
    source: TorchSource, asked: RunOptions, note: Callable[[str], None]
) -> tuple[OpenedModel, LayerMap, dict[str, tuple[int, ...]]]:
    """The graph that a run would export, without its weights, its layers, and the example's shapes.

    A source that knows its structure without its weights is not asked for them.
    """
    from twofour.export.calls import input_arrays
    from twofour.export.passes import without_weights

    loaded = SourceModule(source=source, note=note).described()
    made = trace_freely(loaded, asked)
    for text in made.notes:
        note(text)
    arrays = input_arrays(loaded.module, loaded.args, loaded.kwargs)
    shapes = {n: a.shape for n, a in zip(made.traced.input_names, arrays, strict=True)}
    return *without_weights(made.traced, made.options), shapes


def _stored(
    run: Run, source: TorchSource, module: nn.Module, files: GraphFiles, traced: TracedModule
) -> Store:
    """Where files have the module's weights: its checkpoint's own, else one that is written now."""
    target = run.file(files.weights)
    known = source.stored(module)
    if known is not None:
        return dict(_linked(known, target.with_suffix("")))
    names = frozenset(traced.model.graph.initializers)
    with atomic_file(target) as temporary:
        save_tensors(module.state_dict(), temporary, first=names)
    return read_stores([target])


def _linked(store: Store, start: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The same arrays in links to their files, which ONNX wants beside the graph."""
    links: dict[Path, Path] = {}
    for name, stored in store.items():
        if stored.file not in links:
            links[stored.file] = Path(f"{start}-{len(links)}.safetensors")
            links[stored.file].unlink(missing_ok=True)
            link_or_copy(stored.file, links[stored.file])
        yield name, replace(stored, file=links[stored.file])


def _write(
    run: Run, loaded: LoadedModule, traced: TracedModule, store: Store, files: GraphFiles
) -> tuple[str, ...]:
    """The graph and the example inputs; the names of what is hashed by run.json."""
    from twofour.export.calls import input_arrays
    from twofour.export.tracing import write_graph

    write_graph(traced, store, run.file(files.graph))
    if files == GRAPH:
        arrays = input_arrays(loaded.module, loaded.args, loaded.kwargs)
        _save_named(run.file(INPUTS), traced.input_names, arrays)
    names = (files.graph, files.weights, files.reference)
    return tuple(name for name in names if run.file(name).is_file())


def _free_sizes(loaded: LoadedModule, asked: RunOptions) -> FreeSizes:
    """The free sizes, found by running the module; none where only the batch may be free."""
    from twofour.export.calls import bind, float32_call, float32_module
    from twofour.export.sizes import NOTHING_FREE, find_free_sizes, refuse_fixed
    from twofour.export.tracing import fake_call, fake_values

    axes = loaded.dynamic if asked.dynamic is None else asked.dynamic
    if not axes:
        return NOTHING_FREE
    call = float32_call(bind(loaded.module, loaded.args, loaded.kwargs))
    is_bare = any(parameter.is_meta for parameter in loaded.module.parameters())
    with contextlib.ExitStack() as stack:
        module = loaded.module
        if is_bare:
            call = fake_call(call, stack.enter_context(fake_values(module)))
        else:
            module = float32_module(module)
        batch = asked.dynamic_batch
        free = find_free_sizes(module, call, axes, loaded.longest, batch=batch)
    if asked.dynamic is not None:
        refuse_fixed(loaded.module, axes, free.fixed)
    return free


def _run_other_sizes(
    run: Run, loaded: LoadedModule, free: FreeSizes, traced: TracedModule
) -> tuple[OtherSizes, ...]:
    """The module's inputs and outputs at the other sizes, for the check of the file."""
    from twofour.export.calls import bind, input_arrays, output_arrays, reference_outputs
    from twofour.export.sizes import resized, with_batch

    call = bind(loaded.module, loaded.args, loaded.kwargs)
    axes = with_batch(call, free.axes) if run.options.dynamic_batch else free.axes
    made = []
    for number, sizes in enumerate(free.others if free.axes else ()):
        other = resized(call, axes, sizes)
        inputs = input_arrays(loaded.module, other.args, other.kwargs)
        given = free.returned.get(frozenset(sizes.items()))
        if given is None:
            outputs = reference_outputs(loaded.module, other.args, other.kwargs)
        else:
            outputs = output_arrays(loaded.module, given)
        file = f"{STAGES}/sizes-{number}.npz"
        named_inputs = zip((f"input:{name}" for name in traced.input_names), inputs, strict=True)
        named = zip((f"output:{name}" for name in traced.output_names), outputs, strict=True)
        save_arrays(run.file(file), dict(named_inputs) | dict(named))
        made.append(OtherSizes(sizes=sizes, file=file))
    return tuple(made)


def _save_named(path: Path, names: Sequence[str], arrays: Sequence[np.ndarray]) -> None:
    save_arrays(path, dict(zip(names, arrays, strict=True)))
