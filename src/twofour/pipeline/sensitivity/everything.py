"""Everything pruned, in a folder of its own: what sets of layers are put together from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from twofour.pipeline import onnx_stages, torch_stages
from twofour.pipeline.folder import STAGES, RunFolder, open_run_folder, own_folder
from twofour.pipeline.sensitivity.measured_on import measured_on
from twofour.pipeline.sensitivity.sets import MEASURED
from twofour.pipeline.stages import DENSE, INPUTS, Run, Runner, onnx_files, onnx_name
from twofour.records.export import LayerMap
from twofour.records.pruning import PruneResult
from twofour.records.run import ExportedVariant
from twofour.store import link_or_copy

FOLDER = "sensitivity"
"""Of everything pruned and of the measurements, inside the run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Everything pruned, in its own folder."""

    run: Run
    pruned: PruneResult
    layers: LayerMap
    note: str | None
    """On what the outputs are compared."""


@contextmanager
def apart(run: Run) -> Iterator[Run]:
    """The run in a folder of its own, without repairs: those hold for one set of layers alone."""
    path = run.path / FOLDER
    with open_run_folder(path, run.runner.folder.manifest.source) as folder:
        own_folder(path / STAGES)
        if run.options.fresh:
            folder.forget()
            shutil.rmtree(path / MEASURED, ignore_errors=True)
        yield _with_folder(run, path, folder)


def _with_folder(run: Run, path: Path, folder: RunFolder) -> Run:
    method = replace(run.options.method, repair=False, permute_seconds=0.0)
    return replace(
        run,
        path=path,
        shown=run.shown / FOLDER,
        runner=Runner(folder, run.progress),
        options=replace(run.options, method=method),
    )


def prune_everything(run: Run, dense: ExportedVariant) -> Apart:
    """sparse.onnx beside links to dense.onnx and the inputs, all that the selection takes."""
    outer = run.path.parent
    there = onnx_files(outer / onnx_name(DENSE))
    for name in set(onnx_files(run.file(onnx_name(DENSE)))) - {*there}:
        run.file(name).unlink(missing_ok=True)
    for name in (*there, INPUTS):
        link_or_copy(outer / name, run.path / name)
    if run.model is None:
        pruned = run.do(onnx_stages.prune(run))
        run.do(onnx_stages.validate(run, pruned))
        sparse = run.do(onnx_stages.describe_sparse(run))
    else:
        pruned = run.do(torch_stages.prune(run))
        run.do(torch_stages.validate(run, pruned))
        sparse = run.do(torch_stages.export_sparse(run, dense))
    inputs = run.do(measured_on(run, dense))
    return Apart(run=run, pruned=pruned, layers=sparse.layers, note=inputs.note)
