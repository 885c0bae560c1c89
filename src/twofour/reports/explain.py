"""One layer's whole story for the terminal: weight, rules, log lines, tactics, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from difflib import get_close_matches

from rich.console import RenderableType

from twofour.eligibility.build_evidence import BuildEvidence, quote_tactic
from twofour.eligibility.node_names import split_name
from twofour.eligibility.sightings import Sighting, find_sightings
from twofour.errors import BadInputError
from twofour.records.eligibility import EligibilityReport, Verdict
from twofour.records.log import TunedLayer
from twofour.reports.document import (
    Kind,
    Role,
    RowDetails,
    Table,
    column,
    figures,
    lines_of,
    names,
    present,
    table,
    texts,
)
from twofour.reports.eligibility_words import stale_lines
from twofour.reports.layers_table import layer_details, pattern_word, verdict_note
from twofour.reports.terminal import draw
from twofour.words import count, one_of, printable

_TACTICS_SHOWN = 12
_SUGGESTIONS = 5


def layer_story(report: EligibilityReport, evidence: BuildEvidence, layer: str) -> RenderableType:
    """Everything known about one layer, named by its layer, node or engine layer.

    Raises BadInputError for a name that no layer has, or that several have.
    """
    sightings = find_sightings(report, evidence).rows
    at = find_verdict(report, layer, aliases=list(map(_names_in_use, sightings)))
    verdict = report.verdicts[at]
    sighting = sightings[at]
    details = layer_details(verdict)
    headline = f"{verdict.layer} ({verdict.op}): {verdict.verdict.value}"
    answer = f"{headline} {verdict_note(verdict)}".rstrip()
    file = evidence.build.file if evidence.build is not None else ""
    lines = (
        *_aligned([*_facts(verdict, details), *_forecast(report, verdict)]),
        *_section("reasons", _reasons(details)),
        *_section("seen in the engine", _engine_lines(sighting)),
        *_section("seen in the log", _log_lines(sighting, file)),
    )
    return draw(
        present(
            lines_of(Role.WARNING, stale_lines(report.stale)),
            lines_of(Role.ANSWER, [answer]),
            lines_of(Role.TEXT, lines),
            None if sighting.tuned is None else _tactics(sighting.tuned),
        )
    )


# --- the layer that is meant ----------------------------------------------------------------------


def find_verdict(report: EligibilityReport, name: str, *, aliases: Sequence[Set[str]] = ()) -> int:
    """Index of the one verdict of that name, or with that node in its engine layer.

    `aliases` are the names that engine and log have for each verdict. Raises BadInputError, with
    the names that are near.
    """
    verdicts = report.verdicts
    # "fc" is the layer of that name, and only without one a part of "fc + relu"
    for rows in _matches(verdicts, name, aliases):
        if len(rows) == 1:
            return rows[0]
        if rows:
            others = [_other_name(verdicts[row], name) for row in rows[:5]]
            raise BadInputError(
                f"{count(len(rows), 'layer')} are named {printable(name)!r}",
                hint=f"name one of: {', '.join(map(printable, others))}",
            )
    known: dict[str, None] = {}
    for verdict in verdicts:
        known |= dict.fromkeys(filter(None, (verdict.layer, verdict.node)))
    near = [text for text in known if name and name in text][:_SUGGESTIONS]
    if not near:
        # "layer1.cnov" is within no name, and "layer1.conv" is spelt nearly so
        near = get_close_matches(name, [v.layer for v in verdicts], _SUGGESTIONS, cutoff=0)
    raise BadInputError(
        f"the report has no layer {printable(name)!r}",
        hint=f"name a layer or node; the nearest are {', '.join(map(printable, near))}",
    )


def _matches(
    verdicts: Sequence[Verdict], name: str, aliases: Sequence[Set[str]]
) -> Iterator[list[int]]:
    """Rows so named: as layer, node, engine layer, weight, in a fused name, by engine and log."""
    for field in ("layer", "node", "engine_layer", "weight"):
        yield [row for row, verdict in enumerate(verdicts) if getattr(verdict, field) == name]
    yield [row for row, verdict in enumerate(verdicts) if _has_part(verdict, name)]
    yield [row for row, names in enumerate(aliases) if name in names]


def _has_part(verdict: Verdict, name: str) -> bool:
    """Whether a name is made of this one and others: `conv` and `relu` of `conv + relu`."""
    for text in (verdict.layer, verdict.node, verdict.engine_layer):
        for part in split_name(text) if text else ():
            if part.text == name and not part.is_region:
                return True
    return False


def _other_name(verdict: Verdict, name: str) -> str:
    """A name that tells the layer from others that are called `name` too."""
    for other in (verdict.node, verdict.layer, verdict.weight):
        if other and other != name:
            return other
    return name


def _names_in_use(sighting: Sighting) -> set[str]:
    """What engine and log call the layer, and the regions that hold or may hold it."""
    places = (
        *sighting.holders,
        *sighting.among,
        *sighting.perhaps,
        *(sighting.region, sighting.eligible, sighting.chosen),
        *(sighting.tuned, sighting.dense_tuned),
    )
    return {place.name for place in places if place is not None}


# --- what is known of it --------------------------------------------------------------------------


def _facts(verdict: Verdict, details: RowDetails) -> Iterator[tuple[str, str]]:
    if verdict.shape:
        yield "pattern", pattern_word(verdict)
        yield from details.facts
    elif verdict.engine_layer is not None:
        yield "engine layer", verdict.engine_layer
    if verdict.profile_ms is not None:
        yield "time in the profile", f"{verdict.profile_ms:.4g} ms"


def _forecast(report: EligibilityReport, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """What sparse kernels may gain in the layer, and why not more."""
    if report.forecast is None:
        return
    yield "model's forecast", f"{report.forecast.name}: {report.forecast.in_words}"
    for row in report.forecast.layers:
        if row.layer == verdict.layer:
            ends = f"{row.dense_low_us:,.1f} to {row.dense_high_us:,.1f}"
            times = f"dense {row.dense_us:,.1f} us ({ends}), sparse {row.sparse_us:,.1f} us"
            yield "forecast gain", f"{row.answer}; {times} on {row.gpu}, {row.rows:,} rows"


def _aligned(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    widest = max((len(label) for label, _ in facts), default=0)
    for label, value in facts:
        yield f"  {label:<{widest}}  {value}"


def _section(title: str, lines: Iterable[str]) -> tuple[str, ...]:
    texts = tuple(f"  {line}" for line in lines)
    return ("", title, *texts) if texts else ()


def _reasons(details: RowDetails) -> Iterator[str]:
    for code, message, source in details.reasons:
        yield f"{code}: {message}"
        if source:
            yield f"    source: {source}"
    yield f"what to do: {details.remedy or 'nothing'}"


def _engine_lines(sighting: Sighting) -> Iterator[str]:
    weights = {True: ", weights sparse", False: ", weights dense", None: ""}
    for holder in sighting.holders:
        kernel = holder.kernel or "kernel not named"
        yield f"{holder.name}: {kernel}{weights[holder.has_sparse_weights]}"
    if sighting.region is not None:
        yield f"inside the Myelin region {sighting.region.name}"
    if sighting.among:
        yield f"inside {one_of('Myelin region', [layer.name for layer in sighting.among])}"
    elif sighting.perhaps:
        regions = one_of("Myelin region", [layer.name for layer in sighting.perhaps])
        yield f"perhaps inside {regions}, whose name does not say what it holds"


def _log_lines(sighting: Sighting, file: str) -> Iterator[str]:
    for mention in (sighting.eligible, sighting.chosen):
        if mention is not None:
            yield mention.source(file)
    for tactic in sighting.skipped[:_TACTICS_SHOWN]:
        yield quote_tactic(file, tactic)


def _tactics(tuned: TunedLayer) -> Table:
    """The fastest tactics; the fastest sparse one is always among them."""
    shown = list(tuned.tactics[:_TACTICS_SHOWN])
    if not any(tactic.sparse for tactic in shown):
        others = tuned.tactics[_TACTICS_SHOWN:]
        shown += [tactic for tactic in others if tactic.sparse][:1]
    kinds = {True: "sparse", False: "dense", None: "?"}
    return table(
        f"tactics of {printable(tuned.name)} ({len(tuned.tactics):,} timed)",
        (
            names("kernel", shown, lambda t: t.kernel or ""),
            figures("ms", shown, lambda t: t.ms, "{:g}".format),
            column("sparse", Kind.VERDICT, shown, lambda t: kinds[t.sparse]),
            texts("runner", shown, lambda t: t.runner),
            column("line", Kind.FIGURE, shown, lambda t: str(t.line)),
        ),
    )
