"""The eligibility report: every layer with its verdict, from the model and its evidence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from twofour.eligibility.build import BuildAround, JoinCase
from twofour.eligibility.dense import is_of_lower_type
from twofour.eligibility.evidence import (
    NO_ENGINE,
    BuildEvidence,
    Sighting,
    Sightings,
    engine_layers,
    look,
)
from twofour.eligibility.judge import FORCED, judge
from twofour.eligibility.names import NO_NAMES, quoted_name, split_name
from twofour.eligibility.nodes import MYELIN_SUFFIX
from twofour.eligibility.predict import summarize
from twofour.eligibility.reasons import REASONS
from twofour.eligibility.remedies import LEAVE_GROUPED_ENGINE
from twofour.eligibility.rules import groups_in_words
from twofour.eligibility.same_model import NoEvidence, no_evidence, set_aside, without_strangers
from twofour.eligibility.totals import count_totals
from twofour.logs.names import without_profile
from twofour.records.eligibility import (
    EligibilityReport,
    EligibilitySummary,
    Evidence,
    Verdict,
    VerdictName,
)
from twofour.records.export import Gpu
from twofour.records.log import Build, BuildOutcome, EngineLayer
from twofour.records.weights import HARDWARE_PATTERN, Reason, ReasonCode
from twofour.words import count


def join_report(predicted: EligibilityReport, evidence: BuildEvidence) -> EligibilityReport:
    """One verdict for each row of the predicted report, with totals and what could not be matched.

    Each row keeps what the rules said (`predicted`). Where the evidence is silent about a layer the
    verdict stays predicted and says so; with no evidence at all the verdicts are as they were.
    """
    seen = look(predicted, evidence)
    evidence, warnings = without_strangers(predicted, evidence, seen)
    if warnings:
        seen = look(predicted, evidence)
    void = no_evidence(evidence.build, seen)
    if void is not None:
        return _without(predicted, void, seen, notes=(*warnings, *evidence.notes))
    around = BuildAround.of(evidence.build, seen)
    is_built = evidence.build is not None or seen.engine is not None
    verdicts = _judged(predicted.verdicts, around) if is_built else predicted.verdicts
    verdicts = tuple(
        replace(v, profile_ms=s.profile_ms) for v, s in zip(verdicts, seen.rows, strict=True)
    )
    return replace(
        predicted,
        engine=_engine_words(predicted, evidence) if is_built else predicted.engine,
        gpu=_gpu_of(predicted, evidence.build),
        verdicts=verdicts,
        summary=_summary(verdicts, predicted),
        unmatched_engine_layers=seen.unmatched,
        totals=count_totals(verdicts, seen, predicted.not_covered),
        notes=(*warnings, *predicted.notes, *_notes(evidence, around, verdicts)),
        not_evidence=FORCED if around.forced else None,
    )


def _engine_words(predicted: EligibilityReport, evidence: BuildEvidence) -> str:
    """The engine that log or layer information is of.

    A log that states no version leaves what the run knows. The GPU is named unless the report has
    it apart.
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
    """The report's GPU, unless the log names another: it is not the engine's then."""
    gpu = predicted.gpu
    if gpu is None or build is None:
        return gpu
    other_name = build.gpu is not None and build.gpu != gpu.name
    capability = build.compute_capability
    other_kind = capability is not None and capability != gpu.compute_capability
    return None if other_name or other_kind else gpu


def _summary(verdicts: Sequence[Verdict], predicted: EligibilityReport) -> EligibilitySummary:
    return summarize(verdicts, predicted.summary.activation_products, predicted.not_covered)


def _without(
    predicted: EligibilityReport, void: NoEvidence, seen: Sightings, *, notes: tuple[str, ...]
) -> EligibilityReport:
    """The predicted report, which says why nothing was measured."""
    verdicts = tuple(set_aside(row, void) for row in predicted.verdicts)
    return replace(
        predicted,
        engine=void.engine or predicted.engine,
        verdicts=verdicts,
        summary=_summary(verdicts, predicted),
        unmatched_engine_layers=seen.unmatched,
        notes=(void.note, *notes, *predicted.notes),
        not_evidence=void.note,
    )


def _judged(predicted: Sequence[Verdict], around: BuildAround) -> tuple[Verdict, ...]:
    rows = list(zip(predicted, around.seen.rows, strict=True))
    of_node = {sighting.node: row for row, sighting in rows}
    return tuple(
        _row(
            JoinCase(
                row=row,
                seen=seen,
                around=around,
                fused=tuple(of_node[at] for at in (seen.siblings.nodes if seen.siblings else ())),
            )
        )
        for row, seen in rows
    )


def _row(case: JoinCase) -> Verdict:
    found = judge(case)
    return replace(
        case.row,
        verdict=found.verdict,
        evidence=found.evidence,
        reasons=found.reasons,
        remedy=found.remedy,
        refuted=found.refuted,
        engine_layer=_engine_layer(case.seen),
        sparse_ms=case.sparse_ms,
        dense_ms=case.dense_ms,
    )


def _engine_layer(seen: Sighting) -> str | None:
    """The layer's name in the engine; where that is not known, its name in the log."""
    mention = seen.chosen or seen.eligible
    found = (*seen.holders[:1], seen.region, mention, seen.tuned)
    return next((quoted_name(place.name) for place in found if place is not None), None)


def _notes(
    evidence: BuildEvidence, around: BuildAround, verdicts: Sequence[Verdict]
) -> Iterator[str]:
    build = evidence.build
    yield from _odd_layers(verdicts)
    low = [v for v in verdicts if is_of_lower_type(v, around.facts)]
    if build is not None and low:
        yield (
            f"WARNING: {build.file} is of a build in FP32 alone, and {count(len(low), 'layer')} of "
            f"this file {'is' if len(low) == 1 else 'are'} {low[0].dtype}: they may not belong "
            "together"
        )
    yield from evidence.notes
    if build is not None:
        if build.outcome is BuildOutcome.UNFINISHED and build.engine_layers is None:
            yield f"{build.file} ends before the build does: a layer it leaves out may still come"
        for said in around.contradictions:
            place = build.file if said.line is None else f"{build.file}:{said.line}"
            yield f"{place}: the log contradicts itself: {said.message}"
        if around.forced:
            yield FORCED
        if build.timing_cache.hides_timings:
            yield "a timing cache was in use: layers may have been tuned without a time in the log"
        if build.sparsity_lines:
            yield "chosen layers can differ from build to build; eligible ones hardly do"
    layers, file = engine_layers(evidence)
    if layers is not None and all(layer.kernel is None for layer in layers):
        yield f"{file} names no kernels: build with detailed profiling verbosity to see them"


def _odd_layers(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Broken weights with a sparse kernel are the surest sign of a log of another file."""
    usable = (VerdictName.CHOSEN, VerdictName.ELIGIBLE)
    odd = [
        v
        for v in verdicts
        if v.pattern_holds is False and v.verdict in usable and v.evidence is Evidence.MEASURED
    ]
    if odd:
        what = "layer breaks" if len(odd) == 1 else "layers break"
        verb = "is" if len(odd) == 1 else "are"
        yield (
            f"WARNING: {len(odd):,} {what} the pattern in this ONNX file and {verb} eligible or "
            "chosen in the engine: they may not belong together"
        )


_PRODUCT = re.compile(r"conv|gemm|matmul|matrix.?multiply|fully.?connected", re.IGNORECASE)
_COPIES = re.compile(r"Reformatting CopyNode|Optimizer Reformat|ONNXTRT_")
_KINDS = (
    (re.compile(r"deconv|convtranspose|conv_transpose", re.IGNORECASE), "ConvTranspose"),
    (re.compile(r"conv", re.IGNORECASE), "Conv"),
    (re.compile(r"gemm|fully.?connected", re.IGNORECASE), "Gemm"),
    (re.compile(r"mat(?:rix)?.?mul", re.IGNORECASE), "MatMul"),
)
_UNKNOWN_OP = "unknown"
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
    """Names of the rows, each layer once, with what tells its kind."""
    lines = build.sparsity_lines if build is not None else ()
    listed = dict.fromkeys(chain.from_iterable(line.constituents or () for line in lines))
    seen: set[str] = set()
    for name in listed:
        if seen.isdisjoint(parts := _parts(name)):
            yield name, name
        seen.update(parts)
    others = [
        (x.name, f"{x.parameter_type or ''} {x.layer_type or ''} {x.kernel or ''}") for x in engine
    ]
    if build is not None and not engine:
        others += [(x.name, " ".join(x.runners)) for x in build.layers]
    for name, kind in others:
        parts = _parts(name)
        is_product = _PRODUCT.search(kind) is not None and not _COPIES.match(name)
        if is_product and seen.isdisjoint(parts):
            yield name, f"{kind} {name}"
            seen.update(parts)


def _parts(name: str) -> set[str]:
    """What a name is made of, to tell that two names are of one layer."""
    plain = without_profile(name)
    return {MYELIN_SUFFIX.sub("", part.text) for part in split_name(plain, NO_NAMES)}


def _engine_row(name: str, layer: EngineLayer | None, kind: str) -> Verdict:
    op = next((op for pattern, op in _KINDS if pattern.search(kind)), _UNKNOWN_OP)
    groups = (layer.groups if layer is not None else None) or 1
    if groups > 1:
        said, remedy, verdict = (
            REASONS[ReasonCode.GROUPED_CONV].reason(groups_in_words(groups, 0)),
            LEAVE_GROUPED_ENGINE.text,
            VerdictName.NOT_ELIGIBLE,
        )
    else:
        said, remedy, verdict = _NO_MODEL, None, VerdictName.UNKNOWN
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
