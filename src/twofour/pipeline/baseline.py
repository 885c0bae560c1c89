"""Whether dense.onnx is a dense model to compare with, and whether it fits the pruned one."""

from __future__ import annotations

from twofour.errors import BadInputError
from twofour.pipeline.context import Run
from twofour.records.export import TensorShape
from twofour.records.pruning import PruneResult
from twofour.records.run import ExportedVariant


def why_no_baseline(pruned: PruneResult) -> str | None:
    """What to say of weights that came in N:M; None where all of them were pruned now."""
    rows = [row for row in pruned.weights if row.pruned]
    held = sum(row.held_before for row in rows)
    if not held:
        return None
    remedy = "--dense-reference MODEL names the dense one"
    if held == len(rows):
        return (
            f"already {pruned.pattern}: nothing pruned, all {held} weights hold it as they came; "
            f"dense.onnx has the same weights and is no baseline ({remedy})"
        )
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
