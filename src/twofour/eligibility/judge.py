"""One layer and its evidence in, its one measured verdict out: the first rule that applies.

What proves a choice, best first: the kernel's name in layer information, the layer's name on the
chosen line, the count on it. Weights marked as sparse in layer information prove eligibility only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from twofour.eligibility import remedies as do
from twofour.eligibility.build_evidence import quote_line, quote_tactic, quoted_name
from twofour.eligibility.build_facts import BuildFacts
from twofour.eligibility.build_view import (
    Gap,
    JoinCase,
    choice_gap,
    eligibility_gap,
    left_out,
    strange_choices,
)
from twofour.eligibility.predict import contradicted
from twofour.eligibility.reasons import REASONS, leaves_dense, obstacles
from twofour.eligibility.remedies import Remedy, still_to_do
from twofour.eligibility.rules import DLA_CHANNELS, DLA_RULE, gpu_in_words
from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.export import FIRST_WITH_SPARSE
from twofour.records.log import SkippedTactic, SkipReason, SparsityKind, TunedLayer
from twofour.records.weights import Reason, ReasonCode
from twofour.words import count, listed, one_of, tactic_times_words

FORCED = "--sparsity=force overwrote the weights: the log says nothing about the model's own"
_MIB = 1 << 20
_LOW_TYPES = frozenset({"float16", "half", "bfloat16", "int8"})
"""Types of weights, as ONNX and layer information call them, that have sparse kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the evidence changes in the row of a layer."""

    verdict: VerdictName
    reasons: tuple[Reason, ...]
    remedy: str | None
    evidence: Evidence | None = Evidence.MEASURED
    refuted: Reason | None = None


def judge(case: JoinCase) -> Judgement:
    """The verdict of one layer; the predicted one where the evidence does not mention it."""
    # The first rule that answers decides. A layer with a sparse kernel in layer information is
    # chosen even if the log lists nothing; one that the chosen line names and layer information
    # shows with a dense kernel is eligible, as the engine counts more than the log.
    rules: tuple[Callable[[JoinCase], Judgement | None], ...] = (
        _chosen,
        _ruled_out_by_build,
        _eligible,
        _absent,
        _plugin,
        _not_listed,
        _unplaced,
    )
    found = next((o for rule in rules if (o := rule(case)) is not None), None)
    if found is None:
        found = _unsaid(case)
    elif found.evidence is not None:
        found = _checked(case, found)
    fused = case.siblings
    if fused is None or any(reason.code is fused.code for reason in found.reasons):
        return found
    return replace(found, reasons=(*found.reasons, fused))


def _checked(case: JoinCase, found: Judgement) -> Judgement:
    """What was measured, with what it contradicts: the rules, or the log itself."""
    row, usable = case.row, found.verdict in (VerdictName.CHOSEN, VerdictName.ELIGIBLE)
    # the rules predict no choice, unknown is no prediction, and on some outcomes they are silent
    chosen = found.verdict is VerdictName.CHOSEN and row.predicted is VerdictName.ELIGIBLE
    agrees = row.predicted in (VerdictName.UNKNOWN, found.verdict) or chosen
    is_wrong = not agrees and REASONS[found.reasons[0].code].refutes_rules
    said = row.reasons[0] if is_wrong else None
    contradiction = () if said is None else (contradicted(row.predicted, said),)
    reasons = (*found.reasons, *contradiction, *_log_contradicts(case))
    # the engine does what the weights of this file do not allow
    is_other = usable and row.predicted is VerdictName.NOT_ELIGIBLE
    is_other = is_other and any(REASONS[r.code].builder_obeys for r in row.reasons)
    remedy = do.SAME_MODEL.text if is_other else found.remedy
    return replace(found, reasons=tuple(dict.fromkeys(reasons)), remedy=remedy, refuted=said)


def _log_contradicts(case: JoinCase) -> tuple[Reason, ...]:
    """Where the log contradicts itself on the lines that name this layer."""
    lines = {m.line.line for m in (case.seen.eligible, case.seen.chosen) if m is not None}
    return tuple(
        Reason(
            code=ReasonCode.LOG_CONTRADICTS,
            message=f"the log contradicts itself: {c.message}",
            source=f"{case.view.file}:{c.line}",
        )
        for c in case.view.contradictions
        if c.line in lines
    )


# --- the rules, in their order --------------------------------------------------------------------


def _chosen(case: JoinCase) -> Judgement | None:
    view, holder, mention = case.view, case.kernel_holder, case.seen.chosen
    if view.forced:
        return None
    if holder is not None and holder.sparse:
        kernel = quoted_name(holder.kernel or "")
        message = f"the engine runs the sparse kernel {kernel}"
        source = f"{view.seen.engine_file}: {quoted_name(holder.name)}: {kernel}"
    elif case.runs_dense:
        return None
    elif mention is not None:
        message, source = "the builder chose a sparse kernel", mention.source(view.file)
    elif (line := view.counted_as_all(case.seen)) is not None:
        message = "the builder chose sparse kernels for as many layers as are eligible"
        source = quote_line(view.file, line)
    else:
        return None
    if case.sparse_ms is not None and case.dense_ms is not None:
        message += f": {tactic_times_words(case.sparse_ms, case.dense_ms)}"
    reason = Reason(code=ReasonCode.QUALIFIES, message=message, source=source)
    return Judgement(verdict=VerdictName.CHOSEN, reasons=(reason,), remedy=None)


def _ruled_out_by_build(case: JoinCase) -> Judgement | None:
    """What the build shows, behind what the model itself lacks.

    The model's remedy comes first too, if that is not to leave the layer dense.
    """
    row, (said, step) = case.row, _obstacles_of_build(case)
    if not said:
        return None
    against = row.reasons if row.predicted is VerdictName.NOT_ELIGIBLE else ()
    if against and against[0].code in {reason.code for reason in said}:
        against = ()
    left_dense = bool(against) and leaves_dense(row.remedy or "")
    steps = () if left_dense else still_to_do(case.view.facts, step)
    remedy = "; ".join(s for s in (row.remedy if against else None, *steps) if s)
    return Judgement(
        verdict=VerdictName.NOT_ELIGIBLE, reasons=(*against, *said), remedy=remedy or None
    )


def _obstacles_of_build(case: JoinCase) -> tuple[list[Reason], Remedy]:
    """An old GPU, sparse weights that were not allowed, what the DLA cannot; and what to change."""
    view, row, said, step = case.view, case.row, [], do.ALLOW_SPARSE
    build, types = view.build, view.facts.types
    fits = row.op == "Conv" and row.in_channels > DLA_CHANNELS
    in_int8 = row.dtype == "int8" or types is None or "INT8" in types
    if case.seen.on_dla and row.shape and not (fits and in_int8):
        step = do.ON_GPU
        message = f"{DLA_RULE}: this is {row.op}, C={row.in_channels}, {row.dtype}"
        said.append(REASONS[ReasonCode.ON_DLA].reason(message))
    capability = None if build is None else build.compute_capability
    if build is not None and capability and capability < FIRST_WITH_SPARSE:
        message = gpu_in_words(build.gpu or "the GPU", capability)
        code, step = ReasonCode.GPU_HAS_NO_SPARSE, do.NEWER_GPU
        said.append(Reason(code=code, message=message, source=build.file))
    if view.off:
        message = "sparse weights were not allowed in this build"
        said.append(Reason(code=ReasonCode.SPARSITY_OFF, message=message, source=view.file))
    return said, step


def _eligible(case: JoinCase) -> Judgement | None:
    if case.view.forced or (proof := _proof_of_eligibility(case)) is None:
        return None
    mention, verdict = case.seen.eligible, VerdictName.ELIGIBLE
    passes = (False, True) if mention is None else (mention.line.foreign_node,)
    listed = any(case.view.lists(SparsityKind.CHOSEN, foreign=foreign) for foreign in passes)
    mixed = case.seen.perhaps_chosen
    gap = None
    if not case.runs_dense:
        find_gap = strange_choices if listed and mixed is None else choice_gap
        gap = find_gap(case.view, case.seen)
    if gap is not None:
        source = case.view.file or None if mixed is None else mixed.source(case.view.file)
        silent = Reason(code=ReasonCode.LOG_SILENT, message=gap.why, source=source)
        return Judgement(verdict=verdict, reasons=(proof, silent), remedy=gap.remedy)
    reasons, remedy = _why_dense(case)
    if case.seen.chosen is None:
        return Judgement(verdict=verdict, reasons=(*reasons, proof), remedy=remedy)
    denied = Reason(
        code=ReasonCode.LOG_CONTRADICTS,
        message=f"the log calls it chosen, and the engine runs {case.dense_kernels}",
        source=case.seen.chosen.source(case.view.file),
    )
    return Judgement(verdict=verdict, reasons=(denied, *reasons), remedy=do.SAME_BUILD.text)


def _proof_of_eligibility(case: JoinCase) -> Reason | None:
    mention = case.seen.eligible or case.seen.chosen
    marked = next((h for h in case.seen.holders if h.has_sparse_weights), None)
    if mention is not None:
        source = mention.source(case.view.file)
        message = "the builder lists it as eligible"
    elif marked is not None:
        file = case.view.seen.engine_file
        source = f"{file}: {quoted_name(marked.name)}: HasSparseWeights: 1"
        message = "layer information marks its weights as sparse: it is eligible, not chosen"
    else:
        return None
    return Reason(code=ReasonCode.QUALIFIES, message=message, source=source)


def _absent(case: JoinCase) -> Judgement | None:
    seen, view = case.seen, case.view
    is_there = seen.holders or seen.region or seen.among or seen.perhaps or seen.in_log
    is_there = is_there or seen.node in view.seen.elsewhere
    if is_there or view.listing_cut or not view.seen.engine_complete or not view.seen.engine:
        return None
    reasons = (view.absence(seen.node),)
    return Judgement(verdict=VerdictName.NOT_IN_ENGINE, reasons=reasons, remedy=None)


def _plugin(case: JoinCase) -> Judgement | None:
    kinds = [(h.name, h.layer_type or "") for h in case.seen.holders]
    if case.seen.tuned is not None:
        kinds.append((case.seen.tuned.name, case.seen.tuned.runner or ""))
    found = next((name for name, kind in kinds if kind.lower().startswith("plugin")), None)
    if found is None:
        return None
    name = quoted_name(found)
    message = f"it runs in the plugin {name}, whose kernels TensorRT does not choose"
    source = f"{case.view.seen.engine_file or case.view.file}: {name}"
    reason = Reason(code=ReasonCode.IN_PLUGIN, message=message, source=source)
    return Judgement(verdict=VerdictName.NOT_ELIGIBLE, reasons=(reason,), remedy=do.NO_PLUGIN.text)


def _not_listed(case: JoinCase) -> Judgement | None:
    """A whole list of eligible layers without it; or layer information that leaves it unmarked."""
    row, verdict = case.row, VerdictName.NOT_ELIGIBLE
    reason = None if case.view.forced else left_out(case.view, case.seen) or _unmarked(case)
    if reason is None:
        return None
    if row.predicted is verdict:
        return Judgement(verdict=verdict, reasons=(*row.reasons, reason), remedy=row.remedy)
    if row.predicted is not VerdictName.UNKNOWN:
        own = Judgement(verdict=verdict, reasons=(reason,), remedy=do.SAME_MODEL.text)
        return _spoiled(case, reason) or own
    if not row.shape:
        return Judgement(verdict=verdict, reasons=(reason,), remedy=do.GIVE_MODEL.text)
    return Judgement(verdict=verdict, reasons=(reason, *row.reasons), remedy=row.remedy)


def _unmarked(case: JoinCase) -> Reason | None:
    """HasSparseWeights: 0 where other layers of the engine have 1, so that sparsity was allowed."""
    unmarked = next((h for h in case.seen.holders if h.has_sparse_weights is False), None)
    if unmarked is None or not case.view.sparse_weights_seen:
        return None
    message = "layer information marks weights as sparse in other layers, not in this one"
    source = f"{case.view.seen.engine_file}: {quoted_name(unmarked.name)}: HasSparseWeights: 0"
    return Reason(code=ReasonCode.NOT_LISTED, message=message, source=source)


def _spoiled(case: JoinCase, reason: Reason) -> Judgement | None:
    """A layer that its own weights allow, fused with one whose weights do not."""
    fused = case.siblings
    against = [v for v in case.fused if v.predicted is VerdictName.NOT_ELIGIBLE]
    if fused is None or not against:
        return None
    names = listed([v.layer for v in against])
    codes = ", ".join(dict.fromkeys(v.reasons[0].code.value for v in against))
    said = replace(fused, message=f"{fused.message}; of them {names} cannot run sparse ({codes})")
    remedies = list(dict.fromkeys(v.remedy for v in against if v.remedy))
    if not remedies or any(map(leaves_dense, remedies)):
        remedy = f"{do.LEAVE_FUSED.text} {names}"
    elif all(remedy.startswith(do.PRUNE_ALONG.text) for remedy in remedies):
        remedy = f"{do.PRUNE_FUSED.text}: {names}"
    else:
        remedy = f"{do.MEND_FUSED.text}: {names} ({'; '.join(remedies)})"
    return Judgement(verdict=VerdictName.NOT_ELIGIBLE, reasons=(said, reason), remedy=remedy)


def _unplaced(case: JoinCase) -> Judgement | None:
    """In a region whose ends do not show what is in it, or in no layer of the engine."""
    seen, view = case.seen, case.view
    if not seen.perhaps or seen.in_log or not view.seen.engine_complete or view.listing_cut:
        return None
    region = one_of("Myelin region", [quoted_name(layer.name) for layer in seen.perhaps])
    message = f"it may lie in {region}: neither its name nor its neighbours say what it holds"
    source = view.seen.engine_file
    steps = " or ".join(still_to_do(view.facts, do.NAME_KERNELS, do.VERBOSE_LOG))
    said = Reason(code=ReasonCode.LOG_SILENT, message=message, source=source)
    return Judgement(
        verdict=VerdictName.UNKNOWN,
        evidence=None,
        reasons=(said, *case.row.reasons),
        remedy="; ".join(r for r in (case.row.remedy, steps) if r) or None,
    )


def _unsaid(case: JoinCase) -> Judgement:
    """The prediction, and why the evidence neither confirms nor refutes it."""
    view, row = case.view, case.row
    remedy: str | None
    if view.forced:
        said, remedy = REASONS[ReasonCode.SPARSITY_FORCED].reason(FORCED), do.NOT_FORCED.text
        if view.facts.timing_cache == "global":
            remedy += f"; {do.DELETE_CACHE.text}"
    else:
        gap = eligibility_gap(view, case.seen) or Gap(why="no evidence mentions it", remedy=None)
        why = f"it runs {case.dense_kernels}; {gap.why}" if case.runs_dense else gap.why
        said = Reason(code=ReasonCode.LOG_SILENT, message=why, source=view.file or None)
        remedy = gap.remedy
    evidence = None if row.predicted is VerdictName.UNKNOWN else Evidence.PREDICTED
    ran_dense = case.runs_dense and view.facts.sparse_weights is True
    first = evidence is None or (ran_dense and row.predicted is VerdictName.ELIGIBLE)
    return Judgement(
        verdict=row.predicted,
        evidence=evidence,
        reasons=(said, *row.reasons) if first else (*row.reasons, said),
        remedy="; ".join(dict.fromkeys(r for r in (row.remedy, remedy) if r)) or None,
    )


# --- why a dense kernel was taken -----------------------------------------------------------------


def _why_dense(case: JoinCase) -> tuple[tuple[Reason, ...], str | None]:
    """Reasons, the main one first, and the remedy; doubts of the rules come last."""
    tuned, facts, own = case.seen.tuned, case.view.facts, case.row.remedy
    wanting = (s for s in case.seen.skipped if s.reason is not SkipReason.ERROR)
    skipped = max(wanting, key=lambda s: s.requested_bytes or 0, default=None)
    named = [t for t in (tuned.tactics if tuned is not None else ()) if t.kernel is not None]
    row, remedy = REASONS[ReasonCode.DENSE_TAKEN], own or do.LARGER_BATCH.text
    if case.sparse_ms is not None and case.dense_ms is not None:
        found = _both_timed(case, case.sparse_ms, case.dense_ms)
    elif skipped is not None and case.sparse_ms is None:
        found, remedy = _skipped(case, skipped)
    elif _is_hidden(case):
        steps = still_to_do(facts, do.DELETE_CACHE, do.NO_CACHE)
        source = f"{row.source}; {case.view.file}" if case.view.file else row.source
        message = "eligible, a dense kernel was taken; a timing cache hides what was timed"
        found, remedy = row.reason(message, source), steps[0] if steps else remedy
    elif tuned and named and not tuned.dropped_tactics and not any(t.sparse for t in named):
        found, remedy = _none_offered(case, tuned), own or _other_type(case)
    else:
        kernel = (
            f"it runs {case.dense_kernels}" if case.kernel_holder else "a dense kernel was taken"
        )
        found = row.reason(f"eligible, and {kernel}; no time of a sparse one is in the log")
    if is_of_lower_type(case.row, facts) and not leaves_dense(own or ""):
        remedy = f"{do.LOG_OF_TYPE.text} {case.row.dtype} file and give its log"
    known = obstacles(case.row.reasons) if case.row.predicted is VerdictName.ELIGIBLE else ()
    return (found, *known), remedy


def is_of_lower_type(row: Verdict, build: BuildFacts) -> bool:
    """Whether a layer of the model has a type that a build in FP32 alone cannot have met."""
    is_low = bool(row.shape) and row.dtype.lower() in _LOW_TYPES
    return is_low and build.types == frozenset() and not build.is_strongly_typed


def _both_timed(case: JoinCase, sparse: float, dense: float) -> Reason:
    tactics = case.seen.tuned.tactics if case.seen.tuned is not None else ()
    tactic = next((t for t in tactics if t.sparse and t.ms is not None), None)
    words = tactic_times_words(sparse, dense)
    message = f"dense was faster: {words}"
    if sparse < dense:
        message = f"dense was taken although {words}: times are the best over all formats, "
        message += "and reformats around the layer count too"
    source = None if tactic is None else quote_tactic(case.view.file, tactic)
    return Reason(code=ReasonCode.DENSE_FASTER, message=message, source=source)


def _skipped(case: JoinCase, tactic: SkippedTactic) -> tuple[Reason, str]:
    of_workspace = tactic.reason is SkipReason.WORKSPACE
    asked = "size not said"
    if tactic.requested_bytes is not None:
        asked = f"{tactic.requested_bytes:,} bytes wanted"
    if tactic.available_bytes is not None:
        asked += f", {tactic.available_bytes:,} available"
    what = "workspace" if of_workspace else "memory"
    message = f"tactics were skipped for lack of {what}: {asked}; no sparse one was timed"
    source = quote_tactic(case.view.file, tactic)
    build = case.view.build
    wanted = (build.workspace_wanted_bytes if build else 0) or 0
    most = max(wanted, *(s.requested_bytes or 0 for s in case.seen.skipped))
    remedy = do.MORE_MEMORY.text
    if of_workspace and most:
        size = f"{-(-most // _MIB):,} MiB or more"
        remedy = f"{do.LARGER_WORKSPACE.text} {size} (--memPoolSize=workspace:)"
    return Reason(code=ReasonCode.TACTIC_SKIPPED, message=message, source=source), remedy


def _is_hidden(case: JoinCase) -> bool:
    """Whether a timing cache keeps the times of this layer out of the log."""
    build, tuned = case.view.build, case.seen.tuned
    if build is None or case.sparse_ms is not None:
        return False
    if tuned is not None and tuned.cached:
        return True
    return (tuned is None or not tuned.tactics) and build.timing_cache.hides_timings


def _none_offered(case: JoinCase, tuned: TunedLayer) -> Reason:
    named = [t for t in tuned.tactics if t.kernel is not None]
    message = f"the builder timed {count(len(named), 'kernel')}, none of them sparse"
    if tuned.pruned_tactics:
        message += f"; {tuned.pruned_tactics:,} more were left out by the builder's estimate"
    if case.view.facts.types == frozenset():
        message += "; the build is in FP32 alone, for which no sparse kernel is known"
    first = next((t for t in named if t.ms is not None), None)
    source = None if first is None else quote_tactic(case.view.file, first)
    return Reason(code=ReasonCode.NO_SPARSE_TACTIC, message=message, source=source)


def _other_type(case: JoinCase) -> str:
    steps = still_to_do(case.view.facts, do.EXPORT_FLOAT16, do.ALLOW_FLOAT16)
    if not steps or case.row.dtype.lower() in _LOW_TYPES:
        return do.ACCEPT_DENSE.text
    return " or ".join(steps)
