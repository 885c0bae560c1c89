"""An exported file against the module it came from, and the arrays that stages hand on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from twofour.errors import PatternBrokenError
from twofour.export.agreement import agreement
from twofour.pipeline.context import INPUTS, Run
from twofour.pipeline.sources.arrays import stored_arrays
from twofour.records.export import OutputAgreement
from twofour.records.run import ExportedVariant


def compare_with_reference(
    run: Run, exported: ExportedVariant, outputs: Mapping[str, np.ndarray]
) -> tuple[OutputAgreement, ...]:
    """How well the file's outputs agree with those of what it was made from: the module, or the
    ONNX file before its precision was changed; () for an ONNX file that was copied.

    Raises PatternBrokenError (a gate not met, exit 4) when an output is further off than the
    bound of the precision allows.
    """
    if exported.reference is None or exported.precision is None:
        return ()
    reference = load_arrays(run.file(exported.reference))
    compared = agreement(
        tuple(outputs),
        [reference[name] for name in outputs],
        tuple(outputs.values()),
        bounds=exported.precision,
    )
    for row in compared:
        if not row.within:
            _refuse(run, exported, row, exported.precision.value)
    return compared


def _refuse(run: Run, exported: ExportedVariant, row: OutputAgreement, precision: str) -> None:
    came_as_onnx = run.model is None
    whose = run.source.text if came_as_onnx else "the module"
    hint = f"try --precision float32; if that agrees, the model loses too much in {precision}"
    if came_as_onnx:
        hint = "--keep-float32 GLOB leaves nodes float32; --precision bfloat16 has float32's range"
    raise PatternBrokenError(
        f"{exported.file}: {disagreement(row, whose)}; {precision} allows {row.bound:.3g}",
        hint=hint,
    )


def disagreement(row: OutputAgreement, whose: str) -> str:
    """How far an output is off: from that of the module, or of another file."""
    if row.not_finite:
        why = f"has {row.not_finite} values that are NaN or infinite: something overflows"
        return f"output {row.output!r} {why}"
    return (
        f"output {row.output!r} differs from that of {whose} by {row.max_abs_error:.3g} "
        f"(cosine {row.cosine:.6f})"
    )


def example_inputs(run: Run) -> dict[str, np.ndarray]:
    """The example inputs as the stages saved them, by name of the ONNX input."""
    return load_arrays(run.file(INPUTS))


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz that a stage wrote, in its order; raises BadInputError for damage."""
    return stored_arrays(path)
