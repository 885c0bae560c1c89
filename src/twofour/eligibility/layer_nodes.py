"""Which nodes of the model each engine layer holds, those inside of Myelin regions included."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from twofour.eligibility.node_names import (
    MYELIN_SUFFIX,
    Dataflow,
    NamedNodes,
    NamePart,
    NodeIndex,
    StatedNames,
    split_name,
)
from twofour.logs.sparsity import without_profile
from twofour.records import frozen
from twofour.records.export import GraphNode

COPY = re.compile(
    r"Reformatting CopyNode for (?:(?:Input|Output) Tensor \d+ to )?"
    r"|Forced Cast ITensor (?:.* - )?"
)
"""Layers that only copy or cast what goes into or out of the layers named after it."""


@frozen
class LayerNodes:
    """The nodes that one name of an engine or log stands for, as indices into the model's."""

    name: str
    nodes: tuple[int, ...]
    """Named one by one, in the order of the graph."""
    parts: tuple[int, ...]
    """Nodes of which it is a further layer, such as the bias of a Gemm."""
    region: tuple[int, ...]
    """Inside a Myelin region of the name, and named by no other layer."""
    shared: tuple[int, ...]
    """Inside this Myelin region or another one: their names do not say which."""
    perhaps: tuple[int, ...]
    """Inside this Myelin region, or in no layer at all: its name does not say."""
    matched: bool
    """Whether it leads to a node, a constant or a layer that the builder always adds."""

    @property
    def held(self) -> tuple[int, ...]:
        """Nodes that it holds for certain, wholly or in part."""
        return (*self.nodes, *self.parts, *self.region)

    @property
    def inside(self) -> tuple[int, ...]:
        """Nodes that lie, or may lie, inside a Myelin region of the name."""
        return (*self.region, *self.shared, *self.perhaps)


@frozen
class EngineName:
    """A name to look up, with what layer information states of it."""

    name: str
    sources: tuple[str, ...] = ()
    """The source nodes in its Metadata."""
    is_product: bool = True
    """False for a layer that can hold no product, so that it may lead nowhere."""


@frozen
class Region:
    """What the name of one region says of it; indices of nodes."""

    first: tuple[int, ...]
    """Nodes named at its first end."""
    last: tuple[int, ...]
    near: tuple[tuple[int, ...], ...] = field(hash=False)
    """Users of each constant that is named at an end, and nodes beside a named layer."""
    closed: bool
    """It has no dots in its name: it holds `first` and nothing else."""


@dataclass(slots=True)
class _ParsedName:
    """One name while its regions wait for what the other names claim; sets of nodes."""

    use: EngineName
    nodes: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    regions: list[Region] = field(default_factory=list)
    surely: set[int] = field(default_factory=set)
    shared: set[int] = field(default_factory=set)
    perhaps: set[int] = field(default_factory=set)
    matched: bool = False

    def add(self, named: NamedNodes) -> None:
        """Add what one part of the name leads to."""
        held = self.parts if named.is_part else self.nodes
        held.update(named.nodes)
        self.matched |= named.anything


_INNER = re.compile(rf"^__my|{MYELIN_SUFFIX.pattern}")
"""A kernel that Myelin lists apart from the region it belongs to."""
_UNNAMED = re.compile(r"\(Unnamed Layer\* (\d{1,9})\) \[([^\[\]]{1,80})\]")
_OPS_OF_KIND = {
    "Convolution": ("Conv",),
    "Deconvolution": ("ConvTranspose",),
    "Fully Connected": ("Gemm", "MatMul"),
    "Matrix Multiply": ("Gemm", "MatMul"),
}


def index_nodes(
    nodes: Sequence[GraphNode],
    modules: Mapping[str, int],
    names: Iterable[str],
    stated: StatedNames | None = None,
) -> NodeIndex:
    """An index that knows the unnamed layers among all the names that an engine and its logs use.

    `modules` has the node of each module path, for names that Torch-TensorRT made from paths;
    `stated` what the logs say of names.
    """
    index = NodeIndex(nodes, modules, stated)
    names = list(dict.fromkeys(names))
    # `(Unnamed Layer* 3) [Convolution]` and `(Unnamed Layer* 14) [Convolution]` of a model with two
    # Conv: the numbers count all layers, so only their order says which of the two is which
    numbers: dict[str, set[int]] = {}
    for name in names:
        for number, kind in _UNNAMED.findall(name):
            numbers.setdefault(kind, set()).add(int(number))
    named = _named_one_by_one(names, index) if numbers else set()
    for kind, seen in numbers.items():
        ops = _OPS_OF_KIND.get(kind, ())
        free = [at for at, node in enumerate(nodes) if node.op in ops and at not in named]
        if len(free) == len(seen):
            for number, at in zip(sorted(seen), free, strict=True):
                index.settle(f"(Unnamed Layer* {number}) [{kind}]", (at,))
    return index


def _named_one_by_one(names: Iterable[str], index: NodeIndex) -> set[int]:
    named: set[int] = set()
    for name in names:
        for part in split_name(name, index.known):
            if not part.is_region:
                named.update(index.find(part.text).nodes)
    return named


def find_nodes(
    names: Iterable[str | EngineName], index: NodeIndex, *, whole: bool = False
) -> tuple[LayerNodes, ...]:
    """The nodes of every layer of one engine, in the order given.

    `whole` says that the names are all layers of an engine: then what none of them names is in a
    region, if there is one for it. Linear in names and nodes.
    """
    uses = [use if isinstance(use, EngineName) else EngineName(name=use) for use in names]
    parsed = [_parse(use, index) for use in uses]
    _fill_regions(parsed, index, whole=whole)
    return tuple(
        LayerNodes(
            name=name.use.name,
            nodes=tuple(sorted(name.nodes)),
            parts=tuple(sorted(name.parts - name.nodes)),
            region=tuple(sorted(name.surely)),
            shared=tuple(sorted(name.shared)),
            perhaps=tuple(sorted(name.perhaps)),
            matched=name.matched,
        )
        for name in parsed
    )


def _parse(use: EngineName, index: NodeIndex) -> _ParsedName:
    # The name `/fc/Gemm + /act/Relu` holds two nodes. `Reformatting CopyNode for Input Tensor 0 to
    # /fc/Gemm` holds none: it only brings data to one. `{ForeignNode[/q/MatMul.../out/Add]}` names
    # the two ends of a region; what is between them is known once all other names are read.
    name = use.name if use.name in index.known else without_profile(use.name)
    if COPY.match(name):
        return _ParsedName(use=use, matched=True)
    return _parse_layer(use, name, index)


def _parse_layer(use: EngineName, name: str, index: NodeIndex) -> _ParsedName:
    parsed = _ParsedName(use=use)
    stated = index.stated(name)
    if stated is not None and not use.sources:
        parsed.add(stated)
        return parsed
    for part in split_name(name, index.known):
        if not part.is_region:
            parsed.add(index.find(part.text))
            continue
        region = _region(part, index)
        if region is not None:
            parsed.matched = True
            parsed.regions.append(region)
    for source in use.sources:
        named = index.find(source)
        parsed.matched |= named.anything
        # of several nodes of one name, the layer's own name says which
        names = {index.nodes[at].name for at in named.nodes}
        if all(index.nodes[at].name not in names for at in parsed.nodes):
            parsed.nodes.update(named.nodes)
    if use.sources and parsed.nodes:
        parsed.regions = []  # Metadata lists a region's nodes, so its ends say nothing more
    return parsed


def _region(part: NamePart, index: NodeIndex) -> Region | None:
    """What the ends of a name say; None where neither end is of this model or of the builder."""
    first = _End(part.first or (), index)
    last = _End(part.last, index) if part.last else first
    if not first.is_known and not last.is_known:
        return None
    near = [*first.near]
    if part.last:
        near += last.near
    return Region(
        first=tuple(first.nodes), last=tuple(last.nodes), near=tuple(near), closed=not part.last
    )


class _End:
    """What one end of a region's name leads to.

    A further layer of a node, or what moves data to it, bounds nothing: the node may lie outside.
    """

    def __init__(self, texts: Iterable[str], index: NodeIndex) -> None:
        # `b0.fc2.bias + ONNXTRT_Broadcast_4`: a constant and a layer of the parser's. The Add that
        # reads the bias is near; no node is named.
        self.nodes: dict[int, None] = {}
        self.near: list[tuple[int, ...]] = []
        """Users of the constants there, and nodes beside a layer."""
        self.is_known = False
        """Whether any name is of the model or of the builder."""
        for text in texts:
            named = index.find(text)
            users: tuple[int, ...] = ()
            if not named.nodes and not named.around:
                users = index.users(text)
            self.is_known |= named.anything or bool(users)
            for at in named.nodes:
                if named.is_part or at in index.flow.fixed:
                    self.near.append(index.flow.beyond_constants(at))
                else:
                    self.nodes[at] = None
            self.near += filter(None, (named.around, users))


def _fill_regions(names: Sequence[_ParsedName], index: NodeIndex, *, whole: bool) -> None:
    """Share out the nodes that no layer names among the regions.

    Linear in nodes, edges and regions. A region of two names is one region; shorter ones come
    first, as a node on the way through two of them is in the shorter.
    """
    distinct = dict.fromkeys(region for name in names for region in name.regions)
    if not distinct:
        return
    place = {at: i for i, at in enumerate(index.flow.order)}
    regions = sorted(distinct, key=lambda region: _length(region, place))
    # {q...softmax} holds q surely; what lies between it and {out...X} is shared with that one, or
    # perhaps in no layer at all
    kinds: dict[Region, tuple[set[int], set[int], set[int]]]
    kinds = {region: (set(), set(), set()) for region in regions}
    is_whole = whole and all(name.matched or not name.use.is_product for name in names)
    owners = _Owners(regions, index.flow, names, whole=is_whole)
    for at in place:
        for kind, bits in enumerate(owners.of(at)):
            for number in _numbers(bits):
                kinds[regions[number]][kind].add(at)
    for name in names:
        for region in name.regions:
            surely, shared, perhaps = kinds[region]
            name.surely |= surely
            name.shared |= shared
            name.perhaps |= perhaps


def _length(region: Region, place: Mapping[int, int]) -> int:
    """Places between its ends; regions without two ends come last."""
    if region.first and region.last:
        return max(place[at] for at in region.last) - min(place[at] for at in region.first)
    if region.first or region.last:
        return len(place)
    return 2 * len(place)


def _numbers(bits: int) -> Iterator[int]:
    """The regions in a set of bits: 0 and 2 for 0b101."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class _Owners:
    """For each node the regions that hold it, share it or may hold it: bit i is region i.

    `whole` says that the names are all that the engine has.
    """

    # In q -> scale -> softmax -> out with the regions 0 = {q...softmax} and 1 = {out...X}, where X
    # is no node of the model: q and softmax are anchors of region 0 (0b01), and scale, on the way
    # between them, is in it for certain. out is the anchor of region 1 (0b10). A node after out
    # that no other layer names touches region 1 alone, so it is in region 1 if the layers are all
    # that the engine has, and else perhaps. Two bits in `candidates` mean "in one of the two".

    def __init__(
        self,
        regions: Sequence[Region],
        flow: Dataflow,
        names: Iterable[_ParsedName],
        *,
        whole: bool,
    ) -> None:
        self._flow = flow
        self._whole = whole
        taken: set[int] = set()
        self._apart: set[int] = set()
        """Nodes of other layers that are outside of every region."""
        for name in names:
            taken |= name.nodes
            if not _INNER.search(name.use.name):
                self._apart |= name.nodes
        self._free = [at not in taken and at not in flow.fixed for at in range(len(flow.before))]
        self._open = sum(1 << i for i, region in enumerate(regions) if not region.closed)
        anchors = self._marks(self._anchors(region) for region in regions)
        self._floating = self._open & ~reduce(or_, anchors, 0)
        self._owner = self._between(anchors)
        self._allowed = self._bounds(regions)
        self._touching = self._borders(regions)

    def of(self, at: int) -> tuple[int, int, int]:
        """The regions of which the node is surely, surely one or another, perhaps a part."""
        if not self._free[at] or self._owner[at]:
            return self._owner[at], 0, 0
        allowed = self._allowed[at]
        touching = allowed & self._touching[at]
        candidates = touching | (allowed & self._floating)
        if not touching or not self._whole:
            return 0, 0, candidates or allowed
        is_shared = candidates & (candidates - 1)
        if is_shared:
            return 0, candidates, 0
        return candidates, 0, 0

    def _marks(self, nodes_of_regions: Iterable[Iterable[int]]) -> list[int]:
        """For each node the regions among whose nodes it is."""
        marks = [0] * len(self._free)
        for i, nodes in enumerate(nodes_of_regions):
            for at in nodes:
                marks[at] |= 1 << i
        return marks

    def _anchors(self, region: Region) -> Iterator[int]:
        """Nodes that are known to be in the region, whoever else names them."""
        yield from region.first
        yield from region.last
        for users in region.near:
            if len(users) == 1 and self._free[users[0]]:
                yield users[0]

    def _between(self, anchors: Sequence[int]) -> list[int]:
        """The one region that each node is in for certain: at an anchor, or on a way between."""
        flow = self._flow
        above = _spread(anchors, flow.before, flow.order)
        below = _spread(anchors, flow.after, reversed(flow.order))
        owner = []
        for at, own in enumerate(anchors):
            inside = own | (above[at] & below[at] & self._open)
            shortest = inside & -inside
            owner.append(shortest if self._free[at] else 0)
        return owner

    def _bounds(self, regions: Sequence[Region]) -> list[int]:
        """The regions that each node may be in: not behind their last node or another layer."""
        flow = self._flow
        ends = self._marks(region.last for region in regions)
        starts = self._marks(region.first for region in regions)
        outside = (
            _spread(ends, flow.before, flow.order),
            _spread(starts, flow.after, reversed(flow.order)),
            self._crossed(flow.before, flow.order),
            self._crossed(flow.after, reversed(flow.order)),
        )
        return [self._open & ~reduce(or_, bits) for bits in zip(*outside, strict=True)]

    def _crossed(self, before: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
        """The regions that each node is cut off from: another layer comes between."""
        # a (region 0) -> conv (a layer of its own) -> b: `reach` of b has bit 0, as b comes after
        # region 0, and so has `crossed`, as the engine left the region before it came to b
        reach = [0] * len(before)
        crossed = [0] * len(before)
        for at in order:
            for source in before[at]:
                own = self._owner[source]
                there = reach[source] | own
                reach[at] |= there
                crossed[at] |= crossed[source]
                if own or source in self._apart:
                    crossed[at] |= there & ~own
        return crossed

    def _borders(self, regions: Sequence[Region]) -> dict[int, int]:
        """The regions that border on each node without an owner, or on a chain of such nodes."""
        # q (region 0) -> a -> b -> out (region 1): a and b are one chain, which borders on 0b11
        chains: dict[int, int] = {}
        borders: dict[int, int] = {}
        for start, owner in enumerate(self._owner):
            if self._free[start] and not owner and start not in chains:
                borders[start] = self._follow(start, chains)
        for i, region in enumerate(regions):
            for users in region.near:
                # one of the users is in the region: which one matters only where they lie apart
                homes = {chains[at] for at in users if at in chains}
                if len(homes) == 1:
                    borders[homes.pop()] |= 1 << i
        return {at: borders[start] for at, start in chains.items()}

    def _follow(self, start: int, chains: dict[int, int]) -> int:
        """The regions beside the chain that begins there; `chains` has the start of each node's."""
        chains[start] = start
        members = [start]
        beside = 0
        for at in members:
            for other in (*self._flow.before[at], *self._flow.after[at]):
                beside |= self._owner[other]
                if self._free[other] and not self._owner[other] and other not in chains:
                    chains[other] = start
                    members.append(other)
        return beside


def _spread(
    marks: Sequence[int], before: Sequence[Sequence[int]], order: Iterable[int]
) -> list[int]:
    """For each node, the marks of every node that comes before it."""
    seen = [0] * len(marks)
    for at in order:
        for source in before[at]:
            seen[at] |= seen[source] | marks[source]
    return seen
