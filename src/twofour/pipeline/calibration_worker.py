"""What the process does that runs pieces of an ONNX graph on calibration data.

It keeps the tensors between two pieces, so that every node runs once on every batch, and adds up
the statistics of the layers' inputs; only these go back to the parent.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.engines.machine import usable_cores
from twofour.engines.onnxruntime.session import CannotRunError, OrtSession, ProviderSetup, open_on
from twofour.engines.protocol import ProgressCallback
from twofour.errors import BadInputError
from twofour.pruning.onnx_rows import Marks, Reading, rows_of
from twofour.pruning.repair import (
    Moments,
    OutputDistance,
    compared_values,
    joined,
    moments,
    places,
)
from twofour.pruning.statistics import InputSums, Statistics, held_out_samples
from twofour.pruning.threads import one_blas_thread

_CONFIG = {"session.disable_quant_qdq": "1"}
"""Q and DQ nodes are computed as they stand in the file, not fused into integer arithmetic."""
_MOST_THREADS = 8
"""Batches that are run side by side; each holds its activations."""
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFile:
    """A batch on disk: arrays by name of the graph's input."""

    path: Path
    samples: int
    first: int
    """Number of its first sample among all."""
    padding: Array | None = None
    """(samples, positions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """A tensor to look at, as rows of some matrices."""

    tensor: str
    reading: Reading
    layer: str
    """One that it feeds, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over the batches."""

    piece: Path | None
    """None: all that is looked at is there already."""
    level: str
    """Optimization level of ONNX Runtime."""
    keep: frozenset[str]
    """What later pieces go on from; all else that was kept is let go of."""
    memory_bytes: int
    """Of what is kept, before it goes to files."""
    disk_bytes: int
    """Of these files; where they would be larger nothing is kept."""

    @property
    def looks(self) -> bool:
        """Whether anything is wanted beside what is kept."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking(Pass):
    """A pass that adds up the inputs of layers."""

    taps: tuple[Tap, ...]

    @property
    def looks(self) -> bool:
        """Whether anything is wanted beside what is kept."""
        return bool(self.taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring(Pass):
    """A pass that measures channels, and how far outputs are from the dense model's."""

    channels: tuple[tuple[str, int], ...] = ()
    """Tensors, and the axis of each that its channels lie along."""
    outputs: tuple[str, ...] = ()
    """Of the graph."""
    of_dense: bool = False
    """These outputs are what later ones are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What is there after a pass."""

    kept: bool
    ranks: dict[str, tuple[str, int]]
    """numpy's name of the type, and the rank, of every tensor that is kept now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked(Passed):
    """What a pass gave."""

    statistics: tuple[Statistics | None, ...]
    """Of each tap; None: no input came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Passed):
    """What a pass gave."""

    moments: tuple[Moments | None, ...]
    """Of each tensor; None: no value, or one that is not finite."""
    error: float | None
    """As `OutputDistance.error`."""


class CalibrationWorker:
    """The commands; each is a method, and what it raises goes back to the parent."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report
        self._batches: tuple[BatchFile, ...] = ()
        self._folder = Path()
        self._kept: dict[str, list[Array]] = {}
        self._dense: dict[tuple[int, str], Array] = {}
        """Outputs of the dense model by batch, the values that others are compared with."""

    def begin(self, folder: Path, batches: Sequence[BatchFile]) -> None:
        """Take the batches; `folder` is for tensors that memory has no room for."""
        self._folder = folder
        self._batches = tuple(batches)
        self._kept = {}

    def look(self, asked: Looking) -> Looked:
        """Run a piece on every batch and add up what its taps show.

        Raises BadInputError for an input that is not finite, CannotRunError where ONNX Runtime is
        not installed or lacks a kernel, and what OrtSession raises.
        """
        sums = [InputSums() for _ in asked.taps]
        passed = self._pass(asked, lambda at, arrays: self._add(asked.taps, sums, at, arrays))
        statistics = tuple(each.statistics() for each in sums)
        return Looked(statistics=statistics, kept=passed.kept, ranks=passed.ranks)

    def measure(self, asked: Measuring) -> Measured:
        """Run a piece on every batch: channels of samples seen, outputs of those held out.

        Raises as `look`, but for values that are not finite: they give no moments.
        """
        parts: list[list[Moments]] = [[] for _ in asked.channels]
        distance = OutputDistance()
        passed = self._pass(
            asked, lambda at, arrays: self._measure(asked, parts, distance, at, arrays)
        )
        return Measured(
            moments=tuple(map(joined, parts)),
            error=distance.error(),
            kept=passed.kept,
            ranks=passed.ranks,
        )

    def _pass(self, asked: Pass, add: Callable[[int, dict[str, Array]], None]) -> Passed:
        """Run the piece; `add` is given each batch's number and tensors, in order."""
        session = None if asked.piece is None else self._opened(asked.piece, asked.level)
        store = _Store(self._folder, asked, len(self._batches), self._kept)
        with one_blas_thread():
            for number, outputs in self._run(session):
                arrays = {**self._arrays_kept(number), **outputs}
                add(number, arrays)
                store.add(number, arrays)
                if not (asked.looks or store.keeps):
                    break
        kept = store.finish()
        if kept is not None:
            self._kept = kept
        ranks = {
            name: (arrays[0].dtype.name, arrays[0].ndim) for name, arrays in self._kept.items()
        }
        return Passed(kept=kept is not None, ranks=ranks)

    def _measure(
        self,
        asked: Measuring,
        parts: Sequence[list[Moments]],
        distance: OutputDistance,
        number: int,
        arrays: Mapping[str, Array],
    ) -> None:
        """Of one batch."""
        batch = self._batches[number]
        held_out = held_out_samples(batch.first, batch.samples)
        names = [*dict.fromkeys((*(name for name, _ in asked.channels), *asked.outputs))]
        values = self._values(names, number, arrays)
        for (name, axis), found in zip(asked.channels, parts, strict=True):
            tensor = values[name]
            others = [size for at, size in enumerate(tensor.shape) if at != axis % tensor.ndim]
            found.append(moments(tensor, axis, places((*others,), ~held_out, batch.padding)))
        for at, name in enumerate(asked.outputs):
            output = values[name]
            if not isinstance(output, np.ndarray) or output.dtype.kind not in "fV":
                continue
            kept = places(output.shape, held_out, batch.padding)
            compared = compared_values(output, kept).astype(np.float32)
            if asked.of_dense:
                self._dense[number, name] = compared
            distance.add(at, self._dense[number, name], compared)

    def _opened(self, piece: Path, level: str) -> OrtSession:
        try:
            return OrtSession(
                piece,
                threads=1,
                level=level,
                opener=functools.partial(open_on, ProviderSetup(config=_CONFIG)),
            )
        except ImportError as error:
            raise CannotRunError(f"ONNX Runtime cannot be imported: {error}") from error

    def _run(self, session: OrtSession | None) -> Iterator[tuple[int, dict[str, Array]]]:
        """The piece's outputs for every batch, in order; a few batches run side by side."""
        numbers = range(len(self._batches))
        if session is None:
            yield from ((number, {}) for number in numbers)
            return
        threads = min(usable_cores(), _MOST_THREADS)
        with ThreadPoolExecutor(threads) as pool:
            coming = (pool.submit(self._outputs, session, number) for number in numbers)
            waiting = deque(islice(coming, threads))
            for number in numbers:
                outputs = waiting.popleft().result()
                waiting.extend(islice(coming, 1))
                yield number, outputs

    def _outputs(self, session: OrtSession, number: int) -> dict[str, Array]:
        names = [tensor.name for tensor in session.inputs]
        return session.outputs(self._values(names, number, self._arrays_kept(number)))

    def _arrays_kept(self, number: int) -> dict[str, Array]:
        return {name: arrays[number] for name, arrays in self._kept.items()}

    def _values(
        self, names: Sequence[str], number: int, known: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The tensors of these names; those that no piece made are inputs of the graph."""
        found = {name: known[name] for name in names if name in known}
        asked = [name for name in names if name not in found]
        if asked:
            with np.load(self._batches[number].path, allow_pickle=False) as archive:
                found.update((name, archive[name]) for name in asked)
        return found

    def _add(
        self,
        taps: Sequence[Tap],
        sums: Sequence[InputSums],
        number: int,
        arrays: Mapping[str, Array],
    ) -> None:
        """Each tap's rows to its sums: taps side by side, each one's batches in order."""
        values = self._values([*dict.fromkeys(tap.tensor for tap in taps)], number, arrays)
        batch = self._batches[number]
        marks = Marks(
            samples=batch.samples,
            held_out=held_out_samples(batch.first, batch.samples),
            first=batch.first,
            in_all=sum(each.samples for each in self._batches),
            padding=batch.padding,
        )

        def add(at: int) -> None:
            tap = taps[at]
            x = values[tap.tensor]
            wide = x if x.dtype == np.float64 else x.astype(np.float32)
            rows, held_out = rows_of(wide, tap.reading, marks)
            if rows.size and not np.isfinite(rows).all():
                raise BadInputError(
                    f"layer {tap.layer!r}: its input {tap.tensor!r} has values that are NaN or "
                    f"infinite on calibration samples {batch.first + 1} to "
                    f"{batch.first + batch.samples}",
                    hint="look at these samples and at the nodes before the layer, or leave the "
                    "layer out with --exclude",
                )
            if held_out.size:
                sums[at].add(rows, held_out)

        with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS)) as pool:
            list(pool.map(add, range(len(taps))))


class _Store:
    """Keeps tensors of every batch, in memory as long as there is room, then in files."""

    def __init__(
        self, folder: Path, asked: Pass, batches: int, before: Mapping[str, list[Array]]
    ) -> None:
        self._folder = folder
        self._asked = asked
        self._batches = batches
        self._found = {name: before[name] for name in asked.keep if name in before}
        self._new: dict[str, list[Array]] = {}
        self._used_bytes = sum(_held_bytes(arrays) for arrays in self._found.values())
        self._on_disk_bytes = 0
        self.keeps = True

    def add(self, number: int, arrays: Mapping[str, Array]) -> None:
        """Of one batch, those that are to be kept and are new."""
        new = {
            name: array
            for name, array in arrays.items()
            if name in self._asked.keep and name not in self._found
        }
        if not number:
            self.keeps = self._has_room(new)
        if self.keeps:
            for name, array in new.items():
                self._new.setdefault(name, []).append(self._put(number, array))

    def _has_room(self, first: Mapping[str, Array]) -> bool:
        """For tensors like those of the first batch; sequences and texts are not kept."""
        if not all(isinstance(array, np.ndarray) for array in first.values()):
            return False
        if any(array.dtype.hasobject for array in first.values()):
            return False
        total = self._batches * sum(array.nbytes for array in first.values())
        room = self._asked.memory_bytes - self._used_bytes + self._asked.disk_bytes
        return total <= room

    def finish(self) -> dict[str, list[Array]] | None:
        """All that is kept; None where there is no room for it."""
        return {**self._found, **self._new} if self.keeps else None

    def _put(self, number: int, array: Array) -> Array:
        self._used_bytes += array.nbytes
        if self._used_bytes <= self._asked.memory_bytes or not array.size:
            return array
        self._used_bytes -= array.nbytes
        self._on_disk_bytes += array.nbytes
        path = self._folder / f"{self._on_disk_bytes}-{number}"
        np.ascontiguousarray(array).tofile(path)
        mapped: Array = np.memmap(path, array.dtype, "r", shape=array.shape)
        path.unlink()  # the mapping keeps it until it is let go of
        return mapped


def _held_bytes(arrays: Sequence[Array]) -> int:
    return sum(array.nbytes for array in arrays if not isinstance(array, np.memmap))
