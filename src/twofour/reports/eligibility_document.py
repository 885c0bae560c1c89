"""The eligibility report as a document: how much can run sparse, what to change, every layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite, prod

from twofour.eligibility.predict import NO_FACTOR, NOT_COVERED, uses_of
from twofour.eligibility.totals import LayerStatus, by_status, status_of, weights_by_status
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict
from twofour.records.export import Accuracy
from twofour.records.latency import LatencyComparison
from twofour.records.run import BuildResult, SensitivityResult
from twofour.records.weights import PruneResult
from twofour.reports.document import (
    Column,
    Document,
    Kind,
    Lines,
    NameList,
    Plot,
    Role,
    RowDetails,
    Section,
    Table,
    Value,
    column,
    figures,
    fold_rows,
    present,
    section,
    verdict_column,
)
from twofour.reports.eligibility_words import (
    accuracy_and_speed,
    advice_lines,
    drift_lines,
    facts,
    main_reason,
    other_codes,
    pattern_word,
    stale_lines,
    tactic_times,
    title_line,
    totals,
    verdict_note,
)
from twofour.reports.latency_document import latency_section
from twofour.reports.pruning_document import pruning_section, sensitivity_section
from twofour.reports.svg import Drawing, shape
from twofour.words import (
    SPARSE_TO_DENSE,
    count,
    name_cell,
    printable,
    shape_cell,
    share,
    tactic_ratio,
    times,
)

_LETTER = 3
"""Per cent of a bar that a letter of a label needs on a narrow screen."""
_Cell = Callable[[Verdict], "str | None"]


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
    times = comparison or (None if build is None else build.times)
    both_timed = report.totals is not None and len(report.totals.ceilings) > 1
    as_pruned = None if finetuned else pruned  # what pruning cost is not what is left
    first = accuracy_and_speed(accuracy, times, as_pruned, None if both_timed else report.forecast)
    gains = report.forecast_gains
    drift = () if accuracy is None else drift_lines(accuracy)
    return Document(
        name=name_cell(report.model),
        about="sparsity report",
        title="Sparsity report",
        lead=present(
            Lines(lines=stale_lines(report.stale), role=Role.WARNING),
            None if first is None else Lines(lines=(first.text,), role=Role.ANSWER),
            Lines(lines=(title_line(report),), role=Role.TEXT),
            totals_table(report),
            _bars(report),
            Lines(lines=advice_lines(report), role=Role.LIST),
        ),
        blocks=present(section("Layers", layers_table(report.verdicts, gains), style="layers")),
        appendix=present(
            section("Sources of the reasons", _sources(report.verdicts)),
            NameList(
                title="Engine layers not matched to a layer of the model",
                short="engine layers not matched",
                names=tuple(map(name_cell, report.unmatched_engine_layers)),
            ),
            section("What pruning did to the outputs", Lines(lines=drift, role=Role.LIST)),
            None if pruned is None else pruning_section(pruned),
            None if chosen is None else sensitivity_section(chosen),
            None if build is None else section("Engines", engine_lines(build, Role.LIST)),
            None if times is None else latency_section(times, "Latency", report),
        ),
        data=partial(_data, report),
        lacks=None if first is None else first.lacks,
    )


def engine_lines(build: BuildResult, role: Role) -> Lines:
    """Which engines were not used and why, and what the build notes."""
    not_used = (f"{s.engine} was not used: {printable(s.why_not or '')}" for s in build.not_used)
    return Lines(lines=(*not_used, *map(printable, build.notes)), role=role)


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


def layers_table(verdicts: Sequence[Verdict], gains: Mapping[str, float]) -> Table:
    """A row per layer; times only where any layer has one, and forecast `gains` of them."""

    def name(verdict: Verdict) -> str:
        return name_cell(verdict.layer)

    def weights(verdict: Verdict) -> int:
        return verdict.in_channels * verdict.out_channels

    columns = [
        column("layer", Kind.NAME, verdicts, name, name, key="layer"),
        _texts("op", "op", verdicts, lambda v: printable(v.op)),
        column("C x K kernel", Kind.TEXT, verdicts, shape_cell, weights, key="size"),
        _texts("type", "type", verdicts, lambda v: printable(v.dtype)),
        _texts("pattern", "pattern", verdicts, pattern_word),
        _verdicts(verdicts),
        column("why", Kind.REASON, verdicts, _why, lambda v: v.reasons[0].code.value, key="why"),
        _texts("remedy", "what to do", verdicts, lambda v: printable(v.remedy or "") or None),
    ]
    times = (
        _times("sparse", "sparse ms", verdicts),
        _times("dense", "dense ms", verdicts),
        _times("ratio", SPARSE_TO_DENSE, verdicts),
    )
    if any(cell is not None for of in times for cell in of.cells):
        columns += times
    if gains:
        head = "forecast gain"
        columns.append(
            figures(head, verdicts, lambda v: gains.get(v.layer), "{:.2f}".format, key="forecast")
        )
    return Table(
        title="",
        columns=tuple(columns),
        folds=lambda: fold_rows((v.layer, _alike(v)) for v in verdicts),
        details=lambda row: RowDetails(
            facts=facts(verdicts[row]),
            reasons=tuple(
                (r.code.value, printable(r.message), printable(r.source or ""))
                for r in verdicts[row].reasons
            ),
        ),
        style="layers",
    )


def _alike(verdict: Verdict) -> tuple[object, ...]:
    """What layers have in common that share a row."""
    return (
        *(verdict.op, verdict.in_channels, verdict.out_channels, verdict.kernel, verdict.groups),
        *(verdict.dtype, verdict.pattern_holds, verdict.verdict, verdict.predicted),
        *(verdict.evidence, verdict.remedy, tuple(r.code for r in verdict.reasons)),
    )


def _texts(key: str, head: str, verdicts: Sequence[Verdict], cell: _Cell) -> Column:
    return column(head, Kind.TEXT, verdicts, cell, cell, key=key)


def _verdicts(verdicts: Sequence[Verdict]) -> Column:
    """Verdicts sorted by status, each with its doubt and what the rules said otherwise."""
    statuses = list(LayerStatus)
    found = [status_of(v) for v in verdicts]
    return Column(
        head="verdict",
        kind=Kind.VERDICT,
        cells=tuple(v.verdict.value for v in verdicts),
        notes=tuple("" if (said := verdict_note(v)) is None else f"({said})" for v in verdicts),
        values=tuple(map(statuses.index, found)),
        slugs=tuple(status.slug for status in found),
        key="verdict",
    )


def _why(verdict: Verdict) -> str:
    """The main reason behind its code, and the codes of the others."""
    return "; ".join(filter(None, (main_reason(verdict), other_codes(verdict))))


def _times(key: str, head: str, verdicts: Sequence[Verdict]) -> Column:
    """A time of the fastest tactic, or where both are known their ratio."""

    def of(verdict: Verdict) -> float | None:
        both = tactic_times(verdict)
        ratio = None if both is None else tactic_ratio(*both)
        found = {"sparse": verdict.sparse_ms, "dense": verdict.dense_ms, "ratio": ratio}[key]
        return None if found is None or not isfinite(found) else found

    words = "{:.3f}" if key == "ratio" else "{:.4g}"
    return figures(head, verdicts, of, words.format, key=key)


def _bars(report: EligibilityReport) -> Section | None:
    if not report.verdicts:
        return None
    layers = [(status, len(members)) for status, members in by_status(report.verdicts).items()]
    weights = weights_by_status(report.verdicts)
    weights[LayerStatus.UNCOVERED] = report.summary.weights_not_covered
    bars = (
        Plot(caption=f"by {noun}s", draw=partial(status_bar, numbers, noun), note="")
        for noun, numbers in (("layer", layers), ("weight", [*weights.items()]))
    )
    return section(None, *bars, style="bars")


def status_bar(numbers: Sequence[tuple[LayerStatus, int]], noun: str) -> Drawing:
    """One bar over the whole width, a segment per status; `noun` is what is counted.

    Shares are of weights on the whole page, so other things are labelled with their number.
    """
    total = sum(number for _, number in numbers)

    def part(number: int) -> str:
        return share(number, total) if noun == "weight" else f"{number:,}"

    segments, start = [], 0.0
    for status, number in numbers:
        if not number:
            continue
        width = 100 * number / total
        title = f"{status.value}: {count(number, noun)}"
        title += f" ({part(number)})" if noun == "weight" else ""
        css, x, wide = f"segment {status.slug}", f"{start:.3f}%", f"{width:.3f}%"
        inside = [shape("rect", css=css, x=x, y=0, width=wide, height=30)]
        if width >= _LETTER * len(part(number)):
            middle = f"{start + width / 2:.3f}%"
            inside.append(shape("text", text=part(number), css="on-segment", x=middle, y=20))
        segments.append(shape("g", *inside, title=title))
        start += width
    label = f"{noun}s: " + (", ".join(f"{s.value} {part(n)}" for s, n in numbers if n) or "nothing")
    return shape("svg", *segments, css="bar", height=30, width="100%", role="img", aria_label=label)


def _sources(verdicts: Sequence[Verdict]) -> Lines:
    pairs = dict.fromkeys(
        (r.code.value, r.source) for v in verdicts for r in v.reasons if r.source is not None
    )
    said = tuple(f"{code}: {printable(source)}" for code, source in sorted(pairs))
    return Lines(lines=said, role=Role.SOURCES)


_TRUTH = {True: "true", False: "false", None: None}
_BETWEEN = " | "
_DATA: tuple[tuple[str, Callable[[Verdict], Value]], ...] = (
    ("layer", lambda v: v.layer),
    ("node", lambda v: v.node),
    ("weight", lambda v: v.weight),
    ("op", lambda v: v.op),
    ("shape", lambda v: times(v.shape)),
    ("axis", lambda v: v.axis),
    ("in_channels", lambda v: v.in_channels),
    ("out_channels", lambda v: v.out_channels),
    ("kernel", lambda v: times(v.kernel) if v.kernel else None),
    ("groups", lambda v: v.groups),
    ("dtype", lambda v: v.dtype),
    ("pattern_holds", lambda v: _TRUTH[v.pattern_holds]),
    ("verdict", lambda v: v.verdict.value),
    ("evidence", lambda v: None if v.evidence is None else v.evidence.value),
    ("predicted", lambda v: v.predicted.value),
    ("reason_codes", lambda v: " ".join(dict.fromkeys(r.code.value for r in v.reasons))),
    ("reasons", lambda v: _BETWEEN.join(f"{r.code.value}: {r.message}" for r in v.reasons)),
    ("sources", lambda v: _BETWEEN.join(dict.fromkeys(r.source for r in v.reasons if r.source))),
    ("remedy", lambda v: v.remedy),
    ("engine_layer", lambda v: v.engine_layer),
    ("sparse_ms", lambda v: v.sparse_ms),
    ("dense_ms", lambda v: v.dense_ms),
    ("weights", lambda v: prod(v.shape)),
    (
        "rules_were_wrong",
        lambda v: _TRUTH[v.refuted is not None if v.evidence is Evidence.MEASURED else None],
    ),
    ("size", shape_cell),
    ("pattern", pattern_word),
    ("why", _why),
)
"""Names of the columns: columns may be added at the end, never renamed or moved."""


def _data(report: EligibilityReport) -> dict[str, list[Value]]:
    """A row per layer, then one for each op whose weights no layer names, which is no layer.

    `weights` are the elements of the stored array, in the first row that names it: the column adds
    up to all that is stored.
    """
    verdicts = report.verdicts
    columns: dict[str, list[Value]] = {name: [of(v) for v in verdicts] for name, of in _DATA}
    columns["sparse_over_dense"] = [*_times("ratio", SPARSE_TO_DENSE, verdicts).values]
    gains = [report.forecast_gains.get(verdict.layer) for verdict in verdicts]
    columns["forecast_sparse_over_dense"] = [gain and 1 / gain for gain in gains]
    columns["forecast_gain"] = [*gains]
    counted: set[str | None] = {None}
    for at, verdict in enumerate(verdicts):
        if verdict.weight in counted:
            columns["weights"][at] = 0
        counted.add(verdict.weight)
    for group in report.not_covered:
        beside: dict[str, Value] = {
            "layer": uses_of((group,)),
            "op": group.op,
            "verdict": NOT_COVERED if group.multiplies else NO_FACTOR,
            "weights": group.weights,
        }
        for name, values in columns.items():
            values.append(beside.get(name))
    return columns
