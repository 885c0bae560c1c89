"""A run with --quantize: dense.onnx and sparse.onnx are float.onnx and pruned.onnx, rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from twofour.engines.tensorrt.bindings import precisions_of
from twofour.graph.files import Array
from twofour.graph.opened import OpenedModel
from twofour.pipeline.checks import check_variant
from twofour.pipeline.folder import DENSE, SPARSE, STAGES, onnx_files, onnx_name
from twofour.pipeline.stages import Run, Stage, StageOutput, exported_variant
from twofour.pipeline.validating import validate_exported
from twofour.records.options import Precision, Variant
from twofour.records.run import ExportedVariant, VariantCheck
from twofour.records.weights import PruneResult
from twofour.workers.host import RUNTIMES

_MOST_SAMPLES = 128
"""Calibration samples whose values are counted: ranges hardly change with more."""


def quantize_files(
    run: Run, dense: ExportedVariant, pruned: ExportedVariant, result: PruneResult
) -> tuple[ExportedVariant, ExportedVariant, VariantCheck]:
    """dense.onnx and sparse.onnx, by the same rules, and the check of the dense file before.

    Raises PatternBrokenError where a file does not agree with the module before it is quantized,
    and where the exported weights are not N:M.
    """
    run.do(validate_exported(run, result, pruned))
    before, sparse_before = (run.do(check_variant(run, exported)) for exported in (dense, pruned))
    made = run.do(quantize_file(run, dense, before, DENSE))
    return made, run.do(quantize_file(run, pruned, sparse_before, SPARSE)), before


def quantize_file(
    run: Run, exported: ExportedVariant, check: VariantCheck, variant: Variant
) -> Stage[ExportedVariant]:
    """<variant>.onnx: the exported file with Q/DQ nodes, in the precision of the run elsewhere.

    Its outputs are compared with those of the file before (`check`), and none is refused.
    """
    path, target = run.file(exported.onnx.file), run.file(onnx_name(variant))
    asked = run.options.quantize
    assert asked is not None, "the run quantizes"

    def work() -> StageOutput[ExportedVariant]:
        from twofour.export.casts import Conversion, Kept, narrow, until_all_fits
        from twofour.export.ir_models import save
        from twofour.export.quantize import quantized

        opened = run.models.open(path)
        precision = run.options.precision or _half_of(opened)
        tensors_of = partial(_tensors_of, run, exported)

        def convert(kept: Kept) -> Conversion:
            with quantized(opened, run.file(STAGES), tensors_of) as (model, words):
                done, rest = Conversion(notes=()), ""
                if precision not in (None, Precision.FLOAT32):
                    done = narrow(model, precision, path.name, kept)
                    rest = f"; other layers are {precision.value}" if done.changed else ""
                save(model, target, path)
            said = f"--quantize {asked.value}, {target.name}: {words}{rest}"
            return replace(done, notes=(*done.notes, said))

        kept = Kept(globs=run.options.keep_float32, too_large=exported.too_large)
        notes = until_all_fits(convert, kept).notes
        for note in notes:
            run.progress.note(note)
        written = exported_variant(run, variant, exported.layers)
        said_all = (*exported.notes, *notes)
        written = replace(written, inputs_are=exported.inputs_are, notes=said_all)
        return replace(written, reference=check.outputs), onnx_files(target)

    return Stage(
        name=f"export-{variant}",
        title=f"quantize {exported.onnx.file} to {asked.value}",
        kind=ExportedVariant,
        work=work,
        depends_on=(
            *(exported, check.outputs, asked, run.options.precision, run.options.keep_float32),
            *(run.options.calibration, run.calibration_key(), run.options.seed),
        ),
        packages=("onnx", "onnx-ir", *RUNTIMES),
        reads=onnx_files(path),
    )


def _tensors_of(run: Run, exported: ExportedVariant, path: Path) -> Iterator[Mapping[str, Array]]:
    """Inputs and outputs of the file on the calibration samples."""
    from twofour.sources.calibration.kinds import onnx_inputs

    inputs = onnx_inputs(run.path / exported.onnx.file, exported.inputs)
    folder = inputs.folder if run.described_in is None else run.described_in
    options = run.options.calibration
    fewer = replace(options, samples=min(options.samples, _MOST_SAMPLES))
    data = replace(run, options=replace(run.options, calibration=fewer)).open_calibration(
        replace(inputs, folder=folder)
    )
    try:
        for batch in data.batches():
            yield {**batch.arrays, **run.sessions.open(path).outputs(batch.arrays)}
    finally:
        run.sessions.close()


def _half_of(opened: OpenedModel) -> Precision | None:
    """The half precision that a file has, which its products leave and everything else keeps."""
    used = precisions_of(opened.proto)
    if used.bfloat16:
        return Precision.BFLOAT16
    return Precision.FLOAT16 if used.float16 else None
