"""Repair of a pruned ONNX model through ONNX Runtime: each kind tried level by level.

A level's batch norms and layers hang on none of each other. They are measured with everything
before them repaired; then the nodes from there to the next level run once on every batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from twofour.engines.onnxruntime.session import LEVELS, CannotRunError
from twofour.errors import BuildFailedError
from twofour.graph.files import (
    DTYPES,
    Array,
    dtype_name,
    numpy_dtype,
    read_tensor,
    storage_key,
)
from twofour.graph.half import has_half
from twofour.pipeline.calibration_worker import BatchFile, Measured, Measuring
from twofour.pruning.onnx_calibration import MainGraph, Piece, borders
from twofour.pruning.onnx_file import Calibrated
from twofour.pruning.onnx_problems import constant
from twofour.pruning.onnx_repair import (
    LayerSite,
    NormSite,
    Site,
    Statistic,
    find_sites,
    moved_bias,
    scaled_weight,
)
from twofour.pruning.onnx_segments import Changes, Kind, Segments, in_float32, unused_name
from twofour.pruning.onnx_storage import as_type
from twofour.pruning.repair import (
    Change,
    Moments,
    Normalisation,
    chosen,
    concluded,
    estimated_again,
    fitting,
    matching,
    renormalised,
)
from twofour.pruning.statistics import held_out_samples
from twofour.records.pruning import Repair, RepairKind, RepairTry
from twofour.records.weights import Pattern
from twofour.store import atomic_file

if TYPE_CHECKING:
    import onnx

_KEPT_BYTES = 1 << 30
"""Of tensors between two levels that stay in memory; more go to files."""
_PIECE = "repair.onnx"
_CODES = {name: code for code, name in DTYPES.items()}


class Host(Protocol):
    """What is used of an EngineHost with a CalibrationWorker in it."""

    def call(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # each has its own
        """The command's value; raises what it raised, and WorkerDiedError where it died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedModel:
    """A graph whose files have names in the folder that pieces of it are run in."""

    graph: MainGraph
    files: Mapping[Path, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairJob:
    """A model that was pruned but not written yet."""

    host: Host
    model: LinkedModel
    """As it came."""
    dense: LinkedModel
    """To whose outputs it is brought back: itself, or the one that its masks were made from."""
    pattern: Pattern
    pieces: Sequence[Piece]
    changes: Changes
    """What pruning made of it."""
    folder: Path
    batches: Sequence[BatchFile]
    wanted: bool | None
    """As MethodOptions.repair."""
    step: Callable[[str, int, int | None], None]
    in_float32: bool = False
    """Half precision is widened, as ONNX Runtime lacks a kernel."""

    @property
    def graph(self) -> MainGraph:
        """Of the model as it came."""
        return self.model.graph

    @property
    def outputs(self) -> tuple[str, ...]:
        """That the dense model has too, by name."""
        there = _outputs_of(self.dense.graph)
        return tuple(name for name in _outputs_of(self.graph) if name in there)


def repaired(job: RepairJob, found: Calibrated) -> Calibrated:
    """The pruned model with the kind of repair that brings its outputs nearest to the dense ones.

    Nothing is changed where none does, or where ONNX Runtime fails on the way.
    """
    done = {piece.key for piece in job.pieces if piece.key in job.changes.arrays}
    sites = {
        name: site
        for name, site in find_sites(
            job.graph, job.pattern, [p for p in job.pieces if p.key in done]
        ).items()
        if site.tensor in job.dense.graph.made_by
    }
    held_out = sum(int(held_out_samples(b.first, b.samples).sum()) for b in job.batches)
    if not sites:
        return replace(found, repair=concluded((), None, (None, None), held_out))
    try:
        record, taken = _best_in_some_type(job, sites, held_out)
    except BuildFailedError as error:
        why = f"ONNX Runtime failed while it was tried: {error.message}"
        record, taken = replace(concluded((), None, (None, None), held_out), why=why), None
    if taken is None:
        return replace(found, repair=record)
    return replace(_with(found, job, sites, taken), repair=record, one_shot=found)


def _best_in_some_type(
    job: RepairJob, sites: Mapping[str, Site], held_out: int
) -> tuple[Repair, Changes | None]:
    """In the file's own types, else in float32: the CPU has few kernels for bfloat16."""
    try:
        return _best(job, sites, held_out)
    except CannotRunError:
        if job.in_float32 or not has_half(job.graph.opened.proto):
            raise
        return _best(replace(job, in_float32=True), sites, held_out)


def _best(
    job: RepairJob, sites: Mapping[str, Site], held_out: int
) -> tuple[Repair, Changes | None]:
    wanted = fitting(
        norms=any(isinstance(site, NormSite) for site in sites.values()),
        layers=any(isinstance(site, LayerSite) for site in sites.values()),
    )
    dense = _Runner(job, job.dense, Changes(arrays={}, constants={}))
    channels = [(site.tensor, site.axis) for site in sites.values()]
    measured = dense.measure(channels, frozenset(), outputs=True, of_dense=True)
    known = dict(zip(sites, measured.moments, strict=True))
    before = _Runner(job, job.model, job.changes).measure((), frozenset(), outputs=True).error
    trials: dict[RepairKind, Changes] = {}
    tried = []
    for number, kind in enumerate(wanted):
        job.step(f"repair: {kind.value}", number, len(wanted))
        trial = _Trial(job, sites, known, kind)
        error = trial.run()
        trials[kind] = trial.changes
        tried.append(RepairTry(kind=kind, error=error, changed=trial.changed))
    job.step("repair", len(wanted), len(wanted))
    taken = chosen(tried, before, always=bool(job.wanted))
    after = before if taken is None else taken.error
    record = concluded(tuple(tried), taken, (before, after), held_out)
    return record, None if taken is None else trials[taken.kind]


class _Runner:
    """Runs pieces of the graph, as far as changes have made another one of it."""

    def __init__(self, job: RepairJob, model: LinkedModel, changes: Changes) -> None:
        self._job = job
        self._segments = Segments(model.graph, changes, model.files)
        self._have: dict[str, Kind] = {}
        job.host.call("begin", job.folder, tuple(job.batches))  # nothing of another one is kept

    def measure(
        self,
        channels: Sequence[tuple[str, int]],
        keep: frozenset[str],
        *,
        outputs: bool = False,
        of_dense: bool = False,
    ) -> Measured:
        """From the tensors that were kept to these channels, or to the outputs."""
        job = self._job
        given = job.outputs if outputs else ()
        wanted = sorted({*keep, *(name for name, _ in channels), *given})
        piece = self._segments.piece(wanted, self._have)
        if piece is not None and job.in_float32:
            piece = in_float32(piece, job.folder)
        if piece is not None:
            (job.folder / _PIECE).write_bytes(piece.SerializeToString())
        asked = Measuring(
            piece=None if piece is None else job.folder / _PIECE,
            level=LEVELS[0],
            keep=keep,
            memory_bytes=_KEPT_BYTES,
            disk_bytes=shutil.disk_usage(job.folder).free // 2,
            channels=tuple(channels),
            outputs=given,
            of_dense=of_dense,
        )
        measured: Measured = job.host.call("measure", asked)
        if measured.kept:
            self._have = {
                name: Kind(dtype=_CODES[dtype], rank=rank)
                for name, (dtype, rank) in measured.ranks.items()
            }
        return measured


class _Trial:
    """One kind of repair, with files of its own for what it changes."""

    def __init__(
        self,
        job: RepairJob,
        sites: Mapping[str, Site],
        dense: Mapping[str, Moments | None],
        kind: RepairKind,
    ) -> None:
        self._job = job
        self._kind = kind
        self._dense = dense
        self._sites = {
            name: site
            for name, site in sites.items()
            if isinstance(site, NormSite) or kind is not RepairKind.BATCH_NORM
        }
        self.changes = Changes(
            arrays=dict(job.changes.arrays), constants=dict(job.changes.constants)
        )
        self.changed = 0
        self._written = 0

    def run(self) -> float | None:
        """The error of the outputs with it."""
        graph = self._job.graph
        nodes = {name: graph.scope.nodes[site.node] for name, site in self._sites.items()}
        levels = graph.levels(set(nodes.values()))
        runner = _Runner(self._job, self._job.model, self.changes)
        together = [
            {name: self._sites[name] for name, node in nodes.items() if levels[node] == level}
            for level in sorted(set(levels.values()))
        ]
        taps = [sorted({read for s in level.values() for read in s.reads}) for level in together]
        for level, border in zip(
            together, borders(graph, [*taps, self._job.outputs]), strict=False
        ):
            channels = [(site.tensor, site.axis) for site in level.values()]
            measured = runner.measure(channels, border)
            for name, now in zip(level, measured.moments, strict=True):
                self._change(level[name], self._dense[name], now)
        return runner.measure((), frozenset(), outputs=True).error

    def _change(self, site: Site, dense: Moments | None, now: Moments | None) -> None:
        if dense is None or now is None:
            return
        if isinstance(site, LayerSite):
            has_bias = site.target.bias is not None
            self._change_layer(site, matching(dense, now, has_bias=has_bias))
            self.changed += 1
            return
        change: Normalisation | None
        if self._kind is RepairKind.MATCHING:
            mean, variance = (self._read(s.tensor).astype(np.float64) for s in _statistics(site))
            before = Normalisation(mean=mean, variance=variance)
            change = renormalised(before, site.epsilon, dense, now)
        else:
            change = estimated_again(now)
        if change is not None:
            self.changed += 1
            for statistic, values in zip(
                _statistics(site), (change.mean, change.variance), strict=True
            ):
                kind = numpy_dtype(dtype_name(statistic.tensor))
                self._store_statistic(site, statistic, as_type(values, kind))

    def _change_layer(self, site: LayerSite, change: Change) -> None:
        weight = self._read(site.piece.tensor)
        self._write(site.piece.tensor, scaled_weight(site.piece, weight, change))
        bias = site.target.bias
        if bias is None:
            return
        if bias.own:
            self._write(bias.tensor, moved_bias(site, self._read(bias.tensor), change))
            return
        place = bias.node, bias.position
        copied = self.changes.constants.get(place)
        if copied is None:
            seen = bias.view.seen(self._read(bias.tensor))
        else:
            seen = np.frombuffer(copied.raw_data, numpy_dtype(dtype_name(copied)))
            seen = seen.reshape(bias.shape)
        self._copy(place, f"{site.target.label}.bias", moved_bias(site, seen, change))

    def _store_statistic(self, site: NormSite, statistic: Statistic, values: Array) -> None:
        if statistic.own:
            self._write(statistic.tensor, values)
        else:
            self._copy((site.node, statistic.position), statistic.name, values)

    def _read(self, tensor: onnx.TensorProto) -> Array:
        """The array as it is by now."""
        file = self.changes.arrays.get(storage_key(tensor))
        if file is None:
            return read_tensor(tensor, self._job.graph.opened.path)
        values = np.fromfile(file, numpy_dtype(dtype_name(tensor)))
        return values.reshape(tuple(tensor.dims))

    def _write(self, tensor: onnx.TensorProto, values: Array) -> None:
        self._written += 1
        file = self._job.folder / f"repair-{self._kind.value}-{self._written}.bin"
        with atomic_file(file) as temporary:
            np.ascontiguousarray(values).tofile(temporary)
        self.changes.arrays[storage_key(tensor)] = file

    def _copy(self, place: tuple[int, int], wish: str, values: Array) -> None:
        before = self.changes.constants.get(place)
        name = unused_name(self._job.graph, self.changes, wish) if before is None else before.name
        self.changes.constants[place] = constant(name, values)


def _outputs_of(graph: MainGraph) -> tuple[str, ...]:
    """Outputs that hang on the inputs."""
    names = (value.name for value in graph.opened.proto.graph.output)
    return tuple(n for n in names if n in graph.made_by and not graph.is_fixed(n))


def _statistics(site: NormSite) -> tuple[Statistic, Statistic]:
    return site.mean, site.variance


def _with(
    found: Calibrated, job: RepairJob, sites: Mapping[str, Site], changes: Changes
) -> Calibrated:
    """What is to be written, with what repair changed."""
    rows = {user.row: piece for piece in job.pieces for user in piece.users}
    arrays = {
        row: changes.arrays[rows[row].key] if row in rows else file
        for row, file in found.arrays.items()
    }
    return replace(
        found,
        arrays=arrays,
        biases={**found.biases, **dict(_moved(sites.values(), changes))},
        constants=changes.constants,
    )


def _moved(sites: Iterable[Site], changes: Changes) -> Iterator[tuple[str, Path]]:
    """Constants that are changed in their places, beside weights."""
    for site in sites:
        if isinstance(site, NormSite):
            known = [(s.name, s.tensor) for s in _statistics(site) if s.own]
        else:
            bias = site.target.bias
            known = [] if bias is None or not bias.own else [(bias.name, bias.tensor)]
        for name, tensor in known:
            file = changes.arrays.get(storage_key(tensor))
            if file is not None:
                yield name, file
