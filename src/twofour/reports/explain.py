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
from twofour.reports.document import Kind, Lines, Role, Table, column, present, table
from twofour.reports.eligibility_words import facts, pattern_word, stale_lines, verdict_note
from twofour.reports.terminal import draw
from twofour.words import count, one_of, printable

_TACTICS_SHOWN = 12
_SUGGESTIONS = 5


def layer_story(report: EligibilityReport, evidence: BuildEvidence, layer: str) -> RenderableType:
    """Everything known about one layer, named by its layer, node or engine layer.

    Raises BadInputError for a name that no layer has, or that several have.
    """
    seen = find_sightings(report, evidence)
    at = find_verdict(report, layer, aliases=[_names_in_use(sighting) for sighting in seen.rows])
    verdict, sighting = report.verdicts[at], seen.rows[at]
    file = evidence.build.file if evidence.build is not None else ""
    mentions = (m for m in (sighting.eligible, sighting.chosen) if m is not None)
    in_log = (
        *(mention.source(file) for mention in mentions),
        *(quote_tactic(file, tactic) for tactic in sighting.skipped[:_TACTICS_SHOWN]),
    )
    known = (*_weight_facts(verdict), *_forecast(report, verdict))
    widest = max((len(label) for label, _ in known), default=0)
    lines = (
        *(f"  {label:<{widest}}  {printable(value)}" for label, value in known),
        *_section("reasons", _reasons(verdict)),
        *_section("seen in the engine", _engine_lines(sighting)),
        *_section("seen in the log", in_log),
    )
    said = verdict_note(verdict)
    headline = f"{printable(verdict.layer)} ({verdict.op}): {verdict.verdict.value}"
    return draw(
        present(
            Lines(lines=stale_lines(report.stale), role=Role.WARNING),
            Lines(lines=(headline if said is None else f"{headline} ({said})",), role=Role.ANSWER),
            Lines(lines=lines, role=Role.TEXT),
            None if sighting.tuned is None else _tactics(sighting.tuned),
        )
    )


def find_verdict(report: EligibilityReport, name: str, *, aliases: Sequence[Set[str]] = ()) -> int:
    """Index of the one verdict of that name, or with that node in its engine layer.

    `aliases` are the names that engine and log have for each verdict. Raises BadInputError, with
    the names that are near.
    """
    names = [(v.layer, v.node, v.engine_layer, v.weight) for v in report.verdicts]
    aliased = [at for at, others in enumerate(aliases) if name in others]
    for found in (*_by_place(names, name), aliased):
        if len(found) == 1:
            return found[0]
        if found:
            rows = [[names[at][place] for place in (1, 0, 3)] for at in found[:5]]
            others = [next((t for t in row if t and t != name), name) for row in rows]
            raise BadInputError(
                f"{count(len(found), 'layer')} are named {printable(name)!r}",
                hint=f"name one of: {', '.join(map(printable, others))}",
            )
    known = list(dict.fromkeys(text for row in names for text in row[:2] if text))
    near = [text for text in known if name and name in text][:_SUGGESTIONS]
    near = near or get_close_matches(name, [row[0] or "" for row in names], _SUGGESTIONS, 0)
    hint = f"name a layer or node; the nearest are {', '.join(map(printable, near))}"
    raise BadInputError(f"the report has no layer {printable(name)!r}", hint=hint)


def _names_in_use(sighting: Sighting) -> set[str]:
    """What engine and log call the layer, and the regions that hold or may hold it."""
    mentions = (sighting.eligible, sighting.chosen)
    tuned = (sighting.tuned, sighting.dense_tuned)
    return {
        *(holder.name for holder in sighting.holders),
        *([sighting.region.name] if sighting.region is not None else []),
        *(region.name for region in (*sighting.among, *sighting.perhaps)),
        *(mention.name for mention in mentions if mention is not None),
        *(layer.name for layer in tuned if layer is not None),
    }


def _by_place(names: Sequence[tuple[str | None, ...]], name: str) -> Iterator[list[int]]:
    """Indices of the rows that are so named, in each place in turn, and of those made of it."""
    for place in range(4):
        yield [at for at, row in enumerate(names) if row[place] == name]
    yield [
        at
        for at, row in enumerate(names)
        if any(
            name == part.text  # `conv` and `relu` of `conv + relu`
            for text in row[:3]
            if text
            for part in split_name(text)
            if not part.is_region
        )
    ]


def _weight_facts(verdict: Verdict) -> Iterator[tuple[str, str]]:
    if verdict.shape:
        yield "pattern", pattern_word(verdict)
        yield from facts(verdict)
    elif verdict.engine_layer is not None:
        yield "engine layer", verdict.engine_layer
    if verdict.profile_ms is not None:
        yield "time in the profile", f"{verdict.profile_ms:.4g} ms"


def _forecast(report: EligibilityReport, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """What sparse kernels may gain in the layer, and why not more."""
    for row in report.forecast.layers if report.forecast else ():
        if row.layer == verdict.layer:
            ends = f"{row.dense_low_us:,.1f} to {row.dense_high_us:,.1f}"
            times = f"dense {row.dense_us:,.1f} us ({ends}), sparse {row.sparse_us:,.1f} us"
            yield "forecast gain", f"{row.answer}; {times} on {row.gpu}, {row.rows:,} rows"


def _reasons(verdict: Verdict) -> Iterator[str]:
    for reason in verdict.reasons:
        yield f"{reason.code.value}: {reason.message}"
        if reason.source:
            yield f"    source: {reason.source}"
    yield f"what to do: {verdict.remedy or 'nothing'}"


def _engine_lines(sighting: Sighting) -> Iterator[str]:
    for holder in sighting.holders:
        kernel = holder.kernel or "kernel not named"
        marked = {True: ", weights sparse", False: ", weights dense", None: ""}
        yield f"{holder.name}: {kernel}{marked[holder.has_sparse_weights]}"
    if sighting.region is not None:
        yield f"inside the Myelin region {sighting.region.name}"
    if sighting.among:
        yield f"inside {one_of('Myelin region', [layer.name for layer in sighting.among])}"
    elif sighting.perhaps:
        regions = one_of("Myelin region", [layer.name for layer in sighting.perhaps])
        yield f"perhaps inside {regions}, whose name does not say what it holds"


def _section(title: str, lines: Iterable[str]) -> tuple[str, ...]:
    texts = tuple(f"  {printable(line)}" for line in lines)
    return (f"\n{title}", *texts) if texts else ()


def _tactics(tuned: TunedLayer) -> Table:
    """The fastest tactics; the fastest sparse one is always among them."""
    shown = list(tuned.tactics[:_TACTICS_SHOWN])
    if not any(t.sparse for t in shown):
        shown += [t for t in tuned.tactics[_TACTICS_SHOWN:] if t.sparse][:1]
    kinds = {True: "sparse", False: "dense", None: "?"}
    return table(
        f"tactics of {printable(tuned.name)} ({len(tuned.tactics):,} timed)",
        (
            column("kernel", Kind.NAME, shown, lambda t: printable(t.kernel or "(no name)")),
            column("ms", Kind.FIGURE, shown, lambda t: None if t.ms is None else f"{t.ms:g}"),
            column("sparse", Kind.VERDICT, shown, lambda t: kinds[t.sparse]),
            column("runner", Kind.TEXT, shown, lambda t: printable(t.runner or "") or None),
            column("line", Kind.FIGURE, shown, lambda t: str(t.line)),
        ),
    )
