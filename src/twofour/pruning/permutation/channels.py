"""Channels: which places of a graph's tensors must move together, and which may change places.

Every tensor has **moves**: arrays of channel numbers that broadcast to its shape, 1 long along the
axes that a permutation leaves alone. An entry belongs to the channel that stands at its place; two
channels change places when all entries of the one go to where those of the other are, the k-th of
one to the k-th of the other in C order. Operators say what that takes: channels that are the same,
channels that may only move within a part, channels that may not move. What nothing tells apart is
one class, in which every order gives the same model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

Move = NDArray[np.int64]
"""Channel numbers, of the tensor's rank."""
Places = NDArray[np.int64]
"""Flat indices into a move."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Label:
    """What tells channels apart: those that may change places have the same labels."""

    channels: Move
    values: NDArray[np.int64] | None
    """None: alike for all of them, who are told from all others."""
    reason: str
    is_pin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Copy:
    """Places of one move that hold what places of another hold; flat, beside each other."""

    source: Move
    source_at: Places
    target: Move
    target_at: Places


def varying(move: Move) -> tuple[int, ...]:
    """The axes along which the channels differ."""
    return tuple(axis for axis, length in enumerate(move.shape) if length > 1)


class Ledger:
    """What the operators of a graph demand of its channels."""

    def __init__(self) -> None:
        self._count = 0
        self._labels: list[_Label] = []
        self._copies: list[_Copy] = []
        self._equal: list[tuple[Move, Move]] = []
        self._pinned: set[int] = set()
        """By id: the labels keep the moves alive."""

    def fresh(self, shape: Sequence[int], origin: str) -> Move:
        """New channels, one for each place of the shape."""
        size = int(np.prod(shape, dtype=np.int64))
        move: Move = np.arange(self._count, self._count + size, dtype=np.int64).reshape(shape)
        self._count += size
        self._labels.append(_Label(channels=move, values=None, reason=origin))
        return move

    def same(self, one: Move, other: Move) -> None:
        """Entries at the same place belong to the same channel; shapes broadcast."""
        if one is other or (one.shape == other.shape and np.array_equal(one, other)):
            return
        one, other = np.broadcast_arrays(one, other)
        self._equal.append((one, other))
        every = np.arange(one.size)
        self._copies.append(_Copy(source=one, source_at=every, target=other, target_at=every))

    def copied(
        self, source: Move, source_at: Places | None, target: Move, target_at: Places | None
    ) -> None:
        """Places of the target are places of the source, laid out anew; None: all, in order."""
        at = [
            np.arange(move.size) if places is None else places.reshape(-1)
            for move, places in ((source, source_at), (target, target_at))
        ]
        self._copies.append(_Copy(source=source, source_at=at[0], target=target, target_at=at[1]))

    def within(self, move: Move, axes: Sequence[int], reason: str) -> None:
        """Channels may only move along axes that are not among `axes`."""
        if set(varying(move)) <= set(axes):
            self.pin(move, reason)
            return
        values = np.zeros((1,) * move.ndim, np.int64)
        for axis in axes:
            length = move.shape[axis]
            if length > 1:
                index = np.arange(length).reshape(
                    [-1 if a == axis else 1 for a in range(move.ndim)]
                )
                values = values * length + index
        if values.size > 1:
            self.apart(move, values, reason)

    def apart(self, move: Move, values: NDArray[np.int64], reason: str) -> None:
        """Channels move only among those with the same values."""
        self._labels.append(
            _Label(channels=move, values=np.broadcast_to(values, move.shape), reason=reason)
        )

    def pin(self, move: Move, reason: str) -> None:
        """Channels stay where they are."""
        self._pinned.add(id(move))
        values = np.arange(move.size).reshape(move.shape)
        self._labels.append(_Label(channels=move, values=values, reason=reason, is_pin=True))

    def is_pinned(self, move: Move) -> bool:
        """Whether it is known already that nothing moves in it."""
        return id(move) in self._pinned

    def solve(self) -> Solved:
        """Channels that are one, and what of them may change places."""
        root = self._roots()
        number = int(root.max(initial=-1)) + 1
        labels = [*self._labels, *self._layouts(root)]
        signature = np.zeros((number, 2), np.uint64)
        why = np.full((2, number), -1, np.int64)
        for event, label in enumerate(labels):
            channels = root[label.channels.reshape(-1)]
            values = np.zeros(1, np.int64) if label.values is None else label.values.reshape(-1)
            for column, seed in enumerate(_SEEDS):
                np.add.at(signature[:, column], channels, _hashed(values, event, seed))
            if label.values is not None:
                first = why[int(not label.is_pin)]
                first[channels[first[channels] < 0]] = event
        _, cell = np.unique(signature, axis=0, return_inverse=True)
        return Solved(
            root=root,
            cell=cell.reshape(-1).astype(np.int64),
            why=np.where(why[0] >= 0, why[0], why[1]),
            reasons=tuple(label.reason for label in labels),
        )

    def _roots(self) -> NDArray[np.int64]:
        if not self._equal:
            return np.arange(self._count, dtype=np.int64)
        one, other = (np.concatenate([p[at].reshape(-1) for p in self._equal]) for at in (0, 1))
        edges = coo_array((np.ones(len(one), np.int8), (one, other)), (self._count, self._count))
        root: NDArray[np.int64] = connected_components(edges, directed=False)[1].astype(np.int64)
        return root

    def _layouts(self, root: NDArray[np.int64]) -> list[_Label]:
        """Labels that hold the k-th entries of a channel to the same places of every copy."""
        labels = []
        for copy in self._copies:
            source, target = ranks(root[copy.source]), ranks(root[copy.target])
            if source is None and target is None:
                continue
            values = np.zeros(len(copy.source_at), np.int64)
            if source is not None:
                values += source.reshape(-1)[copy.source_at] * copy.target.size
            if target is not None:
                values += target.reshape(-1)[copy.target_at]
            channels = copy.source.reshape(-1)[copy.source_at]
            labels.append(_Label(channels=channels, values=values, reason=_LAYOUT))
        return labels


_LAYOUT = "its copies lie in another order for each of its channels"
_SEEDS = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """Channels that are one, by number, and the cell in which each may move."""

    root: NDArray[np.int64]
    """Of each channel number."""
    cell: NDArray[np.int64]
    """Of each root: roots of one cell may change places."""
    why: NDArray[np.int64]
    """Of each root: which reason tells it from others; -1 where none does."""
    reasons: tuple[str, ...]


def ranks(roots: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Which entry of its channel each place holds, in C order; None where each has but one."""
    flat = roots.reshape(-1)
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(flat) else order
    if len(starts) == len(flat):
        return None
    found = np.empty(len(flat), np.int64)
    found[order] = np.arange(len(flat)) - np.repeat(starts, np.diff(np.r_[starts, len(flat)]))
    return found.reshape(roots.shape)


def _hashed(values: NDArray[np.int64], event: int, seed: int) -> NDArray[np.uint64]:
    """Numbers that add up to a signature (the finaliser of splitmix64, Steele et al. 2014)."""
    start = (seed + event * 0xBF58476D1CE4E5B9) % 2**64
    mixed = values.astype(np.uint64) * np.uint64(0x94D049BB133111EB) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    hashed: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return hashed
