"""The stages of an ONNX source: take the file over, prune it, validate what was written.

Where a precision is asked for, the file is converted as it is taken over, so that pruning and
everything after it see the weights that the engine will get.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from twofour.engines.tensorrt.build import precisions_of
from twofour.errors import BadInputError, BuildFailedError
from twofour.graph.opened import OpenedModel
from twofour.pipeline import onnx_data
from twofour.pipeline.engine_host import RUNTIMES, lasts, tries_of
from twofour.pipeline.folder import STAGES
from twofour.pipeline.onnx_inputs import (
    AskedShapes,
    asked_or_opt,
    example_shapes,
    load_exact_inputs,
    made_up_batch,
    random_inputs,
)
from twofour.pipeline.sources.inputs import save_arrays
from twofour.pipeline.stages import (
    DENSE,
    INPUTS,
    ONE_SHOT,
    PERMUTE,
    PERMUTED,
    PRUNE,
    SPARSE,
    TUNED,
    VALIDATE,
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
from twofour.pipeline.torch_model import refuse_nothing_pruned
from twofour.pipeline.validating import pruned_names
from twofour.pipeline.workers import may_pass
from twofour.records.export import LayerMap, LayerName
from twofour.records.options import Precision, RunOptions, Variant
from twofour.records.pruning import Permutation, PermutedModel, PruneResult, Validation
from twofour.records.run import ExampleArrays, ExportedVariant, OriginalOutputs

if TYPE_CHECKING:
    from twofour.export.casts import Conversion
    from twofour.pipeline.sources.onnx import OnnxSource
    from twofour.pruning.onnx_file import Calibrated


def take_over(run: Run, variant: Variant = DENSE) -> ExportedVariant:
    """<variant>.onnx: the user's file, in the precision asked for."""
    source = cast("OnnxSource", run.dense_source if variant == DENSE else run.source)
    precision, opened = changed_precision(run), source.opened()

    def work() -> Made[ExportedVariant]:
        from twofour.pipeline.onnx_functions import within_reach

        target = run.file(onnx_name(variant))
        _remove_data(target)
        with within_reach(opened, run.file(STAGES)) as (reached, notes):
            converted = write_onnx(reached, target, run.options)
        source.refuse_changed(opened)
        exported = replace(_described(run, variant), precision=precision, notes=notes)
        if converted is not None:
            notes = (*notes, *converted.notes)
            exported = replace(exported, notes=notes, changed=converted.tensors)
        return exported, onnx_files(target)

    stage = Stage(
        name=f"export-{variant}",
        title="take over the ONNX model"
        if precision is None
        else f"convert the ONNX model to {precision.value}",
        record=variant_record("export", variant),
        kind=ExportedVariant,
        work=work,
        options=("precision", "keep_float32"),
        facts={"source": source.key()},
        packages=("onnx",),
    )
    exported = run.do(stage)
    for note in exported.notes:
        run.progress.note(note)
    return exported


def changed_precision(run: Run) -> Precision | None:
    """What the file is converted to; None: it keeps its types."""
    asked = run.options.precision
    return None if asked is Precision.FLOAT32 else asked


def write_onnx(source: OpenedModel, target: Path, options: RunOptions) -> Conversion | None:
    """Copy an ONNX file with its data, in the precision asked for; None: as it is.

    Raises BadInputError for --keep-float32 without such a precision, and as convert_onnx does.
    """
    from twofour.pruning.onnx_file import copy_onnx

    precision = options.precision
    if precision is not None and precision is not Precision.FLOAT32:
        from twofour.export.casts import convert_onnx

        return convert_onnx(source, target, precision, options.keep_float32)
    if options.keep_float32:
        raise BadInputError(
            "--keep-float32 says what a change of precision leaves alone, and none is asked for",
            hint="add --precision float16 or bfloat16",
        )
    copy_onnx(source, target)
    if precision is Precision.FLOAT32:
        _refuse_half(source)
    return None


def _refuse_half(source: OpenedModel) -> None:
    used = precisions_of(source.proto)
    if used.float16 or used.bfloat16:
        raise BadInputError(
            f"--precision float32: {source.path} is {used.in_words} already, and rounding is not "
            "undone",
            hint="leave --precision out, or name the float32 file",
        )


def make_inputs(run: Run, taken: ExportedVariant) -> Stage[ExampleArrays]:
    """inputs.npz: the user's example inputs, or random ones of the shapes that were asked for.

    Sizes that the file leaves free and nobody asked for are those of the first calibration batch;
    raises BadInputError where there is none.
    """
    options = run.options
    by_data = _is_sized_by_data(run, taken)

    def work() -> Made[ExampleArrays]:
        arrays, note = _inputs(run, taken, by_data=by_data)
        if note is not None:
            run.progress.note(note)
        save_arrays(run.file(INPUTS), arrays)
        shapes = {name: tuple(map(int, array.shape)) for name, array in arrays.items()}
        return ExampleArrays(shapes=shapes, note=note), (INPUTS,)

    return Stage(
        name="inputs",
        title="make the example inputs",
        record="stages/inputs.json",
        kind=ExampleArrays,
        work=work,
        options=("inputs", "input_shapes", "input_shape_names", "seed"),
        facts={
            "source": run.source.key(),
            "profiles": options.build.shapes,
            "calibration": onnx_data.data_key(run) if by_data else "",
        },
        packages=("numpy",),
        reads=(taken.onnx.file,),
    )


def prune(run: Run, permuted: PermutedModel | None = None) -> Stage[PruneResult]:
    """sparse.onnx and prune.json; everything but the pruned weights is as in dense.onnx.

    Where it was permuted, the order of the channels is that of the permuted file.
    """
    if run.reference is not None:
        take_over(run, TUNED)
    base = onnx_name(_base(run))
    files = [base] if permuted is None or permuted.file is None else [base, permuted.file]
    target = run.file(onnx_name(SPARSE))

    def work() -> Made[PruneResult]:
        result = _prune(run, permuted)
        if permuted is None:  # of an earlier run
            remove_onnx(run.file(PERMUTED))
        return result, (*onnx_files(target), *one_shot_files(run.path))

    return Stage(
        name="prune",
        title=f"prune to {run.options.pattern}",
        record=PRUNE,
        kind=PruneResult,
        work=work,
        options=("pattern", "selection", "method", "calibration"),
        facts={
            "calibration": onnx_data.data_key(run),
            "refitted_to": run.dense_source.key() if run.options.refits_a_mask else "",
        },
        watched=lambda: run.calibration_files,
        lasting=lambda pruned: pruned.repair is None or not may_pass(pruned.repair.why or ""),
        packages=("onnx",) if run.options.calibration.data is None else ("onnx", *RUNTIMES),
        reads=(
            *(name for file in files for name in onnx_files(run.file(file))),
            *(() if permuted is None else (PERMUTE,)),
        ),
    )


def validate(run: Run, pruned: PruneResult) -> Stage[Validation]:
    """validate.json: sparse.onnx as it was saved, read back."""
    from twofour.pruning.verify import validate_onnx

    path = run.file(onnx_name(SPARSE))
    required = pruned_names(pruned)

    def work() -> Made[Validation]:
        checked = validate_onnx(run.models.open(path), pruned.pattern, required=required)
        return replace(checked, files=(path.name,)), ()

    return Stage(
        name="validate",
        title="validate the saved model",
        record=VALIDATE,
        kind=Validation,
        work=work,
        reads=(PRUNE, *onnx_files(path)),
    )


def describe_sparse(run: Run) -> Stage[ExportedVariant]:
    """stages/export-sparse.json: what an export would say of sparse.onnx, which pruning wrote."""
    path = run.file(onnx_name(SPARSE))

    def work() -> Made[ExportedVariant]:
        return replace(_described(run, SPARSE), precision=changed_precision(run)), ()

    return Stage(
        name="export-sparse",
        title="describe the pruned model",
        record=variant_record("export", SPARSE),
        kind=ExportedVariant,
        work=work,
        options=("precision",),
        packages=("onnx",),
        reads=onnx_files(path),
    )


def with_original_outputs(run: Run, taken: ExportedVariant) -> ExportedVariant:
    """The variant with the outputs that it is to be compared with, where its source can run.

    Raises BadInputError where a tensor goes beyond float16 on the example inputs.
    """
    source = cast("OnnxSource", run.dense_source if taken.onnx.variant == DENSE else run.source)
    name = reference_name(taken.onnx.variant)
    passing: list[str] = []

    def work() -> Made[OriginalOutputs]:
        from twofour.export.int8 import refuse_overflow, split_ranges

        try:
            found = _outputs_and_ranges(run, source.opened(), taken, passing)
            outputs, ranges = split_ranges(found)
        except BuildFailedError as error:
            tries = tries_of(error)
            return OriginalOutputs(outputs=None, why_not=error.message, failed_tries=tries), ()
        refuse_overflow(source.opened(), ranges)
        save_arrays(run.file(name), outputs)
        return OriginalOutputs(outputs=name), (name,)

    stage = Stage(
        name="original",
        title="run the model as it came",
        record="stages/original.json",
        kind=OriginalOutputs,
        work=work,
        lasting=lambda original: lasts(original) and not passing,
        options=("precision",),
        facts={"source": source.key(), "changed": taken.changed},
        packages=("onnx", *RUNTIMES),
        reads=(INPUTS,),
    )
    original = run.do(stage)
    if original.why_not is not None:
        run.progress.note(f"outputs are not compared with {source.path.name}: {original.why_not}")
    return replace(taken, reference=original.outputs)


def _outputs_and_ranges(
    run: Run, source: OpenedModel, taken: ExportedVariant, passing: list[str]
) -> dict[str, np.ndarray]:
    """Outputs of the file and how large its tensors become; without those where that fails.

    A failure that another time may spare goes into `passing`.
    """
    from twofour.export.int8 import write_with_ranges

    tensors = taken.changed if taken.precision is Precision.FLOAT16 else ()
    inputs = run.example_inputs()
    with tempfile.TemporaryDirectory(dir=run.file(STAGES)) as folder:
        path = Path(folder, "ranges.onnx")
        write_with_ranges(source, path, tensors)
        try:
            return run.sessions.open(path).outputs(inputs)
        except BuildFailedError as error:
            passing.extend([error.message] if may_pass(error.message) else [])
            return run.sessions.open(source.path).outputs(inputs)
        finally:
            run.sessions.close()


def _prune(run: Run, permuted: PermutedModel | None) -> PruneResult:
    from twofour.pruning.onnx_file import prune_onnx

    pattern, selection = run.options.pattern, run.options.selection
    sparse, folder = run.file(onnx_name(SPARSE)), run.file(STAGES) / "calibration"
    _remove_data(sparse)
    method = run.options.method_name
    solved = _solved(run, permuted, folder)
    opened, calibrated = solved.opened, solved.calibrated
    pruned = prune_onnx(opened, sparse, pattern, selection, method=method, calibrated=calibrated)
    one_shot = run.file(ONE_SHOT)
    remove_onnx(one_shot)
    if calibrated is not None and calibrated.one_shot is not None:
        before = calibrated.one_shot
        prune_onnx(opened, one_shot, pattern, selection, method=method, calibrated=before)
    shutil.rmtree(folder, ignore_errors=True)
    result = replace(pruned, source=run.source.text, permutation=solved.permutation)
    refuse_nothing_pruned(result)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """Which file is pruned, with which values, and what became of its permutation."""

    opened: OpenedModel
    calibrated: Calibrated | None = None
    """None: without data."""
    permutation: Permutation | None = None


def _solved(run: Run, permuted: PermutedModel | None, folder: Path) -> _Solved:
    """In the better order, where both were tried: the permuted file's, or the one that it had."""
    from twofour.pruning.permutation.judging import judged_whole

    opened = run.models.open(run.file(onnx_name(_base(run))))
    about = None if permuted is None else permuted.about
    has_data = run.options.calibration.data is not None
    if permuted is None or permuted.file is None:
        calibrated = onnx_data.calibrated(run, opened, folder) if has_data else None
        return _Solved(opened=opened, calibrated=calibrated, permutation=about)
    in_order = run.models.open(run.file(permuted.file))
    if not has_data:
        return _Solved(opened=in_order, permutation=about)
    better = onnx_data.calibrated(run, in_order, folder / "permuted")
    if run.options.method.repair is False:  # which would measure the outputs
        return _Solved(opened=in_order, calibrated=better, permutation=about)
    plain = onnx_data.calibrated(run, opened, folder / "unpermuted")
    about = judged_whole(permuted.about, better.repair, plain.repair)
    if about.refused is None:
        return _Solved(opened=in_order, calibrated=better, permutation=about)
    run.progress.note(f"the channels stay in their order: {about.refused}")
    return _Solved(opened=opened, calibrated=plain, permutation=about)


def _base(run: Run) -> Variant:
    """The variant that is pruned."""
    return DENSE if run.reference is None else TUNED


def remove_onnx(path: Path) -> None:
    """The file and its data, where they are there."""
    _remove_data(path)
    path.unlink(missing_ok=True)


def _remove_data(path: Path) -> None:
    """Data files of what stood there before: the new model may have none, or fewer."""
    for name in onnx_files(path)[1:]:
        (path.parent / name).unlink(missing_ok=True)


def _described(run: Run, variant: Variant) -> ExportedVariant:
    """Without a module, the node is the layer and the initializer the parameter."""
    model = run.models.open(run.file(onnx_name(variant)))
    layers = LayerMap(
        layers=tuple(
            LayerName(
                layer=w.layer,
                parameter=w.weight,
                node=w.node or w.layer,
                initializer=w.weight,
                op=w.op,
            )
            for w in model.weights().weights
            if w.weight is not None
        )
    )
    return exported_variant(run, variant, layers)


def _inputs(
    run: Run, taken: ExportedVariant, *, by_data: bool
) -> tuple[dict[str, np.ndarray], str | None]:
    """The arrays, and what is to be said about sizes that nobody gave."""
    options = run.options
    if options.inputs is not None:
        return load_exact_inputs(Path(options.inputs), taken.inputs), None
    asked = _shapes_of_data(run, taken) if by_data else asked_or_opt(options, options.build.shapes)
    arrays = random_inputs(taken.inputs, options.seed, asked, run.source.text)
    shapes = {name: array.shape for name, array in arrays.items()}
    if by_data:
        given = " ".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items())
        return arrays, f"example inputs are as large as a batch of the calibration data: {given}"
    return arrays, made_up_batch(taken.inputs, shapes, asked)


def _is_sized_by_data(run: Run, taken: ExportedVariant) -> bool:
    """Whether there are sizes that only the calibration data give."""
    options = run.options
    asked = asked_or_opt(options, options.build.shapes)
    if options.inputs is not None or options.calibration.data is None or asked.shapes:
        return False
    try:
        example_shapes(taken.inputs, asked, run.source.text)
    except BadInputError:
        return True
    return False


def _shapes_of_data(run: Run, taken: ExportedVariant) -> AskedShapes:
    data = onnx_data.open_data(run, run.models.open(run.file(taken.onnx.file)))
    arrays = next(data.batches()).arrays
    return AskedShapes(
        shapes=tuple(tuple(map(int, array.shape)) for array in arrays.values()),
        names=tuple(arrays),
    )
