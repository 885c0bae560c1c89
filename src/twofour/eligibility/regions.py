"""Regions of nodes that the engine names by their ends alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice

from twofour.eligibility.nodes import Dataflow
from twofour.errors import BadInputError
from twofour.logs.names import without_profile
from twofour.records.export import GraphNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What is known of one region before its neighbours are looked at; indices of nodes."""

    first: tuple[int, ...] = ()
    """Nodes named at its first end."""
    last: tuple[int, ...] = ()
    near: tuple[tuple[int, ...], ...] = field(default=(), hash=False)
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


_MOST_HOLDING = 64
"""Regions said of one node: that it lies in one of more of them tells nothing."""
_MOST_PAIRS = 400_000_000
"""Regions times nodes: a bit of each takes 50 MB, and some dozen of them are held."""


def fill(regions: Sequence[Region], flow: Dataflow, others: Neighbours) -> tuple[Held, ...]:
    """The nodes of every region, in the order given; linear in nodes, edges and regions.

    Raises BadInputError for more regions than any engine has.
    """
    if len(regions) * len(flow.before) > _MOST_PAIRS:
        raise BadInputError(
            f"the engine's names tell of {len(regions):,} Myelin regions, and the model has"
            f" {len(flow.before):,} nodes: more than {_MOST_PAIRS:,} pairs of them are not looked"
            " at",
            hint="give the layers of one engine alone",
        )
    place = {at: i for i, at in enumerate(flow.order)}
    found = tuple(Held() for _ in regions)
    ranks = sorted(range(len(regions)), key=lambda i: _length(regions[i], place))
    ranked = [regions[i] for i in ranks]
    owners = _Owners(ranked, flow, others)
    for at in range(len(flow.before)):
        sure, shared, perhaps = owners.of(at)
        for bits, kind in ((sure, "surely"), (shared, "shared"), (perhaps, "perhaps")):
            for bit in islice(_bits(bits), _MOST_HOLDING):
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
        homes_of: dict[int, set[int]] = {}  # by id: names that mean one constant share its users
        for i, region in enumerate(self._regions):
            for users in region.near:
                # one of the users is in the region: which one matters only where they lie apart
                if id(users) not in homes_of:
                    homes_of[id(users)] = {piece[at] for at in users if at in piece}
                if len(homes := homes_of[id(users)]) == 1:
                    touching[next(iter(homes))] |= 1 << i
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


_COPIES = 8
"""Copies of one tensor that are followed, one behind the other."""
_WALKS = 16
"""Times that all nodes may be walked back through: regions of one engine lie apart."""
_FEW = 1_000


@dataclass(frozen=True, slots=True)
class TensorEnds:
    """Names of the tensors that a layer reads and writes; None where they are not listed."""

    inputs: tuple[str, ...] | None
    outputs: tuple[str, ...] | None


class TensorLinks:
    """Tensors of an engine by the nodes of the model that make and read them.

    `copies` are the layers that only move a tensor, which it leaves under another name, and
    `constants` those that read nothing.
    """

    def __init__(
        self,
        copies: Iterable[TensorEnds],
        constants: Iterable[TensorEnds],
        nodes: Sequence[GraphNode],
    ) -> None:
        self._sources: dict[str, str] = {}
        self._copies: dict[str, str] = {}
        self._constants = {_plain(name) for layer in constants for name in layer.outputs or ()}
        for copy in copies:
            if copy.inputs and copy.outputs:
                given, made = _plain(copy.inputs[0]), _plain(copy.outputs[0])
                self._sources[made] = given
                self._copies[given] = made
        self._steps_left = _WALKS * (len(nodes) + _FEW)
        self._makers: dict[str, list[int]] = defaultdict(list)
        self._readers: dict[str, list[int]] = defaultdict(list)
        for at, node in enumerate(nodes):
            for name in filter(None, node.outputs):
                self._makers[name].append(at)
            for name in dict.fromkeys(filter(None, node.inputs)):
                if name not in node.constants:
                    self._readers[name].append(at)

    def bounded(self, region: Region, ends: TensorEnds, flow: Dataflow, apart: Set[int]) -> Region:
        """The region with the nodes that its tensors prove; closed where all of them are known."""
        if not ends.outputs:
            return region
        made = [self._found(name, self._copies) for name in ends.outputs]
        given = [
            self._found(name, self._sources)
            for name in ends.inputs or ()
            if _plain(name) not in self._constants
        ]
        makers = [at for name in made if name for at in self._makers[name]]
        if ends.inputs is None or None in made or None in given or self._steps_left < 0:
            return replace(region, inside=tuple(dict.fromkeys(makers)))
        stops = {at for name in given if name for at in self._makers[name]} | apart
        inside = _back_to(makers, stops, flow)
        self._steps_left -= len(inside)
        ends_inside = all(at in inside for at in (*region.first, *region.last) if at not in apart)
        if not ends_inside:
            return replace(region, inside=tuple(dict.fromkeys(makers)))
        return replace(region, inside=inside, closed=True)

    def _found(self, name: str, links: dict[str, str]) -> str | None:
        """The model's name of a tensor, behind the copies of it; None where it has none."""
        name = _plain(name)
        for _ in range(_COPIES):
            makers = len(self._makers.get(name, ()))
            if makers == 1 or (makers == 0 and name in self._readers):
                return name
            if name not in links:
                return None
            name = links[name]
        return None


def _back_to(ends: Sequence[int], stops: Set[int], flow: Dataflow) -> tuple[int, ...]:
    found = {at: None for at in ends if at not in stops}
    for at in (waiting := list(found)):
        for source in flow.before[at]:
            if source not in found and source not in stops:
                found[source] = None
                waiting.append(source)
    return tuple(sorted(found))


def _plain(name: str) -> str:
    return without_profile(name)
