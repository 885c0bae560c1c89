"""A predicted report and what was found about the engine in, one with measured verdicts out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from twofour.log_records import Build, BuildOutcome, SparsityFlag
from twofour.records import EligibilityReport, Verdict
from twofour.reports.eligibility import summarize
from twofour.reports.join.absent import Whereabouts
from twofour.reports.join.belonging import NoEvidence, no_evidence, set_aside
from twofour.reports.join.circumstances import Circumstances
from twofour.reports.join.evidence import BuildEvidence, engine_layers
from twofour.reports.join.judge import judge
from twofour.reports.join.outcome import JoinCase
from twofour.reports.join.sightings import Sighting, Sightings, look
from twofour.reports.join.totals import count_totals


def join_report(predicted: EligibilityReport, evidence: BuildEvidence) -> EligibilityReport:
    """One verdict for each row of the predicted report, with totals and what could not be matched.

    Each row keeps what the rules said (`predicted`). Where the evidence is silent about a layer the
    verdict stays predicted and says so; with no evidence at all the verdicts are as they were.
    """
    seen = look(predicted, evidence)
    void = no_evidence(evidence.build, seen)
    if void is not None:
        return _without(predicted, void, seen)
    verdicts = predicted.verdicts
    if evidence.build is not None or seen.engine is not None:
        verdicts = _judged(predicted, evidence, seen)
    verdicts = tuple(
        replace(v, profile_ms=s.profile_ms) for v, s in zip(verdicts, seen.rows, strict=True)
    )
    return replace(
        predicted,
        engine=_engine(evidence.build) or predicted.engine,
        verdicts=verdicts,
        summary=summarize(verdicts, predicted.summary.activation_products),
        unmatched_engine_layers=seen.unmatched,
        totals=count_totals(verdicts, seen),
        notes=(*predicted.notes, *_notes(evidence)),
    )


def _without(predicted: EligibilityReport, void: NoEvidence, seen: Sightings) -> EligibilityReport:
    """The predicted report, which says why nothing was measured."""
    verdicts = tuple(set_aside(row, void) for row in predicted.verdicts)
    return replace(
        predicted,
        engine=void.engine or predicted.engine,
        verdicts=verdicts,
        summary=summarize(verdicts, predicted.summary.activation_products),
        unmatched_engine_layers=seen.unmatched,
        notes=(void.note, *predicted.notes),
        not_evidence=void.note,
    )


def _judged(
    predicted: EligibilityReport, evidence: BuildEvidence, seen: Sightings
) -> tuple[Verdict, ...]:
    around = Circumstances(build=evidence.build, seen=seen)
    whereabouts = Whereabouts(seen.nodes, seen.holders_of, evidence.build)
    rows = zip(predicted.verdicts, seen.rows, strict=True)
    return tuple(
        _row(JoinCase(row=row, seen=sighting, around=around), whereabouts) for row, sighting in rows
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


def _engine(build: Build | None) -> str | None:
    if build is None or build.tensorrt_version is None:
        return None
    where = f" on {build.gpu}" if build.gpu else ""
    return f"tensorrt {build.tensorrt_version} ({build.producer.value}){where}"


def _notes(evidence: BuildEvidence) -> Iterator[str]:
    build = evidence.build
    if build is not None:
        if build.outcome is BuildOutcome.UNFINISHED and build.engine_layers is None:
            yield f"{build.file} ends before the build does: a layer it leaves out may still come"
        for said in build.contradictions:
            place = build.file if said.line is None else f"{build.file}:{said.line}"
            yield f"{place}: the log {said.message}"
        if build.sparsity is SparsityFlag.FORCED:
            yield "--sparsity=force overwrote weights: eligible layers say nothing about the model"
        if build.timing_cache.hides_timings:
            yield "a timing cache was in use: layers may have been tuned without a time in the log"
        if build.sparsity_lines:
            yield "chosen layers can differ from build to build; eligible ones hardly do"
    layers, file = engine_layers(evidence)
    if layers is not None and all(layer.kernel is None for layer in layers):
        yield f"{file} names no kernels: build with detailed profiling verbosity to see them"
