"""The table of layers: a row each, a legend of the reasons, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from twofour.eligibility.predict import count_weights
from twofour.eligibility.reasons import REASONS, common_remedy, obstacles
from twofour.eligibility.rules import holds_trivially
from twofour.eligibility.totals import LayerStatus, status_of
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict
from twofour.records.weights import HARDWARE_PATTERN, Reason, ReasonCode
from twofour.reports.document import (
    Bar,
    Column,
    Kind,
    Lines,
    Role,
    RowDetails,
    Section,
    Segment,
    Table,
    column,
    figures,
    fold_rows,
    has_cells,
    lines_of,
    section,
)
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

_BARS = 12
"""Most layers whose times are drawn."""


def layer_sections(report: EligibilityReport) -> tuple[Section | None, ...]:
    """The table with its legend, and where the time goes."""
    table = layers_table(report)
    layers = section("Layers", table, *_legend(report), style="layers")
    return layers, section(None, *_time_bars(report, table), style="times")


def layers_table(report: EligibilityReport) -> Table:
    """A row per layer, what matters first: a narrow terminal leaves out the last columns.

    Times and forecast gains only where any layer has one.
    """
    verdicts = report.verdicts
    gains = report.forecast_gains
    names, *described = _columns_of_words(verdicts)
    answers = [_verdicts(verdicts, gains), _reasons_column(verdicts)]
    if gains:
        head = "forecast gain"
        answers.append(
            figures(head, verdicts, lambda v: gains.get(v.layer), "{:.2f}".format, key="forecast")
        )
    return Table(
        title="",
        columns=(names, *answers, *described, *_times(verdicts)),
        # once, for the rows of a page, their details and the bars of their times
        folds=cache(lambda: fold_rows((v.layer, _alike(v, gains)) for v in verdicts)),
        details=lambda row: layer_details(verdicts[row]),
        style="layers",
    )


def _columns_of_words(verdicts: Sequence[Verdict]) -> Iterator[Column]:
    def texts(key: str, cell: Callable[[Verdict], str | None]) -> Column:
        return column(key, Kind.TEXT, verdicts, cell, cell, key=key)

    def size(verdict: Verdict) -> str:
        return f"{printable(verdict.op)} {shape_cell(verdict)}"

    def weights(verdict: Verdict) -> int:
        return verdict.in_channels * verdict.out_channels

    def name(verdict: Verdict) -> str:
        return name_cell(verdict.layer)

    yield column("layer", Kind.NAME, verdicts, name, name, key="layer")
    yield column("op, C x K kernel", Kind.TEXT, verdicts, size, weights, key="size")
    yield texts("pattern", pattern_word)
    yield texts("type", lambda v: printable(v.dtype))


def _verdicts(verdicts: Sequence[Verdict], gains: Mapping[str, float]) -> Column:
    """Verdicts sorted by status, each with its doubt and what the rules said otherwise."""
    statuses = [status_of(verdict, gains) for verdict in verdicts]
    return Column(
        head="verdict",
        kind=Kind.VERDICT,
        cells=tuple(verdict.verdict.value for verdict in verdicts),
        notes=tuple(map(verdict_note, verdicts)),
        values=tuple(map(list(LayerStatus).index, statuses)),
        slugs=tuple(status.slug for status in statuses),
        key="verdict",
    )


def _reasons_column(verdicts: Sequence[Verdict]) -> Column:
    """Codes of what is against sparse kernels: "GROUPED_CONV, DTYPE"; short "GROUPED_CONV +1"."""
    cells: list[str | None] = []
    short: list[str | None] = []
    for verdict in verdicts:
        codes = [code.value for code in _codes(verdict)]
        cells.append(", ".join(codes) or None)
        others = f" +{len(codes) - 1}" if len(codes) > 1 else ""
        short.append(f"{codes[0]}{others}" if codes else None)
    return Column(
        head="reasons",
        kind=Kind.VERDICT,
        cells=tuple(cells),
        values=tuple(cells),
        key="why",
        short=tuple(short),
    )


def _times(verdicts: Sequence[Verdict]) -> tuple[Column, ...]:
    """Times of the fastest tactics and their ratio; () where no layer has one."""
    columns = (
        figures("sparse ms", verdicts, lambda v: v.sparse_ms, "{:.4g}".format, key="sparse"),
        figures("dense ms", verdicts, lambda v: v.dense_ms, "{:.4g}".format, key="dense"),
        figures(SPARSE_TO_DENSE, verdicts, times_ratio, "{:.3f}".format, key="ratio"),
    )
    if any(map(has_cells, columns)):
        return columns
    return ()


def times_ratio(verdict: Verdict) -> float | None:
    """Time of the fastest sparse tactic divided by that of the fastest dense one."""
    return tactic_ratio(verdict.sparse_ms, verdict.dense_ms)


def _alike(verdict: Verdict, gains: Mapping[str, float]) -> tuple[object, ...]:
    """What layers have in common that share a row."""
    return (
        status_of(verdict, gains),
        *(verdict.op, verdict.in_channels, verdict.out_channels, verdict.kernel, verdict.groups),
        *(verdict.dtype, verdict.pattern_holds, verdict.verdict, verdict.predicted),
        *(verdict.evidence, verdict.remedy, tuple(r.code for r in verdict.reasons)),
    )


# --- the legend: each code once -------------------------------------------------------------------


def _legend(report: EligibilityReport) -> Iterator[Lines]:
    """What each code of the table means, which part of the model it concerns, and what to do."""
    layers: dict[ReasonCode, list[Verdict]] = {}
    for verdict in report.verdicts:
        for code in _codes(verdict):
            layers.setdefault(code, []).append(verdict)
    ranked = sorted(layers, key=lambda code: -len(layers[code]))
    if ranked:
        yield lines_of(Role.LEGEND, ["The reasons, and what to do about each:"])
    yield lines_of(Role.SOURCES, (_legend_line(report, code, layers[code]) for code in ranked))


def _legend_line(report: EligibilityReport, code: ReasonCode, layers: Sequence[Verdict]) -> str:
    # DTYPE: No kernel ... (36 layers, 42.9 % of the weights). What to do: use float16 ...
    whole = report.summary.weights
    concerned = count(len(layers), "layer")
    if whole:
        concerned += f", {share(count_weights(layers), whole)} of the weights"
    messages: set[str] = set()
    remedies: list[str] = []
    for verdict in layers:
        messages.update(reason.message for reason in verdict.reasons if reason.code is code)
        if verdict.remedy and _codes(verdict)[0] is code:
            remedies.append(verdict.remedy)
    sentence = f"{messages.pop()}." if len(messages) == 1 else REASONS[code].sentence
    remedy = common_remedy(code, remedies)
    what = f" What to do: {remedy}." if remedy else ""
    return f"{code.value}: {sentence} ({concerned}){what}"


def _codes(verdict: Verdict) -> tuple[ReasonCode, ...]:
    """Codes of what is against sparse kernels in the layer, the main one first."""
    return tuple(dict.fromkeys(reason.code for reason in obstacles(verdict.reasons)))


# --- where the time goes --------------------------------------------------------------------------


def _time_bars(report: EligibilityReport, table: Table) -> Iterator[Bar]:
    """The layers that take longest: what each takes, and what sparse kernels save of it."""
    times_ms = _layer_times(report, table)
    widest = sorted(times_ms.items(), key=lambda one: -one[1].dense_ms)[:_BARS]
    longest_ms = widest[0][1].dense_ms if widest else 0.0
    for name, layer in widest:
        saved_ms = layer.dense_ms - layer.taken_ms
        words = f"{layer.taken_ms:.4g} ms"
        if saved_ms > 0:
            words += f", {saved_ms:.4g} ms saved ({layer.basis})"
        width = 100 * layer.taken_ms / longest_ms
        saved = Segment(
            slug="saved",
            start=width,
            width=100 * saved_ms / longest_ms,
            title=f"{name}: {words}",
            label="",
        )
        taken = replace(saved, slug=layer.slug, start=0.0, width=width)
        yield Bar(caption=f"{name}: {words}", label=words, segments=(taken, saved))


@dataclass(slots=True, kw_only=True)
class _LayerTime:
    """The time of an engine layer, or of the layers of one kind."""

    slug: str
    basis: str
    dense_ms: float = 0.0
    taken_ms: float = 0.0


def _layer_times(report: EligibilityReport, table: Table) -> dict[str, _LayerTime]:
    """Times by the name of a row: forecast, else of the tactics that the builder timed."""
    rows = {row.layer: row for row in report.forecast.layers} if report.forecast else {}
    gains = report.forecast_gains
    times_of: dict[str, _LayerTime] = {}
    is_timed = rows or any(map(tactic_times, report.verdicts))
    for fold in table.folds() if is_timed and table.folds else ():
        for verdict in (report.verdicts[row] for row in fold.rows):
            both = tactic_times(verdict)
            row = rows.get(verdict.layer)
            if row is not None:
                both = (row.dense_us - row.saves_us) / 1e3, row.dense_us / 1e3
            elif both is None:
                continue
            basis = "measured" if row is None else "forecast"
            slug = status_of(verdict, gains).slug
            layer = times_of.setdefault(fold.name, _LayerTime(slug=slug, basis=basis))
            layer.taken_ms += min(both)
            layer.dense_ms += both[1]
    return times_of


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
        return f"{main.code.value}: {main.message}"
    if verdict.evidence is Evidence.MEASURED:
        return main.message
    return main.message.partition("; ")[0]


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
    return RowDetails(
        facts=tuple(_facts(verdict)),
        reasons=tuple(_reasons(verdict.reasons)),
        remedy=printable(verdict.remedy or ""),
    )


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
    return (sparse, dense) if sparse and dense else None
