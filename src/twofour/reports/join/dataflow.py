"""The edges of a graph: which node feeds which, into and out of the bodies of If, Loop and Scan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from twofour.records.export import GraphNode

_MAIN = ""


class Dataflow:
    """Neighbours of every node by index, the nodes in topological order, those of constants alone.

    A body reads what its If, Loop or Scan reads, and what nobody in it reads goes out of that node.
    Linear in nodes and edges.
    """

    def __init__(self, nodes: Sequence[GraphNode]) -> None:
        self.fixed = _fixed(nodes)
        """Nodes whose inputs are all constants: builders fold them."""
        self.before: list[tuple[int, ...]] = _before(nodes)
        after: list[list[int]] = [[] for _ in nodes]
        for at, given in enumerate(self.before):
            for source in given:
                after[source].append(at)
        self.after = [tuple(users) for users in after]
        self.order = _order(self.before, self.after)

    def beyond_constants(self, at: int) -> tuple[int, ...]:
        """The node itself; of one that is folded, those that use what becomes of it."""
        found: dict[int, None] = {}
        waiting, seen = [at], {at}
        while waiting:
            node = waiting.pop()
            if node not in self.fixed:
                found[node] = None
                continue
            fresh = [user for user in self.after[node] if user not in seen]
            seen.update(fresh)
            waiting += fresh
        return tuple(sorted(found))


def _fixed(nodes: Sequence[GraphNode]) -> frozenset[int]:
    found: set[int] = set()
    known: set[str] = set()
    for at, node in enumerate(nodes):
        given = [name for name in node.inputs if name]
        alone = all(name in known or name in node.constants for name in given)
        if node.op == "Constant" or (given and alone):
            found.add(at)
            known.update(node.outputs)
    return frozenset(found)


def _before(nodes: Sequence[GraphNode]) -> list[tuple[int, ...]]:
    """Nodes that each node waits for; the nodes around a body come before those in it."""
    ways = [_way(node) for node in nodes]
    labels = {node.label: at for at, node in enumerate(nodes)}
    owners = {way: labels.get(way.rpartition(".")[0]) for way in dict.fromkeys(ways) if way}
    makers: dict[str, dict[str, int]] = defaultdict(dict)
    for at, node in enumerate(nodes):
        makers[ways[at]].update(dict.fromkeys(filter(None, node.outputs), at))
    found: list[dict[int, None]] = []
    unread = {at: None for at, way in enumerate(ways) if owners.get(way) is not None}
    for at, node in enumerate(nodes):
        given: dict[int, None] = {}
        for name in node.inputs:
            if not name or name in node.constants:
                continue
            maker = _maker(name, ways[at], (makers, owners, ways))
            if maker is not None:
                given[maker] = None
                unread.pop(maker, None) if ways[maker] == ways[at] else None
            elif (owner := owners.get(ways[at])) is not None and owner < at:
                given.update(dict.fromkeys(found[owner]))
        given.pop(at, None)
        found.append(given)
    for at in unread:
        owner = owners[ways[at]]
        if owner is not None and owner != at:
            found[owner][at] = None
    return [tuple(given) for given in found]


_Scopes = tuple[dict[str, dict[str, int]], dict[str, "int | None"], list[str]]


def _maker(name: str, way: str, scopes: _Scopes) -> int | None:
    """The node that makes a tensor, looked for from the inside out."""
    makers, owners, ways = scopes
    while True:
        at = makers[way].get(name) if way in makers else None
        if at is not None or way == _MAIN:
            return at
        owner = owners.get(way)
        outer = _MAIN if owner is None else ways[owner]
        if len(outer) >= len(way):
            return None
        way = outer


def _way(node: GraphNode) -> str:
    """`If:3.then_branch` of the label `If:3.then_branch/conv`; "" in the main graph."""
    inside = node.label != node.name and node.label.endswith("/" + node.name)
    return node.label[: -len(node.name) - 1] if inside else _MAIN


def _order(before: Sequence[tuple[int, ...]], after: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Every node after those it waits for; what a circle holds up comes last, as it stands."""
    missing = [len(given) for given in before]
    ready = [at for at, count in enumerate(missing) if count == 0]
    for at in ready:
        for user in after[at]:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return (*ready, *(at for at, count in enumerate(missing) if count > 0))
