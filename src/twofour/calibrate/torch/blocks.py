"""Blocks of a module that run once: the output of a finished block is kept and replayed.

A forward then runs the model's own code (branches, loops, whatever lies between the blocks), and
only blocks that are not finished are computed again.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from twofour.calibrate.torch.products import UseOrder, version_of
from twofour.errors import BadInputError
from twofour.pruning.torch.calls import Tree, TreeStore

_MOST_WEIGHTS = 12
"""Calibrated weights of one block at most, where its parts can be blocks of their own."""
MOST_IN_PART = 3
"""The same for a part of a block: query, key and value with the attention itself."""

BlockRun = tuple[str, Tree, Tree]
"""A block's path, its inputs and its outputs."""


def parts_of(
    path: str,
    block: nn.Module,
    holders: Collection[nn.Module],
    *,
    from_files: bool = False,
    most: int = _MOST_WEIGHTS,
) -> dict[str, nn.Module]:
    """Disjoint parts of a block (path "": of the model) that multiply by a weight, by path.

    `holders` are the modules that have the weights to be calibrated, of which a part has `most` at
    most. `from_files`: weights come to memory block by block, so that tables of embeddings are
    blocks too, and a module that contains a list of layers is none.
    """
    # A BERT encoder of 12 layers with 6 Linears each has 72 weights: too many, so the search goes
    # on into its ModuleList, whose children of 6 are the blocks. In such a block, with `most` 3,
    # the parts are the self-attention (3), its output (1), and the two Linears behind it.
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
    first: dict[nn.Module, str] = {}  # a module under several paths is one block
    for place, module in found.items():
        first.setdefault(module, place)
    return {place: module for module, place in first.items()}


def _is_heavy(module: nn.Module, *, tables: bool) -> bool:
    """Whether it multiplies by a matrix all the same: an excluded layer, a recurrent one."""
    return any(
        parameter.dim() > 1
        for part in module.modules()
        if tables or not isinstance(part, (nn.Embedding, nn.EmbeddingBag))
        for parameter in part.parameters(recurse=False)
    )


class Blocks:
    """Replaces the forward of every block: final blocks give their kept outputs."""

    def __init__(self, blocks: Mapping[str, nn.Module], kept: TreeStore, name: str = "") -> None:
        """`name` separates these outputs from others in the store."""
        self._blocks, self._kept, self._name = dict(blocks), kept, name
        self._finished: frozenset[str] = frozenset()
        self._call = 0
        self._times: Counter[str] = Counter()
        self._inside: list[str] = []
        self._following: dict[str, str] = {}
        self.impure: set[str] = set()
        """Blocks that always run: they change their inputs, run within another block, or have
        outputs that cannot be kept."""
        self.ended: Callable[[BlockRun], None] = ignore
        """Called whenever a block has run, or was replayed."""

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

    def begin(self, call: int, finished: Collection[str]) -> None:
        """Start forward number `call`; `finished` blocks are replayed from now on."""
        self._call, self._finished = call, frozenset(finished)
        self._times.clear()
        self._inside.clear()

    @property
    def inside(self) -> str | None:
        """The block that runs now; None: the model's code between blocks."""
        return self._inside[0] if self._inside else None

    def follow(self, following: Mapping[str, str]) -> None:
        """Take over `chains`: a block's output is dropped when the next block has run.

        From then on the block gives the next one's output.
        """
        # In a chain of layers 0 -> 1 -> 2 -> 3 only layer 1 reads the output of layer 0. Once layer
        # 2 is final, only its output is kept: replayed, layers 0 and 1 give it too, and layer 2,
        # whose input nobody looks at, gives it to layer 3. One output is kept instead of three.
        self._following = dict(following)
        for path in following:
            self._kept.drop((self._name, path))

    def drop_all(self) -> None:
        """Forget all outputs."""
        for path in self._blocks:
            self._kept.drop((self._name, path))

    def _standing_in(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*args: Tree, **kwargs: Tree) -> Tree:
            key = self._call, self._times[path]
            self._times[path] += 1
            if self._inside:
                self.impure.add(path)
            replayed = path in self._finished and path not in self.impure
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
        """The block that the output is kept for, itself or one that follows; None: nowhere."""
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


def chains(ran: Sequence[BlockRun], output: Tree) -> dict[str, str]:
    """For each block of a forward the next one, where only that one reads the block's output.

    Tensors are compared by their memory; both outputs have the same structure, shapes and types.
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
    """Whether two trees have equal tensors; NaN is equal to itself."""
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


def ignore(_: object) -> None:
    """Do nothing with an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """The weights of one block, or some that belong to no block or to several."""

    block: str | None
    names: tuple[str, ...]
    at: float
    """When the block ends in a forward, or the first of the weights is used."""


def replayable_chains(
    blocks: Blocks, ran: list[BlockRun], output: Tree, forward: Callable[[], Tree]
) -> dict[str, str]:
    """Replay a forward that `ran` and gave `output`; blocks always run if the result differs.

    And once more with the output of the last block of each chain: the chains, if that gives the
    same.
    """
    following, again = chains(ran, output), list[BlockRun]()
    blocks.ended = again.append

    def same() -> bool:
        again.clear()
        try:
            result = forward()
        except BadInputError:  # kept outputs have no gradients, for example
            return False
        inputs = [
            [(path, given) for path, given, _ in each if path not in following.values()]
            for each in (ran, again)
        ]
        return same_bits((inputs[0], output), (inputs[1], result))

    if not same():
        blocks.impure.update({path for path, _, _ in ran})
        return {}
    blocks.follow(following)
    return following if same() else {}


def weight_groups(
    order: UseOrder,
    holders: Mapping[str, Collection[nn.Module]],
    modules: Mapping[str, nn.Module],
    ends: Mapping[str, int],
    first_use: Mapping[str, tuple[int, set[str | None]]],
) -> list[WeightGroup]:
    """The weights by block; those of no block or several by the first input they are used with.

    `holders` has the modules of each weight, `modules` those of the blocks, `ends` when a block
    ends; `first_use` how many blocks had ended at the first use of a weight, and its blocks.
    """
    by_block: dict[str, list[str]] = {}
    rest: list[str] = []
    within = {part: path for path, block in modules.items() for part in block.modules()}
    for name, parts in holders.items():
        used_in = first_use[name][1] if name in first_use else {within.get(p) for p in parts}
        (place, *others) = used_in
        if place is None or others:
            rest.append(name)
        else:
            by_block.setdefault(place, []).append(name)
    groups = [
        WeightGroup(block=path, names=tuple(names), at=ends.get(path, math.inf))
        for path, names in by_block.items()
    ]
    for names in order.steps():
        here = tuple(name for name in names if name in rest)
        if here:
            groups.append(WeightGroup(block=None, names=here, at=first_use[here[0]][0] - 0.5))
    left = tuple(name for name in rest if name not in first_use)
    if left:
        groups.append(WeightGroup(block=None, names=left, at=math.inf))
    return sorted(groups, key=lambda group: group.at)
