"""The order in which a module's forward uses weights, and when it has used them all."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from twofour.pruning.torch_blocks import Blocks
from twofour.pruning.torch_products import Product, Target
from twofour.pruning.torch_statistics import version_of

_MOST_STEPS = 16
"""In one block; neighbours are taken together where there are more (experts, dense blocks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Weights whose statistics come from one pass over the data."""

    targets: tuple[Target, ...]
    at: float
    """When the first of them is used in a forward."""
    blocks: frozenset[str | None]
    """Those that use them; None: what lies between blocks."""


class Enough(BaseException):
    """Breaks a forward off: what comes is not needed. No Exception, which models may catch."""


class Trace:
    """Watches one forward of each call with every weight as it came."""

    def __init__(self, targets: Sequence[Target], blocks: Blocks) -> None:
        self._targets = {target.name: target for target in targets}
        self._blocks = blocks
        self._clock = 0
        self._counts: list[Counter[str]] = []
        self._ran: list[Counter[str]] = []
        self._first: dict[str, int] = {}
        self._inputs: dict[str, int] = {}
        self._used_in: dict[str, set[str | None]] = {}
        self._ends: dict[str, int] = {}
        self._part_ends: dict[str, int] = {}
        self._parts_ran: list[Counter[str]] = []
        self._last: tuple[Tensor, int] | None = None
        self._met = 0
        self._events: list[list[str]] = []

    @property
    def targets(self) -> list[Target]:
        """All that are watched."""
        return list(self._targets.values())

    def begin(self) -> None:
        """The next call's forward begins."""
        self._counts.append(Counter())
        self._ran.append(Counter())
        self._parts_ran.append(Counter())
        self._events.append([])

    def meet(self, product: Product) -> None:
        """A weight is used."""
        name = product.target.name
        self._clock += 1
        self._counts[-1][name] += 1
        self._events[-1].append(name)
        if not self._same_as_last(product.x):
            self._met += 1
        self._first.setdefault(name, self._clock)
        self._inputs.setdefault(name, self._met)
        self._used_in.setdefault(name, set()).add(self._blocks.inside)

    def ended(self, path: str) -> None:
        """A block has run."""
        self._clock += 1
        self._ran[-1][path] += 1
        self._events[-1].append(path)
        if len(self._counts) == 1:
            self._ends[path] = self._clock

    def part_ended(self, path: str) -> None:
        """A part of a block has run."""
        self._clock += 1
        self._parts_ran[-1][path] += 1
        if len(self._counts) == 1:
            self._part_ends[path] = self._clock

    def end(self) -> None:
        """The forward is over."""
        self._last = None

    def uncalled(self, paths: Iterable[str]) -> list[str]:
        """Blocks that do not run as a whole."""
        return [path for path in paths if path not in self._ends]

    @property
    def order(self) -> list[str]:
        """The blocks of the first call, as they end."""
        return sorted(self._ends, key=lambda path: self._ends[path])

    def let_go(self, lasting: Mapping[str, str | None]) -> dict[str, list[str]]:
        """Behind which blocks the outputs of others may go; none, unless all calls run alike."""
        found: dict[str, list[str]] = {}
        if any(events != self._events[0] for events in self._events):
            return found
        for path, last in lasting.items():
            if last not in (None, path) and self._ran[0][path] == 1 == self._ran[0][last]:
                found.setdefault(last, []).append(path)
        return found

    @property
    def steps(self) -> list[Step]:
        """Weights by the input that they met first, in the order of the forward."""
        ordered = sorted(self._first, key=lambda name: (self._at(name), self._first[name]))
        found = [
            self._step(list(names)) for _, names in groupby(ordered, lambda n: self._inputs[n])
        ]
        steps = []
        for blocks, group in groupby(found, lambda step: step.blocks):
            members = list(group)
            most = len(members) if None in blocks else _MOST_STEPS
            size = -(-len(members) // most)
            pieces = [members[i : i + size] for i in range(0, len(members), size)]
            steps += [self._step([t.name for s in piece for t in s.targets]) for piece in pieces]
        return steps

    def final(self, step: Step) -> frozenset[str]:
        """Blocks whose outputs do not change any more once all steps before this one are done."""
        return frozenset(path for path, end in self._ends.items() if end < step.at)

    def final_parts(self, step: Step, before: Step | None) -> frozenset[str]:
        """The same of parts, of blocks that were not final in the step `before` this one.

        Only those that run once in every call; none where calls use different weights, as what the
        first does not use is pruned out of order.
        """
        if any(counts.keys() != self._counts[0].keys() for counts in self._counts):
            return frozenset()
        done = frozenset() if before is None else self.final(before)
        return frozenset(
            path
            for path, end in self._part_ends.items()
            if end < step.at
            and all(ran[path] == 1 for ran in self._parts_ran)
            and not any(path.startswith(f"{block}.") for block in done)
        )

    def uses(self, step: Step, number: int) -> int | None:
        """After how many products with its weights a forward of this call is done with the step.

        None: that hangs on the data, or on what earlier steps changed.
        """
        names = [target.name for target in step.targets]
        if any(len({counts[name] for counts in self._counts}) > 1 for name in names):
            return None
        return sum(self._counts[number][name] for name in names)

    def last_block(self, step: Step) -> str | None:
        """The block behind whose one run a forward is done with the step; None: there is none."""
        (block, *others) = step.blocks
        if others or block is None:
            return None
        return block if all(ran[block] == 1 for ran in self._ran) else None

    def _step(self, names: Sequence[str]) -> Step:
        blocks = {block for name in names for block in self._used_in[name]}
        return Step(
            targets=tuple(self._targets[name] for name in names),
            at=min(self._at(name) for name in names),
            blocks=frozenset(blocks),
        )

    def _at(self, name: str) -> float:
        """When it is used; what the first call does not use comes at the end of its block."""
        if self._counts[0][name]:
            return self._first[name]
        (block, *others) = self._used_in[name]
        if others or block is None or block not in self._ends:
            return math.inf
        return self._ends[block] - 0.5

    def _same_as_last(self, x: Tensor) -> bool:
        last, self._last = self._last, (x, version_of(x))
        return last is not None and (
            last[0].data_ptr() == x.data_ptr()
            and (last[0].shape, last[0].stride(), last[1]) == (x.shape, x.stride(), version_of(x))
        )


@dataclass(slots=True)
class RowOrder:
    """Whether the rows of matrix products lie position by position, not sample by sample."""

    samples: int = 1
    positions_first: bool = False
    _hooks: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def watched(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within it, the modules' inputs tell."""
        try:
            for module in modules:
                look = self._look_attention if _is_attention(module) else self._look
                self._hooks.append(module.register_forward_pre_hook(look, with_kwargs=True))
            yield
        finally:
            while self._hooks:
                self._hooks.pop().remove()

    def begin(self, samples: int) -> None:
        """A forward begins."""
        self.samples, self.positions_first = samples, False

    def _look(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        self.positions_first = (
            x is not None
            and x.dim() > 2
            and x.shape[0] != self.samples
            and x.shape[1] == self.samples
        )

    def _look_attention(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """MultiheadAttention puts positions first inside, whatever it is given."""
        query = args[0] if args else kwargs.get("query")
        self.positions_first = isinstance(query, Tensor) and query.dim() == 3


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention)
