"""What the process does that runs pieces of an ONNX graph on calibration data.

It keeps the tensors between two pieces, so that every node runs once on every batch, and adds up
the statistics of the layers' inputs; only these go back to the parent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.calibrate.onnx.rows import Marks, Reading, rows_of
from twofour.calibrate.onnx.segments import TypeAndRank
from twofour.engines.machine import usable_cores
from twofour.engines.onnxruntime.session import OrtSession, ProviderSetup
from twofour.engines.protocol import ProgressCallback
from twofour.errors import BadInputError
from twofour.pruning.resources import ArrayStore, StoredArray, one_blas_thread
from twofour.pruning.statistics import InputSums, Statistics, held_out_samples

KEPT_BYTES = 1 << 30
"""Size of the tensors between two pieces that stay in memory; more go to files."""
_CONFIG = {"session.disable_quant_qdq": "1"}
"""Q and DQ nodes are computed as they stand in the file, not fused into integer arithmetic."""
_MOST_THREADS = 8
"""Batches that are run side by side; each holds its activations."""
Array = NDArray[Any]
Tensor = tuple[str, bool]
"""Its name, and whether it is that of the dense model, where the pruned model has other values."""


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
    differs: bool = False
    """The dense model has other values there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a pass over the batches gave."""

    statistics: tuple[Statistics | None, ...]
    """One for each tap; None: no input came."""
    kept: dict[Tensor, TypeAndRank] | None
    """All tensors that are kept now; None: there was no room, the same are kept as before."""


class CalibrationWorker:
    """The commands; each is a method, and what it raises goes back to the parent."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report
        self._batches: tuple[BatchFile, ...] = ()
        self._room = ArrayStore(Path(), 0)
        self._kept: list[dict[Tensor, StoredArray]] = []
        """For each batch the tensors that later pieces start from."""

    def begin(self, folder: Path, batches: Sequence[BatchFile]) -> None:
        """Take the batches; `folder` is for tensors that memory has no room for."""
        self._room = ArrayStore(folder, KEPT_BYTES)
        self._batches = tuple(batches)
        self._kept = [{} for _ in batches]

    def look(
        self,
        taps: Sequence[Tap],
        pieces: Sequence[tuple[Path, bool]],
        keep: Collection[Tensor],
        level: str,
    ) -> Looked:
        """Run the pieces on every batch and add up what the taps show.

        Each piece comes with whether it is one of the dense model. `keep` are the tensors that
        later pieces start from; all others are let go. `level` is ONNX Runtime's optimization
        level. Raises BadInputError for an input that is not finite, CannotRunError where ONNX
        Runtime is not installed or lacks a kernel, and what OrtSession raises.
        """
        setup = ProviderSetup(config=_CONFIG)
        sessions = [
            (OrtSession(piece, threads=1, level=level, providers=setup), dense)
            for piece, dense in pieces
        ]
        sums, is_kept = [InputSums() for _ in taps], True
        with one_blas_thread():
            for number, arrays in self._run(sessions):
                self._add(taps, sums, number, arrays)
                if not number:  # sequences and texts are not kept
                    is_kept = all(
                        isinstance(array, np.ndarray) and not array.dtype.hasobject
                        for tensor, array in arrays.items()
                        if tensor in keep
                    )
                if is_kept:
                    self._pass_on(number, arrays, keep)
                elif not taps:
                    break
        known = {
            tensor: (each.dtype.name, len(each.shape)) for tensor, each in self._kept[0].items()
        }
        return Looked(
            statistics=tuple(each.statistics() for each in sums), kept=known if is_kept else None
        )

    def _pass_on(
        self, number: int, arrays: Mapping[Tensor, Array], keep: Collection[Tensor]
    ) -> None:
        """Of one batch keep what later pieces start from, and let go of what this one did."""
        before = self._kept[number]
        now = {
            tensor: before.get(tensor) or self._room.put(array)
            for tensor, array in arrays.items()
            if tensor in keep
        }
        for tensor in before.keys() - now.keys():
            self._room.drop(before[tensor])
        self._kept[number] = now

    def _run(
        self, sessions: Sequence[tuple[OrtSession, bool]]
    ) -> Iterator[tuple[int, dict[Tensor, Array]]]:
        """Kept tensors and the pieces' outputs of every batch, in order; a few run side by side."""
        numbers = range(len(self._batches))
        threads = min(usable_cores(), _MOST_THREADS)
        with ThreadPoolExecutor(threads) as pool:
            coming = (pool.submit(self._outputs, sessions, number) for number in numbers)
            waiting = deque(islice(coming, threads))
            for number in numbers:
                outputs = waiting.popleft().result()
                waiting.extend(islice(coming, 1))
                yield number, outputs

    def _outputs(
        self, sessions: Sequence[tuple[OrtSession, bool]], number: int
    ) -> dict[Tensor, Array]:
        known = {tensor: ArrayStore.get(kept) for tensor, kept in self._kept[number].items()}
        found = dict(known)
        for session, dense in sessions:
            names = [tensor.name for tensor in session.inputs]
            outputs = session.outputs(self._values(names, number, known, dense=dense))
            found |= {(name, dense): array for name, array in outputs.items()}
        return found

    def _values(
        self, names: Sequence[str], number: int, known: Mapping[Tensor, Array], *, dense: bool
    ) -> dict[str, Array]:
        """The tensors of these names; those that no piece made are inputs of the graph."""
        found = {name: known[name, False] for name in names if (name, False) in known}
        if dense:
            found |= {name: known[name, True] for name in names if (name, True) in known}
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
        arrays: Mapping[Tensor, Array],
    ) -> None:
        """Each tap's rows to its sums: taps side by side, each one's batches in order."""
        names = [*dict.fromkeys(tap.tensor for tap in taps)]
        values = self._values(names, number, arrays, dense=False)
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
            rows, held_out = _rows(tap, values[tap.tensor], marks)
            dense = _rows(tap, arrays[tap.tensor, True], marks)[0] if tap.differs else rows
            if dense.shape != rows.shape:  # sizes depend on values: which rows belong together?
                dense = rows
            if held_out.size:
                sums[at].add(rows, held_out, dense)

        with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS)) as pool:
            list(pool.map(add, range(len(taps))))


def _rows(tap: Tap, x: Array, marks: Marks) -> tuple[Array, NDArray[np.bool_]]:
    """As `rows_of`; raises BadInputError for values that are not finite."""
    wide = x if x.dtype == np.float64 else x.astype(np.float32)
    rows, held_out = rows_of(wide, tap.reading, marks)
    if rows.size and not np.isfinite(rows).all():
        raise BadInputError(
            f"layer {tap.layer!r}: its input {tap.tensor!r} has values that are NaN or infinite "
            f"on calibration samples {marks.first + 1} to {marks.first + marks.samples}",
            hint="look at these samples and at the nodes before the layer, or leave the layer out "
            "with --exclude",
        )
    return rows, held_out
