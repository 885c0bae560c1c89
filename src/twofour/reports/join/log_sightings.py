"""What one build log says of the layers of the model: its (Sparsity) lines, tactics and gaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from twofour.records.log import Build, SkippedTactic, SparsityKind, SparsityLine, TunedLayer
from twofour.reports.join.name_parts import REGION
from twofour.reports.join.node_index import NodeIndex
from twofour.reports.join.resolve import Resolved, resolve

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
        self.regions: dict[str, frozenset[int]] = {}
        """Layers that each Myelin region holds or may hold, by its name."""
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
            self._note_region(found, rows)
            self.touched.update(found.nodes, found.parts, found.region)
            self.together += [(tuned.name, found.nodes)] if len(found.nodes) > 1 else []
            for node in _of_one(found, rows):
                rank = _telling(tuned, is_product=node in found.nodes)
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
                self._note_region(found, rows)
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

    def _note_region(self, found: Resolved, rows: frozenset[int]) -> None:
        if REGION in found.name:
            known = self._engine.get(found.name, found)
            held = (*known.nodes, *known.parts, *known.region, *known.shared, *known.perhaps)
            self.regions[found.name] = rows.intersection(held)

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


def _telling(tuned: TunedLayer, *, is_product: bool) -> tuple[bool, bool, bool, bool]:
    """Sparse times before dense ones; the product and named kernels before a bias or activation."""
    named = any(tactic.kernel is not None for tactic in tuned.tactics)
    return tuned.best_sparse_ms is not None, is_product, named, tuned.best_dense_ms is not None
