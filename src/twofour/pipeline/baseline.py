"""What the dense model gave before anything was done to it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from twofour.errors import BadInputError, BuildFailedError
from twofour.graph.opened import OpenedModel
from twofour.pipeline.agreement import example_inputs
from twofour.pipeline.engine_host import RUNTIMES, lasts, tries_of
from twofour.pipeline.folder import STAGES
from twofour.pipeline.onnx_inputs import save_arrays
from twofour.pipeline.stages import DENSE, INPUTS, Made, Run, Stage, reference_name
from twofour.records.export import TensorShape
from twofour.records.options import Precision
from twofour.records.pruning import PruneResult
from twofour.records.run import ExportedVariant, OriginalOutputs
from twofour.words import nothing_pruned

if TYPE_CHECKING:
    from twofour.pipeline.sources.onnx import OnnxSource


def why_no_baseline(pruned: PruneResult) -> str | None:
    """What to say of weights that came in N:M; None where all of them were pruned now."""
    rows = [row for row in pruned.weights if row.pruned]
    held = sum(row.held_before for row in rows)
    if not held:
        return None
    remedy = "--dense-reference MODEL names the dense one"
    if held == len(rows):
        said = nothing_pruned(pruned.pattern, held)
        return f"{said}; dense.onnx has the same weights and is no baseline ({remedy})"
    return (
        f"{held} of {len(rows)} weights came in {pruned.pattern} already: dense.onnx is no dense "
        f"baseline ({remedy})"
    )


def check_reference_fits(run: Run, dense: ExportedVariant, sparse: ExportedVariant) -> None:
    """Raise BadInputError where the dense reference takes or gives something else."""
    if run.reference is None:
        return
    for kind, there, here in (
        ("input", dense.inputs, sparse.inputs),
        ("output", dense.outputs, sparse.outputs),
    ):
        words = [", ".join(map(_described, tensors)) or "none" for tensors in (there, here)]
        same = len(there) == len(here) and all(map(_fits, there, here))
        if not same:
            raise BadInputError(
                f"--dense-reference {run.reference.text} does not fit {run.source.text}: its "
                f"{kind}s are {words[0]}, those of the model are {words[1]}",
                hint="name the dense model that this one was fine-tuned from",
            )


def _fits(there: TensorShape, here: TensorShape) -> bool:
    dims = zip(there.shape, here.shape, strict=False)
    return (
        (there.name, there.dtype, len(there.shape)) == (here.name, here.dtype, len(here.shape))
    ) and all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in dims)


def _described(tensor: TensorShape) -> str:
    return f"{tensor.name} {'x'.join(map(str, tensor.shape)) or 'scalar'} {tensor.dtype}"


def with_original_outputs(run: Run, taken: ExportedVariant) -> ExportedVariant:
    """The variant with the outputs that it is to be compared with, where its source can run.

    Raises BadInputError where a tensor goes beyond float16 on the example inputs.
    """
    source = cast("OnnxSource", run.dense_source if taken.onnx.variant == DENSE else run.source)
    name = reference_name(taken.onnx.variant)

    def work() -> Made[OriginalOutputs]:
        from twofour.export.int8 import refuse_overflow, split_ranges

        try:
            outputs, ranges = split_ranges(_run(run, source.opened(), taken))
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
        lasting=lasts,
        options=("precision",),
        facts={"source": source.key(), "changed": taken.changed},
        packages=("onnx", *RUNTIMES),
        reads=(INPUTS,),
    )
    original = run.do(stage)
    if original.why_not is not None:
        run.progress.note(f"outputs are not compared with {source.path.name}: {original.why_not}")
    return replace(taken, reference=original.outputs)


def _run(run: Run, source: OpenedModel, taken: ExportedVariant) -> dict[str, np.ndarray]:
    """Outputs of the file and how large its tensors become; without those where that fails."""
    from twofour.export.int8 import write_with_ranges

    tensors = taken.changed if taken.precision is Precision.FLOAT16 else ()
    inputs = example_inputs(run)
    with tempfile.TemporaryDirectory(dir=run.file(STAGES)) as folder:
        path = Path(folder, "ranges.onnx")
        write_with_ranges(source, path, tensors)
        try:
            return run.sessions.open(path).outputs(inputs)
        except BuildFailedError:
            return run.sessions.open(source.path).outputs(inputs)
        finally:
            run.sessions.close()
