"""What an ONNX file gave before its precision was changed, and what in it would overflow."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from twofour.errors import BuildFailedError
from twofour.pipeline.agreement import example_inputs
from twofour.pipeline.context import DENSE, INPUTS, Run, reference_name
from twofour.pipeline.engine_host import lasts, tries_of
from twofour.pipeline.folder import STAGES
from twofour.pipeline.onnx_io import save_arrays
from twofour.pipeline.sessions import RUNTIMES
from twofour.pipeline.stages import Stage, versions
from twofour.records.options import Precision
from twofour.records.run import ExportedVariant, OriginalOutputs

if TYPE_CHECKING:
    from twofour.pipeline.sources.onnx_file import OnnxSource


def with_original_outputs(run: Run, taken: ExportedVariant) -> ExportedVariant:
    """The variant with the outputs that it is to be compared with, where its source can run.

    Raises BadInputError where a tensor goes beyond float16 on the example inputs.
    """
    source = cast("OnnxSource", run.dense_source if taken.variant == DENSE else run.source)
    name = reference_name(taken.variant)

    def work() -> tuple[OriginalOutputs, Sequence[str]]:
        from twofour.export.activation_ranges import refuse_overflow, split_ranges

        try:
            outputs, ranges = split_ranges(_run(run, source.path, taken))
        except BuildFailedError as error:
            tries = tries_of(error)
            return OriginalOutputs(outputs=None, why_not=error.message, failed_tries=tries), ()
        refuse_overflow(source.path, ranges)
        save_arrays(run.file(name), outputs)
        return OriginalOutputs(outputs=name), (name,)

    stage = Stage(
        name="original",
        title="run the model as it came",
        record="stages/original.json",
        depends={
            "source": source.key(),
            "precision": taken.precision,
            "changed": taken.changed,
            "versions": versions("onnx", *RUNTIMES),
        },
        reads=(INPUTS,),
    )
    original = run.runner.run(stage, OriginalOutputs, work, lasting=lasts)
    if original.why_not is not None:
        run.progress.note(f"outputs are not compared with {source.path.name}: {original.why_not}")
    return replace(taken, reference=original.outputs)


def _run(run: Run, source: Path, taken: ExportedVariant) -> dict[str, np.ndarray]:
    """Outputs of the file and how large its tensors become; without those where that fails."""
    from twofour.export.activation_ranges import write_with_ranges

    tensors = taken.changed if taken.precision is Precision.FLOAT16 else ()
    inputs = example_inputs(run)
    with tempfile.TemporaryDirectory(dir=run.file(STAGES)) as folder:
        path = Path(folder, "ranges.onnx")
        write_with_ranges(source, path, tensors)
        try:
            return run.sessions.open(path).outputs(inputs)
        except BuildFailedError:
            return run.sessions.open(source).outputs(inputs)
        finally:
            run.sessions.close()
