"""A torch model in a run: traced, its weights pruned, both files exported from the one graph.

`graph` traces, `weight_files` writes and prunes weights; `checks` and `building` take the ONNX
files from here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.errors import BuildFailedError
from twofour.graph.stored import Store, read_stores
from twofour.inputs.fits import save_arrays
from twofour.pipeline.checks import prune_stage, run_with_ranges
from twofour.pipeline.folder import (
    HELD_OUT,
    STAGES,
    WEIGHTS,
    final_weights,
    onnx_files,
    reference_name,
)
from twofour.pipeline.stages import Run, Stage, StageOutput, exported_variant
from twofour.pipeline.torch.graph import (
    DENSE_REFERENCE,
    GRAPH,
    GraphFiles,
    SourceModule,
    example_call,
    export_options,
    trace_stage,
)
from twofour.pipeline.torch.pruning import (
    calibrate_graph,
    prune_into,
    stored_in,
    takes,
    traced_on,
    written_graph,
)
from twofour.pipeline.torch.weight_files import load_weights
from twofour.records.options import Precision, RunOptions, Variant
from twofour.records.run import ExportedVariant
from twofour.records.weights import PruneResult
from twofour.sources.calibration.kinds import loaded_inputs

if TYPE_CHECKING:
    from twofour.export.passes import GraphExport
    from twofour.graph.opened import OpenedModel
    from twofour.pruning.arrays import Calibrated
    from twofour.sources.source import TorchSource

_CALIBRATION = f"{STAGES}/calibration"
"""Folder of what calibration keeps until the weights are written."""
_CALIBRATED = f"{STAGES}/calibrated.onnx"
"""The graph that calibration data are run through, where it is another one."""


class TorchModel:
    """The graph of a module, and its weights dense or pruned; the `Model` of a run."""

    package = "torch"
    in_words = "the module"
    precision_hint = (
        "does the module give the same outputs twice (random numbers, buffers that change)? If so, "
        "and --precision float32 agrees, the model loses too much in {precision}"
    )

    def __init__(
        self,
        source: TorchSource,
        note: Callable[[str], None],
        dense_source: TorchSource | None = None,
    ) -> None:
        """`dense_source`: the dense model, where `source` is one that was pruned before."""
        self._module = SourceModule(source, note)
        self._dense = self._module
        self._graph: ExportedVariant | None = None
        self._export: GraphExport | None = None
        self._traced_in = Path()
        """The run folder with the graph; a study of layers within it has none of its own."""
        if dense_source is not None:
            self._dense = SourceModule(dense_source, note)

    def default_precision(self, _options: RunOptions) -> Precision:
        """Float16: no sparse kernel for float32 is known in TensorRT."""
        return Precision.FLOAT16

    def refuse_options_without_effect(self, options: RunOptions) -> None:
        """A torch model takes every option."""

    def graph(self, run: Run) -> ExportedVariant:
        """The traced graph, stages/graph.onnx, and the files with its weights."""
        if self._graph is None:
            self._graph = run.do(trace_stage(run, self._module, GRAPH, self._module))
            self._traced_in = run.path
        return self._graph

    def _dense_graph(self, run: Run) -> tuple[ExportedVariant, GraphFiles]:
        """The graph that dense.onnx is made of, which has the inputs of the model's own."""
        own = self.graph(run)
        if self._dense is self._module:
            return own, GRAPH
        return run.do(trace_stage(run, self._dense, DENSE_REFERENCE, self._module)), DENSE_REFERENCE

    def export_dense(self, run: Run) -> ExportedVariant:
        """dense.onnx; inputs.npz with the example inputs as the file takes them is there."""
        traced, files = self._dense_graph(run)
        variant = run.options.dense_variant

        def work() -> StageOutput[ExportedVariant]:
            graph = run.models.open(run.file(files.graph))
            export = _graph_export(run, graph, _too_large(run, traced, graph))
            exported = _exported(run, variant, traced, export, stored_in(graph))
            if files == GRAPH:
                self._export = export  # sparse.onnx is written from the same
            for note in exported.notes:
                run.progress.note(note)
            exported = replace(
                exported,
                reference=traced.reference,
                other_sizes=traced.other_sizes,
                notes=(*traced.notes, *exported.notes),
                inputs_are=traced.inputs_are,
            )
            return exported, onnx_files(run.onnx(variant))

        return run.do(_export_stage(run, variant, work, (files.graph, files.weights)))

    def prune(self, run: Run) -> PruneResult:
        """weights.safetensors and prune.json."""
        options = run.options
        self.graph(run)
        if options.refits_a_mask:
            self._dense_graph(run)

        from twofour.pruning.arrays import WITHOUT_DATA

        def prune_graph() -> PruneResult:
            opened = run.models.open(self._traced_in / GRAPH.graph)
            calibrated = WITHOUT_DATA
            if options.calibration.data is not None:
                opened, calibrated = self.calibrated(run, opened)
            pruned = prune_into(opened, run.file(WEIGHTS), options, calibrated)
            shutil.rmtree(run.file(_CALIBRATION), ignore_errors=True)
            run.file(_CALIBRATED).unlink(missing_ok=True)
            return pruned

        reads = run.there(GRAPH.weights)
        return run.do(prune_stage(run, prune_graph, lambda: (WEIGHTS,), reads))

    def calibrated(self, run: Run, graph: OpenedModel) -> tuple[OpenedModel, Calibrated]:
        """New values by the run's calibration data, and the graph whose weights they are.

        It is another trace where the data have sizes that the graph does not leave free.
        """
        loaded = self._module.described()
        inputs = loaded_inputs(loaded, run.source.text, run.described_in)
        # forward may have more arguments than the example inputs give, and the graph takes those
        taken = {tensor.name for tensor in graph.inputs}
        known = tuple(one for one in inputs.inputs if one.name in taken)
        data = run.open_calibration(replace(inputs, inputs=known) if known else inputs)
        dense_model = None
        if run.options.refits_a_mask:
            dense_model = run.models.open(run.file(DENSE_REFERENCE.graph))
        if not takes(graph, data):
            traced = traced_on(loaded.module, data)
            graph = written_graph(traced, stored_in(graph), run.file(_CALIBRATED))
        self._module.release()
        folder = run.file(_CALIBRATION)
        calibrated = calibrate_graph(
            graph, data, run.options, folder, run.progress, dense_model=dense_model
        )
        if graph.path == run.file(_CALIBRATED):  # the exported files do not take these sizes
            run.file(HELD_OUT).unlink()
        return graph, calibrated

    def weights(self, run: Run) -> tuple[str, ...]:
        """weights.safetensors, or what they were fine-tuned to."""
        return (final_weights(run.path),)

    def export_sparse(self, run: Run, dense: ExportedVariant) -> ExportedVariant:
        """sparse.onnx: the graph of dense.onnx with the pruned weights."""
        traced = self.graph(run)
        variant = run.options.pruned_variant
        (weights,) = self.weights(run)

        def work() -> StageOutput[ExportedVariant]:
            export = self._export
            if export is None:
                graph = run.models.open(self._traced_in / GRAPH.graph)
                export = _graph_export(run, graph, dense.too_large)
            exported = _exported(run, variant, traced, export, read_stores([run.file(weights)]))
            export.close()
            self._export = None
            files = onnx_files(run.onnx(variant))
            # ONNX Runtime's CPU provider runs no bfloat16: the module is run instead
            if dense.precision is Precision.BFLOAT16 and traced.reference is not None:
                exported = self._with_outputs(run, exported, run.file(weights))
                files = (*files, reference_name(variant))
            return exported, files

        return run.do(_export_stage(run, variant, work, (GRAPH.graph, weights)))

    def _with_outputs(self, run: Run, exported: ExportedVariant, weights: Path) -> ExportedVariant:
        """The record with the outputs of the module with these weights on its example inputs."""
        from twofour.export.calls import reference_outputs

        loaded = self._module.loaded()
        load_weights(loaded.module, weights)
        outputs = reference_outputs(loaded.module, example_call(loaded))
        self._module.release()
        name = reference_name(exported.onnx.variant)
        pairs = zip(exported.outputs, outputs, strict=True)
        save_arrays(run.file(name), {tensor.name: array for tensor, array in pairs})
        return replace(exported, reference=name)


def _graph_export(run: Run, graph: OpenedModel, too_large: tuple[str, ...]) -> GraphExport:
    from twofour.export.passes import GraphExport

    return GraphExport(graph.proto, export_options(run), too_large)


def _too_large(run: Run, traced: ExportedVariant, graph: OpenedModel) -> tuple[str, ...]:
    """Tensors that float16 does not reach on the example inputs; () where the module has none."""
    if not traced.overflows or run.options.precision is not Precision.FLOAT16:
        return ()
    try:
        return run_with_ranges(run, graph)[1]
    except BuildFailedError as error:
        run.progress.note(f"what overflows in float16 is not known: {error.message}")
        return ()


def _exported(
    run: Run, variant: Variant, traced: ExportedVariant, export: GraphExport, store: Store
) -> ExportedVariant:
    """<variant>.onnx, written from a graph with these weights."""
    layers = export.write(store, run.onnx(variant))
    return replace(
        exported_variant(run, variant, layers),
        precision=export_options(run).precision,
        notes=export.done.notes,
        too_large=export.too_large,
        dynamic=traced.dynamic,
        ranges=traced.ranges,
    )


def _export_stage(
    run: Run,
    variant: Variant,
    work: Callable[[], StageOutput[ExportedVariant]],
    reads: tuple[str, ...],
) -> Stage[ExportedVariant]:
    what = "dense" if variant is run.options.dense_variant else "pruned"
    return Stage(
        name=f"export-{variant}",
        title=f"export the {what} model",
        kind=ExportedVariant,
        work=work,
        depends_on=(export_options(run), run.key_of(run.source), run.key_of(run.dense_source)),
        reads=run.there(*reads),  # a checkpoint's weights stay in its own files
    )
