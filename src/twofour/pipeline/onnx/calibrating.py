"""Calibrated pruning of an ONNX file: level by level through ONNX Runtime, in a worker process.

Between two levels every node runs once on every batch, with the weights before it pruned already;
where that changes its values it also runs as in the dense model, whose outputs layers aim at.

Lifecycle: `calibrate` plans the levels, writes the batches to files and opens a `PieceRunner`. For
each level, in passes that fit into memory, `PieceRunner.look` cuts out the nodes between what the
worker keeps and the level's inputs, has the worker run them, and returns a `PassResult`. The layers
whose inputs are all known then are solved, and `NewValues.take` puts their weights and biases to
where later pieces read them. In the end `_Calibration.result` collects the files.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from twofour.calibrate.input_rows import InputReading
from twofour.calibrate.layer_plan import (
    CalibrationPlan,
    WeightPart,
    WeightUser,
    borders,
    main_graph,
    plan_calibration,
)
from twofour.calibrate.new_values import NewValues, solve_all, solving_device
from twofour.calibrate.pieces import (
    BatchFile,
    PassResult,
    PieceCutter,
    Tap,
    Tensor,
    TypeAndRank,
    in_float32,
)
from twofour.engines.onnxruntime.session import LEVELS, CannotRunError
from twofour.errors import BadInputError, BuildFailedError, naming
from twofour.graph.files import Array
from twofour.graph.opened import OpenedModel, has_half
from twofour.inputs.fits import save_arrays, stored_arrays
from twofour.inputs.samples import Batch, CalibrationData, SampleSplit, cut_batches
from twofour.pipeline.folder import HELD_OUT
from twofour.pipeline.stages import Progress, Settings
from twofour.pruning.arrays import Calibrated
from twofour.pruning.matrices import to_stack
from twofour.pruning.methods import DEFAULT_WITHOUT_DATA, left_to, method_named, without_data
from twofour.pruning.onnx import choices_of
from twofour.pruning.solve import LayerSolver, SolvedLayer
from twofour.pruning.statistics import Statistics, added
from twofour.records import frozen
from twofour.records.weights import Calibration, Solution, shared
from twofour.sources.calibration.kinds import calibration_record, onnx_inputs
from twofour.store import link_or_copy
from twofour.words import time_left
from twofour.workers.host import EngineHost, Tries
from twofour.workers.process import WorkerDiedError

_SERVICE = "twofour.calibrate.pieces:CalibrationWorker"
_MOST_HELD_OUT = 32
"""Held-out samples that both files are run on in the end."""
_GRAM_BYTES = 1 << 30
"""Largest size of the matrices that are summed up in one pass."""
_NO_INPUT = "no calibration input reached it: pruned by magnitude"
_RUN_HINT = "calibration runs the model in ONNX Runtime; without --calibrate nothing is run"
_REFUSED = "INVALID_ARGUMENT :"
"""Beginning of ONNX Runtime's message about values or sizes that a node cannot take."""
_Matrix = tuple[str, InputReading]
"""A tensor and how it is read: equal for users of one Gram matrix."""


@frozen
class CalibrationTask:
    """An ONNX file whose weights are to be pruned with data."""

    opened: OpenedModel
    options: Settings
    folder: Path
    """For what the worker keeps; the caller removes it."""
    progress: Progress
    dense_model: OpenedModel | None = None
    """The dense model to whose weights a mask that is kept is refitted."""
    changes_graph: bool = True
    """False: a bias that lies in the graph itself stays as it is."""
    host: EngineHost | None = None
    """None: a process is started."""


@frozen
class _Use:
    """A node whose weight is to be pruned, with the number of its part."""

    part: int
    user: WeightUser

    @property
    def matrix(self) -> _Matrix:
        return self.user.tap, self.user.reading


@frozen
class _BatchPass:
    """Layers of one level whose Gram matrices are summed up in one pass over the batches."""

    uses: tuple[_Use, ...]
    ready: tuple[int, ...]
    """Parts that are solved then: the inputs of all of their layers are known."""


@frozen
class _WrittenBatches:
    """The calibration samples in files."""

    source: str
    files: tuple[BatchFile, ...]
    calibration: Calibration


def calibrate(task: CalibrationTask, data: CalibrationData) -> Calibrated:
    """New values for the weights that are to be pruned, and for the biases behind them.

    Raises BadInputError for arrays that cannot be pruned for all of their users, and for data and
    weights that are not finite; CannotRunError where ONNX Runtime lacks a kernel, BuildFailedError
    where it fails, and CrashedError where it ends its process at every optimization level.
    """
    options = task.options
    chosen = choices_of(task.opened, options.pattern, options.selection)
    graph = main_graph(task.opened)
    plan = plan_calibration(graph, options.pattern, chosen, changes_graph=task.changes_graph)
    task.folder.mkdir(parents=True, exist_ok=True)
    batches = _write_batches(data, task.folder)
    _write_held_out(task, batches)
    values = NewValues(graph, task.folder, task.dense_model)
    levels = tuple(_batch_passes(plan))
    runner = PieceRunner(task, batches, _segments(task, plan, values, levels))
    calibration = _Calibration(task, plan, values, runner)
    try:
        with runner.host:
            calibration.prune(levels)
    except BuildFailedError as error:
        error.hint = error.hint or _RUN_HINT
        raise
    return calibration.result(batches.calibration)


class _Calibration:
    """The layers of a plan, solved level by level."""

    def __init__(
        self, task: CalibrationTask, plan: CalibrationPlan, values: NewValues, runner: PieceRunner
    ) -> None:
        self._task = task
        self._plan = plan
        self._values = values
        self._runner = runner
        self._device = solving_device()
        self._left_to = left_to(task.options.method_name)
        """The method for weights that the method with data cannot take."""
        self._solutions: dict[int, Solution] = {}
        self._waiting: dict[int, Statistics | None] = {}
        """Sums of parts whose other users are in later passes."""
        self._started = time.monotonic()
        self._solving_s = 0.0

    def prune(self, levels: Sequence[Sequence[_BatchPass]]) -> None:
        """Prune every level, in order."""
        for index, passes in enumerate(levels):
            for batch_pass in passes:
                self._report(index, len(levels), batch_pass.uses[0].user.label)
                self._sum_up(batch_pass, index)
                since = time.monotonic()
                self._solve(batch_pass.ready)
                self._solving_s += time.monotonic() - since
            solved = {number for batch_pass in passes for number in batch_pass.ready}
            if any(len(self._plan.parts[number].levels) > 1 for number in solved):
                self._runner.forget()  # what is kept was made with the weight as it was before

    def result(self, calibration: Calibration) -> Calibrated:
        """All that is to be written into the file."""
        self._prune_rest()
        rows = {}
        for row, why_not in self._plan.without.items():
            rows[row] = Solution(method=self._left_to, note=why_not)
        arrays = {}
        for number, part in enumerate(self._plan.parts):
            for user in part.users:
                rows[user.row] = self._solutions[number]
                if part.weight.key in self._values.arrays:
                    arrays[user.row] = self._values.arrays[part.weight.key]
        notes = calibration.notes
        if self._runner.widened is not None:
            notes = (*notes, self._runner.widened)
        return Calibrated(
            calibration=replace(calibration, notes=notes),
            rows=rows,
            arrays=arrays,
            biases=self._values.biases,
        )

    def _report(self, index: int, levels: int, layer: str) -> None:
        """Report the layer that is worked on, and the time left at the pace until now."""
        parts = self._plan.parts
        pace = ""
        solved = sum(parts[number].size for number in self._solutions)
        if solved:
            # 30 of 120 million weights after 20 s: the other 90 million take 60 s
            rest = (sum(part.size for part in parts) - solved) / solved
            seconds = time.monotonic() - self._started
            pace = f", {time_left(seconds * rest, self._solving_s / seconds)}"
        self._task.progress.step(f"{layer} ({index + 1} of {levels}{pace})", index, levels)

    def _sum_up(self, batch_pass: _BatchPass, index: int) -> None:
        """Sum up the Gram matrices of a pass, and add them to those of the parts."""
        # q, k and v read one tensor alike: one tap, whose statistics all three get
        shared = Counter(use.matrix for use in batch_pass.uses)
        taps = {use.matrix: self._tap(use, shared[use.matrix]) for use in batch_pass.uses}
        seen = self._runner.look([*taps.values()], index)
        statistics = dict(zip(taps, seen.statistics, strict=True))
        for use in batch_pass.uses:
            before = self._waiting.get(use.part)
            more = statistics[use.matrix]
            # a tied weight is solved with the inputs of all of its uses
            if before is not None and more is not None:
                more = added(before, more)
            self._waiting[use.part] = more or before

    def _tap(self, use: _Use, users: int) -> Tap:
        """What is summed up for a layer; sums that layers share are of no one's outputs."""
        part = self._plan.parts[use.part]
        user = use.user
        differing = self._runner.segments.differing
        weight = None
        if users == 1 and part.layout.narrows and len(part.users) == 1:
            weight = to_stack(self._values.dense_weight(part), part.layout)
        return Tap(
            tensor=user.tap,
            reading=user.reading,
            layer=user.label,
            differs=user.tap in differing,
            added=user.added if weight is not None and user.added in differing else None,
            weight=weight,
        )

    def _solve(self, ready: Sequence[int]) -> None:
        """Prune the parts whose statistics are complete, and use them in all that runs later."""
        options = self._task.options
        known: dict[int, Statistics] = {}
        for number in ready:
            statistics = self._waiting.pop(number)
            if statistics is None:
                self._solutions[number] = Solution(method=self._left_to, note=_NO_INPUT)
            else:
                known[number] = statistics
        parts = [self._plan.parts[number] for number in known]
        labels = ", ".join(repr(part.users[0].label) for part in parts)
        with naming(self._task.opened.path), naming(f"layer {labels}"):
            problems = [
                self._values.problem(part, options.pattern, statistics)
                for part, statistics in zip(parts, known.values(), strict=True)
            ]
            solver = LayerSolver(method_named(options.method_name), options.method)
            layers = solve_all(solver, problems, self._device)
        for number, part, layer in zip(known, parts, layers, strict=True):
            self._values.take(number, part, layer)
            self._solutions[number] = _solution(layer, options.method_name)

    def _prune_rest(self) -> None:
        """Prune the rest of arrays solved in part: what no layer reads, or no input reached."""
        pattern = self._task.options.pattern
        weights = self._task.opened.weights().weights
        solved: dict[object, list[WeightPart]] = defaultdict(list)
        for number, part in enumerate(self._plan.parts):
            if self._solutions[number].output_error:
                solved[part.weight.key].append(part)
        for parts in solved.values():
            axis = weights[parts[0].users[0].row].axis
            assert axis is not None, "it was chosen for its axis"
            self._values.prune_rest(parts, axis, pattern, without_data(self._left_to))


def _solution(layer: SolvedLayer, method: str) -> Solution:
    if layer.by_magnitude:
        method = DEFAULT_WITHOUT_DATA
    return replace(Solution(**shared(layer, Solution)), method=method)


@frozen
class _Segments:
    """Where both models are cut, and what cuts them."""

    cutters: dict[bool, PieceCutter]
    """True: of the dense model."""
    differing: frozenset[str]
    """Tensors of which the dense model has other values."""
    borders: tuple[frozenset[Tensor], ...]
    """For each level the tensors that later ones start from, of both models."""


def _segments(
    task: CalibrationTask,
    plan: CalibrationPlan,
    values: NewValues,
    levels: Sequence[Sequence[_BatchPass]],
) -> _Segments:
    files = _link_files(task.opened, task.folder, "model")
    dense = values.graph
    dense_files = files
    differing = plan.behind
    if task.dense_model is not None:
        dense = main_graph(task.dense_model)
        dense_files = _link_files(task.dense_model, task.folder, "dense")
        differing = frozenset(dense.made_by)  # its weights differ from the first layer on
    unchanged = NewValues(dense, task.folder)
    taps = [_taps(passes) for passes in levels]
    both = []
    for own, other in zip(borders(values.graph, taps), borders(dense, taps), strict=True):
        pruned = {(name, False) for name in own}
        both.append(frozenset(pruned | {(name, True) for name in other & differing}))
    return _Segments(
        cutters={False: PieceCutter(values, files), True: PieceCutter(unchanged, dense_files)},
        differing=differing,
        borders=tuple(both),
    )


def _taps(passes: Sequence[_BatchPass]) -> set[str]:
    """The tensors that are read in the passes of a level."""
    users = [use.user for batch_pass in passes for use in batch_pass.uses]
    return {user.tap for user in users} | {user.added for user in users if user.added is not None}


class PieceRunner:
    """Asks the worker for pass after pass; after its death, for all that it kept once more."""

    def __init__(
        self, task: CalibrationTask, batches: _WrittenBatches, segments: _Segments
    ) -> None:
        note = task.progress.note
        self.host = task.host or EngineHost(threads=1, note=note, service=_SERVICE)
        self.segments = segments
        self.widened: str | None = None
        """Why the model is run in float32; None: it is run in its own types."""
        self._task = task
        self._batches = batches
        self._tries = Tries(engine="ONNX Runtime", levels=LEVELS, note=self.host.note)
        self._reached: int | None = None
        """The level whose border the worker keeps, -1 before the first; None: it has no batches."""
        self._kept: dict[Tensor, TypeAndRank] = {}
        self._not_kept: set[Tensor] = set()
        """Sequences and texts, which are computed again where they are read."""

    def look(self, taps: Sequence[Tap], index: int) -> PassResult:
        """The statistics of the taps of a level; the worker keeps the level's border then."""
        name = self._task.opened.path.name
        return self._tries.until_alive(
            lambda optimized: self._in_some_type(taps, index, optimized),
            lambda: f"running {name} on calibration data",
        )

    def forget(self) -> None:
        """Have the next pass start from the inputs of the model."""
        self._reached = None

    def _in_some_type(self, taps: Sequence[Tap], index: int, optimized: str) -> PassResult:
        """Run a level in the file's types, else in float32: the CPU has few bfloat16 kernels."""
        opened = self._task.opened
        try:
            return self._up_to(taps, index, optimized)
        except CannotRunError as error:
            if self.widened is not None or not has_half(opened.proto):
                raise
            self.widened = f"run in float32, because ONNX Runtime has no kernel: {error.message}"
            self._task.progress.note(f"{opened.path.name} is {self.widened}")
            self.forget()
            return self._up_to(taps, index, optimized)

    def _up_to(self, taps: Sequence[Tap], index: int, optimized: str) -> PassResult:
        """Run the levels that the worker has not passed, and then this one with its taps.

        A new worker passes through all levels before, as the one that died did: ONNX Runtime
        fuses nodes, but not across outputs, so that the bits are the same.
        """
        # Example: of a worker that died in level 3, `_reached` is None and levels 0 to 2 are run
        # without taps; else it is 2, and the values that the worker keeps are the start.
        first = 0 if self._reached is None else self._reached + 1
        for passed in range(first, index):
            self._run_pass((), passed, optimized)
        return self._run_pass(taps, index, optimized)

    def _run_pass(self, taps: Sequence[Tap], index: int, optimized: str) -> PassResult:
        """Run one pass over the batches, from what the worker keeps to the taps of a level."""
        try:
            if self._reached is None:
                self.host.call("begin", self._task.folder, self._batches.files)
                self._kept = {}
                self._reached = -1
            keep = self.segments.borders[index] - self._not_kept
            wanted = keep.union(*(tap.reads for tap in taps))
            pieces = [*self._piece(wanted, dense=False), *self._piece(wanted, dense=True)]
            seen: PassResult = self.host.call("look", taps, pieces, keep, optimized)
        except WorkerDiedError:
            self.forget()
            raise
        except BuildFailedError as error:
            if _REFUSED not in error.message:
                raise
            why = error.message.partition(_REFUSED)[2]
            raise BadInputError(
                f"{self._batches.source}: {self._task.opened.path.name} cannot be run on it:{why}",
                hint="give numbers and sizes that the model takes: token ids that its table has, "
                "inputs of equal length",
            ) from error
        self._reached = index
        self._kept = seen.kept
        # what was to be kept and is not: also inputs of the model, which are read from the batches
        self._not_kept |= keep - seen.kept.keys()
        return seen

    def _piece(self, wanted: frozenset[Tensor], *, dense: bool) -> Iterator[tuple[Path, bool]]:
        """The piece of one of the models that computes what the worker does not have yet."""
        # before the first pruned layer both models have one tensor, which is kept once
        have = {
            name: kind
            for (name, is_dense), kind in self._kept.items()
            if is_dense == dense or name not in self.segments.differing
        }
        names = sorted(name for name, is_dense in wanted if is_dense == dense)
        piece = self.segments.cutters[dense].piece(names, have)
        if piece is None:
            return
        if self.widened is not None:
            piece = in_float32(piece, self._task.folder)
        path = self._task.folder / ("dense-piece.onnx" if dense else "piece.onnx")
        path.write_bytes(piece.SerializeToString())
        yield path, dense


def _batch_passes(plan: CalibrationPlan) -> Iterator[list[_BatchPass]]:
    """The passes of each level."""
    levels: dict[int, list[_Use]] = defaultdict(list)
    for number, part in enumerate(plan.parts):
        for user in part.users:
            levels[user.level].append(_Use(part=number, user=user))
    # a weight that levels 0 and 4 use is seen twice: it is ready in the pass of level 4
    seen: Counter[int] = Counter()
    for _, uses in sorted(levels.items()):
        passes = []
        for together in _fitting_memory(uses):
            numbers = [use.part for use in together]
            seen.update(numbers)
            ready = [n for n in dict.fromkeys(numbers) if seen[n] == len(plan.parts[n].users)]
            passes.append(_BatchPass(uses=tuple(together), ready=tuple(ready)))
        yield passes


def _fitting_memory(uses: Sequence[_Use]) -> Iterator[list[_Use]]:
    """Users whose matrices fit into memory together; users of one matrix stay together."""
    groups: dict[_Matrix, list[_Use]] = defaultdict(list)
    for use in uses:
        groups[use.matrix].append(use)
    together: list[_Use] = []
    total = 0
    for (_, reading), group in groups.items():
        parts, inputs = reading.layout.parts_and_inputs
        # four matrices: inputs on all and on held-out samples, and how far each is from the dense
        # model's; 768 inputs take 4 x 768 x 768 x 8 bytes = 18 MiB
        size = 4 * parts * inputs * inputs * np.dtype(np.float64).itemsize
        if together and total + size > _GRAM_BYTES:
            yield together
            together = []
            total = 0
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


def _write_batches(data: CalibrationData, folder: Path) -> _WrittenBatches:
    """Write the batches to files, for a process that may have to be started again."""
    split = SampleSplit()
    paths: dict[Path, Batch] = {}
    for number, batch in enumerate(data.batches()):
        path = folder / f"batch-{number}.npz"
        save_arrays(path, batch.arrays)
        split.add(batch.arrays.values(), batch.samples)
        paths[path] = replace(batch, arrays={})
    factors = split.factors
    files: list[BatchFile] = []
    first = 0
    for path, batch in paths.items():
        stop = first + batch.samples
        files.append(
            BatchFile(
                path=path,
                samples=batch.samples,
                first=first,
                in_all=len(factors),
                factors=factors[first:stop],
                padding=batch.padding,
            )
        )
        first = stop
    return _WrittenBatches(
        source=data.source,
        files=tuple(files),
        calibration=split.noted_in(calibration_record(data)),
    )


def _write_held_out(task: CalibrationTask, written: _WrittenBatches) -> None:
    """Write the first held-out samples beside the folder, in batches that the model takes."""
    inputs = onnx_inputs(task.opened.path, task.opened.inputs)
    arrays: dict[str, Array] = {}
    for number, batch in enumerate(cut_batches(inputs, _held_out(written), _MOST_HELD_OUT)):
        arrays.update((f"{number}:{name}", array) for name, array in batch.arrays.items())
    save_arrays(task.folder.with_name(Path(HELD_OUT).name), arrays)


def _held_out(written: _WrittenBatches) -> Iterator[Batch]:
    """The samples that no weight is solved with, still padded as their batches are."""
    for batch in written.files:
        rows = np.flatnonzero(batch.factors < 0)
        if not rows.size:
            continue
        # inputs that all samples share, such as positions of shape (1, 512), stay whole
        arrays = stored_arrays(batch.path)
        for name, array in arrays.items():
            if array.shape[:1] == batch.factors.shape:
                arrays[name] = array[rows]
        yield Batch(arrays=arrays, samples=len(rows))
