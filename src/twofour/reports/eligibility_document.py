"""The eligibility report as a document: how much can run sparse, what to change, every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite, prod

from twofour.eligibility.predict import NO_FACTOR, NOT_COVERED, uses_of
from twofour.eligibility.reasons import obstacles
from twofour.eligibility.rules import holds_trivially
from twofour.eligibility.totals import LayerStatus, by_status, status_of, weights_by_status
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict
from twofour.records.export import Accuracy
from twofour.records.latency import LatencyComparison
from twofour.records.run import BuildResult, SensitivityResult
from twofour.records.weights import HARDWARE_PATTERN, PruneResult, Reason, ReasonCode
from twofour.reports.document import (
    Bar,
    Block,
    Column,
    Document,
    Kind,
    Lines,
    NameList,
    Role,
    RowDetails,
    Section,
    Segment,
    Table,
    Value,
    column,
    figures,
    fold_rows,
    has_cells,
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
from twofour.reports.pruning_document import pruning_section, sensitivity_section
from twofour.words import (
    SPARSE_TO_DENSE,
    TRIVIAL,
    axis_name,
    count,
    name_cell,
    printable,
    shape_cell,
    share,
    tactic_ratio,
    tactic_times_words,
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
    layers = layers_table(report.verdicts, report.forecast_gains)
    return Document(
        name=name_cell(report.model),
        about="sparsity report",
        title="Sparsity report",
        lead=_lead(report, first),
        blocks=present(section("Layers", layers, style="layers")),
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


def _lead(report: EligibilityReport, first: FirstLine | None) -> tuple[Block, ...]:
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
    not_used = (f"{s.engine} was not used: {printable(s.why_not or '')}" for s in build.not_used)
    return lines_of(role, (*not_used, *map(printable, build.notes)))


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


# --- the table of layers --------------------------------------------------------------------------


def layers_table(verdicts: Sequence[Verdict], gains: Mapping[str, float]) -> Table:
    """A row per layer; times only where any layer has one, and forecast `gains` of them."""
    columns = [*_columns_of_words(verdicts), *_times(verdicts)]
    if gains:
        head = "forecast gain"
        columns.append(
            figures(head, verdicts, lambda v: gains.get(v.layer), "{:.2f}".format, key="forecast")
        )
    return Table(
        title="",
        columns=tuple(columns),
        folds=lambda: fold_rows((v.layer, _alike(v)) for v in verdicts),
        details=lambda row: layer_details(verdicts[row]),
        style="layers",
    )


def _columns_of_words(verdicts: Sequence[Verdict]) -> Iterator[Column]:
    def texts(key: str, head: str, cell: Callable[[Verdict], str | None]) -> Column:
        return column(head, Kind.TEXT, verdicts, cell, cell, key=key)

    def name(verdict: Verdict) -> str:
        return name_cell(verdict.layer)

    def weights(verdict: Verdict) -> int:
        return verdict.in_channels * verdict.out_channels

    yield column("layer", Kind.NAME, verdicts, name, name, key="layer")
    yield texts("op", "op", lambda v: printable(v.op))
    yield column("C x K kernel", Kind.TEXT, verdicts, shape_cell, weights, key="size")
    yield texts("type", "type", lambda v: printable(v.dtype))
    yield texts("pattern", "pattern", pattern_word)
    yield _verdicts(verdicts)
    yield column("why", Kind.REASON, verdicts, why, lambda v: v.reasons[0].code.value, key="why")
    yield texts("remedy", "what to do", lambda v: printable(v.remedy or "") or None)


def _verdicts(verdicts: Sequence[Verdict]) -> Column:
    """Verdicts sorted by status, each with its doubt and what the rules said otherwise."""
    statuses = [status_of(verdict) for verdict in verdicts]
    return Column(
        head="verdict",
        kind=Kind.VERDICT,
        cells=tuple(verdict.verdict.value for verdict in verdicts),
        notes=tuple(map(verdict_note, verdicts)),
        values=tuple(map(list(LayerStatus).index, statuses)),
        slugs=tuple(status.slug for status in statuses),
        key="verdict",
    )


def _times(verdicts: Sequence[Verdict]) -> tuple[Column, ...]:
    """Times of the fastest tactics and their ratio; () where no layer has one."""
    columns = (
        figures(
            "sparse ms", verdicts, lambda v: _finite(v.sparse_ms), "{:.4g}".format, key="sparse"
        ),
        figures("dense ms", verdicts, lambda v: _finite(v.dense_ms), "{:.4g}".format, key="dense"),
        figures(SPARSE_TO_DENSE, verdicts, _ratio, "{:.3f}".format, key="ratio"),
    )
    if any(map(has_cells, columns)):
        return columns
    return ()


def _finite(ms: float | None) -> float | None:
    return ms if ms is not None and isfinite(ms) else None


def _ratio(verdict: Verdict) -> float | None:
    both = tactic_times(verdict)
    return None if both is None else _finite(tactic_ratio(*both))


def _alike(verdict: Verdict) -> tuple[object, ...]:
    """What layers have in common that share a row."""
    return (
        *(verdict.op, verdict.in_channels, verdict.out_channels, verdict.kernel, verdict.groups),
        *(verdict.dtype, verdict.pattern_holds, verdict.verdict, verdict.predicted),
        *(verdict.evidence, verdict.remedy, tuple(r.code for r in verdict.reasons)),
    )


# --- one row of it --------------------------------------------------------------------------------


def pattern_word(verdict: Verdict) -> str:
    """Whether the array is 2:4; "dense" where it need not be, "?" where nobody looked."""
    if verdict.pattern_holds is None:
        return "?"
    if not verdict.pattern_holds:
        return "dense" if verdict.required is False else "broken"
    if holds_trivially(verdict.shape, verdict.axis, HARDWARE_PATTERN):
        return TRIVIAL
    return str(HARDWARE_PATTERN)


def verdict_note(verdict: Verdict) -> str:
    """What the rules said where the engine showed another verdict; a doubt; "" for neither."""
    if verdict.refuted is not None:
        return f"(rules said {verdict.predicted.value})"
    if verdict.evidence is not Evidence.MEASURED and status_of(verdict) is LayerStatus.DOUBTFUL:
        return "(likely dense)"
    return ""


def why(verdict: Verdict) -> str:
    """The main reason behind its code, and the codes of the others."""
    return "; ".join(filter(None, (main_reason(verdict), other_codes(verdict))))


def main_reason(verdict: Verdict) -> str:
    """The main reason, behind its code if it is an obstacle; predicted: without the sizes."""
    main = verdict.reasons[0]
    if obstacles((main,)):
        return f"{main.code.value}: {printable(main.message)}"
    if verdict.evidence is Evidence.MEASURED:
        return printable(main.message)
    return printable(main.message.partition("; ")[0])


def other_codes(verdict: Verdict) -> str:
    """The other reasons against sparse kernels: "also PATTERN_BROKEN", or a lone doubt."""
    # a lone doubt stands as a sentence: "may be slower than dense at this width (SMALL_CHANNELS)"
    others = list(dict.fromkeys(r.code.value for r in obstacles(verdict.reasons[1:])))
    if not others:
        return ""
    if others == [ReasonCode.SMALL_CHANNELS.value] and not obstacles(verdict.reasons[:1]):
        return f"may be slower than dense at this width ({others[0]})"
    return f"also {', '.join(others)}"


def layer_details(verdict: Verdict) -> RowDetails:
    """What a page and `explain` say of a layer beside its row."""
    return RowDetails(facts=tuple(_facts(verdict)), reasons=tuple(_reasons(verdict.reasons)))


def _facts(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Label and value of everything known about a layer that the table's columns do not say."""
    if verdict.node is not None:
        yield "node", name_cell(verdict.node)
    if verdict.weight is not None:
        yield "weight", name_cell(verdict.weight)
    yield "stored shape", times(verdict.shape)
    axis = verdict.axis  # "1 (input channels)"
    yield "reduction axis", "none" if axis is None else f"{axis} ({axis_name(verdict, axis)})"
    yield "input channels C", f"{verdict.in_channels:,}"
    yield "output channels K", f"{verdict.out_channels:,}"
    if verdict.kernel:
        yield "kernel", times(verdict.kernel)
    yield "groups", f"{verdict.groups:,}"
    yield "evidence", "none" if verdict.evidence is None else verdict.evidence.value
    if verdict.evidence is not Evidence.PREDICTED:
        yield "the rules predicted", verdict.predicted.value
    if verdict.engine_layer is not None:
        yield "engine layer", name_cell(verdict.engine_layer)
    both = tactic_times(verdict)
    if both is not None:
        yield "tactic times", tactic_times_words(*both)


def _reasons(reasons: Iterable[Reason]) -> Iterator[tuple[str, str, str]]:
    for reason in reasons:
        yield reason.code.value, printable(reason.message), printable(reason.source or "")


def tactic_times(verdict: Verdict) -> tuple[float, float] | None:
    """Milliseconds of the fastest sparse and the fastest dense tactic, where both were timed."""
    sparse = verdict.sparse_ms
    dense = verdict.dense_ms
    if sparse is None or dense is None:
        return None
    if isfinite(sparse) and isfinite(dense) and sparse > 0 and dense > 0:
        return sparse, dense
    return None


# --- bars and sources -----------------------------------------------------------------------------


def _bars(report: EligibilityReport) -> Section | None:
    if not report.verdicts:
        return None
    layers = {status: len(members) for status, members in by_status(report.verdicts).items()}
    weights = weights_by_status(report.verdicts)
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
    lines = (f"{code}: {printable(source)}" for code, source in sorted(pairs))
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
    "sparse_over_dense": _ratio,
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
