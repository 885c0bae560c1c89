"""Calibrated pruning of an ONNX file: level by level through ONNX Runtime, in a worker process.

Between two levels every node runs once on every batch, with the weights before it pruned already.
What is finished lies in a folder: a run that was killed goes on behind its last finished level.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from twofour.engines.onnxruntime.session import LEVELS, CannotRunError
from twofour.errors import BadInputError, BuildFailedError, PatternBrokenError
from twofour.graph.files import (
    DTYPES,
    dtype_name,
    numpy_dtype,
    read_tensor,
    storage_key,
)
from twofour.graph.half import has_half
from twofour.graph.opened import OpenedModel
from twofour.pattern import as_bits
from twofour.pipeline.calibration_folder import (
    Corrected,
    Finished,
    finished,
    free_bytes,
    linked,
    write_array,
    write_finished,
    written_batches,
)
from twofour.pipeline.calibration_worker import BatchFile, Looked, Looking, Tap
from twofour.pipeline.engine_host import EngineHost, Tries
from twofour.pipeline.onnx_repairing import LinkedModel, RepairJob, repaired
from twofour.pipeline.sources.calibration.data import CalibrationData
from twofour.pipeline.workers import WorkerDiedError
from twofour.pruning.methods import left_to, method_named, without_data
from twofour.pruning.onnx_calibration import (
    Piece,
    Target,
    borders,
    main_graph,
    plan_calibration,
)
from twofour.pruning.onnx_file import Calibrated, Solution, refuse_conflicts
from twofour.pruning.onnx_problems import constant, corrected, layer_problem, store_piece
from twofour.pruning.onnx_rows import Reading
from twofour.pruning.onnx_segments import Changes, Kind, Segments, in_float32, unused_name
from twofour.pruning.selection import choose
from twofour.pruning.solve import Solved, solve_layers
from twofour.pruning.statistics import Statistics, both
from twofour.records.options import MethodOptions, Selection
from twofour.records.weights import Pattern
from twofour.words import in_seconds

SERVICE = "twofour.pipeline.calibration_worker:CalibrationWorker"
_GRAM_BYTES = 1 << 30
"""Of the Gram matrices that are summed up in one pass; more make further passes."""
_GRAM_ITEM_BYTES = 8
_KEPT_BYTES = 1 << 30
"""Of tensors between two levels that stay in memory; more go to files."""
_NO_INPUT = "no calibration input reached it: pruned by magnitude"
_PIECE = "piece.onnx"
_RUN_HINT = "calibration runs the model in ONNX Runtime; without --calibrate nothing is run"
_REFUSED = "INVALID_ARGUMENT :"
"""How ONNX Runtime says that a node cannot take the values or the sizes that came to it."""
_CODES = {name: code for code, name in DTYPES.items()}
_Seen = tuple[int, Statistics | None]
"""How many users of a piece were looked at, and what they showed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob:
    """What is to be pruned, how, and by which data."""

    opened: OpenedModel
    pattern: Pattern
    selection: Selection
    method: str
    options: MethodOptions
    data: CalibrationData
    folder: Path
    """For what is finished and what is passed on, on the file system of the model; the caller
    removes it."""
    reference: OpenedModel | None = None
    """The dense model, to whose weights a mask that is kept is refitted."""
    key: str
    """Of all that the result depends on: what another one finished is not taken."""


class Talk(Protocol):
    """What is used of a run's progress."""

    def step(self, text: str, done: int, total: int | None) -> None:
        """Progress."""

    def note(self, text: str) -> None:
        """Something the user should know."""


class Host(Protocol):
    """What is used of an EngineHost with a CalibrationWorker in it."""

    note: Callable[[str], None]

    def call(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # each has its own
        """The command's value; raises what it raised, and WorkerDiedError where it died."""


def calibrate(job: CalibrationJob, talk: Talk, host: Host | None = None) -> Calibrated:
    """New values for the weights that are to be pruned, and for the biases behind them.

    Raises BadInputError for data and weights that are not finite, CannotRunError where ONNX Runtime
    lacks a kernel, BuildFailedError where it fails, and CrashedError where it ends its process at
    every optimization level.
    """
    refuse_conflicts(job.opened, job.pattern, job.selection)
    try:
        if host is not None:
            return LevelByLevel(job, talk, host).run()
        with EngineHost(threads=1, note=talk.note, service=SERVICE) as own:
            return LevelByLevel(job, talk, own).run()
    except BuildFailedError as error:
        error.hint = error.hint or _RUN_HINT
        raise


class LevelByLevel:
    """One calibration, from its first level to its last."""

    def __init__(self, job: CalibrationJob, talk: Talk, host: Host) -> None:
        self._job = job
        self._talk = talk
        self._host = host
        chosen = choose(job.opened.weights(job.pattern).weights, job.pattern, job.selection)
        self._graph = main_graph(job.opened, job.pattern)
        self._plan = plan_calibration(self._graph, job.pattern, chosen)
        job.folder.mkdir(parents=True, exist_ok=True)
        self._changes = Changes(arrays={}, constants={})
        self._finished: dict[int, Finished] = {}
        pieces, self._hashes = finished(job.folder, job.key)
        for done in pieces:
            self._take(done)
        self._files = linked(job.folder, job.opened)
        self._segments = Segments(self._graph, self._changes, self._files)
        self._batches: tuple[BatchFile, ...] = ()
        taps = [{user.tap for _, user in self._users(level)} for level in self._plan.levels]
        self._borders = tuple(borders(self._graph, taps))
        self._reached: int | None = None
        self._no_room: set[int] = set()
        self._widened: str | None = None
        self._have: dict[str, Kind] = {}
        self._waiting: dict[int, _Seen] = {}
        self._started = time.monotonic()
        self._at_start = sum(self._plan.pieces[number].size for number in self._finished)

    def run(self) -> Calibrated:
        """Prune every level that is not finished, in order, then repair."""
        self.every_level()
        return self._repaired(self._calibrated())

    def every_level(self) -> None:
        """Look at the inputs of every level that is not finished, and do what they are for."""
        self._batches = tuple(written_batches(self._job.folder, self._job.data))
        tries = Tries(engine="ONNX Runtime", levels=LEVELS, note=self._host.note)
        for index, level in enumerate(self._plan.levels):
            self._one_level(index, level, tries)

    def _one_level(self, index: int, level: int, tries: Tries) -> None:
        users = [(number, u) for number, u in self._users(level) if number not in self._finished]
        if not users:
            return
        self._tell(index, users)
        tries.until_alive(
            lambda optimized: self._level_in_some_type(index, users, optimized),
            lambda: f"running {self._job.opened.path.name} on calibration data",
        )
        self._write_finished()
        if any(self._plan.pieces[n].is_tied and n in self._finished for n, _ in users):
            self._reached = None  # what is kept was made with the weight as it was before

    def _write_finished(self) -> None:
        done = [*self._finished.values()]
        write_finished(self._job.folder, self._job.key, done, self._hashes)

    def _users(self, level: int) -> list[tuple[int, Target]]:
        """Those of one level, each with the number of its piece."""
        return [
            (number, user)
            for number, piece in enumerate(self._plan.pieces)
            for user in piece.users
            if user.level == level
        ]

    def _level_in_some_type(
        self, index: int, users: Sequence[tuple[int, Target]], optimized: str
    ) -> None:
        """In the file's own types, else in float32: the CPU has few kernels for bfloat16."""
        opened = self._job.opened
        try:
            self._level(index, users, optimized)
        except CannotRunError as error:
            if self._widened is not None or not has_half(opened.proto):
                raise
            self._widened = f"run in float32, as ONNX Runtime lacks a kernel: {error.message}"
            self._talk.note(f"{opened.path.name} is {self._widened}")
            self._reached = None
            self._level(index, users, optimized)

    def _level(self, index: int, users: Sequence[tuple[int, Target]], optimized: str) -> None:
        """Look at the inputs of one level's layers, and prune those that have no others to come.

        From the start the way leads over the borders of all levels before, as it did in a run that
        was not interrupted: ONNX Runtime fuses nodes, but not across outputs, so that the bits are
        the same.
        """
        waiting = dict(self._waiting)
        for passed in range(0 if self._reached is None else self._reached + 1, index):
            if passed not in self._no_room:
                self._look((), passed, optimized)
        for group in _passes([one for one in users if one[0] not in self._finished]):
            taps = tuple({tapped(user): _tap(user) for _, user in group}.values())
            looked = self._look(taps, index, optimized)
            found = dict(zip(((t.tensor, t.reading) for t in taps), looked.statistics, strict=True))
            ready = []
            for number, user in group:
                count, before = waiting.get(number, (0, None))
                waiting[number] = count + 1, both(before, found[tapped(user)])
                if count + 1 == len(self._plan.pieces[number].users):
                    ready.append((number, waiting.pop(number)[1]))
            self._solve(ready)
        self._waiting = waiting

    def _tell(self, index: int, users: Sequence[tuple[int, Target]]) -> None:
        """Which layers are worked on, and how long the rest will take at the pace until now."""
        sizes = [piece.size for piece in self._plan.pieces]
        ready = sum(sizes[number] for number in self._finished)
        before = ready - self._at_start
        pace = ""
        if before:
            seconds = (time.monotonic() - self._started) * (sum(sizes) - ready) / before
            pace = f", about {in_seconds(seconds)} left"
        levels = len(self._plan.levels)
        text = f"{users[0][1].label} ({index + 1} of {levels}{pace})"
        self._talk.step(text, index, levels)

    def _look(self, taps: tuple[Tap, ...], index: int, optimized: str) -> Looked:
        """One pass over the batches, from what the worker holds to the taps of a level."""
        folder, border = self._job.folder, self._borders[index]
        try:
            if self._reached is None:
                self._host.call("begin", folder, self._batches)
                self._have, self._reached = {}, -1
            wanted = sorted({*border, *(tap.tensor for tap in taps)})
            piece = self._segments.piece(wanted, self._have)
            if piece is not None and self._widened is not None:
                piece = in_float32(piece, folder)
            if piece is not None:
                (folder / _PIECE).write_bytes(piece.SerializeToString())
            asked = Looking(
                piece=None if piece is None else folder / _PIECE,
                level=optimized,
                keep=border,
                taps=taps,
                memory_bytes=_KEPT_BYTES,
                disk_bytes=free_bytes(folder) // 2,
            )
            looked: Looked = self._host.call("look", asked)
        except WorkerDiedError:
            self._reached = None
            raise
        except BuildFailedError as error:
            if _REFUSED not in error.message:
                raise
            path, said = self._job.opened.path, error.message.partition(_REFUSED)[2]
            raise BadInputError(
                f"{self._job.data.source}: {path.name} cannot be run on it:{said}",
                hint="give numbers and sizes that the model takes: token ids that its table has, "
                "inputs that are as long as each other",
            ) from error
        if not looked.kept:
            self._no_room.add(index)
            return looked
        self._reached = index
        self._have = {
            name: Kind(dtype=_CODES[dtype], rank=rank)
            for name, (dtype, rank) in looked.ranks.items()
        }
        return looked

    def _solve(self, ready: Sequence[tuple[int, Statistics | None]]) -> None:
        """Prune pieces whose statistics are complete."""
        pieces, path = self._plan.pieces, self._job.opened.path
        known = []
        for number, found in ready:
            if found is None:
                unseen = Solution(method=left_to(self._job.method), note=_NO_INPUT)
                self._take(Finished(piece=number, solution=unseen))
            else:
                known.append((number, found))
        with _naming_layers(path, [pieces[number] for number, _ in known]):
            problems = [
                layer_problem(pieces[n], self._job.pattern, s, path, self._job.reference)
                for n, s in known
            ]
            solved = solve_layers(problems, method_named(self._job.method), self._job.options)
        for (number, _), result in zip(known, solved, strict=True):
            self._take(self._stored(number, result))

    def _stored(self, number: int, solved: Solved) -> Finished:
        """Write what became of a piece, and of the biases behind it."""
        piece, folder, path = self._plan.pieces[number], self._job.folder, self._job.opened.path
        array = folder / self._file_of(piece)
        stored = read_tensor(piece.tensor, path)
        if array.exists() and piece.key in self._changes.arrays:  # another part of it was first
            stored = np.fromfile(array, stored.dtype).reshape(stored.shape)
        store_piece(piece, solved.weight, stored)
        self._hashes[array.name] = write_array(array, stored)
        biases = []
        for at, user in enumerate(piece.users):
            if user.bias is not None and solved.bias_change is not None:
                file = f"bias-{number}-{at}.bin"
                self._hashes[file] = write_array(
                    folder / file,
                    corrected(user.bias, solved.bias_change, path, self._job.reference),
                )
                copy = None if user.bias.own else self._copy_name(user)
                biases.append(Corrected(user=at, file=file, copy=copy))
        solution = Solution(
            method=self._job.method,
            output_error=solved.output_error,
            damping=solved.damping,
            refit_steps=solved.refit_steps,
            bias_corrected=bool(biases),
            note=solved.note,
        )
        return Finished(piece=number, solution=solution, biases=tuple(biases))

    def _take(self, done: Finished) -> None:
        """A finished piece: what runs from now on has its values."""
        piece, folder = self._plan.pieces[done.piece], self._job.folder
        self._finished[done.piece] = done
        if done.solution.output_error is not None:
            self._changes.arrays[piece.key] = folder / self._file_of(piece)
        for each in done.biases:
            bias = piece.users[each.user].bias
            assert bias is not None, "it was corrected"
            if each.copy is None:
                self._changes.arrays[storage_key(bias.tensor)] = folder / each.file
            else:
                kind = bias.view.seen(read_tensor(bias.tensor, self._job.opened.path)).dtype
                values = np.fromfile(folder / each.file, kind).reshape(bias.shape)
                place = bias.node, bias.position
                self._changes.constants[place] = constant(each.copy, values)

    def _file_of(self, piece: Piece) -> str:
        first = next(n for n, one in enumerate(self._plan.pieces) if one.key == piece.key)
        return f"array-{first}.bin"

    def _copy_name(self, user: Target) -> str:
        return unused_name(self._graph, self._changes, f"{user.label}.bias")

    def _repaired(self, found: Calibrated) -> Calibrated:
        """With what brings the outputs of the pruned model nearer to the dense ones."""
        job = self._job
        if job.options.repair is False:
            return found
        dense = model = LinkedModel(graph=self._graph, files=self._files)
        if job.reference is not None:
            dense = LinkedModel(
                graph=main_graph(job.reference, job.pattern),
                files=linked(job.folder, job.reference, "dense"),
            )
        return repaired(
            RepairJob(
                host=self._host,
                model=model,
                dense=dense,
                pattern=job.pattern,
                pieces=self._plan.pieces,
                changes=self._changes,
                folder=job.folder,
                batches=self._batches,
                wanted=job.options.repair,
                step=self._talk.step,
                in_float32=self._widened is not None,
            ),
            found,
        )

    def _calibrated(self) -> Calibrated:
        """What is to be written into the file."""
        about = self._job.data.about
        pieces, done = self._plan.pieces, self._finished
        rows = {
            user.row: done[number].solution
            for number, piece in enumerate(pieces)
            for user in piece.users
        }
        left = left_to(self._job.method)
        rows |= {row: Solution(method=left, note=why) for row, why in self._plan.without.items()}
        self._prune_rest()
        arrays = self._changes.arrays
        biases = {
            user.bias.name: arrays[storage_key(user.bias.tensor)]
            for number, piece in enumerate(pieces)
            for each in done[number].biases
            if each.copy is None and (user := piece.users[each.user]).bias is not None
        }
        return Calibrated(
            calibration=replace(about, notes=(*about.notes, *filter(None, (self._widened,)))),
            rows=rows,
            arrays={
                user.row: arrays[piece.key]
                for piece in pieces
                for user in piece.users
                if piece.key in arrays
            },
            biases=biases,
            constants=self._changes.constants,
        )

    def _prune_rest(self) -> None:
        """What of an array no layer sees, or no input reached, while the rest of it was solved."""
        prune = without_data(left_to(self._job.method))
        for key, file in self._changes.arrays.items():
            parts = [(n, piece) for n, piece in enumerate(self._plan.pieces) if piece.key == key]
            if not parts:  # a bias
                continue
            solved = sum(p.size for n, p in parts if self._finished[n].solution.output_error)
            tensor = parts[0][1].tensor
            if solved < math.prod(tensor.dims):
                values = np.fromfile(file, numpy_dtype(dtype_name(tensor)))
                values = values.reshape(tuple(tensor.dims))
                axis = self._axis(parts[0][1])
                prune(as_bits(values), axis, self._job.pattern, kind=values.dtype.name)
                self._hashes[file.name] = write_array(file, values)
                self._write_finished()

    def _axis(self, piece: Piece) -> int:
        axis = self._job.opened.weights(self._job.pattern).weights[piece.users[0].row].axis
        assert axis is not None, "it was chosen for its axis"
        return axis


def tapped(user: Target) -> tuple[str, Reading]:
    """Equal for users with the same Gram matrix."""
    return user.tap, user.reading


def _tap(user: Target) -> Tap:
    return Tap(tensor=user.tap, reading=user.reading, layer=user.label)


def _passes(users: Sequence[tuple[int, Target]]) -> Iterator[list[tuple[int, Target]]]:
    """Users whose Gram matrices are summed up together; those that share one stay together."""
    groups: dict[tuple[str, Reading], list[tuple[int, Target]]] = {}
    for one in users:
        groups.setdefault(tapped(one[1]), []).append(one)
    together: list[tuple[int, Target]] = []
    total = 0
    for (_, reading), group in groups.items():
        parts, inputs = reading.layout.parts_and_inputs
        size = 2 * parts * inputs * inputs * _GRAM_ITEM_BYTES
        if together and total + size > _GRAM_BYTES:
            yield together
            together, total = [], 0
        together = [*together, *group]
        total += size
    if together:
        yield together


@contextlib.contextmanager
def _naming_layers(path: Path, pieces: Sequence[Piece]) -> Iterator[None]:
    """Which layers an error is about, where it does not say."""
    try:
        yield
    except (BadInputError, PatternBrokenError) as error:
        if str(path) in error.message:
            raise
        labels = ", ".join(repr(piece.users[0].label) for piece in pieces)
        raise type(error)(f"{path}: layer {labels}: {error.message}", hint=error.hint) from error
