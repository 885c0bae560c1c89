"""The eligibility report of an engine: the predicted report joined with what its files show.

Files that are about another model are left aside, and a warning says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

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
from twofour.eligibility.judge import FORCED, LOW_TYPES, judge, unmeasured
from twofour.eligibility.node_names import MYELIN_SUFFIX, split_name
from twofour.eligibility.predict import predicted_row, summarize, with_verdicts
from twofour.eligibility.reasons import reason_of
from twofour.eligibility.rules import groups_in_words
from twofour.eligibility.sightings import (
    DENSE_LOG,
    LAYER_INFORMATION,
    LOG,
    EvidenceFile,
    Sighting,
    Sightings,
    find_sightings,
)
from twofour.eligibility.totals import count_totals
from twofour.logs.sparsity import without_profile
from twofour.records import frozen
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.export import Gpu
from twofour.records.log import Build, EngineLayer
from twofour.records.weights import HARDWARE_PATTERN, Reason, ReasonCode, Weight
from twofour.words import count, listed


def join_report(predicted: EligibilityReport, evidence: BuildEvidence) -> EligibilityReport:
    """One verdict for each row of the predicted report, with totals and what could not be matched.

    Each row keeps what the rules said (`predicted`). Where the evidence is silent about a layer the
    verdict stays predicted and says so; with no evidence at all the verdicts are as they were.
    """
    seen = find_sightings(predicted, evidence)
    strangers = _strangers(predicted, seen)
    if strangers:
        warnings = (f"WARNING: {_stranger(s)}; {s.file} is left aside" for s in strangers)
        notes = (*warnings, *evidence.notes)
        return join_report(predicted, replace(_without_strangers(evidence, strangers), notes=notes))
    unusable = _failed(evidence.build) or _of_another_model(seen)
    if unusable is not None:
        return _left_aside(predicted, unusable, seen, evidence.notes)
    return _measured(predicted, evidence, seen)


def _measured(
    predicted: EligibilityReport, evidence: BuildEvidence, seen: Sightings
) -> EligibilityReport:
    view = BuildView(build=evidence.build, seen=seen)
    engine = predicted.engine
    rows: Sequence[Verdict] = predicted.verdicts
    if evidence.build is not None or seen.engine is not None:
        engine = _engine_words(predicted, evidence)
        rows = _judged(rows, view)
    timed = zip(rows, seen.rows, strict=True)
    verdicts = [replace(row, profile_ms=sighting.profile_ms) for row, sighting in timed]
    return replace(
        with_verdicts(predicted, verdicts),
        engine=engine,
        gpu=_gpu_of(predicted, evidence.build),
        unmatched_engine_layers=seen.unmatched,
        totals=count_totals(verdicts, seen, predicted.not_covered),
        notes=(*predicted.notes, *_notes(evidence, view, verdicts)),
        not_evidence=FORCED if view.forced else None,
    )


def _engine_words(predicted: EligibilityReport, evidence: BuildEvidence) -> str:
    """The engine that the log or the layer information belongs to, in words.

    If the log states no version, what the run knows is kept. The GPU is named unless the report
    has a field for it.
    """
    # `tensorrt 8.4.1 (trtexec) on NVIDIA GeForce GTX 1080 (compute capability 6.1)`
    build, known = evidence.build, evidence.built_with
    if build is None or (build.tensorrt_version is None and known):
        return known or "tensorrt, version not stated"
    words = f"tensorrt {build.tensorrt_version}"
    if build.tensorrt_version is None:
        words = "tensorrt, version not stated"
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


def _judged(predicted: Sequence[Verdict], view: BuildView) -> list[Verdict]:
    rows = list(zip(predicted, view.seen.rows, strict=True))
    of_node = {sighting.node: row for row, sighting in rows}
    verdicts = []
    for row, seen in rows:
        siblings = seen.siblings.nodes if seen.siblings else ()
        fused = tuple(of_node[node] for node in siblings)
        case = JoinCase(row=row, seen=seen, view=view, fused=fused)
        verdicts.append(
            replace(
                judge(case),
                engine_layer=_engine_name(seen),
                sparse_ms=case.sparse_ms,
                dense_ms=case.dense_ms,
            )
        )
    return verdicts


def _engine_name(seen: Sighting) -> str | None:
    """Its name in the engine; where that is not known, its name in the log."""
    named = (seen.chosen or seen.eligible, seen.tuned, seen.tuned_in)
    for place in (*seen.holders, seen.region, *named):
        if place is not None:
            return quoted_name(place.name)
    return None


def _is_wrongly_sparse(verdict: Verdict) -> bool:
    """The sign of a log of another file: names are the same, and this file's weights forbid it."""
    is_measured = verdict.evidence is Evidence.MEASURED
    return verdict.verdict.is_usable and is_measured and verdict.pattern_holds is False


def _signs_of_another_file(
    evidence: BuildEvidence, view: BuildView, verdicts: Sequence[Verdict]
) -> Iterator[str]:
    broken = sum(map(_is_wrongly_sparse, verdicts))
    if broken:
        yield (
            f"WARNING: the engine calls {count(broken, 'layer')} eligible or chosen whose pattern "
            "is broken in this ONNX file: they may not belong together"
        )
    low = {v.dtype for v in verdicts if v.shape and v.dtype.lower() in LOW_TYPES}
    if evidence.build is not None and low and view.facts.is_float32_alone:
        yield (
            f"WARNING: {evidence.build.file} is of a build in FP32 alone, and layers of this file "
            f"are {listed(sorted(low))}: they may not belong together"
        )


def _notes(evidence: BuildEvidence, view: BuildView, verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield from _signs_of_another_file(evidence, view, verdicts)
    yield from evidence.notes
    build = evidence.build
    if build is not None:
        if view.unfinished and build.engine_layers is None:
            yield f"{build.file} ends before the build does: a layer it leaves out may still come"
        for contradiction in view.contradictions:
            place = build.file
            if contradiction.line is not None:
                place += f":{contradiction.line}"
            yield f"{place}: the log contradicts itself: {contradiction.message}"
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


@frozen
class _Unusable:
    """Why everything that was given about an engine is to be left aside."""

    note: str
    """For the whole report."""
    why: str
    """For each layer, beside what the rules say of it."""
    source: str
    remedy: str
    engine: str | None = None
    """What the report says instead of an engine."""


def own_evidence(predicted: EligibilityReport, evidence: BuildEvidence) -> BuildEvidence:
    """The evidence without every file that is about another model, even if nothing is left."""
    return _without_strangers(evidence, find_sightings(predicted, evidence).files)


def _strangers(predicted: EligibilityReport, seen: Sightings) -> list[EvidenceFile]:
    """The files that are about another model, where there is a model and a file about it."""
    has_model = any(v.shape for v in predicted.verdicts)
    if not has_model or not any(s.related for s in seen.files if s.kind != DENSE_LOG):
        return []
    return [s for s in seen.files if s.is_strange]


def _without_strangers(evidence: BuildEvidence, files: Sequence[EvidenceFile]) -> BuildEvidence:
    kinds = {file.kind for file in files if file.is_strange}
    if LOG in kinds:
        evidence = replace(evidence, build=None)
    if LAYER_INFORMATION in kinds:
        evidence = replace(evidence, layers=None)
    if DENSE_LOG in kinds:
        evidence = replace(evidence, dense_build=None)
    return evidence


def _failed(build: Build | None) -> _Unusable | None:
    if build is None or not build.made_no_engine:
        return None
    where = f"line {build.last_line}: no error is in the log"
    source = build.file
    errors = causes_first(build.errors)
    if errors:
        where = f"line {errors[0].line}: {' '.join(errors[0].text.split())[:_ERROR_SHOWN]}"
        source = quote_error(build.file, errors[0])
    return _Unusable(
        note=f"the build failed: {where}",
        why="the build failed, so there is no engine to look at",
        source=source,
        remedy=do.MEND_BUILD.text,
        engine="no engine: the build failed",
    )


def _of_another_model(seen: Sightings) -> _Unusable | None:
    """Why nothing counts where no name in any file is of the model."""
    named = [file for file in seen.files if file.names and file.kind != DENSE_LOG]
    if not seen.rows or not named or any(file.related for file in named):
        return None
    first = named[0]
    remedy = do.LOG_OF_MODEL
    if first.kind == LAYER_INFORMATION:
        remedy = do.LAYERS_OF_MODEL
    return _Unusable(
        note=_stranger(first),
        why=_NOT_TOGETHER.format(first.kind),
        source=first.file,
        remedy=remedy.text,
    )


def _stranger(file: EvidenceFile) -> str:
    names = f"none of {count(file.names, 'engine name')} is a node"
    if file.names == 1:
        names = "the one engine name is no node"
    return f"{_NOT_TOGETHER.format(file.kind)}: {names} of the model that has a weight"


def _left_aside(
    predicted: EligibilityReport, unusable: _Unusable, seen: Sightings, notes: Sequence[str]
) -> EligibilityReport:
    """The predicted report, whose rows say why nothing was measured."""
    reason = reason_of(ReasonCode.LOG_SILENT, unusable.why, unusable.source)
    verdicts = [unmeasured(row, reason, unusable.remedy) for row in predicted.verdicts]
    return replace(
        with_verdicts(predicted, verdicts),
        engine=unusable.engine or predicted.engine,
        unmatched_engine_layers=seen.unmatched,
        notes=(unusable.note, *notes, *predicted.notes),
        not_evidence=unusable.note,
    )


# --- an engine without its model ------------------------------------------------------------------

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


def _names(build: Build | None, engine: Sequence[EngineLayer]) -> Iterator[tuple[str, str]]:
    """Names of the rows, each layer once, with the words that show its kind."""
    # the list names `Conv_0`, layer information `Conv_0 + Relu_1` of the kind `Convolution
    # CaskConvolution sm80_...`: one row, Conv_0, as both names have Conv_0 in common
    listed: dict[str, None] = {}
    for line in build.sparsity_lines if build is not None else ():
        listed |= dict.fromkeys(line.constituents or ())
    named = [(name, "") for name in listed]
    for name, kind in _described(build, engine):
        if _op_of(kind) is not None and not _COPIES.match(name):
            named.append((name, kind))
    seen: set[str] = set()
    for name, kind in named:
        pieces = split_name(without_profile(name))
        parts = {MYELIN_SUFFIX.sub("", piece.text) for piece in pieces}
        is_new = seen.isdisjoint(parts)
        if is_new:
            yield name, f"{kind} {name}"
        if is_new or name in listed:
            seen |= parts


def _described(build: Build | None, engine: Sequence[EngineLayer]) -> Iterator[tuple[str, str]]:
    """The layers of the engine, else those that were tuned, with the words that show their kind."""
    for layer in engine:
        words = (layer.parameter_type, layer.layer_type, layer.kernel)
        yield layer.name, " ".join(filter(None, words))
    if build is not None and not engine:
        for tuned in build.layers:
            yield tuned.name, " ".join(tuned.runners)


def _op_of(words: str) -> str | None:
    return next((op for pattern, op in _KINDS if pattern.search(words)), None)


def _engine_row(name: str, layer: EngineLayer | None, kind: str) -> Verdict:
    layer = layer or EngineLayer(name=name)
    weights_type = layer.weights_type or "unknown"
    weight = Weight(
        layer=name,
        node=name,
        weight=None,
        op=_op_of(kind) or "unknown",
        shape=(),
        axis=None,
        groups=layer.groups or 1,
        in_channels=0,
        out_channels=layer.out_maps or 0,
        kernel=layer.kernel_shape or (),
        dtype=weights_type,
        math_dtype=weights_type,
    )
    if weight.groups == 1:
        return predicted_row(weight, VerdictName.UNKNOWN, (_NO_MODEL,))
    reason = reason_of(ReasonCode.GROUPED_CONV, groups_in_words(weight))
    row = predicted_row(weight, VerdictName.NOT_ELIGIBLE, (reason,), do.LEAVE_GROUPED.text)
    return replace(row, required=False)
