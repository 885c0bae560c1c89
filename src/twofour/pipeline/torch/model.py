"""A torch model in a run: exported dense, pruned, its weights kept, exported sparse."""

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
    DENSE,
    INPUTS,
    PRUNE,
    SPARSE,
    WEIGHTS,
    onnx_files,
    onnx_name,
    reference_name,
)
from twofour.pipeline.stages import Run, Stage, StageOutput, exported_variant
from twofour.pipeline.torch.weights import load_weights, save_tensors
from twofour.records.export import TensorShape
from twofour.records.options import (
    DynamicAxis,
    ExportOptions,
    Precision,
    RunOptions,
    SizeRange,
    Variant,
)
from twofour.records.run import ExportedVariant, OtherSizes
from twofour.records.weights import PruneResult
from twofour.store import atomic_file

if TYPE_CHECKING:
    from twofour.export.sizes import FreeSizes
    from twofour.export.torch_export import TracedModules
    from twofour.sources.source import LoadedModule, TorchSource

_EXPORTERS = ("torch", "onnx", "onnxscript", "onnx-ir", "transformers", "timm")
Free = tuple[tuple[DynamicAxis, ...], tuple[SizeRange, ...]]
"""Axes without a fixed size, and the sizes that they may have."""


class TorchModel:
    """The module dense or pruned, loaded only when a stage needs it; the `Model` of a run.

    Only one copy of the weights is ever held: pruning is in place, and asking for the dense
    module after that loads the source again.
    """

    package, in_words = "torch", "the module"
    default_precision = Precision.FLOAT16
    """TensorRT has no sparse float32 kernels."""
    precision_hint = (
        "try --precision float32; if that agrees, the model loses too much in {precision}"
    )

    def __init__(
        self,
        source: TorchSource,
        note: Callable[[str], None],
        reference: TorchModel | None = None,
    ) -> None:
        """`reference`: the dense model, where `source` is one that was pruned before."""
        self._source = source
        self._note = note
        self._reference = reference
        self._loaded: LoadedModule | None = None
        self._pruned: Path | None = None
        self.data_files: Sequence[Path] = ()
        """What the source read when it was loaded last, its own code apart."""
        self.traces: TracedModules = {}
        """What the dense export traced, which the sparse one needs again."""

    def dense(self) -> LoadedModule:
        """The module with the weights of the source."""
        if self._loaded is None or self._pruned is not None:
            from twofour.pruning.torch.layers import make_permanent
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
        """Let go of the module and its memory, which the engines' process needs next."""
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
        model = self._reference or self

        def work() -> StageOutput[ExportedVariant]:
            loaded = model.dense()
            if model is not self:  # on the inputs of the model that is pruned
                loaded = replace(self.dense(), module=loaded.module)
            exported = _export_dense(run, loaded, model.traces)
            if model is not self:
                model.release()
            others = tuple(other.file for other in exported.other_sizes)
            return exported, (*_left(run, DENSE), INPUTS, *others)

        return run.do(
            Stage(
                name="export-dense",
                title="export dense model",
                kind=ExportedVariant,
                work=work,
                watched=lambda: model.data_files,
                depends_on=(*_asked(run), run.key_of(run.dense_source)),
                packages=_EXPORTERS,
            )
        )

    def prune(self, run: Run) -> Stage[PruneResult]:
        """weights.safetensors and prune.json."""
        from twofour.pipeline.torch.weights import prune_by_options, refitted_to_key

        def work() -> StageOutput[PruneResult]:
            loaded = self.dense()
            dense = self._reference
            reference = None if dense is None else lambda: dense.dense().module
            result, finished = prune_by_options(run, loaded, reference)
            result = replace(result, source=self._source.text)
            refuse_nothing_pruned(result)
            self._pruned = run.file(WEIGHTS)
            names = frozenset(row.weight.weight or "" for row in result.weights)
            with atomic_file(self._pruned) as temporary:
                save_tensors(loaded.module.state_dict(), temporary, first=names)
            if finished is not None:
                finished.clear()
            return result, (WEIGHTS,)

        options = run.options
        return Stage(
            name="prune",
            title=f"prune to {options.pattern}",
            record=PRUNE,
            kind=PruneResult,
            work=work,
            watched=lambda: (*self.data_files, *run.calibration_files),
            depends_on=(
                *options.pruning,
                *(run.key_of(run.source), run.calibration_key(), refitted_to_key(run)),
            ),
            packages=("torch",),
        )

    def weights(self, run: Run) -> tuple[str, ...]:  # noqa: ARG002  # Protocol
        """weights.safetensors."""
        return (WEIGHTS,)

    def export_sparse(self, run: Run, dense: ExportedVariant) -> Stage[ExportedVariant]:
        """sparse.onnx, exported from the pruned module exactly as dense.onnx was."""
        free = (dense.dynamic, dense.ranges)

        def work() -> StageOutput[ExportedVariant]:
            loaded = self.pruned(run.file(WEIGHTS))
            outputs = _reference(loaded)
            exported = _export(run, loaded, SPARSE, free, outputs, traces=self.traces)
            del loaded
            self.release()
            return exported, _left(run, SPARSE)

        return Stage(
            name="export-sparse",
            title="export pruned model",
            kind=ExportedVariant,
            work=work,
            depends_on=(*_asked(run), free),
            packages=_EXPORTERS,
            reads=(WEIGHTS,),
        )


def _asked(run: Run) -> tuple[object, ...]:
    """What every export depends on."""
    options = run.options
    axes = (options.dynamic_batch, options.dynamic)
    precision = (options.precision, options.keep_float32)
    return (*precision, options.opset, *axes, run.key_of(run.source))


def _left(run: Run, variant: Variant) -> tuple[str, ...]:
    return (*onnx_files(run.file(onnx_name(variant))), reference_name(variant))


def _export_dense(run: Run, loaded: LoadedModule, traces: TracedModules) -> ExportedVariant:
    """With what the source leaves free, or the user asked for; a default that fails is let go."""
    from twofour.export.example_inputs import input_arrays
    from twofour.export.sizes import FrozenSizeError

    asked = run.options.dynamic is not None
    outputs = _reference(loaded)
    free = _free_sizes(run, loaded)
    notes = [f"{name} stays as in the example inputs: {why}" for name, why in free.fixed.items()]
    while True:
        try:
            sizes = (free.axes, free.ranges)
            exported = _export(run, loaded, DENSE, sizes, outputs, traces=traces)
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
    """Found by running the module, where there is anything beside the batch to be free."""
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
    from twofour.export.torch_export import reference_outputs

    call = bind(loaded.module, loaded.args, loaded.kwargs)
    axes = with_batch(call, free.axes) if run.options.dynamic_batch else free.axes
    made = []
    for number, sizes in enumerate(free.others if free.axes else ()):
        other = resized(call, axes, sizes)
        inputs = input_arrays(loaded.module, other.args, other.kwargs)
        outputs = reference_outputs(loaded.module, other.args, other.kwargs)
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
    free: Free,
    outputs: tuple[np.ndarray, ...],
    *,
    traces: TracedModules,
) -> ExportedVariant:
    from twofour.export.torch_export import export_onnx

    precision = run.options.precision
    assert precision is not None, "resolved for every torch model"
    options = ExportOptions(
        precision=precision,
        float32_nodes=run.options.keep_float32,
        opset=run.options.opset,
        dynamic_batch=run.options.dynamic_batch,
        dynamic=free[0],
        ranges=free[1],
        input_names=loaded.input_names,
    )
    file = run.file(onnx_name(variant))
    layers = export_onnx(loaded.module, loaded.args, loaded.kwargs, file, options, traces=traces)
    gc.collect()  # torch.export leaves cycles that hold the weights it traced
    exported = exported_variant(run, variant, layers)
    _save(run.file(reference_name(variant)), exported.outputs, outputs)
    return replace(
        exported,
        reference=reference_name(variant),
        precision=precision,
        dynamic=free[0],
        ranges=free[1],
    )


def _reference(loaded: LoadedModule) -> tuple[np.ndarray, ...]:
    from twofour.export.torch_export import reference_outputs

    return reference_outputs(loaded.module, loaded.args, loaded.kwargs)


def _save(path: Path, tensors: Sequence[TensorShape], arrays: Sequence[np.ndarray]) -> None:
    save_arrays(path, {t.name: array for t, array in zip(tensors, arrays, strict=True)})
