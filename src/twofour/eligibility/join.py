"""The eligibility report of an engine: the predicted report joined with what its files show.

Files that are about another model are left aside, and a warning says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from twofour.eligibility import remedies as do
from twofour.eligibility.build_evidence import (
    NO_ENGINE,
    BuildEvidence,
    causes_first,
    engine_layers,
    quote_error,
    quoted_name,
)
from twofour.eligibility.build_facts import of_build
from twofour.eligibility.build_view import BuildView, JoinCase
from twofour.eligibility.judge import FORCED, is_of_lower_type, judge
from twofour.eligibility.node_names import MYELIN_SUFFIX, split_name
from twofour.eligibility.predict import summarize
from twofour.eligibility.reasons import REASONS
from twofour.eligibility.rules import groups_in_words
from twofour.eligibility.sightings import (
    DENSE_LOG,
    LAYER_INFORMATION,
    LOG,
    EvidenceFile,
    Sightings,
    find_sightings,
)
from twofour.eligibility.totals import count_totals
from twofour.logs.sparsity import without_profile
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.export import Gpu
from twofour.records.log import Build, EngineLayer
from twofour.records.weights import HARDWARE_PATTERN, Reason, ReasonCode
from twofour.words import count


def join_report(predicted: EligibilityReport, evidence: BuildEvidence) -> EligibilityReport:
    """One verdict for each row of the predicted report, with totals and what could not be matched.

    Each row keeps what the rules said (`predicted`). Where the evidence is silent about a layer the
    verdict stays predicted and says so; with no evidence at all the verdicts are as they were.
    """
    seen = find_sightings(predicted, evidence)
    evidence, warnings = _without_strangers(predicted, evidence, seen)
    if warnings:
        seen = find_sightings(predicted, evidence)
    unusable = _why_unusable(evidence.build, seen)
    if unusable is not None:
        return _left_aside(predicted, unusable, seen, notes=(*warnings, *evidence.notes))
    view = BuildView(build=evidence.build, seen=seen)
    is_built = evidence.build is not None or seen.engine is not None
    verdicts = _judged(predicted.verdicts, view) if is_built else predicted.verdicts
    verdicts = tuple(
        replace(v, profile_ms=s.profile_ms) for v, s in zip(verdicts, seen.rows, strict=True)
    )
    products = predicted.summary.activation_products
    return replace(
        predicted,
        engine=_engine_words(predicted, evidence) if is_built else predicted.engine,
        gpu=_gpu_of(predicted, evidence.build),
        verdicts=verdicts,
        summary=summarize(verdicts, products, predicted.not_covered),
        unmatched_engine_layers=seen.unmatched,
        totals=count_totals(verdicts, seen, predicted.not_covered),
        notes=(*warnings, *predicted.notes, *_notes(evidence, view, verdicts)),
        not_evidence=FORCED if view.forced else None,
    )


def _engine_words(predicted: EligibilityReport, evidence: BuildEvidence) -> str:
    """The engine that the log or the layer information belongs to, in words.

    If the log states no version, what the run knows is kept. The GPU is named unless the report
    has a field for it.
    """
    build, known = evidence.build, evidence.built_with
    if build is None or (build.tensorrt_version is None and known):
        return known or "tensorrt, version not stated"
    version = build.tensorrt_version
    words = "tensorrt, version not stated" if version is None else f"tensorrt {version}"
    words += f" ({build.producer.value})"
    capability = build.compute_capability
    if _gpu_of(predicted, build) is not None or (build.gpu is None and capability is None):
        return words
    stated = "not stated" if capability is None else ".".join(map(str, capability))
    return f"{words} on {build.gpu or 'a GPU'} (compute capability {stated})"


def _gpu_of(predicted: EligibilityReport, build: Build | None) -> Gpu | None:
    """The report's GPU; None if the log names another, as the engine runs on that one."""
    gpu = predicted.gpu
    if gpu is None or build is None:
        return gpu
    other_name = build.gpu is not None and build.gpu != gpu.name
    capability = build.compute_capability
    other_kind = capability is not None and capability != gpu.compute_capability
    return None if other_name or other_kind else gpu


def _judged(predicted: Sequence[Verdict], view: BuildView) -> tuple[Verdict, ...]:
    rows = list(zip(predicted, view.seen.rows, strict=True))
    of_node = {sighting.node: row for row, sighting in rows}
    found = []
    for row, seen in rows:
        fused = tuple(of_node[at] for at in (seen.siblings.nodes if seen.siblings else ()))
        case = JoinCase(row=row, seen=seen, view=view, fused=fused)
        judged = judge(case)
        # where its name in the engine is not known, its name in the log
        named = (seen.chosen or seen.eligible, seen.tuned, seen.tuned_in)
        places = (*seen.holders[:1], seen.region, *named)
        found.append(
            replace(
                row,
                verdict=judged.verdict,
                evidence=judged.evidence,
                reasons=judged.reasons,
                remedy=judged.remedy,
                refuted=judged.refuted,
                engine_layer=next((quoted_name(p.name) for p in places if p is not None), None),
                sparse_ms=case.sparse_ms,
                dense_ms=case.dense_ms,
            )
        )
    return tuple(found)


def _notes(evidence: BuildEvidence, view: BuildView, verdicts: Sequence[Verdict]) -> Iterator[str]:
    build = evidence.build
    usable = (VerdictName.CHOSEN, VerdictName.ELIGIBLE)
    measured = [v for v in verdicts if v.evidence is Evidence.MEASURED and v.verdict in usable]
    odd = sum(v.pattern_holds is False for v in measured)
    if odd:  # the surest sign of a log of another file
        what, verb = ("layer breaks", "is") if odd == 1 else ("layers break", "are")
        yield (
            f"WARNING: {odd:,} {what} the pattern in this ONNX file and {verb} eligible or "
            "chosen in the engine: they may not belong together"
        )
    low = [v for v in verdicts if is_of_lower_type(v, view.facts)]
    if build is not None and low:
        yield (
            f"WARNING: {build.file} is of a build in FP32 alone, and {count(len(low), 'layer')} of "
            f"this file {'is' if len(low) == 1 else 'are'} {low[0].dtype}: they may not belong "
            "together"
        )
    yield from evidence.notes
    if build is not None:
        if view.unfinished and build.engine_layers is None:
            yield f"{build.file} ends before the build does: a layer it leaves out may still come"
        for said in view.contradictions:
            place = build.file if said.line is None else f"{build.file}:{said.line}"
            yield f"{place}: the log contradicts itself: {said.message}"
        if view.forced:
            yield FORCED
        has_int8 = any(v.dtype == "int8" for v in verdicts)
        yield from of_build(view.facts, forced=view.forced, has_int8=has_int8)
        if build.timing_cache.hides_timings:
            yield "a timing cache was in use: layers may have been tuned without a time in the log"
        if build.sparsity_lines:
            yield "chosen layers can differ from build to build; eligible ones rarely do"
    layers, file = engine_layers(evidence)
    if layers is not None and all(layer.kernel is None for layer in layers):
        yield f"{file} names no kernels: build with detailed profiling verbosity to see them"


# --- files that do not count ----------------------------------------------------------------------

_NOT_TOGETHER = "the {} and the model do not belong together"
_ERROR_SHOWN = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unusable:
    """Why everything that was given about an engine is to be left aside."""

    note: str
    """For the whole report."""
    reason: Reason
    """For each layer, beside what the rules say of it."""
    remedy: str
    engine: str | None = None
    """What the report says instead of an engine."""


def own_evidence(predicted: EligibilityReport, evidence: BuildEvidence) -> BuildEvidence:
    """The evidence without every file that is about another model, even if nothing is left."""
    files = find_sightings(predicted, evidence).files
    return _without(evidence, [file for file in files if file.is_strange])


def _without_strangers(
    predicted: EligibilityReport, evidence: BuildEvidence, seen: Sightings
) -> tuple[BuildEvidence, tuple[str, ...]]:
    """The evidence without the files that are about another model, and a warning for each.

    All is left as it is where no file is about this model, or where there is no model.
    """
    has_model = any(v.shape for v in predicted.verdicts)
    if not has_model or not any(s.related for s in seen.files if s.kind != DENSE_LOG):
        return evidence, ()
    strange = [s for s in seen.files if s.is_strange]
    warnings = (f"WARNING: {_stranger(s)}; {s.file} is left aside" for s in strange)
    return _without(evidence, strange), tuple(warnings)


def _without(evidence: BuildEvidence, strange: Sequence[EvidenceFile]) -> BuildEvidence:
    kinds = {file.kind for file in strange}
    return replace(
        evidence,
        build=None if LOG in kinds else evidence.build,
        layers=None if LAYER_INFORMATION in kinds else evidence.layers,
        dense_build=None if DENSE_LOG in kinds else evidence.dense_build,
    )


def _why_unusable(build: Build | None, seen: Sightings) -> _Unusable | None:
    """Why nothing counts: the build failed, or no name is of the model; None if it counts."""
    code = ReasonCode.LOG_SILENT
    if build is not None and build.made_no_engine:
        where, source = f"line {build.last_line}: no error is in the log", build.file
        if errors := causes_first(build.errors):
            where = f"line {errors[0].line}: {' '.join(errors[0].text.split())[:_ERROR_SHOWN]}"
            source = quote_error(build.file, errors[0])
        message = "the build failed, so there is no engine to look at"
        return _Unusable(
            note=f"the build failed: {where}",
            reason=Reason(code=code, message=message, source=source),
            remedy=do.MEND_BUILD.text,
            engine="no engine: the build failed",
        )
    named = [file for file in seen.files if file.names and file.kind != DENSE_LOG]
    if not seen.rows or not named or not all(file.is_strange for file in named):
        return None
    kind, message = named[0].kind, _NOT_TOGETHER.format(named[0].kind)
    return _Unusable(
        note=_stranger(named[0]),
        reason=Reason(code=code, message=message, source=named[0].file),
        remedy=(do.LAYERS_OF_MODEL if kind == LAYER_INFORMATION else do.LOG_OF_MODEL).text,
    )


def _stranger(file: EvidenceFile) -> str:
    names = f"none of {count(file.names, 'engine name')} is a node"
    if file.names == 1:
        names = "the one engine name is no node"
    return f"{_NOT_TOGETHER.format(file.kind)}: {names} of the model that has a weight"


def _left_aside(
    predicted: EligibilityReport, why: _Unusable, seen: Sightings, *, notes: tuple[str, ...]
) -> EligibilityReport:
    """The predicted report, whose rows say why nothing was measured."""
    verdicts = []
    for row in predicted.verdicts:
        unknown = row.predicted is VerdictName.UNKNOWN
        reasons = (why.reason, *row.reasons) if unknown else (*row.reasons, why.reason)
        verdicts.append(
            replace(
                row,
                verdict=row.predicted,
                evidence=None if unknown else Evidence.PREDICTED,
                reasons=reasons,
                remedy="; ".join(r for r in (row.remedy, why.remedy) if r),
            )
        )
    products = predicted.summary.activation_products
    return replace(
        predicted,
        engine=why.engine or predicted.engine,
        verdicts=tuple(verdicts),
        summary=summarize(verdicts, products, predicted.not_covered),
        unmatched_engine_layers=seen.unmatched,
        notes=(why.note, *notes, *predicted.notes),
        not_evidence=why.note,
    )


# --- an engine without its model ------------------------------------------------------------------

_PRODUCT = re.compile(r"conv|gemm|matmul|matrix.?multiply|fully.?connected", re.IGNORECASE)
_COPIES = re.compile(r"Reformatting CopyNode|Optimizer Reformat|ONNXTRT_")
_KINDS = (
    (re.compile(r"deconv|convtranspose|conv_transpose", re.IGNORECASE), "ConvTranspose"),
    (re.compile(r"conv", re.IGNORECASE), "Conv"),
    (re.compile(r"gemm|fully.?connected", re.IGNORECASE), "Gemm"),
    (re.compile(r"mat(?:rix)?.?mul", re.IGNORECASE), "MatMul"),
)
_NO_MODEL = Reason(code=ReasonCode.NOT_CHECKED, message="there is no model to check")


def report_from_engine(evidence: BuildEvidence) -> EligibilityReport:
    """What the files say of the engine's own layers; nothing is predicted: there is no model.

    Rows are the layers on the (Sparsity) lines and those that are convolutions or matrix products
    by their type, runner or kernel, under the names that the builder gives them.
    """
    build = evidence.build
    layers, file = engine_layers(evidence)
    known = {layer.name: layer for layer in layers or ()}
    rows = tuple(
        _engine_row(name, known.get(name), kind) for name, kind in _names(build, layers or ())
    )
    model = build.model or build.file if build is not None else file or "an engine"
    predicted = EligibilityReport(
        model=model,
        pattern=HARDWARE_PATTERN,
        engine=NO_ENGINE,
        gpu=None,
        verdicts=rows,
        summary=summarize(rows, 0),
    )
    # the engine's other layers are no surprise where there is no model they could belong to
    return replace(join_report(predicted, evidence), unmatched_engine_layers=())


def _names(build: Build | None, engine: tuple[EngineLayer, ...]) -> Iterator[tuple[str, str]]:
    """Names of the rows, each layer once, with the words that show its kind."""
    lines = build.sparsity_lines if build is not None else ()
    listed = dict.fromkeys(chain.from_iterable(line.constituents or () for line in lines))
    others = [
        (x.name, f"{x.parameter_type or ''} {x.layer_type or ''} {x.kernel or ''}") for x in engine
    ]
    if build is not None and not engine:
        others += [(x.name, " ".join(x.runners)) for x in build.layers]
    products = (
        (name, kind) for name, kind in others if _PRODUCT.search(kind) and not _COPIES.match(name)
    )
    seen: set[str] = set()
    for name, kind in (*((name, "") for name in listed), *products):
        # the layer names in it: two names with one in common are of one layer
        pieces = split_name(without_profile(name))
        parts = {MYELIN_SUFFIX.sub("", piece.text) for piece in pieces}
        if is_new := seen.isdisjoint(parts):
            yield name, f"{kind} {name}"
        if is_new or name in listed:
            seen |= parts


def _engine_row(name: str, layer: EngineLayer | None, kind: str) -> Verdict:
    op = next((op for pattern, op in _KINDS if pattern.search(kind)), "unknown")
    groups = (layer.groups if layer is not None else None) or 1
    verdict, said, remedy = VerdictName.UNKNOWN, _NO_MODEL, None
    if groups > 1:
        said = REASONS[ReasonCode.GROUPED_CONV].reason(groups_in_words(groups, 0))
        verdict, remedy = VerdictName.NOT_ELIGIBLE, do.LEAVE_GROUPED.text
    out = layer.out_maps if layer is not None else None
    return Verdict(
        layer=name,
        node=name,
        weight=None,
        op=op,
        engine_layer=None,
        shape=(),
        axis=None,
        groups=groups,
        in_channels=0,
        out_channels=out or 0,
        kernel=(layer.kernel_shape if layer is not None else None) or (),
        dtype=(layer.weights_type if layer is not None else None) or "unknown",
        pattern_holds=None,
        verdict=verdict,
        evidence=None if verdict is VerdictName.UNKNOWN else Evidence.PREDICTED,
        predicted=verdict,
        reasons=(said,),
        remedy=remedy,
        required=False if groups > 1 else None,
    )
