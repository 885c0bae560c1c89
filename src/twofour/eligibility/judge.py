"""One layer and its evidence in, its one measured verdict out: the first rule that applies.

What proves a choice, best first: the kernel's name in layer information, the layer's name on the
chosen line. Weights marked as sparse in layer information prove eligibility only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from twofour.eligibility import remedies as do
from twofour.eligibility.build_evidence import quote_tactic, quoted_name
from twofour.eligibility.build_view import (
    BuildView,
    Gap,
    JoinCase,
    choice_gap,
    eligibility_gap,
    left_out,
    strange_choices,
)
from twofour.eligibility.predict import contradicted
from twofour.eligibility.reasons import REASONS, leaves_dense, obstacles, reason_of
from twofour.eligibility.remedies import has_code, in_turn, still_to_do
from twofour.eligibility.rules import DLA_CHANNELS, DLA_RULE, gpu_in_words
from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.export import FIRST_WITH_SPARSE
from twofour.records.log import SkippedTactic, SkipReason, SparsityKind, Tactic, TunedLayer
from twofour.records.weights import Reason, ReasonCode
from twofour.words import MIB, count, listed, one_of, tactic_times_words

FORCED = "--sparsity=force overwrote the weights: the log says nothing about the model's own"
LOW_TYPES = frozenset({"float16", "half", "bfloat16", "int8"})
"""Types of weights, as ONNX and layer information call them, that have sparse kernels."""


def judge(case: JoinCase) -> Verdict:
    """The row of one layer, judged; as predicted where the evidence does not mention it."""
    # The first rule that answers decides. A layer with a sparse kernel in layer information is
    # chosen even if the log lists nothing; one that the chosen line names and layer information
    # shows with a dense kernel is eligible, as the engine counts more than the log.
    rules: tuple[Callable[[JoinCase], Verdict | None], ...] = (
        _chosen,
        _ruled_out_by_build,
        _eligible,
        _absent,
        _plugin,
        _not_listed,
        _unplaced,
        _unsaid,
    )
    verdict = next(filter(None, (rule(case) for rule in rules)))
    if verdict.evidence is Evidence.MEASURED:
        verdict = _checked(case, verdict)
    fused = case.siblings
    if fused is None or has_code(verdict.reasons, fused.code):
        return verdict
    return replace(verdict, reasons=(*verdict.reasons, fused))


def unmeasured(row: Verdict, why: Reason, remedy: str | None, *, is_main: bool = False) -> Verdict:
    """The predicted row and why nothing was measured, first where nothing is predicted either."""
    reasons = (*row.reasons, why)
    if is_main or row.predicted is VerdictName.UNKNOWN:
        reasons = (why, *row.reasons)
    return replace(row, reasons=reasons, remedy=in_turn(row.remedy, remedy))


def _measured(
    case: JoinCase, verdict: VerdictName, *reasons: Reason, remedy: str | None = None
) -> Verdict:
    return replace(
        case.row, verdict=verdict, evidence=Evidence.MEASURED, reasons=reasons, remedy=remedy
    )


def _checked(case: JoinCase, measured: Verdict) -> Verdict:
    """What was measured, with what it contradicts: the rules, or the log itself."""
    row = case.row
    reasons = list(measured.reasons)
    # the rules predict no choice, unknown is no prediction, and on some outcomes they are silent
    agreeing = {VerdictName.UNKNOWN, measured.verdict}
    if measured.verdict is VerdictName.CHOSEN:
        agreeing.add(VerdictName.ELIGIBLE)
    refuted = None
    if row.predicted not in agreeing and REASONS[reasons[0].code].refutes_rules:
        refuted = row.reasons[0]
        reasons.append(contradicted(row.predicted, refuted))
    reasons += _log_contradicts(case)
    remedy = measured.remedy
    never = any(REASONS[reason.code].builder_obeys for reason in row.reasons)
    if measured.verdict.is_usable and never and row.predicted is VerdictName.NOT_ELIGIBLE:
        # the builder lists a layer whose pattern is broken: the engine is of another file
        remedy = do.SAME_MODEL.text
    return replace(measured, reasons=tuple(dict.fromkeys(reasons)), remedy=remedy, refuted=refuted)


def _log_contradicts(case: JoinCase) -> Iterator[Reason]:
    """Where the log contradicts itself on the lines that name this layer."""
    # TensorRT 10.3: `Chose 0 layer(s) using sparse tactics` and, below it, the names of eight
    mentions = filter(None, (case.seen.eligible, case.seen.chosen))
    lines = {mention.line.line for mention in mentions}
    for contradiction in case.view.contradictions:
        if contradiction.line in lines:
            message = f"the log contradicts itself: {contradiction.message}"
            source = f"{case.view.file}:{contradiction.line}"
            yield reason_of(ReasonCode.LOG_CONTRADICTS, message, source)


# --- the rules, in their order --------------------------------------------------------------------


def _chosen(case: JoinCase) -> Verdict | None:
    proof = None if case.view.forced else _proof_of_choice(case)
    if proof is None:
        return None
    message, source = proof
    if case.sparse_ms is not None and case.dense_ms is not None:
        message += f": {tactic_times_words(case.sparse_ms, case.dense_ms)}"
    reason = reason_of(ReasonCode.QUALIFIES, message, source)
    return _measured(case, VerdictName.CHOSEN, reason)


def _proof_of_choice(case: JoinCase) -> tuple[str, str] | None:
    """What shows that a sparse kernel runs, and where it is written; None if nothing does."""
    view = case.view
    holder = case.kernel_holder
    if holder is not None and holder.sparse:
        kernel = quoted_name(holder.kernel or "")
        source = f"{view.seen.engine_file}: {quoted_name(holder.name)}: {kernel}"
        return f"the engine runs the sparse kernel {kernel}", source
    if case.runs_dense:
        return None
    mention = case.seen.chosen
    if mention is None:
        return None
    return "the builder chose a sparse kernel", mention.source(view.file)


def _ruled_out_by_build(case: JoinCase) -> Verdict | None:
    """What the build shows, behind what the model itself lacks.

    The model's remedy comes first too, if that is not to leave the layer dense.
    """
    row = case.row
    shown = tuple(_obstacles_of_build(case))
    if not shown:
        return None
    steps = still_to_do(case.view.facts, *REASONS[shown[0].code].remedies)
    if row.predicted is not VerdictName.NOT_ELIGIBLE or has_code(shown, row.reasons[0].code):
        return _measured(case, VerdictName.NOT_ELIGIBLE, *shown, remedy=in_turn(*steps))
    remedy = row.remedy
    if not leaves_dense(remedy or ""):
        remedy = in_turn(remedy, *steps)
    return _measured(case, VerdictName.NOT_ELIGIBLE, *row.reasons, *shown, remedy=remedy)


def _obstacles_of_build(case: JoinCase) -> Iterator[Reason]:
    """An old GPU, what the DLA cannot run, sparse weights that were not allowed."""
    row = case.row
    view = case.view
    capability = view.facts.compute_capability
    if view.build is not None and capability is not None and capability < FIRST_WITH_SPARSE:
        message = gpu_in_words(view.build.gpu or "the GPU", capability)
        yield reason_of(ReasonCode.GPU_HAS_NO_SPARSE, message, view.file)
    types = view.facts.types
    fits = row.op == "Conv" and row.in_channels > DLA_CHANNELS
    in_int8 = row.dtype == "int8" or types is None or "INT8" in types
    if case.seen.on_dla and row.shape and not (fits and in_int8):
        message = f"{DLA_RULE}: this is {row.op}, C={row.in_channels}, {row.dtype}"
        yield reason_of(ReasonCode.ON_DLA, message)
    if view.off:
        message = "sparse weights were not allowed in this build"
        yield reason_of(ReasonCode.SPARSITY_OFF, message, view.file)


def _eligible(case: JoinCase) -> Verdict | None:
    view = case.view
    proof = None if view.forced else _proof_of_eligibility(case)
    if proof is None:
        return None
    gap = None if case.runs_dense else _gap_of_choice(case)
    if gap is not None:
        mixed = case.seen.perhaps_chosen
        source = view.file if mixed is None else mixed.source(view.file)
        silent = reason_of(ReasonCode.LOG_SILENT, gap.why, source)
        return _measured(case, VerdictName.ELIGIBLE, proof, silent, remedy=gap.remedy)
    why, remedy = _why_dense(case)
    reasons = [why]
    if case.row.predicted is VerdictName.ELIGIBLE:
        reasons += obstacles(case.row.reasons)
    chosen = case.seen.chosen
    if chosen is None:
        return _measured(case, VerdictName.ELIGIBLE, *reasons, proof, remedy=remedy)
    message = f"the log calls it chosen, and the engine runs {case.dense_kernels}"
    denied = reason_of(ReasonCode.LOG_CONTRADICTS, message, chosen.source(view.file))
    return _measured(case, VerdictName.ELIGIBLE, denied, *reasons, remedy=do.SAME_BUILD.text)


def _proof_of_eligibility(case: JoinCase) -> Reason | None:
    mention = case.seen.eligible or case.seen.chosen
    marked = next((h for h in case.seen.holders if h.has_sparse_weights), None)
    if mention is not None:
        source = mention.source(case.view.file)
        message = "the builder lists it as eligible"
    elif marked is not None:
        source = f"{case.view.seen.engine_file}: {quoted_name(marked.name)}: HasSparseWeights: 1"
        message = "layer information marks its weights as sparse: it is eligible, not chosen"
    else:
        return None
    return reason_of(ReasonCode.QUALIFIES, message, source)


def _gap_of_choice(case: JoinCase) -> Gap | None:
    """Why nothing says whether an eligible layer was chosen; None where it was not."""
    mention = case.seen.eligible
    # a layer that only layer information marks may be of either pass: Myelin's or the others
    passes = (False, True) if mention is None else (mention.line.foreign_node,)
    has_list = any(case.view.lists(SparsityKind.CHOSEN, foreign=foreign) for foreign in passes)
    if has_list and case.seen.perhaps_chosen is None:
        return strange_choices(case.view, case.seen)
    return choice_gap(case.view, case.seen)


def _absent(case: JoinCase) -> Verdict | None:
    seen, view = case.seen, case.view
    is_there = seen.holders or seen.region or seen.among or seen.perhaps or seen.in_log
    if is_there or seen.node in view.seen.elsewhere or not _is_whole(view):
        return None
    return _measured(case, VerdictName.NOT_IN_ENGINE, view.absence(seen.node))


def _is_whole(view: BuildView) -> bool:
    """Whether every layer of the engine is known, and leads to the model."""
    return bool(view.seen.engine) and view.seen.engine_complete and not view.listing_cut


def _plugin(case: JoinCase) -> Verdict | None:
    # layer information has `"LayerType": "PluginV2"`, a log `Timing Runner: nms (PluginV2Build)`
    kinds = [(holder.name, holder.layer_type) for holder in case.seen.holders]
    if case.seen.tuned is not None:
        kinds.append((case.seen.tuned.name, case.seen.tuned.runner))
    for name, kind in kinds:
        if (kind or "").lower().startswith("plugin"):
            message = f"it runs in the plugin {quoted_name(name)}, whose kernels TensorRT does "
            message += "not choose"
            source = f"{case.view.seen.engine_file or case.view.file}: {quoted_name(name)}"
            reason = reason_of(ReasonCode.IN_PLUGIN, message, source)
            return _measured(case, VerdictName.NOT_ELIGIBLE, reason, remedy=do.NO_PLUGIN.text)
    return None


def _not_listed(case: JoinCase) -> Verdict | None:
    """A whole list of eligible layers without it; or layer information that leaves it unmarked."""
    row = case.row
    verdict = VerdictName.NOT_ELIGIBLE
    reason = None if case.view.forced else left_out(case.view, case.seen) or _unmarked(case)
    if reason is None:
        return None
    if row.predicted is verdict:
        return _measured(case, verdict, *row.reasons, reason, remedy=row.remedy)
    if row.predicted is not VerdictName.UNKNOWN:
        unexpected = _measured(case, verdict, reason, remedy=do.SAME_MODEL.text)
        return _spoiled(case, reason) or unexpected
    if not row.shape:
        return _measured(case, verdict, reason, remedy=do.GIVE_MODEL.text)
    return _measured(case, verdict, reason, *row.reasons, remedy=row.remedy)


def _unmarked(case: JoinCase) -> Reason | None:
    """HasSparseWeights: 0 where other layers of the engine have 1, so that sparsity was allowed."""
    unmarked = next((h for h in case.seen.holders if h.has_sparse_weights is False), None)
    if unmarked is None or not case.view.sparse_weights_seen:
        return None
    message = "layer information marks weights as sparse in other layers, not in this one"
    source = f"{case.view.seen.engine_file}: {quoted_name(unmarked.name)}: HasSparseWeights: 0"
    return reason_of(ReasonCode.NOT_LISTED, message, source)


def _spoiled(case: JoinCase, reason: Reason) -> Verdict | None:
    """A layer that its own weights allow, fused with one whose weights do not."""
    # q, k and v run as one layer `q + k + v`, and k is dense: the builder lists none of the three.
    # The row of q says that it is fused with k, and its remedy is to prune k too.
    fused = case.siblings
    against = [v for v in case.fused if v.predicted is VerdictName.NOT_ELIGIBLE]
    if fused is None or not against:
        return None
    names = listed([v.layer for v in against])
    spoiled = replace(fused, message=f"{fused.message}; of them {names} cannot run sparse")
    remedy = f"{do.PRUNE_FUSED.text}: {names}"
    return _measured(case, VerdictName.NOT_ELIGIBLE, spoiled, reason, remedy=remedy)


def _unplaced(case: JoinCase) -> Verdict | None:
    """In a region whose ends do not show what is in it, or in no layer of the engine."""
    seen, view = case.seen, case.view
    if not seen.perhaps or seen.in_log or not _is_whole(view):
        return None
    region = one_of("Myelin region", [quoted_name(layer.name) for layer in seen.perhaps])
    message = f"it may lie in {region}: neither its name nor its neighbours say what it holds"
    silent = reason_of(ReasonCode.LOG_SILENT, message, view.seen.engine_file)
    steps = " or ".join(still_to_do(view.facts, do.NAME_KERNELS, do.VERBOSE_LOG))
    row = unmeasured(case.row, silent, steps, is_main=True)
    return replace(row, verdict=VerdictName.UNKNOWN, evidence=None)


def _unsaid(case: JoinCase) -> Verdict:
    """The prediction, and why the evidence neither confirms nor refutes it."""
    row = case.row
    view = case.view
    if view.forced:
        overwritten = reason_of(ReasonCode.SPARSITY_FORCED, FORCED)
        return unmeasured(row, overwritten, do.NOT_FORCED.text)
    gap = eligibility_gap(view, case.seen)
    assert gap is not None, "_not_listed answers where a whole list leaves it out"
    why = gap.why
    is_doubted = False
    if case.runs_dense:
        why = f"it runs {case.dense_kernels}; {why}"
        is_doubted = view.facts.sparse_weights is True and row.predicted is VerdictName.ELIGIBLE
    silent = reason_of(ReasonCode.LOG_SILENT, why, view.file)
    return unmeasured(row, silent, gap.remedy, is_main=is_doubted)


# --- why a dense kernel was taken -----------------------------------------------------------------


def _why_dense(case: JoinCase) -> tuple[Reason, str | None]:
    """The main reason for a dense kernel, and the remedy."""
    tuned = case.seen.tuned
    sparse_ms = case.sparse_ms
    dense_ms = case.dense_ms
    own = case.row.remedy
    remedy = own or do.LARGER_BATCH.text
    if sparse_ms is not None and dense_ms is not None:
        return _both_timed(case, sparse_ms, dense_ms), remedy
    wanting = [s for s in case.seen.skipped if s.reason is not SkipReason.ERROR]
    if wanting and sparse_ms is None:
        return _skipped(case, wanting)
    row = REASONS[ReasonCode.DENSE_TAKEN]
    if _is_hidden(case):
        steps = (*still_to_do(case.view.facts, do.DELETE_CACHE, do.NO_CACHE), remedy)
        message = "eligible, a dense kernel was taken; a timing cache hides what was timed"
        return row.reason(message, f"{row.source}; {case.view.file}"), steps[0]
    if tuned is not None and not tuned.dropped_tactics:
        named = [tactic for tactic in tuned.tactics if tactic.kernel is not None]
        if named and not any(tactic.sparse for tactic in named):
            return _none_offered(case, tuned, named), own or _other_type(case)
    kernel = f"it runs {case.dense_kernels}" if case.kernel_holder else "a dense kernel was taken"
    return row.reason(f"eligible, and {kernel}; the log has no times of both"), remedy


def _both_timed(case: JoinCase, sparse_ms: float, dense_ms: float) -> Reason:
    # `dense was faster: sparse 0.031 ms, dense 0.025 ms`
    words = tactic_times_words(sparse_ms, dense_ms)
    message = f"dense was faster: {words}"
    if sparse_ms < dense_ms:
        message = f"dense was taken although {words}: times are the best over all formats, "
        message += "and reformats around the layer count too"
    source = None
    for tactic in case.seen.tuned.tactics if case.seen.tuned else ():
        if tactic.sparse and tactic.ms is not None:
            source = quote_tactic(case.view.file, tactic)
            break
    return reason_of(ReasonCode.DENSE_FASTER, message, source)


def _skipped(case: JoinCase, tactics: list[SkippedTactic]) -> tuple[Reason, str]:
    # Skipping tactic 0x...: insufficient memory on requested size of 68157440: 65 MiB are proposed
    tactic = max(tactics, key=lambda skipped: skipped.requested_bytes or 0)
    asked = "size not said"
    if tactic.requested_bytes is not None:
        asked = f"{tactic.requested_bytes:,} bytes wanted"
    if tactic.available_bytes is not None:
        asked += f", {tactic.available_bytes:,} available"
    scarce = "memory"
    remedy = do.MORE_MEMORY.text
    if tactic.reason is SkipReason.WORKSPACE:
        scarce = "workspace"
        wanted = case.view.build.workspace_wanted_bytes if case.view.build else None
        most = max(tactic.requested_bytes or 0, wanted or 0)
        if most:
            remedy = f"{do.LARGER_WORKSPACE.text}: {-(-most // MIB):,} MiB or more"
    message = f"tactics were skipped for lack of {scarce}: {asked}; no sparse one was timed"
    source = quote_tactic(case.view.file, tactic)
    return reason_of(ReasonCode.TACTIC_SKIPPED, message, source), remedy


def _is_hidden(case: JoinCase) -> bool:
    """Whether a timing cache keeps the times of this layer out of the log."""
    build = case.view.build
    tuned = case.seen.tuned
    if build is None or case.sparse_ms is not None:
        return False
    if tuned is not None and tuned.cached:
        return True
    return (tuned is None or not tuned.tactics) and build.timing_cache.hides_timings


def _none_offered(case: JoinCase, tuned: TunedLayer, named: Sequence[Tactic]) -> Reason:
    # `the builder timed 24 kernels, none of them sparse`, the fastest of which is quoted
    message = f"the builder timed {count(len(named), 'kernel')}, none of them sparse"
    if tuned.pruned_tactics:
        message += f"; {tuned.pruned_tactics:,} more were left out by the builder's estimate"
    if case.view.facts.types == frozenset():
        message += "; the build is in FP32 alone, for which no sparse kernel is known"
    source = next((quote_tactic(case.view.file, t) for t in named if t.ms is not None), None)
    return reason_of(ReasonCode.NO_SPARSE_TACTIC, message, source)


def _other_type(case: JoinCase) -> str:
    steps = still_to_do(case.view.facts, do.EXPORT_FLOAT16, do.ALLOW_FLOAT16)
    if not steps or case.row.dtype.lower() in LOW_TYPES:
        return do.ACCEPT_DENSE.text
    return " or ".join(steps)
