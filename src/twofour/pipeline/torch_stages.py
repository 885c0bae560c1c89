"""The stages of a torch source: export dense, prune, validate the weights, export sparse."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from twofour.errors import BadInputError
from twofour.pipeline.sources.inputs import save_arrays
from twofour.pipeline.stages import (
    DENSE,
    INPUTS,
    ONE_SHOT,
    ONE_SHOT_WEIGHTS,
    PERMUTE,
    PRUNE,
    SPARSE,
    VALIDATE,
    WEIGHTS,
    Made,
    Run,
    Stage,
    exported_variant,
    one_shot_files,
    onnx_files,
    onnx_name,
    reference_name,
    variant_record,
)
from twofour.pipeline.validating import pruned_names
from twofour.records.export import LayerMap, TensorShape
from twofour.records.options import DynamicAxis, ExportOptions, Precision, SizeRange, Variant
from twofour.records.pruning import PermutedModel, PruneResult, Validation
from twofour.records.run import ExportedVariant, OtherSizes

if TYPE_CHECKING:
    from twofour.pipeline.free_sizes import FreeSizes
    from twofour.pipeline.sources.source import LoadedModule
    from twofour.pipeline.torch_model import TorchModel

_EXPORT_OPTIONS = ("precision", "opset", "dynamic_batch", "dynamic")
_EXPORTERS = ("torch", "onnx", "onnxscript", "onnx-ir", "transformers", "timm")


def export_dense(run: Run) -> Stage[ExportedVariant]:
    """dense.onnx, and inputs.npz with the example inputs as the file takes them."""
    model = run.reference_model or _model(run)

    def work() -> Made[ExportedVariant]:
        loaded = model.dense()
        if run.reference_model is not None:  # on the inputs of the model that is pruned
            loaded = replace(_model(run).dense(), module=loaded.module)
        exported = _export_dense(run, loaded)
        if run.reference_model is not None:
            run.reference_model.release()
        others = tuple(other.file for other in exported.other_sizes)
        return exported, (*_left(run, DENSE), INPUTS, *others)

    return Stage(
        name="export-dense",
        title="export dense model",
        record=variant_record("export", DENSE),
        kind=ExportedVariant,
        work=work,
        watched=lambda: model.data_files,
        options=_EXPORT_OPTIONS,
        facts={"source": run.source.key(), "reference": run.dense_source.key()},
        packages=_EXPORTERS,
    )


def prune(run: Run, permuted: PermutedModel | None = None) -> Stage[PruneResult]:
    """weights.safetensors and prune.json; where it was permuted, the weights have that order."""
    from twofour.pipeline.torch_calibrating import (
        data_key,
        forget_finished,
        prune_by_options,
        refitted_to_key,
    )
    from twofour.pipeline.torch_permuting import prune_permuted

    model, options = _model(run), run.options

    def work() -> Made[PruneResult]:
        for name in (ONE_SHOT_WEIGHTS, *one_shot_files(run.path)):  # of an earlier run
            run.file(name).unlink(missing_ok=True)
        if permuted is not None and permuted.orders:
            result = prune_permuted(run, model, permuted)
        else:
            result = model.prune(lambda loaded: prune_by_options(run, loaded), run.file(WEIGHTS))
            result = replace(result, permutation=None if permuted is None else permuted.about)
        forget_finished(run)
        left = (WEIGHTS, ONE_SHOT_WEIGHTS)
        return result, tuple(name for name in left if run.file(name).is_file())

    return Stage(
        name="prune",
        title=f"prune to {options.pattern}",
        record=PRUNE,
        kind=PruneResult,
        work=work,
        watched=lambda: (*model.data_files, *run.calibration_files),
        options=("pattern", "selection", "method", "calibration"),
        facts={
            "source": run.source.key(),
            "calibration": data_key(run),
            "refitted_to": refitted_to_key(run),
        },
        packages=("torch",),
        reads=() if permuted is None else (PERMUTE,),
    )


def validate(run: Run, pruned: PruneResult) -> Stage[Validation]:
    """validate.json: the weights as they were saved, read back."""
    from twofour.pruning.verify import validate_safetensors

    weights = tuple(row.weight for row in pruned.weights)
    required = pruned_names(pruned)

    def work() -> Made[Validation]:
        path = run.file(WEIGHTS)
        checked = validate_safetensors(path, weights, pruned.pattern, required=required)
        return replace(checked, files=(path.name,)), ()

    return Stage(
        name="validate",
        title="validate the saved weights",
        record=VALIDATE,
        kind=Validation,
        work=work,
        reads=(PRUNE, WEIGHTS),
    )


def export_sparse(run: Run, dense: ExportedVariant) -> Stage[ExportedVariant]:
    """sparse.onnx, exported from the pruned module exactly as dense.onnx was."""
    model = _model(run)

    def work() -> Made[ExportedVariant]:
        free = (dense.dynamic, dense.ranges)
        loaded = model.pruned(run.file(WEIGHTS))
        exported = _export(run, loaded, SPARSE, free, _reference(loaded))
        model.release()
        return exported, _left(run, SPARSE)

    return Stage(
        name="export-sparse",
        title="export pruned model",
        record=variant_record("export", SPARSE),
        kind=ExportedVariant,
        work=work,
        options=_EXPORT_OPTIONS,
        facts={"source": run.source.key(), "free": (dense.dynamic, dense.ranges)},
        packages=_EXPORTERS,
        reads=(WEIGHTS,),
    )


def export_one_shot(run: Run, dense: ExportedVariant) -> Stage[LayerMap]:
    """stages/one-shot.onnx: the pruned model before its repair, exported as dense.onnx was."""
    model = _model(run)

    def work() -> Made[LayerMap]:
        loaded = model.pruned(run.file(ONE_SHOT_WEIGHTS))
        layers = _export_to(run, loaded, ONE_SHOT, (dense.dynamic, dense.ranges))
        return layers, one_shot_files(run.path)

    return Stage(
        name="export-one-shot",
        title="export the pruned model before its repair",
        record="stages/export-one-shot.json",
        kind=LayerMap,
        work=work,
        options=_EXPORT_OPTIONS,
        facts={"source": run.source.key(), "free": (dense.dynamic, dense.ranges)},
        packages=_EXPORTERS,
        reads=(ONE_SHOT_WEIGHTS,),
    )


def _model(run: Run) -> TorchModel:
    assert run.model is not None, "an ONNX source has stages of its own"
    return run.model


def _left(run: Run, variant: Variant) -> tuple[str, ...]:
    return (*onnx_files(run.file(onnx_name(variant))), reference_name(variant))


def _export_dense(run: Run, loaded: LoadedModule) -> ExportedVariant:
    """With what the source leaves free, or the user asked for; a default that fails is let go.

    Raises BadInputError for an axis that was asked for and cannot be free.
    """
    from twofour.export.example_inputs import input_arrays
    from twofour.export.sizes import FrozenSizeError

    asked = run.options.dynamic is not None
    outputs = _reference(loaded)
    free = _free_sizes(run, loaded)
    notes = [f"{name} stays as in the example inputs: {why}" for name, why in free.fixed.items()]
    while True:
        try:
            exported = _export(run, loaded, DENSE, (free.axes, free.ranges), outputs)
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
    from twofour.export.example_inputs import bind, converted
    from twofour.export.precision import TORCH_DTYPES, in_precision
    from twofour.pipeline.free_sizes import NOTHING_FREE, find_free_sizes, refuse_fixed

    axes = loaded.dynamic if run.options.dynamic is None else run.options.dynamic
    if not axes:
        return NOTHING_FREE
    module = in_precision(loaded.module, Precision.FLOAT32)
    call = converted(bind(module, loaded.args, loaded.kwargs), TORCH_DTYPES[Precision.FLOAT32])
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
    free: tuple[tuple[DynamicAxis, ...], tuple[SizeRange, ...]],
    outputs: tuple[np.ndarray, ...],
) -> ExportedVariant:
    layers = _export_to(run, loaded, onnx_name(variant), free)
    exported = exported_variant(run, variant, layers)
    _save(run.file(reference_name(variant)), exported.outputs, outputs)
    return replace(
        exported,
        reference=reference_name(variant),
        precision=run.options.precision,
        dynamic=free[0],
        ranges=free[1],
    )


def _export_to(
    run: Run,
    loaded: LoadedModule,
    name: str,
    free: tuple[tuple[DynamicAxis, ...], tuple[SizeRange, ...]],
) -> LayerMap:
    """Write the module to a file of the run folder."""
    from twofour.export.torch_export import export_onnx

    precision = run.options.precision
    assert precision is not None, "resolved for every torch model"
    options = ExportOptions(
        precision=precision,
        opset=run.options.opset,
        dynamic_batch=run.options.dynamic_batch,
        dynamic=free[0],
        ranges=free[1],
        input_names=loaded.input_names,
    )
    layers = export_onnx(loaded.module, loaded.args, loaded.kwargs, run.file(name), options)
    gc.collect()  # torch.export leaves cycles that hold the weights it traced
    return layers


def _reference(loaded: LoadedModule) -> tuple[np.ndarray, ...]:
    from twofour.export.torch_export import reference_outputs

    return reference_outputs(loaded.module, loaded.args, loaded.kwargs)


def _save(path: Path, tensors: Sequence[TensorShape], arrays: Sequence[np.ndarray]) -> None:
    save_arrays(path, {t.name: array for t, array in zip(tensors, arrays, strict=True)})
