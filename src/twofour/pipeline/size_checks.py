"""An exported file against its module at other sizes than the example's."""

from __future__ import annotations

from collections.abc import Iterator

from twofour.errors import BadInputError, BuildFailedError, PatternBrokenError
from twofour.export.agreement import agreement
from twofour.pipeline.agreement import disagreement, load_arrays
from twofour.pipeline.context import Run
from twofour.pipeline.sessions import Session
from twofour.records.run import ExportedVariant, OtherSizes, SizeCheck


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
            message = f"{exported.file} does not compute what the module does at {words}: {why}"
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
