"""A predicted report and what was found about the engine in, one with measured verdicts out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from twofour.eligibility.predict import summarize
from twofour.records.eligibility import (
    EligibilityReport,
    EligibilitySummary,
    Evidence,
    Verdict,
    VerdictName,
)
from twofour.records.log import BuildOutcome
from twofour.reports.join.absent import Whereabouts
from twofour.reports.join.belonging import (
    NoEvidence,
    no_evidence,
    set_aside,
    swapped,
    without_strangers,
)
from twofour.reports.join.circumstances import Circumstances
from twofour.reports.join.dense import is_of_lower_type
from twofour.reports.join.engine_words import engine_words, gpu_of
from twofour.reports.join.evidence import BuildEvidence, engine_layers
from twofour.reports.join.judge import judge
from twofour.reports.join.outcome import JoinCase
from twofour.reports.join.sightings import Sighting, Sightings, look
from twofour.reports.join.totals import count_totals
from twofour.reports.words import count

_FORCED = "--sparsity=force overwrote weights: the log says nothing about the model's own"


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
    verdicts = predicted.verdicts
    if evidence.build is not None or seen.engine is not None:
        verdicts = _judged(predicted, evidence, seen)
    verdicts = tuple(
        replace(v, profile_ms=s.profile_ms) for v, s in zip(verdicts, seen.rows, strict=True)
    )
    around = Circumstances.of(evidence.build, seen)
    is_built = evidence.build is not None or seen.engine is not None
    return replace(
        predicted,
        engine=engine_words(predicted, evidence.build) if is_built else predicted.engine,
        gpu=gpu_of(predicted, evidence.build),
        verdicts=verdicts,
        summary=_summary(verdicts, predicted),
        unmatched_engine_layers=seen.unmatched,
        totals=count_totals(verdicts, seen, predicted.not_covered),
        notes=(*warnings, *predicted.notes, *_notes(evidence, around, verdicts)),
        not_evidence=_FORCED if around.forced else None,
    )


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


def _judged(
    predicted: EligibilityReport, evidence: BuildEvidence, seen: Sightings
) -> tuple[Verdict, ...]:
    around = Circumstances.of(evidence.build, seen)
    whereabouts = Whereabouts(seen.nodes, seen.holders_of, evidence.build)
    rows = list(zip(predicted.verdicts, seen.rows, strict=True))
    of_node = {sighting.node: row for row, sighting in rows}
    fused = (s.siblings.nodes if s.siblings is not None else () for s in seen.rows)
    return tuple(
        _row(
            JoinCase(
                row=row, seen=sighting, around=around, fused=tuple(of_node[at] for at in nodes)
            ),
            whereabouts,
        )
        for (row, sighting), nodes in zip(rows, fused, strict=True)
    )


def _row(case: JoinCase, whereabouts: Whereabouts) -> Verdict:
    found = judge(case, whereabouts)
    return replace(
        case.row,
        verdict=found.verdict,
        evidence=found.evidence,
        reasons=found.reasons,
        remedy=found.remedy,
        engine_layer=_engine_layer(case.seen),
        sparse_ms=case.sparse_ms,
        dense_ms=case.dense_ms,
    )


def _engine_layer(seen: Sighting) -> str | None:
    """The layer's name in the engine; where that is not known, its name in the log."""
    if seen.holders:
        return seen.holders[0].name
    if seen.region is not None:
        return seen.region.name
    mention = seen.chosen or seen.eligible
    if mention is not None:
        return mention.name
    return seen.tuned.name if seen.tuned is not None else None


def _notes(
    evidence: BuildEvidence, around: Circumstances, verdicts: Sequence[Verdict]
) -> Iterator[str]:
    build = evidence.build
    if (warning := swapped(evidence)) is not None:
        yield warning
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
            yield _FORCED
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
