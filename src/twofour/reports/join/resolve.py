"""Engine layers -> the nodes of the model they hold; what leads to no node is said, not dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from twofour.records import GraphNode
from twofour.reports.join.name_parts import Part, split_name
from twofour.reports.join.node_index import Found, NodeIndex
from twofour.reports.join.unnamed import number_unnamed

COPY = re.compile(
    r"Reformatting CopyNode for (?:(?:Input|Output) Tensor \d+ to )?"
    r"|Forced Cast ITensor (?:.* - )?"
)
"""Layers that only copy or cast what goes into or out of the layers named after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What one name of an engine or log stands for; indices into the nodes of the model."""

    name: str
    nodes: tuple[int, ...] = ()
    """Named one by one, in the order of the graph."""
    region: tuple[int, ...] = ()
    """Inside a Myelin region of the name: between its ends, and named by no other layer."""
    around: tuple[int, ...] = ()
    """Nodes that it only brings data to or from."""
    matched: bool = False
    """It leads to a node, a constant or a layer that the builder always adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameInUse:
    """A name to resolve, with the source nodes its Metadata states."""

    name: str
    sources: tuple[str, ...] = ()


@dataclass(slots=True)
class _Reading:
    """One name while its regions wait for what the other names claim."""

    use: NameInUse
    nodes: set[int] = field(default_factory=set)
    around: set[int] = field(default_factory=set)
    spans: list[tuple[int, int]] = field(default_factory=list)
    region: list[int] = field(default_factory=list)
    matched: bool = False


def index_nodes(
    nodes: Sequence[GraphNode], modules: Mapping[str, int] | None, names: Iterable[str]
) -> NodeIndex:
    """An index that knows the unnamed layers among all the names that an engine and its logs use.

    `modules` has the node of each module path, for names that Torch-TensorRT made from paths.
    """
    index = NodeIndex(nodes, modules)
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


def resolve(names: Iterable[str | NameInUse], index: NodeIndex) -> tuple[Resolved, ...]:
    """The nodes of every layer of one engine, in the order given.

    A region `{ForeignNode[a...b]}` holds the nodes from a to b in the order of the graph that no
    other layer names; where regions overlap, a node goes to the shortest of them. Linear in names
    and nodes.
    """
    uses = [use if isinstance(use, NameInUse) else NameInUse(name=use) for use in names]
    readings = [_read(use, index) for use in uses]
    _fill_regions(readings, len(index.nodes))
    return tuple(
        Resolved(
            name=reading.use.name,
            nodes=tuple(sorted(reading.nodes)),
            region=tuple(sorted(reading.region)),
            around=tuple(sorted(reading.around)),
            matched=reading.matched,
        )
        for reading in readings
    )


def _read(use: NameInUse, index: NodeIndex) -> _Reading:
    copies = COPY.match(use.name)
    if copies is None:
        return _read_layer(use, use.name, index)
    near = _read_layer(use, use.name[copies.end() :], index)
    return _Reading(use=use, around=near.nodes | near.around, matched=True)


def _read_layer(use: NameInUse, name: str, index: NodeIndex) -> _Reading:
    reading = _Reading(use=use)
    for part in split_name(name, index.known):
        if part.is_region:
            span = _span(part, index)
            reading.matched |= span is not None
            reading.spans += [] if span is None else [span]
            continue
        found = _of(part, index)
        reading.nodes.update(found.nodes)
        reading.around.update(found.around)
        reading.matched |= found.anything
    for source in sorted(use.sources, key=index.tells_the_way):
        _add_source(reading, source, index)
    if use.sources and reading.nodes:
        reading.spans = []  # Metadata lists a region's nodes, so its ends say nothing more
    return reading


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


def _span(part: Part, index: NodeIndex) -> tuple[int, int] | None:
    """First and last node of a region; an end without a place in the graph leaves it open."""
    first = [at for text in part.first or () if (at := index.place(text)) is not None]
    last = [at for text in part.last if (at := index.place(text)) is not None]
    if not part.last:
        return (min(first), max(first)) if first else None
    if not first and not last:
        return None
    start = min(first) if first else 0
    end = max(last) if last else len(index.nodes) - 1
    return (start, end) if start <= end else (end, start)


def _fill_regions(readings: Sequence[_Reading], nodes: int) -> None:
    """Give each node that no layer names to the shortest region around it."""
    waiting = [(end - start, start, end, r) for r in readings for start, end in r.spans]
    if not waiting:
        return
    following = list(range(nodes + 1))
    for reading in readings:
        for at in reading.nodes:
            following[at] = at + 1
    for _, start, end, reading in sorted(waiting, key=lambda item: item[:3]):
        at = _free(following, start)
        while at <= end:
            reading.region.append(at)
            following[at] = at + 1
            at = _free(following, at)


def _free(following: list[int], at: int) -> int:
    """The first node from here on that nobody has; halves the way for the next who asks."""
    while following[at] != at:
        following[at] = following[following[at]]
        at = following[at]
    return at
