"""The stages of --quantize: both exported files are rounded to INT8 before they run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from twofour.engines.tensorrt.bindings import precisions_of
from twofour.errors import BadInputError
from twofour.graph.files import Array
from twofour.graph.opened import OpenedModel
from twofour.pipeline.checks import check_variant, is_quantized
from twofour.pipeline.folder import DENSE, SPARSE, STAGES, onnx_files
from twofour.pipeline.stages import ExportedPair, Run, Stage, StageOutput, exported_variant
from twofour.pipeline.validating import validate_exported
from twofour.records.options import Precision, Quantization, Variant
from twofour.records.run import ExportedVariant, VariantCheck
from twofour.records.weights import PruneResult

_MOST_SAMPLES = 128
"""Calibration samples whose values are counted: ranges hardly change with more."""


def refuse_quantized(run: Run, dense: ExportedVariant) -> None:
    """Raise BadInputError where --quantize is asked for a model that has Q/DQ nodes."""
    if run.options.quantize is not None and is_quantized(run, dense):
        raise BadInputError(
            f"{run.dense_source.text} is quantized already",
            hint="leave --quantize out: it is pruned and exported as it is",
        )


def quantize_files(run: Run, pruned: PruneResult, files: ExportedPair) -> ExportedPair:
    """dense.onnx and sparse.onnx, by the same rules, and the check of the dense file before.

    Raises PatternBrokenError where a file does not agree with the module before it is quantized,
    and where the exported weights are not N:M.
    """
    run.do(validate_exported(run, pruned, files.sparse))  # rounding may make zeros of its own
    dense_check = run.do(check_variant(run, files.dense))
    sparse_check = run.do(check_variant(run, files.sparse))
    return ExportedPair(
        dense=run.do(quantize_file(run, files.dense, dense_check, DENSE)),
        sparse=run.do(quantize_file(run, files.sparse, sparse_check, SPARSE)),
        float_check=dense_check,
    )


def quantize_file(
    run: Run, exported: ExportedVariant, check: VariantCheck, variant: Variant
) -> Stage[ExportedVariant]:
    """<variant>.onnx: the exported file with Q/DQ nodes, in the precision of the run elsewhere.

    Its outputs are compared with those of the file before (`check`), and none is refused.
    """
    target = run.onnx(variant)
    asked = run.options.quantize
    assert asked is not None, "the run quantizes"

    def work() -> StageOutput[ExportedVariant]:
        notes = _write_quantized(run, exported, target, asked)
        for note in notes:
            run.progress.note(note)
        written = replace(
            exported_variant(run, variant, exported.layers),
            inputs_are=exported.inputs_are,
            notes=(*exported.notes, *notes),
            reference=check.outputs,
        )
        return written, onnx_files(target)

    return Stage(
        name=f"export-{variant}",
        title=f"quantize {exported.onnx.file} to {asked.value}",
        kind=ExportedVariant,
        work=work,
        depends_on=(
            exported.to_json(),
            check.outputs,
            asked,
            run.options.precision,
            run.options.keep_float32,
            run.options.calibration,
            run.calibration_key(),
            run.options.seed,
        ),
        reads=onnx_files(run.file(exported.onnx.file)),
    )


def _write_quantized(
    run: Run, exported: ExportedVariant, target: Path, asked: Quantization
) -> tuple[str, ...]:
    """Write the file with Q/DQ nodes; gives the notes on what was rounded and converted."""
    from twofour.export.casts import Kept, PrecisionChange, narrow, until_all_fits
    from twofour.export.ir_models import save
    from twofour.export.quantize import quantized

    path = run.file(exported.onnx.file)
    opened = run.models.open(path)
    # what is not rounded to INT8: float16 with --precision float16, else what the file has
    precision = run.options.precision or _half_of(opened)
    tensors_of = partial(_tensors_of, run, exported)

    def convert(kept: Kept) -> PrecisionChange:
        conversion = PrecisionChange(notes=())
        rest = ""
        with quantized(opened, run.file(STAGES), tensors_of) as (model, words):
            if precision not in (None, Precision.FLOAT32):
                conversion = narrow(model, precision, path.name, kept)
                if conversion.changed:
                    rest = f"; other layers are {precision.value}"
            save(model, target, path)
        note = f"--quantize {asked.value}, {target.name}: {words}{rest}"
        return replace(conversion, notes=(*conversion.notes, note))

    kept = Kept(globs=run.options.keep_float32, too_large=exported.too_large)
    return until_all_fits(convert, kept).notes


def _tensors_of(run: Run, exported: ExportedVariant, path: Path) -> Iterator[Mapping[str, Array]]:
    """Inputs and outputs of the file on calibration samples, batches at equal distances."""
    from twofour.sources.calibration.kinds import onnx_inputs

    inputs = onnx_inputs(run.onnx(exported.onnx.variant), exported.inputs)
    inputs = replace(inputs, folder=run.described_in or inputs.folder)
    data = run.open_calibration(inputs)
    # of 1,024 samples every eighth batch: the first ones may all be short, or of one class
    step = math.ceil(data.samples / _MOST_SAMPLES)
    try:
        for batch in islice(data.batches(), 0, None, step):
            yield {**batch.arrays, **run.sessions.open(path).outputs(batch.arrays)}
    finally:
        run.sessions.close()


def _half_of(opened: OpenedModel) -> Precision | None:
    """The half precision that a file has, which its products leave and everything else keeps."""
    used = precisions_of(opened.proto)
    if used.bfloat16:
        return Precision.BFLOAT16
    return Precision.FLOAT16 if used.float16 else None
