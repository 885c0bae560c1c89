"""Which nodes of the model each engine layer holds, those inside of Myelin regions included."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
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
from twofour.records.export import GraphNode

COPY = re.compile(
    r"Reformatting CopyNode for (?:(?:Input|Output) Tensor \d+ to )?"
    r"|Forced Cast ITensor (?:.* - )?"
)
"""Layers that only copy or cast what goes into or out of the layers named after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNodes:
    """The nodes that one name of an engine or log stands for, as indices into the model's."""

    name: str
    nodes: tuple[int, ...] = ()
    """Named one by one, in the order of the graph."""
    parts: tuple[int, ...] = ()
    """Nodes of which it is a further layer, such as the bias of a Gemm."""
    region: tuple[int, ...] = ()
    """Inside a Myelin region of the name, and named by no other layer."""
    shared: tuple[int, ...] = ()
    """Inside this Myelin region or another one: their names do not say which."""
    perhaps: tuple[int, ...] = ()
    """Inside this Myelin region, or in no layer at all: its name does not say."""
    around: tuple[int, ...] = ()
    """Nodes that it only brings data to or from."""
    matched: bool = False
    """Whether it leads to a node, a constant or a layer that the builder always adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineName:
    """A name to look up, with what layer information states of it."""

    name: str
    sources: tuple[str, ...] = ()
    """The source nodes in its Metadata."""
    is_product: bool = True
    """False for a layer that can hold no product, so that it may lead nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What the name of one region says of it; indices of nodes."""

    first: tuple[int, ...] = ()
    """Nodes named at its first end."""
    last: tuple[int, ...] = ()
    near: tuple[tuple[int, ...], ...] = field(default=(), hash=False)
    """Users of each constant that is named at an end, and nodes beside a named layer."""
    closed: bool = False
    """It has no dots in its name: it holds `first` and nothing else."""


@dataclass(slots=True)
class RegionNodes:
    """The nodes of one region."""

    surely: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    """In this region or in another one."""
    perhaps: list[int] = field(default_factory=list)
    """In this region, or in no layer of the engine at all."""


@dataclass(slots=True)
class _ParsedName:
    """One name while its regions wait for what the other names claim."""

    use: EngineName
    nodes: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    around: set[int] = field(default_factory=set)
    regions: list[Region] = field(default_factory=list)
    held: list[RegionNodes] = field(default_factory=list)
    matched: bool = False

    def add(self, found: NamedNodes) -> None:
        """Add what one part of the name leads to."""
        (self.parts if found.is_part else self.nodes).update(found.nodes)
        self.around.update(found.around)
        self.matched |= found.anything

    def in_regions(self, kind: str) -> tuple[int, ...]:
        """Nodes of one kind in all the regions of the name."""
        return tuple(sorted({at for held in self.held for at in getattr(held, kind)}))


_INNER = re.compile(rf"^__my|{MYELIN_SUFFIX.pattern}")
"""A kernel that Myelin lists apart from the region it belongs to."""
_UNNAMED = re.compile(r"\(Unnamed Layer\* (\d{1,9})\) \[([^\[\]]{1,80})\]")
_OPS_OF_KIND: Mapping[str, frozenset[str]] = {
    "Convolution": frozenset({"Conv"}),
    "Deconvolution": frozenset({"ConvTranspose"}),
    "Fully Connected": frozenset({"Gemm", "MatMul"}),
    "Matrix Multiply": frozenset({"Gemm", "MatMul"}),
}


def index_nodes(
    nodes: Sequence[GraphNode],
    modules: Mapping[str, int] | None,
    names: Iterable[str],
    stated: StatedNames | None = None,
) -> NodeIndex:
    """An index that knows the unnamed layers among all the names that an engine and its logs use.

    `modules` has the node of each module path, for names that Torch-TensorRT made from paths;
    `stated` what the logs say of names.
    """
    index = NodeIndex(nodes, modules, stated)
    names = list(dict.fromkeys(names))
    # [Convolution] -> {3, 7}: the numbers count all layers, so only their order says which is which
    numbers: dict[str, set[int]] = {}
    for match in (match for name in names for match in _UNNAMED.finditer(name)):
        numbers.setdefault(match[2], set()).add(int(match[1]))
    if not numbers:
        return index
    parts = (part for name in names for part in split_name(name, index.known))
    named = {at for part in parts if not part.is_region for at in index.find(part.text).nodes}
    for kind, seen in numbers.items():
        ops = _OPS_OF_KIND.get(kind, frozenset())
        free = [i for i, node in enumerate(nodes) if node.op in ops and i not in named]
        if len(free) == len(seen):
            for number, at in zip(sorted(seen), free, strict=True):
                index.settle(f"(Unnamed Layer* {number}) [{kind}]", (at,))
    return index


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
            region=name.in_regions("surely"),
            shared=name.in_regions("shared"),
            perhaps=name.in_regions("perhaps"),
            around=tuple(sorted(name.around)),
            matched=name.matched,
        )
        for name in parsed
    )


def _parse(use: EngineName, index: NodeIndex) -> _ParsedName:
    # The name `/fc/Gemm + /act/Relu` holds two nodes. `Reformatting CopyNode for Input Tensor 0 to
    # /fc/Gemm` holds none: it only brings data to one. `{ForeignNode[/q/MatMul.../out/Add]}` names
    # the two ends of a region; what is between them is known once all other names are read.
    name = use.name if use.name in index.known.names else without_profile(use.name)
    copies = COPY.match(name)
    if copies is None:
        return _parse_layer(use, name, index)
    near = _parse_layer(use, name[copies.end() :], index)
    return _ParsedName(use=use, around=near.nodes | near.parts | near.around, matched=True)


def _parse_layer(use: EngineName, name: str, index: NodeIndex) -> _ParsedName:
    parsed = _ParsedName(use=use)
    stated = None if use.sources else index.stated(name)
    if stated is not None:
        parsed.add(stated)
        return parsed
    for part in split_name(name, index.known):
        if not part.is_region:
            parsed.add(index.find(part.text))
        elif (region := _region(part, index)) is not None:
            parsed.matched = True
            parsed.regions.append(region)
    for source in use.sources:
        found = index.find(source)
        parsed.matched |= found.anything
        # of several nodes of one name, the layer's own name says which
        names = {index.nodes[at].name for at in found.nodes}
        if all(index.nodes[at].name not in names for at in parsed.nodes):
            parsed.nodes.update(found.nodes)
    if use.sources and parsed.nodes:
        parsed.regions = []  # Metadata lists a region's nodes, so its ends say nothing more
    return parsed


def _region(part: NamePart, index: NodeIndex) -> Region | None:
    """What the ends of a name say; None where neither end is of this model or of the builder."""
    first, near, known = _end(part.first or (), index)
    last, near_last, known_last = _end(part.last, index)
    if not known and not known_last:
        return None
    alone = not part.last
    return Region(
        first=first, last=first if alone else last, near=(*near, *near_last), closed=alone
    )


def _end(
    texts: Iterable[str], index: NodeIndex
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], bool]:
    """Nodes at one end of a region, users of the constants there, and whether any name is known.

    A further layer of a node, or what moves data to it, bounds nothing: the node may lie outside.
    """
    nodes: dict[int, None] = {}
    near: list[tuple[int, ...]] = []
    known = False
    for text in texts:
        found = index.find(text)
        users = index.users(text) if not found.nodes and not found.around else ()
        known |= found.anything or bool(users)
        for at in found.nodes:
            if found.is_part or at in index.flow.fixed:
                near.append(index.flow.beyond_constants(at))
            else:
                nodes[at] = None
        near += [group for group in (found.around, users) if group]
    return tuple(nodes), tuple(near), known


def _fill_regions(parsed: Sequence[_ParsedName], index: NodeIndex, *, whole: bool) -> None:
    """Share out the nodes that no layer names among the regions.

    Linear in nodes, edges and regions. A region of two names is one region; shorter ones come
    first, as a node on the way through two of them is in the shorter.
    """
    waiting = [(name, region) for name in parsed for region in name.regions]
    if not waiting:
        return
    place = {at: i for i, at in enumerate(index.flow.order)}

    def length(region: Region) -> int:
        """Places between its ends; regions without two ends come last."""
        if not region.first or not region.last:
            return len(place) if region.first or region.last else 2 * len(place)
        return max(place[at] for at in region.last) - min(place[at] for at in region.first)

    regions = sorted(dict.fromkeys(region for _, region in waiting), key=length)
    others = _OtherLayers(
        taken={at for name in parsed for at in name.nodes},
        apart={at for name in parsed if not _INNER.search(name.use.name) for at in name.nodes},
        whole=whole and all(name.matched or not name.use.is_product for name in parsed),
    )
    owners = _Owners(regions, index.flow, others)
    found = {region: RegionNodes() for region in regions}
    for at in range(len(index.flow.before)):
        for bits, kind in zip(owners.of(at), RegionNodes.__slots__, strict=True):
            for bit, region in enumerate(regions):
                if bits >> bit & 1:
                    getattr(found[region], kind).append(at)
    for name, region in waiting:
        name.held.append(found[region])


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherLayers:
    """What the other layers of an engine hold."""

    taken: Set[int]
    """Nodes that other layers name."""
    apart: Set[int]
    """Those of them that are outside of every region."""
    whole: bool
    """The layers are all that the engine has."""


class _Owners:
    """For each node the regions that hold it, share it or may hold it: bit i is region i."""

    # In q -> scale -> softmax -> out with the regions 0 = {q...softmax} and 1 = {out...X}, where X
    # is no node of the model: q and softmax are anchors of region 0 (0b01), and scale, on the way
    # between them, is in it for certain. out is the anchor of region 1 (0b10). A node after out
    # that no other layer names touches region 1 alone, so it is in region 1 if the layers are all
    # that the engine has, and else perhaps. Two bits in `candidates` mean "in one of the two".

    def __init__(self, regions: Sequence[Region], flow: Dataflow, others: _OtherLayers) -> None:
        self._flow = flow
        self._others = others
        nodes = range(len(flow.before))
        self._free = [at not in others.taken and at not in flow.fixed for at in nodes]
        anchors = self._anchors(regions)
        self._open = sum(1 << i for i, region in enumerate(regions) if not region.closed)
        self._floating = self._open & ~reduce(or_, anchors, 0)
        self._owner = self._between(anchors)
        self._allowed = self._bounds(regions)
        self._touching = self._components(regions)

    def of(self, at: int) -> tuple[int, int, int]:
        """The regions of which the node is surely, surely one or another, perhaps a part."""
        if not self._free[at] or self._owner[at]:
            return self._owner[at], 0, 0
        allowed = self._allowed[at]
        touching = allowed & self._touching[at]
        candidates = touching | (allowed & self._floating)
        if not touching or not self._others.whole:
            return 0, 0, candidates or allowed
        return (0, candidates, 0) if candidates & (candidates - 1) else (candidates, 0, 0)

    def _anchors(self, regions: Sequence[Region]) -> list[int]:
        """The regions that each node is known to be in, whoever else names it."""
        found = [0] * len(self._free)
        for i, region in enumerate(regions):
            alone = (users[0] for users in region.near if len(users) == 1)
            for at in (*region.first, *region.last, *(at for at in alone if self._free[at])):
                found[at] |= 1 << i
        return found

    def _between(self, anchors: Sequence[int]) -> list[int]:
        """The one region that each node is in for certain: at an anchor, or on a way between."""
        flow = self._flow
        above = _spread(anchors, flow.before, flow.order)
        below = _spread(anchors, flow.after, reversed(flow.order))
        inside = (
            own | (a & b & self._open) for own, a, b in zip(anchors, above, below, strict=True)
        )
        return [bits & -bits if free else 0 for bits, free in zip(inside, self._free, strict=True)]

    def _bounds(self, regions: Sequence[Region]) -> list[int]:
        """The regions that each node may be in: not behind their last node or another layer."""
        flow = self._flow
        ends, starts = [0] * len(self._free), [0] * len(self._free)
        for i, region in enumerate(regions):
            for marks, nodes in ((ends, region.last), (starts, region.first)):
                for at in nodes:
                    marks[at] |= 1 << i
        behind = _spread(ends, flow.before, flow.order)
        ahead = _spread(starts, flow.after, reversed(flow.order))
        past = self._crossed(flow.before, flow.order)
        yet = self._crossed(flow.after, reversed(flow.order))
        out = (b | a | p | y for b, a, p, y in zip(behind, ahead, past, yet, strict=True))
        return [self._open & ~bits for bits in out]

    def _crossed(self, before: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
        """The regions that each node is cut off from: another layer comes between."""
        # a (region 0) -> conv (a layer of its own) -> b: `reach` of b has bit 0, as b comes after
        # region 0, and so has `crossed`, as the engine left the region before it came to b
        reach, crossed = [0] * len(before), [0] * len(before)
        for at in order:
            for source in before[at]:
                own = self._owner[source]
                there = reach[source] | own
                reach[at] |= there
                crossed[at] |= crossed[source]
                if own or source in self._others.apart:
                    crossed[at] |= there & ~own
        return crossed

    def _components(self, regions: Sequence[Region]) -> dict[int, int]:
        """The regions that border on each node without an owner, or on a chain of such nodes."""
        piece: dict[int, int] = {}
        touching: dict[int, int] = {}
        for start in range(len(self._owner)):
            if start in piece or self._owner[start] or not self._free[start]:
                continue
            piece[start] = start
            members, bits = [start], 0
            for at in members:
                for other in (*self._flow.before[at], *self._flow.after[at]):
                    bits |= self._owner[other]
                    if other not in piece and self._free[other] and not self._owner[other]:
                        piece[other] = start
                        members.append(other)
            touching[start] = bits
        for i, region in enumerate(regions):
            for users in region.near:
                # one of the users is in the region: which one matters only where they lie apart
                homes = {piece[at] for at in users if at in piece}
                if len(homes) == 1:
                    touching[homes.pop()] |= 1 << i
        return {at: touching[start] for at, start in piece.items()}


def _spread(
    marks: Sequence[int], before: Sequence[Sequence[int]], order: Iterable[int]
) -> list[int]:
    """For each node, the marks of every node that comes before it."""
    found = [0] * len(marks)
    for at in order:
        for source in before[at]:
            found[at] |= found[source] | marks[source]
    return found
