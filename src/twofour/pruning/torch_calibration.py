"""Pruning a torch module with calibration data, step by step in the order of its own forward.

A step is a group of weights that meet the same input (query, key and value); later steps see what
earlier ones made of the model. Gram matrices of one step at a time are held.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from twofour.errors import BadInputError, PatternBrokenError
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout
from twofour.pruning.methods import Method
from twofour.pruning.methods.problem import Array
from twofour.pruning.solve import Solved, solve_layers
from twofour.pruning.statistics import Statistics
from twofour.pruning.threads import one_blas_thread
from twofour.pruning.torch_blocks import Blocks, find_blocks, inner_parts, parts_of, same_bits
from twofour.pruning.torch_calls import Call, KeptCalls, device_of, forward, undisturbed
from twofour.pruning.torch_products import Product, Products, Target
from twofour.pruning.torch_spill import MEMORY_BYTES, Tree, give_back_memory, spill
from twofour.pruning.torch_statistics import Gathering
from twofour.pruning.torch_trace import Enough, RowOrder, Step, Trace
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern
from twofour.words import in_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedWeight:
    """A stored weight that is to be pruned, and the biases that make up for it."""

    target: Target
    holders: tuple[nn.Module, ...]
    """Modules that have it."""
    biases: tuple[Tensor, ...]
    """What its users add to its outputs, each as long as these; (): not all of them have one."""


class Progress(Protocol):
    """Is told how far the work is."""

    def __call__(self, text: str, done: int, total: int | None) -> None:
        """`text` says what is being done, and how long the rest will take."""


class Finished(Protocol):
    """Keeps what is done, for a run that is killed."""

    def load(self, names: Sequence[str]) -> Mapping[str, Solved] | None:
        """What was solved of these weights together; None: not done yet."""

    def save(self, names: Sequence[str], solved: Mapping[str, Solved]) -> None:
        """These weights are done; those that met no input are not among the solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How weights are to be pruned, and who is told."""

    pattern: Pattern
    method: Method
    options: MethodOptions
    progress: Progress | None = None
    finished: Finished | None = None
    before_repair: Callable[[], None] | None = None
    """Called when everything is pruned, where a repair is going to be tried."""
    reference: nn.Module | None = None
    """The dense model, to whose layers of the same names a mask that is kept is refitted."""
    memory_bytes: int = MEMORY_BYTES
    """Of what the data became that is kept in memory; the rest lies in files."""
    spill_folder: Path | None = None
    """Where these files go; None: where temporary files do."""


@contextlib.contextmanager
def calls_kept(model: nn.Module, calls: Iterable[Call], work: Work) -> Iterator[KeptCalls]:
    """The calls, read once; raises BadInputError where there are no samples."""
    with spill(memory_bytes=work.memory_bytes, within=work.spill_folder) as kept:
        yield KeptCalls(calls, device_of(model), kept)


def calibrate(
    model: nn.Module, weights: Sequence[CalibratedWeight], calls: KeptCalls, work: Work
) -> dict[str, Solved]:
    """Prune the weights in place, and say what was done to each, by name.

    A weight that no calibration input reached is missing, and as it was. The same bits for any
    number of threads. Raises BadInputError for a forward that fails, and NaN and infinity on the
    way; some weights are pruned then.
    """
    with undisturbed(model), one_blas_thread():
        return _Run(model, weights, calls, work).all()


class _Run:
    """One model on its calibration data."""

    def __init__(
        self, model: nn.Module, weights: Sequence[CalibratedWeight], data: KeptCalls, work: Work
    ) -> None:
        self._model, self._data, self._work = model, data, work
        self._weights = {weight.target.name: weight for weight in weights}
        self._holders = {module for weight in weights for module in weight.holders}
        self._order = RowOrder()
        self._blocks = Blocks({}, data.kept)
        self._lasting: Mapping[str, str | None] = {}

    def all(self) -> dict[str, Solved]:
        """Every step in turn."""
        solved: dict[str, Solved] = {}
        with self._order.watched(self._holders):
            trace = self._traced()
            self._blocks.let_go = trace.let_go(self._lasting)
            steps, started = trace.steps, time.perf_counter()
            with self._blocks.installed():
                for number, step in enumerate(steps):
                    self._tell(steps, number, time.perf_counter() - started)
                    solved |= self._step(trace, step, steps[number - 1] if number else None)
        self._blocks.drop_all()
        return solved

    def _traced(self) -> Trace:
        """One forward of each call; blocks that turn out not to be any fall into their parts."""
        blocks = find_blocks(self._model, self._holders)
        while True:
            trace, uncalled = self._watched(blocks)
            if not uncalled:
                return trace
            for path in uncalled:
                blocks |= parts_of(path, blocks.pop(path), self._holders)

    def _watched(self, blocks: dict[str, nn.Module]) -> tuple[Trace, list[str]]:
        """Given up after the first call where blocks are not called as a whole: these."""
        parts = inner_parts(blocks, self._holders)
        self._blocks = Blocks(blocks, self._data.kept, parts)
        trace = Trace([weight.target for weight in self._weights.values()], self._blocks)
        self._blocks.ended, self._blocks.part_ended = trace.ended, trace.part_ended
        with self._blocks.installed():
            for number in range(len(self._data)):
                self._say("how the layers follow each other", number, len(self._data))
                trace.begin()
                tried = () if number else blocks.keys() | parts.keys()
                output = self._forward(number, trace.targets, trace.meet, tried)
                trace.end()
                if number == 0 and trace.uncalled(blocks):
                    break
                if number == 0:
                    self._blocks.ended = self._blocks.part_ended = _nothing
                    self._check_parts(parts, output)
                    self._check_replay(trace.order, output)
                    self._blocks.ended, self._blocks.part_ended = trace.ended, trace.part_ended
        self._blocks.part_ended = _nothing
        self._blocks.drop_all()
        return trace, trace.uncalled(blocks)

    def _check_replay(self, order: Sequence[str], output: object) -> None:
        """The first call once more, with what its blocks gave: another result forbids it.

        Where the blocks of all calls would not fit into memory, how long each is needed.
        """

        def again() -> Tree:
            return self._forward(0, (), _nothing, order)

        if not self._same(output, again):
            self._blocks.impure.update(order)
        elif self._data.kept.size_bytes() * len(self._data) > self._work.memory_bytes:
            self._lasting = self._blocks.lasting(again, order)

    def _check_parts(self, parts: Collection[str], output: object) -> None:
        """The same with what parts of the blocks gave."""

        def again() -> Tree:
            return self._forward(0, (), _nothing, parts)

        if parts and not self._same(output, again):
            self._blocks.impure.update(parts)

    @staticmethod
    def _same(output: object, again: Callable[[], Tree]) -> bool:
        try:
            return same_bits(output, again())
        except BadInputError:  # gradients are asked for, among others: what is kept has none
            return False

    def _forward(
        self,
        number: int,
        targets: Sequence[Target],
        meet: Callable[[Product], None],
        final: Iterable[str],
    ) -> Tree:
        call = self._data[number]
        self._order.begin(call.samples)
        self._blocks.begin(number, frozenset(final))
        with Products(targets, meet):
            return forward(self._model, call, number)

    def _step(self, trace: Trace, step: Step, before: Step | None) -> dict[str, Solved]:
        """Statistics, new weights and biases."""
        names = [target.name for target in step.targets]
        finished = self._work.finished
        solved = None if finished is None else finished.load(names)
        if solved is None:
            solved = self._solved(self._statistics(trace, step, before))
            if finished is not None:
                finished.save(names, solved)
        for name, found in solved.items():
            _put(self._weights[name], found)
        give_back_memory()
        return dict(solved)

    def _statistics(
        self, trace: Trace, step: Step, before: Step | None
    ) -> dict[str, tuple[Layout, Statistics]]:
        """What the step's weights met in one pass over the data."""
        gathering = Gathering(step.targets, self._data.samples)
        final = trace.final(step) | trace.final_parts(step, before)
        for number in range(len(self._data)):
            gathering.begin(self._data.about(number), number, self._data.first_sample(number))
            broken_off = _Ending(trace, step, number)
            self._blocks.ended = broken_off.ended

            def meet(product: Product, broken_off: _Ending = broken_off) -> None:
                gathering.meet(product, positions_first=self._order.positions_first)
                broken_off.met()

            try:
                self._forward(number, step.targets, meet, final)
            except Enough:
                pass
            except BadInputError:  # TorchScript makes an error of its own of what passes through it
                if not broken_off.enough:
                    raise
            finally:
                gathering.end()
        return gathering.statistics()

    def _solved(self, statistics: Mapping[str, tuple[Layout, Statistics]]) -> dict[str, Solved]:
        """New weights of one step."""
        work = self._work
        problems = [
            LayerProblem(
                stored=_numbers(self._weights[name].target.tensor),
                layout=layout,
                pattern=work.pattern,
                statistics=found,
                has_bias=bool(self._weights[name].biases),
                reference=self._reference(name),
                rounded=_rounding(self._weights[name].target.tensor.dtype),
            )
            for name, (layout, found) in statistics.items()
        ]
        try:
            solved = solve_layers(problems, work.method, work.options)
        except (BadInputError, PatternBrokenError) as error:
            names = ", ".join(statistics)
            raise type(error)(f"{names}: {error.message}", hint=error.hint) from error
        return dict(zip(statistics, solved, strict=True))

    def _reference(self, name: str) -> Array | None:
        if self._work.reference is None:
            return None
        return _numbers(fellow(self._work.reference, name, self._weights[name].target.tensor))

    def _tell(self, steps: Sequence[Step], number: int, seconds: float) -> None:
        """Which layers are worked on, and how long the rest will take at the pace until now."""
        weights = [sum(target.tensor.numel() for target in step.targets) for step in steps]
        before, left = sum(weights[:number]), sum(weights[number:])
        name = steps[number].targets[0].name.rpartition(".")[0]
        pace = f", about {in_seconds(seconds * left / before)} left" if before else ""
        self._say(f"{name} ({number + 1} of {len(steps)}{pace})", number, len(steps))

    def _say(self, text: str, done: int, total: int | None) -> None:
        if self._work.progress is not None:
            self._work.progress(text, done, total)


class _Ending:
    """Tells when a forward has done all that a step needs."""

    def __init__(self, trace: Trace, step: Step, number: int) -> None:
        self._left = trace.uses(step, number)
        self._block = trace.last_block(step) if self._left is None else None
        self.enough = False

    def met(self) -> None:
        """One product more; raises Enough behind the last."""
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self._stop()

    def ended(self, path: str) -> None:
        """A block has run; raises Enough behind the one that matters."""
        if path == self._block:
            self._stop()

    def _stop(self) -> None:
        self.enough = True
        raise Enough


def fellow(reference: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The tensor of the same state_dict key; raises BadInputError where none fits."""
    found: Tensor | None = reference.state_dict().get(name)
    if found is None or found.shape != tensor.shape:
        shape = "there is none" if found is None else f"it is {list(found.shape)}"
        raise BadInputError(
            f"{name} is {list(tensor.shape)} in the model; in the dense reference {shape}",
            hint="name the dense model that this one was made from",
        )
    return found.detach().to(tensor.device)


def _put(weight: CalibratedWeight, solved: Solved) -> None:
    """In the model's own memory."""
    tensor = weight.target.tensor
    tensor.copy_(_tensor(solved.weight))
    if solved.bias_change is not None:
        for bias in weight.biases:
            bias.copy_(bias.double() + _tensor(solved.bias_change).to(bias.device))


def _numbers(tensor: Tensor) -> Array:
    """In float32 or float64, in memory of their own; of numpy on the CPU."""
    wide = tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()
    own = wide.clone() if wide.data_ptr() == tensor.data_ptr() else wide
    return own.numpy() if tensor.device.type == "cpu" else own


def _tensor(values: Array) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.ascontiguousarray(values))


def _rounding(dtype: torch.dtype) -> Callable[[Array], Array] | None:
    """To the values that the type has; None: all of them."""
    if dtype in (torch.float32, torch.float64):
        return None

    def rounded(values: Array) -> Array:
        narrow = _tensor(values).to(dtype).to(_tensor(values).dtype)
        return narrow if isinstance(values, Tensor) else narrow.numpy()

    return rounded


def _nothing(_: object) -> None:
    return None
