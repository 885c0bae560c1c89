"""Whether two models give the same outputs, at one size and at others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from twofour.errors import BadInputError, BuildFailedError, PatternBrokenError
from twofour.export.agreement import agreement
from twofour.pipeline.engine_host import Session
from twofour.pipeline.sources.inputs import stored_arrays
from twofour.pipeline.stages import INPUTS, Run
from twofour.records.export import OutputAgreement
from twofour.records.run import ExportedVariant, OtherSizes, SizeCheck


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
        f"{exported.onnx.file}: {disagreement(row, whose)}; {precision} allows {row.bound:.3g}",
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


def at_other_sizes(run: Run, session: Session, exported: ExportedVariant) -> Iterator[SizeCheck]:
    """The file against the module, smaller and larger than the example.

    What was asked for must hold: raises PatternBrokenError. What was only tried is said.
    """
    for other in exported.other_sizes:
        checked = _at_sizes(run, session, exported, other)
        if not checked.holds:
            words = ", ".join(f"{name} {size}" for name, size in other.sizes.items())
            why = checked.error or next(
                f"{disagreement(row, 'the module')}; {row.bound:.3g} is allowed"
                for row in checked.agreement
                if not row.within
            )
            message = (
                f"{exported.onnx.file} does not compute what the module does at {words}: {why}"
            )
            if run.options.dynamic is not None:
                raise PatternBrokenError(message, hint="leave that --dynamic out")
            run.progress.note(f"WARNING: {message}; --dynamic none keeps the example's sizes")
        yield checked


def _at_sizes(
    run: Run, session: Session, exported: ExportedVariant, other: OtherSizes
) -> SizeCheck:
    arrays = load_arrays(run.file(other.file))
    inputs, reference = (
        {n.removeprefix(k): a for n, a in arrays.items() if n.startswith(k)}
        for k in ("input:", "output:")
    )
    try:
        outputs = session.outputs(inputs)
        compared = agreement(
            tuple(outputs),
            [reference[name] for name in outputs],
            tuple(outputs.values()),
            bounds=exported.precision,
        )
    except (BuildFailedError, BadInputError) as error:
        return SizeCheck(sizes=other.sizes, agreement=(), error=error.message)
    return SizeCheck(sizes=other.sizes, agreement=compared)


def predictor(
    names: Sequence[str], outputs: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]
) -> Callable[..., tuple[np.ndarray, ...]]:
    """Arrays in the order of the inputs' `names` -> the outputs in the model's order.

    Calling it with another number of arrays raises BadInputError.
    """

    def predict(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        if len(arrays) != len(names):
            raise BadInputError(
                f"predict was given {len(arrays)} arrays, "
                f"the model takes {len(names)}: {list(names)}"
            )
        return tuple(outputs(dict(zip(names, arrays, strict=True))).values())

    return predict
