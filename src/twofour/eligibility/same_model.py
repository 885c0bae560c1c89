"""Whether a log is of this model, and which of its builds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from twofour.eligibility.evidence import (
    DENSE_LOG,
    LAYER_INFORMATION,
    LOG,
    BuildEvidence,
    Sightings,
    Source,
    given_names,
    look,
    names_in,
    stated_names,
)
from twofour.eligibility.remedies import LAYERS_OF_MODEL, LOG_OF_MODEL, MEND_BUILD
from twofour.eligibility.resolve import index_nodes, resolve
from twofour.eligibility.rows import error_source
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.export import GraphNode
from twofour.records.log import Build, BuildOutcome, LogMessage, SparsityFlag
from twofour.records.weights import Reason, ReasonCode
from twofour.words import count

_FRAME = re.compile(r"--- (?:Begin|End) node ---$")
"""What the ONNX parser prints around a node, as errors too."""
_CAUSE = re.compile(
    r"ERROR: |In node -?\d|Assertion failed|not found|Could not find any implementation"
    r"|out of memory|must have|not supported|[Uu]nsupported"
)
_CONSEQUENCE = re.compile(
    r"^(?:Failed to (?:parse|create)|Parsing model failed|Engine set up failed"
    r"|Building engine failed|Skipping tactic )|buildSerializedNetwork: Error"
)


def causes_first(errors: Iterable[LogMessage]) -> list[LogMessage]:
    """Causes first, consequences last, without the frames around a node."""
    plain = [error for error in errors if not _FRAME.search(error.text)]
    plain.sort(key=lambda e: (not _CAUSE.search(e.text), _CONSEQUENCE.search(e.text) is not None))
    return plain


_NOT_TOGETHER = "the {} and the model do not belong together"
_FITS = 0.5
"""Of the best build's share of names that lead to the model: fusions differ between builds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBuild:
    """A build, and what to say of those beside it."""

    build: Build
    note: str | None
    """Which of how many it is; None where there is one alone."""


def choose_build(
    builds: Sequence[Build], nodes: Sequence[GraphNode], wanted: SparsityFlag
) -> ChosenBuild:
    """The build that tells most of this model; the last of those that tell as much.

    `builds` are of one log and at least one. Without nodes every build may be of the model, and so
    may one that names no layer.
    """
    fitting = _fitting(builds, nodes)
    ranks = [
        (
            fits,
            build.sparsity is wanted,
            not build.made_no_engine,
            build.outcome is not BuildOutcome.LOADED,
            bool(build.sparsity_lines),
            build.outcome is not BuildOutcome.FAILED,
            at,
        )
        for at, (build, fits) in enumerate(zip(builds, fitting, strict=True))
    ]
    at = max(ranks)[-1]
    return ChosenBuild(build=builds[at], note=_note(builds, at))


def _fitting(builds: Sequence[Build], nodes: Sequence[GraphNode]) -> list[bool]:
    """Whether enough of the names of each lead to nodes of the model, or it names no layer."""
    if len(builds) < 2 or not nodes:
        return [True] * len(builds)
    names = [list(names_in(build, build.engine_layers or ())) for build in builds]
    index = index_nodes(nodes, None, [n for own in names for n in own], stated_names(builds))
    shares = []
    for own in names:
        found = resolve(sorted(given_names(own)), index)
        shares.append(sum(bool(r.nodes or r.region) for r in found) / len(found) if found else None)
    least = _FITS * max((share for share in shares if share is not None), default=0.0)
    return [share is None or share >= least for share in shares]


def _note(builds: Sequence[Build], at: int) -> str | None:
    loaded = [b for b in builds if b.outcome is BuildOutcome.LOADED]
    if len(builds) - len(loaded) < 2:
        return None
    kind = "builds and runs" if loaded else "builds"
    build = builds[at]
    lines = f"lines {build.first_line} to {build.last_line}"
    return f"{build.file} holds {len(builds)} {kind}: number {at + 1} is used ({lines})"


_ERROR_SHOWN = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class NoEvidence:
    """Why everything that was given about an engine is to be left aside."""

    note: str
    """For the whole report."""
    reason: Reason
    """For each layer, beside what the rules say of it."""
    remedy: str
    engine: str | None = None
    """What the report says in place of an engine."""


def no_evidence(build: Build | None, seen: Sightings) -> NoEvidence | None:
    """A failed build, or names of which none is a layer of the model; None: it does count."""
    if build is not None and build.made_no_engine:
        return _failed(build)
    named = [s for s in _own(seen) if s.names]
    if seen.rows and named and all(s.is_strange for s in named):
        return _of_another_model(named[0])
    return None


def without_strangers(
    predicted: EligibilityReport, evidence: BuildEvidence, seen: Sightings
) -> tuple[BuildEvidence, tuple[str, ...]]:
    """The evidence without the files that are about another model, and a warning for each.

    All is left as it is where no file is about this model, or where there is no model.
    """
    has_model = any(v.shape for v in predicted.verdicts)
    if not has_model or all(not s.related for s in _own(seen)):
        return evidence, ()
    strange = [s for s in seen.sources if s.is_strange]
    left = _leave(evidence, strange)
    return left, tuple(f"WARNING: {_stranger(s)}; {s.file} is left aside" for s in strange)


def own_evidence(predicted: EligibilityReport, evidence: BuildEvidence) -> BuildEvidence:
    """The evidence without every file that is about another model, even if nothing is left."""
    return _leave(evidence, [s for s in look(predicted, evidence).sources if s.is_strange])


def _leave(evidence: BuildEvidence, strange: Sequence[Source]) -> BuildEvidence:
    kinds = {s.words for s in strange}
    return replace(
        evidence,
        build=None if LOG in kinds else evidence.build,
        layers=None if LAYER_INFORMATION in kinds else evidence.layers,
        dense_build=None if DENSE_LOG in kinds else evidence.dense_build,
    )


def set_aside(row: Verdict, why: NoEvidence) -> Verdict:
    """The predicted row, which says why the log does not count."""
    unknown = row.predicted is VerdictName.UNKNOWN
    reasons = (why.reason, *row.reasons) if unknown else (*row.reasons, why.reason)
    remedies = (row.remedy, why.remedy) if row.remedy else (why.remedy,)
    return replace(
        row,
        verdict=row.predicted,
        evidence=None if unknown else Evidence.PREDICTED,
        reasons=reasons,
        remedy="; ".join(r for r in remedies if r),
    )


def _failed(build: Build) -> NoEvidence:
    where, source = f"line {build.last_line}: no error is in the log", build.file
    if errors := causes_first(build.errors):
        where = f"line {errors[0].line}: {' '.join(errors[0].text.split())[:_ERROR_SHOWN]}"
        source = error_source(build.file, errors[0])
    message = "the build failed: there is no engine that could tell"
    return NoEvidence(
        note=f"the build failed: {where}",
        reason=Reason(code=ReasonCode.LOG_SILENT, message=message, source=source),
        remedy=MEND_BUILD.text,
        engine="no engine: the build failed",
    )


def _of_another_model(source: Source) -> NoEvidence:
    own = LAYERS_OF_MODEL if source.words == LAYER_INFORMATION else LOG_OF_MODEL
    message = _NOT_TOGETHER.format(source.words)
    return NoEvidence(
        note=_stranger(source),
        reason=Reason(code=ReasonCode.LOG_SILENT, message=message, source=source.file),
        remedy=own.text,
    )


def _stranger(source: Source) -> str:
    names = f"none of {count(source.names, 'engine name')} is a node"
    if source.names == 1:
        names = "the one engine name is no node"
    return f"{_NOT_TOGETHER.format(source.words)}: {names} of the model that has a weight"


def _own(seen: Sightings) -> list[Source]:
    """What is about the engine with sparse weights."""
    return [s for s in seen.sources if s.words != DENSE_LOG]
