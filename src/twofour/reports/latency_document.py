"""A latency comparison as a document: the answer, tables, what they rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import isnan
from typing import TypeVar

from twofour.records.eligibility import EligibilityReport
from twofour.records.export import OutputAgreement
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    LatencyVerdict,
    LayerContrast,
    LayerContrastRow,
    NoiseFloor,
    VariantSettings,
    parse_variant_name,
    without_batch,
)
from twofour.reports.document import (
    Block,
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
    present,
    section,
    table,
    verdict_column,
)
from twofour.reports.latency_words import (
    answer_lines,
    legend,
    machine_lines,
    noise_lines,
    noise_of,
    over_baseline,
    pair_name,
    timed_batches,
    timed_variants,
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
_KERNELS = {True: "allowed", False: "not allowed", None: None}
_T = TypeVar("_T")
_Setting = Callable[[VariantSettings], "str | None"]
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
    sparse = {v.name for v in comparison.variants if v.settings and v.settings.sparse_kernels}
    answer, *more = answer_lines(comparison)
    return Section(
        title=title,
        style="latency",
        blocks=present(
            Lines(lines=(answer,), role=Role.ANSWER),
            Lines(lines=tuple(more), role=Role.LIST),
            *_measured(comparison),
            Lines(lines=(legend(comparison),), role=Role.LEGEND),
            Lines(lines=tuple(noise_lines(comparison)), role=Role.LIST),
            section("Measured on", Lines(lines=machine_lines(comparison), role=Role.LIST)),
            *(
                layer_table(x, report if x.variant in sparse and x.baseline not in sparse else None)
                for x in comparison.layers
            ),
            section("Notes", _notes(comparison)),
        ),
    )


def build_times(comparison: LatencyComparison) -> tuple[Block, ...]:
    """The part that a run shows of its own times: the answer, the times, what failed."""
    return present(
        Lines(lines=answer_lines(comparison), role=Role.ANSWER),
        *(_times_table(comparison, batch) for batch in timed_batches(comparison)),
        _failures_table(comparison),
        _notes(comparison),
    )


def _notes(comparison: LatencyComparison) -> Lines:
    return Lines(lines=tuple(map(printable, comparison.notes)), role=Role.NOTE)


def _measured(comparison: LatencyComparison) -> Iterator[Block | None]:
    sizes = timed_batches(comparison)
    for number, batch in enumerate(sizes):
        blocks = present(
            _times_table(comparison, batch),
            _pairs_table(comparison, batch),
            _costs_table(comparison, batch),
        )
        if len(sizes) > 1:
            yield Details(title=f"Batch {batch}", blocks=blocks, is_open=number == 0)
        else:
            yield from blocks
    yield settings_table(comparison)
    yield _failures_table(comparison)


def _times_table(comparison: LatencyComparison, batch: int | None) -> Table:
    rows = timed_variants(comparison, batch)
    ratios: dict[str, LatencyRatio | NoiseFloor] = {
        r.variant: r for r in over_baseline(comparison, batch)
    }
    noise = noise_of(comparison, batch)
    if noise is not None:
        ratios[noise.again] = noise

    def verdict(row: ComparedVariant) -> str | None:
        found = ratios.get(row.name)
        if isinstance(found, LatencyRatio):
            return found.verdict.value
        if parse_variant_name(row.name).again:
            return "again"
        return "baseline" if without_batch(row.name) == comparison.baseline else None

    over = [ratios.get(row.name) for row in rows]
    return table(
        _title("Times", batch),
        (
            _names(rows),
            figures("median ms", rows, lambda v: v.median_ms),
            figures("p90 ms", rows, lambda v: v.p90_ms),
            figures("p99 ms", rows, lambda v: v.p99_ms),
            figures("runs/s" if batch is None else "samples /s", rows, lambda v: v.throughput),
            figures("time / baseline", over, lambda r: r.ratio if r else None, ratio_word),
            column("95 % interval", Kind.FIGURE, over, lambda r: interval_word(r) if r else None),
            _verdicts(rows, verdict),
        ),
    )


def _pairs_table(comparison: LatencyComparison, batch: int | None) -> Table:
    rows = within_engines(comparison, batch)
    return table(
        _title("Within the other engines", batch),
        (
            column("time / time", Kind.NAME, rows, lambda r: pair_name(comparison, r)),
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
    baseline = next((v for v in rows if without_batch(v.name) == comparison.baseline), None)
    metrics = dict.fromkeys(name for row in rows for name in row.metrics)
    columns = (
        figures("peak MiB", rows, lambda v: mebibytes(v.peak_memory_bytes)),
        figures("GPU MiB", rows, lambda v: mebibytes(v.peak_device_memory_bytes)),
        figures("size MiB", rows, lambda v: mebibytes(v.size_bytes)),
        figures("load s", rows, lambda v: v.open_s),
        column("max error", Kind.FIGURE, rows, lambda v: _largest_error(v.agreement)),
        figures("relative error", rows, _worst_error, "{:.4f}".format),
        figures(
            "cosine",
            rows,
            lambda v: _lowest(None if isnan(o.cosine) else o.cosine for o in v.agreement),
            "{:.6f}".format,
        ),
        figures("equal", rows, lambda v: _lowest(o.equal for o in v.agreement), per_cent),
        figures("top-1", rows, lambda v: v.top1_agreement, per_cent),
        *(made for name in metrics for made in _metric(name, rows, baseline)),
    )
    made = table(_title("Memory, size and outputs", batch), columns)
    if not made.columns:
        return made
    heads = [c.head for c in made.columns]
    drop = any(head.startswith("drop of ") for head in heads)
    legends = (*[_AGREEMENT] * ("cosine" in heads), *[_DROP] * drop)
    return table(made.title, (_names(rows), *made.columns), legend=". ".join(legends) or None)


def _metric(
    name: str, rows: Sequence[ComparedVariant], baseline: ComparedVariant | None
) -> tuple[Column, Column]:
    whole = None if baseline is None else baseline.metrics.get(name)

    def drop(row: ComparedVariant) -> float | None:
        found = row.metrics.get(name)
        return None if found is None or whole is None or row is baseline else whole - found

    said = printable(name)
    return (
        figures(said, rows, lambda v: v.metrics.get(name), "{:.4g}".format),
        figures(f"drop of {said}", rows, drop, "{:.4g}".format),
    )


def _largest_error(outputs: Sequence[OutputAgreement]) -> str | None:
    """The largest error; behind it what is wrong with it: a bound it exceeds, values not finite."""
    if not outputs:
        return None
    worst = max(outputs, key=lambda o: o.max_abs_error)
    said = [f"{worst.max_abs_error:.3g}"]
    said += [f"bound {o.bound:.3g}" for o in outputs if not o.within and o.bound is not None][:1]
    not_finite = sum(o.not_finite for o in outputs)
    said += [f"{not_finite:,} NaN/inf"] if not_finite else []
    return "\n".join(said)


def _worst_error(variant: ComparedVariant) -> float | None:
    known = (output.judged for output in variant.agreement)
    return max((error for error in known if error is not None), default=None)


def _lowest(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _failures_table(comparison: LatencyComparison) -> Table:
    rows = [v for v in comparison.variants if v.error is not None]
    alike: dict[tuple[str, str | None], list[str]] = {}
    for row in rows:
        rounds = count(len(row.samples_ms), "round")
        why = f"after {rounds}: {row.error}" if row.samples_ms else row.error
        hint = printable(row.hint) if row.hint else None
        alike.setdefault((printable(why or ""), hint), []).append(printable(row.name))
    reasons = tuple(alike.items())
    return table(
        "Not measured" if not any(v.samples_ms for v in rows) else "Not measured to the end",
        (
            column("variant", Kind.NAME, reasons, lambda reason: "\n".join(reason[1])),
            column("why", Kind.TEXT, reasons, lambda reason: reason[0][0]),
            column("what to do", Kind.TEXT, reasons, lambda reason: reason[0][1]),
        ),
    )


def settings_table(comparison: LatencyComparison) -> Table:
    """A row per variant, whatever its batches; a column per setting that is not the same in all.

    Engine, mode and weights stand in the names, versions in the lines on the machine.
    """
    opened = {
        without_batch(v.name): v.settings
        for v in comparison.variants
        if v.settings is not None and not parse_variant_name(v.name).again
    }
    rows = tuple(opened.items())
    settings: dict[str, _Setting] = {
        "device": lambda s: s.device,
        "precision": lambda s: s.precision,
        "sparse kernels": lambda s: _KERNELS[s.sparse_kernels],
        "threads": lambda s: None if s.threads is None else str(s.threads),
        "options": lambda s: ", ".join(s.options),
        "one sample is": lambda s: s.timing,
    }

    def setting(of: _Setting, row: tuple[str, VariantSettings]) -> str | None:
        return printable(of(row[1]) or "") or None

    made = [column(head, Kind.TEXT, rows, partial(setting, of)) for head, of in settings.items()]
    differing = [c for c in made if len(set(c.cells)) > 1]
    names = column("variant", Kind.NAME, rows, lambda row: printable(row[0]))
    return table("Settings that differ", (names, *differing) if differing else ())


def _names(rows: tuple[ComparedVariant, ...]) -> Column:
    return column("variant", Kind.NAME, rows, lambda v: printable(without_batch(v.name)))


def _title(what: str, batch: int | None) -> str:
    return what if batch is None else f"{what}, batch {batch}"


def layer_table(contrast: LayerContrast, report: EligibilityReport | None = None) -> Table:
    """The layers with the largest differences, the others in one row, the sums in the title."""
    rows = contrast.rows
    if len(rows) > SHOWN + 1:
        rows = (*rows[:SHOWN], _rest(rows[SHOWN:]))
    both = f"{printable(contrast.variant)} over {printable(contrast.baseline)}"
    sums = f"{figure(contrast.variant_ms)} ms instead of {figure(contrast.baseline_ms)} ms"
    gpu = report and report.forecast and report.forecast.gpu
    gains = report.forecast_gains if report else {}
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
    name, other = printable(row.layer), printable(row.baseline_layer)
    if row.variant_ms is None:
        return f"{other}\nonly in the baseline"
    if row.baseline_ms is None:
        return f"{name}\nnot in the baseline"
    if name != other:
        return f"{name}\nbaseline: {other}"
    return name


def _rest(rows: Sequence[LayerContrastRow]) -> LayerContrastRow:
    name = f"{count(len(rows), 'more layer')}"
    variant_ms = sum(r.variant_ms or 0.0 for r in rows)
    baseline_ms = sum(r.baseline_ms or 0.0 for r in rows)
    return LayerContrastRow(
        layer=name,
        baseline_layer=name,
        variant_ms=variant_ms,
        baseline_ms=baseline_ms,
        ratio=variant_ms / baseline_ms if baseline_ms else None,
        difference_ms=sum(r.difference_ms for r in rows),
    )
