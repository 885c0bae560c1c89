"""Where each layer of the model is seen in the engine, the build log and the profile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import isfinite

from twofour.eligibility.build_evidence import (
    BuildEvidence,
    engine_layers,
    given_names,
    index_evidence,
    match_rows,
    names_in,
    quote_line,
)
from twofour.eligibility.layer_nodes import EngineName, LayerNodes, find_nodes
from twofour.eligibility.node_names import REGION, NodeIndex
from twofour.logs.sparsity import constituents, unlisted_choices
from twofour.logs.tactics import DLA
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import GraphNode
from twofour.records.log import (
    Build,
    EngineLayer,
    Profile,
    SkippedTactic,
    SparsityKind,
    SparsityLine,
    TunedLayer,
)

LOG, LAYER_INFORMATION, DENSE_LOG = "log", "layer information", "dense log"
_WITHOUT_WEIGHTS = frozenset({"Reformat", "NoOp", "Constant", "Shuffle", "signal", "wait"})
"""Types of engine layers that hold no product, whatever their names lead to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mention:
    """The mention of a layer on a (Sparsity) line, and the name that it has there."""

    line: SparsityLine
    name: str

    def source(self, file: str) -> str:
        """The line that names the layer, quoted."""
        return quote_line(file, self.line, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """The layers that one layer of the model is fused with, and the name they have together."""

    name: str
    nodes: tuple[int, ...]
    """Indices of the others, in the order of the graph; the first 64 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One row of a profile: its time and the layers of the model in it (indices of nodes)."""

    name: str
    ms: float
    nodes: tuple[int, ...]
    matched: bool = True
    """Whether it leads to the model or is the builder's own; if not, its work is unknown."""
    sparse: bool | None = None
    """Whether its kernel is sparse; None where the engine does not name it."""


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
    perhaps_chosen: Mention | None = None
    """It was built several times, and a sparse kernel was chosen in some of them alone."""
    tuned: TunedLayer | None = None
    tuned_in: TunedLayer | None = None
    """A region in the log that holds it or may; None where a layer of its own was tuned."""
    dense_tuned: TunedLayer | None = None
    skipped: tuple[SkippedTactic, ...] = ()
    profile_ms: float | None = None
    siblings: Siblings | None = None
    """Layers of the report that run as one layer with it and read the same input."""

    @property
    def in_log(self) -> bool:
        """Whether the log names it, so that it is in the engine."""
        found = (self.tuned, self.tuned_in, self.eligible, self.chosen)
        return any(x is not None for x in found)

    @property
    def on_dla(self) -> bool:
        """Whether log or layer information places it on the deep learning accelerator."""
        engine = (*self.holders, *self.among, *filter(None, (self.region,)))
        tuned = filter(None, (self.tuned, self.tuned_in))
        return DLA in (*(x.layer_type for x in engine), *(x.runner for x in tuned))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFile:
    """One file of evidence, and whether it is about this model."""

    kind: str
    """What kind of file it is: LOG, LAYER_INFORMATION or DENSE_LOG."""
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
    files: tuple[EvidenceFile, ...] = ()
    unresolved: Mapping[SparsityKind, set[str]]
    """Names on the lists of each kind that may mean any layer of the model."""
    settled: frozenset[int] = frozenset()
    """Lines of the log whose printed count is that of the layers of the model they name."""
    elsewhere: frozenset[int] = frozenset()
    """Nodes that are or may be in another engine of the log, of another part of the model."""
    unmatched_profiles: tuple[int, ...] = ()
    """Rows of each profile that was left aside, as none leads to a layer of model or engine."""


def find_sightings(report: EligibilityReport, evidence: BuildEvidence) -> Sightings:
    """Look up every name in the evidence once, and gather by layer what they say."""
    nodes, at = match_rows(report.verdicts, evidence.nodes)
    rows = frozenset(at)
    engine, file = engine_layers(evidence)
    index = index_evidence(report, evidence, nodes, at)
    in_use = (
        EngineName(
            name=layer.name,
            sources=layer.onnx_nodes,
            is_product=layer.layer_type not in _WITHOUT_WEIGHTS,
        )
        for layer in engine or ()
    )
    found = find_nodes(in_use, index, whole=True)
    placed = _Placed(engine or (), found)
    in_log = _LogSightings(evidence.build, index, rows, found)
    dense = _LogSightings(evidence.dense_build, index, rows)
    profile, dense_profile, unmatched = _profiles(evidence, index, rows)
    by_name = {row.name: row.ms for row in reversed(profile)}
    by_node = {node: row.ms for row in reversed(profile) for node in row.nodes}
    sightings = (_sighting(node, placed, in_log, dense, (by_name, by_node)) for node in at)
    others = find_nodes(evidence.elsewhere or (), index)
    elsewhere = (at for x in others for at in (*x.nodes, *x.parts, *x.region))
    together = ((layer.name, layer.nodes) for layer in found)
    siblings = find_siblings((*together, *in_log.together), nodes, rows)
    return Sightings(
        rows=tuple(replace(s, siblings=siblings.get(s.node)) for s in sightings),
        elsewhere=rows if evidence.elsewhere is None else frozenset(elsewhere),
        nodes=nodes,
        engine=engine,
        engine_file=file,
        engine_complete=engine is not None and placed.complete,
        holders_of=placed.any_holder,
        unmatched=tuple(dict.fromkeys((*placed.unmatched, *in_log.unmatched))),
        profile=profile,
        dense_profile=dense_profile,
        files=tuple(_files(evidence, placed, in_log, dense, rows)),
        unresolved=in_log.unresolved,
        settled=frozenset(in_log.settled),
        unmatched_profiles=unmatched,
    )


# --- the engine -----------------------------------------------------------------------------------


class _Placed:
    """The layers of the engine by the nodes they hold."""

    def __init__(self, engine: Sequence[EngineLayer], found: Sequence[LayerNodes]) -> None:
        self.named: dict[int, list[EngineLayer]] = defaultdict(list)
        self.regions: dict[int, EngineLayer] = {}
        self.among: dict[int, list[EngineLayer]] = defaultdict(list)
        self.perhaps: dict[int, list[EngineLayer]] = defaultdict(list)
        self.any_holder: dict[int, EngineLayer] = {}
        self.unmatched = tuple(name.name for name in found if not name.matched)
        self.complete = True
        pairs = list(zip(engine, found, strict=True))
        for layer, name in pairs:
            for node in name.nodes:
                self.named[node].append(layer)
            for node in name.region:
                self.regions.setdefault(node, layer)
            for node in (*name.nodes, *name.region):
                self.any_holder.setdefault(node, layer)
            for node in name.shared:
                self.among[node].append(layer)
            for node in name.perhaps:
                self.perhaps[node].append(layer)
            self.complete &= name.matched or layer.layer_type in _WITHOUT_WEIGHTS
        # a further layer of a node, such as its bias, counts where no layer holds its product
        seen = {*self.named, *self.regions, *self.among, *self.perhaps}
        for layer, name in pairs:
            for node in (node for node in name.parts if node not in seen):
                self.named[node].append(layer)
                self.any_holder.setdefault(node, layer)

    def holders(self, node: int) -> tuple[EngineLayer, ...]:
        """Those with a sparse kernel first; kernels that Myelin generates last.

        Of those, one that computes this node alone comes before one that other nodes are in too.
        """

        def precedence(layer: EngineLayer) -> tuple[bool, bool, int]:
            generated = layer.name.startswith("__my")
            return not layer.sparse, generated, len(layer.onnx_nodes) if generated else 0

        return tuple(sorted(self.named.get(node, []), key=precedence))


def _sighting(
    node: int,
    placed: _Placed,
    log: _LogSightings,
    dense: _LogSightings,
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
        perhaps_chosen=log.perhaps_chosen.get(node),
        tuned=log.tuned.get(node),
        tuned_in=log.regions.get(node),
        dense_tuned=dense.tuned.get(node),
        skipped=tuple(log.skipped.get(node, ())),
        profile_ms=times[1].get(node) if held is None else held,
    )


_BESIDE = " || "
MOST_SIBLINGS = 64
"""Siblings of one layer; one name of 20,000 nodes took 8 GB when each knew all the others."""


def find_siblings(
    together: Iterable[tuple[str, Sequence[int]]], nodes: Sequence[GraphNode], rows: Set[int]
) -> Mapping[int, Siblings]:
    """The siblings of each node of a row; `together` are names with the nodes that each holds.

    `A || B` is the builder's own sign of it; of other names those nodes count that share an input.
    The first name that holds a node with siblings is taken, and the first 65 nodes of each name.
    """
    # `q + k + v` holds three products: they are siblings if all read `x` beside their weights. If
    # k reads what q makes, only q and v are. `q || k` are siblings even if no inputs are known.
    found: dict[int, Siblings] = {}
    for name, held in together:
        members = [at for at in dict.fromkeys(held) if at in rows][: MOST_SIBLINGS + 1]
        data = {at: {*nodes[at].inputs} - {*nodes[at].constants, ""} for at in members}
        for at in members:
            others = tuple(
                other
                for other in members
                if other != at
                and (
                    not data[at].isdisjoint(data[other])
                    or (_BESIDE in name and not (nodes[at].inputs and nodes[other].inputs))
                )
            )
            if others and at not in found:
                found[at] = Siblings(name=name, nodes=others)
    return found


# --- the log --------------------------------------------------------------------------------------


class _LogSightings:
    """What a log says, by the nodes of the layers it names; `rows` are those with a verdict.

    `engine` are the layers of the build's engine, whose regions have neighbours.
    """

    def __init__(
        self,
        build: Build | None,
        index: NodeIndex,
        rows: frozenset[int],
        engine: Sequence[LayerNodes] = (),
    ) -> None:
        self.mentions: dict[tuple[SparsityKind, int], Mention] = {}
        self.perhaps_chosen: dict[int, Mention] = {}
        self.tuned: dict[int, TunedLayer] = {}
        self.regions: dict[int, TunedLayer] = {}
        """Regions by the nodes in them that no other layer was tuned for."""
        self.skipped: dict[int, list[SkippedTactic]] = defaultdict(list)
        self.unmatched: dict[str, None] = {}
        self.touched: set[int] = set()
        self.unresolved: dict[SparsityKind, set[str]] = {kind: set() for kind in SparsityKind}
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
        names = [s.layer or "" for s in skipped]
        for tactic, found in zip(skipped, find_nodes(names, index), strict=True):
            for node in _of_one(found, rows):
                self.skipped[node].append(tactic)

    def _read_tactics(self, build: Build, index: NodeIndex, rows: frozenset[int]) -> None:
        """Keep, if several layers of one node were timed, the one that says most.

        Sparse times come before dense ones; the product and named kernels before a bias or
        activation.
        """
        best: dict[int, tuple[bool, bool, bool, bool]] = {}
        alone: dict[int, TunedLayer] = {}
        timed = find_nodes((x.name for x in build.layers), index)
        for tuned, found in zip(build.layers, timed, strict=True):
            self.touched.update(found.nodes, found.parts, found.region)
            self.together += [(tuned.name, found.nodes)] if len(found.nodes) > 1 else []
            held = (*found.nodes, *found.parts, *found.region, *found.shared, *found.perhaps)
            places = self.regions if REGION in tuned.name else alone
            places.update(dict.fromkeys(rows.intersection(held), tuned))
            sparse, dense = (ms is not None for ms in (tuned.best_sparse_ms, tuned.best_dense_ms))
            named = any(tactic.kernel is not None for tactic in tuned.tactics)
            for node in _of_one(found, rows):
                rank = (sparse, node in found.nodes, named, dense)
                if node not in best or rank >= best[node]:
                    best[node] = rank
                    self.tuned[node] = tuned
        self.regions = {node: region for node, region in self.regions.items() if node not in alone}

    def _read_lines(self, build: Build, index: NodeIndex, rows: frozenset[int]) -> None:
        compiled: Counter[tuple[SparsityKind, int]] = Counter()
        twins = _all_listed(build, index, rows)
        self.unresolved[SparsityKind.CHOSEN].update(unlisted_choices(build.sparsity_lines))
        for line in build.sparsity_lines:
            layers = 0
            pieces = find_nodes(line.constituents or (), index)
            known = {piece.name for piece in pieces if piece.matched}
            for listed in find_nodes(line.names or (), index):
                name = listed.name
                found = self._engine.get(name, listed)
                self.touched.update(found.nodes, found.region)
                self.together += [(name, found.nodes)] if len(found.nodes) > 1 else []
                # a region on a line says which of its layers is meant only where it has one
                inside = rows.intersection((*found.region, *found.shared, *found.perhaps))
                meant = (*found.nodes, *(inside if len(inside) == 1 else ()))
                meant = twins.get(name, meant)
                layers += max(1, len(rows.intersection(meant)))
                if line.kind is not SparsityKind.CHOSEN or not line.discarded:
                    mention = Mention(line=line, name=name)
                    for node in meant:
                        self.mentions.setdefault((line.kind, node), mention)
                        in_each = line.discarded is None or name in twins or line.foreign_node
                        compiled[line.kind, node] += in_each and line.discarded is not True
                    is_known = found.matched and known.issuperset(constituents([name]))
                    if not is_known or (len(inside) > 1 and rows.isdisjoint(meant)):
                        self.unresolved[line.kind].add(name)
                if not found.matched:
                    self.unmatched[name] = None
            if line.names and line.printed_count == layers:
                self.settled.add(line.line)
        fewest = 2 if any(line.discarded is None for line in build.sparsity_lines) else 0  # passes
        for kind, node in [key for key in self.mentions if key[0] is SparsityKind.CHOSEN]:
            if compiled[kind, node] < max(fewest, compiled[SparsityKind.ELIGIBLE, node]):
                self.perhaps_chosen[node] = self.mentions.pop((kind, node))


def _all_listed(
    build: Build, index: NodeIndex, rows: frozenset[int]
) -> Mapping[str, tuple[int, ...]]:
    """The nodes of each name that several have and a list of eligible layers repeats for each."""
    nodes: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for at in sorted(rows):
        nodes[index.nodes[at].name] += (at,)
    lists = (x.names or () for x in build.sparsity_lines if x.kind is SparsityKind.ELIGIBLE)
    times = {name: count for names in lists for name, count in Counter(names).items() if count > 1}
    return {name: nodes[name] for name, n in times.items() if 1 < len(nodes[name]) <= n}


def _of_one(found: LayerNodes, rows: frozenset[int]) -> frozenset[int]:
    """Layers that the tactics of a name are of; for a region of several products none is known."""
    meant = rows.intersection((*found.nodes, *found.parts))
    return frozenset() if len(meant) > 1 and REGION in found.name else meant


# --- profiles and files ---------------------------------------------------------------------------


def _profiles(
    evidence: BuildEvidence, index: NodeIndex, rows: frozenset[int]
) -> tuple[tuple[Timed, ...], tuple[Timed, ...], tuple[int, ...]]:
    """The rows of the sparse and of the dense engine's profile, and how many were left aside.

    A profile is left aside if none of its rows leads to a layer of model or engine.
    """
    engine = engine_layers(evidence)[0] or ()
    of_engine = {layer.name for layer in engine}
    of_engine |= {layer.name for layer in (evidence.build.layers if evidence.build else ())}
    # without the graph, what the engine names and no row holds is known to have no weight
    accounted = frozenset() if evidence.nodes else of_engine
    of_sparse, of_dense = evidence.profiles
    kept: list[tuple[Timed, ...]] = []
    aside: list[int] = []
    for table in (_timed_rows(of_sparse, engine, index), _timed_rows(of_dense, (), index)):
        if any(t.name in of_engine or not rows.isdisjoint(t.nodes) for t in table):
            kept.append(tuple(replace(t, matched=t.matched or t.name in accounted) for t in table))
        else:
            kept.append(())
            aside += [len(table)] if table else []
    return kept[0], kept[1], tuple(aside)


def _timed_rows(
    profile: Profile | None, engine: Iterable[EngineLayer], index: NodeIndex
) -> tuple[Timed, ...]:
    """The rows with a time; `engine` are the layers of the engine that was profiled."""
    known = {layer.name: layer for layer in engine}
    rows = [
        (row.name, ms)
        for row in (profile.layers if profile is not None else ())
        if (ms := row.average_ms) is not None and isfinite(ms)
    ]
    uses = [
        EngineName(name=name, sources=known[name].onnx_nodes if name in known else ())
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
        for (name, ms), found in zip(rows, find_nodes(uses, index, whole=True), strict=True)
    )


def _files(
    evidence: BuildEvidence,
    placed: _Placed,
    log: _LogSightings,
    dense_log: _LogSightings,
    rows: frozenset[int],
) -> Iterator[EvidenceFile]:
    build, listed, dense = evidence.build, evidence.layers, evidence.dense_build
    held = not rows.isdisjoint(placed.any_holder)
    _, file = engine_layers(evidence)
    if build is not None:
        own = (build.engine_layers if file == build.file else None) or ()
        names = len(given_names(names_in(build, own)))
        related = not rows.isdisjoint(log.touched) or (bool(own) and held)
        yield EvidenceFile(kind=LOG, file=build.file, names=names, related=related)
    if listed is not None and file == listed.file:
        names = len(given_names(layer.name for layer in listed.layers))
        yield EvidenceFile(kind=LAYER_INFORMATION, file=listed.file, names=names, related=held)
    if dense is not None:
        names = len(given_names(names_in(dense)))
        related = not rows.isdisjoint(dense_log.touched)
        yield EvidenceFile(kind=DENSE_LOG, file=dense.file, names=names, related=related)
