"""An exported file against the module it came from, run by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twofour.engines.onnxruntime import CannotRunError
from twofour.errors import PatternBrokenError
from twofour.export.agreement import agreement
from twofour.pipeline.context import INPUTS, Run
from twofour.records import OutputAgreement, Precision


def compare_with_reference(
    run: Run, path: Path, reference: Sequence[np.ndarray], precision: Precision
) -> tuple[tuple[OutputAgreement, ...], str | None]:
    """How well the file's outputs agree with the module's, or why that cannot be found out here.

    Raises PatternBrokenError (a gate not met, exit 4) when an output is further off than the
    bound of the precision allows.
    """
    try:
        session = run.sessions.open(path)
    except CannotRunError as error:
        return (), str(error)
    outputs = session.outputs(example_inputs(run))
    compared = agreement(tuple(outputs), reference, tuple(outputs.values()), bounds=precision)
    for row in compared:
        if not row.within:
            raise PatternBrokenError(
                f"{path.name}: output {row.output!r} differs from the module's by "
                f"{row.max_abs_error:.3g} (cosine {row.cosine:.6f}); "
                f"{precision.value} allows {row.bound:.3g}",
                hint="try --precision float32; if that agrees, the model overflows or loses too "
                f"much in {precision.value}",
            )
    return compared, None


def example_inputs(run: Run) -> dict[str, np.ndarray]:
    """The example inputs as the stages saved them, by name of the ONNX input."""
    with np.load(run.file(INPUTS), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
