"""Calibrated pruning of an ONNX file: level by level through ONNX Runtime, in a worker process.

Between two levels every node runs once on every batch, with the weights before it pruned already;
where that changes its values it also runs as in the dense model, whose outputs layers aim at.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from twofour.calibrate.device import solve_all, solving_device
from twofour.calibrate.onnx.input_rows import InputReading
from twofour.calibrate.onnx.layer_plan import (
    CalibrationPlan,
    MainGraph,
    WeightUser,
    borders,
    corrected,
    dense_weight,
    layer_problem,
    main_graph,
    plan_calibration,
    store_part,
)
from twofour.calibrate.onnx.pieces import (
    BatchFile,
    Changes,
    PassResult,
    PieceCutter,
    Tap,
    Tensor,
    TypeAndRank,
    in_float32,
)
from twofour.engines.onnxruntime.session import LEVELS, CannotRunError
from twofour.errors import BadInputError, BuildFailedError, naming
from twofour.graph.files import Array, read_tensor, storage_key
from twofour.graph.opened import OpenedModel, has_half
from twofour.inputs.fits import save_arrays, stored_arrays
from twofour.inputs.samples import Batch, CalibrationData, cut_batches
from twofour.pattern import as_bits
from twofour.pipeline.folder import HELD_OUT
from twofour.pipeline.stages import Progress, Settings
from twofour.pruning.matrices import to_stack
from twofour.pruning.methods import DEFAULT_WITHOUT_DATA, left_to, method_named, without_data
from twofour.pruning.onnx import Calibrated, choices_of
from twofour.pruning.samples import SampleSplit
from twofour.pruning.solve import LayerSolver, SolvedLayer
from twofour.pruning.statistics import Statistics, added
from twofour.records.weights import Calibration, Solution
from twofour.sources.calibration.kinds import calibration_record, onnx_inputs
from twofour.store import atomic_file, link_or_copy
from twofour.words import time_left
from twofour.workers.host import EngineHost, Tries
from twofour.workers.process import WorkerDiedError

if TYPE_CHECKING:
    import onnx

_SERVICE = "twofour.calibrate.onnx.pieces:CalibrationWorker"
_MOST_HELD_OUT = 32
"""Held-out samples that both files are run on in the end."""
_GRAM_BYTES = 1 << 30
"""Largest size of the matrices that are summed up in one pass."""
_NO_INPUT = "no calibration input reached it: pruned by magnitude"
_RUN_HINT = "calibration runs the model in ONNX Runtime; without --calibrate nothing is run"
_REFUSED = "INVALID_ARGUMENT :"
"""Beginning of ONNX Runtime's message about values or sizes that a node cannot take."""
_Use = tuple[int, WeightUser]
"""A node whose weight is to be pruned, with the number of its part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchPass:
    """Layers of one level whose Gram matrices are summed up in one pass over the batches."""

    uses: tuple[_Use, ...]
    ready: tuple[int, ...]
    """Parts that are solved then: the inputs of all of their layers are known."""


class OnnxCalibration:
    """One calibration of an ONNX file, from its first level to its last."""

    def __init__(  # noqa: PLR0913  # tests bring a host
        self,
        opened: OpenedModel,
        options: Settings,
        folder: Path,
        progress: Progress,
        *,
        dense_model: OpenedModel | None = None,
        host: EngineHost | None = None,
        copies_biases: bool = True,
    ) -> None:
        """`folder` is for what the worker keeps; the caller removes it.

        Without `copies_biases` a bias that others read too stays as it is. `dense_model` is the
        dense model to whose weights a mask that is kept is refitted. Raises
        BadInputError for arrays that cannot be pruned for all of their users.
        """
        chosen = choices_of(opened, options.pattern, options.selection)
        folder.mkdir(parents=True, exist_ok=True)
        self._opened, self._options, self._dense_model = opened, options, dense_model
        self._folder, self._progress = folder, progress
        self._host = host or EngineHost(threads=1, note=progress.note, service=_SERVICE)
        self._graph = main_graph(opened, options.pattern)
        self._plan = plan_calibration(
            self._graph, options.pattern, chosen, copies_biases=copies_biases
        )
        self._passes = tuple(_batch_passes(self._plan))
        self._solutions: dict[int, Solution] = {}
        self._changes = Changes()
        self._biases: dict[str, Path] = {}
        files = _link_files(opened, folder, "model")
        dense, self._differing = self._graph, self._plan.behind
        self._segments = {False: PieceCutter(self._graph, self._changes, files)}
        if dense_model is not None:
            dense = main_graph(dense_model, options.pattern)
            files = _link_files(dense_model, folder, "dense")
            self._differing = frozenset(dense.made_by)
        self._segments[True] = PieceCutter(dense, Changes(), files)
        self._borders = tuple(self._kept_behind(dense))
        self._reached: int | None = None
        self._no_room: set[int] = set()
        self._widened: str | None = None
        self._kinds: dict[Tensor, TypeAndRank] = {}
        self._waiting: dict[int, Statistics | None] = {}

    def run(self, data: CalibrationData) -> Calibrated:
        """New values for the weights that are to be pruned, and for the biases behind them.

        Raises BadInputError for data and weights that are not finite, CannotRunError where ONNX
        Runtime lacks a kernel, BuildFailedError where it fails, and CrashedError where it ends its
        process at every optimization level.
        """
        self._source = data.source
        self._batches, split = _write_batches(data, self._folder)
        self._factors = split.factors
        self._write_held_out()
        self._started = time.monotonic()
        self._solving = 0.0  # seconds
        self._device = solving_device()
        try:
            with self._host:
                self._every_level()
        except BuildFailedError as error:
            error.hint = error.hint or _RUN_HINT
            raise
        return self._calibrated(split.told(calibration_record(data)))

    def _write_held_out(self) -> None:
        """Write the first held-out samples beside the folder, in batches that the model takes."""
        inputs = onnx_inputs(self._opened.path, self._opened.inputs)
        batches = cut_batches(inputs, _held_out(self._batches, self._factors), _MOST_HELD_OUT)
        arrays: dict[str, Array] = {}
        for number, batch in enumerate(batches):
            arrays |= {f"{number}:{name}": array for name, array in batch.arrays.items()}
        save_arrays(self._folder.with_name(Path(HELD_OUT).name), arrays)

    def _kept_behind(self, dense: MainGraph) -> Iterator[frozenset[Tensor]]:
        """For each level the tensors that later ones start from, of both models."""
        users = [[user for step in level for _, user in step.uses] for level in self._passes]
        taps = [{t for user in level for t in (user.tap, user.added) if t} for level in users]
        for own, other in zip(borders(self._graph, taps), borders(dense, taps), strict=True):
            differing = {(name, True) for name in other & self._differing}
            yield frozenset(differing | {(name, False) for name in own})

    def _every_level(self) -> None:
        """Prune every level, in order."""
        tries = Tries(engine="ONNX Runtime", levels=LEVELS, note=self._host.note)
        for index, steps in enumerate(self._passes):
            uses = [use for step in steps for use in step.uses if use[0] not in self._solutions]
            if not uses:
                continue
            self._report(index, uses[0][1].label)
            tries.until_alive(
                lambda optimized, index=index: self._level_in_some_type(index, optimized),  # type: ignore[misc]  # bound in the loop
                lambda: f"running {self._opened.path.name} on calibration data",
            )
            solved = (self._plan.parts[n].users for n, _ in uses if n in self._solutions)
            if any(len({user.level for user in users}) > 1 for users in solved):
                self._reached = None  # what is kept was made with the weight as it was before

    def _level_in_some_type(self, index: int, optimized: str) -> None:
        """Run a level in the file's types, else in float32: the CPU has few bfloat16 kernels."""
        try:
            self._level(index, optimized)
        except CannotRunError as error:
            if self._widened is not None or not has_half(self._opened.proto):
                raise
            self._widened = f"run in float32, because ONNX Runtime has no kernel: {error.message}"
            self._progress.note(f"{self._opened.path.name} is {self._widened}")
            self._reached = None
            self._level(index, optimized)

    def _level(self, index: int, optimized: str) -> None:
        """Sum up the Gram matrices of one level, and prune the layers whose inputs are all known.

        A new worker passes through all levels before, as the one that died did: ONNX Runtime
        fuses nodes, but not across outputs, so that the bits are the same.
        """
        # Example: of a worker that died in level 3, `_reached` is None and levels 0 to 2 are run
        # without taps; else it is 2, and the values that the worker keeps are the start.
        waiting = dict(self._waiting)
        for passed in range(0 if self._reached is None else self._reached + 1, index):
            if passed not in self._no_room:
                self._run_pass((), passed, optimized)
        for step in self._passes[index]:
            uses = [use for use in step.uses if use[0] not in self._solutions]
            if not uses:
                continue
            shared = Counter(_matrix_of(user) for _, user in step.uses)
            taps = {
                _matrix_of(user): self._tap(number, user, alone=shared[_matrix_of(user)] == 1)
                for number, user in uses
            }
            looked = self._run_pass([*taps.values()], index, optimized)
            found = dict(zip(taps, looked.statistics, strict=True))
            for number, user in uses:
                before, more = waiting.get(number), found[_matrix_of(user)]
                waiting[number] = added(before, more) if before and more else before or more
            since = time.monotonic()
            self._solve(step, waiting)
            self._solving += time.monotonic() - since
        self._waiting = waiting

    def _tap(self, number: int, user: WeightUser, *, alone: bool) -> Tap:
        """What is summed up for a layer; sums that layers share are of no one's outputs."""
        part, weight = self._plan.parts[number], None
        if alone and part.layout.narrows and len(part.users) == 1:
            dense = dense_weight(part, self._opened.path, self._dense_model)
            weight = to_stack(dense, part.layout)
        return Tap(
            tensor=user.tap,
            reading=user.reading,
            layer=user.label,
            differs=user.tap in self._differing,
            added=user.added if weight is not None and user.added in self._differing else None,
            weight=weight,
        )

    def _report(self, index: int, layer: str) -> None:
        """Report the layer that is worked on, and the time left at the pace until now."""
        parts, pace = self._plan.parts, ""
        done = sum(parts[number].size for number in self._solutions)
        if done:
            rest = (sum(part.size for part in parts) - done) / done
            seconds = time.monotonic() - self._started
            pace = f", {time_left(seconds * rest, self._solving / seconds)}"
        levels = len(self._passes)
        self._progress.step(f"{layer} ({index + 1} of {levels}{pace})", index, levels)

    def _run_pass(self, taps: Sequence[Tap], index: int, optimized: str) -> PassResult:
        """Run one pass over the batches, from what the worker keeps to the taps of a level."""
        try:
            if self._reached is None:
                self._host.call("begin", self._folder, self._batches, self._factors)
                self._kinds, self._reached = {}, -1
            keep = self._borders[index]
            wanted = {*keep, *((tap.tensor, False) for tap in taps)}
            wanted |= {(tap.tensor, True) for tap in taps if tap.differs}
            wanted |= {(tap.added, dense) for tap in taps if tap.added for dense in (False, True)}
            pieces = [*self._piece(wanted, dense=False), *self._piece(wanted, dense=True)]
            looked: PassResult = self._host.call("look", taps, pieces, keep, optimized)
        except WorkerDiedError:
            self._reached = None
            raise
        except BuildFailedError as error:
            if _REFUSED not in error.message:
                raise
            said = error.message.partition(_REFUSED)[2]
            raise BadInputError(
                f"{self._source}: {self._opened.path.name} cannot be run on it:{said}",
                hint="give numbers and sizes that the model takes: token ids that its table has, "
                "inputs of equal length",
            ) from error
        if looked.kept is None:
            self._no_room.add(index)
        else:
            self._reached = index
            self._kinds = looked.kept
        return looked

    def _piece(self, wanted: set[Tensor], *, dense: bool) -> Iterator[tuple[Path, bool]]:
        """The piece of one of the models that computes what the worker does not have yet."""
        have = {
            name: kind
            for (name, is_dense), kind in self._kinds.items()
            if is_dense == dense or name not in self._differing
        }
        names = sorted(name for name, is_dense in wanted if is_dense == dense)
        piece = self._segments[dense].piece(names, have)
        if piece is not None:
            if self._widened is not None:
                piece = in_float32(piece, self._folder)
            path = self._folder / ("dense-piece.onnx" if dense else "piece.onnx")
            path.write_bytes(piece.SerializeToString())
            yield path, dense

    def _solve(self, step: _BatchPass, found: dict[int, Statistics | None]) -> None:
        """Prune the parts whose statistics are complete, and use them in all that runs later."""
        path, options = self._opened.path, self._options
        parts = self._plan.parts
        known = {n: s for n in step.ready if (s := found.pop(n)) is not None}
        labels = ", ".join(repr(parts[number].users[0].label) for number in known)
        with naming(path), naming(f"layer {labels}"):
            problems = [
                layer_problem(parts[number], options.pattern, statistics, path, self._dense_model)
                for number, statistics in known.items()
            ]
            solver = LayerSolver(method_named(options.method_name), options.method)
            solved = solve_all(solver, problems, self._device)
        left = Solution(method=left_to(options.method_name), note=_NO_INPUT)
        self._solutions.update(dict.fromkeys(step.ready, left))
        for number, layer in zip(known, solved, strict=True):
            self._take(number, layer)

    def _take(self, number: int, solved: SolvedLayer) -> None:
        """Use the new values of a part in all that runs from now on."""
        part, method = self._plan.parts[number], self._options.method_name
        values = self._stored(part.tensor)
        store_part(part, solved.weight, values)
        self._write(part.tensor, values, f"array-{number}.bin")
        if solved.bias_change is not None:
            for user in part.users:
                self._correct(user, solved.bias_change)
        self._solutions[number] = Solution(
            method=DEFAULT_WITHOUT_DATA if solved.by_magnitude else method,
            output_error=solved.output_error,
            damping=solved.damping,
            refit_steps=solved.refit_steps,
            bias_corrected=solved.bias_change is not None,
            note=solved.note,
        )

    def _correct(self, user: WeightUser, change: Array) -> None:
        """Put a change of its outputs into a layer's bias, or into a copy that it alone reads."""
        bias = user.bias
        assert bias is not None, "a part is corrected where all of its users have a bias"
        stored = self._stored(bias.tensor)
        values = corrected(bias, change, stored, self._opened.path, self._dense_model)
        if bias.own:
            self._biases[bias.name] = self._write(bias.tensor, values, f"bias-{user.row}.bin")
        else:
            self._changes.copy(self._graph, bias, f"{user.label}.bias", values)

    def _stored(self, tensor: onnx.TensorProto) -> Array:
        """An array as it is now: other parts of it may be changed already."""
        values = read_tensor(tensor, self._opened.path)
        file = self._changes.arrays.get(storage_key(tensor))
        return values if file is None else np.fromfile(file, values.dtype).reshape(values.shape)

    def _write(self, tensor: onnx.TensorProto, values: Array, name: str) -> Path:
        """Keep an array's new values in the file of that name, or the one that it has already."""
        file = self._changes.arrays.setdefault(storage_key(tensor), self._folder / name)
        with atomic_file(file) as temporary:
            np.ascontiguousarray(values).tofile(temporary)
        return file

    def _calibrated(self, calibration: Calibration) -> Calibrated:
        """All that is to be written into the file."""
        self._prune_rest()
        users = [(user, n, p) for n, p in enumerate(self._plan.parts) for user in p.users]
        left, arrays = left_to(self._options.method_name), self._changes.arrays
        without = {row: Solution(method=left, note=why) for row, why in self._plan.without.items()}
        notes = (*calibration.notes, *filter(None, (self._widened,)))
        return Calibrated(
            calibration=replace(calibration, notes=notes),
            rows={user.row: self._solutions[number] for user, number, _ in users} | without,
            arrays={user.row: arrays[p.key] for user, _, p in users if p.key in arrays},
            biases=self._biases,
            constants=self._changes.constants,
        )

    def _prune_rest(self) -> None:
        """Prune the rest of arrays solved in part: what no layer reads, or no input reached."""
        prune = without_data(left_to(self._options.method_name))
        solved: Counter[object] = Counter()
        for number, part in enumerate(self._plan.parts):
            solved[part.key] += part.size if self._solutions[number].output_error else 0
        weights = self._opened.weights(self._options.pattern).weights
        for part in {part.key: part for part in self._plan.parts}.values():
            if 0 < solved[part.key] < math.prod(part.tensor.dims):
                values, axis = self._stored(part.tensor), weights[part.users[0].row].axis
                assert axis is not None, "it was chosen for its axis"
                prune(as_bits(values), axis, self._options.pattern, kind=values.dtype.name)
                self._write(part.tensor, values, "")


def _matrix_of(user: WeightUser) -> tuple[str, InputReading]:
    """A value that is equal for users of one Gram matrix."""
    return user.tap, user.reading


def _batch_passes(plan: CalibrationPlan) -> Iterator[list[_BatchPass]]:
    seen: Counter[int] = Counter()
    for level in plan.levels:
        steps = []
        uses = [(n, u) for n, part in enumerate(plan.parts) for u in part.users]
        for together in _fitting_memory([use for use in uses if use[1].level == level]):
            seen.update(number for number, _ in together)
            numbers = dict.fromkeys(number for number, _ in together)
            ready = tuple(n for n in numbers if seen[n] == len(plan.parts[n].users))
            steps.append(_BatchPass(uses=tuple(together), ready=ready))
        yield steps


def _fitting_memory(uses: Sequence[_Use]) -> Iterator[list[_Use]]:
    """Users whose matrices fit into memory together; users of one matrix stay together."""
    groups: dict[tuple[str, InputReading], list[_Use]] = {}
    for use in uses:
        groups.setdefault(_matrix_of(use[1]), []).append(use)
    together: list[_Use] = []
    total = 0
    for (_, reading), group in groups.items():
        parts, inputs = reading.layout.parts_and_inputs
        # four matrices: inputs on all and on held-out samples, and how far each is from the dense
        # model's; 768 inputs take 4 x 768 x 768 x 8 bytes = 18 MiB
        size = 4 * parts * inputs * inputs * np.dtype(np.float64).itemsize
        if together and total + size > _GRAM_BYTES:
            yield together
            together, total = [], 0
        together = [*together, *group]
        total += size
    if together:
        yield together


def _link_files(opened: OpenedModel, folder: Path, name: str) -> dict[Path, str]:
    """Link the model's files into the folder, because ONNX Runtime reads none from outside it."""
    names = {}
    for number, file in enumerate((opened.path, *opened.data_files)):
        names[file] = f"{name}-{number}.bin"
        link_or_copy(file, folder / names[file])
    return names


def _held_out(batches: Sequence[BatchFile], factors: Array) -> Iterator[Batch]:
    """The samples that no weight is solved with, still padded as their batches are."""
    for batch in batches:
        own = factors[batch.first : batch.first + batch.samples]
        rows = np.flatnonzero(own < 0)
        if rows.size:
            given = stored_arrays(batch.path)
            arrays = {n: a[rows] if a.shape[:1] == own.shape else a for n, a in given.items()}
            yield Batch(arrays=arrays, samples=len(rows))


def _write_batches(
    data: CalibrationData, folder: Path
) -> tuple[tuple[BatchFile, ...], SampleSplit]:
    """Write the batches to files, for a process that may have to be started again."""
    split, files, first = SampleSplit(), list[BatchFile](), 0
    for number, batch in enumerate(data.batches()):
        path = folder / f"batch-{number}.npz"
        save_arrays(path, batch.arrays)
        split.add(batch.arrays.values(), batch.samples)
        files.append(
            BatchFile(path=path, samples=batch.samples, first=first, padding=batch.padding)
        )
        first += batch.samples
    return tuple(files), split
