"""Pruning a torch module with calibration data, block by block in the order of its own forward.

Within a block the weights that meet the same input (query, key and value) are one step; later steps
see what earlier ones made of the model. Gram matrices of one step at a time are held. The dense
model runs beside the pruned one, block by block too. Its weights may all be in memory or come from
files, one block at a time.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from twofour.calibrate.finished import FinishedSteps
from twofour.calibrate.torch.blocks import (
    Blocks,
    Ran,
    chains,
    inner_parts,
    nothing,
    parts_of,
    same_bits,
)
from twofour.calibrate.torch.products import Enough, Product, Products, RowOrder, Target, Trace
from twofour.calibrate.torch.statistics import DenseInputs, Gathering
from twofour.calibrate.torch.weights import (
    CalibratedWeight,
    FromFiles,
    InMemory,
    done_of,
    numbers_of,
    put,
    rounding_of,
)
from twofour.errors import BadInputError, PatternBrokenError
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout
from twofour.pruning.methods import DEFAULT_WITH_DATA, method_named
from twofour.pruning.resources import give_back_memory, one_blas_thread
from twofour.pruning.solve import SolvedLayer, solve_layers
from twofour.pruning.statistics import Statistics
from twofour.pruning.torch.calls import (
    Call,
    KeptCalls,
    Tree,
    device_of,
    forward,
    spill,
    undisturbed,
)
from twofour.pruning.torch.module import Done, Progress
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern
from twofour.words import in_seconds

_MOST_STEPS = 16
"""In one block; neighbours are taken together where there are more (experts, dense blocks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How weights are to be pruned, and who is told."""

    pattern: Pattern
    options: MethodOptions
    progress: Progress | None = None
    finished: FinishedSteps | None = None
    """Keeps what is done, for a run that is killed."""
    reference: nn.Module | None = None
    """The dense model, to whose layers of the same names a mask that is kept is refitted."""
    memory_bytes: int | None = None
    """Kept in memory of what the data became, MEMORY_BYTES by default; the rest lies in files."""
    spill_folder: Path | None = None
    """Where these files go; None: where temporary files do."""

    @property
    def name(self) -> str:
        """The method's name."""
        return self.options.name or DEFAULT_WITH_DATA


@contextlib.contextmanager
def calls_kept(model: nn.Module, calls: Iterable[Call], work: Work) -> Iterator[KeptCalls]:
    """The calls, read once; raises BadInputError where there are no samples."""
    with spill(memory_bytes=work.memory_bytes, within=work.spill_folder) as kept:
        yield KeptCalls(calls, device_of(model), kept)


def calibrate(weights: InMemory | FromFiles, calls: KeptCalls, work: Work) -> dict[str, Done]:
    """Prune the weights in place, and say what was done to each, by name.

    They aim at what the dense model gives on the same calls. A weight that no calibration input
    reached is missing, and as it was. The same bits for any number of threads. Raises
    BadInputError for a forward that fails, and NaN and infinity on the way; some weights are
    pruned then.
    """
    with undisturbed(weights.module), one_blas_thread():
        return _Run(weights, calls, work).all()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """Weights of one block, or some that lie in none or in several."""

    block: str | None
    names: tuple[str, ...]
    at: float
    """When the block ends in a forward, or the first of the weights is used."""


@dataclass(frozen=True, slots=True)
class _World:
    """The pruned model, or the dense one."""

    model: nn.Module
    blocks: Blocks
    parts: Blocks
    """Parts of the block that is worked on."""


class _Run:
    """One model on its calibration data."""

    def __init__(self, weights: InMemory | FromFiles, data: KeptCalls, work: Work) -> None:
        self._weights, self._data, self._work = weights, data, work
        self._model = weights.module
        self._holders = {part for parts in weights.holders.values() for part in parts}
        self._order = RowOrder()
        self._modules: dict[str, nn.Module] = {}
        none = Blocks({}, data.kept)
        self._pruned = self._dense = _World(self._model, none, none)
        self._final_parts: frozenset[str] = frozenset()
        """Of the block that is worked on: what is done of it."""
        self._ends: dict[str, int] = {}
        """Block -> when it ends in the first call."""
        self._once: set[str] = set()
        """Blocks that run once in it."""
        self._last: _Unit | None = None

    def all(self) -> dict[str, Done]:
        """Every unit in the order in which the model runs them."""
        done: dict[str, Done] = {}
        with self._order.watched(self._holders):
            units, started = self._units(), time.perf_counter()
            self._last = units[-1] if units else None
            for number, unit in enumerate(units):
                self._tell(units, number, time.perf_counter() - started)
                done |= self._unit(unit)
                give_back_memory()
        self._pruned.blocks.drop_all()
        self._dense.blocks.drop_all()
        return done

    def _units(self) -> list[_Unit]:
        """From the first call; blocks that turn out not to be any fall into their parts."""
        from_files = not self._weights.in_memory
        self._modules = parts_of("", self._model, self._holders, from_files=from_files)
        while True:
            self._say("how the layers follow each other", 0, len(self._data))
            units = self._first_forward()
            uncalled = [path for path in self._modules if path not in self._ends]
            if not uncalled:
                return units
            for path in uncalled:
                block = self._modules.pop(path)
                self._modules |= parts_of(path, block, self._holders, from_files=from_files)

    def _first_forward(self) -> list[_Unit]:
        """One call with every block and every weight watched."""
        blocks = Blocks(self._modules, self._data.kept, "pruned")
        self._pruned = _World(self._model, blocks, Blocks({}, self._data.kept))
        trace, ran = Trace(), list[Ran]()
        used_in: dict[str, set[str | None]] = {}
        first: dict[str, int] = {}

        def meet(product: Product) -> None:
            trace.meet(product)
            used_in.setdefault(product.target.name, set()).add(blocks.inside)
            first.setdefault(product.target.name, len(ran))

        targets = []
        if self._weights.in_memory:
            with self._weights.here([*self._weights.sizes], None) as weights:
                targets = [weight.target for weight in weights]
        trace.begin()
        blocks.ended = ran.append
        output = self._forward(self._pruned, 0, self._modules, (targets, meet))
        self._ends = {path: at for at, (path, _, _) in enumerate(ran)}
        self._once = {path for path, times in Counter(r[0] for r in ran).items() if times == 1}
        following = self._try_replay(ran, output)
        blocks.drop_all()
        with self._weights.dense() as dense:
            modules = {path: dense.get_submodule(path) for path in self._modules}
            others = Blocks(modules, self._data.kept, "dense")
            self._dense = _World(dense, others, self._pruned.parts)
        self._dense.blocks.impure |= blocks.impure
        for each in (blocks, self._dense.blocks):
            each.ended = nothing
            each.follow(following)
        return self._split(trace, used_in, first)

    def _try_replay(self, ran: list[Ran], output: Tree) -> dict[str, str]:
        """The first call once more, with what its blocks gave: another result forbids it.

        And once more with what the last block of each chain gave: the chains that give the same.
        """
        blocks, following, again = self._pruned.blocks, chains(ran, output), list[Ran]()
        blocks.ended = again.append

        def same() -> bool:
            again.clear()
            try:
                result = self._forward(self._pruned, 0, self._modules, ((), nothing))
            except BadInputError:  # gradients are asked for, among others: what is kept has none
                return False
            inputs = [
                [(path, given) for path, given, _ in each if path not in following.values()]
                for each in (ran, again)
            ]
            return same_bits((inputs[0], output), (inputs[1], result))

        if not same():
            blocks.impure.update(self._modules)
            return {}
        blocks.follow(following)
        return following if same() else {}

    def _split(
        self, trace: Trace, used_in: Mapping[str, set[str | None]], first: Mapping[str, int]
    ) -> list[_Unit]:
        """The weights by block; those of none or several by the input that they meet first."""
        by_block: dict[str, list[str]] = {}
        rest: list[str] = []
        within = {part: path for path, block in self._modules.items() for part in block.modules()}
        for name, holders in self._weights.holders.items():
            places = used_in.get(name) or {within.get(part) for part in holders}
            (place, *others) = places
            if place is None or others:
                rest.append(name)
            else:
                by_block.setdefault(place, []).append(name)
        units = [
            _Unit(block=path, names=tuple(names), at=self._ends.get(path, math.inf))
            for path, names in by_block.items()
        ]
        for names in trace.steps():
            here = [name for name in names if name in rest]
            if here:
                units.append(_Unit(block=None, names=tuple(here), at=first[here[0]] - 0.5))
        left = tuple(name for name in rest if name not in first)
        if left:
            units.append(_Unit(block=None, names=left, at=math.inf))
        return sorted(units, key=lambda unit: unit.at)

    def _unit(self, unit: _Unit) -> dict[str, Done]:
        """Statistics, new weights and biases, unless an earlier run has them already."""
        block = None if unit.block is None else self._modules[unit.block]
        self._take_apart(unit.block)
        finished, in_memory = self._work.finished, self._weights.in_memory
        solved = None if finished is None else finished.load(unit.names)
        if solved is not None:
            if not in_memory:
                with self._weights.here(unit.names, block):
                    self._dense_forwards(unit, (), DenseInputs(self._data.kept))
            self._weights.resume(solved, block)
        with self._weights.here(unit.names, block) as found:
            weights = {weight.target.name: weight for weight in found}
            if solved is None:
                solved = self._steps(unit, weights)
                self._weights.keep(found, block)
                if finished is not None:
                    finished.save(unit.names, solved)
            if unit.block is not None and unit is not self._last:
                for number in range(len(self._data)):  # while its weights are there
                    self._until_end(unit, self._pruned, number, ((), nothing), final=True)
            self._pruned.parts.drop_all()
            return {
                name: done_of(each, weights[name].target.tensor, self._work.name)
                for name, each in solved.items()
            }

    def _take_apart(self, path: str | None) -> None:
        """What is finished of a block is not worked out again for the steps behind it."""
        parts: dict[str, nn.Module] = {}
        if path is not None and path not in self._pruned.blocks.impure:
            parts = inner_parts(path, self._modules[path], self._holders)
        of_dense = {each: self._dense.model.get_submodule(each) for each in parts}
        kept, self._final_parts = self._data.kept, frozenset()
        self._pruned = replace(self._pruned, parts=Blocks(parts, kept, "part"))
        self._dense = replace(self._dense, parts=Blocks(of_dense, kept, "dense part"))

    def _steps(
        self, unit: _Unit, weights: Mapping[str, CalibratedWeight]
    ) -> dict[str, SolvedLayer]:
        """The unit's weights by the input that they meet, in the order of their use."""
        dense = DenseInputs(self._data.kept)
        trace = self._dense_forwards(unit, [w.target for w in weights.values()], dense)
        solved: dict[str, SolvedLayer] = {}
        for names in trace.steps(None if unit.block is None else _MOST_STEPS):
            step = [weights[name].target for name in names]
            self._final_parts = trace.final_parts(names)
            statistics = self._statistics(unit, trace, step, dense)
            found = self._solved({name: weights[name] for name in statistics}, statistics)
            for name, each in found.items():
                put(weights[name], each)
            solved |= found
        dense.drop()
        return solved

    def _dense_forwards(self, unit: _Unit, targets: Sequence[Target], dense: DenseInputs) -> Trace:
        """What the unit's weights meet in the dense model, and how they follow each other."""
        trace, parts = Trace(), self._dense.parts
        parts.ended = lambda ran: trace.ended(ran[0])

        def meet(product: Product) -> None:
            dense.record(product)
            trace.meet(product)

        with self._weights.dense():
            watched = [self._weights.dense_target(target) for target in targets]
            for number in range(len(self._data)):
                dense.begin(number)
                trace.begin()
                self._until_end(unit, self._dense, number, (watched, meet), final=True)
        parts.ended = nothing
        return trace

    def _statistics(
        self, unit: _Unit, trace: Trace, targets: Sequence[Target], dense: DenseInputs
    ) -> dict[str, tuple[Layout, Statistics]]:
        """What some of the unit's weights meet in the model as it is now."""
        gathering = Gathering(targets, self._data.samples, dense)
        names = [target.name for target in targets]
        for number in range(len(self._data)):
            gathering.begin(self._data.about(number), number, self._data.first_sample(number))
            left = trace.uses(names, number)

            def meet(product: Product) -> None:
                nonlocal left
                gathering.meet(product, positions_first=self._order.positions_first)
                left = None if left is None else left - 1
                if left == 0:
                    raise Enough

            try:
                self._until_end(unit, self._pruned, number, (targets, meet))
            finally:
                gathering.end()
        return gathering.statistics()

    def _until_end(
        self,
        unit: _Unit,
        world: _World,
        number: int,
        watched: tuple[Sequence[Target], Callable[[Product], None]],
        *,
        final: bool = False,
    ) -> None:
        """A forward until the unit's block has run; `final`: what that gives is kept for the next.

        Blocks before it give what they gave before.
        """
        done = {path for path, end in self._ends.items() if end < unit.at}

        def ended(ran: Ran) -> None:
            if ran[0] == unit.block and unit.block in self._once:
                raise Enough

        world.blocks.ended = ended
        if final and unit.block is not None and unit is not self._last:
            done.add(unit.block)
        try:
            self._forward(world, number, done, watched)
        except Enough:
            pass
        finally:
            world.blocks.ended = nothing

    def _forward(
        self,
        world: _World,
        number: int,
        final: Collection[str],
        watched: tuple[Sequence[Target], Callable[[Product], None]],
    ) -> Tree:
        call = self._data[number]
        self._order.begin(call.samples)
        world.blocks.begin(number, final)
        world.parts.begin(number, self._final_parts)
        with world.blocks.installed(), world.parts.installed(), Products(*watched):
            return forward(world.model, call, number)

    def _solved(
        self,
        weights: Mapping[str, CalibratedWeight],
        statistics: Mapping[str, tuple[Layout, Statistics]],
    ) -> dict[str, SolvedLayer]:
        """New weights of one step."""
        work = self._work
        problems = [
            LayerProblem(
                stored=numbers_of(weights[name].target.tensor),
                layout=layout,
                pattern=work.pattern,
                statistics=found,
                has_bias=bool(weights[name].biases),
                reference=None
                if work.reference is None
                else numbers_of(self._weights.dense_target(weights[name].target).tensor),
                rounded=rounding_of(weights[name].target.tensor.dtype),
            )
            for name, (layout, found) in statistics.items()
        ]
        try:
            solved = solve_layers(problems, method_named(work.name), work.options)
        except (BadInputError, PatternBrokenError) as error:
            names = ", ".join(statistics)
            raise type(error)(f"{names}: {error.message}", hint=error.hint) from error
        return dict(zip(statistics, solved, strict=True))

    def _tell(self, units: Sequence[_Unit], number: int, seconds: float) -> None:
        """Which layers are worked on, and how long the rest will take at the pace until now."""
        sizes = [sum(self._weights.sizes[name] for name in unit.names) for unit in units]
        before, left = sum(sizes[:number]), sum(sizes[number:])
        name = units[number].block or units[number].names[0].rpartition(".")[0]
        pace = f", about {in_seconds(seconds * left / before)} left" if before else ""
        self._say(f"{name} ({number + 1} of {len(units)}{pace})", number, len(units))

    def _say(self, text: str, done: int, total: int | None) -> None:
        if self._work.progress is not None:
            self._work.progress(text, done, total)
