"""What there is about a model's engines, and where each layer of the model is seen in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from twofour.eligibility.names import Siblings, find_siblings, paths_of_layer
from twofour.eligibility.nodes import StatedNames
from twofour.eligibility.resolve import COPY, NameInUse, Resolved, index_nodes, resolve
from twofour.eligibility.rows import LogSightings, Mention, Timed, pair, timed_rows
from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.export import GraphNode, LayerMap
from twofour.records.log import (
    Build,
    EngineLayer,
    LayerInformation,
    Profile,
    SkippedTactic,
    SparsityKind,
    TunedLayer,
)

NO_ENGINE = "no engine"
"""What a report says before anything about an engine is joined with it."""
LOG, LAYER_INFORMATION, DENSE_LOG = "log", "layer information", "dense log"
_WITHOUT_WEIGHTS = frozenset({"Reformat", "NoOp", "Constant", "Shuffle", "signal", "wait"})
"""Types of engine layers that hold no product, whatever their names lead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEvidence:
    """Everything there is about one model's engines, as it was read from their files."""

    build: Build | None = None
    """The build with sparse weights allowed."""
    layers: LayerInformation | None = None
    """Of the sparse engine."""
    profile: Profile | None = None
    """Of the sparse engine."""
    dense_build: Build | None = None
    dense_profile: Profile | None = None
    nodes: tuple[GraphNode, ...] = ()
    """Of the ONNX model, in graph order; () where only the predicted report is known."""
    layer_map: LayerMap | None = None
    """Which modules the nodes come from."""
    engine_names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names in the engine and the layers or nodes that each holds, as the user says."""
    built_with: str | None = None
    """The TensorRT that a run built with, in words; None: no record says."""
    notes: tuple[str, ...] = ()
    """How the files were read, such as which build of several was taken."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to join."""
        parts = (self.build, self.layers, self.profile, self.dense_build, self.dense_profile)
        return all(part is None for part in parts)

    @property
    def profiles(self) -> tuple[Profile | None, Profile | None]:
        """Of the sparse and the dense engine: its own file, else the table in the log."""
        both = ((self.profile, self.build), (self.dense_profile, self.dense_build))
        sparse, dense = (own or (build.profile if build else None) for own, build in both)
        return sparse, dense


def engine_layers(evidence: BuildEvidence) -> tuple[tuple[EngineLayer, ...] | None, str | None]:
    """The layers of the sparse engine and the file that lists them; None where none does."""
    listed = evidence.layers
    build = evidence.build
    in_log = build.engine_layers if build is not None else None
    if listed is not None and (listed.detailed or in_log is None):
        return listed.layers, listed.file
    if in_log is None or build is None:
        return None, None
    return in_log, build.file


def stated_names(builds: Iterable[Build | None]) -> StatedNames:
    """What logs state of layers that have other names than the nodes of the model."""
    there = [build for build in builds if build is not None]
    renamed = ((r.layer, r.node) for b in there for r in b.renamed_layers)
    sources = ((s.layer, s.onnx_nodes) for b in there for s in b.layer_sources)
    return StatedNames(renamed=tuple(dict.fromkeys(renamed)), sources=tuple(dict.fromkeys(sources)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Everything that was seen of one layer of the model."""

    node: int
    holders: tuple[EngineLayer, ...] = ()
    """Layers of the engine that are named after it; one with a sparse kernel first."""
    region: EngineLayer | None = None
    """The Myelin region it lies in, between that region's neighbours in the graph."""
    among: tuple[EngineLayer, ...] = ()
    """Myelin regions in one of which it lies."""
    perhaps: tuple[EngineLayer, ...] = ()
    """Myelin regions that may hold it; nothing else does."""
    eligible: Mention | None = None
    chosen: Mention | None = None
    tuned: TunedLayer | None = None
    dense_tuned: TunedLayer | None = None
    skipped: tuple[SkippedTactic, ...] = ()
    profile_ms: float | None = None
    siblings: Siblings | None = None
    """Layers of the report that run as one layer with it and read the same input."""

    @property
    def in_log(self) -> bool:
        """Whether the log names it, so that it is in the engine."""
        return any(x is not None for x in (self.tuned, self.eligible, self.chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file of evidence, and whether it is about this model."""

    words: str
    """What it is: LOG, LAYER_INFORMATION or DENSE_LOG."""
    file: str
    names: int
    """Names in it that were not made up by the builder."""
    related: bool
    """One of the names leads to a layer of the report."""

    @property
    def is_strange(self) -> bool:
        """Whether it names layers, and none of them is of this model."""
        return bool(self.names) and not self.related


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
    sources: tuple[Source, ...] = ()
    unresolved: tuple[str, ...] = ()
    """Names listed as eligible that may mean any layer of the model."""
    settled: frozenset[int] = frozenset()
    """Lines of the log whose printed count is that of the layers of the model they name."""
    unmatched_profiles: tuple[int, ...] = ()
    """Rows of each profile that was left aside, as none leads to a layer of model or engine."""


def look(report: EligibilityReport, evidence: BuildEvidence) -> Sightings:
    """Resolve every name in the evidence once, and gather by layer what they say."""
    nodes, rows = pair(report.verdicts, evidence.nodes)
    engine, file = engine_layers(evidence)
    names = list(dict.fromkeys(_names(evidence, engine or ())))
    modules = _modules(report.verdicts, rows, evidence)
    stated = replace(
        stated_names((evidence.build, evidence.dense_build)),
        held=_held(report, evidence),
    )
    index = index_nodes(nodes, modules, names, stated)
    resolved = resolve(map(_in_use, engine or ()), index, whole=True)
    in_log = LogSightings(evidence.build, index, frozenset(rows), resolved)
    dense = LogSightings(evidence.dense_build, index, frozenset(rows))
    placed = _Placed(engine or (), resolved)
    of_engine = frozenset(_engine_names(evidence.build, engine or ()))
    # without the graph, what the engine names and no row holds is known to have no weight
    accounted = frozenset() if evidence.nodes else of_engine
    of_sparse, of_dense = evidence.profiles
    read = (timed_rows(of_sparse, engine or (), index), timed_rows(of_dense, (), index))
    known = [any(t.name in of_engine or not {*rows}.isdisjoint(t.nodes) for t in r) for r in read]
    profile, dense_profile = (
        tuple(replace(t, matched=t.matched or t.name in accounted) for t in table if is_known)
        for table, is_known in zip(read, known, strict=True)
    )
    by_name = {row.name: row.ms for row in reversed(profile)}
    by_node = {node: row.ms for row in reversed(profile) for node in row.nodes}
    times = (by_name, by_node)
    sightings = [_sighting(node, placed, in_log, dense, times) for node in rows]
    together = ((found.name, found.nodes) for found in resolved)
    siblings = find_siblings((*together, *in_log.together), nodes, frozenset(rows))
    return Sightings(
        rows=tuple(replace(s, siblings=siblings.get(s.node)) for s in sightings),
        nodes=nodes,
        engine=engine,
        engine_file=file,
        engine_complete=engine is not None and placed.complete,
        holders_of=placed.any_holder,
        unmatched=tuple(dict.fromkeys((*placed.unmatched, *in_log.unmatched))),
        profile=profile,
        dense_profile=dense_profile,
        sources=tuple(_sources(evidence, placed, (in_log, dense), frozenset(rows))),
        unresolved=in_log.unresolved,
        settled=frozenset(in_log.settled),
        unmatched_profiles=tuple(len(r) for r, k in zip(read, known, strict=True) if r and not k),
    )


def _in_use(layer: EngineLayer) -> NameInUse:
    return NameInUse(
        name=layer.name,
        sources=layer.onnx_nodes,
        is_product=layer.layer_type not in _WITHOUT_WEIGHTS,
    )


class _Placed:
    """The layers of the engine by the nodes they hold."""

    def __init__(self, engine: Sequence[EngineLayer], resolved: Sequence[Resolved]) -> None:
        self.named: dict[int, list[EngineLayer]] = defaultdict(list)
        self.regions: dict[int, EngineLayer] = {}
        self.among: dict[int, list[EngineLayer]] = defaultdict(list)
        self.perhaps: dict[int, list[EngineLayer]] = defaultdict(list)
        self.any_holder: dict[int, EngineLayer] = {}
        self.unmatched = tuple(r.name for r in resolved if not r.matched)
        self.complete = True
        for layer, found in zip(engine, resolved, strict=True):
            for node in found.nodes:
                self.named[node].append(layer)
                self.any_holder.setdefault(node, layer)
            for node in found.region:
                self.regions.setdefault(node, layer)
                self.any_holder.setdefault(node, layer)
            for node in found.shared:
                self.among[node].append(layer)
            for node in found.perhaps:
                self.perhaps[node].append(layer)
            self.complete &= found.matched or layer.layer_type in _WITHOUT_WEIGHTS
        self._add_parts(engine, resolved)

    def _add_parts(self, engine: Sequence[EngineLayer], resolved: Sequence[Resolved]) -> None:
        """A further layer of a node stands for it where no layer holds its product."""
        seen = (self.named, self.regions, self.among, self.perhaps)
        alone = [
            (node, layer)
            for layer, found in zip(engine, resolved, strict=True)
            for node in found.parts
            if not any(node in places for places in seen)
        ]
        for node, layer in alone:
            self.named[node].append(layer)
            self.any_holder.setdefault(node, layer)

    def holders(self, node: int) -> tuple[EngineLayer, ...]:
        """Those with a sparse kernel first; kernels that Myelin generates last.

        Of those, one that computes this node alone comes before one that other nodes are in too.
        """
        found = self.named.get(node, [])
        return tuple(sorted(found, key=_precedence))


def _precedence(layer: EngineLayer) -> tuple[bool, bool, int]:
    generated = layer.name.startswith("__my")
    return not layer.sparse, generated, len(layer.onnx_nodes) if generated else 0


def _sighting(
    node: int,
    placed: _Placed,
    log: LogSightings,
    dense: LogSightings,
    times: tuple[Mapping[str, float], Mapping[int, float]],
) -> Sighting:
    """`times`: milliseconds by engine layer, which come first, and by node."""
    holders = placed.holders(node)
    held = times[0].get(holders[0].name) if holders else None
    return Sighting(
        node=node,
        holders=holders,
        region=placed.regions.get(node),
        among=tuple(placed.among.get(node, ())),
        perhaps=tuple(placed.perhaps.get(node, ())),
        eligible=log.mentions.get((SparsityKind.ELIGIBLE, node)),
        chosen=log.mentions.get((SparsityKind.CHOSEN, node)),
        tuned=log.tuned.get(node),
        dense_tuned=dense.tuned.get(node),
        skipped=tuple(log.skipped.get(node, ())),
        profile_ms=times[1].get(node) if held is None else held,
    )


def name_places(report: EligibilityReport, nodes: Sequence[GraphNode]) -> Mapping[str, int]:
    """The node of each name that a user may give a layer: layer, node, weight or module path."""
    complete, rows = pair(report.verdicts, nodes)
    places: dict[str, int] = {}
    pairs = list(zip(report.verdicts, rows, strict=True))
    for names in (
        ((verdict.layer, at) for verdict, at in pairs),
        ((name, at) for verdict, at in pairs for name in (verdict.node, verdict.weight)),
        ((name, at) for at, node in enumerate(complete) for name in (node.label, node.name)),
        _stated_paths(report.verdicts, rows),
    ):
        for name, at in names:
            if name:
                places.setdefault(name, at)
    return places


def _stated_paths(verdicts: Sequence[Verdict], rows: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Paths of modules that names of nodes and weights state, where no other layer has the same."""
    stated: dict[str, set[int]] = defaultdict(set)
    for verdict, node in zip(verdicts, rows, strict=True):
        for path in paths_of_layer(verdict.node, verdict.weight):
            stated[path].add(node)
    return ((path, min(meant)) for path, meant in stated.items() if len(meant) == 1)


def _held(
    report: EligibilityReport, evidence: BuildEvidence
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The nodes of each engine name that the user's layer map has."""
    if not evidence.engine_names:
        return ()
    places = name_places(report, evidence.nodes)
    return tuple(
        (name, tuple(places[layer] for layer in layers if layer in places))
        for name, layers in evidence.engine_names
    )


def _modules(
    verdicts: Sequence[Verdict], rows: Sequence[int], evidence: BuildEvidence
) -> Mapping[str, int]:
    """The node of each module, by the paths that the names of Torch-TensorRT have.

    Paths are those of the layer map and of the report's own names; then those that names of nodes
    and weights state, where no other node has the same.
    """
    pairs = zip(verdicts, rows, strict=True)
    found = {v.layer: node for v, node in pairs if v.layer != v.node or "/" not in v.layer}
    nodes = {v.node: node for v, node in zip(verdicts, rows, strict=True) if v.node}
    for name in evidence.layer_map.layers if evidence.layer_map else ():
        if name.node in nodes:
            found.setdefault(name.layer, nodes[name.node])
    for path, node in _stated_paths(verdicts, rows):
        found.setdefault(path, node)
    return found


def _engine_names(build: Build | None, engine: Sequence[EngineLayer]) -> Iterator[str]:
    """Names of engine layers: those listed, and those that were tuned."""
    yield from (layer.name for layer in engine)
    yield from (layer.name for layer in (build.layers if build is not None else ()))


def _sources(
    evidence: BuildEvidence,
    placed: _Placed,
    logs: tuple[LogSightings, LogSightings],
    rows: frozenset[int],
) -> Iterator[Source]:
    """The files; `logs` are what the log of the sparse and that of the dense engine say."""
    build, listed, dense = evidence.build, evidence.layers, evidence.dense_build
    held = not rows.isdisjoint(placed.any_holder)
    in_log, in_dense = (not rows.isdisjoint(log.touched) for log in logs)
    _, file = engine_layers(evidence)
    found: list[tuple[str, str, Iterable[str], bool]] = []
    if build is not None:
        own = (build.engine_layers if file == build.file else None) or ()
        found.append((LOG, build.file, names_in(build, own), in_log or (bool(own) and held)))
    if listed is not None and file == listed.file:
        names = (layer.name for layer in listed.layers)
        found.append((LAYER_INFORMATION, listed.file, names, held))
    if dense is not None:
        found.append((DENSE_LOG, dense.file, names_in(dense, ()), in_dense))
    for words, source, used, related in found:
        yield Source(words=words, file=source, names=len(given_names(used)), related=related)


def names_in(build: Build, engine: Sequence[EngineLayer]) -> Iterator[str]:
    """Names of the engine layers, and those on the (Sparsity) lines."""
    yield from _engine_names(build, engine)
    for line in build.sparsity_lines:
        yield from line.names or ()


def given_names(names: Iterable[str]) -> set[str]:
    """Without the copies and Myelin kernels that the builder names itself."""
    return {name for name in names if not name.startswith("__my") and not COPY.match(name)}


def _names(evidence: BuildEvidence, engine: Sequence[EngineLayer]) -> Iterator[str]:
    """Every name in use, so that unnamed layers can be counted."""
    yield from _engine_names(None, engine)
    for build in filter(None, (evidence.build, evidence.dense_build)):
        yield from names_in(build, ())
    for profile in filter(None, evidence.profiles):
        yield from (layer.name for layer in profile.layers)
