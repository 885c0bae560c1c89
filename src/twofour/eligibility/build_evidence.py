"""What is given about a model's engines: which build of a log counts, and how it is quoted."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from pathlib import PureWindowsPath
from typing import Any

from twofour.eligibility.layer_nodes import COPY, LayerNodes, find_nodes, index_nodes
from twofour.eligibility.node_names import NodeIndex, StatedNames, paths_of_layer
from twofour.records import frozen
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


@frozen
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
        sparse = self.profile
        if sparse is None and self.build is not None:
            sparse = self.build.profile
        dense = self.dense_profile
        if dense is None and self.dense_build is not None:
            dense = self.dense_build.profile
        return sparse, dense


def engine_layers(evidence: BuildEvidence) -> tuple[tuple[EngineLayer, ...] | None, str | None]:
    """The layers of the sparse engine and the file that lists them; None where none does."""
    listed = evidence.layers
    build = evidence.build
    has_log = build is not None and build.engine_layers is not None
    if listed is not None and (listed.detailed or not has_log):
        return listed.layers, listed.file
    if build is not None and has_log:
        return build.engine_layers, build.file
    return None, None


def stated_names(builds: Iterable[Build | None]) -> StatedNames:
    """What logs state of layers that have other names than the nodes of the model."""
    renamed: dict[tuple[str, str], None] = {}
    sources: dict[tuple[str, tuple[str, ...]], None] = {}
    for build in filter(None, builds):
        renamed |= {(name.layer, name.node): None for name in build.renamed_layers}
        sources |= {(name.layer, name.onnx_nodes): None for name in build.layer_sources}
    return StatedNames(renamed=tuple(renamed), sources=tuple(sources))


def names_in(build: Build, *, with_engine: bool = False) -> Iterator[str]:
    """Names of tuned layers and on the (Sparsity) lines; of its list of the engine's layers too."""
    if with_engine:
        yield from (layer.name for layer in build.engine_layers or ())
    yield from (layer.name for layer in build.layers)
    for line in build.sparsity_lines:
        yield from line.names or ()


def given_names(names: Iterable[str]) -> set[str]:
    """The names without the copies and Myelin kernels that the builder names itself."""
    return {name for name in names if not (name.startswith("__my") or COPY.match(name))}


# --- the model's nodes, and what evidence calls them ----------------------------------------------


def match_rows(
    verdicts: Sequence[Verdict], nodes: Sequence[GraphNode]
) -> tuple[tuple[GraphNode, ...], tuple[int, ...]]:
    """The nodes, with one made up for each verdict that none fits, and the index of each verdict's.

    They are matched by name and op. Labels distinguish nodes of one name; where those do not
    help, they go in the order of the graph, as both lists come from one walk through it.
    """
    # both branches of an If have a node `fc`, with the labels `if.then/fc` and `if.else/fc`: the
    # verdict of layer `if.else/fc` takes the second, a verdict of another layer the first
    by_name: dict[tuple[str, ...], deque[int]] = defaultdict(deque)
    for index, node in enumerate(nodes):
        op = qualified_op(node.op, node.domain)
        by_name[node.name, op].append(index)
        by_name[node.name, op, node.label].append(index)
    complete = list(nodes)
    taken: set[int] = set()
    rows = []
    for verdict in verdicts:
        name = verdict.node or verdict.layer
        at = _next_free(by_name[name, verdict.op, verdict.layer], taken)
        if at is None:
            at = _next_free(by_name[name, verdict.op], taken)
        if at is None:
            at = len(complete)
            complete.append(_node_of(verdict))
        taken.add(at)
        rows.append(at)
    return tuple(complete), tuple(rows)


def _next_free(waiting: deque[int], taken: Set[int]) -> int | None:
    """The first that is not taken; those before it are dropped, so that no node is seen twice."""
    while waiting:
        at = waiting.popleft()
        if at not in taken:
            return at
    return None


def _node_of(verdict: Verdict) -> GraphNode:
    name = verdict.node
    if name is None:
        name = verdict.layer
    return GraphNode(
        name=name,
        label=verdict.layer,
        op=verdict.op,
        domain="",
        inputs=(),
        outputs=(),
    )


def index_evidence(
    report: EligibilityReport,
    evidence: BuildEvidence,
    nodes: Sequence[GraphNode],
    rows: Sequence[int],
) -> NodeIndex:
    """The model's nodes by name, with all that logs, engine, profiles and the user call them."""
    engine, _ = engine_layers(evidence)
    builds = (evidence.build, evidence.dense_build)
    names = [layer.name for layer in engine or ()]
    for build in filter(None, builds):
        names += names_in(build)
    for profile in filter(None, evidence.profiles):
        names += (layer.name for layer in profile.layers)
    stated = replace(stated_names(builds), given=_names_by_user(report, evidence))
    modules = _modules(report.verdicts, rows, evidence)
    return index_nodes(nodes, modules, names, stated)


def _names_by_user(
    report: EligibilityReport, evidence: BuildEvidence
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if not evidence.engine_names:
        return ()
    places = name_places(report, evidence.nodes)
    given = []
    for name, layers in evidence.engine_names:
        nodes = [places[layer] for layer in layers if layer in places]
        given.append((name, tuple(nodes)))
    return tuple(given)


def name_places(report: EligibilityReport, nodes: Sequence[GraphNode]) -> Mapping[str, int]:
    """The node of each name that a user may give a layer: layer, node, weight or module path."""
    complete, rows = match_rows(report.verdicts, nodes)
    pairs = list(zip(report.verdicts, rows, strict=True))
    places: dict[str, int] = {}
    for verdict, at in pairs:
        places.setdefault(verdict.layer, at)
    for verdict, at in pairs:
        places.setdefault(verdict.node or "", at)
        places.setdefault(verdict.weight or "", at)
    for at, node in enumerate(complete):
        places.setdefault(node.label, at)
        places.setdefault(node.name, at)
    for path, at in _stated_paths(report.verdicts, rows).items():
        places.setdefault(path, at)
    places.pop("", None)
    return places


def _stated_paths(verdicts: Sequence[Verdict], rows: Sequence[int]) -> Mapping[str, int]:
    """Paths of modules that names of nodes and weights state, where no other layer has the same."""
    stated: dict[str, set[int]] = defaultdict(set)
    for verdict, node in zip(verdicts, rows, strict=True):
        for path in paths_of_layer(verdict.node, verdict.weight):
            stated[path].add(node)
    return {path: min(nodes) for path, nodes in stated.items() if len(nodes) == 1}


def _modules(
    verdicts: Sequence[Verdict], rows: Sequence[int], evidence: BuildEvidence
) -> Mapping[str, int]:
    """The node of each module, by the paths that the names of Torch-TensorRT have.

    Paths are those of the layer map and of the report's own names; then those that names of nodes
    and weights state, where no other node has the same.
    """
    named: dict[str, int] = {}
    nodes: dict[str, int] = {}
    for verdict, at in zip(verdicts, rows, strict=True):
        if verdict.node:
            nodes[verdict.node] = at
        if verdict.layer != verdict.node or "/" not in verdict.layer:
            named[verdict.layer] = at
    mapped: dict[str, int] = {}
    for name in evidence.layer_map.layers if evidence.layer_map else ():
        if name.node in nodes:
            mapped.setdefault(name.layer, nodes[name.node])
    return {**_stated_paths(verdicts, rows), **mapped, **named}


# --- which build of a log -------------------------------------------------------------------------

_FITS = 0.5
"""Least part of the best build's share of names that lead to the model: fusions differ."""


@frozen
class ChosenBuild:
    """A build, or several that built parts of the model, and a note on the others of its log."""

    build: Build
    note: str | None
    """Which of the builds it is; None where there is only one."""
    elsewhere: tuple[str, ...] | None
    """BuildEvidence.elsewhere."""


@frozen(eq=False)
class _Candidate:
    """One build of a log, and what its names lead to."""

    number: int
    build: Build
    names: tuple[LayerNodes, ...]
    rank: tuple[bool, ...]
    """How much it says of the model, which it is of if the first is true: the greater says more."""

    @property
    def is_of_model(self) -> bool:
        """Whether it may be of this model."""
        return self.rank[0]


def choose_build(
    builds: Sequence[Build], nodes: Sequence[GraphNode], wanted: SparsityFlag, file: str = ""
) -> ChosenBuild:
    """The build that says most about this model; the last of those that say as much.

    `file` is the name of the model's file; builds of other files count where none is of that one.
    `builds` are of one log and at least one. Without nodes every build may be of the model, and so
    may one that names no layer. Builds that say as much and have no layer in common with it are
    parts of the model, such as the subgraphs of ONNX Runtime, and are joined with it.
    """
    # A log has the builds 1 = {/a, /b}, 2 = {/c} and 3 = {/a, /b}, all of this model: 3 is the
    # best, 2 has other layers and is joined with it, and 1 is 3 once more: it is not used.
    candidates = _candidates(builds, nodes, wanted, file)
    best = max(candidates, key=lambda candidate: (candidate.rank, candidate.number))
    others = [other for other in candidates if _may_be_part(other, best, by_nodes=bool(nodes))]
    used = _with_parts(best, others)
    taken = _keys(tuple(chain.from_iterable(part.names for part in used)))
    elsewhere: list[str] = []
    for other in reversed(others):
        if other not in used:
            elsewhere += _beside(taken, other)
    of_model = [other for other in candidates if nodes and other.is_of_model]
    is_hidden = any(_hides_engine(other.build, is_used=other in used) for other in of_model)
    return ChosenBuild(
        build=_as_one([part.build for part in used]),
        note=_which(builds, best.build, [part.number for part in used]),
        elsewhere=None if is_hidden else tuple(elsewhere),
    )


def _with_parts(best: _Candidate, others: Sequence[_Candidate]) -> list[_Candidate]:
    """The best build and those that say as much of other layers, in the order of the log."""
    parts = [best]
    taken = _keys(best.names)
    for other in reversed(others):
        own = _keys(other.names)
        if other.rank == best.rank and own and taken and taken.isdisjoint(own):
            parts.append(other)
            taken |= own
    return sorted(parts, key=lambda part: part.number)


def _candidates(
    builds: Sequence[Build], nodes: Sequence[GraphNode], wanted: SparsityFlag, file: str
) -> list[_Candidate]:
    names: list[tuple[LayerNodes, ...]] = [()]
    if len(builds) > 1:
        names = _names_of(builds, nodes)
    fits = _fitting(names, nodes)
    is_same = []
    for build, fitting in zip(builds, fits, strict=True):
        is_same.append(fitting and PureWindowsPath(build.model or "").name == file)
    # a log with a build of resnet.onnx and one of a calibrated copy of it: that of the file counts
    is_of_model = is_same if any(is_same) else fits
    candidates = []
    for at, build in enumerate(builds):
        candidate = _Candidate(
            number=at + 1,
            build=build,
            names=names[at],
            rank=(is_of_model[at], *_rank(build, wanted)),
        )
        candidates.append(candidate)
    return candidates


def _may_be_part(other: _Candidate, best: _Candidate, *, by_nodes: bool) -> bool:
    """Whether the build may be of this model, and of the kind that is wanted."""
    is_alike = other.build.sparsity in (best.build.sparsity, SparsityFlag.UNKNOWN)
    if other is best or other.build.outcome is BuildOutcome.LOADED:
        return False
    if not is_alike or not other.is_of_model:
        return False
    if by_nodes:
        return True
    return other.build.model == best.build.model and bool(best.build.sparsity_lines)


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


def _which(builds: Sequence[Build], build: Build, numbers: Sequence[int]) -> str | None:
    """Which builds of a log are used; None where there is only one."""
    loaded = sum(build.outcome is BuildOutcome.LOADED for build in builds)
    if len(builds) - loaded < 2:
        return None
    kind = "builds and runs" if loaded else "builds"
    used = listed([str(number) for number in numbers])
    which = f"number {used} is used (lines {build.first_line} to {build.last_line})"
    if len(numbers) > 1:
        which = f"numbers {used} are used together: they have no layer in common"
    return f"{build.file} contains {len(builds)} {kind}: {which}"


def _beside(taken: Set[int | str], other: _Candidate) -> Iterator[str]:
    """Names of layers that `taken` lacks in a build that is not used.

    Of a build that shares layers with those in use, they are names on its eligible list.
    """
    eligible = {*(other.build.eligible or ())}
    shares = not taken.isdisjoint(_keys(other.names))
    for name in other.names:
        if shares and name.name not in eligible:
            continue
        if taken.isdisjoint(_keys((name,))):
            yield name.name


def _names_of(builds: Sequence[Build], nodes: Sequence[GraphNode]) -> list[tuple[LayerNodes, ...]]:
    """What the names of each build lead to."""
    names = [sorted(given_names(names_in(build, with_engine=True))) for build in builds]
    index = index_nodes(nodes, {}, chain.from_iterable(names), stated_names(builds))
    return [find_nodes(own, index) for own in names]


def _fitting(names: Sequence[Sequence[LayerNodes]], nodes: Sequence[GraphNode]) -> list[bool]:
    """Whether enough of the names of each lead to nodes of the model, or it names no layer."""
    if not nodes:
        return [True] * len(names)
    shares = []
    for own in names:
        leading = sum(bool(name.nodes or name.region) for name in own)
        shares.append(leading / len(own) if own else None)
    least = _FITS * max((share for share in shares if share is not None), default=0.0)
    return [share is None or share >= least for share in shares]


def _keys(names: Sequence[LayerNodes]) -> Set[int | str]:
    """The nodes that names lead to; the names themselves where they lead to none."""
    nodes = set(chain.from_iterable(name.held for name in names))
    return nodes or {name.name for name in names}


_JOINED = (
    "eligible", "chosen", "sparsity_lines", "contradictions", "layers", "fusions",
    "renamed_layers", "layer_sources", "skipped_tactics", "engine_layers",
)  # fmt: skip


def _as_one(builds: Sequence[Build]) -> Build:
    """The record of engines that are parts of one model, as far as reports use it."""
    last = builds[-1]
    if len(builds) == 1:
        return last
    joined: dict[str, Any] = {}
    for field in _JOINED:
        values = (getattr(build, field) or () for build in builds)
        joined[field] = tuple(chain.from_iterable(values))
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
    return sorted(plain, key=_distance)


def _distance(error: LogMessage) -> tuple[bool, bool]:
    is_cause = _CAUSE.search(error.text) is not None
    is_consequence = _CONSEQUENCE.search(error.text) is not None
    return not is_cause, is_consequence


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
    rows = line.raw.split("\n")
    if name is None:
        return _cited(file, line.line, _pieces(rows[0], 0, 0))
    entry = re.compile(rf"(?:^|[:,|])\s*({re.escape(name)})\s*(?:$|[,\[|])")  # a whole entry
    for at, row in enumerate(rows):
        match = entry.search(row)
        if match is not None:
            return _cited(file, line.line + at, _pieces(row, match.start(1), len(name)))
    return _cited(file, line.line, _pieces(rows[0], 0, len(name)))


def quote_tactic(file: str, tactic: Tactic | SkippedTactic) -> str:
    """The line of a tactic's fastest time, or of why it has none."""
    return _cited(file, tactic.line, (tactic.raw or "")[:_LONGEST])


def quote_error(file: str, error: LogMessage) -> str:
    """The line of an error, without what follows it on the next."""
    first, _, _ = error.raw.partition("\n")
    return _cited(file, error.line, first[:_LONGEST])


def _cited(file: str, line: int, words: str) -> str:
    place = f"{file}:{line}"
    return f"{place}: {words}" if words else place


def _pieces(row: str, place: int, length: int) -> str:
    """A long row's beginning, as far as its list, and the entry there; each piece to the letter."""
    # `(Sparsity) Chose 200 layer(s) using sparse tactics: ... /model.9/conv/Conv ...`, whose list
    # has 12,000 characters; the first entry stands behind the colon without dots between
    if len(row) <= _LONGEST:
        return row
    head = _HEAD.match(row)
    if not length or head is None:
        return row[place : place + (length or _LONGEST)][:_LONGEST] + _CUT
    end = place + length
    cut = "" if end == len(row) else _CUT
    if row[head.end() : place].strip(" ,"):
        return f"{head[0]}{_CUT} {row[place:end][:_LONGEST]}{cut}"
    return row[:end][: 2 * _LONGEST] + cut
