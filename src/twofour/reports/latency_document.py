"""A latency comparison as a document: the answer, tables and plots, what they rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from typing import TypeVar

from twofour.latency.variants import parse_variant_name, without_batch
from twofour.records.export import OutputAgreement
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    LayerContrast,
    NoiseFloor,
    VariantSettings,
)
from twofour.reports.document import (
    Block,
    Column,
    Details,
    Document,
    Kind,
    Lines,
    Plot,
    Role,
    Section,
    Table,
    column,
    figures,
    present,
    section,
    table,
)
from twofour.reports.latency_layers import layer_table, waterfall
from twofour.reports.latency_plots import VERDICT_SLUGS, ratio_plot, sample_plot, sweep_plot
from twofour.reports.latency_words import (
    TRTEXEC,
    answer_lines,
    batches,
    difference_lines,
    legend,
    machine_lines,
    measured,
    noise_lines,
    noise_of,
    note_lines,
    over_baseline,
    pair_name,
    within_engines,
)
from twofour.words import (
    count,
    interval_word,
    mebibytes,
    per_cent,
    printable,
    ratio_word,
)

_T = TypeVar("_T")
_Setting = Callable[[VariantSettings], "str | None"]
_SLUGS = {verdict.value: slug for verdict, slug in VERDICT_SLUGS.items()}
_BASELINE, _TWIN, _OTHER_TWIN = "baseline", "baseline again", "again"
_FEWEST_FOR_P99 = 100
"""Runs from which the 99th percentile by nearest rank is not the slowest of all."""


def latency_document(comparison: LatencyComparison) -> Document:
    """A document of its own."""
    name = printable(comparison.source)
    return Document(
        name=name,
        about="latency",
        title=f"Latency of {name}",
        blocks=(latency_section(comparison, None),),
    )


def latency_section(comparison: LatencyComparison, title: str | None) -> Section:
    """The comparison as a part of a document."""
    answer, *more = answer_lines(comparison)
    return Section(
        title=title,
        style="latency",
        blocks=present(
            Lines(lines=(answer,), role=Role.ANSWER),
            Lines(lines=tuple(more), role=Role.LIST),
            *_measured(comparison),
            Lines(lines=(legend(comparison),), role=Role.LEGEND),
            Lines(lines=noise_lines(comparison), role=Role.LIST),
            Lines(lines=difference_lines(comparison), role=Role.WARNING),
            section("Measured on", Lines(lines=machine_lines(comparison), role=Role.LIST)),
            *(block for contrast in comparison.layers for block in _layers(contrast)),
            section("Notes", Lines(lines=note_lines(comparison), role=Role.NOTE)),
        ),
    )


def build_times(comparison: LatencyComparison) -> tuple[Block, ...]:
    """The part that a run shows of its own times: the answer, the times, what failed."""
    return present(
        Lines(lines=answer_lines(comparison), role=Role.ANSWER),
        *(_times_table(comparison, batch) for batch in batches(comparison)),
        _failures_table(comparison),
        Lines(lines=note_lines(comparison), role=Role.NOTE),
    )


def _measured(comparison: LatencyComparison) -> Iterator[Block | None]:
    """The sweep, each batch (the first one open), settings, what failed."""
    sizes = batches(comparison)
    yield _sweep_table(comparison)
    yield Plot(
        caption="Ratio over batch",
        draw=partial(sweep_plot, comparison),
        note=f"Whiskers: 95 % intervals. {_shaded(comparison)}",
    )
    for number, batch in enumerate(sizes):
        blocks = present(
            _times_table(comparison, batch),
            _pairs_table(comparison, batch),
            _costs_table(comparison, batch),
            *_batch_plots(comparison, batch),
        )
        if len(sizes) > 1:
            yield Details(title=f"Batch {batch}", blocks=blocks, is_open=number == 0)
        else:
            yield from blocks
    yield settings_table(comparison)
    yield _failures_table(comparison)


def _batch_plots(comparison: LatencyComparison, batch: int | None) -> Iterator[Plot]:
    yield Plot(
        caption="Time over the baseline's",
        draw=partial(ratio_plot, comparison, batch),
        note="Disc: faster; diamond: slower; ring: no difference; box: undecided. "
        f"{_shaded(comparison)}",
    )
    yield Plot(
        caption="Every run of every variant",
        draw=partial(sample_plot, comparison, batch),
        note="A dot is a run, the first round on top of its strip: a slant is drift, two columns "
        "are two speeds. Box: the middle half; at the edges: runs beyond the axis.",
    )


def _layers(contrast: LayerContrast) -> Iterator[Block | None]:
    yield layer_table(contrast)
    yield Plot(
        caption="From the baseline's layers to the variant's",
        draw=partial(waterfall, contrast),
        note="Per cent: of the difference between both sums.",
    )


def _shaded(comparison: LatencyComparison) -> str:
    others = any(without_batch(n.variant) != comparison.baseline for n in comparison.noise)
    own = "; other engines have noise of their own, see below" if others else ""
    return f"Shaded: what the baseline measured twice differs by{own}."


def _sweep_table(comparison: LatencyComparison) -> Table:
    """A row per pair, a column per batch; no columns where there are not several batches."""
    sizes = tuple(b for b in batches(comparison) if b is not None)
    if len(sizes) < 2:
        return table("", ())
    found = {(pair_name(comparison, r), r.batch): r for r in comparison.ratios}
    names = tuple(dict.fromkeys(name for name, _ in found))

    def at(batch: int) -> Column:
        cells = (found.get((name, batch)) for name in names)
        return Column(
            head=f"batch {batch}",
            kind=Kind.FIGURE,
            cells=tuple(None if r is None else _sweep_cell(r) for r in cells),
        )

    return table(
        "Time / baseline over batch",
        (Column(head="variant", kind=Kind.NAME, cells=names), *map(at, sizes)),
    )


def _sweep_cell(ratio: LatencyRatio) -> str:
    lines = (ratio_word(ratio.ratio), interval_word(ratio), ratio.verdict.value)
    return "\n".join(line for line in lines if line is not None)


def _times_table(comparison: LatencyComparison, batch: int | None) -> Table:
    """A row per variant that ran: its times, and its time over the baseline's."""
    rows = measured(comparison, batch)
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
        if found is not None:
            return _TWIN
        twin = _OTHER_TWIN if parse_variant_name(row.name).again else None
        return _BASELINE if without_batch(row.name) == comparison.baseline else twin

    def over(row: ComparedVariant) -> float | None:
        found = ratios.get(row.name)
        return None if found is None else found.ratio

    def interval(row: ComparedVariant) -> str | None:
        found = ratios.get(row.name)
        return None if found is None else interval_word(found)

    return table(
        _title("Times", batch),
        (
            _names(rows),
            figures("median ms", rows, lambda v: v.median_ms),
            figures("p90 ms", rows, lambda v: v.p90_ms),
            figures("p99 ms", rows, lambda v: v.p99_ms),
            figures(_per_second(batch), rows, lambda v: v.throughput),
            figures("time / baseline", rows, over, ratio_word),
            column("95 % interval", Kind.FIGURE, rows, interval),
            _verdicts(rows, verdict),
        ),
        legend=_p99_legend(comparison, batch),
    )


def _p99_legend(comparison: LatencyComparison, batch: int | None) -> str | None:
    """Under the first table of times only; percentiles of trtexec are of all runs of all passes."""
    few = any(
        v.p99_ms is not None and len(v.samples_ms) < _FEWEST_FOR_P99
        for v in comparison.variants
        if v.settings is None or v.settings.engine != TRTEXEC
    )
    first = batches(comparison)[:1] == (batch,)
    return "p99 of fewer than 100 runs is close to the slowest" if few and first else None


def _per_second(batch: int | None) -> str:
    return "runs/s" if batch is None else "rows/s"


def _pairs_table(comparison: LatencyComparison, batch: int | None) -> Table:
    """A row per ratio over another baseline than the comparison's."""
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
    made = column("verdict", Kind.VERDICT, rows, cell)
    return replace(made, slugs=tuple(_SLUGS.get(c or "", "none") for c in made.cells))


def _costs_table(comparison: LatencyComparison, batch: int | None) -> Table:
    """A row per variant that ran: memory, size, time to open, outputs and the user's metrics."""
    rows = measured(comparison, batch)
    baseline = next((v for v in rows if without_batch(v.name) == comparison.baseline), None)
    metrics = dict.fromkeys(name for row in rows for name in row.metrics)
    columns = (
        figures("peak MiB", rows, lambda v: mebibytes(v.peak_memory_bytes)),
        figures("GPU MiB", rows, lambda v: mebibytes(v.peak_device_memory_bytes)),
        figures("size MiB", rows, lambda v: mebibytes(v.size_bytes)),
        figures("open s", rows, lambda v: v.open_s),
        column("max error", Kind.FIGURE, rows, lambda v: _largest_error(v.agreement)),
        figures("cosine", rows, lambda v: _lowest_cosine(v.agreement), "{:.6f}".format),
        figures("equal", rows, lambda v: _lowest_share(v.agreement), per_cent),
        figures("top-1", rows, lambda v: v.top1_agreement, per_cent),
        *(made for name in metrics for made in _metric(name, rows, baseline)),
    )
    made = table(_title("Memory, size and outputs", batch), columns)
    if not made.columns:
        return made
    drop = any(c.head.startswith("drop of ") for c in made.columns)
    legend = "drop: the baseline's metric minus the variant's" if drop else None
    return table(made.title, (_names(rows), *made.columns), legend=legend)


def _metric(
    name: str, rows: Sequence[ComparedVariant], baseline: ComparedVariant | None
) -> tuple[Column, Column]:
    """The metric, and by how much it is below the baseline's."""
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


def _lowest_cosine(outputs: Sequence[OutputAgreement]) -> float | None:
    return min((o.cosine for o in outputs if not isnan(o.cosine)), default=None)


def _lowest_share(outputs: Sequence[OutputAgreement]) -> float | None:
    """Of equal values, over the outputs of whole numbers and texts."""
    return min((o.equal for o in outputs if o.equal is not None), default=None)


def _failures_table(comparison: LatencyComparison) -> Table:
    """A row per reason why variants failed: which, why, and what to do."""
    rows = [v for v in comparison.variants if v.error is not None]
    alike: dict[tuple[str, str | None], list[str]] = {}
    for row in rows:
        hint = printable(row.hint) if row.hint else None
        alike.setdefault((_why(row), hint), []).append(printable(row.name))
    reasons = tuple(alike.items())
    return table(
        "Not measured" if not any(v.samples_ms for v in rows) else "Not measured to the end",
        (
            column("variant", Kind.NAME, reasons, lambda reason: "\n".join(reason[1])),
            column("why", Kind.TEXT, reasons, lambda reason: reason[0][0]),
            column("what to do", Kind.TEXT, reasons, lambda reason: reason[0][1]),
        ),
    )


def _why(variant: ComparedVariant) -> str:
    error = printable(variant.error or "")
    if not variant.samples_ms:
        return error
    return f"after {count(len(variant.samples_ms), 'round')}: {error}"


def settings_table(comparison: LatencyComparison) -> Table:
    """A row per kind of settings, a column per setting that is not the same in all.

    Engine, mode and weights stand in the names, versions in the lines on the machine; options that
    all variants of an engine share are left out. What one sample spans is the legend.
    """
    opened = _opened(comparison.variants)
    shared = _shared_options(opened.values())
    settings: tuple[tuple[str, Kind, _Setting], ...] = (
        ("device", Kind.TEXT, lambda s: s.device),
        ("precision", Kind.TEXT, lambda s: s.precision),
        ("sparse kernels", Kind.TEXT, lambda s: _KERNELS[s.sparse_kernels]),
        ("threads", Kind.FIGURE, lambda s: None if s.threads is None else str(s.threads)),
        ("options", Kind.TEXT, lambda s: _own_options(s, shared)),
    )
    alike: dict[tuple[str | None, ...], list[str]] = {}
    for name, one in opened.items():
        key = (one.engine, *(of(one) for _, _, of in settings))
        alike.setdefault(key, []).append(printable(name))
    rows = tuple(alike)
    names = Column(head="variant", kind=Kind.NAME, cells=tuple(map("\n".join, alike.values())))
    made = [
        column(head, kind, rows, partial(_setting, at))
        for at, (head, kind, _) in enumerate(settings, 1)
    ]
    spans = _spans(opened.values())
    differing = [c for c in made if len(set(c.cells)) > 1]
    if spans is not None and not differing:  # the legend needs a table to stand under
        differing = made[:1]
    return table("Settings that differ", (names, *differing) if differing else (), legend=spans)


_KERNELS = {True: "allowed", False: "not allowed", None: None}


def _setting(at: int, row: Sequence[str | None]) -> str | None:
    return None if (text := row[at]) is None else printable(text)


def _opened(variants: Sequence[ComparedVariant]) -> dict[str, VariantSettings]:
    """Each variant once, whatever its batches; the baseline's twin has its settings."""
    found: dict[str, VariantSettings] = {}
    for variant in variants:
        if variant.settings is not None and not parse_variant_name(variant.name).again:
            found.setdefault(without_batch(variant.name), variant.settings)
    return found


def _spans(settings: Iterable[VariantSettings]) -> str | None:
    """What one sample is, engine by engine, where that is not the same for all."""
    spans = dict.fromkeys((s.engine, s.timing) for s in settings)
    if len({timing for _, timing in spans}) < 2:
        return None
    said = "; ".join(printable(f"in {engine} {timing}") for engine, timing in spans)
    return f"one sample is {said}"


def _shared_options(settings: Iterable[VariantSettings]) -> dict[str, frozenset[str]]:
    """Engine -> the options that all of its variants have; () where there is only one mode."""
    shared: dict[str, frozenset[str]] = {}
    for one in settings:
        shared[one.engine] = shared.get(one.engine, frozenset(one.options)) & set(one.options)
    return shared


def _own_options(settings: VariantSettings, shared: dict[str, frozenset[str]]) -> str | None:
    own = (option for option in settings.options if option not in shared[settings.engine])
    return ", ".join(own) or None


def _names(rows: tuple[ComparedVariant, ...]) -> Column:
    return column("variant", Kind.NAME, rows, lambda v: printable(without_batch(v.name)))


def _title(what: str, batch: int | None) -> str:
    return what if batch is None else f"{what}, batch {batch}"
