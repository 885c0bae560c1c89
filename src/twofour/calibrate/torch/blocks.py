"""Parts of a module whose work is done once: what a finished one gave is given again.

A forward then runs the model's own code (branches, loops, whatever lies between the blocks) and
only what is not finished is worked out again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from twofour.calibrate.torch.products import version_of
from twofour.pruning.torch.calls import Spill, Tree

_MOST_WEIGHTS = 12
"""Calibrated weights of one block at most, where its parts can be blocks of their own."""
_MOST_IN_PART = 3
"""The same of a part of a block: query, key and value with the attention itself."""

Ran = tuple[str, Tree, Tree]
"""A block, what it was given, and what it gave."""


def inner_parts(
    path: str, block: nn.Module, holders: Collection[nn.Module]
) -> dict[str, nn.Module]:
    """What lies in a block and can be finished before it."""
    return parts_of(path, block, holders, most=_MOST_IN_PART)


def parts_of(
    path: str,
    block: nn.Module,
    holders: Collection[nn.Module],
    *,
    from_files: bool = False,
    most: int = _MOST_WEIGHTS,
) -> dict[str, nn.Module]:
    """Disjoint parts of a block (path "": of the model) with something to multiply by, by path.

    `holders` are the modules that have the weights to be calibrated. `from_files`: they come to
    memory block by block, so that tables of embeddings are blocks too, and what holds a list of
    layers is none.
    """
    found: dict[str, nn.Module] = {}
    is_list = isinstance(block, nn.ModuleList)
    for name, child in block.named_children():
        inner = f"{path}.{name}" if path else name
        weights = sum(part in holders for part in child.modules())
        if isinstance(child, torch.jit.ScriptModule):
            continue
        if not weights and not _is_heavy(child, tables=from_files):
            continue
        small = weights <= most or not list(child.children())
        if from_files:
            lists = [part for part in child.modules() if isinstance(part, nn.ModuleList)]
            small = is_list or (small and all(len(each) < 2 for each in lists))
        if small and type(child).forward is not nn.Module.forward:
            found[inner] = child
        else:
            found |= parts_of(inner, child, holders, from_files=from_files, most=most)
    first: dict[nn.Module, str] = {}  # a module that hangs in several places is one block
    for place, module in found.items():
        first.setdefault(module, place)
    return {place: module for module, place in first.items()}


def _is_heavy(module: nn.Module, *, tables: bool) -> bool:
    """Whether it multiplies by something: an excluded layer, a recurrent one."""
    return any(
        parameter.dim() > 1
        for part in module.modules()
        if tables or not isinstance(part, (nn.Embedding, nn.EmbeddingBag))
        for parameter in part.parameters(recurse=False)
    )


class Blocks:
    """Stands in the forward of every block, and gives the kept outputs of those that are final."""

    def __init__(self, blocks: Mapping[str, nn.Module], kept: Spill, name: str = "") -> None:
        """`name` tells its outputs from those that others keep there."""
        self._blocks, self._kept, self._name = dict(blocks), kept, name
        self._final: frozenset[str] = frozenset()
        self._call = 0
        self._times: Counter[str] = Counter()
        self._inside: list[str] = []
        self._following: dict[str, str] = {}
        self.impure: set[str] = set()
        """Blocks that always run: they change their inputs, give what cannot be kept, or run
        within another one."""
        self.ended: Callable[[Ran], None] = nothing
        """Told whenever a block has run, or given what it gave before."""

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within it, the blocks' forwards go through here."""
        before = {path: vars(block).get("forward") for path, block in self._blocks.items()}
        for path, block in self._blocks.items():
            block.forward = self._standing_in(path, block.forward)
        try:
            yield
        finally:
            for path, block in self._blocks.items():
                was = before[path]
                if was is None:
                    del block.forward
                else:
                    block.forward = was

    def begin(self, call: int, final: Collection[str]) -> None:
        """Forward number `call` begins; the outputs of `final` blocks count from now on."""
        self._call, self._final = call, frozenset(final)
        self._times.clear()
        self._inside.clear()

    @property
    def inside(self) -> str | None:
        """The block that runs now; None: what lies between them."""
        return self._inside[0] if self._inside else None

    def follow(self, following: Mapping[str, str]) -> None:
        """`chains`: what a block gave is let go of when the one behind it has run.

        From then on it gives what that one gave.
        """
        self._following = dict(following)
        for path in following:
            self._kept.drop((self._name, path))

    def drop_all(self) -> None:
        """Forget what blocks gave."""
        for path in self._blocks:
            self._kept.drop((self._name, path))

    def _standing_in(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Tree, **kwargs: Tree) -> Tree:
            key = self._call, self._times[path]
            self._times[path] += 1
            if self._inside:
                self.impure.add(path)
            replayed = path in self._final and path not in self.impure
            known = self._where(path, key) if replayed else None
            if known is not None:
                output = self._kept.get((self._name, known), key)
            else:
                versions = _versions(args, kwargs)
                self._inside.append(path)
                output = forward(*args, **kwargs)
                self._inside.pop()
                if replayed:
                    unchanged = versions == _versions(args, kwargs)
                    self._keep(path, key, output, unchanged=unchanged)
            self.ended((path, (args, kwargs), output))
            return output

        return stand_in

    def _where(self, path: str, key: tuple[int, int]) -> str | None:
        """Under which block the output lies; None: nowhere."""
        while not self._kept.has((self._name, path), key):
            if path not in self._following:
                return None
            path = self._following[path]
        return path

    def _keep(self, path: str, key: tuple[int, int], output: Tree, *, unchanged: bool) -> None:
        if not unchanged or not self._kept.put((self._name, path), key, output):
            self.impure.add(path)
            self._kept.drop((self._name, path))
            return
        for before, after in self._following.items():
            if after == path:
                self._kept.drop((self._name, before), key)


def chains(ran: Sequence[Ran], output: Tree) -> dict[str, str]:
    """For each block of a forward the next one, where that alone takes what the block gave.

    By where tensors lie in memory; both give the same kind of thing.
    """
    times = Counter(path for path, _, _ in ran)
    taken = [(path, _places(given)) for path, given, _ in ran] + [("", _places(output))]
    found = {}
    for (path, _, gave), (after, _, next_gave) in pairwise(ran):
        places = _places(gave)
        users = {user for user, others in taken if user != path and places & others}
        once = times[path] == times[after] == 1
        if once and users == {after} and _kind(gave) == _kind(next_gave):
            found[path] = after
    return found


def _places(tree: Tree) -> set[int]:
    return {leaf.data_ptr() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}


def _kind(tree: Tree) -> tuple[Any, ...]:
    leaves, shape = pytree.tree_flatten(tree)
    return shape, *((v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for v in leaves)


def same_bits(one: object, other: object) -> bool:
    """Whether two trees have equal tensors, NaN being equal to itself."""
    ours, theirs = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(ours) == len(theirs) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else type(a) is type(b)
        for a, b in zip(ours, theirs, strict=True)
    )


def _versions(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
    return [
        version_of(leaf)
        for leaf in pytree.tree_leaves((args, dict(kwargs)))
        if isinstance(leaf, Tensor)
    ]


def nothing(_: object) -> None:
    """Tells nobody."""
