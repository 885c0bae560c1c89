"""Whether a log is evidence at all: of a build that made an engine, and of this very model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from twofour.eligibility.remedies import LAYERS_OF_MODEL, LOG_OF_MODEL, MEND_BUILD
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.log import Build, SparsityFlag
from twofour.records.weights import Reason, ReasonCode
from twofour.reports.join.evidence import BuildEvidence
from twofour.reports.join.sightings import (
    DENSE_LOG,
    LAYER_INFORMATION,
    LOG,
    Sightings,
    Source,
    look,
)
from twofour.reports.join.sources import error_source
from twofour.reports.telling_errors import telling_errors
from twofour.reports.words import count

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
        return _foreign(named[0])
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


def swapped(evidence: BuildEvidence) -> str | None:
    """The warning that the dense build is where the other should be; None: nothing says so."""
    build, dense = evidence.build, evidence.dense_build
    if build is None or dense is None or build.sparsity is not SparsityFlag.DISABLED:
        return None
    if dense.sparsity is not SparsityFlag.ENABLED and not dense.sparsity_lines:
        return None
    return (
        "WARNING: sparse weights were allowed in the dense log and not in the other: "
        "are --log and --dense-log swapped?"
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
    if errors := telling_errors(build.errors):
        where = f"line {errors[0].line}: {errors[0].on_one_line[:_ERROR_SHOWN]}"
        source = error_source(build.file, errors[0])
    message = "the build failed: there is no engine that could tell"
    return NoEvidence(
        note=f"the build failed: {where}",
        reason=Reason(code=ReasonCode.LOG_SILENT, message=message, source=source),
        remedy=MEND_BUILD.text,
        engine="no engine: the build failed",
    )


def _foreign(source: Source) -> NoEvidence:
    message = f"the {source.words} and the model do not belong together"
    own = LAYERS_OF_MODEL if source.words == LAYER_INFORMATION else LOG_OF_MODEL
    return NoEvidence(
        note=_stranger(source),
        reason=Reason(code=ReasonCode.LOG_SILENT, message=message, source=source.file),
        remedy=own.text,
    )


def _stranger(source: Source) -> str:
    message = f"the {source.words} and the model do not belong together"
    if source.names == 1:
        return f"{message}: the one engine name is no node of the model that has a weight"
    names = count(source.names, "engine name")
    return f"{message}: none of {names} is a node of the model that has a weight"


def _own(seen: Sightings) -> list[Source]:
    """What is about the engine with sparse weights."""
    return [s for s in seen.sources if s.words != DENSE_LOG]
