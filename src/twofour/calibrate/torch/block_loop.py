"""Pruning a torch module with calibration data, block by block in the order of its own forward.

Weights of a block that are used with the same input (query, key and value) are one step; later
steps see what earlier ones made of the model. Only the Gram matrices of one step are in memory. The
dense model runs beside the pruned one, block by block too. All weights may be in memory, or come
from files of a checkpoint that is larger than memory, one block at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from twofour.calibrate.finished_steps import FinishedSteps
from twofour.calibrate.torch.blocks import (
    MOST_IN_PART,
    BlockRun,
    Blocks,
    WeightGroup,
    ignore,
    parts_of,
    replayable_chains,
    weight_groups,
)
from twofour.calibrate.torch.gram import DenseInputs, GramCollector, RowOrder
from twofour.calibrate.torch.products import (
    Product,
    Products,
    StopForward,
    UseOrder,
    WatchedWeight,
)
from twofour.calibrate.torch.stored_weights import (
    CalibratedWeight,
    WeightsInFiles,
    WeightsInMemory,
    calibrated_weight,
    numbers_of,
    pruned_array,
    put,
    rounding_of,
    take_biases,
)
from twofour.errors import naming
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout, to_stack
from twofour.pruning.methods import DEFAULT_WITH_DATA, method_named
from twofour.pruning.resources import give_back_large_arrays, give_back_memory, one_blas_thread
from twofour.pruning.solve import LayerSolver
from twofour.pruning.statistics import Statistics
from twofour.pruning.torch.calls import (
    Call,
    KeptCalls,
    Tree,
    device_of,
    forward,
    put_back,
    tree_store,
    undisturbed,
)
from twofour.pruning.torch.module import (
    ModulePruning,
    Progress,
    PrunedArray,
    StreamedModule,
    plan_in_memory,
    with_keys,
)
from twofour.records.options import MethodOptions
from twofour.records.weights import Calibration, Pattern, PruneResult, Selection
from twofour.words import time_left

_MOST_STEPS = 16
"""Steps of one block at most; neighbours are joined where there are more (experts)."""
_Watched = tuple[
    Sequence[WatchedWeight], Callable[[Product], bool | None], Callable[[torch.Tensor], None]
]
"""Weights to watch in a forward, and the functions of `Products`."""
_NOTHING: _Watched = ((), ignore, ignore)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTask:
    """How weights are to be pruned, and where progress is reported."""

    pattern: Pattern
    options: MethodOptions
    progress: Progress | None = None
    finished: FinishedSteps | None = None
    """Saves what is finished, for a run that is killed."""
    dense_model: nn.Module | None = None
    """The dense model, to whose layers of the same names a mask that is kept is refitted."""
    memory_bytes: int | None = None
    """Limit of intermediate results in memory, MEMORY_BYTES by default; the rest goes to files."""
    spill_folder: Path | None = None
    """Where these files go; None: where temporary files do."""

    @property
    def name(self) -> str:
        """The method's name."""
        return self.options.name or DEFAULT_WITH_DATA


def calibration_task(pattern: Pattern, options: MethodOptions) -> CalibrationTask:
    """The task for these options; before the data are read, raises BadInputError for bad options.

    Bad are an unknown method, and a refit or damping that no layer can be solved with.
    """
    task = CalibrationTask(pattern=pattern, options=options)
    LayerSolver(method_named(task.name), options)
    return task


@torch.no_grad()
def prune_calibrated(
    model: nn.Module,
    calls: Iterable[Call],
    calibration: Calibration,
    task: CalibrationTask,
    selection: Selection,
) -> PruneResult:
    """Prune a model in its own memory with calibration data, in the order of its own forward.

    Weights that no input reached are pruned without data. All or nothing: raises BadInputError like
    `plan_in_memory` and `BlockLoop.run`, and for data that the model cannot run on, pruned or not,
    with every weight and bias as it was.
    """
    with calls_kept(model, calls, task) as kept:
        plan = plan_in_memory(model, task.pattern, selection)
        to_prune = [calibrated_weight(model, w, task.pattern) for w in plan.wanted.values()]
        weights = WeightsInMemory(model, to_prune, task.dense_model)
        try:
            if task.dense_model is not None:
                for weight in to_prune:
                    take_biases(model, weight, task.dense_model)
            done = BlockLoop(weights, kept, task).run() if to_prune else {}
            return plan.result(task.name, done, kept.split.told(calibration))
        except BaseException:
            put_back(weights.before)
            raise


@torch.no_grad()
def prune_streamed_calibrated(
    streamed: StreamedModule,
    calls: Iterable[Call],
    calibration: Calibration,
    task: CalibrationTask,
    selection: Selection,
) -> PruneResult:
    """Prune the copy of the files behind the module; an error leaves what was pruned until then."""
    plan = ModulePruning(streamed.module, streamed, task.pattern, selection)
    give_back_large_arrays()
    weights = WeightsInFiles(streamed, plan.wanted.values(), task.pattern)
    with calls_kept(streamed.module, calls, task) as kept:
        done = BlockLoop(weights, kept, task).run()
        calibration = kept.split.told(calibration)
    return with_keys(streamed, plan.result(task.name, done, calibration))


@contextlib.contextmanager
def calls_kept(
    model: nn.Module, calls: Iterable[Call], task: CalibrationTask
) -> Iterator[KeptCalls]:
    """The calls, read once; raises BadInputError where there are no samples."""
    with tree_store(memory_bytes=task.memory_bytes, within=task.spill_folder) as kept:
        yield KeptCalls(calls, device_of(model), kept)


@dataclass(frozen=True, slots=True)
class _BlockedModel:
    """The pruned model or the dense one, with its blocks and the parts of the current block."""

    model: nn.Module
    blocks: Blocks
    parts: Blocks


class BlockLoop:
    """Runs one model on its calibration data; its groups of weights are pruned in their order."""

    def __init__(
        self, weights: WeightsInMemory | WeightsInFiles, data: KeptCalls, task: CalibrationTask
    ) -> None:
        self._weights, self._data, self._task = weights, data, task
        self._model = weights.module
        self._holders = {part for parts in weights.holders.values() for part in parts}
        self._order = RowOrder()
        self._modules: dict[str, nn.Module] = {}
        none = Blocks({}, data.kept)
        self._pruned = self._dense = _BlockedModel(self._model, none, none)
        self._finished_parts: frozenset[str] = frozenset()
        """The finished parts of the current block."""
        self._ends: dict[str, int] = {}
        """Block -> its place in the order in which blocks end in the first call."""
        self._once: set[str] = set()
        """Blocks that run once in it."""
        self._solving = 0.0
        """Seconds that the layers took when their sums were known."""

    def run(self) -> dict[str, PrunedArray]:
        """Prune the weights in place, and return what was done to each, by name.

        The outputs are to be those of the dense model on the same calls. A weight that no
        calibration input reached is missing, and as it was. Any number of threads gives the same
        bits. Raises BadInputError for a forward that fails, and NaN and infinity on the way; some
        weights are pruned then.
        """
        done: dict[str, PrunedArray] = {}
        with undisturbed(self._model), one_blas_thread(), self._order.watched(self._holders):
            groups, started = self._groups(), time.perf_counter()
            for number, group in enumerate(groups):
                self._report(groups, number, time.perf_counter() - started)
                done |= self._prune(group, is_last=number == len(groups) - 1)
                give_back_memory()
            self._pruned.blocks.drop_all()
            self._dense.blocks.drop_all()
        return done

    def _groups(self) -> list[WeightGroup]:
        """The weights in the order in which the model runs them, seen in the first call.

        A block that turns out not to be called is replaced by its parts.
        """
        from_files = not self._weights.in_memory
        self._modules = parts_of("", self._model, self._holders, from_files=from_files)
        while True:
            self._say("find the order of the layers", 0, len(self._data))
            groups = self._first_forward()
            uncalled = [path for path in self._modules if path not in self._ends]
            if not uncalled:
                return groups
            for path in uncalled:
                block = self._modules.pop(path)
                self._modules |= parts_of(path, block, self._holders, from_files=from_files)

    def _prune(self, group: WeightGroup, *, is_last: bool) -> dict[str, PrunedArray]:
        """New weights and biases of a group, unless an interrupted run has found them already."""
        # A model of blocks 0, 1 and 2, at block 1 with the steps [q, k, v], [out], [up], [down]:
        # dense block 1 runs once on every call, and the inputs of its weights are kept. For each
        # step pruned block 1 runs on every call, from the kept output of block 0 to the step's last
        # product, or what is added to it; the step is solved, and the next one sees its new
        # weights. Then block 1 runs once more, and its output is kept for block 2.
        block = None if group.block is None else self._modules[group.block]
        self._take_apart(group.block)
        finished, task, method = self._task.finished, self._task, method_named(self._task.name)
        solved = None if finished is None else finished.load(group.names)
        keep = group.block is not None and not is_last
        if solved is not None:
            if not self._weights.in_memory:
                with self._weights.here(group.names, block):
                    self._dense_forwards(group, (), DenseInputs(self._data.kept), keep=keep)
            self._weights.resume(solved, block)
        with self._weights.here(group.names, block) as found:
            weights = {weight.name: weight for weight in found}
            if solved is None:
                solved = {}
                for inputs in self._steps(group, weights, keep=keep):
                    with naming(", ".join(inputs)):
                        problems = (self._problem(weights[n], *each) for n, each in inputs.items())
                        solver, since = LayerSolver(method, task.options), time.perf_counter()
                        solved |= zip(inputs, map(solver.solve, problems), strict=True)
                        self._solving += time.perf_counter() - since
                        del solver  # its Gram matrices go before those of the next step come
                    for name in inputs:
                        put(weights[name], solved[name])
                    inputs.clear()  # and so do the sums that they are made of
                self._weights.keep(found, block)
                if finished is not None:
                    finished.save(group.names, solved)
            for number in range(len(self._data) if keep else 0):  # while its weights are there
                self._until_end(group, self._pruned, number, _NOTHING, keep=True)
            self._pruned.parts.drop_all()
            return {n: pruned_array(s, weights[n].tensor, task.name) for n, s in solved.items()}

    def _report(self, groups: Sequence[WeightGroup], number: int, seconds: float) -> None:
        """Report the layers worked on, and how long the rest will take at the pace until now."""
        sizes = [sum(self._weights.sizes[name] for name in group.names) for group in groups]
        before, left = sum(sizes[:number]), sum(sizes[number:])
        name = groups[number].block or groups[number].names[0].rpartition(".")[0]
        pace = ""
        if before:
            pace = f", {time_left(seconds * left / before, self._solving / seconds)}"
        self._say(f"{name} ({number + 1} of {len(groups)}{pace})", number, len(groups))

    def _say(self, text: str, done: int, total: int | None) -> None:
        if self._task.progress is not None:
            self._task.progress(text, done, total)

    def _first_forward(self) -> list[WeightGroup]:
        """Run one call with every block and weight watched, and return the groups of weights."""
        blocks = Blocks(self._modules, self._data.kept, "pruned")
        self._pruned = _BlockedModel(self._model, blocks, Blocks({}, self._data.kept))
        order, ran = UseOrder(), list[BlockRun]()
        first_use: dict[str, tuple[int, set[str | None]]] = {}

        def meet(product: Product) -> None:
            order.meet(product)
            first_use.setdefault(product.weight.name, (len(ran), set()))[1].add(blocks.inside)

        watched: list[CalibratedWeight] = []
        if self._weights.in_memory:
            with self._weights.here([*self._weights.sizes], None) as watched:
                pass
        order.begin()
        blocks.ended = ran.append
        output = self._forward(self._pruned, 0, self._modules, (watched, meet, ignore))
        self._ends = {path: at for at, (path, _, _) in enumerate(ran)}
        self._once = {path for path, times in Counter(r[0] for r in ran).items() if times == 1}
        following = replayable_chains(
            blocks, ran, output, lambda: self._forward(self._pruned, 0, self._modules, _NOTHING)
        )
        blocks.drop_all()
        with self._weights.dense() as dense:
            modules = {path: dense.get_submodule(path) for path in self._modules}
            others = Blocks(modules, self._data.kept, "dense")
            self._dense = _BlockedModel(dense, others, self._pruned.parts)
        self._dense.blocks.impure |= blocks.impure
        for each in (blocks, self._dense.blocks):
            each.ended = ignore
            each.follow(following)
        return weight_groups(order, self._weights.holders, self._modules, self._ends, first_use)

    def _take_apart(self, path: str | None) -> None:
        """Make finished parts of a block replayable, for the steps behind them."""
        parts: dict[str, nn.Module] = {}
        if path is not None and path not in self._pruned.blocks.impure:
            parts = parts_of(path, self._modules[path], self._holders, most=MOST_IN_PART)
        of_dense = {each: self._dense.model.get_submodule(each) for each in parts}
        kept, self._finished_parts = self._data.kept, frozenset()
        self._pruned = replace(self._pruned, parts=Blocks(parts, kept, "part"))
        self._dense = replace(self._dense, parts=Blocks(of_dense, kept, "dense part"))

    def _steps(
        self, group: WeightGroup, weights: Mapping[str, CalibratedWeight], *, keep: bool
    ) -> Iterator[dict[str, tuple[Layout, Statistics]]]:
        """The inputs of the group's weights, step by step in the order of their use.

        Each step is gathered when it is asked for, with the weights of earlier steps as they are.
        """
        dense = DenseInputs(self._data.kept)
        order = self._dense_forwards(group, [*weights.values()], dense, keep=keep)
        for names in order.steps(None if group.block is None else _MOST_STEPS):
            self._finished_parts = order.finished_parts(names)
            yield self._gathered(group, order, [weights[name] for name in names], dense)
        dense.drop()

    def _dense_forwards(
        self,
        group: WeightGroup,
        weights: Sequence[WatchedWeight],
        dense: DenseInputs,
        *,
        keep: bool,
    ) -> UseOrder:
        """Record the inputs of the group's weights in the dense model, and their order."""
        order, parts = UseOrder(), self._dense.parts
        parts.ended = lambda ran: order.ended(ran[0])

        def meet(product: Product) -> None:
            dense.record(product)
            order.meet(product)

        with self._weights.dense():
            watched = [self._weights.dense_weight(weight) for weight in weights]
            for number in range(len(self._data)):
                dense.begin(number)
                order.begin()
                seen = watched, meet, dense.record_added
                self._until_end(group, self._dense, number, seen, keep=keep)
        parts.ended = ignore
        return order

    def _gathered(
        self,
        group: WeightGroup,
        order: UseOrder,
        weights: Sequence[WatchedWeight],
        dense: DenseInputs,
    ) -> dict[str, tuple[Layout, Statistics]]:
        """The statistics of some of the group's weights in the model as it is now."""
        names, one = [weight.name for weight in weights], weights[0]
        matrices = None
        if len(names) == 1 and one.layout.narrows and one.name not in dense.used_in_part:
            matrices = to_stack(numbers_of(self._weights.dense_weight(one).tensor), one.layout)
        gram = GramCollector(weights, self._data.factors, dense, matrices)

        def meet(product: Product) -> bool:
            return gram.meet(product, positions_first=self._order.positions_first)

        for number in range(len(self._data)):
            gram.begin(self._data.without_inputs(number), number, self._data.first_sample(number))
            gram.left = order.uses(names, number)
            seen = weights, meet, gram.meet_added
            try:
                self._until_end(group, self._pruned, number, seen, keep=False)
            finally:
                gram.end()
        return gram.statistics()

    def _until_end(
        self,
        group: WeightGroup,
        model: _BlockedModel,
        number: int,
        watched: _Watched,
        *,
        keep: bool,
    ) -> None:
        """Run a forward until the group's block has run; `keep`: its output is kept for the next.

        Blocks before it are replayed.
        """
        done = {path for path, end in self._ends.items() if end < group.at}

        def ended(ran: BlockRun) -> None:
            if ran[0] == group.block and group.block in self._once:
                raise StopForward

        model.blocks.ended = ended
        if keep and group.block is not None:
            done.add(group.block)
        try:
            self._forward(model, number, done, watched)
        except StopForward:
            pass
        finally:
            model.blocks.ended = ignore

    def _forward(
        self, model: _BlockedModel, number: int, finished: Collection[str], watched: _Watched
    ) -> Tree:
        call = self._data[number]
        self._order.begin(call.samples)
        model.blocks.begin(number, finished)
        model.parts.begin(number, self._finished_parts)
        with model.blocks.installed(), model.parts.installed(), Products(*watched):
            return forward(model.model, call, number)

    def _problem(
        self, weight: CalibratedWeight, layout: Layout, statistics: Statistics
    ) -> LayerProblem:
        dense = self._weights.dense_weight(weight).tensor
        return LayerProblem(
            stored=numbers_of(weight.tensor),
            layout=layout,
            pattern=self._task.pattern,
            statistics=statistics,
            has_bias=bool(weight.biases),
            unpruned=None if self._task.dense_model is None else numbers_of(dense),
            rounded=rounding_of(weight.tensor.dtype),
        )
