"""`twofour fleet`: a node of every kind of GPU in a Ray cluster builds and measures one model.

`run_fleet` is the driver: it makes the files, pins a task to a node of each kind, and keeps what
comes back. `NodeBuilder` is the node's side: it gets files, not paths.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from twofour.budget.side_by_side import Node, RayCluster, WorkerLostError
from twofour.comparing.comparison import compare
from twofour.engines.protocol import AUTO, ProgressCallback
from twofour.errors import BadInputError, BuildFailedError, TwofourError
from twofour.jobs import run_all, run_build
from twofour.pipeline.building import failures
from twofour.pipeline.evidence_files import EvidenceFiles, files_of_folder
from twofour.pipeline.folder import (
    DENSE,
    FLEET,
    INPUTS,
    LAYERS,
    PRUNE,
    SPARSE,
    is_run_folder,
    onnx_files,
    onnx_name,
    open_run_folder,
    own_folder,
    read_manifest,
    refuse_changed,
)
from twofour.pipeline.reporting import PAGES, forecast_file, report_files
from twofour.pipeline.stages import Progress, Runner, Silent, Stage, StageOutput
from twofour.records.fleet import Fleet, FleetKind
from twofour.records.forecast import ForecastGain
from twofour.records.options import CompareOptions, RunOptions
from twofour.records.weights import PruneResult
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.fleet_document import fleet_document
from twofour.reports.html import write_pages
from twofour.sources.source import open_source, safe_name
from twofour.store import read_record, write_record

RECORD, FLEET_PAGES = "fleet.json", ("fleet.md", "fleet.html")
_SERVICE = "twofour.fleet:NodeBuilder", "build"
_KIND = "accelerator_type:"
_ENDINGS = (".log", ".layers.json", ".profile.json")
"""Files of a build that come back; a plan runs on its node alone."""


class NodeBuilder:
    """Builds and measures on the node that it is on, in a temporary folder."""

    def __init__(self, report: ProgressCallback) -> None:
        """Every service gets the callback."""

    def build(
        self, _try: int, kind: str, files: Mapping[str, bytes], options: RunOptions, *compared: str
    ) -> tuple[FleetKind, dict[str, bytes]]:
        """Build and time dense.onnx and sparse.onnx of `files`.

        Also gives the logs, layer information and profiles by name. Raises what `run_build` raises.
        """
        with tempfile.TemporaryDirectory(prefix="twofour-") as place:
            given, made = Path(place, "given"), Path(place, safe_name(kind))
            given.mkdir()
            for name, content in files.items():
                (given / name).write_bytes(content)
            asked = replace(
                options,
                inputs=str(given / INPUTS),
                dense_reference=str(given / onnx_name(DENSE)),
            )
            built = run_build(given / onnx_name(SPARSE), made, asked)[1]
            times = compare([made], None, CompareOptions())[1] if compared else built.times
            row = FleetKind(kind=kind, node=platform.node(), built=built, times=times)
            left = (file for file in made.iterdir() if file.name.endswith(_ENDINGS))
            return row, {file.name: file.read_bytes() for file in left}


def kind_of(node: Node) -> str:
    """The accelerator type that Ray gives a node; GPU where it gives none."""
    types = [name.removeprefix(_KIND) for name in node["Resources"] if name.startswith(_KIND)]
    return min(types, default="GPU")


def run_fleet(
    model: str,
    options: RunOptions,
    progress: Progress | None = None,
    *,
    compared: bool = False,
    free_s: float = 60,
) -> tuple[Path, Fleet]:
    """Build and measure a model, or the files of a run folder, on a node of each kind.

    A node that begins no task for `free_s` seconds is not free. With `options.resume` kinds that
    are done are kept. Raises what its parts raise.
    """
    progress, folder = progress or Silent(), Path(model)
    if not is_run_folder(folder):
        open_source(model, options)  # a wrong name is said before a cluster is waited for
    with RayCluster(*_SERVICE, options.side_by_side.ray or "auto") as cluster:
        if not is_run_folder(folder):
            folder = Path(run_all(model, None, replace(options, engine=AUTO), progress).folder)
        path = folder.absolute()
        with open_run_folder(path, read_manifest(path).source) as opened:
            asked = RunOptions(engine=options.engine, build=options.build, seed=options.seed)
            if not options.resume:
                (path / RECORD).unlink(missing_ok=True)
            runner = Runner(opened, progress, resume=options.resume)
            kept = KeptKinds(runner, asked, *["compared"] * compared)
            progress.stage(FLEET, "build and measure on the nodes")
            _measure(cluster, kept, free_s)
            fleet = kept.write()
    return folder, fleet


def refuse_unbuilt(fleet: Fleet) -> None:
    """Raise BuildFailedError that names the kinds on which an engine is missing, and why."""
    said: list[str] = []
    for row in fleet.kinds:
        why = [row.error] if row.built is None else failures(row.built)
        said += [f"{row.kind}: {text}" for text in why]
    if said:
        hint = next((row.hint for row in fleet.kinds if row.hint), None)
        raise BuildFailedError(f"not built on every kind of node: {'; '.join(said)}", hint=hint)


def _measure(cluster: RayCluster, kept: KeptKinds, free_s: float) -> None:
    """Have each kind that is not done built by the first of its free nodes that is not lost."""
    nodes = [node for node in cluster.nodes() if node["Resources"].get("GPU")]
    if not nodes:
        raise BadInputError("no node of the Ray cluster has a GPU")
    missing = kept.missing(map(kind_of, nodes))
    left = [node for node in nodes if kind_of(node) in missing]
    free = defaultdict[str, list[Node]](list)
    for node in cluster.free_nodes(left, free_s) if left else ():
        free[kind_of(node)].append(node)
    none = "no node of this kind is free"
    hint = "run the same command with --resume once one is: other kinds are kept"
    for kind in missing - free.keys():
        kept.fail(kind, BuildFailedError(none, hint=hint))

    def done(kind: str, value: Any) -> None:  # noqa: ANN401  # what a node gave, or an error
        if isinstance(value, WorkerLostError):
            value = BuildFailedError(f"{none}; {value.message}", hint=hint)
        if isinstance(value, TwofourError):
            kept.fail(kind, value)
        else:
            kept.keep(*value)
        kept.write()  # a killed driver leaves the kinds that it knew

    files = cluster.share({name: (kept.path / name).read_bytes() for name in kept.sent})
    cluster.run({kind: (kind, files, *kept.asked) for kind in free}, done, free)


def _forecast(folder: Path, name: str) -> ForecastGain | None:
    """The forecast for dense.onnx at its example inputs; None for no known GPU or precision."""
    files = EvidenceFiles(onnx=folder / onnx_name(DENSE), inputs=folder / INPUTS)
    with contextlib.suppress(BadInputError):
        return forecast_file(files, None, name).model
    return None


class KeptKinds:
    """The kinds in a run folder: a stage each."""

    def __init__(self, runner: Runner, *asked: object) -> None:
        """Raises BadInputError for a folder in which a model is missing or was changed."""
        self._runner, self.path, self.asked = runner, runner.folder.path, asked
        self._rows: dict[str, FleetKind] = {}
        models = (name for v in (DENSE, SPARSE) for name in onnx_files(self.path / onnx_name(v)))
        self.sent = (*models, INPUTS)
        refuse_changed(self.path, (*self.sent, PRUNE, LAYERS))

    def missing(self, kinds: Iterable[str]) -> set[str]:
        """Those of these kinds, and of the last run's, that are still to be measured."""
        record = self.path / RECORD
        before = read_record(Fleet, record).kinds if record.is_file() else ()
        known = {*kinds, *(row.kind for row in before)}
        found = {k: self._runner.found(self._stage(FleetKind(kind=k), {})) for k in known}
        self._rows = {kind: row for kind, row in found.items() if row is not None}
        return known - self._rows.keys()

    def keep(self, row: FleetKind, files: Mapping[str, bytes]) -> None:
        """Write down what came back from a node, with the verdicts that follow from it."""
        self._rows[row.kind] = self._runner.run(self._stage(row, files))

    def fail(self, kind: str, why: TwofourError) -> None:
        """Note why a kind built nothing, with the forecast for a GPU that is called so."""
        found = _forecast(self.path, kind)
        self._rows[kind] = FleetKind(kind=kind, forecast=found, error=why.message, hint=why.hint)

    def write(self) -> Fleet:
        """Write the record and the pages of all kinds that are known."""
        kinds = tuple(self._rows[kind] for kind in sorted(self._rows))
        fleet = Fleet(source=read_manifest(self.path).source, kinds=kinds)
        write_record(self.path / RECORD, fleet)
        write_pages(self.path, FLEET_PAGES, fleet_document(fleet))
        return fleet

    def _stage(self, row: FleetKind, files: Mapping[str, bytes]) -> Stage[FleetKind]:
        return Stage(
            name=f"{FLEET}-{safe_name(row.kind)}",
            title=f"keep what {row.node} measured",
            record=f"{FLEET}/{safe_name(row.kind)}/kind.json",
            kind=FleetKind,
            work=lambda: self._work(row, files),
            lasting=lambda row: not row.built or all(not v.error for v in row.built.times.variants),
            depends_on=(row.kind, *self.asked),
            reads=(*self.sent, PRUNE, LAYERS),
        )

    def _work(self, row: FleetKind, files: Mapping[str, bytes]) -> StageOutput[FleetKind]:
        """The files and the report of a kind; an older build of it is removed."""
        assert row.built is not None, "only what a node built is kept"
        path = own_folder(self.path / FLEET) / safe_name(row.kind)
        shutil.rmtree(own_folder(path))
        path.mkdir()
        for file, content in files.items():
            (path / file).write_bytes(content)
        model = self.path / onnx_name(SPARSE)
        left = replace(files_of_folder(path, ""), onnx=model, inputs=self.path / INPUTS)
        pruned, gpu = read_record(PruneResult, self.path / PRUNE), row.built.gpu
        report = report_files(left, gpu=gpu, pruned=pruned).report
        report = replace(report, model=f"{self.path.name} on {row.kind}")
        page = eligibility_document(report, build=row.built, comparison=row.times, pruned=pruned)
        write_pages(path, PAGES, page)
        forecast = _forecast(self.path, gpu.name if gpu else row.kind)
        written = sorted(f"{FLEET}/{path.name}/{file.name}" for file in path.iterdir())
        return replace(row, report=report, forecast=forecast), written
