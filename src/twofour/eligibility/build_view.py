"""The build as one layer sees it: what its log lists, and what the log leaves unsaid."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from twofour.eligibility import remedies as do
from twofour.eligibility.build_evidence import quote_line, quoted_name
from twofour.eligibility.build_facts import BuildFacts, build_facts, version_numbers
from twofour.eligibility.node_names import REGION, Dataflow
from twofour.eligibility.remedies import Remedy, still_to_do
from twofour.eligibility.rules import DLA_RULE
from twofour.eligibility.sightings import MOST_SIBLINGS, Sighting, Sightings
from twofour.records import frozen
from twofour.records.eligibility import Verdict
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
from twofour.words import count, listed

_FARTHEST = 64
"""Nodes looked at behind the missing one."""
_COUNTS_CHOICES = (10, 14)
"""First TensorRT seen to count choices right: 10.3 prints "Chose 0" before the names of eight."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BuildView:
    """The build, seen from any of its layers.

    What is the same for all of them is computed once, so the class has no slots.
    """

    build: Build | None
    seen: Sightings

    @cached_property
    def facts(self) -> BuildFacts:
        """What is known to have been done in the build: no remedy asks for it again."""
        return build_facts(self.build, self.seen.engine)

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

    @cached_property
    def unfinished(self) -> bool:
        """Whether the log ends before the build does."""
        return self.build is not None and self.build.outcome is BuildOutcome.UNFINISHED

    @property
    def listing_cut(self) -> bool:
        """Whether the layers of the engine are from a log without an end, which may lack some."""
        return self.unfinished and self.seen.engine_file == self.file

    @cached_property
    def sparse_weights_seen(self) -> bool:
        """Whether layer information marks any layer's weights as sparse: so they were allowed."""
        return any(layer.has_sparse_weights for layer in self.seen.engine or ())

    @cached_property
    def contradictions(self) -> tuple[Contradiction, ...]:
        """Where the log contradicts itself, except for counts that fit the layers of the model."""
        if self.build is None:
            return ()
        if self.build.sparsity is SparsityFlag.DISABLED:
            return self.build.contradictions
        # a settled line counts each of the products that Myelin joined under one name
        settled = self.seen.settled
        return tuple(c for c in self.build.contradictions if c.line not in settled)

    def lists(self, kind: SparsityKind, *, foreign: bool) -> tuple[SparsityLine, ...]:
        """The lines of a kind and pass that give their whole list; for choices, if all do."""
        return self._lists.get((kind, foreign), ())

    @cached_property
    def _lists(self) -> Mapping[tuple[SparsityKind, bool], tuple[SparsityLine, ...]]:
        # TensorRT 10.3 prints `Chose 0 layer(s) using sparse tactics` before it names eight layers:
        # that is no list; `Chose 0 layer(s) using sparse tactics:` is an empty one
        whole: dict[tuple[SparsityKind, bool], tuple[SparsityLine, ...]] = defaultdict(tuple)
        in_part = set()
        counts_choices = version_numbers(self.facts.tensorrt_version) >= _COUNTS_CHOICES
        for line in self.lines:
            key = (line.kind, line.foreign_node)
            counts = line.kind is SparsityKind.ELIGIBLE or counts_choices
            is_list = line.names is not None or (line.printed_count == 0 and counts)
            if is_list and not self.is_cut(line) and not _undone(line):
                whole[key] += (line,)
            elif line.kind is SparsityKind.CHOSEN and not line.discarded:
                in_part.add(key)
        return {key: lines for key, lines in whole.items() if key not in in_part}

    @cached_property
    def eligible_count(self) -> int:
        """Names on the whole lists of eligible layers, each once; fusions one by one."""
        names: set[str] = set()
        for foreign in (False, True):
            for line in self.lists(SparsityKind.ELIGIBLE, foreign=foreign):
                names.update(line.constituents or line.names or ())
        return len(names)

    def is_short(self, line: SparsityLine) -> bool:
        """Whether names are missing behind its count, so that a layer it leaves out may be meant.

        A name of Myelin's may stand for several layers of the model, which are counted one by one.
        """
        return line.missing > 0 and line.line not in self.seen.settled

    def is_cut(self, line: SparsityLine) -> bool:
        """Whether the layers on the line are not all known."""
        return line.elided or line.uncertain or self.is_short(line)

    @cached_property
    def _flow(self) -> Dataflow:
        return Dataflow(self.seen.nodes)

    def absence(self, node: int) -> Reason:
        """Why no layer of the engine holds the node: what it was folded or fused into."""
        into = self._behind(node)
        if node in self._flow.fixed:
            message = "all its inputs are constants: folded"
            if into is not None:
                message += f" into {into.name}"
        elif into is not None:
            message = f"no layer of the engine is named after it; what follows it is in {into.name}"
        else:
            message = "no layer of the engine is named after it, nor after what follows it"
        return Reason(code=ReasonCode.FOLDED, message=message)

    def _behind(self, node: int) -> EngineLayer | None:
        """The engine layer that holds the nearest node that uses this one's output."""
        nodes = [node]
        for at in nodes:
            if at != node and at in self.seen.holders_of:
                return self.seen.holders_of[at]
            if len(nodes) < _FARTHEST:
                nodes += [user for user in self._flow.after[at] if user not in nodes]
        return None


_OF_MYELIN = frozenset({"Myelin", "kgen", "gemm", "shape_call"})
"""Types of engine layers that Myelin makes."""


def _in_myelin(sighting: Sighting) -> bool:
    """Whether the layer is compiled by Myelin, whose lists are printed apart."""
    if sighting.tuned is not None and sighting.tuned.foreign_node:
        return True
    for holder in sighting.holders:
        is_named_so = REGION in holder.name or "_myl" in holder.name
        if is_named_so or holder.layer_type in _OF_MYELIN:
            return True
    if sighting.holders:
        return False
    return bool(sighting.region or sighting.among or sighting.perhaps or sighting.tuned_in)


def _is_version_8(build: Build) -> bool:
    return (build.tensorrt_version or "").startswith("8.")


def _undone(line: SparsityLine) -> bool:
    """Whether the choices are of a pass that the builder did not keep, or may not have kept."""
    return line.kind is SparsityKind.CHOSEN and line.discarded is not False


@frozen
class JoinCase:
    """One row of the predicted report, and everything that was seen of it."""

    row: Verdict
    seen: Sighting
    view: BuildView
    fused: tuple[Verdict, ...]
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
        return f"the kernels {listed(kernels)}, none of them sparse"

    @property
    def sparse_ms(self) -> float | None:
        """Fastest sparse tactic."""
        if self.seen.tuned is None:
            return None
        return self.seen.tuned.best_sparse_ms

    @property
    def dense_ms(self) -> float | None:
        """Fastest dense tactic: the sparse build's where it timed one."""
        for tuned in (self.seen.tuned, self.seen.dense_tuned):
            if tuned is not None and tuned.best_dense_ms is not None:
                return tuned.best_dense_ms
        return None

    @property
    def siblings(self) -> Reason | None:
        """The siblings of a horizontal fusion: what was seen, with no advice in it."""
        fused = self.seen.siblings
        if fused is None:
            return None
        names = [self.view.seen.nodes[at].name for at in fused.nodes]
        if len(names) == MOST_SIBLINGS:
            names.append("others")
        message = f"runs as one engine layer with {listed(names)}: they read the same input"
        source = f"{self.view.seen.engine_file or self.view.file}: {quoted_name(fused.name)}"
        for mention in (self.seen.eligible, self.seen.chosen):
            if mention is not None and mention.name == fused.name:
                source = mention.source(self.view.file)
        return Reason(code=ReasonCode.FUSED_SIBLINGS, message=message, source=source)


# --- what nothing says ----------------------------------------------------------------------------


@frozen
class Gap:
    """What is missing in the evidence, and how to come by it."""

    why: str
    remedy: str | None
    """None: all that would help was done already."""


def _silence(view: BuildView, why: str) -> Gap:
    """What a log that reports on sparsity would say; no step that was taken already."""
    steps = still_to_do(view.facts, do.ALLOW_SPARSE, do.VERBOSE_LOG)
    if not steps:
        steps = still_to_do(view.facts, do.NAME_KERNELS)
    return Gap(why=why, remedy="; ".join(steps) or None)


def _missing_names(view: BuildView, why: str, *first: Remedy) -> Gap:
    """What names would say; those of kernels in layer information would say it too."""
    steps = still_to_do(view.facts, *first, do.NAME_KERNELS)
    return Gap(why=why, remedy=", or ".join(steps) or None)


def eligibility_gap(view: BuildView, sighting: Sighting) -> Gap | None:
    """Why nothing says whether this layer is eligible; None where a whole list leaves it out."""
    build = view.build
    if build is None:
        why = "layer information alone does not say whether the builder found it eligible"
        if view.seen.engine is None:
            why = "there is no build log"
        return _silence(view, why)
    if not view.lines or view.unfinished:
        return _silent_log(view, build)
    traces = (sighting.tuned, sighting.tuned_in, sighting.holders, sighting.region, sighting.among)
    is_placed = any(traces)
    if sighting.node in view.seen.elsewhere and not is_placed:
        why = "it may be in another engine of the log"
        return Gap(why=why, remedy=do.LOG_OF_BUILD.text)
    # it may be on either list where nothing shows in which pass it was built
    for foreign in (_in_myelin(sighting),) if is_placed else (False, True):
        gap = _cut_list(view, foreign=foreign)
        if gap is not None:
            return gap
    gap = _no_list(view, build, sighting)
    if gap is not None:
        return gap
    strange = view.seen.unresolved[SparsityKind.ELIGIBLE]
    return _strange_names(view, strange, "eligible", "layer of the model")


def _strange_names(view: BuildView, names: set[str], kind: str, of: str) -> Gap | None:
    """The layer may be behind any of these names on the lists, which lead to none."""
    if not names:
        return None
    leads = "1 name leads"
    if len(names) > 1:
        leads = f"{len(names)} names lead"
    why = f"it is not in the list of {kind} layers, in which {leads} to no {of}"
    return _missing_names(view, why)


def _no_list(view: BuildView, build: Build, sighting: Sighting) -> Gap | None:
    """What is missing where the layer lies; None where the log has a list for that."""
    why = "the log has no list of eligible layers for the "
    others = view.lists(SparsityKind.ELIGIBLE, foreign=False)
    own = view.lists(SparsityKind.ELIGIBLE, foreign=True)
    if sighting.on_dla:
        return Gap(why=f"{why}DLA region it lies in; {DLA_RULE}", remedy=do.ASK_DLA.text)
    if _in_myelin(sighting):
        # TensorRT 8 has no lists of Myelin's own and names what is eligible in the one it prints
        has_list = bool(own) or (_is_version_8(build) and bool(others))
        region = sighting.tuned_in
        is_other = bool(own) and region is not None and not region.listed
        if has_list and not is_other:
            return None
        return _silence(view, f"{why}Myelin region it lies in")
    if not others:
        return _silence(view, f"{why}layers outside of Myelin")
    # 10.3 prints the list of the other layers as INFO, 10.14 both as VERBOSE; up to 8.4 there is
    # one list, without a count
    version = version_numbers(view.facts.tensorrt_version)
    is_one = version[:1] == (8,) or version >= _COUNTS_CHOICES or others[0].printed_count is None
    is_placed = sighting.tuned or sighting.holders or "Conv" in view.seen.nodes[sighting.node].op
    if is_placed or own or is_one or view.facts.verbose:
        return None
    why = "it is not in the list of eligible layers, and Myelin's may need a verbose log"
    return _silence(view, why)


def left_out(view: BuildView, sighting: Sighting) -> Reason | None:
    """The reason that a whole list of eligible layers leaves this one out; None if it may not."""
    if view.build is None or eligibility_gap(view, sighting) is not None:
        return None
    own = _in_myelin(sighting) and not _is_version_8(view.build)
    message = f"not among the {view.eligible_count:,} layers that the builder lists as eligible"
    if view.eligible_count == 1:
        message = "not the one layer that the builder lists as eligible"
    elif not view.eligible_count:
        message = "the builder lists no layer as eligible"
    quoted = []
    for foreign in (not own, own):
        lines = view.lists(SparsityKind.ELIGIBLE, foreign=foreign)
        quoted += [line for line in lines if line.names][:1]
    source = "; ".join(quote_line(view.file, line) for line in quoted or lines[:1])
    return Reason(code=ReasonCode.NOT_LISTED, message=message, source=source)


def choice_gap(view: BuildView, sighting: Sighting) -> Gap:
    """Why it is not known whether an eligible layer runs sparse."""
    why = "nothing says whether a sparse kernel was chosen for it"
    if any(line.discarded is None for line in view.lines):
        why = "nothing says which pass of the builder made the engine"
        return Gap(why=why, remedy=do.FINISH_BUILD.text)
    if sighting.perhaps_chosen is not None:
        why = "the builder lists several layers of its name and chose a sparse kernel for some: "
        return _missing_names(view, f"{why}nothing says for which")
    if view.unfinished:
        return Gap(why=why, remedy=do.FINISH_BUILD.text)
    lines = [line for line in view.lines if line.kind is SparsityKind.CHOSEN and not line.discarded]
    if any(line.elided or (line.names and view.is_short(line)) for line in lines):
        why += ": names are missing in the list of chosen layers"
        return Gap(why=why, remedy=do.WHOLE_LOG.text)
    return _count_alone(view, why, lines)


def _count_alone(view: BuildView, why: str, lines: Sequence[SparsityLine]) -> Gap:
    """What a count of choices without names leaves unsaid; the same where there is no count."""
    counts = [line.printed_count or 0 for line in lines if not line.names]
    if any(counts):
        why += f": {count(max(counts), 'layer')} without names"
    elif any(line.names is None and line.printed_count == 0 for line in lines):
        why += ": a count of 0 without names, which TensorRT 10.3 prints whatever it chose"
    else:
        return _silence(view, why)
    return _missing_names(view, why, do.NAMES_IN_LOG)


def strange_choices(view: BuildView, sighting: Sighting) -> Gap | None:
    """Why it is not known whether a layer that no list names as chosen runs dense."""
    names = view.seen.unresolved[SparsityKind.CHOSEN]
    if names and sighting.eligible is not None:
        # what stands beside its own name on a list is another layer
        names = names.difference(sighting.eligible.line.names or ())
    return _strange_names(view, names, "chosen", "eligible layer")


def _cut_list(view: BuildView, *, foreign: bool) -> Gap | None:
    """What is missing in the lists of eligible layers of this pass."""
    eligible = [line for line in view.lines if line.kind is SparsityKind.ELIGIBLE]
    lines = [line for line in eligible if line.foreign_node is foreign]
    if any(_lacks_names(line) for line in lines):
        why = "the log has no names behind its (Sparsity) lines"
        return _missing_names(view, why, do.NAMES_IN_LOG)
    if any(map(view.is_cut, lines)):
        why = "names are missing in the list of eligible layers"
        return Gap(why=why, remedy=do.WHOLE_LOG.text)
    return None


def _lacks_names(line: SparsityLine) -> bool:
    is_silent = line.names is None and line.printed_count is None
    return not line.names and (line.missing > 0 or is_silent)


def _silent_log(view: BuildView, build: Build) -> Gap:
    """Why a log without (Sparsity) lines, or without an end, does not list the layer."""
    facts = view.facts
    if not view.lines and (build.engine_loaded or build.outcome is BuildOutcome.LOADED):
        why = "the log is of a loaded engine: only the log of its build reports on sparsity"
        return _missing_names(view, why, do.LOG_OF_BUILD)
    if view.unfinished:
        why = "the log ends before the build does, without a word about sparsity"
        if view.lines:
            why = "the log ends before the build does, and has not named it yet"
        return Gap(why=why, remedy=do.FINISH_BUILD.text)
    allowed = "sparse weights were allowed, and the "
    if build.made_no_engine:
        why = "the build failed before it said anything about sparsity"
    elif facts.verbose and facts.sparse_weights:
        why = f"{allowed}verbose log has no (Sparsity) line"
    elif facts.verbose:
        why = "the verbose log has no (Sparsity) line: sparse weights were probably not allowed"
    elif facts.sparse_weights:
        why = f"{allowed}log has no (Sparsity) line: not verbose enough"
    else:
        why = "the log has no (Sparsity) line: not verbose enough, or sparse weights were not "
        why += "allowed"
    return _silence(view, why)
