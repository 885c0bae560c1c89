"""Statistics of the inputs of an ONNX file's layers as the file is; on disk, read one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twofour.pipeline.calibration_folder import Finished
from twofour.pipeline.engine_host import EngineHost
from twofour.pipeline.onnx_calibrating import (
    SERVICE,
    CalibrationJob,
    Host,
    LevelByLevel,
    Talk,
    tapped,
)
from twofour.pruning.onnx_calibration import CalibrationPlan, Piece
from twofour.pruning.onnx_file import Solution
from twofour.pruning.onnx_rows import Reading
from twofour.pruning.statistics import Inputs, Statistics
from twofour.store import atomic_file


class InputStatistics:
    """By layer, for those that were looked at; read from the folder each time."""

    def __init__(self, plan: CalibrationPlan, rows: Sequence[str], folder: Path) -> None:
        """`rows`: the layer of each row of the graph's weights."""
        self._folder = folder
        self._files = _files(plan.pieces)
        self._pieces = {
            rows[user.row]: number
            for number, piece in enumerate(plan.pieces)
            for user in piece.users
        }
        self._plan = plan

    def piece(self, layer: str) -> Piece | None:
        """The layer's stored weight; None where its inputs cannot be looked at."""
        number = self._pieces.get(layer)
        return None if number is None else self._plan.pieces[number]

    def of(self, layer: str) -> Statistics | None:
        """None where no input reached the layer, or they cannot be looked at."""
        number = self._pieces.get(layer)
        path = None if number is None else self._folder / self._files[number]
        if path is None or not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        seen = _inputs(arrays, "seen")
        assert seen is not None, "they were looked at"
        return Statistics(seen=seen, held_out=_inputs(arrays, "held_out"))


def look_at_inputs(job: CalibrationJob, talk: Talk, host: Host | None = None) -> InputStatistics:
    """Run the model on the data, and keep in the job's folder what its layers saw.

    No weight changes; one that was killed goes on behind its last finished level. Raises what
    `calibrate` raises.
    """
    if host is not None:
        return _Looking(job, talk, host).run_dense()
    with EngineHost(threads=1, note=talk.note, service=SERVICE) as own:
        return _Looking(job, talk, own).run_dense()


class _Looking(LevelByLevel):
    """Goes through the levels, and prunes nothing."""

    def run_dense(self) -> InputStatistics:
        self.every_level()
        weights = self._job.opened.weights(self._job.pattern).weights
        return InputStatistics(self._plan, [w.layer for w in weights], self._job.folder)

    def _solve(self, ready: Sequence[tuple[int, Statistics | None]]) -> None:
        pieces = self._plan.pieces
        files = _files(pieces)
        for number, found in ready:
            path = self._job.folder / files[number]
            if found is not None and not path.is_file():  # else of a layer with the same inputs
                _write(path, found)
            self._take(Finished(piece=number, solution=Solution(method=self._job.method)))


def _files(pieces: Sequence[Piece]) -> list[str]:
    """One for the pieces that see the same inputs."""
    first: dict[tuple[tuple[str, Reading], ...], str] = {}
    keys = [tuple(tapped(user) for user in piece.users) for piece in pieces]
    return [first.setdefault(key, f"inputs-{number}.npz") for number, key in enumerate(keys)]


def _write(path: Path, found: Statistics) -> None:
    arrays: dict[str, np.ndarray] = {}
    for name, inputs in (("seen", found.seen), ("held_out", found.held_out)):
        if inputs is not None:
            arrays[f"{name}.gram"] = _narrow(inputs.gram)
            arrays[f"{name}.total"] = inputs.total
            arrays[f"{name}.rows"] = np.array(inputs.rows)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub takes them for a flag


def _narrow(gram: np.ndarray) -> np.ndarray:
    """In float32, half the size and what methods work in, where no sum is too large for it."""
    narrow: np.ndarray = gram.astype(np.float32)
    return narrow if np.isfinite(narrow).all() else gram


def _inputs(arrays: dict[str, np.ndarray], name: str) -> Inputs | None:
    if f"{name}.rows" not in arrays:
        return None
    gram, total = arrays[f"{name}.gram"], arrays[f"{name}.total"]
    return Inputs(gram=gram, total=total, rows=int(arrays[f"{name}.rows"]))
