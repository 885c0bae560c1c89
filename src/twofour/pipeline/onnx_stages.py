"""The stages of an ONNX source: take the file over, prune it, validate what was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from twofour.graph import find_weights, load_model
from twofour.pipeline.context import DENSE, INPUTS, SPARSE, Run, onnx_files, onnx_name
from twofour.pipeline.exporting import pruned_names
from twofour.pipeline.onnx_io import describe, load_inputs, random_inputs, save_arrays
from twofour.pipeline.stages import Stage, versions
from twofour.records import (
    ExportedFile,
    ExportedVariant,
    LayerMap,
    LayerName,
    Pattern,
    PruneResult,
    Selection,
    Validation,
)

if TYPE_CHECKING:
    from twofour.pipeline.sources.onnx_file import OnnxSource

_OWN_TYPES = "the model came as ONNX; there is no module to compare it with"


def take_over(run: Run, variant: str = DENSE) -> ExportedVariant:
    """<variant>.onnx: the user's file, as it is; inputs.npz: the example inputs."""
    source = cast("OnnxSource", run.source)

    def work() -> tuple[ExportedVariant, Sequence[str]]:
        target = run.file(onnx_name(variant))
        files = _copy(source.path, target)
        exported = _described(target, variant)
        save_arrays(run.file(INPUTS), _inputs(run, exported))
        return exported, (*files, INPUTS)

    stage = Stage(
        name=f"export-{variant}",
        title="take over the ONNX model",
        record=f"stages/export-{variant}.json",
        depends={
            "source": source.key(),
            "input_shapes": run.options.input_shapes,
            "versions": versions("onnx"),
        },
    )
    return run.runner.run(stage, ExportedVariant, work)


def prune(run: Run) -> tuple[PruneResult, ExportedVariant]:
    """sparse.onnx and prune.json; everything but the pruned weights is as in dense.onnx."""
    pattern, selection = run.options.pattern, run.options.selection
    target = run.file(onnx_name(SPARSE))

    def work() -> tuple[PruneResult, Sequence[str]]:
        return _prune(run, pattern, selection), onnx_files(target)

    stage = Stage(
        name="prune",
        title=f"prune to {pattern}",
        record="prune.json",
        depends={
            "pattern": str(pattern),
            "selection": repr(selection),
            "versions": versions("onnx"),
        },
        reads=tuple(onnx_files(run.file(onnx_name(DENSE)))),
    )
    return run.runner.run(stage, PruneResult, work), _described(target, SPARSE)


def validate(run: Run, pruned: PruneResult) -> Validation:
    """validate.json: sparse.onnx as it was saved, read back."""
    from twofour.pruning.validate import validate_onnx

    path = run.file(onnx_name(SPARSE))
    required = pruned_names(pruned)

    def work() -> tuple[Validation, Sequence[str]]:
        checked = validate_onnx(path, pruned.pattern, required=required)
        return replace(checked, files=(path.name,)), ()

    stage = Stage(
        name="validate",
        title="validate the saved model",
        record="validate.json",
        depends={"versions": versions()},
        reads=("prune.json", *onnx_files(path)),
    )
    return run.runner.run(stage, Validation, work)


def _prune(run: Run, pattern: Pattern, selection: Selection) -> PruneResult:
    from twofour.pruning.onnx_prune import prune_onnx

    run.sessions.close()
    dense, sparse = run.file(onnx_name(DENSE)), run.file(onnx_name(SPARSE))
    return replace(prune_onnx(dense, sparse, pattern, selection), source=run.source.text)


def _described(path: Path, variant: str) -> ExportedVariant:
    inputs, outputs, opset = describe(path)
    return ExportedVariant(
        file=ExportedFile(
            variant=variant,
            file=path.name,
            size_bytes=sum((path.parent / name).stat().st_size for name in onnx_files(path)),
            agreement=(),
            not_compared=_OWN_TYPES,
        ),
        precision=None,
        opset=opset,
        inputs=inputs,
        outputs=outputs,
        layers=_own_names(path),
    )


def _own_names(path: Path) -> LayerMap:
    """Without a module, the node is the layer and the initializer the parameter."""
    weights = find_weights(load_model(path, weights=False)).weights
    return LayerMap(
        layers=tuple(
            LayerName(
                layer=w.layer,
                parameter=w.weight,
                node=w.node or w.layer,
                initializer=w.weight,
                op=w.op,
            )
            for w in weights
            if w.weight is not None
        )
    )


def _inputs(run: Run, exported: ExportedVariant) -> dict[str, np.ndarray]:
    if run.options.inputs is not None:
        return load_inputs(Path(run.options.inputs), exported.inputs)
    return random_inputs(exported.inputs, run.options.seed, run.options.input_shapes)


def _copy(source: Path, target: Path) -> Sequence[str]:
    """Copy a model and its external data, which then lies in one `<target>.data`."""
    raise NotImplementedError
