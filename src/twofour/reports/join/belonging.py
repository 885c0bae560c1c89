"""Whether a log is evidence at all: of a build that made an engine, and of this very model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twofour.log_records import Build, BuildOutcome
from twofour.records import Evidence, Reason, ReasonCode, Verdict, VerdictName
from twofour.reports.join.sightings import Sightings
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
    if build is not None and build.outcome is BuildOutcome.FAILED:
        return _failed(build)
    if seen.rows and seen.names and not seen.related:
        return _foreign(build, seen)
    return None


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
    where, what = build.last_line, "no error is in the log"
    if build.errors:
        first = build.errors[0]
        where, what = first.line, " ".join(first.text.split())[:_ERROR_SHOWN]
    message = "the build failed: there is no engine that could tell"
    return NoEvidence(
        note=f"the build failed: line {where}: {what}",
        reason=Reason(
            code=ReasonCode.LOG_SILENT, message=message, source=f"{build.file}:{where}: {what}"
        ),
        remedy="mend what the log calls an error and build again",
        engine="no engine: the build failed",
    )


def _foreign(build: Build | None, seen: Sightings) -> NoEvidence:
    in_log = build is not None and (build.layers or build.sparsity_lines or build.engine_layers)
    what = "log" if in_log else "layer information"
    message = f"the {what} and the model do not belong together"
    if seen.names == 1:
        names = "the one engine name is no node of the model that has a weight"
    else:
        names = (
            f"none of {count(seen.names, 'engine name')} is a node of the model that has a weight"
        )
    source = build.file if build is not None and in_log else seen.engine_file
    return NoEvidence(
        note=f"{message}: {names}",
        reason=Reason(code=ReasonCode.LOG_SILENT, message=message, source=source),
        remedy=f"give the {what} of a build of this very ONNX file",
    )
