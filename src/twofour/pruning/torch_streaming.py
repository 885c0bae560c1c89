"""Pruning a checkpoint that is larger than memory, in its own files, block by block.

Without data memory holds one tensor at a time. With data it holds one block of the model, its Gram
matrices, and what the calibration data became in front of it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from twofour.errors import BadInputError
from twofour.pruning.methods import DEFAULT_WITH_DATA, InPlace, left_to, without_data
from twofour.pruning.methods.magnitude import Outcome
from twofour.pruning.selection import Choice, axis_conflict, choose
from twofour.pruning.solve import Solved
from twofour.pruning.torch_calibration import (
    CalibratedWeight,
    Progress,
    Work,
    calibrate,
    calls_kept,
)
from twofour.pruning.torch_calls import Call, KeptCalls, forward, undisturbed
from twofour.pruning.torch_checkpoint import StreamedModule
from twofour.pruning.torch_finished import FinishedUnits
from twofour.pruning.torch_layers import find_not_covered, find_weights
from twofour.pruning.torch_module import (
    NOT_REACHED,
    Done,
    done_without_data,
    not_finite,
    prune_tensor,
    row_of,
)
from twofour.pruning.torch_pruning import CalibrationCalls, calibrated_weight, done_of
from twofour.pruning.torch_spill import Tree, give_back_large_arrays, give_back_memory, spill
from twofour.records.options import Selection
from twofour.records.pruning import PrunedWeight, PruneResult
from twofour.records.weights import NotCovered, Pattern, Weight

MEMORY_BYTES = 256 << 20
"""Of activations that are kept in memory; the rest lies in files."""


@torch.no_grad()
def prune_streamed(
    streamed: StreamedModule, pattern: Pattern, selection: Selection, *, method: str, step: Progress
) -> PruneResult:
    """N:M in the files behind the module, without data.

    Raises BadInputError for NaN or infinity in a weight, a method that needs data, and as `choose`
    does; the files are half pruned then.
    """
    prune = without_data(method)
    plan = _plan(streamed, pattern, selection)
    done: dict[str, Done] = {}
    for number, (key, weight) in enumerate(plan.wanted.items(), 1):
        outcome = _prune_stored(streamed, replace(weight, weight=key), pattern, prune)
        done[key] = done_without_data(outcome, method, None)
        step(weight.layer, number, len(plan.wanted))
    return plan.result(done, method)


@torch.no_grad()
def prune_streamed_calibrated(
    streamed: StreamedModule,
    data: CalibrationCalls,
    work: Work,
    selection: Selection,
    finished: FinishedUnits,
) -> PruneResult:
    """The same by a method that has data: later blocks see what earlier ones became.

    What no input reached is pruned without data. Blocks that are `finished` only run. Raises
    BadInputError also for data that the model cannot run on, and for a model whose blocks are no
    chain.
    """
    name = work.options.name or DEFAULT_WITH_DATA
    plan = _plan(streamed, work.pattern, selection)
    give_back_large_arrays()
    with (
        undisturbed(streamed.module),
        spill(memory_bytes=MEMORY_BYTES, within=work.spill_folder) as kept,
    ):
        calls = KeptCalls(data.calls, torch.device("cpu"), kept)
        run = _Run(streamed, list(plan.wanted.values()), calls, finished)
        done = run.all(replace(work, memory_bytes=MEMORY_BYTES), name)
    for key, weight in plan.wanted.items():
        if key not in done:
            stored = replace(weight, weight=key)
            done |= _not_reached(streamed, stored, work.pattern, left_to(name), finished)
    return replace(plan.result(done, name), calibration=data.about)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is to be pruned of a module in files."""

    streamed: StreamedModule
    pattern: Pattern
    selection: Selection
    choices: Sequence[Choice]
    wanted: Mapping[str, Weight]
    """By key in the files, each stored tensor once."""
    not_covered: tuple[NotCovered, ...]

    def result(self, done: Mapping[str, Done], method: str) -> PruneResult:
        """The record; weights are named by the keys in the files, which are validated."""
        return PruneResult(
            source="",
            pattern=self.pattern,
            method=method,
            selection=self.selection,
            weights=tuple(_row(self.streamed, choice, done) for choice in self.choices),
            not_covered=self.not_covered,
        )


def _plan(streamed: StreamedModule, pattern: Pattern, selection: Selection) -> _Plan:
    weights = find_weights(streamed.module)
    choices = choose(weights, pattern, selection)
    return _Plan(
        streamed=streamed,
        pattern=pattern,
        selection=selection,
        choices=choices,
        wanted=_by_key(streamed, choices),
        not_covered=find_not_covered(streamed.module, weights),
    )


def _not_reached(
    streamed: StreamedModule, stored: Weight, pattern: Pattern, method: str, finished: FinishedUnits
) -> Mapping[str, Done]:
    """One tensor of the files that no input reached, pruned without data."""
    assert stored.weight is not None
    found = finished.load(stored.weight)
    if found is not None:
        return found
    finished.begin([stored.weight])
    outcome = _prune_stored(streamed, stored, pattern, without_data(method))
    streamed.files.sync([stored.weight])
    done = {stored.weight: done_without_data(outcome, method, NOT_REACHED)}
    finished.save(stored.weight, done)
    return done


def _by_key(streamed: StreamedModule, choices: Sequence[Choice]) -> dict[str, Weight]:
    """What is to be pruned, each stored tensor once; raises BadInputError for two axes of one."""
    found: dict[str, Weight] = {}
    for weight, pruned, _ in choices:
        if pruned and weight.weight is not None:
            first = found.setdefault(streamed.key_of(weight.weight), weight)
            if first.axis != weight.axis:
                raise axis_conflict(first, weight)
    return found


def _prune_stored(
    streamed: StreamedModule, stored: Weight, pattern: Pattern, prune: InPlace
) -> Outcome:
    """One tensor of the files, under its key there, without data."""
    assert stored.weight is not None
    tensor = streamed.files.read(stored.weight)
    outcome = prune_tensor(stored, tensor, pattern, prune)
    if outcome.non_finite:
        raise not_finite(stored, outcome.non_finite)
    streamed.files.write(stored.weight, tensor)
    return outcome


def _row(streamed: StreamedModule, choice: Choice, done: Mapping[str, Done]) -> PrunedWeight:
    weight, pruned, reasons = choice
    key = None if weight.weight is None else streamed.key_of(weight.weight)
    return row_of(
        (replace(weight, weight=key), pruned, reasons),
        None if key is None else done.get(key),
        lambda: None if key is None else streamed.files.read(key),
    )


@dataclass(frozen=True, slots=True)
class _Unit:
    """A block of a chain, or a layer that lies in none."""

    path: str
    module: nn.Module
    chain: str | None
    """Path of the ModuleList that it is a member of."""


class _ReachedError(Exception):
    """Ends a forward at the unit whose inputs were wanted.

    An Exception: torch calls no hooks, which let parameters go, behind what is none.
    """


class _Run:
    """A model on its calibration data, one unit at a time."""

    def __init__(
        self,
        streamed: StreamedModule,
        wanted: Sequence[Weight],
        calls: KeptCalls,
        finished: FinishedUnits,
    ) -> None:
        self._streamed, self._module, self._finished = streamed, streamed.module, finished
        self._wanted = wanted
        self._calls, self._kept = calls, calls.kept
        self._latest: dict[str, str] = {}
        """Chain -> its last unit that is done, whose outputs are kept."""
        self._number, self._reached = 0, False
        self._tables: list[nn.Module] = []
        """What every call of a capture looks up in."""

    def all(self, work: Work, method: str) -> dict[str, Done]:
        """Every unit in the order in which the model runs them; what was done, by key."""
        units = self._in_order(_units(self._module, self._wanted))
        self._tables = list(_outside(self._module, units))
        done: dict[str, Done] = {}
        for number, unit in enumerate(units):
            if work.progress is not None:
                work.progress(unit.path, number, len(units))
            found = self._finished.load(unit.path)
            if found is None:
                done |= self._unit(unit, replace(work, progress=None), method)
            else:
                self._pass_through(unit)
                done |= found
            gc.collect()  # what only holds itself
            give_back_memory()
        return done

    def _pass_through(self, unit: _Unit) -> None:
        """Keep what a finished unit gives."""
        if unit.chain is not None:
            with self._streamed.held(unit.module):
                self._capture(unit)
                self._keep_outputs(unit)
            self._kept.drop(("in", unit.path))

    def _unit(self, unit: _Unit, work: Work, method: str) -> dict[str, Done]:
        """Prune a unit, write it back, and keep what it gives now."""
        with self._streamed.held(unit.module):
            self._capture(unit)
            weights = [
                calibrated_weight(self._module, weight, self._tensor(weight), work.pattern)
                for weight in self._within(unit)
            ]
            solved = self._solved(unit, weights, work) if weights else {}
            done = {}
            for weight in weights:
                found = solved.get(weight.target.name)
                if found is not None:
                    key = self._streamed.key_of(weight.target.name)
                    done[key] = done_of(found, weight.target.tensor, method)
            changed = [t for w in weights for t in (w.target.tensor, *w.biases)]
            self._save(unit, {_storage(tensor) for tensor in changed})
            self._finished.save(unit.path, done)
            if unit.chain is not None:
                self._keep_outputs(unit)
        self._kept.drop(("in", unit.path))
        return done

    def _solved(
        self, unit: _Unit, weights: Sequence[CalibratedWeight], work: Work
    ) -> dict[str, Solved]:
        with calls_kept(unit.module, self._inputs(unit), work) as calls:
            return calibrate(unit.module, weights, calls, work)

    def _save(self, unit: _Unit, changed: set[int]) -> None:
        named = unit.module.named_parameters(prefix=unit.path)
        names = [name for name, parameter in named if _storage(parameter) in changed]
        keys = [self._streamed.key_of(name) for name in names]
        self._finished.begin(keys)
        for name in names:
            self._streamed.save(name)
        self._streamed.files.sync(keys)  # before the unit counts as finished

    def _tensor(self, weight: Weight) -> Tensor:
        assert weight.weight is not None
        return self._module.get_parameter(weight.weight)

    def _within(self, unit: _Unit) -> list[Weight]:
        start = f"{unit.path}."
        return [w for w in self._wanted if w.layer == unit.path or w.layer.startswith(start)]

    def _capture(self, unit: _Unit) -> None:
        """The unit's arguments in every call; what is done gives what it gave before."""

        def reached(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._kept.put(("in", unit.path), self._number, (args, kwargs)):
                raise _no_chain(unit.path, "takes what is no plain tensor")
            self._reached = True
            raise _ReachedError

        hook = unit.module.register_forward_pre_hook(reached, with_kwargs=True)
        try:
            with self._standing_in(), contextlib.ExitStack() as held:
                for table in self._tables:
                    held.enter_context(self._streamed.held(table))
                for number in range(len(self._calls)):
                    self._number, self._reached = number, False
                    try:
                        forward(self._module, self._calls[number], number)
                    except BadInputError:
                        if not self._reached:
                            raise
        finally:
            hook.remove()

    def _inputs(self, unit: _Unit) -> Iterator[Call]:
        group = ("in", unit.path)
        for number in range(len(self._calls)):
            if self._kept.has(group, number):
                args, kwargs = self._kept.get(group, number)
                yield replace(self._calls.about(number), args=args, kwargs=kwargs)

    def _keep_outputs(self, unit: _Unit) -> None:
        """What the unit gives from now on, in place of the unit before it in the chain."""
        assert unit.chain is not None
        for number, call in enumerate(self._inputs(unit)):
            output = forward(unit.module, call, number)
            if not self._kept.put(("out", unit.path), number, output):
                raise _no_chain(unit.path, "gives what is no plain tensor")
        before = self._latest.get(unit.chain)
        if before is not None:
            self._kept.drop(("out", before))
        self._latest[unit.chain] = unit.path

    @contextlib.contextmanager
    def _standing_in(self) -> Iterator[None]:
        """Blocks that are done give what the last of their chain gave."""
        done = []
        for chain, latest in self._latest.items():
            for name, block in self._module.get_submodule(chain).named_children():
                block.forward = self._stand_in(latest)
                done.append(block)
                if f"{chain}.{name}" == latest:
                    break
        try:
            yield
        finally:
            for block in done:
                del block.forward

    def _stand_in(self, latest: str) -> Callable[..., Any]:
        def stand_in(*_args: Tree, **_kwargs: Tree) -> Tree:
            return self._kept.get(("out", latest), self._number)

        return stand_in

    def _in_order(self, units: Sequence[_Unit]) -> list[_Unit]:
        """Those that the first call runs, as it runs them.

        Raises BadInputError where blocks of a chain do not hand on what the one before gave.
        """
        seen: list[_Unit] = []
        given: dict[str, set[int]] = {}
        hooks = []

        def before(unit: _Unit) -> Callable[..., None]:
            def look(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if unit in seen:
                    raise _no_chain(unit.path, "runs more than once in a forward")
                seen.append(unit)
                last = given.get(unit.chain or "")
                if last is not None and not last & _places((args, kwargs)):
                    raise _no_chain(unit.path, "does not take what the block before it gave")

            return look

        def after(unit: _Unit) -> Callable[..., None]:
            def look(_module: nn.Module, _args: Tree, output: Tree) -> None:
                if unit.chain is not None:
                    given[unit.chain] = _places(output)

            return look

        for unit in units:
            hooks.append(unit.module.register_forward_pre_hook(before(unit), with_kwargs=True))
            hooks.append(unit.module.register_forward_hook(after(unit)))
        try:
            forward(self._module, self._calls[0], 0)
        finally:
            for hook in hooks:
                hook.remove()
        return seen


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _places(tree: Tree) -> set[int]:
    """Where the tensors lie."""
    return {leaf.data_ptr() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}


def _no_chain(path: str, what: str) -> BadInputError:
    return BadInputError(
        f"{path} {what}: the blocks of this model cannot be pruned one after the other",
        hint="prune it in memory, with --no-stream",
    )


def _units(module: nn.Module, wanted: Sequence[Weight]) -> list[_Unit]:
    """Blocks of the outermost chains of one class, and the layers with weights outside of them."""
    units: dict[str, _Unit] = {}
    for path, part in module.named_modules():
        if any(path.startswith(f"{unit}.") for unit in units):
            continue
        if isinstance(part, nn.ModuleList) and len(part) > 1 and _alike(part):
            for name, block in part.named_children():
                units[f"{path}.{name}"] = _Unit(f"{path}.{name}", block, path)
    found = list(units.values())
    for weight in wanted:
        inside = any(weight.layer.startswith(f"{path}.") for path in units)
        if not inside and not any(unit.path == weight.layer for unit in found):
            found.append(_Unit(weight.layer, module.get_submodule(weight.layer), None))
    return found


def _alike(blocks: nn.ModuleList) -> bool:
    return len({type(block) for block in blocks}) == 1


def _outside(module: nn.Module, units: Sequence[_Unit]) -> Iterator[nn.Module]:
    """What every capture runs again, so that it stays: tables of embeddings."""
    inside = {part for unit in units for part in unit.module.modules()}
    for part in module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part not in inside:
            yield part
