"""Where each layer of the model is seen in the engine, the build log and the profile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from math import isfinite
from typing import TypeAlias

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
from twofour.records import frozen
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


@frozen
class Mention:
    """The mention of a layer on a (Sparsity) line, and the name that it has there."""

    line: SparsityLine
    name: str

    def source(self, file: str) -> str:
        """The line that names the layer, quoted."""
        return quote_line(file, self.line, self.name)


@frozen
class Siblings:
    """The layers that one layer of the model is fused with, and the name they have together."""

    name: str
    nodes: tuple[int, ...]
    """Indices of the others, in the order of the graph; the first 64 of them."""


@frozen
class Timed:
    """One row of a profile: its time and the layers of the model in it (indices of nodes)."""

    name: str
    ms: float
    nodes: tuple[int, ...]
    matched: bool
    """Whether it leads to the model or is the builder's own; if not, its work is unknown."""
    sparse: bool | None
    """Whether its kernel is sparse; None where the engine does not name it."""


@frozen
class Sighting:
    """Everything that was seen of one layer of the model."""

    node: int
    holders: tuple[EngineLayer, ...]
    """Layers of the engine that are named after it; one with a sparse kernel first."""
    region: EngineLayer | None
    """The Myelin region it lies in, between that region's neighbours in the graph."""
    among: tuple[EngineLayer, ...]
    """Myelin regions in one of which it lies."""
    perhaps: tuple[EngineLayer, ...]
    """Myelin regions that may hold it; nothing else does."""
    eligible: Mention | None
    chosen: Mention | None
    perhaps_chosen: Mention | None
    """It was built several times, and a sparse kernel was chosen in some of them alone."""
    tuned: TunedLayer | None
    tuned_in: TunedLayer | None
    """A region in the log that holds it or may; None where a layer of its own was tuned."""
    dense_tuned: TunedLayer | None
    skipped: tuple[SkippedTactic, ...]
    profile_ms: float | None
    siblings: Siblings | None
    """Layers of the report that run as one layer with it and read the same input."""

    @property
    def in_log(self) -> bool:
        """Whether the log names it, so that it is in the engine."""
        traces = (self.tuned, self.tuned_in, self.eligible, self.chosen)
        return any(trace is not None for trace in traces)

    @property
    def on_dla(self) -> bool:
        """Whether log or layer information places it on the deep learning accelerator."""
        in_engine = filter(None, (*self.holders, *self.among, self.region))
        if any(layer.layer_type == DLA for layer in in_engine):
            return True
        in_log = filter(None, (self.tuned, self.tuned_in))
        return any(layer.runner == DLA for layer in in_log)


@frozen
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


@frozen
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
    files: tuple[EvidenceFile, ...]
    unresolved: Mapping[SparsityKind, set[str]]
    """Names on the lists of each kind that may mean any layer of the model."""
    settled: Set[int]
    """Lines of the log whose printed count is that of the layers of the model they name."""
    elsewhere: Set[int]
    """Nodes that are or may be in another engine of the log, of another part of the model."""
    unmatched_profiles: tuple[int, ...]
    """Rows of each profile that was left aside, as none leads to a layer of model or engine."""


def find_sightings(report: EligibilityReport, evidence: BuildEvidence) -> Sightings:
    """Look up every name in the evidence once, and gather by layer what they say."""
    # /fc/Gemm of the model is `/fc/Gemm + /act/Relu` in the engine, /fc/Gemm in the builder's list
    # of eligible layers and `/fc/Gemm_myl0_2` in the profile: all three lead to its node
    nodes, places = match_rows(report.verdicts, evidence.nodes)
    rows = frozenset(places)
    index = index_evidence(report, evidence, nodes, places)
    placed = _Placed(evidence, index)
    log = _LogSightings(evidence.build, index, rows, placed.names)
    dense_log = _LogSightings(evidence.dense_build, index, rows, ())
    profile, dense_profile, unmatched_profiles = _profiles(evidence, index, rows)
    placed.add_times(profile)
    siblings = find_siblings((*placed.names, *log.names), nodes, rows)
    return Sightings(
        rows=tuple(_sighting(node, placed, log, dense_log, siblings) for node in places),
        elsewhere=_elsewhere(evidence, index, rows),
        nodes=nodes,
        engine=placed.engine,
        engine_file=placed.file,
        engine_complete=placed.complete,
        holders_of=placed.any_holder,
        unmatched=tuple(placed.unmatched | log.unmatched),
        profile=profile,
        dense_profile=dense_profile,
        files=tuple(_files(evidence, placed, log, dense_log, rows)),
        unresolved=log.unresolved,
        settled=log.settled,
        unmatched_profiles=unmatched_profiles,
    )


def _elsewhere(evidence: BuildEvidence, index: NodeIndex, rows: Set[int]) -> Set[int]:
    if evidence.elsewhere is None:
        return rows
    others = find_nodes(evidence.elsewhere, index)
    return set(chain.from_iterable(name.held for name in others))


# --- the engine -----------------------------------------------------------------------------------


class _Placed:
    """The layers of the engine by the nodes they hold."""

    def __init__(self, evidence: BuildEvidence, index: NodeIndex) -> None:
        self.engine, self.file = engine_layers(evidence)
        self.named: dict[int, list[EngineLayer]] = defaultdict(list)
        """Layers with a sparse kernel first, kernels that Myelin generates last."""
        self.regions: dict[int, EngineLayer] = {}
        self.among: dict[int, list[EngineLayer]] = defaultdict(list)
        self.perhaps: dict[int, list[EngineLayer]] = defaultdict(list)
        self.any_holder: dict[int, EngineLayer] = {}
        self.ms: dict[int, float] = {}
        """Times in the profile: the layer's that holds a node, else the first row's with it."""
        uses = [_use_of(layer) for layer in self.engine or ()]
        self.names = find_nodes(uses, index, whole=True)
        self.unmatched = {name.name: None for name in self.names if not name.matched}
        pairs = zip(uses, self.names, strict=True)
        self.complete = all(name.matched or not use.is_product for use, name in pairs)
        self._place(self.engine or ())
        for holders in self.named.values():
            holders.sort(key=_precedence)

    def _place(self, engine: Sequence[EngineLayer]) -> None:
        # `/fc/Gemm + /act/Relu` holds both nodes; PWN(fc_1), a layer that the parser made of the
        # bias of /fc/Gemm, counts only if no other layer holds /fc/Gemm
        pairs = list(zip(engine, self.names, strict=True))
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
        seen = {*self.named, *self.regions, *self.among, *self.perhaps}
        for layer, name in pairs:
            for node in set(name.parts) - seen:
                self.named[node].append(layer)
                self.any_holder.setdefault(node, layer)

    def add_times(self, profile: Sequence[Timed]) -> None:
        of_layers: dict[str, float] = {}
        for row in profile:
            of_layers.setdefault(row.name, row.ms)
            for node in row.nodes:
                self.ms.setdefault(node, row.ms)
        for node, holders in self.named.items():
            if holders[0].name in of_layers:
                self.ms[node] = of_layers[holders[0].name]


def _use_of(layer: EngineLayer) -> EngineName:
    return EngineName(
        name=layer.name,
        sources=layer.onnx_nodes,
        is_product=layer.layer_type not in _WITHOUT_WEIGHTS,
    )


def _precedence(layer: EngineLayer) -> tuple[bool, bool, int]:
    """Sort key of the layers that hold one node.

    Of kernels that Myelin generates, one that computes this node alone comes before others.
    """
    # a Gemm in three kernels: __myl_MulSum_myl0_6 holds it alone and comes before
    # __myl_MeanResh_myl0_5, which ends the pooling before it and holds two nodes
    generated = layer.name.startswith("__my")
    return not layer.sparse, generated, len(layer.onnx_nodes) if generated else 0


def _sighting(
    node: int,
    placed: _Placed,
    log: _LogSightings,
    dense_log: _LogSightings,
    siblings: Mapping[int, Siblings],
) -> Sighting:
    return Sighting(
        node=node,
        holders=tuple(placed.named.get(node, ())),
        region=placed.regions.get(node),
        among=tuple(placed.among.get(node, ())),
        perhaps=tuple(placed.perhaps.get(node, ())),
        eligible=log.mentions[SparsityKind.ELIGIBLE].get(node),
        chosen=log.mentions[SparsityKind.CHOSEN].get(node),
        perhaps_chosen=log.perhaps_chosen.get(node),
        tuned=log.tuned.get(node),
        tuned_in=log.regions.get(node),
        dense_tuned=dense_log.tuned.get(node),
        skipped=tuple(log.skipped.get(node, ())),
        profile_ms=placed.ms.get(node),
        siblings=siblings.get(node),
    )


_BESIDE = " || "
MOST_SIBLINGS = 64
"""Siblings of one layer; one name of 20,000 nodes took 8 GB when each knew all the others."""


def find_siblings(
    names: Iterable[LayerNodes], nodes: Sequence[GraphNode], rows: Set[int]
) -> Mapping[int, Siblings]:
    """The siblings of each node of a row, among the first 65 nodes of each name.

    `A || B` is the builder's own sign of it; of other names those nodes count that share an input.
    The first name that holds a node with siblings is taken.
    """
    # `q + k + v` holds three products: they are siblings if all read `x` beside their weights. If
    # k reads what q makes, only q and v are. `q || k` are siblings even if no inputs are known.
    siblings: dict[int, Siblings] = {}
    for name in names:
        members = [at for at in name.nodes if at in rows][: MOST_SIBLINGS + 1]
        data = {}
        for at in members:
            data[at] = set(nodes[at].inputs)
            data[at].difference_update(nodes[at].constants, ("",))
        for at in members:
            others = []
            for other in members:
                shares_input = not data[at].isdisjoint(data[other])
                if not nodes[at].inputs or not nodes[other].inputs:
                    shares_input = _BESIDE in name.name
                if shares_input and other != at:
                    others.append(other)
            if others and at not in siblings:
                siblings[at] = Siblings(name=name.name, nodes=tuple(others))
    return siblings


# --- the log --------------------------------------------------------------------------------------


class _LogSightings:
    """What a log says, by the nodes of the layers it names; `rows` are those with a verdict.

    `engine` has the names of the build's engine, whose regions have neighbours.
    """

    def __init__(
        self,
        build: Build | None,
        index: NodeIndex,
        rows: frozenset[int],
        engine: Sequence[LayerNodes],
    ) -> None:
        self.names: list[LayerNodes] = []
        """What each name on the (Sparsity) lines, and of a tuned layer, leads to."""
        self.mentions: dict[SparsityKind, dict[int, Mention]] = defaultdict(dict)
        self.perhaps_chosen: dict[int, Mention] = {}
        self.tuned: dict[int, TunedLayer] = {}
        self.regions: dict[int, TunedLayer] = {}
        """Regions by the nodes in them that no other layer was tuned for."""
        self.skipped: dict[int, list[SkippedTactic]] = defaultdict(list)
        self.unmatched: dict[str, None] = {}
        self.unresolved: dict[SparsityKind, set[str]] = defaultdict(set)
        self.settled: set[int] = set()
        """Lines whose printed count is that of the layers of the model that they name."""
        self._index = index
        self._rows = rows
        self._engine = {name.name: name for name in engine}
        self._known: set[str] = set()
        """Parts of names on the lines that lead to the model."""
        self._compiled = {kind: Counter[int]() for kind in SparsityKind}
        """How many compilations list each node, if the log has one list for each of them."""
        if build is not None:
            self._read(build)

    def _read(self, build: Build) -> None:
        self._read_lists(build.sparsity_lines)
        self._read_tactics(build.layers)
        self._read_skipped(build.skipped_tactics)

    def _read_lists(self, lines: tuple[SparsityLine, ...]) -> None:
        # Myelin compiled one region twice, and the log has `Found 1 ...: /e/Gemm` and `Chose 1
        # ...: /e/Gemm`, then the same `Found` and `Chose 0`: /e/Gemm is listed as eligible twice
        # and as chosen once, so nothing says whether the engine has it sparse.
        pieces = chain.from_iterable(line.constituents or () for line in lines)
        names = find_nodes(dict.fromkeys(pieces), self._index)
        self._known.update(name.name for name in names if name.matched)
        self.unresolved[SparsityKind.CHOSEN].update(unlisted_choices(lines))
        for line in lines:
            names = find_nodes(line.names or (), self._index)
            layers = sum(self._read_name(line, name) for name in names)
            if names and line.printed_count == layers:
                self.settled.add(line.line)
        has_passes = any(line.discarded is None for line in lines)
        fewest = 2 if has_passes else 0
        listed = self._compiled[SparsityKind.ELIGIBLE]
        chosen = self._compiled[SparsityKind.CHOSEN]
        mentions = self.mentions[SparsityKind.CHOSEN]
        for node in tuple(mentions):
            if chosen[node] < max(fewest, listed[node]):
                self.perhaps_chosen[node] = mentions.pop(node)

    def _read_name(self, line: SparsityLine, listed: LayerNodes) -> int:
        """Keep what a line says of one name, and return how many layers the name may stand for."""
        # `Found 4 layer(s) ...: /v/MatMul+/q/MatMul+/k/MatMul, /o/MatMul` has two names of four
        # layers of the model, so its count is settled. If the second name were /new/MatMul, which
        # leads nowhere, any layer might be behind it: it is unresolved.
        name = self._engine.get(listed.name, listed)
        self.names.append(name)
        if not name.matched:
            self.unmatched[name.name] = None
        # a region on a line says which of its layers is meant only where it has one
        inside = self._rows.intersection(name.inside)
        meant = name.nodes
        if len(inside) == 1:
            meant = (*meant, *inside)
        rows = self._rows.intersection(meant)
        if line.kind is SparsityKind.ELIGIBLE or not line.discarded:
            self._mention(Mention(line=line, name=name.name), meant)
            is_known = name.matched and self._known.issuperset(constituents([name.name]))
            if not is_known or (inside and not rows):
                self.unresolved[line.kind].add(name.name)
        return max(1, len(rows))

    def _mention(self, mention: Mention, nodes: Iterable[int]) -> None:
        line = mention.line
        is_counted = line.discarded is None or (line.foreign_node and not line.discarded)
        for node in nodes:
            self.mentions[line.kind].setdefault(node, mention)
            self._compiled[line.kind][node] += is_counted

    def _read_tactics(self, layers: Sequence[TunedLayer]) -> None:
        """Keep, if several layers of one node were timed, the one that says most.

        Sparse times come before dense ones; the product and named kernels before a bias or
        activation.
        """
        ranks: dict[int, tuple[bool, ...]] = {}
        alone: dict[int, TunedLayer] = {}
        names = find_nodes((layer.name for layer in layers), self._index)
        self.names += names
        for tuned, name in zip(layers, names, strict=True):
            places = self.regions if REGION in tuned.name else alone
            for node in self._rows.intersection((*name.nodes, *name.parts, *name.inside)):
                places[node] = tuned
            has_sparse = tuned.best_sparse_ms is not None
            has_dense = tuned.best_dense_ms is not None
            has_kernels = any(tactic.kernel is not None for tactic in tuned.tactics)
            for node in self._of_one(name):
                rank = (has_sparse, node in name.nodes, has_kernels, has_dense)
                if rank >= ranks.get(node, ()):
                    ranks[node] = rank
                    self.tuned[node] = tuned
        for node in alone:
            self.regions.pop(node, None)

    def _read_skipped(self, tactics: Iterable[SkippedTactic]) -> None:
        named = [tactic for tactic in tactics if tactic.layer is not None]
        names = find_nodes((tactic.layer or "" for tactic in named), self._index)
        for tactic, name in zip(named, names, strict=True):
            for node in self._of_one(name):
                self.skipped[node].append(tactic)

    def _of_one(self, name: LayerNodes) -> frozenset[int]:
        """Layers that tactics of this name are of; for a region of several none is known."""
        meant = self._rows.intersection((*name.nodes, *name.parts))
        if len(meant) > 1 and REGION in name.name:
            return frozenset()
        return meant


# --- profiles and files ---------------------------------------------------------------------------

_Rows: TypeAlias = "tuple[Timed, ...]"


def _profiles(
    evidence: BuildEvidence,
    index: NodeIndex,
    rows: frozenset[int],
) -> tuple[_Rows, _Rows, tuple[int, ...]]:
    """The rows of the sparse and of the dense engine's profile, and how many were left aside.

    A profile is left aside if none of its rows leads to a layer of model or engine.
    """
    engine, _ = engine_layers(evidence)
    layers = {layer.name: layer for layer in engine or ()}
    names = set(layers)
    if evidence.build is not None:
        names.update(layer.name for layer in evidence.build.layers)
    # without the graph, what the engine names and no row holds is known to have no weight
    accounted: Set[str] = frozenset() if evidence.nodes else names
    kept: list[_Rows] = []
    aside = []
    for profile, its_layers in zip(evidence.profiles, (layers, {}), strict=True):
        table = _timed_rows(profile, its_layers, index, accounted)
        if any(row.name in names or not rows.isdisjoint(row.nodes) for row in table):
            kept.append(table)
            continue
        kept.append(())
        if table and (names or rows):
            aside.append(len(table))
    return kept[0], kept[1], tuple(aside)


def _timed_rows(
    profile: Profile | None,
    layers: Mapping[str, EngineLayer],
    index: NodeIndex,
    accounted: Container[str],
) -> _Rows:
    """The rows with a time; `layers` are those of the engine that was profiled."""
    times = []
    uses = []
    for row in profile.layers if profile is not None else ():
        if row.average_ms is not None and isfinite(row.average_ms):
            layer = layers.get(row.name)
            sources = layer.onnx_nodes if layer else ()
            uses.append(EngineName(name=row.name, sources=sources))
            times.append(row.average_ms)
    names = find_nodes(uses, index, whole=True)
    timed = []
    for name, ms in zip(names, times, strict=True):
        layer = layers.get(name.name)
        timed.append(
            Timed(
                name=name.name,
                ms=ms,
                nodes=(*name.nodes, *name.region),
                matched=name.matched or name.name in accounted,
                sparse=layer.sparse if layer else None,
            )
        )
    return tuple(timed)


def _files(
    evidence: BuildEvidence,
    placed: _Placed,
    log: _LogSightings,
    dense_log: _LogSightings,
    rows: frozenset[int],
) -> Iterator[EvidenceFile]:
    build = evidence.build
    holds = not rows.isdisjoint(placed.any_holder)
    if build is not None:
        lists_engine = placed.file == build.file
        names = len(given_names(names_in(build, with_engine=lists_engine)))
        related = _lead_to(rows, log.names) or (lists_engine and holds)
        yield EvidenceFile(kind=LOG, file=build.file, names=names, related=related)
    listed = evidence.layers
    if listed is not None and placed.file == listed.file:
        names = len(given_names(layer.name for layer in listed.layers))
        yield EvidenceFile(kind=LAYER_INFORMATION, file=listed.file, names=names, related=holds)
    dense = evidence.dense_build
    if dense is not None:
        names = len(given_names(names_in(dense)))
        related = _lead_to(rows, dense_log.names)
        yield EvidenceFile(kind=DENSE_LOG, file=dense.file, names=names, related=related)


def _lead_to(rows: Set[int], names: Iterable[LayerNodes]) -> bool:
    return any(not rows.isdisjoint(name.held) for name in names)
