"""Milder patterns in a run: which layers are pruned to them, and their 2:4 form, sparse.onnx."""

from __future__ import annotations

from dataclasses import replace

from twofour.errors import BadInputError
from twofour.export.lifting import gaining, lift_onnx, liftable
from twofour.graph.opened import OpenedModel
from twofour.pipeline.folder import INPUTS, SPARSE, onnx_files, onnx_name
from twofour.pipeline.stages import Run, Stage, StageOutput, exported_variant
from twofour.pruning.selection import glob_of
from twofour.records.run import ExportedVariant
from twofour.records.weights import Pattern
from twofour.words import count


def leave_unlifted(run: Run, dense: ExportedVariant) -> Run:
    """The run with those layers excluded that would be pruned and not lifted.

    Layers whose width is no multiple of M are included: their tail is filled up. Raises
    BadInputError where nothing is to be lifted.
    """
    pattern, selection = run.options.pattern, run.options.selection
    opened = run.models.open(run.file(dense.onnx.file))
    rows = _lifted(run, opened, pattern)
    names = {(n.node, n.initializer): n.parameter for n in dense.layers.layers}
    why = f"--lift: it cannot be lifted, or does not gain on {run.options.gpu}"
    include, exclude = [*selection.include], [*selection.exclude]
    for row, weight in enumerate(opened.weights().weights):
        name = names.get((weight.node or "", weight.weight or ""), weight.weight)
        if name and (row not in rows or weight.in_channels % pattern.m):
            (include if row in rows else exclude).append(glob_of(name))
    said_by = dict.fromkeys(exclude[len(selection.exclude) :], why) | selection.said_by
    chosen = replace(selection, include=tuple(include), exclude=tuple(exclude), said_by=said_by)
    return replace(run, options=replace(run.options, selection=chosen))


def lift_file(run: Run, mild: ExportedVariant) -> Stage[ExportedVariant]:
    """sparse.onnx: the file with each layer lifted whose weight holds 4:6 or 6:8."""
    path, target, gpu = run.file(mild.onnx.file), run.file(onnx_name(SPARSE)), run.options.gpu

    def work() -> StageOutput[ExportedVariant]:
        opened = run.models.open(path)
        rows = _lifted(run, opened)
        lift_onnx(opened, target, rows)
        note = (
            f"--lift: {count(len(rows), 'layer')} that should gain on {gpu} became longer, of 2:4, "
            "behind a Gather; nobody has timed that in TensorRT: compare it with dense.onnx"
        )
        run.progress.note(note)
        onnx = exported_variant(run, SPARSE, mild.layers).onnx
        return replace(mild, onnx=onnx, notes=(*mild.notes, note)), onnx_files(target)

    return Stage(
        name=f"export-{SPARSE}",
        title=f"lift {mild.onnx.file} to 2:4",
        kind=ExportedVariant,
        work=work,
        depends_on=(mild, gpu, run.options.build.shapes),
        packages=("onnx", "onnx-ir"),
        reads=(INPUTS, *onnx_files(path)),
    )


def _lifted(run: Run, opened: OpenedModel, pattern: Pattern | None = None) -> dict[int, Pattern]:
    """The rows of the file's weights that gain on the GPU when they are lifted.

    Raises BadInputError where there are none.
    """
    gpu = str(run.options.gpu)
    rows = gaining(opened, liftable(opened, pattern), gpu, run.asked_shapes(opened))
    if not rows:
        raise BadInputError(
            f"{run.source.text}: --lift finds no weight of {pattern or 'a milder pattern'} that "
            f"gains on {gpu}, by the forecast for these inputs",
            hint="wide products of thousands of rows gain: give larger inputs, or leave --lift out",
        )
    return rows
