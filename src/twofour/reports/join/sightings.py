"""Where each layer of the model is seen: in the engine, on the (Sparsity) lines, in the tactics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from twofour.log_records import (
    Build,
    EngineLayer,
    Profile,
    SkippedTactic,
    SparsityKind,
    SparsityLine,
    TunedLayer,
)
from twofour.records import EligibilityReport, GraphNode, Verdict
from twofour.reports.join.evidence import (
    BuildEvidence,
    dense_profile_of,
    engine_layers,
    profile_of,
)
from twofour.reports.join.node_index import NodeIndex
from twofour.reports.join.resolve import COPY, NameInUse, Resolved, index_nodes, resolve
from twofour.reports.join.rows import pair

_T = TypeVar("_T")
_WITHOUT_WEIGHTS = frozenset({"Reformat", "NoOp", "Constant", "Shuffle", "signal", "wait"})
"""Types of engine layers that hold no product, whatever their names lead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mention:
    """A layer on a (Sparsity) line, and the name that it has there."""

    line: SparsityLine
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One row of a profile: its time and the layers of the model in it (indices of nodes)."""

    name: str
    ms: float
    nodes: tuple[int, ...]
    matched: bool = True
    """It leads to the model, or is the builder's own; else nobody knows what it computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Everything that was seen of one layer of the model."""

    node: int
    holders: tuple[EngineLayer, ...] = ()
    """Layers of the engine that are named after it; one with a sparse kernel first."""
    region: EngineLayer | None = None
    """The Myelin region it lies in, by the order of the graph."""
    eligible: Mention | None = None
    chosen: Mention | None = None
    tuned: TunedLayer | None = None
    dense_tuned: TunedLayer | None = None
    skipped: tuple[SkippedTactic, ...] = ()
    profile_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sightings:
    """One sighting per verdict of the report, in its order, and what belongs to no layer."""

    rows: tuple[Sighting, ...]
    nodes: tuple[GraphNode, ...]
    engine: tuple[EngineLayer, ...] | None
    engine_file: str | None
    engine_complete: bool
    """Every layer of the engine leads to the model, so a layer that is not seen is not there."""
    holders_of: Mapping[int, EngineLayer]
    """An engine layer for every node that one holds, weights or not."""
    unmatched: tuple[str, ...]
    profile: tuple[Timed, ...]
    dense_profile: tuple[Timed, ...]
    names: int = 0
    """Names in the engine and its log that were not made up by the builder."""
    related: bool = True
    """One of the names leads to a layer of the report."""
    foreign_profiles: tuple[int, ...] = ()
    """Rows of each profile that was left aside, as none leads to a layer of model or engine."""


def look(report: EligibilityReport, evidence: BuildEvidence) -> Sightings:
    """Resolve every name in the evidence once, and gather by layer what they say."""
    nodes, rows = pair(report.verdicts, evidence.nodes)
    engine, file = engine_layers(evidence)
    modules = _modules(report.verdicts, rows, evidence)
    index = index_nodes(nodes, modules, _names(evidence, engine or ()))
    uses = [NameInUse(name=layer.name, sources=layer.onnx_nodes) for layer in engine or ()]
    resolved = resolve(uses, index)
    in_log = _Log(evidence.build, index, frozenset(rows))
    dense = _Log(evidence.dense_build, index, frozenset(rows))
    sources = {layer.name: layer.onnx_nodes for layer in engine or ()}
    placed = _Placed(engine or (), resolved)
    belonging = _Belonging(_engine_names(evidence.build, engine or ()), rows, nodes=evidence.nodes)
    profile, strange = belonging.keep(_timed(profile_of(evidence), sources, index))
    dense_profile, strange_dense = belonging.keep(_timed(dense_profile_of(evidence), {}, index))
    touched = in_log.touched.union(placed.any_holder)
    times = {node: row.ms for row in reversed(profile) for node in row.nodes}
    return Sightings(
        rows=tuple(_sighting(node, placed, in_log, dense, times.get(node)) for node in rows),
        nodes=nodes,
        engine=engine,
        engine_file=file,
        engine_complete=engine is not None and placed.complete,
        holders_of=placed.any_holder,
        unmatched=tuple(dict.fromkeys((*placed.unmatched, *in_log.unmatched))),
        profile=profile,
        dense_profile=dense_profile,
        names=len(_given(_all_names(evidence.build, engine or ()))),
        related=not touched.isdisjoint(rows),
        foreign_profiles=tuple(n for n in (strange, strange_dense) if n),
    )


class _Belonging:
    """Tells the profile of this engine from that of another."""

    def __init__(
        self, engine: frozenset[str], rows: Iterable[int], *, nodes: Sequence[GraphNode]
    ) -> None:
        self._engine = engine
        self._rows = frozenset(rows)
        # without the graph, what the engine names and no row holds is known to have no weight
        self._accounted = frozenset() if nodes else engine

    def keep(self, profile: tuple[Timed, ...]) -> tuple[tuple[Timed, ...], int]:
        """The profile and 0; () and its length where it is of another engine."""
        if not any(t.name in self._engine or self._rows.intersection(t.nodes) for t in profile):
            return (), len(profile)
        kept = (replace(t, matched=t.matched or t.name in self._accounted) for t in profile)
        return tuple(kept), 0


class _Placed:
    """The layers of the engine by the nodes they hold."""

    def __init__(self, engine: Sequence[EngineLayer], resolved: Sequence[Resolved]) -> None:
        self.named: dict[int, list[EngineLayer]] = defaultdict(list)
        self.regions: dict[int, EngineLayer] = {}
        self.any_holder: dict[int, EngineLayer] = {}
        self.unmatched = tuple(r.name for r in resolved if not r.matched)
        self.complete = True
        for layer, found in zip(engine, resolved, strict=True):
            for node in found.nodes:
                self.named[node].append(layer)
                self.any_holder.setdefault(node, layer)
            for node in found.region:
                self.regions[node] = layer
                self.any_holder.setdefault(node, layer)
            self.complete &= found.matched or layer.layer_type in _WITHOUT_WEIGHTS

    def holders(self, node: int) -> tuple[EngineLayer, ...]:
        """Those with a sparse kernel first, kernels that Myelin generates last."""
        found = self.named.get(node, [])
        return tuple(sorted(found, key=lambda x: (not x.sparse, x.name.startswith("__my"))))


class _Log:
    """What one build log says, by the nodes of the layers it names."""

    def __init__(self, build: Build | None, index: NodeIndex, rows: frozenset[int]) -> None:
        self.mentions: dict[tuple[SparsityKind, int], Mention] = {}
        self.tuned: dict[int, TunedLayer] = {}
        self.skipped: dict[int, list[SkippedTactic]] = defaultdict(list)
        self.unmatched: tuple[str, ...] = ()
        self.touched: set[int] = set()
        if build is None:
            return
        self._read_lines(build, index, rows)
        for tuned, found in _each(build.layers, (x.name for x in build.layers), index):
            self.touched.update(found.nodes, found.region)
            for node in rows.intersection(found.nodes):
                known = self.tuned.get(node)
                if known is None or _tells_more(tuned, known):
                    self.tuned[node] = tuned
        skipped = [s for s in build.skipped_tactics if s.layer is not None]
        for tactic, found in _each(skipped, (s.layer or "" for s in skipped), index):
            for node in rows.intersection(found.nodes):
                self.skipped[node].append(tactic)

    def _read_lines(self, build: Build, index: NodeIndex, rows: frozenset[int]) -> None:
        unmatched: list[str] = []
        for line in build.sparsity_lines:
            names = line.names or ()
            for name, found in _each(names, names, index):
                self.touched.update(found.nodes, found.region)
                # a region on a line says which of its layers is meant only where it has one
                inside = rows.intersection(found.region)
                for node in (*found.nodes, *(inside if len(inside) == 1 else ())):
                    self.mentions.setdefault((line.kind, node), Mention(line=line, name=name))
                if not found.matched:
                    unmatched.append(name)
        self.unmatched = tuple(dict.fromkeys(unmatched))


def _each(
    items: Sequence[_T], names: Iterable[str], index: NodeIndex
) -> Iterator[tuple[_T, Resolved]]:
    return zip(items, resolve(names, index), strict=True)


def _sighting(
    node: int, placed: _Placed, log: _Log, dense: _Log, profile_ms: float | None
) -> Sighting:
    return Sighting(
        node=node,
        holders=placed.holders(node),
        region=placed.regions.get(node),
        eligible=log.mentions.get((SparsityKind.ELIGIBLE, node)),
        chosen=log.mentions.get((SparsityKind.CHOSEN, node)),
        tuned=log.tuned.get(node),
        dense_tuned=dense.tuned.get(node),
        skipped=tuple(log.skipped.get(node, ())),
        profile_ms=profile_ms,
    )


def _tells_more(new: TunedLayer, old: TunedLayer) -> bool:
    """Sparse times before dense ones, and either before none; else the later one."""
    return _told(new) >= _told(old)


def _told(tuned: TunedLayer) -> tuple[bool, bool]:
    return tuned.best_sparse_ms is not None, tuned.best_dense_ms is not None


def _timed(
    profile: Profile | None, sources: Mapping[str, tuple[str, ...]], index: NodeIndex
) -> tuple[Timed, ...]:
    if profile is None:
        return ()
    rows = [(row.name, ms) for row in profile.layers if (ms := row.average_ms) is not None]
    uses = [NameInUse(name=name, sources=sources.get(name, ())) for name, _ in rows]
    return tuple(
        Timed(name=name, ms=ms, nodes=(*found.nodes, *found.region), matched=found.matched)
        for (name, ms), found in zip(rows, resolve(uses, index), strict=True)
    )


def _modules(
    verdicts: Sequence[Verdict], rows: Sequence[int], evidence: BuildEvidence
) -> dict[str, int]:
    """The node of each module, from the report's own names and from the layer map."""
    found = {v.layer: node for v, node in zip(verdicts, rows, strict=True)}
    nodes = {v.node: node for v, node in zip(verdicts, rows, strict=True) if v.node}
    for name in evidence.layer_map.layers if evidence.layer_map else ():
        if name.node in nodes:
            found.setdefault(name.layer, nodes[name.node])
    return found


def _engine_names(build: Build | None, engine: Sequence[EngineLayer]) -> frozenset[str]:
    """Names of engine layers: those listed, and those that were tuned."""
    tuned = (layer.name for layer in build.layers) if build is not None else ()
    return frozenset(chain((layer.name for layer in engine), tuned))


def _all_names(build: Build | None, engine: Sequence[EngineLayer]) -> Iterator[str]:
    """The same and those on the (Sparsity) lines."""
    yield from _engine_names(build, engine)
    for line in build.sparsity_lines if build is not None else ():
        yield from line.names or ()


def _given(names: Iterable[str]) -> set[str]:
    """Without the copies and Myelin kernels that the builder names itself."""
    return {name for name in names if not name.startswith("__my") and not COPY.match(name)}


def _names(evidence: BuildEvidence, engine: Sequence[EngineLayer]) -> Iterator[str]:
    """Every name in use, so that unnamed layers can be counted."""
    yield from (layer.name for layer in engine)
    for build in filter(None, (evidence.build, evidence.dense_build)):
        yield from chain.from_iterable(line.names or () for line in build.sparsity_lines)
        yield from (layer.name for layer in build.layers)
    for profile in filter(None, (profile_of(evidence), dense_profile_of(evidence))):
        yield from (layer.name for layer in profile.layers)
