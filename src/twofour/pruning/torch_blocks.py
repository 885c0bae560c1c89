"""Parts of a module whose work is done once: what a finished one gave is given again.

A forward then runs the model's own code (branches, loops, whatever lies between the blocks) and
only what is not finished is worked out again. The same goes for the parts of a block that is in
work, as far as memory has room for what they gave.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from twofour.pruning.torch_spill import Spill, Tree, blanked
from twofour.pruning.torch_statistics import version_of

_MOST_WEIGHTS = 12
"""Calibrated weights of one block at most, where its parts can be blocks of their own."""
_MOST_IN_PART = 3
"""The same of a part of a block: query, key and value with the attention itself."""


def find_blocks(model: nn.Module, holders: Collection[nn.Module]) -> dict[str, nn.Module]:
    """Disjoint parts of the model with something to multiply by, by path.

    `holders` are the modules that have the weights to be calibrated.
    """
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        found |= _within(name, child, holders)
    return _once(found)


def inner_parts(
    blocks: Mapping[str, nn.Module], holders: Collection[nn.Module]
) -> dict[str, nn.Module]:
    """What lies in blocks and can be finished before them, by path."""
    found: dict[str, nn.Module] = {}
    for path, block in blocks.items():
        for name, child in block.named_children():
            found |= _within(f"{path}.{name}", child, holders, _MOST_IN_PART)
    return _once(found)


def parts_of(path: str, block: nn.Module, holders: Collection[nn.Module]) -> dict[str, nn.Module]:
    """What a block that is never called as a whole falls into."""
    found: dict[str, nn.Module] = {}
    for name, child in block.named_children():
        found |= _within(f"{path}.{name}", child, holders)
    return _once(found)


def _within(
    path: str, module: nn.Module, holders: Collection[nn.Module], most: int = _MOST_WEIGHTS
) -> dict[str, nn.Module]:
    weights = sum(part in holders for part in module.modules())
    if not weights and not _is_heavy(module):
        return {}
    if isinstance(module, torch.jit.ScriptModule):
        return {}
    has_forward = type(module).forward is not nn.Module.forward
    if has_forward and (weights <= most or not list(module.children())):
        return {path: module}
    found: dict[str, nn.Module] = {}
    for name, child in module.named_children():
        found |= _within(f"{path}.{name}", child, holders, most)
    return _once(found)


def _is_heavy(module: nn.Module) -> bool:
    """Whether it multiplies by something: an excluded layer, a recurrent one."""
    return any(
        parameter.dim() > 1
        for part in module.modules()
        if not isinstance(part, (nn.Embedding, nn.EmbeddingBag))
        for parameter in part.parameters(recurse=False)
    )


def _once(found: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """A module that hangs in several places is one block."""
    return {path: module for path, module in found.items() if _first(found, module) == path}


def _first(found: Mapping[str, nn.Module], module: nn.Module) -> str:
    return next(path for path, other in found.items() if other is module)


_NONE: Mapping[str, nn.Module] = MappingProxyType({})


class Blocks:
    """Stands in the forward of every block, and gives the kept outputs of those that are final."""

    def __init__(
        self, blocks: Mapping[str, nn.Module], kept: Spill, parts: Mapping[str, nn.Module] = _NONE
    ) -> None:
        self._blocks = dict(blocks)
        self._parts = dict(parts)
        self._kept = kept
        self._final: frozenset[str] = frozenset()
        self._call = 0
        self._times: Counter[str] = Counter()
        self._inside: list[str] = []
        self.impure: set[str] = set()
        """Blocks that always run: they change their inputs, give what cannot be kept, or run
        within another one that they are no part of."""
        self.ended: Callable[[str], None] = _nothing
        """Told whenever a block has run."""
        self.part_ended: Callable[[str], None] = _nothing
        """The same for a part of one."""
        self._without: str | None = None
        self._inputs: dict[str, list[Any]] | None = None
        self.let_go: Mapping[str, Sequence[str]] = {}
        """By block: others whose outputs are needed for their shape alone once it has run; all of
        these run once in every call."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within it, the blocks' forwards go through here."""
        every = self._blocks | self._parts
        before = {path: vars(block).get("forward") for path, block in every.items()}
        for path, block in every.items():
            standing_in = self._standing_in if path in self._blocks else self._standing_in_part
            block.forward = standing_in(path, block.forward)
        try:
            yield
        finally:
            for path, block in every.items():
                was = before[path]
                if was is None:
                    del block.forward
                else:
                    block.forward = was

    def begin(self, call: int, final: Collection[str]) -> None:
        """Forward number `call` begins; the outputs of `final` blocks and parts count from now on.

        What other parts gave is forgotten.
        """
        for path in self._parts.keys() & (self._final - frozenset(final)):
            self._kept.drop(path)
        self._call, self._final = call, frozenset(final)
        self._times.clear()
        self._inside.clear()

    @property
    def inside(self) -> str | None:
        """The block that runs now; None: what lies between them."""
        return self._inside[0] if self._inside else None

    def drop_all(self) -> None:
        """Forget what blocks and parts gave."""
        for path in self._blocks.keys() | self._parts.keys():
            self._kept.drop(path)

    def lasting(self, forward: Callable[[], Tree], order: Sequence[str]) -> dict[str, str | None]:
        """The last block, by `order`, that needs what a block gave, tried on one call.

        `forward` runs the call with all blocks final. None: the model's output needs it too, or
        what lies between the blocks cannot go without.
        """
        inputs: dict[str, list[Any]] = {}
        self._inputs = inputs
        output = forward()
        found: dict[str, str | None] = {}
        for path in order:
            self._without, self._inputs = path, {}
            try:
                same = same_bits(output, forward())
            except Exception:  # noqa: BLE001  # whatever the model says to NaN
                same = False
            changed = [p for p in order if not same_bits(inputs.get(p), self._inputs.get(p))]
            found[path] = (changed or [path])[-1] if same else None
        self._without = self._inputs = None
        return found

    def _standing_in(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Tree, **kwargs: Tree) -> Tree:
            key = self._call, self._times[path]
            self._times[path] += 1
            if self._inside:
                self.impure.add(path)
            replayed = path in self._final and path not in self.impure
            if replayed and self._kept.has(path, key):
                if self._inputs is not None:
                    self._inputs.setdefault(path, []).append((args, kwargs))
                return self._replay(path, key)
            versions = _versions(args, kwargs)
            self._inside.append(path)
            output = forward(*args, **kwargs)
            self._inside.pop()
            if replayed:
                unchanged = versions == _versions(args, kwargs)
                if unchanged and self._kept.put(path, key, output):
                    for other in self.let_go.get(path, ()):
                        if self._kept.has(other, key):
                            self._kept.blank(other, key)
                else:
                    self.impure.add(path)
                    self._kept.drop(path)
            self.ended(path)
            return output

        return stand_in

    def _standing_in_part(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Tree, **kwargs: Tree) -> Tree:
            key = self._call, self._times[path]
            self._times[path] += 1
            final = path in self._final and path not in self.impure
            if final and self._kept.has(path, key):
                return self._kept.get(path, key)
            versions = _versions(args, kwargs)
            output = forward(*args, **kwargs)
            if final and versions != _versions(args, kwargs):
                self.impure.add(path)
                self._kept.drop(path)
            elif final and self.inside not in self._final and self._kept.has_room(output):
                self._kept.put(path, key, output)
            self.part_ended(path)
            return output

        return stand_in

    def _replay(self, path: str, key: tuple[int, int]) -> Tree:
        output = self._kept.get(path, key)
        if path != self._without:
            return output
        return pytree.tree_map(lambda v: blanked(v) if isinstance(v, Tensor) else v, output)


def same_bits(one: object, other: object) -> bool:
    """Whether two trees have equal tensors, NaN being equal to itself."""
    ours, theirs = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(ours) == len(theirs) and all(
        _equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b)
        for a, b in zip(ours, theirs, strict=True)
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or one.dtype != other.dtype:
        return torch.equal(one, other)
    same = torch.equal(one.nan_to_num(), other.nan_to_num())
    return same and torch.equal(one.isnan(), other.isnan())


def _versions(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    return [
        version_of(leaf)
        for leaf in pytree.tree_leaves((args, dict(kwargs)))
        if isinstance(leaf, Tensor)
    ]


def _nothing(_path: str) -> None:
    return None
