"""Engine layers -> the nodes of the model they hold; what leads to no node is said, not dropped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from twofour.eligibility.names import Part, number_unnamed, split_name
from twofour.eligibility.nodes import MYELIN_SUFFIX, Found, NodeIndex, StatedNames
from twofour.eligibility.regions import Held, Neighbours, Region, TensorEnds, TensorLinks, fill
from twofour.logs.names import without_profile
from twofour.records.export import GraphNode

COPY = re.compile(
    r"Reformatting CopyNode for (?:(?:Input|Output) Tensor \d+ to )?"
    r"|Forced Cast ITensor (?:.* - )?"
)
"""Layers that only copy or cast what goes into or out of the layers named after it."""


_MOST_NAMES = 64
"""Engine layers that one region is told of, the first: an engine has no more of the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What one name of an engine or log stands for; indices into the nodes of the model."""

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
    """It leads to a node, a constant or a layer that the builder always adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameInUse:
    """A name to resolve, with what layer information states of it."""

    name: str
    sources: tuple[str, ...] = ()
    """The source nodes in its Metadata."""
    inputs: tuple[str, ...] | None = None
    outputs: tuple[str, ...] | None = None
    is_product: bool = True
    """False for a layer that can hold no product, so that it may lead nowhere."""


@dataclass(slots=True)
class _Reading:
    """One name while its regions wait for what the other names claim."""

    use: NameInUse
    nodes: set[int] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)
    around: set[int] = field(default_factory=set)
    regions: list[Region] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    matched: bool = False

    def kept(self, kind: str) -> tuple[int, ...]:
        """Nodes of one kind in all the regions of the name."""
        return tuple(sorted({at for held in self.held for at in getattr(held, kind)}))


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
    if any("(Unnamed Layer*" in name for name in names):
        named = {
            at
            for name in names
            for p in split_name(name, index.known)
            for at in _of(p, index).nodes
        }
        index.number_unnamed(number_unnamed(names, nodes, named))
    return index


def resolve(
    names: Iterable[str | NameInUse], index: NodeIndex, *, whole: bool = False
) -> tuple[Resolved, ...]:
    """The nodes of every layer of one engine, in the order given.

    What a region `{ForeignNode[a...b]}` holds is in regions.py. `whole` says that the names are
    all layers of an engine: then what none of them names is in a region, if there is one for it.
    Linear in names and nodes.
    """
    uses = [use if isinstance(use, NameInUse) else NameInUse(name=use) for use in names]
    readings = [_read(use, index) for use in uses]
    _fill_regions(readings, index, whole=whole)
    return tuple(
        Resolved(
            name=reading.use.name,
            nodes=tuple(sorted(reading.nodes)),
            parts=tuple(sorted(reading.parts - reading.nodes)),
            region=reading.kept("surely"),
            shared=reading.kept("shared"),
            perhaps=reading.kept("perhaps"),
            around=tuple(sorted(reading.around)),
            matched=reading.matched,
        )
        for reading in readings
    )


def _read(use: NameInUse, index: NodeIndex) -> _Reading:
    name = use.name if use.name in index.known.names else without_profile(use.name)
    copies = COPY.match(name)
    if copies is None:
        return _read_layer(use, name, index)
    near = _read_layer(use, name[copies.end() :], index)
    return _Reading(use=use, around=near.nodes | near.parts | near.around, matched=True)


def _read_layer(use: NameInUse, name: str, index: NodeIndex) -> _Reading:
    reading = _Reading(use=use)
    stated = None if use.sources else index.stated(name)
    if stated is not None:
        _add(reading, stated)
        return reading
    for part in split_name(name, index.known):
        if part.is_region:
            region = _region(part, index)
            reading.matched |= region is not None
            reading.regions += [] if region is None else [region]
        else:
            _add(reading, _of(part, index))
    for source in sorted(use.sources, key=index.tells_the_way):
        _add_source(reading, source, index)
    if use.sources and reading.nodes:
        reading.regions = []  # Metadata lists a region's nodes, so its ends say nothing more
    return reading


def _add(reading: _Reading, found: Found) -> None:
    (reading.parts if found.is_part else reading.nodes).update(found.nodes)
    reading.around.update(found.around)
    reading.matched |= found.anything


def _add_source(reading: _Reading, source: str, index: NodeIndex) -> None:
    """Of several nodes of one name, the way out of subgraphs tells which; else the layer's name."""
    found = index.find(source)
    reading.matched |= found.anything
    names = {index.nodes[at].name for at in found.nodes}
    others = {at for at in reading.nodes if index.nodes[at].name in names}
    if index.tells_the_way(source):
        reading.nodes -= others
    elif others:
        return
    reading.nodes.update(found.nodes)


def _of(part: Part, index: NodeIndex) -> Found:
    return Found() if part.is_region else index.find(part.text)


def _region(part: Part, index: NodeIndex) -> Region | None:
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


def _fill_regions(readings: Sequence[_Reading], index: NodeIndex, *, whole: bool) -> None:
    """Share out the nodes that no layer names among the regions."""
    waiting = [reading for reading in readings if reading.regions]
    if not waiting:
        return
    taken = {at for reading in readings for at in reading.nodes}
    apart = {at for reading in readings if not _inside(reading) for at in reading.nodes}
    complete = whole and all(r.matched or not r.use.is_product for r in readings)
    tensors = [(r, TensorEnds(r.use.inputs, r.use.outputs)) for r in readings]
    links = TensorLinks(
        (ends for r, ends in tensors if COPY.match(r.use.name)),
        (ends for _, ends in tensors if ends.inputs == ()),
        index.nodes,
    )
    places: dict[Region, int] = {}
    owners: list[tuple[_Reading, Region]] = []
    for reading in waiting:
        for region in reading.regions:
            ends = TensorEnds(reading.use.inputs, reading.use.outputs)
            bounded = region if region.closed else links.bounded(region, ends, index.flow, apart)
            places.setdefault(bounded, len(places))
            owners.append((reading, bounded))
    others = Neighbours(taken=taken, apart=apart, whole=complete)
    found = fill(tuple(places), index.flow, others)
    named: Counter[int] = Counter()
    for reading, region in owners:
        place = places[region]
        named[place] += 1
        if named[place] <= _MOST_NAMES:
            reading.held.append(found[place])


def _inside(reading: _Reading) -> bool:
    """Whether a layer is a kernel that Myelin lists apart from the region it belongs to."""
    name = reading.use.name
    return name.startswith("__my") or MYELIN_SUFFIX.search(name) is not None
