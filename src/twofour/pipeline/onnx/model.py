"""An ONNX file in a run: copied to dense.onnx, pruned into sparse.onnx, described like an export.

Where a precision is asked for, the copy is converted, so that pruning and everything after it see
the weights that the engine will get.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from twofour.engines.tensorrt.bindings import precisions_of
from twofour.errors import BadInputError, BuildFailedError
from twofour.graph.files import graphs
from twofour.graph.opened import OpenedModel, has_half, open_onnx
from twofour.inputs.examples import (
    GIVEN,
    MADE_UP,
    RANDOM,
    asked_shapes,
    bind_shapes,
    load_exact_inputs,
    made_up_batch,
    random_inputs,
)
from twofour.inputs.fits import Arrays, save_arrays, shapes_of
from twofour.pipeline.checks import prune_stage, run_with_ranges
from twofour.pipeline.folder import INPUTS, STAGES, TUNED, onnx_files, reference_name, remove_data
from twofour.pipeline.stages import Run, Stage, StageOutput, exported_variant
from twofour.records.export import LayerMap, LayerName
from twofour.records.options import Precision, RunOptions, Variant
from twofour.records.run import ExampleArrays, ExportedVariant, OriginalOutputs
from twofour.records.weights import PruneResult
from twofour.words import count
from twofour.workers.host import is_final, tries_of

if TYPE_CHECKING:
    from twofour.inputs.samples import CalibrationData
    from twofour.sources.source import OnnxSource


_INTEGER = re.compile("quantize|qlinear|integer", re.IGNORECASE)
"""In the names of operators that make or read quantized values."""
_SEEN = "calibration samples, which pruning uses too"


class OnnxModel:
    """An ONNX file, copied to dense.onnx and pruned into sparse.onnx; the `Model` of a run."""

    package = "onnx"
    precision_hint = (
        "--precision float32 keeps the file's own type, --keep-float32 GLOB that of some nodes; "
        "--precision bfloat16 has float32's range"
    )

    def __init__(
        self,
        source: OnnxSource,
        dense_source: OnnxSource | None = None,
        *,
        keeps_types: bool = False,
    ) -> None:
        """`dense_source`: the dense file, where `source` is one that was pruned before.

        With `keeps_types` it is converted only where a precision is asked for.
        """
        self.in_words = source.text
        self._source = source
        self._keeps_types = keeps_types
        self._dense_source = dense_source or source
        self._is_dense = dense_source is None
        self._taken: set[Variant] = set()
        self._too_large: tuple[str, ...] = ()

    def default_precision(self, options: RunOptions) -> Precision | None:
        """Float16 for a float32 file; the file's types where the builder may choose others."""
        if self._keeps_types or options.build.allow:
            return None
        opened = self._source.opened()
        nodes = (node for graph in graphs(opened.proto) for node in graph.node)
        is_int8 = any(_INTEGER.search(node.op_type) for node in nodes)
        return None if is_int8 or has_half(opened.proto) else Precision.FLOAT16

    def refuse_options_without_effect(self, options: RunOptions) -> None:
        """Raise BadInputError for what only the export of a torch model takes."""
        given = {
            "--dynamic": options.dynamic is not None,
            "--static-batch": not options.dynamic_batch,
            "--opset": options.opset is not None,
        }
        for option, is_given in given.items():
            if is_given:
                raise BadInputError(
                    f"{self._source.text} is ONNX already: {option} is for torch models",
                    hint="the file has its opset and its free sizes; --input-shape gives these a "
                    "value",
                )

    def export_dense(self, run: Run) -> ExportedVariant:
        """dense.onnx, inputs.npz, and the outputs of a file whose precision was changed."""
        return self.export_as_it_is(run, run.options.dense_variant, self._dense_source)

    def export_as_it_is(self, run: Run, variant: Variant, source: OnnxSource) -> ExportedVariant:
        """sparse.onnx or dense.onnx with the inputs; all that a job which only builds exports."""
        bind_shapes(run.options.build.shapes, source.opened().inputs)
        made = run.do(_make_inputs(run, source))
        if run.options.precision in (None, Precision.FLOAT32):
            return replace(self._copy_in(run, variant, source), inputs_are=made.are)
        original = run.do(_original_outputs(run, source, variant))
        if original.why_not is not None:
            note = f"outputs are not compared with {source.path.name}: {original.why_not}"
            if made.are == RANDOM:
                note += f"; {MADE_UP}"
            run.progress.note(note)
        self._too_large = original.too_large
        copied = self._copy_in(run, variant, source)
        reference = original.outputs if copied.precision is not None else copied.reference
        return replace(copied, inputs_are=made.are, reference=reference)

    def prune(self, run: Run) -> PruneResult:
        """sparse.onnx and prune.json; everything but the pruned weights is as in dense.onnx."""
        options = run.options
        unchanged = options.dense_variant if self._is_dense else TUNED
        if not self._taken:
            self._copy_in(run, options.dense_variant, self._dense_source)
        if unchanged not in self._taken:
            self._copy_in(run, unchanged, self._source)
        base = run.onnx(unchanged)
        files = partial(self.weights, run)
        into = f" in {options.pruned_variant}.onnx"
        return run.do(prune_stage(run, partial(_prune, run, base), files, onnx_files(base), into))

    def weights(self, run: Run) -> tuple[str, ...]:
        """sparse.onnx and its data."""
        return onnx_files(run.onnx(run.options.pruned_variant))

    def export_sparse(self, run: Run, dense: ExportedVariant) -> ExportedVariant:
        """What an export would say about sparse.onnx, which pruning wrote."""
        variant = run.options.pruned_variant

        def work() -> StageOutput[ExportedVariant]:
            exported = replace(_described(run, variant), too_large=dense.too_large)
            return replace(exported, precision=dense.precision), ()

        stage = Stage(
            name=f"export-{variant}",
            title="describe the pruned model",
            kind=ExportedVariant,
            work=work,
            depends_on=(dense.precision, dense.too_large),
            reads=self.weights(run),
        )
        return run.do(stage)

    def _copy_in(self, run: Run, variant: Variant, source: OnnxSource) -> ExportedVariant:
        """<variant>.onnx: the user's file, in the precision asked for."""
        options = replace(run.options, precision=None) if run.options.quantize else run.options
        asked = options.precision
        too_large = self._too_large
        precision = None if asked is Precision.FLOAT32 else asked
        title = "copy the ONNX model"
        if precision is not None:
            title = f"convert the ONNX model to {precision.value}"

        def work() -> StageOutput[ExportedVariant]:
            target = run.onnx(variant)
            notes = _write_reachable(source, target, options, too_large)
            exported = replace(_described(run, variant), precision=precision, too_large=too_large)
            return replace(exported, notes=notes), onnx_files(target)

        self._taken.add(variant)
        stage = Stage(
            name=f"export-{variant}",
            title=title,
            kind=ExportedVariant,
            work=work,
            depends_on=(asked, run.options.keep_float32, run.key_of(source), too_large),
        )
        exported = run.do(stage)
        for note in exported.notes:
            run.progress.note(note)
        return exported


def _write_reachable(
    source: OnnxSource, target: Path, options: RunOptions, too_large: tuple[str, ...]
) -> tuple[str, ...]:
    """Write the file with all weights where pruning reaches them; notes on what was changed.

    Where a function contains a weight or is given one, a copy with its functions inlined is
    written.
    """
    from twofour.graph.opened import inlined
    from twofour.pruning.onnx import copy_onnx

    opened = source.opened()
    remove_data(target)
    model = inlined(opened)
    if model is None:
        return write_onnx(opened, target, options, too_large)
    functions = count(len(opened.proto.functions), "function")
    note = f"{functions} of the model inlined, as TensorRT does, because weights are in them"
    # a function that two layers call has one weight for both: inlined, each has a node of its own
    stages = target.parent / STAGES
    stages.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=stages) as own:
        copy = Path(own, opened.path.name)
        copy_onnx(opened, copy, model)
        return note, *write_onnx(open_onnx(copy), target, options, too_large)


def write_onnx(
    source: OpenedModel, target: Path, options: RunOptions, too_large: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Copy an ONNX file with its data, in the precision asked for; notes on what was converted.

    Raises BadInputError for float32 of a half-precision file, and what convert_onnx raises.
    """
    from twofour.pruning.onnx import copy_onnx

    precision = options.precision
    if precision is not None and precision is not Precision.FLOAT32:
        from twofour.export.casts import Kept, convert_onnx

        kept = Kept(globs=options.keep_float32, too_large=too_large)
        conversion = convert_onnx(source, target, precision, kept)
        note = f"nothing in {source.path.name} is float32 that could be {precision.value}"
        if conversion.changed:
            note = (
                f"{source.path.name}: float32 converted to {precision.value}, inputs and outputs "
                "apart; --precision float32 keeps the file's types"
            )
        return note, *conversion.notes
    copy_onnx(source, target)
    used = precisions_of(source.proto)
    if precision is Precision.FLOAT32 and (used.float16 or used.bfloat16):
        raise BadInputError(
            f"--precision float32: {source.path} is {used.in_words} already, and its rounding "
            "cannot be undone",
            hint="leave --precision out, or name the float32 file",
        )
    return ()


def _make_inputs(run: Run, source: OnnxSource) -> Stage[ExampleArrays]:
    """inputs.npz: the user's example inputs, or random ones of the shapes that were asked for.

    Without either, the first calibration batch; raises BadInputError for a free size without data.
    """
    options = run.options

    def work() -> StageOutput[ExampleArrays]:
        arrays, are = _inputs(run, source.opened())
        save_arrays(run.file(INPUTS), arrays)
        return ExampleArrays(are=are), (INPUTS,)

    return Stage(
        name="inputs",
        title="make the example inputs",
        kind=ExampleArrays,
        work=work,
        depends_on=(
            options.inputs,
            options.input_shapes,
            options.input_shape_names,
            options.seed,
            run.key_of(source),
            options.build.shapes,
            run.calibration_key(),
        ),
    )


def _inputs(run: Run, opened: OpenedModel) -> tuple[Arrays, str]:
    """The arrays and what they are, with a note about what nobody gave."""
    options = run.options
    if options.inputs is not None:
        return load_exact_inputs(Path(options.inputs), opened.inputs), GIVEN
    asked = asked_shapes(opened.inputs, options, options.build.shapes)
    if options.calibration.data is not None and not asked:
        first = next(_calibration_data(run, opened).batches())
        run.progress.note(f"the example inputs are {_SEEN}; --inputs FILE.npz gives others")
        return first.arrays, _SEEN
    arrays = random_inputs(opened.inputs, options.seed, asked, run.source.text)
    note = made_up_batch(opened.inputs, shapes_of(arrays), asked)
    if note is not None:
        run.progress.note(note)
    return arrays, RANDOM


def _prune(run: Run, base: Path) -> PruneResult:
    from twofour.pruning.arrays import WITHOUT_DATA
    from twofour.pruning.onnx import prune_onnx

    options = run.options
    sparse = run.onnx(options.pruned_variant)
    remove_data(sparse)
    folder = run.file(STAGES) / "calibration"
    opened = run.models.open(base)
    calibrated = WITHOUT_DATA
    if options.calibration.data is not None:
        from twofour.pipeline.onnx.calibrating import CalibrationTask, calibrate

        task = CalibrationTask(
            opened=opened,
            options=options,
            folder=folder,
            progress=run.progress,
            dense_model=run.opened(options.dense_variant) if options.refits_a_mask else None,
        )
        calibrated = calibrate(task, _calibration_data(run, opened))
    pruned = prune_onnx(
        opened,
        sparse,
        options.pattern,
        options.selection,
        method=options.method_name,
        calibrated=calibrated,
    )
    shutil.rmtree(folder, ignore_errors=True)
    return pruned


def _calibration_data(run: Run, opened: OpenedModel) -> CalibrationData:
    """The run's calibration data for the file under the user's name of it."""
    from twofour.sources.calibration.kinds import onnx_inputs

    return run.open_calibration(onnx_inputs(Path(run.source.text).absolute(), opened.inputs))


def _original_outputs(run: Run, source: OnnxSource, variant: Variant) -> Stage[OriginalOutputs]:
    """The outputs of the file as it came, and what in it float16 does not reach."""
    name = reference_name(variant)

    def work() -> StageOutput[OriginalOutputs]:
        opened = source.opened()
        data = None
        if run.options.calibration.data is not None:
            data = _calibration_data(run, opened)
        try:
            outputs, too_large = run_with_ranges(run, opened, data)
        except BuildFailedError as error:
            tries = tries_of(error)
            return OriginalOutputs(outputs=None, why_not=error.message, failed_tries=tries), ()
        save_arrays(run.file(name), outputs)
        return OriginalOutputs(outputs=name, too_large=too_large), (name,)

    return Stage(
        name="original",
        title="run the model as it came",
        kind=OriginalOutputs,
        work=work,
        lasting=is_final,
        depends_on=(
            run.options.precision,
            run.options.keep_float32,
            run.key_of(source),
            run.calibration_key(),
        ),
        reads=(INPUTS,),
    )


def _described(run: Run, variant: Variant) -> ExportedVariant:
    """The record of the file; without a module, node and initializer name layer and parameter."""
    model = run.opened(variant)
    names = [
        LayerName(
            layer=row.layer,
            parameter=row.weight,
            node=row.node or row.layer,
            initializer=row.weight,
            op=row.op,
        )
        for row in model.weights().weights
        if row.weight is not None
    ]
    return exported_variant(run, variant, LayerMap(layers=tuple(names)))
