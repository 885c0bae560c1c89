"""Rows of a log, layer information and profile, and the nodes they are of."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

from twofour.eligibility.names import REGION
from twofour.eligibility.nodes import NodeIndex
from twofour.eligibility.resolve import NameInUse, Resolved, resolve
from twofour.records.eligibility import Verdict
from twofour.records.export import GraphNode, qualified_op
from twofour.records.log import (
    Build,
    EngineLayer,
    Fusion,
    LogMessage,
    Profile,
    SkippedTactic,
    SparsityKind,
    SparsityLine,
    Tactic,
    TunedLayer,
)

_Key = tuple[str, str]


def pair(
    verdicts: Sequence[Verdict], nodes: Sequence[GraphNode]
) -> tuple[tuple[GraphNode, ...], tuple[int, ...]]:
    """The nodes, with one made up for each verdict that none fits, and the index of each verdict's.

    By name and op. Nodes of one name are told apart by their labels; where those are no help they
    go in the order of the graph, as both lists come from one walk through it.
    """
    by_name: dict[_Key, list[int]] = defaultdict(list)
    by_label: dict[_Key, list[int]] = defaultdict(list)
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        by_name[node.name, _op(node)].append(index)
        by_label[node.label, _op(node)].append(index)
    complete = list(nodes)
    taken: set[int] = set()
    found = []
    for verdict in verdicts:
        named = by_name[verdict.node or verdict.layer, verdict.op]
        labelled = by_label[verdict.layer, verdict.op] if len(named) > 1 else []
        index = _first_free(labelled, taken)
        if index < 0:
            index = _first_free(named, taken)
        if index < 0:
            index = len(complete)
            name = verdict.layer if verdict.node is None else verdict.node
            complete.append(
                GraphNode(
                    name=name, label=verdict.layer, op=verdict.op, domain="", inputs=(), outputs=()
                )
            )
        taken.add(index)
        found.append(index)
    return tuple(complete), tuple(found)


def _first_free(waiting: list[int], taken: set[int]) -> int:
    """The index that is next in the graph, -1 where none is left."""
    while waiting and waiting[-1] in taken:
        waiting.pop()
    return waiting.pop() if waiting else -1


def _op(node: GraphNode) -> str:
    """As Weight.op has it."""
    return qualified_op(node.op, node.domain)


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mention:
    """A layer on a (Sparsity) line, and the name that it has there."""

    line: SparsityLine
    name: str


class LogSightings:
    """What a log says, by the nodes of the layers it names; `rows` are those with a verdict.

    `engine` are the layers of the build's engine, whose regions have neighbours.
    """

    def __init__(
        self,
        build: Build | None,
        index: NodeIndex,
        rows: frozenset[int],
        engine: Sequence[Resolved] = (),
    ) -> None:
        self.mentions: dict[tuple[SparsityKind, int], Mention] = {}
        self.tuned: dict[int, TunedLayer] = {}
        self.skipped: dict[int, list[SkippedTactic]] = defaultdict(list)
        self.unmatched: tuple[str, ...] = ()
        self.touched: set[int] = set()
        self.unresolved: tuple[str, ...] = ()
        """Names listed as eligible that may mean any layer of the model."""
        self.settled: set[int] = set()
        """Lines whose printed count is that of the layers of the model that they name."""
        self.together: list[tuple[str, tuple[int, ...]]] = []
        """Names on the (Sparsity) lines, and of tuned layers, that hold several nodes."""
        self._engine = {found.name: found for found in engine}
        if build is None:
            return
        self._read_lines(build, index, rows)
        self._read_tactics(build, index, rows)
        skipped = [s for s in build.skipped_tactics if s.layer is not None]
        for tactic, found in _each(skipped, (s.layer or "" for s in skipped), index):
            for node in _of_one(found, rows):
                self.skipped[node].append(tactic)

    def _read_tactics(self, build: Build, index: NodeIndex, rows: frozenset[int]) -> None:
        """Of several layers of one node that were timed, the one that tells most."""
        best: dict[int, tuple[bool, bool, bool, bool]] = {}
        for tuned, found in _each(build.layers, (x.name for x in build.layers), index):
            self.touched.update(found.nodes, found.parts, found.region)
            self.together += [(tuned.name, found.nodes)] if len(found.nodes) > 1 else []
            for node in _of_one(found, rows):
                rank = _rank(tuned, is_product=node in found.nodes)
                if node not in best or rank >= best[node]:
                    best[node] = rank
                    self.tuned[node] = tuned

    def _read_lines(self, build: Build, index: NodeIndex, rows: frozenset[int]) -> None:
        unmatched: list[str] = []
        unresolved: list[str] = []
        for line in build.sparsity_lines:
            layers = 0
            for name, listed in _each(line.names or (), line.names or (), index):
                found = self._engine.get(name, listed)
                self.touched.update(found.nodes, found.region)
                self.together += [(name, found.nodes)] if len(found.nodes) > 1 else []
                # a region on a line says which of its layers is meant only where it has one
                inside = rows.intersection((*found.region, *found.shared, *found.perhaps))
                meant = (*found.nodes, *(inside if len(inside) == 1 else ()))
                layers += max(1, len(rows.intersection(meant)))
                self._mention(Mention(line=line, name=name), meant)
                if not found.matched:
                    unmatched.append(name)
                if not found.matched or (len(inside) > 1 and rows.isdisjoint(meant)):
                    unresolved += [name] if line.kind is SparsityKind.ELIGIBLE else []
            if line.names and line.printed_count == layers:
                self.settled.add(line.line)
        self.unmatched = tuple(dict.fromkeys(unmatched))
        self.unresolved = tuple(dict.fromkeys(unresolved))

    def _mention(self, mention: Mention, nodes: Iterable[int]) -> None:
        kind = mention.line.kind
        if kind is SparsityKind.CHOSEN and mention.line.discarded:
            return
        for node in nodes:
            self.mentions.setdefault((kind, node), mention)


def _of_one(found: Resolved, rows: frozenset[int]) -> frozenset[int]:
    """Layers that the tactics of a name are of; a region of several products tells of none."""
    meant = rows.intersection((*found.nodes, *found.parts))
    return frozenset() if len(meant) > 1 and REGION in found.name else meant


def _each(
    items: Sequence[_T], names: Iterable[str], index: NodeIndex
) -> Iterator[tuple[_T, Resolved]]:
    return zip(items, resolve(names, index), strict=True)


def _rank(tuned: TunedLayer, *, is_product: bool) -> tuple[bool, bool, bool, bool]:
    """Sparse times before dense ones; the product and named kernels before a bias or activation."""
    named = any(tactic.kernel is not None for tactic in tuned.tactics)
    return tuned.best_sparse_ms is not None, is_product, named, tuned.best_dense_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One row of a profile: its time and the layers of the model in it (indices of nodes)."""

    name: str
    ms: float
    nodes: tuple[int, ...]
    matched: bool = True
    """It leads to the model, or is the builder's own; else nobody knows what it computes."""
    sparse: bool | None = None
    """Whether its kernel is sparse; None where the engine does not name it."""


def timed_rows(
    profile: Profile | None, engine: Iterable[EngineLayer], index: NodeIndex
) -> tuple[Timed, ...]:
    """The rows with a time; `engine` are the layers of the engine that was profiled."""
    if profile is None:
        return ()
    known = {layer.name: layer for layer in engine}
    rows = [
        (row.name, ms)
        for row in profile.layers
        if (ms := row.average_ms) is not None and isfinite(ms)
    ]
    uses = [
        NameInUse(name=name, sources=known[name].onnx_nodes if name in known else ())
        for name, _ in rows
    ]
    return tuple(
        Timed(
            name=name,
            ms=ms,
            nodes=(*found.nodes, *found.region),
            matched=found.matched,
            sparse=known[name].sparse if name in known else None,
        )
        for (name, ms), found in zip(rows, resolve(uses, index, whole=True), strict=True)
    )


_LONGEST = 300
"""Characters that are quoted of one line."""
_HEAD = re.compile(r".{0,200}?tactics:")
"""What a list begins with."""
_CUT = " ..."
"""Between the pieces of a long line: a search finds each of them."""


def line_source(file: str, line: SparsityLine, name: str | None = None) -> str:
    """A (Sparsity) line, or the row of it that names a layer: the pieces that say so."""
    rows = line.raw.split("\n")
    at, place = next(
        ((at, place) for at, row in enumerate(rows) if (place := _place(row, name)) >= 0), (0, 0)
    )
    return _cited(file, line.line + at, _pieces(rows[at], place, len(name or "")))


def mention_source(file: str, mention: Mention) -> str:
    """The line that names a layer."""
    return line_source(file, mention.line, mention.name)


def quoted_source(file: str, said: Tactic | SkippedTactic | Fusion) -> str:
    """The line of a tactic's fastest time, of why it has none, of a fusion."""
    return _cited(file, said.line, (said.raw or "")[:_LONGEST])


def error_source(file: str, error: LogMessage) -> str:
    """The line of an error, without what follows it on the next."""
    return _cited(file, error.line, error.raw.partition("\n")[0][:_LONGEST])


def _cited(file: str, line: int, words: str) -> str:
    return f"{file}:{line}: {words}" if words else f"{file}:{line}"


def _place(row: str, name: str | None) -> int:
    """Where the name is a whole entry of the row; -1 where it is none."""
    if name is None:
        return 0
    found = re.search(rf"(?:^|[:,|])\s*({re.escape(name)})\s*(?:$|[,\[|])", row)
    return -1 if found is None else found.start(1)


def _pieces(row: str, place: int, length: int) -> str:
    """A long row's beginning, as far as its list, and the entry there; each piece to the letter."""
    if len(row) <= _LONGEST:
        return row
    head = _HEAD.match(row)
    if not length or head is None:
        return row[place : place + (length or _LONGEST)][:_LONGEST] + _CUT
    entry = row[place : place + length][:_LONGEST]
    between = "" if place + length == len(row) else _CUT
    if row[head.end() : place].strip(" ,"):
        return f"{head[0]}{_CUT} {entry}{between}"
    return row[: place + length][: 2 * _LONGEST] + between
