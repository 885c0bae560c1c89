"""`twofour fleet`: a node of every kind of GPU in a Ray cluster builds and measures one model.

`run_fleet` is the driver: it makes the files, pins a task to a node of each kind, and keeps what
comes back. `NodeBuilder` is the node's side: it gets files, not paths.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from twofour.pipeline.stages import Runner, Stage, StageOutput, ToProgress, progress_of
from twofour.records.options import CompareOptions, RunOptions
from twofour.records.run import Fleet, FleetKind
from twofour.records.weights import PruneResult
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.fleet_document import fleet_document
from twofour.reports.html import write_pages
from twofour.sources.source import open_source, safe_name
from twofour.store import read_record, write_record
from twofour.workers.side_by_side import Node, RayCluster, WorkerLostError

RECORD, FLEET_PAGES = "fleet.json", ("fleet.md", "fleet.html")
_SERVICE = "twofour.fleet:NodeBuilder", "build"
_KIND = "accelerator_type:"
_ENDINGS = (".log", ".layers.json", ".profile.json")
"""Files of a build that come back; a plan runs on its node alone."""
_NONE_FREE = "no node of this kind is free"
_RESUME = "run the same command with --resume once one is: other kinds are kept"


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
            given = Path(place, "given")
            given.mkdir()
            _write_files(given, files)
            asked = replace(
                options, inputs=str(given / INPUTS), dense_reference=str(given / onnx_name(DENSE))
            )
            folder = Path(place, safe_name(kind))
            built = run_build(given / onnx_name(SPARSE), folder, asked)[1]
            times = built.times
            if compared:
                times = compare([folder], None, CompareOptions())[1]
            row = FleetKind(kind=kind, node=platform.node(), built=built, times=times)
            evidence = [file for file in folder.iterdir() if file.name.endswith(_ENDINGS)]
            return row, {file.name: file.read_bytes() for file in evidence}


def kind_of(node: Node) -> str:
    """The accelerator type that Ray gives a node; GPU where it gives none."""
    # {"CPU": 8, "GPU": 1, "accelerator_type:A100": 1, "node:10.0.0.3": 1} is of the kind A100
    types = [name.removeprefix(_KIND) for name in node["Resources"] if name.startswith(_KIND)]
    return min(types, default="GPU")


def run_fleet(
    model: str,
    options: RunOptions,
    progress: ToProgress = None,
    *,
    compared: bool = False,
    free_s: float = 60,
) -> tuple[Path, Fleet]:
    """Build and measure a model, or the files of a run folder, on a node of each kind.

    A node that begins no task for `free_s` seconds is not free. With `options.resume` kinds that
    are done are kept. Raises what its parts raise.
    """
    progress = progress_of(progress)
    folder = Path(model)
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
            kept = KeptKinds(runner, asked, *(["compared"] * compared))
            progress.stage(FLEET, "build and measure on the nodes")
            _measure(cluster, kept, free_s)
            fleet = kept.write()
    return folder, fleet


def refuse_unbuilt(fleet: Fleet) -> None:
    """Raise BuildFailedError that names the kinds on which an engine is missing, and why."""
    missing: list[str] = []
    for row in fleet.kinds:
        why = [row.error] if row.built is None else failures(row.built)
        missing += [f"{row.kind}: {text}" for text in why]
    if missing:
        hint = next((row.hint for row in fleet.kinds if row.hint), None)
        raise BuildFailedError(f"not built on every kind of node: {'; '.join(missing)}", hint=hint)


def _measure(cluster: RayCluster, kept: KeptKinds, free_s: float) -> None:
    """Have each kind that is not done built by the first of its free nodes that is not lost."""
    nodes = [node for node in cluster.nodes() if node["Resources"].get("GPU")]
    if not nodes:
        raise BadInputError("no node of the Ray cluster has a GPU")
    missing = kept.missing(map(kind_of, nodes))
    wanted = [node for node in nodes if kind_of(node) in missing]
    free = defaultdict[str, list[Node]](list)
    if wanted:
        for node in cluster.free_nodes(wanted, free_s):
            free[kind_of(node)].append(node)
    for kind in missing - free.keys():
        kept.fail(kind, BuildFailedError(_NONE_FREE, hint=_RESUME))
    files = cluster.share({name: (kept.path / name).read_bytes() for name in kept.sent})
    cluster.run({kind: (kind, files, *kept.asked) for kind in free}, kept.take, free)


class KeptKinds:
    """The kinds in a run folder: a stage each."""

    def __init__(self, runner: Runner, *asked: object) -> None:
        """Raises BadInputError for a folder in which a model is missing or was changed."""
        self.path = runner.folder.path
        self.asked = asked
        self._runner = runner
        self._rows: dict[str, FleetKind] = {}
        dense = onnx_files(self.path / onnx_name(DENSE))
        sparse = onnx_files(self.path / onnx_name(SPARSE))
        self.sent = (*dense, *sparse, INPUTS)
        refuse_changed(self.path, (*self.sent, PRUNE, LAYERS))

    def missing(self, kinds: Iterable[str]) -> set[str]:
        """Those of these kinds, and of the last run's, that are still to be measured."""
        # a kind whose nodes have left the cluster stays in the record, as not free
        known = set(kinds)
        record = self.path / RECORD
        if record.is_file():
            known |= {row.kind for row in read_record(Fleet, record).kinds}
        for kind in known:
            row = self._runner.found(self._stage(FleetKind(kind=kind), {}))
            if row is not None:
                self._rows[kind] = row
        return known - self._rows.keys()

    def take(self, kind: str, value: Any) -> None:  # noqa: ANN401  # what a node gave, or an error
        """Write down what came back from a node, with the verdicts that follow from it."""
        if isinstance(value, WorkerLostError):
            value = BuildFailedError(f"{_NONE_FREE}; {value.message}", hint=_RESUME)
        if isinstance(value, TwofourError):
            self.fail(kind, value)
        else:
            row, files = value
            self._rows[kind] = self._runner.run(self._stage(row, files))
        self.write()  # a killed driver leaves the kinds that it knew

    def fail(self, kind: str, why: TwofourError) -> None:
        """Note why a kind built nothing, with the forecast for a GPU that is called so."""
        row = FleetKind(kind=kind, error=why.message, hint=why.hint)
        self._rows[kind] = self._with_forecast(row, kind)

    def write(self) -> Fleet:
        """Write the record and the pages of all kinds that are known."""
        kinds = tuple(self._rows[kind] for kind in sorted(self._rows))
        fleet = Fleet(source=read_manifest(self.path).source, kinds=kinds)
        write_record(self.path / RECORD, fleet)
        write_pages(self.path, FLEET_PAGES, fleet_document(fleet))
        return fleet

    def _with_forecast(self, row: FleetKind, gpu: str) -> FleetKind:
        """The forecast for dense.onnx at its example inputs; none for no known GPU or precision."""
        files = EvidenceFiles(onnx=self.path / onnx_name(DENSE), inputs=self.path / INPUTS)
        try:
            cell = forecast_file(files, None, gpu)
        except BadInputError:
            return row
        return replace(row, forecast=cell.model, expected=cell.expected)

    def _stage(self, row: FleetKind, files: Mapping[str, bytes]) -> Stage[FleetKind]:
        return Stage(
            name=f"{FLEET}-{safe_name(row.kind)}",
            title=f"keep what {row.node} measured",
            record=f"{FLEET}/{safe_name(row.kind)}/kind.json",
            kind=FleetKind,
            work=lambda: self._write_kind(row, files),
            lasting=lambda row: row.built is None or not failures(row.built),
            depends_on=(row.kind, *self.asked),
            reads=(*self.sent, PRUNE, LAYERS),
        )

    def _write_kind(self, row: FleetKind, files: Mapping[str, bytes]) -> StageOutput[FleetKind]:
        """The files and the report of a kind; an older build of it is removed."""
        assert row.built is not None, "only what a node built is kept"
        path = own_folder(self.path / FLEET) / safe_name(row.kind)
        shutil.rmtree(own_folder(path))
        path.mkdir()
        _write_files(path, files)
        # the logs are those of the node, the model is the one here that was sent to it
        evidence = replace(
            files_of_folder(path, ""), onnx=self.path / onnx_name(SPARSE), inputs=self.path / INPUTS
        )
        gpu = row.built.gpu
        pruned = read_record(PruneResult, self.path / PRUNE)
        report = report_files(evidence, gpu=gpu, pruned=pruned).report
        report = replace(report, model=f"{self.path.name} on {row.kind}")
        page = eligibility_document(report, build=row.built, comparison=row.times, pruned=pruned)
        write_pages(path, PAGES, page)
        row = replace(row, report=report)
        row = self._with_forecast(row, row.kind if gpu is None else gpu.name)
        written = sorted(f"{FLEET}/{path.name}/{file.name}" for file in path.iterdir())
        return row, written


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
