"""What is given about a model's engines: which build of a log counts, and how it is quoted."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import PureWindowsPath
from typing import Any

from twofour.eligibility.layer_nodes import COPY, LayerNodes, find_nodes, index_nodes
from twofour.eligibility.node_names import NodeIndex, StatedNames, paths_of_layer
from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.export import GraphNode, LayerMap, qualified_op
from twofour.records.log import (
    Build,
    BuildOutcome,
    EngineLayer,
    LayerInformation,
    LogMessage,
    Producer,
    Profile,
    SkippedTactic,
    SparsityFlag,
    SparsityLine,
    Tactic,
)
from twofour.words import listed

NO_ENGINE = "no engine"
"""What a report says before anything about an engine is joined with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEvidence:
    """Everything there is about one model's engines, as it was read from their files."""

    build: Build | None = None
    """The build with sparse weights allowed."""
    layers: LayerInformation | None = None
    """The layers of the sparse engine."""
    profile: Profile | None = None
    """Times in the sparse engine."""
    dense_build: Build | None = None
    dense_profile: Profile | None = None
    nodes: tuple[GraphNode, ...] = ()
    """The ONNX model's nodes, in graph order; () where only the predicted report is known."""
    layer_map: LayerMap | None = None
    """Which modules the nodes come from."""
    engine_names: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names in the engine and the layers or nodes that each holds, as the user says."""
    built_with: str | None = None
    """The TensorRT that a run built with, in words; None: no record says."""
    elsewhere: tuple[str, ...] | None = ()
    """Names in other builds, maybe of other parts of the model; None: they may have any layer."""
    notes: tuple[str, ...] = ()
    """How the files were read, such as which build of several was taken."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to join."""
        parts = (self.build, self.layers, self.profile, self.dense_build, self.dense_profile)
        return all(part is None for part in parts)

    @property
    def profiles(self) -> tuple[Profile | None, Profile | None]:
        """The profiles of the sparse and the dense engine: the file, else the table in the log."""
        both = ((self.profile, self.build), (self.dense_profile, self.dense_build))
        sparse, dense = (own or (build.profile if build else None) for own, build in both)
        return sparse, dense


def engine_layers(evidence: BuildEvidence) -> tuple[tuple[EngineLayer, ...] | None, str | None]:
    """The layers of the sparse engine and the file that lists them; None where none does."""
    listed, build = evidence.layers, evidence.build
    in_log = build.engine_layers if build is not None else None
    if listed is not None and (listed.detailed or in_log is None):
        return listed.layers, listed.file
    return (None, None) if in_log is None or build is None else (in_log, build.file)


def stated_names(builds: Iterable[Build | None]) -> StatedNames:
    """What logs state of layers that have other names than the nodes of the model."""
    there = [build for build in builds if build is not None]
    renamed = ((r.layer, r.node) for b in there for r in b.renamed_layers)
    sources = ((s.layer, s.onnx_nodes) for b in there for s in b.layer_sources)
    return StatedNames(renamed=tuple(dict.fromkeys(renamed)), sources=tuple(dict.fromkeys(sources)))


def names_in(build: Build, engine: Sequence[EngineLayer] = ()) -> Iterator[str]:
    """Names of the engine's layers, of those that were tuned and on the (Sparsity) lines."""
    yield from (layer.name for layer in engine)
    yield from (layer.name for layer in build.layers)
    for line in build.sparsity_lines:
        yield from line.names or ()


def given_names(names: Iterable[str]) -> set[str]:
    """The names without the copies and Myelin kernels that the builder names itself."""
    return {name for name in names if not name.startswith("__my") and not COPY.match(name)}


# --- the model's nodes, and what evidence calls them ----------------------------------------------


def match_rows(
    verdicts: Sequence[Verdict], nodes: Sequence[GraphNode]
) -> tuple[tuple[GraphNode, ...], tuple[int, ...]]:
    """The nodes, with one made up for each verdict that none fits, and the index of each verdict's.

    They are matched by name and op. Labels distinguish nodes of one name; where those do not
    help, they go in the order of the graph, as both lists come from one walk through it.
    """
    by_name: dict[tuple[str, str], list[int]] = defaultdict(list)
    by_label: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, node in reversed(list(enumerate(nodes))):
        op = qualified_op(node.op, node.domain)
        by_name[node.name, op].append(index)
        by_label[node.label, op].append(index)
    complete, found = list(nodes), []
    taken: set[int] = set()

    def first_free(waiting: list[int]) -> int | None:
        """The index that is next in the graph."""
        while waiting and waiting[-1] in taken:
            waiting.pop()
        return waiting.pop() if waiting else None

    for verdict in verdicts:
        named = by_name[verdict.node or verdict.layer, verdict.op]
        labelled = by_label[verdict.layer, verdict.op] if len(named) > 1 else []
        at = first_free(labelled)
        at = first_free(named) if at is None else at
        if at is None:
            at = len(complete)
            label, op = verdict.layer, verdict.op
            name = label if verdict.node is None else verdict.node
            complete.append(
                GraphNode(name=name, label=label, op=op, domain="", inputs=(), outputs=())
            )
        taken.add(at)
        found.append(at)
    return tuple(complete), tuple(found)


def index_evidence(
    report: EligibilityReport,
    evidence: BuildEvidence,
    nodes: Sequence[GraphNode],
    rows: Sequence[int],
) -> NodeIndex:
    """The model's nodes by name, with all that logs, engine, profiles and the user call them."""
    engine, _ = engine_layers(evidence)
    names = [layer.name for layer in engine or ()]
    for build in filter(None, (evidence.build, evidence.dense_build)):
        names += names_in(build)
    for profile in filter(None, evidence.profiles):
        names += (layer.name for layer in profile.layers)
    places = name_places(report, evidence.nodes) if evidence.engine_names else {}
    given = (
        (name, tuple(places[layer] for layer in layers if layer in places))
        for name, layers in evidence.engine_names
    )
    stated = stated_names((evidence.build, evidence.dense_build))
    modules = _modules(report.verdicts, rows, evidence)
    return index_nodes(nodes, modules, names, replace(stated, given=tuple(given)))


def name_places(report: EligibilityReport, nodes: Sequence[GraphNode]) -> Mapping[str, int]:
    """The node of each name that a user may give a layer: layer, node, weight or module path."""
    complete, rows = match_rows(report.verdicts, nodes)
    pairs = list(zip(report.verdicts, rows, strict=True))
    names = (
        *((verdict.layer, at) for verdict, at in pairs),
        *((name, at) for verdict, at in pairs for name in (verdict.node, verdict.weight)),
        *((name, at) for at, node in enumerate(complete) for name in (node.label, node.name)),
        *_stated_paths(report.verdicts, rows),
    )
    return {name: at for name, at in reversed(names) if name}


def _stated_paths(verdicts: Sequence[Verdict], rows: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Paths of modules that names of nodes and weights state, where no other layer has the same."""
    stated: dict[str, set[int]] = defaultdict(set)
    for verdict, node in zip(verdicts, rows, strict=True):
        for path in paths_of_layer(verdict.node, verdict.weight):
            stated[path].add(node)
    return ((path, min(meant)) for path, meant in stated.items() if len(meant) == 1)


def _modules(
    verdicts: Sequence[Verdict], rows: Sequence[int], evidence: BuildEvidence
) -> Mapping[str, int]:
    """The node of each module, by the paths that the names of Torch-TensorRT have.

    Paths are those of the layer map and of the report's own names; then those that names of nodes
    and weights state, where no other node has the same.
    """
    pairs = list(zip(verdicts, rows, strict=True))
    found = {v.layer: node for v, node in pairs if v.layer != v.node or "/" not in v.layer}
    nodes = {v.node: node for v, node in pairs if v.node}
    mapped = evidence.layer_map.layers if evidence.layer_map else ()
    paths = [(name.layer, nodes[name.node]) for name in mapped if name.node in nodes]
    for path, node in (*paths, *_stated_paths(verdicts, rows)):
        found.setdefault(path, node)
    return found


# --- which build of a log -------------------------------------------------------------------------

_FITS = 0.5
"""Least part of the best build's share of names that lead to the model: fusions differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBuild:
    """A build, or several that built parts of the model, and a note on the others of its log."""

    build: Build
    note: str | None
    """Which of the builds it is; None where there is only one."""
    elsewhere: tuple[str, ...] | None = ()
    """BuildEvidence.elsewhere."""


def choose_build(
    builds: Sequence[Build], nodes: Sequence[GraphNode], wanted: SparsityFlag, file: str = ""
) -> ChosenBuild:
    """The build that says most about this model; the last of those that say as much.

    `file` is the name of the model's file; builds of other files count where none is of that one.
    `builds` are of one log and at least one. Without nodes every build may be of the model, and so
    may one that names no layer. Builds that say as much and have no layer in common with it are
    parts of the model, such as the subgraphs of ONNX Runtime, and are joined with it.
    """
    found = _found(builds, nodes) if len(builds) > 1 else [()]
    fitting = list(zip(builds, _fitting(found, nodes), strict=True))
    same_file = [fits and PureWindowsPath(b.model or "").name == file for b, fits in fitting]
    ranks = [
        (is_same or (fits and not any(same_file)), *_rank(b, wanted))
        for (b, fits), is_same in zip(fitting, same_file, strict=True)
    ]
    best = max(range(len(builds)), key=lambda at: (ranks[at], at))
    build, used, unused, taken = builds[best], [best], [], _keys(found[best])
    for at, other in reversed([*enumerate(builds)]):
        alike = other.sparsity in (build.sparsity, SparsityFlag.UNKNOWN) and ranks[at][0]
        of_it = bool(nodes) or (other.model == build.model and build.sparsity_lines)
        if at == best or not alike or not of_it or other.outcome is BuildOutcome.LOADED:
            continue
        own = _keys(found[at])
        if ranks[at] == ranks[best] and own and taken and taken.isdisjoint(own):
            used.append(at)
            taken |= own
        else:
            unused.append(at)
    elsewhere = (name for at in unused for name in _beside(taken, builds[at], found[at]))
    joined = _as_one([builds[at] for at in sorted(used)])
    note = _which(builds, build, sorted(used))
    of_model = (at for at in range(len(builds)) if nodes and ranks[at][0])
    hidden = any(_hides_engine(builds[at], is_used=at in used) for at in of_model)
    return ChosenBuild(build=joined, note=note, elsewhere=None if hidden else tuple(elsewhere))


_OF_PARTS = frozenset({Producer.ONNXRUNTIME, Producer.TORCH_TENSORRT})
"""Programs that build an engine for each part of a model."""


def _hides_engine(build: Build, *, is_used: bool) -> bool:
    """Whether it may be of a part of the model whose layers the log does not list."""
    unlisted = build.outcome is BuildOutcome.UNFINISHED or not build.sparsity_lines
    return build.producer in _OF_PARTS and (build.loads_engine or (unlisted and not is_used))


def _rank(build: Build, wanted: SparsityFlag) -> tuple[bool, ...]:
    """How much a build says: the greater of two says more."""
    return (
        build.sparsity is wanted,
        not build.made_no_engine,
        build.outcome is not BuildOutcome.LOADED,
        bool(build.sparsity_lines),
        build.outcome is not BuildOutcome.FAILED,
    )


def _which(builds: Sequence[Build], build: Build, used: Sequence[int]) -> str | None:
    """Which builds of a log are used; None where there is only one."""
    loaded = sum(b.outcome is BuildOutcome.LOADED for b in builds)
    if len(builds) - loaded < 2:
        return None
    numbers, kind = listed([str(at + 1) for at in used]), "builds and runs" if loaded else "builds"
    which = f"number {numbers} is used (lines {build.first_line} to {build.last_line})"
    if len(used) > 1:
        which = f"numbers {numbers} are used together: they have no layer in common"
    return f"{build.file} contains {len(builds)} {kind}: {which}"


def _beside(taken: Set[int | str], build: Build, found: Sequence[LayerNodes]) -> Iterator[str]:
    """Names of layers that `taken` lacks in a build that is not used.

    Of a build that shares layers with those in use, they are names on its eligible list.
    """
    names = {*(build.eligible or ())} if taken & _keys(found) else {x.name for x in found}
    return (x.name for x in found if x.name in names and taken.isdisjoint(_keys((x,))))


def _found(builds: Sequence[Build], nodes: Sequence[GraphNode]) -> list[tuple[LayerNodes, ...]]:
    """What the names of each build lead to."""
    names = [sorted(given_names(names_in(b, b.engine_layers or ()))) for b in builds]
    index = index_nodes(nodes, None, chain.from_iterable(names), stated_names(builds))
    return [find_nodes(own, index) for own in names]


def _fitting(found: Sequence[Sequence[LayerNodes]], nodes: Sequence[GraphNode]) -> list[bool]:
    """Whether enough of the names of each lead to nodes of the model, or it names no layer."""
    if not nodes:
        return [True] * len(found)
    shares = [
        sum(bool(r.nodes or r.region) for r in own) / len(own) if own else None for own in found
    ]
    least = _FITS * max((share for share in shares if share is not None), default=0.0)
    return [share is None or share >= least for share in shares]


def _keys(found: Sequence[LayerNodes]) -> Set[int | str]:
    """The nodes that names lead to; the names themselves where they lead to none."""
    nodes = {at for name in found for at in (*name.nodes, *name.parts, *name.region)}
    return nodes or {name.name for name in found}


_JOINED = (
    "eligible", "chosen", "sparsity_lines", "contradictions", "layers", "fusions",
    "renamed_layers", "layer_sources", "skipped_tactics", "engine_layers",
)  # fmt: skip


def _as_one(builds: Sequence[Build]) -> Build:
    """The record of engines that are parts of one model, as far as reports use it."""
    last = builds[-1]
    if len(builds) == 1:
        return last
    joined: dict[str, Any] = {
        field: tuple(chain.from_iterable(getattr(build, field) or () for build in builds))
        for field in _JOINED
    }
    if any(build.engine_layers is None for build in builds):
        joined["engine_layers"] = None
    if any(build.outcome is BuildOutcome.UNFINISHED for build in builds):
        joined["outcome"] = BuildOutcome.UNFINISHED
    cache = max((b.timing_cache for b in builds), key=lambda cache: cache.hides_timings)
    return replace(last, **joined, timing_cache=cache, profile=None)


# --- errors, and what is quoted -------------------------------------------------------------------

_FRAME = re.compile(r"--- (?:Begin|End) node ---$")
"""What the ONNX parser prints around a node, as errors too."""
_CAUSE = re.compile(
    r"ERROR: |In node -?\d|Assertion failed|not found|Could not find any implementation"
    r"|out of memory|must have|not supported|[Uu]nsupported"
)
_CONSEQUENCE = re.compile(
    r"^(?:Failed to (?:parse|create)|Parsing model failed|Engine set up failed"
    r"|Building engine failed|Skipping tactic )|buildSerializedNetwork: Error"
)


def causes_first(errors: Iterable[LogMessage]) -> list[LogMessage]:
    """Causes first, consequences last, without the frames around a node."""
    plain = [error for error in errors if not _FRAME.search(error.text)]
    plain.sort(key=lambda e: (not _CAUSE.search(e.text), _CONSEQUENCE.search(e.text) is not None))
    return plain


_LONGEST_NAME = 2_000
"""Longest name that is quoted in the row of each layer it holds; real ones have some hundreds."""
_LONGEST = 300
"""Characters that are quoted of one line."""
_HEAD = re.compile(r".{0,200}?tactics:")
"""How a list begins."""
_CUT = " ..."
"""Stands between the pieces of a long line, each of which a search finds."""


def quoted_name(name: str) -> str:
    """The name for a row of the report: the beginning of a very long one, which many rows have."""
    return name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "..."


def quote_line(file: str, line: SparsityLine, name: str | None = None) -> str:
    """The quoted (Sparsity) line, or the row of it that names a layer."""
    rows, at, place = line.raw.split("\n"), 0, 0
    if name is not None:  # as a whole entry of a row
        entry = re.compile(rf"(?:^|[:,|])\s*({re.escape(name)})\s*(?:$|[,\[|])")
        found = ((at, m.start(1)) for at, row in enumerate(rows) if (m := entry.search(row)))
        at, place = next(found, (0, 0))
    return _cited(file, line.line + at, _pieces(rows[at], place, len(name or "")))


def quote_tactic(file: str, found: Tactic | SkippedTactic) -> str:
    """The line of a tactic's fastest time, or of why it has none."""
    return _cited(file, found.line, (found.raw or "")[:_LONGEST])


def quote_error(file: str, error: LogMessage) -> str:
    """The line of an error, without what follows it on the next."""
    return _cited(file, error.line, error.raw.partition("\n")[0][:_LONGEST])


def _cited(file: str, line: int, words: str) -> str:
    return f"{file}:{line}: {words}" if words else f"{file}:{line}"


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
