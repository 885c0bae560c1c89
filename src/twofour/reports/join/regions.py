"""Which nodes a Myelin region holds: a range of the graph between its neighbours.

A region `{ForeignNode[a...b]}` is named after its first and its last layer, in an order in which
constants and layers of TensorRT's own may come first or last. So only ends that are nodes bound it:
nothing before the first and nothing behind the last is in it. Every other bound is a neighbour, for
an engine runs its layers one after another: what lies behind a layer that needs the region is not
in the region, and in a whole engine what nobody else holds is in the region it touches.

Sets of regions are bits of an integer, the shortest region the lowest bit, so that a few walks over
the graph answer for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from twofour.reports.join.dataflow import Dataflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What is known of one region before its neighbours are looked at; indices of nodes."""

    first: tuple[int, ...] = ()
    """Nodes named at its first end."""
    last: tuple[int, ...] = ()
    near: tuple[tuple[int, ...], ...] = ()
    """Users of each constant that is named at an end, and nodes beside a named layer."""
    inside: tuple[int, ...] = ()
    """Nodes known to be in it by the tensors that go in and out."""
    closed: bool = False
    """It holds `first`, `last` and `inside`, and nothing else."""


@dataclass(slots=True)
class Held:
    """The nodes of one region."""

    surely: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    """In this region or in another one."""
    perhaps: list[int] = field(default_factory=list)
    """In this region, or in no layer of the engine at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """What the other layers of an engine hold."""

    taken: Set[int]
    """Nodes that other layers name."""
    apart: Set[int]
    """Those of them that are outside of every region."""
    whole: bool
    """The layers are all that the engine has."""


def fill(regions: Sequence[Region], flow: Dataflow, others: Neighbours) -> tuple[Held, ...]:
    """The nodes of every region, in the order given; linear in nodes, edges and regions."""
    place = {at: i for i, at in enumerate(flow.order)}
    found = tuple(Held() for _ in regions)
    ranks = sorted(range(len(regions)), key=lambda i: _length(regions[i], place))
    ranked = [regions[i] for i in ranks]
    owners = _Owners(ranked, flow, others)
    for at in range(len(flow.before)):
        sure, shared, perhaps = owners.of(at)
        for bits, kind in ((sure, "surely"), (shared, "shared"), (perhaps, "perhaps")):
            for bit in _bits(bits):
                getattr(found[ranks[bit]], kind).append(at)
    return found


def _length(region: Region, place: dict[int, int]) -> int:
    """Places between its ends; regions without two ends come last."""
    if not region.first or not region.last:
        return len(place) if region.first or region.last else 2 * len(place)
    return max(place[at] for at in region.last) - min(place[at] for at in region.first)


def _bits(value: int) -> Iterator[int]:
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


class _Owners:
    """For each node the regions that hold it, share it or may hold it, as bits."""

    def __init__(self, regions: Sequence[Region], flow: Dataflow, others: Neighbours) -> None:
        self._regions = regions
        self._flow = flow
        self._others = others
        self._all = (1 << len(regions)) - 1
        self._anchors = self._find_anchors()
        self._floating = self._all & ~_union(self._anchors)
        self._closed = _mask(i for i, region in enumerate(regions) if region.closed)
        self._owner = self._between()
        self._allowed = self._bounds()
        self._touching = self._components()

    def of(self, at: int) -> tuple[int, int, int]:
        """The regions of which the node is surely, surely one or another, perhaps a part."""
        if at in self._others.taken or at in self._flow.fixed:
            return 0, 0, 0
        if self._owner[at]:
            return self._owner[at], 0, 0
        allowed = self._allowed[at]
        touching = allowed & self._touching.get(at, 0)
        candidates = touching | (allowed & self._floating)
        if not touching or not self._others.whole:
            return 0, 0, candidates or allowed
        single = candidates & (candidates - 1) == 0
        return (candidates, 0, 0) if single else (0, candidates, 0)

    def _find_anchors(self) -> list[int]:
        """By node, the regions that it is known to be in, whoever else names it."""
        found = [0] * len(self._flow.before)
        for i, region in enumerate(self._regions):
            alone = (users[0] for users in region.near if len(users) == 1)
            free = (at for at in alone if at not in self._others.taken)
            for at in (*region.first, *region.last, *region.inside, *free):
                found[at] |= 1 << i
        return found

    def _between(self) -> list[int]:
        """By node, the one region it is in for certain: at an anchor, or on a way between two."""
        anchors, flow = self._anchors, self._flow
        above = _spread(anchors, flow.before, flow.order)
        below = _spread(anchors, flow.after, reversed(flow.order))
        found = []
        for at, own in enumerate(anchors):
            inside = own | (above[at] & below[at] & ~self._closed)
            free = at not in self._others.taken and at not in flow.fixed
            found.append(inside & -inside if free else 0)
        return found

    def _bounds(self) -> list[int]:
        """By node, the regions that it may be in."""
        flow, regions = self._flow, self._regions
        ends = [0] * len(flow.before)
        starts = list(ends)
        for i, region in enumerate(regions):
            for at in region.last:
                ends[at] |= 1 << i
            for at in region.first:
                starts[at] |= 1 << i
        behind = _spread(ends, flow.before, flow.order)
        ahead = _spread(starts, flow.after, reversed(flow.order))
        past = self._crossed(flow.before, flow.order)
        yet = self._crossed(flow.after, reversed(flow.order))
        out = (b | a | p | y for b, a, p, y in zip(behind, ahead, past, yet, strict=True))
        return [self._all & ~self._closed & ~bits for bits in out]

    def _crossed(self, before: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
        """By node, the regions behind which another layer comes before the node does."""
        reach = [0] * len(before)
        crossed = list(reach)
        for at in order:
            for source in before[at]:
                own = self._owner[source]
                there = reach[source] | own
                reach[at] |= there
                crossed[at] |= crossed[source]
                if own or source in self._others.apart:
                    crossed[at] |= there & ~own
        return crossed

    def _components(self) -> dict[int, int]:
        """By node that is still free, the regions at the border of what it hangs together with."""
        piece: dict[int, int] = {}
        touching: dict[int, int] = {}
        for start in range(len(self._owner)):
            if start in piece or not self._is_free(start):
                continue
            piece[start] = start
            members, bits = [start], 0
            for at in members:
                for other in (*self._flow.before[at], *self._flow.after[at]):
                    bits |= self._owner[other]
                    if other not in piece and self._is_free(other):
                        piece[other] = start
                        members.append(other)
            touching[start] = bits
        for i, region in enumerate(self._regions):
            for users in region.near:
                # one of the users is in the region: which one matters only where they lie apart
                homes = {piece[at] for at in users if at in piece}
                if len(homes) == 1:
                    touching[homes.pop()] |= 1 << i
        return {at: touching[start] for at, start in piece.items()}

    def _is_free(self, at: int) -> bool:
        held = self._owner[at] or at in self._others.taken or at in self._flow.fixed
        return not held


def _spread(
    marks: Sequence[int], before: Sequence[Sequence[int]], order: Iterable[int]
) -> list[int]:
    """By node, the marks of every node that comes before it."""
    found = [0] * len(marks)
    for at in order:
        for source in before[at]:
            found[at] |= found[source] | marks[source]
    return found


def _mask(bits: Iterable[int]) -> int:
    found = 0
    for bit in bits:
        found |= 1 << bit
    return found


def _union(values: Iterable[int]) -> int:
    found = 0
    for value in values:
        found |= value
    return found
