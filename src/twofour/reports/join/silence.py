"""Why nothing says whether a layer is eligible or chosen, and what would say it."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.eligibility.findings import BuildFacts
from twofour.eligibility.remedies import (
    ALLOW_SPARSE,
    FINISH_BUILD,
    LOG_OF_BUILD,
    NAME_KERNELS,
    NAMES_IN_LOG,
    VERBOSE_LOG,
    WHOLE_LOG,
    Remedy,
    still_to_do,
)
from twofour.records.log import Build, BuildOutcome, SparsityKind, SparsityLine
from twofour.reports.join.circumstances import Circumstances, in_myelin, is_version_8, passes_of
from twofour.reports.join.sightings import Sighting
from twofour.reports.words import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """What is missing, and how to come by it."""

    why: str
    remedy: str | None
    """None: all that would tell was done already."""


def to_hear(build: BuildFacts) -> str | None:
    """What makes a build speak of sparsity, as far as it was not done."""
    steps = still_to_do(build, ALLOW_SPARSE, VERBOSE_LOG) or still_to_do(build, NAME_KERNELS)
    return "; ".join(steps) or None


def _or_layers(build: BuildFacts, *first: Remedy) -> str | None:
    """Layer information tells the same where it is not at hand."""
    return ", or ".join(still_to_do(build, *first, NAME_KERNELS)) or None


def silence(circumstances: Circumstances, sighting: Sighting) -> Silence | None:
    """Why nothing says whether this layer is eligible; None where a whole list leaves it out."""
    build, facts = circumstances.build, circumstances.facts
    if build is None:
        return Silence(why=_silent_layers(circumstances), remedy=to_hear(facts))
    if not circumstances.lines:
        return _silent_log(build, facts)
    if build.outcome is BuildOutcome.UNFINISHED:
        why = "the log ends before the build does, and has not named it yet"
        return Silence(why=why, remedy=FINISH_BUILD.text)
    foreign = in_myelin(sighting)
    lists = circumstances.lists(SparsityKind.ELIGIBLE, foreign=False)
    if foreign:
        own = circumstances.lists(SparsityKind.ELIGIBLE, foreign=True)
        # TensorRT 8 has no lists of Myelin's own and names what is eligible in the one it prints
        lists = own if own or not is_version_8(build) else lists
    cut = (_cut(circumstances, foreign=part) for part in passes_of(sighting))
    if (missing := next(filter(None, cut), None)) is not None:
        return missing
    if not lists:
        where = (
            "for the Myelin region it lies in" if foreign else "for the layers outside of Myelin"
        )
        why = f"the log has no list of eligible layers {where}"
        return Silence(why=why, remedy=to_hear(facts))
    return _unresolved(circumstances)


def silent_choice(circumstances: Circumstances) -> Silence:
    """Why it is not known whether an eligible layer runs sparse."""
    why = "nothing says whether a sparse kernel was chosen for it"
    build = circumstances.build
    lines = [line for line in circumstances.lines if line.kind is SparsityKind.CHOSEN]
    if build is not None and build.outcome is BuildOutcome.UNFINISHED:
        return Silence(why=why, remedy=FINISH_BUILD.text)
    if (cut := _cut_choices(circumstances, lines)) is not None:
        return Silence(why=f"{why}: {cut}", remedy=WHOLE_LOG.text)
    if any(not line.names and line.printed_count for line in lines):
        most = max(line.printed_count or 0 for line in lines)
        remedy = _or_layers(circumstances.facts, NAMES_IN_LOG)
        return Silence(why=f"{why}: {count(most, 'layer')} without names", remedy=remedy)
    if any(line.names is None and line.printed_count == 0 for line in lines):
        why += ": a count of 0 without names, which TensorRT 10.3 prints whatever it chose"
        return Silence(why=why, remedy=_or_layers(circumstances.facts, NAMES_IN_LOG))
    return Silence(why=why, remedy=to_hear(circumstances.facts))


def _cut_choices(circumstances: Circumstances, lines: list[SparsityLine]) -> str | None:
    """How the list of chosen layers is cut, or may be."""
    if any(line.elided for line in lines):
        return "the list of chosen layers is shortened"
    short = next((line for line in lines if line.names and circumstances.is_short(line)), None)
    if short is not None:
        return _short(short)
    if any(map(circumstances.is_doubtful, lines)):
        return "the list of eligible layers is cut, and so this one may be"
    return None


def _cut(circumstances: Circumstances, *, foreign: bool) -> Silence | None:
    """What is missing in the lists of eligible layers of this kind of layers."""
    lines = [line for line in circumstances.lines if line.foreign_node is foreign]
    eligible = [line for line in lines if line.kind is SparsityKind.ELIGIBLE]
    if any(_is_nameless(line) for line in eligible):
        return Silence(why=_counts(lines), remedy=_or_layers(circumstances.facts, NAMES_IN_LOG))
    if any(line.elided for line in eligible):
        return Silence(why="the list of eligible layers is shortened", remedy=WHOLE_LOG.text)
    short = next((line for line in eligible if circumstances.is_short(line)), None)
    if short is not None:
        return Silence(why=_short(short), remedy=WHOLE_LOG.text)
    if any(line.uncertain for line in eligible):
        why = "the list of eligible layers cannot be split"
        return Silence(why=why, remedy=_or_layers(circumstances.facts))
    if (beyond := _chosen_alone(circumstances, foreign=foreign)) is not None:
        why = f"the list of eligible layers is not whole: it lacks the chosen {beyond}"
        return Silence(why=why, remedy=WHOLE_LOG.text)
    return None


def _chosen_alone(circumstances: Circumstances, *, foreign: bool) -> str | None:
    """The first layer that is chosen and on no list of eligible ones, as every chosen one is."""
    rows = (row for row in circumstances.seen.rows if row.eligible is None)
    chosen = (row.chosen for row in rows if row.chosen is not None)
    return next((found.name for found in chosen if found.line.foreign_node is foreign), None)


def _is_nameless(line: SparsityLine) -> bool:
    """Whether the names are missing behind a count, or behind the words alone."""
    only_words = line.names is None and line.printed_count is None
    return not line.names and (line.missing > 0 or only_words)


def _short(line: SparsityLine) -> str:
    names = count(len(line.names or ()), "name")
    return f"the list of {line.printed_count:,} {line.kind.value} layers is cut after {names}"


def _counts(lines: list[SparsityLine]) -> str:
    """The largest count of each kind: passes repeat, so they are not to be added up."""
    printed: dict[SparsityKind, int] = {}
    for line in lines:
        if not line.names and line.printed_count is not None:
            printed[line.kind] = max(printed.get(line.kind, 0), line.printed_count)
    if not printed:
        return "the log has no names behind its (Sparsity) lines"
    said = ", ".join(f"{number} {kind.value}" for kind, number in printed.items())
    return f"the log prints counts without names: {said}"


def _unresolved(circumstances: Circumstances) -> Silence | None:
    """Any layer may be behind a listed name that leads to none."""
    strange = len(circumstances.seen.unresolved)
    if not strange:
        return None
    leads = "name leads" if strange == 1 else "names lead"
    return Silence(
        why=f"not among the layers listed as eligible, of which {strange} {leads} to no layer of "
        "the model",
        remedy=_or_layers(circumstances.facts),
    )


def _silent_log(build: Build, facts: BuildFacts) -> Silence:
    if build.engine_loaded or build.outcome is BuildOutcome.LOADED:
        why = "the log is of a loaded engine: only the log of its build speaks of sparsity"
        return Silence(why=why, remedy=_or_layers(facts, LOG_OF_BUILD))
    if build.outcome is BuildOutcome.UNFINISHED:
        why = "the log ends before the build does, without a word about sparsity"
        return Silence(why=why, remedy=FINISH_BUILD.text)
    if build.made_no_engine:
        why = "the build failed before it said anything about sparsity"
        return Silence(why=why, remedy=to_hear(facts))
    return Silence(why=_no_line(facts), remedy=to_hear(facts))


def _no_line(facts: BuildFacts) -> str:
    """Of what a builder needs to print its lists, the log may show one, both or none."""
    if facts.verbose and facts.sparse_weights:
        return "sparse weights were allowed, and the verbose log has no (Sparsity) line"
    if facts.verbose:
        return "the verbose log has no (Sparsity) line: sparse weights were hardly allowed"
    if facts.sparse_weights:
        return "sparse weights were allowed, and the log has no (Sparsity) line: not verbose enough"
    return "the log has no (Sparsity) line: not verbose enough, or sparse weights were not allowed"


def _silent_layers(circumstances: Circumstances) -> str:
    if circumstances.seen.engine is None:
        return "there is no build log"
    return "layer information alone does not say whether the builder found it eligible"
