"""Why an eligible layer runs dense: sparse was slower, skipped, never offered, or is not logged."""

from __future__ import annotations

from twofour.eligibility.findings import BuildFacts
from twofour.eligibility.reasons import REASONS, leaves_dense
from twofour.eligibility.remedies import (
    ACCEPT_DENSE,
    ALLOW_FLOAT16,
    DELETE_CACHE,
    EXPORT_FLOAT16,
    LARGER_BATCH,
    LARGER_WORKSPACE,
    LOG_OF_TYPE,
    MORE_MEMORY,
    NO_CACHE,
    still_to_do,
)
from twofour.records.eligibility import Verdict, VerdictName
from twofour.records.log import SkippedTactic, SkipReason, Tactic, TunedLayer
from twofour.records.weights import Reason, ReasonCode
from twofour.reports.join.outcome import JoinCase
from twofour.reports.join.sources import quoted_source
from twofour.reports.words import count, tactic_times_words

_MIB = 1 << 20
_LOW_TYPES = frozenset({"float16", "half", "bfloat16", "int8"})
"""Types of weights, as ONNX and layer information call them, that have sparse kernels."""
_FASTER_WINS = REASONS[ReasonCode.DENSE_TAKEN].source or ""


def why_dense(case: JoinCase) -> tuple[tuple[Reason, ...], str | None]:
    """Reasons, the main one first, and the remedy; what the rules said against it comes along."""
    sparse, dense = case.sparse_ms, case.dense_ms
    skipped = _workspace(case.seen.skipped)
    if sparse is not None and dense is not None:
        found, remedy = _both_timed(case, sparse, dense), case.row.remedy or LARGER_BATCH.text
    elif skipped is not None and sparse is None:
        found, remedy = _skipped(case, skipped), _more_workspace(case, skipped)
    elif _hidden(case):
        steps = still_to_do(case.around.facts, DELETE_CACHE, NO_CACHE)
        found, remedy = _cached(case), steps[0] if steps else case.row.remedy or LARGER_BATCH.text
    elif case.seen.tuned is not None and _all_named(case.seen.tuned):
        found, remedy = _none_offered(case, case.seen.tuned), case.row.remedy or _other_type(case)
    else:
        found, remedy = _taken(case), case.row.remedy or LARGER_BATCH.text
    if is_of_lower_type(case.row, case.around.facts) and not leaves_dense(case.row.remedy or ""):
        remedy = f"{LOG_OF_TYPE.text} {case.row.dtype} file and give its log"
    return (found, *_rules_against(case)), remedy


def is_of_lower_type(row: Verdict, build: BuildFacts) -> bool:
    """Whether a layer of the model has a type that a build in FP32 alone cannot have met."""
    is_low = bool(row.shape) and row.dtype.lower() in _LOW_TYPES
    return is_low and build.types == frozenset() and not build.is_strongly_typed


def _both_timed(case: JoinCase, sparse: float, dense: float) -> Reason:
    tactic = _fastest_sparse(case.seen.tuned)
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
    message = f"tactics were skipped for {what}: {_asked(tactic)}; no sparse one was timed"
    source = quoted_source(case.around.file, tactic)
    return Reason(code=ReasonCode.TACTIC_SKIPPED, message=message, source=source)


def _asked(tactic: SkippedTactic) -> str:
    asked = "size not said" if tactic.requested_bytes is None else f"{tactic.requested_bytes:,}"
    if tactic.requested_bytes is not None:
        asked += " bytes wanted"
    if tactic.available_bytes is None:
        return asked
    return f"{asked}, {tactic.available_bytes:,} available"


def _more_workspace(case: JoinCase, tactic: SkippedTactic) -> str:
    build = case.around.build
    wishes = [tactic.requested_bytes or 0, (build.workspace_wanted_bytes if build else 0) or 0]
    most = max(*wishes, *(s.requested_bytes or 0 for s in case.seen.skipped))
    if tactic.reason is not SkipReason.WORKSPACE or not most:
        return MORE_MEMORY.text
    size = f"{-(-most // _MIB):,} MiB or more"
    return f"{LARGER_WORKSPACE.text} {size} (--memPoolSize=workspace:)"


def _cached(case: JoinCase) -> Reason:
    message = "eligible, a dense kernel was taken; a timing cache hides what was timed"
    return Reason(code=ReasonCode.DENSE_TAKEN, message=message, source=_FASTER_WINS + _in(case))


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


def _taken(case: JoinCase) -> Reason:
    holder = case.kernel_holder
    kernel = "a dense kernel was taken" if holder is None else f"it runs {case.dense_kernels}"
    message = f"eligible, and {kernel}; no time of a sparse one is in the log"
    return Reason(code=ReasonCode.DENSE_TAKEN, message=message, source=_FASTER_WINS)


def _rules_against(case: JoinCase) -> tuple[Reason, ...]:
    """What the rules already said of an eligible layer, such as DTYPE or SMALL_CHANNELS."""
    if case.row.predicted is not VerdictName.ELIGIBLE:
        return ()
    return tuple(r for r in case.row.reasons if r.code is not ReasonCode.QUALIFIES)


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


def _fastest_sparse(tuned: TunedLayer | None) -> Tactic | None:
    if tuned is None:
        return None
    return next((t for t in tuned.tactics if t.sparse and t.ms is not None), None)


def _workspace(skipped: tuple[SkippedTactic, ...]) -> SkippedTactic | None:
    """The skipped tactic that wanted most."""
    wanting = [s for s in skipped if s.reason is not SkipReason.ERROR]
    return max(wanting, key=lambda s: s.requested_bytes or 0, default=None)


def _in(case: JoinCase) -> str:
    return f"; {case.around.file}" if case.around.file else ""
