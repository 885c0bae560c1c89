"""One layer and its evidence in, its one measured verdict out: the first rule that applies.

What proves a choice, best first: the kernel's name in layer information, the layer's name on the
chosen line, the count on it. Weights marked as sparse in layer information prove eligibility only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from twofour.eligibility.build import JoinCase, Outcome, in_myelin, is_version_8, measured
from twofour.eligibility.dense import Silence, silence, silent_choice, why_dense
from twofour.eligibility.names import MOST_SIBLINGS, quoted_name
from twofour.eligibility.predict import contradicted
from twofour.eligibility.reasons import REASONS, leaves_dense
from twofour.eligibility.remedies import (
    ALLOW_SPARSE,
    GIVE_MODEL,
    LEAVE_FUSED,
    MEND_FUSED,
    NAME_KERNELS,
    NEWER_GPU,
    NO_PLUGIN,
    NOT_FORCED,
    PRUNE_ALONG,
    PRUNE_FUSED,
    SAME_BUILD,
    SAME_MODEL,
    VERBOSE_LOG,
    Remedy,
    still_to_do,
)
from twofour.eligibility.rows import line_source, mention_source
from twofour.eligibility.rules import gpu_in_words
from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.log import SparsityKind
from twofour.records.weights import Reason, ReasonCode
from twofour.words import listed, one_of, tactic_times_words

FORCED = "--sparsity=force overwrote weights: the log says nothing about the model's own"
_Rule = Callable[[JoinCase], "Outcome | None"]


def judge(case: JoinCase) -> Outcome:
    """The verdict of one layer; predicted still, where the evidence does not speak of it."""
    found = _judged(case)
    fused = _fused_with(case)
    if fused is None or any(reason.code is fused.code for reason in found.reasons):
        return found
    return replace(found, reasons=(*found.reasons, fused))


def _judged(case: JoinCase) -> Outcome:
    rules: tuple[_Rule, ...] = (
        _chosen,
        _old_gpu,
        _off,
        _eligible,
        _absent,
        _plugin,
        _not_listed,
        _unplaced,
    )
    found = next((o for rule in rules if (o := rule(case)) is not None), None)
    if found is None:
        return _unsaid(case)
    if found.evidence is None:
        return found
    said = _refuted(case, found)
    contradiction = () if said is None else (contradicted(case.row.predicted, said),)
    reasons = (*found.reasons, *contradiction, *_log_contradicts(case))
    remedy = SAME_MODEL.text if _cannot_be(case, found) else found.remedy
    return replace(measured(found.verdict, tuple(dict.fromkeys(reasons)), remedy), refuted=said)


def _cannot_be(case: JoinCase, found: Outcome) -> bool:
    """Whether the engine does what the weights of this file do not allow."""
    usable = found.verdict in (VerdictName.CHOSEN, VerdictName.ELIGIBLE)
    ruled_out = case.row.predicted is VerdictName.NOT_ELIGIBLE
    return usable and ruled_out and any(REASONS[r.code].builder_obeys for r in case.row.reasons)


def _chosen(case: JoinCase) -> Outcome | None:
    if case.around.forced:
        return None
    reason = _by_kernel(case) or (None if case.runs_dense else _by_line(case))
    return None if reason is None else measured(VerdictName.CHOSEN, (reason,), None)


def _by_kernel(case: JoinCase) -> Reason | None:
    holder = case.kernel_holder
    if holder is None or not holder.sparse:
        return None
    kernel = quoted_name(holder.kernel or "")
    message = f"the engine runs the sparse kernel {kernel}{_with_times(case)}"
    source = f"{case.around.seen.engine_file}: {quoted_name(holder.name)}: {kernel}"
    return Reason(code=ReasonCode.QUALIFIES, message=message, source=source)


def _by_line(case: JoinCase) -> Reason | None:
    around, mention = case.around, case.seen.chosen
    if mention is not None:
        message = f"the builder chose a sparse kernel{_with_times(case)}"
        source = mention_source(around.file, mention)
        return Reason(code=ReasonCode.QUALIFIES, message=message, source=source)
    line = around.counted_as_all(case.seen)
    if line is None:
        return None
    message = (
        f"the builder chose sparse kernels for as many layers as are eligible{_with_times(case)}"
    )
    source = line_source(around.file, line)
    return Reason(code=ReasonCode.QUALIFIES, message=message, source=source)


def _off(case: JoinCase) -> Outcome | None:
    if not case.around.off:
        return None
    return _ruled_out_by_build(case, (_switched_off(case),), ALLOW_SPARSE)


def _ruled_out_by_build(case: JoinCase, said: tuple[Reason, ...], step: Remedy) -> Outcome:
    """What the model itself lacks comes first; its remedy too, if that is not to leave it dense."""
    against = case.row.reasons if case.row.predicted is VerdictName.NOT_ELIGIBLE else ()
    known = {reason.code for reason in said}
    if against and against[0].code in known:
        against = ()
    reasons = (*against, *said)
    left_dense = bool(against) and leaves_dense(case.row.remedy or "")
    steps = () if left_dense else still_to_do(case.around.facts, step)
    remedy = "; ".join(s for s in (case.row.remedy if against else None, *steps) if s)
    return measured(VerdictName.NOT_ELIGIBLE, reasons, remedy or None)


def _switched_off(case: JoinCase) -> Reason:
    message = "sparse weights were not allowed in this build"
    return Reason(code=ReasonCode.SPARSITY_OFF, message=message, source=f"{case.around.file}")


def _eligible(case: JoinCase) -> Outcome | None:
    if case.around.forced:
        return None
    proof = _proof_of_eligibility(case)
    if proof is None:
        return None
    if not _choice_known(case):
        gap = silent_choice(case.around)
        source = case.around.file or None
        silent = Reason(code=ReasonCode.LOG_SILENT, message=gap.why, source=source)
        return measured(VerdictName.ELIGIBLE, (proof, silent), gap.remedy)
    reasons, remedy = why_dense(case)
    if case.seen.chosen is not None:
        return measured(VerdictName.ELIGIBLE, (_choice_denied(case), *reasons), SAME_BUILD.text)
    return measured(VerdictName.ELIGIBLE, (*reasons, proof), remedy)


def _proof_of_eligibility(case: JoinCase) -> Reason | None:
    mention = case.seen.eligible or case.seen.chosen
    code = ReasonCode.QUALIFIES
    if mention is not None:
        source = mention_source(case.around.file, mention)
        message = "the builder lists it as eligible"
        return Reason(code=code, message=message, source=source)
    marked = next((h for h in case.seen.holders if h.has_sparse_weights), None)
    if marked is None:
        return None
    message = "layer information marks its weights as sparse, which makes it eligible, not chosen"
    source = f"{case.around.seen.engine_file}: {quoted_name(marked.name)}: HasSparseWeights: 1"
    return Reason(code=code, message=message, source=source)


def _choice_known(case: JoinCase) -> bool:
    """Whether the kernel in the engine is named, or a whole list of chosen layers was printed."""
    if case.runs_dense:
        return True
    mention = case.seen.eligible
    passes = (False, True) if mention is None else (mention.line.foreign_node,)
    return any(case.around.lists(SparsityKind.CHOSEN, foreign=foreign) for foreign in passes)


def _choice_denied(case: JoinCase) -> Reason:
    mention = case.seen.chosen
    assert mention is not None
    message = f"the log calls it chosen, and the engine runs {case.dense_kernels}"
    source = mention_source(case.around.file, mention)
    return Reason(code=ReasonCode.LOG_CONTRADICTS, message=message, source=source)


def _absent(case: JoinCase) -> Outcome | None:
    seen, around = case.seen, case.around
    is_there = bool(seen.holders or seen.region or seen.among or seen.perhaps)
    if is_there or seen.in_log or not around.seen.engine_complete or not around.seen.engine:
        return None
    if around.listing_cut:
        return None
    return measured(VerdictName.NOT_IN_ENGINE, (around.whereabouts.reason(seen.node),), None)


def _unplaced(case: JoinCase) -> Outcome | None:
    """In a region whose ends do not tell what is in it, or in no layer of the engine."""
    seen, around = case.seen, case.around
    if not seen.perhaps or seen.in_log or not around.seen.engine_complete or around.listing_cut:
        return None
    names = [quoted_name(layer.name) for layer in seen.perhaps]
    region = one_of("Myelin region", names)
    message = f"it may lie in {region}: neither name nor neighbours say what is in there"
    source = around.seen.engine_file
    steps = " or ".join(still_to_do(around.facts, NAME_KERNELS, VERBOSE_LOG))
    said = Reason(code=ReasonCode.LOG_SILENT, message=message, source=source)
    return Outcome(
        verdict=VerdictName.UNKNOWN,
        evidence=None,
        reasons=(said, *case.row.reasons),
        remedy="; ".join(r for r in (case.row.remedy, steps) if r) or None,
    )


def _plugin(case: JoinCase) -> Outcome | None:
    kinds = [(h.name, h.layer_type or "") for h in case.seen.holders]
    if case.seen.tuned is not None:
        kinds.append((case.seen.tuned.name, case.seen.tuned.runner or ""))
    found = next((name for name, kind in kinds if kind.lower().startswith("plugin")), None)
    if found is None:
        return None
    name = quoted_name(found)
    message = f"it runs in the plugin {name}, whose kernels TensorRT does not choose"
    source = case.around.seen.engine_file or case.around.file
    reason = Reason(code=ReasonCode.IN_PLUGIN, message=message, source=f"{source}: {name}")
    return measured(VerdictName.NOT_ELIGIBLE, (reason,), NO_PLUGIN.text)


def _old_gpu(case: JoinCase) -> Outcome | None:
    build = case.around.build
    if build is None or not case.around.old_gpu or build.compute_capability is None:
        return None
    message = gpu_in_words(build.gpu or "the GPU", build.compute_capability)
    reason = Reason(code=ReasonCode.GPU_HAS_NO_SPARSE, message=message, source=build.file)
    off = (_switched_off(case),) if case.around.off else ()
    return _ruled_out_by_build(case, (reason, *off), NEWER_GPU)


def _not_listed(case: JoinCase) -> Outcome | None:
    """A whole list of eligible layers without it; or layer information that leaves it unmarked."""
    if case.around.forced:
        return None
    reason = _left_out(case) or _unmarked(case)
    if reason is None:
        return None
    if case.row.predicted is VerdictName.NOT_ELIGIBLE:
        return measured(VerdictName.NOT_ELIGIBLE, (*case.row.reasons, reason), case.row.remedy)
    if case.row.predicted is not VerdictName.UNKNOWN:
        return _spoiled(case, reason) or measured(
            VerdictName.NOT_ELIGIBLE, (reason,), SAME_MODEL.text
        )
    if not case.row.shape:
        return measured(VerdictName.NOT_ELIGIBLE, (reason,), GIVE_MODEL.text)
    return measured(VerdictName.NOT_ELIGIBLE, (reason, *case.row.reasons), case.row.remedy)


def _spoiled(case: JoinCase, reason: Reason) -> Outcome | None:
    """A layer that its own weights allow, fused with one whose weights do not."""
    fused = _fused_with(case)
    against = [v for v in case.fused if v.predicted is VerdictName.NOT_ELIGIBLE]
    if fused is None or not against:
        return None
    names = listed([v.layer for v in against])
    codes = ", ".join(dict.fromkeys(v.reasons[0].code.value for v in against))
    message = f"{fused.message}; of them {names} cannot run sparse ({codes})"
    said = replace(fused, message=message)
    return measured(VerdictName.NOT_ELIGIBLE, (said, reason), _remedy_of_fused(names, against))


def _remedy_of_fused(names: str, against: Sequence[Verdict]) -> str:
    remedies = list(dict.fromkeys(v.remedy for v in against if v.remedy))
    if not remedies or any(map(leaves_dense, remedies)):
        return f"{LEAVE_FUSED.text} {names}"
    if all(remedy.startswith(PRUNE_ALONG.text) for remedy in remedies):
        return f"{PRUNE_FUSED.text}: {names}"
    return f"{MEND_FUSED.text}: {names} ({'; '.join(remedies)})"


def _fused_with(case: JoinCase) -> Reason | None:
    """The siblings of a horizontal fusion: what was seen, with no advice in it."""
    fused = case.seen.siblings
    if fused is None:
        return None
    around, nodes = case.around, case.around.seen.nodes
    names = [nodes[at].name for at in fused.nodes]
    names += ["others"] if len(names) == MOST_SIBLINGS else []
    message = f"runs as one engine layer with {listed(names)}: they read the same input"
    mentions = (case.seen.chosen, case.seen.eligible)
    line = next((m for m in mentions if m is not None and m.name == fused.name), None)
    file = around.seen.engine_file or around.file
    source = (
        f"{file}: {quoted_name(fused.name)}" if line is None else mention_source(around.file, line)
    )
    return Reason(code=ReasonCode.FUSED_SIBLINGS, message=message, source=source)


def _left_out(case: JoinCase) -> Reason | None:
    around = case.around
    if around.build is None or silence(around, case.seen) is not None:
        return None
    own = in_myelin(case.seen) and not is_version_8(around.build)
    lists = around.lists(SparsityKind.ELIGIBLE, foreign=own)
    others = around.lists(SparsityKind.ELIGIBLE, foreign=not own)
    listed = around.eligible_count
    message = f"not among the {listed:,} layers that the builder lists as eligible"
    if listed < 2:
        alone = "not the one layer that the builder lists as eligible"
        message = alone if listed else "the builder lists no layer as eligible"
    quoted = [next((line for line in part if line.names), None) for part in (others, lists)]
    lines = [line for line in quoted if line is not None] or lists[:1]
    source = "; ".join(line_source(around.file, line) for line in lines)
    return Reason(code=ReasonCode.NOT_LISTED, message=message, source=source)


def _unmarked(case: JoinCase) -> Reason | None:
    """HasSparseWeights: 0 where other layers of the engine have 1, so that sparsity was allowed."""
    unmarked = next((h for h in case.seen.holders if h.has_sparse_weights is False), None)
    if unmarked is None or not case.around.sparse_weights_seen:
        return None
    message = "layer information marks weights as sparse in other layers, not in this one"
    source = f"{case.around.seen.engine_file}: {quoted_name(unmarked.name)}: HasSparseWeights: 0"
    return Reason(code=ReasonCode.NOT_LISTED, message=message, source=source)


def _unsaid(case: JoinCase) -> Outcome:
    """The prediction, and why the evidence neither confirms nor refutes it."""
    around, row = case.around, case.row
    remedy: str | None
    if around.forced:
        said, remedy = REASONS[ReasonCode.SPARSITY_FORCED].reason(FORCED), NOT_FORCED.text
    else:
        gap = silence(around, case.seen) or Silence(why="nothing speaks of it", remedy=None)
        why = f"it runs {case.dense_kernels}; {gap.why}" if case.runs_dense else gap.why
        source = around.file or None
        said = Reason(code=ReasonCode.LOG_SILENT, message=why, source=source)
        remedy = gap.remedy
    evidence = None if row.predicted is VerdictName.UNKNOWN else Evidence.PREDICTED
    remedies = (row.remedy, remedy) if row.remedy else (remedy,)
    ran_dense = case.runs_dense and around.facts.sparse_weights is True
    first = evidence is None or (ran_dense and row.predicted is VerdictName.ELIGIBLE)
    return Outcome(
        verdict=row.predicted,
        evidence=evidence,
        reasons=(said, *row.reasons) if first else (*row.reasons, said),
        remedy="; ".join(dict.fromkeys(r for r in remedies if r)) or None,
    )


def _with_times(case: JoinCase) -> str:
    if case.sparse_ms is None or case.dense_ms is None:
        return ""
    return f": {tactic_times_words(case.sparse_ms, case.dense_ms)}"


def _refuted(case: JoinCase, found: Outcome) -> Reason | None:
    """Why the rules foretold another verdict than was measured; None where they did not.

    They foretell no choice, unknown is no forecast, and of some outcomes they say nothing.
    """
    row = case.row
    chosen = found.verdict is VerdictName.CHOSEN and row.predicted is VerdictName.ELIGIBLE
    if row.predicted in (VerdictName.UNKNOWN, found.verdict) or chosen:
        return None
    return row.reasons[0] if REASONS[found.reasons[0].code].foretold else None


def _log_contradicts(case: JoinCase) -> tuple[Reason, ...]:
    """What the log says against itself on the lines that name this layer."""
    file = case.around.file
    lines = {m.line.line for m in (case.seen.eligible, case.seen.chosen) if m is not None}
    return tuple(
        Reason(
            code=ReasonCode.LOG_CONTRADICTS,
            message=f"the log contradicts itself: {c.message}",
            source=f"{file}:{c.line}",
        )
        for c in case.around.contradictions_at(lines)
    )
