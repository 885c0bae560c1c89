"""The eligibility report as a document: how much can run sparse, what to change, every layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

from twofour.eligibility.predict import NO_FACTOR, NOT_COVERED, uses_of
from twofour.eligibility.totals import LayerStatus, by_status, weights_by_status
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict
from twofour.records.export import Accuracy
from twofour.records.latency import LatencyComparison
from twofour.records.run import BuildResult, SensitivityResult
from twofour.records.weights import PruneResult
from twofour.reports.document import (
    Bar,
    Blocks,
    Document,
    Kind,
    Lines,
    NameList,
    Role,
    Section,
    Segment,
    Table,
    Value,
    column,
    lines_of,
    present,
    section,
    verdict_column,
)
from twofour.reports.eligibility_words import (
    FirstLine,
    accuracy_and_speed,
    advice_lines,
    drift_lines,
    stale_lines,
    title_line,
    totals,
)
from twofour.reports.latency_document import latency_section
from twofour.reports.layers_table import (
    layer_sections,
    pattern_word,
    times_ratio,
    why,
)
from twofour.reports.pruning_document import pruning_section, sensitivity_section
from twofour.words import (
    count,
    name_cell,
    shape_cell,
    share,
    times,
)

_LETTER = 3
"""Per cent of a bar that a letter of a label needs on a narrow screen."""


def eligibility_document(  # noqa: PLR0913  # the records of a run folder
    report: EligibilityReport,
    *,
    accuracy: Accuracy | None = None,
    build: BuildResult | None = None,
    comparison: LatencyComparison | None = None,
    pruned: PruneResult | None = None,
    finetuned: bool = False,
    chosen: SensitivityResult | None = None,
) -> Document:
    """The report with what else is known of its run; a comparison replaces the build's times."""
    if comparison is None and build is not None:
        comparison = build.times
    forecast = report.forecast
    if report.totals is not None and len(report.totals.ceilings) > 1:
        forecast = None  # two ceilings are profiles of both engines: the times are measured
    cost = None if finetuned else pruned  # what pruning cost is not what training left
    first = accuracy_and_speed(accuracy, comparison, cost, forecast)
    return Document(
        name=name_cell(report.model),
        about="sparsity report",
        title="Sparsity report",
        lead=_lead(report, first),
        blocks=present(*layer_sections(report)),
        appendix=present(
            section("Sources of the reasons", _sources(report.verdicts)),
            _unmatched(report),
            _drift_section(accuracy),
            pruning_section(pruned),
            sensitivity_section(chosen),
            _engines_section(build),
            _latency(comparison, report),
        ),
        data=partial(_data, report),
        lacks=None if first is None else first.lacks,
    )


def _lead(report: EligibilityReport, first: FirstLine | None) -> Blocks:
    return present(
        lines_of(Role.WARNING, stale_lines(report.stale)),
        None if first is None else lines_of(Role.ANSWER, [first.text]),
        lines_of(Role.TEXT, [title_line(report)]),
        totals_table(report),
        _bars(report),
        lines_of(Role.LIST, advice_lines(report)),
    )


def _unmatched(report: EligibilityReport) -> NameList:
    return NameList(
        title="Engine layers not matched to a layer of the model",
        short="engine layers not matched",
        names=tuple(map(name_cell, report.unmatched_engine_layers)),
    )


def _drift_section(accuracy: Accuracy | None) -> Section | None:
    if accuracy is None:
        return None
    lines = lines_of(Role.LIST, drift_lines(accuracy))
    return section("What pruning did to the outputs", lines)


def _latency(comparison: LatencyComparison | None, report: EligibilityReport) -> Section | None:
    return None if comparison is None else latency_section(comparison, "Latency", report)


def _engines_section(build: BuildResult | None) -> Section | None:
    return None if build is None else section("Engines", engine_lines(build, Role.LIST))


def engine_lines(build: BuildResult, role: Role) -> Lines:
    """Which engines were not used and why, and what the build notes."""
    not_used = (f"{s.engine} was not used: {s.why_not}" for s in build.not_used)
    return lines_of(role, (*not_used, *build.notes))


def totals_table(report: EligibilityReport) -> Table:
    """A row per status, as a page's cards."""
    rows = totals(report)
    columns = (
        verdict_column("", rows, lambda t: t.status.value, lambda t: t.status.slug),
        column("layers", Kind.FIGURE, rows, lambda t: t.layers),
        column("weights (% of all)", Kind.FIGURE, rows, lambda t: t.weights),
        column("main reasons", Kind.TEXT, rows, lambda t: t.codes),
    )
    return Table(title="", columns=columns, style="cards")


# --- bars and sources -----------------------------------------------------------------------------


def _bars(report: EligibilityReport) -> Section | None:
    if not report.verdicts:
        return None
    gains = report.forecast_gains
    statuses = by_status(report.verdicts, gains)
    layers = {status: len(members) for status, members in statuses.items()}
    weights = weights_by_status(report.verdicts, gains)
    weights[LayerStatus.UNCOVERED] = report.summary.weights_not_covered
    by_layers = status_bar(layers, "layer", lambda number, _: f"{number:,}")
    # the whole page gives shares of weights alone
    return section(None, by_layers, status_bar(weights, "weight", share), style="bars")


def status_bar(
    numbers: Mapping[LayerStatus, int], noun: str, part: Callable[[int, int], str]
) -> Bar:
    """One bar, a segment per status; `noun` is what is counted, `part` words for a part of all."""
    total = sum(numbers.values())
    segments: list[Segment] = []
    words: list[str] = []
    start = 0.0
    for status, number in numbers.items():
        if not number:
            continue
        label = part(number, total)
        words.append(f"{status.value} {label}")
        title = f"{status.value}: {count(number, noun)}"
        if "%" in label:
            title += f" ({label})"
        width = 100 * number / total
        if width < _LETTER * len(label):
            label = ""
        segments.append(
            Segment(slug=status.slug, start=start, width=width, title=title, label=label)
        )
        start += width
    label = f"{noun}s: {', '.join(words) or 'nothing'}"
    return Bar(caption=f"by {noun}s", label=label, segments=tuple(segments))


def _sources(verdicts: Sequence[Verdict]) -> Lines:
    pairs: set[tuple[str, str]] = set()
    for verdict in verdicts:
        for reason in verdict.reasons:
            if reason.source is not None:
                pairs.add((reason.code.value, reason.source))
    lines = (f"{code}: {source}" for code, source in sorted(pairs))
    return lines_of(Role.SOURCES, lines)


# --- the table for scripts ------------------------------------------------------------------------

_TRUTH = {True: "true", False: "false", None: None}
_DATA = (
    *("layer", "node", "weight", "op", "shape", "axis", "in_channels", "out_channels", "kernel"),
    *("groups", "dtype", "pattern_holds", "verdict", "evidence", "predicted", "reason_codes"),
    *("reasons", "sources", "remedy", "engine_layer", "sparse_ms", "dense_ms", "weights"),
    *("rules_were_wrong", "size", "pattern", "why"),
    *("sparse_over_dense", "forecast_sparse_over_dense", "forecast_gain"),
)
"""Names of the columns: columns may be added at the end, never renamed or moved."""
_COMPUTED: dict[str, Callable[[Verdict], Value]] = {
    "shape": lambda v: times(v.shape),
    "kernel": lambda v: times(v.kernel) if v.kernel else None,
    "pattern_holds": lambda v: _TRUTH[v.pattern_holds],
    "verdict": lambda v: v.verdict.value,
    "evidence": lambda v: None if v.evidence is None else v.evidence.value,
    "predicted": lambda v: v.predicted.value,
    "reason_codes": lambda v: " ".join(dict.fromkeys(r.code.value for r in v.reasons)),
    "reasons": lambda v: " | ".join(f"{r.code.value}: {r.message}" for r in v.reasons),
    "sources": lambda v: " | ".join(dict.fromkeys(r.source for r in v.reasons if r.source)),
    "weights": lambda v: prod(v.shape),
    "rules_were_wrong": lambda v: _TRUTH[_were_wrong(v)],
    "size": shape_cell,
    "pattern": pattern_word,
    "why": why,
    "sparse_over_dense": times_ratio,
}
"""Columns that are no field of a verdict."""


def _were_wrong(verdict: Verdict) -> bool | None:
    if verdict.evidence is not Evidence.MEASURED:
        return None
    return verdict.refuted is not None


def _data(report: EligibilityReport) -> dict[str, list[Value]]:
    """A row per layer, then one for each op whose weights no layer names, which is no layer.

    `weights` are the elements of the stored array, in the first row that names it: the column adds
    up to all that is stored.
    """
    rows: list[dict[str, Value]] = []
    counted: set[str | None] = {None}
    gains = report.forecast_gains
    for verdict in report.verdicts:
        gain = gains.get(verdict.layer)
        row = {name: _value(verdict, name) for name in _DATA[:-2]}
        row["forecast_gain"] = gain
        row["forecast_sparse_over_dense"] = gain and 1 / gain
        if verdict.weight in counted:
            row["weights"] = 0
        counted.add(verdict.weight)
        rows.append(row)
    for group in report.not_covered:
        word = NOT_COVERED if group.multiplies else NO_FACTOR
        layer = uses_of((group,))
        rows.append({"layer": layer, "op": group.op, "verdict": word, "weights": group.weights})
    return {name: [row.get(name) for row in rows] for name in _DATA}


def _value(verdict: Verdict, name: str) -> Value:
    compute = _COMPUTED.get(name)
    value: Value = getattr(verdict, name) if compute is None else compute(verdict)
    return value
