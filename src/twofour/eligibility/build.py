"""The build seen from one layer: what the log lists, and the case to be judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from twofour.eligibility.build_facts import BuildFacts, build_facts, version_numbers
from twofour.eligibility.evidence import Sighting, Sightings
from twofour.eligibility.names import REGION
from twofour.eligibility.nodes import Dataflow
from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.export import FIRST_WITH_SPARSE, GraphNode
from twofour.records.log import (
    Build,
    BuildOutcome,
    Contradiction,
    EngineLayer,
    SparsityFlag,
    SparsityKind,
    SparsityLine,
)
from twofour.records.weights import Reason, ReasonCode

_FARTHEST = 64
"""Nodes looked at behind the missing one."""


class Whereabouts:
    """Answers for one engine; the graph is walked once, when the first question comes."""

    def __init__(self, nodes: Sequence[GraphNode], holders_of: Mapping[int, EngineLayer]) -> None:
        self._nodes = nodes
        self._holders_of = holders_of

    @cached_property
    def _flow(self) -> Dataflow:
        return Dataflow(self._nodes)

    def reason(self, node: int) -> Reason:
        """Into what the node was folded or fused."""
        into = self._behind(node)
        if node in self._flow.fixed:
            goes = f" into {into.name}" if into is not None else ""
            message = f"all its inputs are constants: folded{goes}"
        elif into is not None:
            message = f"no layer of the engine is named after it; what follows it is in {into.name}"
        else:
            message = "no layer of the engine is named after it, nor after what follows it"
        return Reason(code=ReasonCode.FOLDED, message=message)

    def _behind(self, node: int) -> EngineLayer | None:
        """The engine layer that holds the nearest node that uses this one's output."""
        found = [node]
        for at in found:
            if at != node and at in self._holders_of:
                return self._holders_of[at]
            if len(found) < _FARTHEST:
                found += [user for user in self._flow.after[at] if user not in found]
        return None


_COUNTS_CHOICES = (10, 14)
"""First TensorRT seen to count choices right: 10.3 prints "Chose 0" before the names of eight."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BuildAround:
    """The build, seen from any of its layers.

    What is the same for all of them is worked out once (so it has no slots): each layer asks.
    """

    build: Build | None
    seen: Sightings
    facts: BuildFacts
    """What is known to have been done, so that no remedy asks for it."""
    whereabouts: Whereabouts
    """Of layers that the engine does not hold."""

    @classmethod
    def of(cls, build: Build | None, seen: Sightings) -> BuildAround:
        """Those of an engine that `build` made and that `seen` tells of."""
        return cls(
            build=build,
            seen=seen,
            facts=build_facts(build, seen.engine),
            whereabouts=Whereabouts(seen.nodes, seen.holders_of),
        )

    @property
    def file(self) -> str:
        """The log's name, for quoting it."""
        return self.build.file if self.build is not None else ""

    @property
    def lines(self) -> tuple[SparsityLine, ...]:
        """The (Sparsity) lines; () without a log."""
        return self.build.sparsity_lines if self.build is not None else ()

    @property
    def forced(self) -> bool:
        """Whether trtexec overwrote the weights."""
        return self.build is not None and self.build.sparsity is SparsityFlag.FORCED

    @cached_property
    def off(self) -> bool:
        """Whether the builder was not allowed to use sparse kernels, and did not."""
        build = self.build
        if build is None or build.engine_loaded:
            return False
        return build.sparsity is SparsityFlag.DISABLED and not self.lines

    @property
    def listing_cut(self) -> bool:
        """Whether the layers of the engine are from a log without an end, which may lack some."""
        build = self.build
        if build is None or build.outcome is not BuildOutcome.UNFINISHED:
            return False
        return self.seen.engine_file == build.file

    @cached_property
    def old_gpu(self) -> bool:
        """Whether the log names a GPU without sparse tensor cores."""
        capability = self.build.compute_capability if self.build is not None else None
        return capability is not None and capability < FIRST_WITH_SPARSE

    @cached_property
    def sparse_weights_seen(self) -> bool:
        """Whether layer information marks any layer's weights as sparse: so they were allowed."""
        return any(layer.has_sparse_weights for layer in self.seen.engine or ())

    @cached_property
    def contradictions(self) -> tuple[Contradiction, ...]:
        """What the log says against itself, but counts that fit the layers of the model."""
        build = self.build
        if build is None:
            return ()
        # such a line counts each of the products that Myelin joined under one name
        settled = self.seen.settled if build.sparsity is not SparsityFlag.DISABLED else frozenset()
        return tuple(c for c in build.contradictions if c.line is None or c.line not in settled)

    def contradictions_at(self, lines: Set[int | None]) -> tuple[Contradiction, ...]:
        """Those on one of the lines, in the order of the log."""
        return tuple(said for said in self.contradictions if said.line in lines)

    @property
    def counts_choices(self) -> bool:
        """Whether the count of chosen layers can be believed, in this version."""
        return version_numbers(self.facts.tensorrt_version) >= _COUNTS_CHOICES

    def lists(self, kind: SparsityKind, *, foreign: bool) -> tuple[SparsityLine, ...]:
        """The lines of a kind and pass that give their whole list."""
        return self._lists.get((kind, foreign), ())

    @cached_property
    def _lists(self) -> Mapping[tuple[SparsityKind, bool], tuple[SparsityLine, ...]]:
        found: dict[tuple[SparsityKind, bool], list[SparsityLine]] = defaultdict(list)
        for line in self.lines:
            there = line.names is not None or self.says_none(line)
            part = line.elided or line.uncertain or self.is_short(line) or _undone(line)
            if there and not part:
                found[line.kind, line.foreign_node].append(line)
        return {key: tuple(lines) for key, lines in found.items()}

    @cached_property
    def eligible_count(self) -> int:
        """Names on the whole lists of eligible layers, each once; fusions one by one."""
        kind = SparsityKind.ELIGIBLE
        lines = (*self.lists(kind, foreign=False), *self.lists(kind, foreign=True))
        return len({name for line in lines for name in line.constituents or line.names or ()})

    def is_short(self, line: SparsityLine) -> bool:
        """Whether names are missing behind its count, so that a layer it leaves out may be meant.

        A name of Myelin's may stand for several layers of the model, which are counted one by one.
        """
        return line.missing > 0 and line.line not in self.seen.settled

    def says_none(self, line: SparsityLine) -> bool:
        """Whether a line without names counts 0, in a version whose counts can be believed."""
        if line.names is not None or line.printed_count != 0:
            return False
        return line.kind is SparsityKind.ELIGIBLE or self.counts_choices

    def counted_as_all(self, sighting: Sighting) -> SparsityLine | None:
        """A chosen line without names whose count says that every eligible layer was chosen."""
        mention = sighting.eligible
        if mention is None:
            return None
        listed = mention.line
        counts = {len(listed.names or ()), len(listed.constituents or ())}
        if listed.elided or listed.uncertain or self.is_short(listed):
            counts = {listed.printed_count or 0}
        return next(
            (
                line
                for line in self.lines
                if line.kind is SparsityKind.CHOSEN
                and line.names is None
                and not _undone(line)
                and line.foreign_node is listed.foreign_node
                and line.printed_count in counts - {0}
            ),
            None,
        )


def passes_of(sighting: Sighting) -> tuple[bool, ...]:
    """Whether the layer is on the lists of Myelin; both where nothing shows where it runs."""
    placed = sighting.tuned is not None or sighting.holders or sighting.region or sighting.among
    return (in_myelin(sighting),) if placed else (False, True)


def in_myelin(sighting: Sighting) -> bool:
    """Whether the layer is compiled by Myelin, whose lists are printed apart."""
    if sighting.tuned is not None and sighting.tuned.foreign_node:
        return True
    if sighting.holders:
        return any(is_myelin(holder.name, holder.layer_type) for holder in sighting.holders)
    return bool(sighting.region or sighting.among or sighting.perhaps)


def is_myelin(name: str, layer_type: str | None) -> bool:
    """Whether an engine layer is a Myelin region or one of its kernels."""
    known = layer_type in ("Myelin", "kgen", "gemm", "shape_call")
    return known or REGION in name or "_myl" in name


def is_version_8(build: Build) -> bool:
    """Whether the log was written by TensorRT 8."""
    return (build.tensorrt_version or "").startswith("8.")


def _undone(line: SparsityLine) -> bool:
    """Choices of a pass that the builder did not keep."""
    return line.kind is SparsityKind.CHOSEN and line.discarded


_KERNELS_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCase:
    """One row of the predicted report, and everything that was seen of it."""

    row: Verdict
    seen: Sighting
    around: BuildAround
    fused: tuple[Verdict, ...] = ()
    """Rows of the report that run as one engine layer with it and read the same input."""

    @property
    def kernel_holder(self) -> EngineLayer | None:
        """The engine layer whose kernel is named, one with a sparse kernel first."""
        return next((h for h in self.seen.holders if h.kernel is not None), None)

    @property
    def runs_dense(self) -> bool:
        """Whether kernels are named for it in the engine, none of them sparse."""
        holder = self.kernel_holder
        return holder is not None and not holder.sparse

    @property
    def dense_kernels(self) -> str:
        """The named kernels of a layer that runs dense, for a sentence."""
        kernels = list(dict.fromkeys(h.kernel for h in self.seen.holders if h.kernel is not None))
        if len(kernels) == 1:
            return f"the dense kernel {kernels[0]}"
        more = len(kernels) - _KERNELS_SHOWN
        shown = kernels if more <= 0 else [*kernels[:_KERNELS_SHOWN], f"{more} more"]
        return f"the kernels {', '.join(shown[:-1])} and {shown[-1]}, none of them sparse"

    @property
    def sparse_ms(self) -> float | None:
        """Fastest sparse tactic."""
        return self.seen.tuned.best_sparse_ms if self.seen.tuned is not None else None

    @property
    def dense_ms(self) -> float | None:
        """Fastest dense tactic, of the sparse build where it timed one."""
        both = (self.seen.tuned, self.seen.dense_tuned)
        found = (t.best_dense_ms for t in both if t is not None)
        return next((ms for ms in found if ms is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is to be changed in the row."""

    verdict: VerdictName
    evidence: Evidence | None
    reasons: tuple[Reason, ...]
    remedy: str | None
    refuted: Reason | None = None


def measured(verdict: VerdictName, reasons: tuple[Reason, ...], remedy: str | None) -> Outcome:
    """An outcome that a log or layer information shows."""
    return Outcome(verdict=verdict, evidence=Evidence.MEASURED, reasons=reasons, remedy=remedy)
