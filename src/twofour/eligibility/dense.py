"""Why a layer is not known to run sparse: a dense kernel was taken, or nothing speaks of it."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.eligibility.build import BuildAround, JoinCase, in_myelin, is_version_8, passes_of
from twofour.eligibility.build_facts import BuildFacts
from twofour.eligibility.evidence import Sighting
from twofour.eligibility.reasons import REASONS, against, leaves_dense
from twofour.eligibility.remedies import (
    ACCEPT_DENSE,
    ALLOW_FLOAT16,
    ALLOW_SPARSE,
    DELETE_CACHE,
    EXPORT_FLOAT16,
    FINISH_BUILD,
    LARGER_BATCH,
    LARGER_WORKSPACE,
    LOG_OF_BUILD,
    LOG_OF_TYPE,
    MORE_MEMORY,
    NAME_KERNELS,
    NAMES_IN_LOG,
    NO_CACHE,
    VERBOSE_LOG,
    WHOLE_LOG,
    Remedy,
    still_to_do,
)
from twofour.eligibility.rows import quoted_source
from twofour.records.eligibility import Verdict, VerdictName
from twofour.records.log import (
    Build,
    BuildOutcome,
    SkippedTactic,
    SkipReason,
    SparsityKind,
    TunedLayer,
)
from twofour.records.weights import Reason, ReasonCode
from twofour.words import count, tactic_times_words

_MIB = 1 << 20
_LOW_TYPES = frozenset({"float16", "half", "bfloat16", "int8"})
"""Types of weights, as ONNX and layer information call them, that have sparse kernels."""
_DENSE_TAKEN = REASONS[ReasonCode.DENSE_TAKEN]


def why_dense(case: JoinCase) -> tuple[tuple[Reason, ...], str | None]:
    """Reasons, the main one first, and the remedy; what the rules said against it comes along."""
    sparse, dense = case.sparse_ms, case.dense_ms
    wanting = (s for s in case.seen.skipped if s.reason is not SkipReason.ERROR)
    skipped = max(wanting, key=lambda s: s.requested_bytes or 0, default=None)
    if sparse is not None and dense is not None:
        found, remedy = _both_timed(case, sparse, dense), case.row.remedy or LARGER_BATCH.text
    elif skipped is not None and sparse is None:
        found, remedy = _skipped(case, skipped), _more_workspace(case, skipped)
    elif _hidden(case):
        steps = still_to_do(case.around.facts, DELETE_CACHE, NO_CACHE)
        file = f"; {case.around.file}" if case.around.file else ""
        message = "eligible, a dense kernel was taken; a timing cache hides what was timed"
        found = _DENSE_TAKEN.reason(message, f"{_DENSE_TAKEN.source}{file}")
        remedy = steps[0] if steps else case.row.remedy or LARGER_BATCH.text
    elif case.seen.tuned is not None and _all_named(case.seen.tuned):
        found, remedy = _none_offered(case, case.seen.tuned), case.row.remedy or _other_type(case)
    else:
        kernel = "a dense kernel was taken"
        if case.kernel_holder is not None:
            kernel = f"it runs {case.dense_kernels}"
        message = f"eligible, and {kernel}; no time of a sparse one is in the log"
        found, remedy = _DENSE_TAKEN.reason(message), case.row.remedy or LARGER_BATCH.text
    if is_of_lower_type(case.row, case.around.facts) and not leaves_dense(case.row.remedy or ""):
        remedy = f"{LOG_OF_TYPE.text} {case.row.dtype} file and give its log"
    known = against(case.row.reasons) if case.row.predicted is VerdictName.ELIGIBLE else ()
    return (found, *known), remedy


def is_of_lower_type(row: Verdict, build: BuildFacts) -> bool:
    """Whether a layer of the model has a type that a build in FP32 alone cannot have met."""
    is_low = bool(row.shape) and row.dtype.lower() in _LOW_TYPES
    return is_low and build.types == frozenset() and not build.is_strongly_typed


def _both_timed(case: JoinCase, sparse: float, dense: float) -> Reason:
    tactics = case.seen.tuned.tactics if case.seen.tuned is not None else ()
    tactic = next((t for t in tactics if t.sparse and t.ms is not None), None)
    words = tactic_times_words(sparse, dense)
    if sparse < dense:
        message = f"dense was taken although {words}: times are the best over all formats, "
        message += "and reformats around the layer count too"
    else:
        message = f"dense was faster: {words}"
    source = None if tactic is None else quoted_source(case.around.file, tactic)
    return Reason(code=ReasonCode.DENSE_FASTER, message=message, source=source)


def _skipped(case: JoinCase, tactic: SkippedTactic) -> Reason:
    what = "workspace" if tactic.reason is SkipReason.WORKSPACE else "memory"
    asked = "size not said"
    if tactic.requested_bytes is not None:
        asked = f"{tactic.requested_bytes:,} bytes wanted"
    if tactic.available_bytes is not None:
        asked += f", {tactic.available_bytes:,} available"
    message = f"tactics were skipped for {what}: {asked}; no sparse one was timed"
    source = quoted_source(case.around.file, tactic)
    return Reason(code=ReasonCode.TACTIC_SKIPPED, message=message, source=source)


def _more_workspace(case: JoinCase, tactic: SkippedTactic) -> str:
    build = case.around.build
    wanted = (build.workspace_wanted_bytes if build else 0) or 0
    most = max(wanted, *(s.requested_bytes or 0 for s in case.seen.skipped))
    if tactic.reason is not SkipReason.WORKSPACE or not most:
        return MORE_MEMORY.text
    size = f"{-(-most // _MIB):,} MiB or more"
    return f"{LARGER_WORKSPACE.text} {size} (--memPoolSize=workspace:)"


def _none_offered(case: JoinCase, tuned: TunedLayer) -> Reason:
    named = [t for t in tuned.tactics if t.kernel is not None]
    message = f"none of the {count(len(named), 'kernel')} that were timed by name is sparse"
    if tuned.pruned_tactics:
        message += f"; {tuned.pruned_tactics:,} more were left out by the builder's estimate"
    if case.around.facts.types == frozenset():
        message += "; the build is in FP32 alone, for which none is known"
    first = next((t for t in named if t.ms is not None), None)
    source = None if first is None else quoted_source(case.around.file, first)
    return Reason(code=ReasonCode.NO_SPARSE_TACTIC, message=message, source=source)


def _other_type(case: JoinCase) -> str:
    steps = still_to_do(case.around.facts, EXPORT_FLOAT16, ALLOW_FLOAT16)
    if not steps or case.row.dtype.lower() in _LOW_TYPES:
        return ACCEPT_DENSE.text
    return " or ".join(steps)


def _hidden(case: JoinCase) -> bool:
    build, tuned = case.around.build, case.seen.tuned
    if build is None or case.sparse_ms is not None:
        return False
    if tuned is not None and tuned.cached:
        return True
    untimed = tuned is None or not tuned.tactics
    return untimed and build.timing_cache.hides_timings


def _all_named(tuned: TunedLayer) -> bool:
    named = [t for t in tuned.tactics if t.kernel is not None]
    return bool(named) and not tuned.dropped_tactics and not any(t.sparse for t in named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """What is missing, and how to come by it."""

    why: str
    remedy: str | None
    """None: all that would tell was done already."""


def to_hear(build: BuildFacts) -> str | None:
    """What makes a build speak of sparsity, as far as it was not done."""
    steps = still_to_do(build, ALLOW_SPARSE, VERBOSE_LOG) or still_to_do(build, NAME_KERNELS)
    return "; ".join(steps) or None


def _or_layers(build: BuildFacts, *first: Remedy) -> str | None:
    """Layer information tells the same where it is not at hand."""
    return ", or ".join(still_to_do(build, *first, NAME_KERNELS)) or None


def silence(around: BuildAround, sighting: Sighting) -> Silence | None:
    """Why nothing says whether this layer is eligible; None where a whole list leaves it out."""
    build, facts = around.build, around.facts
    if build is None:
        why = "layer information alone does not say whether the builder found it eligible"
        if around.seen.engine is None:
            why = "there is no build log"
        return Silence(why=why, remedy=to_hear(facts))
    if not around.lines:
        return _silent_log(build, facts)
    if build.outcome is BuildOutcome.UNFINISHED:
        why = "the log ends before the build does, and has not named it yet"
        return Silence(why=why, remedy=FINISH_BUILD.text)
    foreign = in_myelin(sighting)
    lists = around.lists(SparsityKind.ELIGIBLE, foreign=False)
    if foreign:
        own = around.lists(SparsityKind.ELIGIBLE, foreign=True)
        # TensorRT 8 has no lists of Myelin's own and names what is eligible in the one it prints
        lists = own if own or not is_version_8(build) else lists
    cut = (_cut(around, foreign=part) for part in passes_of(sighting))
    if (missing := next(filter(None, cut), None)) is not None:
        return missing
    if not lists:
        where = (
            "for the Myelin region it lies in" if foreign else "for the layers outside of Myelin"
        )
        why = f"the log has no list of eligible layers {where}"
        return Silence(why=why, remedy=to_hear(facts))
    return _unresolved(around)


def silent_choice(around: BuildAround) -> Silence:
    """Why it is not known whether an eligible layer runs sparse."""
    why = "nothing says whether a sparse kernel was chosen for it"
    build = around.build
    lines = [line for line in around.lines if line.kind is SparsityKind.CHOSEN]
    if build is not None and build.outcome is BuildOutcome.UNFINISHED:
        return Silence(why=why, remedy=FINISH_BUILD.text)
    if any(line.elided or (line.names and around.is_short(line)) for line in lines):
        why += ": names are missing in the list of chosen layers"
        return Silence(why=why, remedy=WHOLE_LOG.text)
    if any(not line.names and line.printed_count for line in lines):
        most = max(line.printed_count or 0 for line in lines)
        remedy = _or_layers(around.facts, NAMES_IN_LOG)
        return Silence(why=f"{why}: {count(most, 'layer')} without names", remedy=remedy)
    if any(line.names is None and line.printed_count == 0 for line in lines):
        why += ": a count of 0 without names, which TensorRT 10.3 prints whatever it chose"
        return Silence(why=why, remedy=_or_layers(around.facts, NAMES_IN_LOG))
    return Silence(why=why, remedy=to_hear(around.facts))


def _cut(around: BuildAround, *, foreign: bool) -> Silence | None:
    """What is missing in the lists of eligible layers of this kind of layers."""
    kind = SparsityKind.ELIGIBLE
    lines = [x for x in around.lines if x.foreign_node is foreign and x.kind is kind]
    if any(
        not x.names and (x.missing or (x.names, x.printed_count) == (None, None)) for x in lines
    ):
        why = "the log has no names behind its (Sparsity) lines"
        return Silence(why=why, remedy=_or_layers(around.facts, NAMES_IN_LOG))
    if any(line.elided or line.uncertain or around.is_short(line) for line in lines):
        why = "names are missing in the list of eligible layers"
        return Silence(why=why, remedy=WHOLE_LOG.text)
    return None


def _unresolved(around: BuildAround) -> Silence | None:
    """Any layer may be behind a listed name that leads to none."""
    strange = len(around.seen.unresolved)
    if not strange:
        return None
    leads = "name leads" if strange == 1 else "names lead"
    return Silence(
        why=f"not among the layers listed as eligible, of which {strange} {leads} to no layer of "
        "the model",
        remedy=_or_layers(around.facts),
    )


def _silent_log(build: Build, facts: BuildFacts) -> Silence:
    if build.engine_loaded or build.outcome is BuildOutcome.LOADED:
        why = "the log is of a loaded engine: only the log of its build speaks of sparsity"
        return Silence(why=why, remedy=_or_layers(facts, LOG_OF_BUILD))
    if build.outcome is BuildOutcome.UNFINISHED:
        why = "the log ends before the build does, without a word about sparsity"
        return Silence(why=why, remedy=FINISH_BUILD.text)
    if build.made_no_engine:
        why = "the build failed before it said anything about sparsity"
        return Silence(why=why, remedy=to_hear(facts))
    return Silence(why=_no_line(facts), remedy=to_hear(facts))


def _no_line(facts: BuildFacts) -> str:
    """Of what a builder needs to print its lists, the log may show one, both or none."""
    if facts.verbose and facts.sparse_weights:
        return "sparse weights were allowed, and the verbose log has no (Sparsity) line"
    if facts.verbose:
        return "the verbose log has no (Sparsity) line: sparse weights were hardly allowed"
    if facts.sparse_weights:
        return "sparse weights were allowed, and the log has no (Sparsity) line: not verbose enough"
    return "the log has no (Sparsity) line: not verbose enough, or sparse weights were not allowed"
