"""A torch model in a run: exported dense, pruned, its weights saved, exported sparse.

`weight_files` writes the weights and prunes a checkpoint larger than memory instead; `checks` and
`building` take the ONNX files from here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from twofour.errors import BadInputError
from twofour.inputs.fits import save_arrays
from twofour.pipeline.checks import refuse_nothing_pruned
from twofour.pipeline.folder import (
    INPUTS,
    PRUNE,
    WEIGHTS,
    final_weights,
    onnx_files,
    onnx_name,
    reference_name,
)
from twofour.pipeline.stages import Run, Stage, StageOutput, exported_variant
from twofour.pipeline.torch.weight_files import load_weights, save_tensors
from twofour.records.export import TensorShape
from twofour.records.options import ExportOptions, Precision, RunOptions, Variant
from twofour.records.run import ExportedVariant, OtherSizes
from twofour.records.weights import PruneResult
from twofour.store import atomic_file

if TYPE_CHECKING:
    from twofour.export.sizes import FreeSizes
    from twofour.export.torch_export import TracedModules
    from twofour.sources.source import LoadedModule, TorchSource

_EXPORTERS = ("torch", "onnx", "onnxscript", "onnx-ir", "transformers", "timm")


class TorchModel:
    """The module dense or pruned, loaded only when a stage needs it; the `Model` of a run.

    Only one copy of the weights is ever held: pruning is in place, and asking for the dense
    module after that loads the source again.
    """

    package, in_words = "torch", "the module"
    default_precision = Precision.FLOAT16
    """No sparse kernel for float32 is known in TensorRT."""
    precision_hint = (
        "try --precision float32; if that agrees, the model loses too much in {precision}"
    )

    def __init__(
        self,
        source: TorchSource,
        note: Callable[[str], None],
        dense_model: TorchModel | None = None,
    ) -> None:
        """`dense_model`: the dense model, where `source` is one that was pruned before."""
        self._source = source
        self._note = note
        self._dense_model = dense_model
        self._loaded: LoadedModule | None = None
        self._pruned: Path | None = None
        self.data_files: Sequence[Path] = ()
        """Files that the source read when it was loaded last, besides its own code."""
        self.traces: TracedModules = {}
        """What the dense export traced, which the sparse one needs again."""

    def dense(self) -> LoadedModule:
        """The module with the weights of the source."""
        if self._loaded is None or self._pruned is not None:
            from twofour.pruning.torch.module_layers import make_permanent
            from twofour.sources.user_code import files_read

            self._loaded = None
            with files_read() as self.data_files:
                self._loaded = self._source.load()
            make_permanent(self._loaded.module)
            for text in self._loaded.notes:
                self._note(text)
            self._pruned = None
        return self._loaded

    def pruned(self, weights: Path) -> LoadedModule:
        """The module with the weights that were saved, read back unless they are at hand."""
        loaded = self._loaded or self.dense()
        if self._pruned != weights:
            load_weights(loaded.module, weights)
            self._pruned = weights
        return loaded

    def release(self) -> None:
        """Free the module and its memory, which the engines' process needs next."""
        self._loaded = None
        self._pruned = None
        self.traces.clear()
        from twofour.pruning.resources import give_back_memory

        gc.collect()  # modules and traces lie in cycles
        give_back_memory()

    def refuse_options_without_effect(self, options: RunOptions) -> None:
        """A torch model takes every option."""

    def export_dense(self, run: Run) -> ExportedVariant:
        """dense.onnx, and inputs.npz with the example inputs as the file takes them."""
        model, variant = self._dense_model or self, run.options.dense_variant

        def work() -> StageOutput[ExportedVariant]:
            loaded = model.dense()
            if model is not self:  # on the inputs of the model that is pruned
                loaded = replace(self.dense(), module=loaded.module)
            exported = _export_dense(run, loaded, model.traces)
            if model is not self:
                model.release()
            others = tuple(other.file for other in exported.other_sizes)
            files = (*onnx_files(run.file(onnx_name(variant))), reference_name(variant), INPUTS)
            return exported, (*files, *others)

        return run.do(
            Stage(
                name=f"export-{variant}",
                title="export dense model",
                kind=ExportedVariant,
                work=work,
                watched=lambda: model.data_files,
                depends_on=(
                    *(_export_options(run), run.options.dynamic),
                    *(run.key_of(run.source), run.key_of(run.dense_source)),
                ),
                packages=_EXPORTERS,
            )
        )

    def prune(self, run: Run) -> PruneResult:
        """weights.safetensors and prune.json."""
        from twofour.pipeline.torch.weight_files import calibration_of_run

        def work() -> StageOutput[PruneResult]:
            loaded, dense, finished = self.dense(), self._dense_model, None
            if options.calibration.data is None:
                from twofour.pruning.torch.module import prune_module

                pattern, method = options.pattern, options.method_name
                result = prune_module(loaded.module, pattern, options.selection, method=method)
            else:
                from twofour.calibrate.torch.block_loop import prune_calibrated

                loader = None if dense is None else lambda: dense.dense().module
                calls, record, task = calibration_of_run(run, loaded, run.described_in, loader)
                result = prune_calibrated(loaded.module, calls, record, task, options.selection)
                finished = task.finished
            result = replace(result, source=self._source.text)
            refuse_nothing_pruned(result)
            self._pruned = run.file(WEIGHTS)
            names = frozenset(row.weight.weight or "" for row in result.weights)
            with atomic_file(self._pruned) as temporary:
                save_tensors(loaded.module.state_dict(), temporary, first=names)
            if finished is not None:
                finished.clear()
            self._warn_where_it_fails(loaded)
            return result, (WEIGHTS,)

        options = run.options
        stage = Stage(
            name="prune",
            title=f"prune to {options.pattern}",
            record=PRUNE,
            kind=PruneResult,
            work=work,
            watched=lambda: (*self.data_files, *run.calibration_files),
            depends_on=(
                *options.pruning,
                *(run.key_of(run.source), run.calibration_key(), run.refit_key),
            ),
            packages=("torch",),
        )
        return run.do(stage)

    def _warn_where_it_fails(self, loaded: LoadedModule) -> None:
        """Run a float32 module on its example inputs; any other would be copied for that."""
        if any(p.is_floating_point() and p.itemsize != 4 for p in loaded.module.parameters()):
            return
        try:
            _outputs(loaded)
        except BadInputError as error:
            self._note(
                f"WARNING: weights were pruned, but {error.message}; before an export, {error.hint}"
            )

    def weights(self, run: Run) -> tuple[str, ...]:
        """weights.safetensors, or what they were fine-tuned to."""
        return (final_weights(run.path),)

    def export_sparse(self, run: Run, dense: ExportedVariant) -> ExportedVariant:
        """sparse.onnx, exported from the pruned module exactly as dense.onnx was."""
        options = replace(_export_options(run), dynamic=dense.dynamic, ranges=dense.ranges)
        variant, (weights,) = run.options.pruned_variant, self.weights(run)

        def work() -> StageOutput[ExportedVariant]:
            loaded = self.pruned(run.file(weights))
            outputs = _outputs(loaded)
            exported = _export(run, loaded, variant, options, outputs, traces=self.traces)
            del loaded
            self.release()
            return exported, (*onnx_files(run.file(onnx_name(variant))), reference_name(variant))

        stage = Stage(
            name=f"export-{variant}",
            title="export pruned model",
            kind=ExportedVariant,
            work=work,
            depends_on=(options, run.options.dynamic, run.key_of(run.source)),
            packages=_EXPORTERS,
            reads=(weights,),
        )
        return run.do(stage)


def _export_options(run: Run) -> ExportOptions:
    """The options of both exports, without the free sizes, which only the module knows."""
    asked = run.options
    assert asked.first_precision is not None, "resolved for every torch model"
    return ExportOptions(
        precision=asked.first_precision,
        float32_nodes=() if asked.quantize else asked.keep_float32,
        opset=asked.opset,
        dynamic_batch=asked.dynamic_batch,
    )


def _export_dense(run: Run, loaded: LoadedModule, traces: TracedModules) -> ExportedVariant:
    """Leave the sizes free that the source or the user names; a default that fails is dropped."""
    from twofour.export.example_inputs import input_arrays
    from twofour.export.sizes import FrozenSizeError

    asked = run.options.dynamic is not None
    outputs = _outputs(loaded)
    free = _free_sizes(run, loaded)
    notes = [f"{name} stays as in the example inputs: {why}" for name, why in free.fixed.items()]
    while True:
        try:
            options = replace(_export_options(run), dynamic=free.axes, ranges=free.ranges)
            variant = run.options.dense_variant
            exported = _export(run, loaded, variant, options, outputs, traces=traces)
            break
        except BadInputError as error:
            if asked or not free.axes:
                raise
            names = error.names if isinstance(error, FrozenSizeError) else None
            notes.append(f"sizes stay as in the example inputs: {error.message}")
            free = free.without(names)
    for note in notes:
        run.progress.note(note)
    arrays = input_arrays(loaded.module, loaded.args, loaded.kwargs)
    _save(run.file(INPUTS), exported.inputs, arrays)
    others = _run_other_sizes(run, loaded, free, exported)
    return replace(exported, other_sizes=others, notes=tuple(notes))


def _free_sizes(run: Run, loaded: LoadedModule) -> FreeSizes:
    """The free sizes, found by running the module; none where only the batch may be free."""
    from twofour.export.example_inputs import bind, float32_call, float32_module
    from twofour.export.sizes import NOTHING_FREE, find_free_sizes, refuse_fixed

    axes = loaded.dynamic if run.options.dynamic is None else run.options.dynamic
    if not axes:
        return NOTHING_FREE
    module = float32_module(loaded.module)
    call = float32_call(bind(module, loaded.args, loaded.kwargs))
    batch = run.options.dynamic_batch
    free = find_free_sizes(module, call, axes, loaded.longest, batch=batch)
    if run.options.dynamic is not None:
        refuse_fixed(module, axes, free.fixed)
    return free


def _run_other_sizes(
    run: Run, loaded: LoadedModule, free: FreeSizes, exported: ExportedVariant
) -> tuple[OtherSizes, ...]:
    """The module's inputs and outputs at the other sizes, for the check of the file."""
    from twofour.export.example_inputs import bind, input_arrays
    from twofour.export.sizes import resized, with_batch
    from twofour.export.torch_export import output_arrays, reference_outputs

    call = bind(loaded.module, loaded.args, loaded.kwargs)
    axes = with_batch(call, free.axes) if run.options.dynamic_batch else free.axes
    made = []
    for number, sizes in enumerate(free.others if free.axes else ()):
        other = resized(call, axes, sizes)
        inputs = input_arrays(loaded.module, other.args, other.kwargs)
        given = free.returned.get(frozenset(sizes.items()))
        outputs = (
            reference_outputs(loaded.module, other.args, other.kwargs)
            if given is None
            else output_arrays(loaded.module, given)
        )
        file = f"stages/sizes-{number}.npz"
        named_inputs = {f"input:{t.name}": a for t, a in zip(exported.inputs, inputs, strict=True)}
        named = {f"output:{t.name}": a for t, a in zip(exported.outputs, outputs, strict=True)}
        save_arrays(run.file(file), {**named_inputs, **named})
        made.append(OtherSizes(sizes=sizes, file=file))
    return tuple(made)


def _export(
    run: Run,
    loaded: LoadedModule,
    variant: Variant,
    options: ExportOptions,
    outputs: tuple[np.ndarray, ...],
    *,
    traces: TracedModules,
) -> ExportedVariant:
    from twofour.export.torch_export import export_onnx

    options = replace(options, input_names=loaded.input_names)
    file = run.file(onnx_name(variant))
    layers = export_onnx(loaded.module, loaded.args, loaded.kwargs, file, options, traces=traces)
    gc.collect()  # torch.export leaves cycles that hold the weights it traced
    exported = exported_variant(run, variant, layers)
    _save(run.file(reference_name(variant)), exported.outputs, outputs)
    return replace(
        exported,
        reference=reference_name(variant),
        precision=options.precision,
        dynamic=options.dynamic,
        ranges=options.ranges,
    )


def _outputs(loaded: LoadedModule) -> tuple[np.ndarray, ...]:
    from twofour.export.torch_export import reference_outputs

    return reference_outputs(loaded.module, loaded.args, loaded.kwargs)


def _save(path: Path, tensors: Sequence[TensorShape], arrays: Sequence[np.ndarray]) -> None:
    save_arrays(path, {t.name: array for t, array in zip(tensors, arrays, strict=True)})
