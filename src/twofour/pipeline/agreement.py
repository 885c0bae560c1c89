"""An exported file against the module it came from, and the arrays that stages hand on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from twofour.errors import PatternBrokenError
from twofour.export.agreement import agreement
from twofour.pipeline.context import INPUTS, Run
from twofour.records import ExportedVariant, OutputAgreement


def compare_with_reference(
    run: Run, exported: ExportedVariant, outputs: Mapping[str, np.ndarray]
) -> tuple[OutputAgreement, ...]:
    """How well the file's outputs agree with the module's; () for a model that came as ONNX.

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
            raise PatternBrokenError(
                f"{exported.file}: output {row.output!r} differs from the module's by "
                f"{row.max_abs_error:.3g} (cosine {row.cosine:.6f}); "
                f"{exported.precision.value} allows {row.bound:.3g}",
                hint="try --precision float32; if that agrees, the model overflows or loses too "
                f"much in {exported.precision.value}",
            )
    return compared


def example_inputs(run: Run) -> dict[str, np.ndarray]:
    """The example inputs as the stages saved them, by name of the ONNX input."""
    return load_arrays(run.file(INPUTS))


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz that a stage wrote, in its order."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
