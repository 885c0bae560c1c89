"""A latency comparison as a document: the answer, tables, what they rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import isnan
from typing import TypeVar

from twofour.records.eligibility import EligibilityReport
from twofour.records.export import OutputAgreement
from twofour.records.latency import (
    ComparedVariant,
    Interval,
    LatencyComparison,
    LatencyRatio,
    LatencyVerdict,
    LayerContrast,
    LayerContrastRow,
    VariantSettings,
    parse_variant_name,
    without_batch,
)
from twofour.reports.document import (
    Block,
    Blocks,
    Column,
    Details,
    Document,
    Kind,
    Lines,
    Role,
    Section,
    Table,
    column,
    figures,
    lines_of,
    names,
    present,
    section,
    table,
    texts,
    verdict_column,
)
from twofour.reports.latency_words import (
    HOST_BOUND,
    answer_lines,
    kernels_off_lines,
    legend,
    machine_lines,
    noise_lines,
    noise_of,
    over_baseline,
    pair_name,
    timed_batches,
    timed_variants,
    with_sparse_kernels,
    within_engines,
)
from twofour.words import (
    count,
    figure,
    interval_word,
    mebibytes,
    per_cent,
    printable,
    ratio_word,
)

VERDICT_SLUGS = {
    LatencyVerdict.FASTER: "faster",
    LatencyVerdict.SLOWER: "slower",
    LatencyVerdict.NO_DIFFERENCE: "same",
    LatencyVerdict.UNDECIDED: "undecided",
}
"""Verdicts in class names."""
_T = TypeVar("_T")
SHOWN = 15
"""Layers with a row of their own; the others have one together."""


def latency_document(
    comparison: LatencyComparison, report: EligibilityReport | None = None
) -> Document:
    """A document of its own, with the forecast of the report beside measured layers."""
    name = printable(comparison.source)
    return Document(
        name=name,
        about="latency",
        title=f"Latency of {name}",
        blocks=(latency_section(comparison, None, report),),
    )


def latency_section(
    comparison: LatencyComparison, title: str | None, report: EligibilityReport | None
) -> Section:
    """The comparison as a part of a document."""
    answer, *more = answer_lines(comparison)
    machine = lines_of(Role.LIST, machine_lines(comparison))
    return Section(
        title=title,
        style="latency",
        blocks=present(
            lines_of(Role.ANSWER, [answer]),
            lines_of(Role.LIST, [*more, *_forecast(report)]),
            *_measured(comparison),
            lines_of(Role.LEGEND, [legend(comparison)]),
            lines_of(Role.LIST, noise_lines(comparison)),
            section("Measured on", machine),
            *_layer_tables(comparison, report),
            section("Notes", _notes(comparison)),
        ),
    )


def _forecast(report: EligibilityReport | None) -> Iterator[str]:
    """What was forecast of the model, where a GPU is named or known."""
    if report is not None and report.forecast is not None:
        yield f"forecast for {report.forecast.name}: {report.forecast.in_words}"


def build_times(comparison: LatencyComparison) -> Blocks:
    """The part that a run shows of its own times: the answer, the times, what failed."""
    return present(
        lines_of(Role.ANSWER, answer_lines(comparison)),
        *(_times_table(comparison, batch) for batch in timed_batches(comparison)),
        _failures_table(comparison),
        _notes(comparison),
    )


def _notes(comparison: LatencyComparison) -> Lines:
    notes = (*comparison.notes, *kernels_off_lines(comparison))
    return lines_of(Role.NOTE, notes)


def _measured(comparison: LatencyComparison) -> Iterator[Block | None]:
    batches = timed_batches(comparison)
    for batch in batches:
        blocks = present(
            _times_table(comparison, batch),
            _pairs_table(comparison, batch),
            _costs_table(comparison, batch),
        )
        if len(batches) == 1:
            yield from blocks
        else:
            yield Details(title=f"Batch {batch}", blocks=blocks, is_open=batch == batches[0])
    yield settings_table(comparison)
    yield _failures_table(comparison)


def _times_table(comparison: LatencyComparison, batch: int | None) -> Table:
    rows = timed_variants(comparison, batch)
    ratios = _ratios(comparison, batch)
    # the column of the verdict: "faster", "again" for the twin that shows the noise, "baseline"
    over = [ratios.get(row.name) for row in rows]

    def verdict(row: ComparedVariant) -> str | None:
        ratio = ratios.get(row.name)
        if isinstance(ratio, LatencyRatio):
            return ratio.verdict.value
        if parse_variant_name(row.name).again:
            return "again"
        return "baseline" if without_batch(row.name) == comparison.baseline else None

    return table(
        _title("Times", batch),
        (
            _names(rows),
            figures("median ms", rows, lambda v: v.median_ms),
            figures("p90 ms", rows, lambda v: v.p90_ms),
            figures("p99 ms", rows, lambda v: v.p99_ms),
            figures("runs/s" if batch is None else "samples /s", rows, lambda v: v.throughput),
            figures("time / baseline", over, lambda r: r.ratio, ratio_word),
            column("95 % interval", Kind.FIGURE, over, interval_word),
            *_host(rows),
            _verdicts(rows, verdict),
        ),
    )


def _host(rows: Sequence[ComparedVariant]) -> tuple[Column, Column]:
    return (
        figures("host ms", rows, lambda v: v.enqueue_ms),
        texts("note", rows, lambda v: HOST_BOUND if v.is_host_bound else None),
    )


def _ratios(comparison: LatencyComparison, batch: int | None) -> dict[str, Interval]:
    """Variant -> its time over the baseline's; the baseline measured again has one too."""
    ratios: dict[str, Interval] = {}
    for ratio in over_baseline(comparison, batch):
        ratios[ratio.variant] = ratio
    noise = noise_of(comparison, batch)
    if noise is not None:
        ratios[noise.again] = noise
    return ratios


def _pairs_table(comparison: LatencyComparison, batch: int | None) -> Table:
    rows = within_engines(comparison, batch)
    return table(
        _title("Within the other engines", batch),
        (
            names("time / time", rows, pair_name),
            figures("ratio", rows, lambda r: r.ratio, ratio_word),
            column("95 % interval", Kind.FIGURE, rows, interval_word),
            _verdicts(rows, lambda r: r.verdict.value),
        ),
    )


def _verdicts(rows: Sequence[_T], cell: Callable[[_T], str | None]) -> Column:
    slugs = {verdict.value: slug for verdict, slug in VERDICT_SLUGS.items()}
    return verdict_column("verdict", rows, cell, lambda row: slugs.get(cell(row) or "", "none"))


_AGREEMENT = (
    "relative error: norm of the difference over that of dense, worst output; cosine: 1 is the "
    "same; "
    "top-1: part of the rows whose largest value is where dense has it"
)
_DROP = "drop: the baseline's metric minus the variant's"


def _costs_table(comparison: LatencyComparison, batch: int | None) -> Table:
    rows = timed_variants(comparison, batch)
    columns = [*_memory(rows), *_agreement(rows), *_metrics(rows, comparison.baseline)]
    # names alone are no table: they come in front where any column has a cell
    made = table(_title("Memory, size and outputs", batch), columns)
    if not made.columns:
        return made
    heads = [column.head for column in made.columns]
    legends: list[str] = []
    if "cosine" in heads:
        legends.append(_AGREEMENT)
        if comparison.inputs_are is not None:
            legends.append(f"Outputs are compared on {comparison.inputs_are}")
    if any(head.startswith("drop of ") for head in heads):
        legends.append(_DROP)
    named = (_names(rows), *made.columns)
    return replace(made, columns=named, legend=". ".join(legends) or None)


def _memory(rows: Sequence[ComparedVariant]) -> tuple[Column, ...]:
    return (
        figures("peak MiB", rows, lambda v: mebibytes(v.peak_memory_bytes)),
        figures("GPU MiB", rows, lambda v: mebibytes(v.peak_device_memory_bytes)),
        figures("size MiB", rows, lambda v: mebibytes(v.size_bytes)),
        figures("load s", rows, lambda v: v.open_s),
    )


def _agreement(rows: Sequence[ComparedVariant]) -> tuple[Column, ...]:
    """How near each variant's outputs are to the dense ones, by its worst output."""
    return (
        column("max error", Kind.FIGURE, rows, lambda v: _largest_error(v.agreement)),
        figures("relative error", rows, lambda v: _worst(v, "judged", max), "{:.4f}".format),
        figures("cosine", rows, lambda v: _worst(v, "cosine", min), "{:.6f}".format),
        figures("equal", rows, lambda v: _worst(v, "equal", min), per_cent),
        figures("top-1", rows, lambda v: v.top1_agreement, per_cent),
    )


def _worst(
    variant: ComparedVariant, field: str, worst: Callable[[Sequence[float]], float]
) -> float | None:
    """One field of the variant's worst output; None where no output has a value."""
    values = [getattr(output, field) for output in variant.agreement]
    known = [value for value in values if value is not None and not isnan(value)]
    return worst(known) if known else None


def _metrics(rows: Sequence[ComparedVariant], baseline: str) -> Iterator[Column]:
    """The user's figures, and how far each variant falls behind the baseline."""
    metrics: dict[str, None] = {}
    for row in rows:
        metrics |= dict.fromkeys(row.metrics)
    dense = next((row for row in rows if without_batch(row.name) == baseline), None)
    for name in metrics:
        values = [row.metrics.get(name) for row in rows]
        yield figures(name, values, float, "{:.4g}".format)
        if dense is not None and name in dense.metrics:
            others = [None if row is dense else row.metrics.get(name) for row in rows]
            drop = dense.metrics[name].__sub__
            yield figures(f"drop of {name}", others, drop, "{:.4g}".format)


def _largest_error(outputs: Sequence[OutputAgreement]) -> str | None:
    """The largest error, and behind it how many values are not finite."""
    # "0.213", "3 NaN/inf" in one cell, a line each
    if not outputs:
        return None
    error = f"{max(output.max_abs_error for output in outputs):.3g}"
    not_finite = sum(output.not_finite for output in outputs)
    return f"{error}\n{not_finite:,} NaN/inf" if not_finite else error


def _failures_table(comparison: LatencyComparison) -> Table:
    """Variants that failed alike share a row."""
    # sparse@a and sparse@b, both "not installed": one row with two names
    variants: dict[tuple[str, str | None], list[str]] = {}
    for variant in comparison.variants:
        if variant.error is None:
            continue
        why = variant.error
        if variant.samples_ms:
            why = f"after {count(len(variant.samples_ms), 'round')}: {why}"
        variants.setdefault((why, variant.hint), []).append(printable(variant.name))
    some_timed = any(v.samples_ms for v in comparison.variants if v.error is not None)
    failures = list(variants)
    return table(
        "Not measured to the end" if some_timed else "Not measured",
        (
            column("variant", Kind.NAME, failures, lambda failure: "\n".join(variants[failure])),
            texts("why", failures, lambda failure: failure[0]),
            texts("what to do", failures, lambda failure: failure[1]),
        ),
    )


_KERNELS = {True: "allowed", False: "not allowed", None: ""}
_SETTINGS: dict[str, Callable[[VariantSettings], str]] = {
    "device": lambda s: s.device,
    "precision": lambda s: s.precision,
    "sparse kernels": lambda s: _KERNELS[s.sparse_kernels],
    "threads": lambda s: "" if s.threads is None else str(s.threads),
    "options": lambda s: ", ".join(s.options),
    "one sample is": lambda s: s.timing,
}


def settings_table(comparison: LatencyComparison) -> Table:
    """A row per variant, whatever its batches; a column per setting that is not the same in all.

    Engine, mode and weights stand in the names, versions in the lines on the machine.
    """
    settings: dict[str, VariantSettings] = {}
    for variant in comparison.variants:
        if variant.settings is not None and not parse_variant_name(variant.name).again:
            settings[without_batch(variant.name)] = variant.settings
    columns: list[Column] = []
    for head, setting in _SETTINGS.items():
        words = list(map(setting, settings.values()))
        if len(set(words)) > 1:  # "float16" beside "float32"
            columns.append(texts(head, words, str))
    if columns:
        columns.insert(0, names("variant", list(settings), str))
    return table("Settings that differ", columns)


def _names(rows: tuple[ComparedVariant, ...]) -> Column:
    return names("variant", rows, lambda v: without_batch(v.name))


def _title(what: str, batch: int | None) -> str:
    return what if batch is None else f"{what}, batch {batch}"


# --- layers ---------------------------------------------------------------------------------------


def _layer_tables(
    comparison: LatencyComparison, report: EligibilityReport | None
) -> Iterator[Table]:
    """The forecast stands beside what it forecasts: sparse kernels over none."""
    sparse = with_sparse_kernels(comparison)
    for contrast in comparison.layers:
        is_forecast = contrast.variant in sparse and contrast.baseline not in sparse
        yield layer_table(contrast, report if is_forecast else None)


def layer_table(contrast: LayerContrast, report: EligibilityReport | None = None) -> Table:
    """The layers with the largest differences, the others in one row, the sums in the title."""
    rows = contrast.rows
    # 17 rows: 15 and "2 more layers"; 16 rows are shown, as a rest of one saves nothing
    if len(rows) > SHOWN + 1:
        rows = (*rows[:SHOWN], _rest(rows[SHOWN:]))
    both = f"{printable(contrast.variant)} over {printable(contrast.baseline)}"
    sums = f"{figure(contrast.variant_ms)} ms instead of {figure(contrast.baseline_ms)} ms"
    gpu = None
    gains: dict[str, float] = {}
    if report is not None and report.forecast is not None:
        gpu = report.forecast.gpu
        gains = report.forecast_gains
    return table(
        f"Profiled layers of {both}: {sums} in total "
        f"({_signed(contrast.variant_ms - contrast.baseline_ms)} ms)",
        (
            column("layer", Kind.NAME, rows, layer_name),
            figures("variant ms", rows, lambda r: r.variant_ms),
            figures("baseline ms", rows, lambda r: r.baseline_ms),
            figures("ratio", rows, lambda r: r.ratio, ratio_word),
            figures(f"forecast gain on {gpu}", rows, lambda r: gains.get(r.layer), "{:.2f}".format),
            figures("difference ms", rows, lambda r: r.difference_ms, _signed),
        ),
    )


def _signed(ms: float) -> str:
    return ("+" if ms > 0 else "") + (figure(ms) or "")


def layer_name(row: LayerContrastRow) -> str:
    """The layer's name in the variant's engine and, where it has another there, the baseline's."""
    name = printable(row.layer)
    other = printable(row.baseline_layer)
    if row.variant_ms is None:
        return f"{other}\nonly in the baseline"
    if row.baseline_ms is None:
        return f"{name}\nnot in the baseline"
    return name if name == other else f"{name}\nbaseline: {other}"


def _rest(rows: Sequence[LayerContrastRow]) -> LayerContrastRow:
    name = count(len(rows), "more layer")
    variant_ms = sum(row.variant_ms or 0.0 for row in rows)
    baseline_ms = sum(row.baseline_ms or 0.0 for row in rows)
    return LayerContrastRow(
        layer=name,
        baseline_layer=name,
        variant_ms=variant_ms,
        baseline_ms=baseline_ms,
        ratio=variant_ms / baseline_ms if baseline_ms else None,
        difference_ms=sum(row.difference_ms for row in rows),
    )
