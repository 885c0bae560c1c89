"""The tables of a comparison: times, costs and outputs, sweep, settings, failures, layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import floor, isnan, log10
from typing import TypeVar

from twofour.latency.naming import parse_variant_name, without_batch
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
)
from twofour.reports.document import Column, Kind, Table, column, table
from twofour.reports.latency_parts import (
    TRTEXEC,
    batches,
    failed,
    is_baseline,
    measured,
    noise_of,
    over_baseline,
    pair_name,
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

_T = TypeVar("_T")
VERDICT_SLUGS = {
    LatencyVerdict.FASTER: "faster",
    LatencyVerdict.SLOWER: "slower",
    LatencyVerdict.NO_DIFFERENCE: "same",
    LatencyVerdict.UNDECIDED: "undecided",
}
"""Verdicts in class names."""
_SLUGS = {verdict.value: slug for verdict, slug in VERDICT_SLUGS.items()}
BASELINE, TWIN, OTHER_TWIN = "baseline", "baseline again", "again"
_FEWEST_FOR_P99 = 100
"""Runs from which the 99th percentile by nearest rank is not the slowest of all."""


def all_grids(comparison: LatencyComparison) -> tuple[Table, ...]:
    """Every table but those of layers: sweep, each batch, settings, what failed."""
    grids = (
        sweep_grid(comparison),
        *(made for batch in batches(comparison) for made in batch_grids(comparison, batch)),
        settings_grid(comparison),
        failures_grid(comparison),
    )
    return tuple(made for made in grids if made.columns)


def batch_grids(comparison: LatencyComparison, batch: int | None) -> tuple[Table, ...]:
    """The tables of one batch, without those that would be empty."""
    grids = (
        times_grid(comparison, batch),
        pairs_grid(comparison, batch),
        costs_grid(comparison, batch),
    )
    return tuple(made for made in grids if made.columns)


def times_grid(comparison: LatencyComparison, batch: int | None) -> Table:
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
            return TWIN
        twin = OTHER_TWIN if parse_variant_name(row.name).again else None
        return BASELINE if is_baseline(comparison, row) else twin

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


def costs_grid(comparison: LatencyComparison, batch: int | None) -> Table:
    """A row per variant that ran: memory, size, time to open, outputs and the user's metrics."""
    rows = measured(comparison, batch)
    baseline = next((v for v in rows if is_baseline(comparison, v)), None)
    columns = (
        figures("peak MiB", rows, lambda v: mebibytes(v.peak_memory_bytes)),
        figures("GPU MiB", rows, lambda v: mebibytes(v.peak_device_memory_bytes)),
        figures("size MiB", rows, lambda v: mebibytes(v.size_bytes)),
        figures("open s", rows, lambda v: v.open_s),
        *output_columns(rows),
        *metric_columns(rows, baseline),
    )
    made = table(_title("Memory, size and outputs", batch), columns)
    if not made.columns:
        return made
    drop = any(c.head.startswith("drop of ") for c in made.columns)
    legend = "drop: the baseline's metric minus the variant's" if drop else None
    return table(made.title, (_names(rows), *made.columns), legend=legend)


def pairs_grid(comparison: LatencyComparison, batch: int | None) -> Table:
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


def sweep_grid(comparison: LatencyComparison) -> Table:
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


def failures_grid(comparison: LatencyComparison) -> Table:
    """A row per reason why variants failed: which, why, and what to do."""
    rows = failed(comparison)
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


def figures(
    head: str,
    rows: Sequence[_T],
    exact: Callable[[_T], float | None],
    words: Callable[[float], str | None] = figure,
) -> Column:
    """Figures as they are written, with the exact ones."""

    def cell(row: _T) -> str | None:
        found = exact(row)
        return None if found is None else words(found)

    return column(head, Kind.FIGURE, rows, cell, exact)


def _verdicts(rows: Sequence[_T], cell: Callable[[_T], str | None]) -> Column:
    made = column("verdict", Kind.VERDICT, rows, cell)
    return replace(made, slugs=tuple(_SLUGS.get(c or "", "none") for c in made.cells))


def _names(rows: tuple[ComparedVariant, ...]) -> Column:
    return column("variant", Kind.NAME, rows, lambda v: printable(without_batch(v.name)))


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


def _title(what: str, batch: int | None) -> str:
    return what if batch is None else f"{what}, batch {batch}"


def _sweep_cell(ratio: LatencyRatio) -> str:
    lines = (ratio_word(ratio.ratio), interval_word(ratio), ratio.verdict.value)
    return "\n".join(line for line in lines if line is not None)


def _why(variant: ComparedVariant) -> str:
    error = printable(variant.error or "")
    if not variant.samples_ms:
        return error
    return f"after {count(len(variant.samples_ms), 'round')}: {error}"


def output_columns(rows: Sequence[ComparedVariant]) -> tuple[Column, ...]:
    """Largest error, lowest cosine, shares of equal values and of rows with one top class."""
    return (
        column("max error", Kind.FIGURE, rows, lambda v: _largest_error(v.agreement)),
        figures("cosine", rows, lambda v: _lowest_cosine(v.agreement), "{:.6f}".format),
        figures("equal", rows, lambda v: _lowest_share(v.agreement), per_cent),
        figures("top-1", rows, lambda v: v.top1_agreement, per_cent),
    )


def metric_columns(
    rows: Sequence[ComparedVariant], baseline: ComparedVariant | None
) -> tuple[Column, ...]:
    """Each metric, and by how much it is below the baseline's."""
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return tuple(made for name in names for made in _metric(name, rows, baseline))


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


def _lowest_cosine(outputs: Sequence[OutputAgreement]) -> float | None:
    return min((o.cosine for o in outputs if not isnan(o.cosine)), default=None)


def _lowest_share(outputs: Sequence[OutputAgreement]) -> float | None:
    """Of equal values, over the outputs of whole numbers and texts."""
    return min((o.equal for o in outputs if o.equal is not None), default=None)


_Setting = Callable[[VariantSettings], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """Variants whose settings read alike."""

    names: tuple[str, ...]
    settings: VariantSettings


def settings_grid(comparison: LatencyComparison) -> Table:
    """A row per kind of settings, a column per setting that is not the same in all.

    Engine, mode and weights stand in the names, versions in the lines on the machine; options that
    all variants of an engine share are left out. What one sample spans is the legend.
    """
    variants = _opened(comparison.variants)
    shared = _shared_options([settings for _, settings in variants])
    columns: tuple[tuple[str, Kind, _Setting], ...] = (
        ("device", Kind.TEXT, lambda s: s.device),
        ("precision", Kind.TEXT, lambda s: s.precision),
        ("sparse kernels", Kind.TEXT, _kernels),
        ("threads", Kind.FIGURE, lambda s: None if s.threads is None else str(s.threads)),
        ("options", Kind.TEXT, lambda s: _own_options(s, shared)),
    )
    rows = _alike(variants, [of for _, _, of in columns])
    made = [c for head, kind, of in columns if (c := _setting(head, kind, rows, of)) is not None]
    names = column("variant", Kind.NAME, rows, lambda row: "\n".join(map(printable, row.names)))
    spans = _spans([settings for _, settings in variants])
    if spans is not None and not made:  # the legend needs a table to stand under
        made = [column("device", Kind.TEXT, rows, lambda row: printable(row.settings.device))]
    return table("Settings that differ", (names, *made) if made else (), legend=spans)


def _opened(variants: Sequence[ComparedVariant]) -> tuple[tuple[str, VariantSettings], ...]:
    """Each variant once, whatever its batches; the baseline's twin has its settings."""
    found: dict[str, VariantSettings] = {}
    for variant in variants:
        if variant.settings is not None and not parse_variant_name(variant.name).again:
            found.setdefault(without_batch(variant.name), variant.settings)
    return tuple(found.items())


def _alike(
    variants: Sequence[tuple[str, VariantSettings]], cells: Sequence[_Setting]
) -> tuple[_Alike, ...]:
    rows: dict[tuple[str | None, ...], list[tuple[str, VariantSettings]]] = {}
    for name, settings in variants:
        key = (settings.engine, *(of(settings) for of in cells))
        rows.setdefault(key, []).append((name, settings))
    return tuple(
        _Alike(names=tuple(name for name, _ in same), settings=same[0][1]) for same in rows.values()
    )


def _setting(head: str, kind: Kind, rows: Sequence[_Alike], of: _Setting) -> Column | None:
    values = [of(row.settings) for row in rows]
    if len(set(values)) < 2:
        return None
    return column(head, kind, values, lambda value: None if value is None else printable(value))


def _shared_options(settings: Sequence[VariantSettings]) -> dict[str, frozenset[str]]:
    """Engine -> the options that all of its variants have; () where there is only one mode."""
    shared: dict[str, frozenset[str]] = {}
    for one in settings:
        shared[one.engine] = shared.get(one.engine, frozenset(one.options)) & set(one.options)
    return shared


def _own_options(settings: VariantSettings, shared: dict[str, frozenset[str]]) -> str | None:
    own = (option for option in settings.options if option not in shared[settings.engine])
    return ", ".join(own) or None


def _spans(settings: Sequence[VariantSettings]) -> str | None:
    """What one sample is, engine by engine, where that is not the same for all."""
    spans = dict.fromkeys((s.engine, s.timing) for s in settings)
    if len({timing for _, timing in spans}) < 2:
        return None
    return "one sample is " + "; ".join(_span_words(spans))


def _span_words(spans: dict[tuple[str, str], None]) -> Iterator[str]:
    for engine, timing in spans:
        yield printable(f"in {engine} {timing}")


def _kernels(settings: VariantSettings) -> str | None:
    words = {True: "allowed", False: "not allowed", None: None}
    return words[settings.sparse_kernels]


SHOWN = 15
"""Layers with a row of their own; the others are summed up in the last row."""


def layer_grid(contrast: LayerContrast) -> Table:
    """The layers with the largest differences, the others in one row, the sums in the title."""
    rows, places = shown(contrast, SHOWN), decimal_places(contrast)

    def ms(value: float) -> str:
        return f"{value:,.{places}f}"

    return table(
        _layers_title(contrast),
        (
            column("layer", Kind.NAME, rows, layer_name),
            figures("variant ms", rows, lambda r: r.variant_ms, ms),
            figures("baseline ms", rows, lambda r: r.baseline_ms, ms),
            figures("ratio", rows, lambda r: r.ratio, ratio_word),
            figures("difference ms", rows, lambda r: r.difference_ms, lambda d: signed(d, places)),
            figures("share", rows, lambda r: r.share, per_cent),
        ),
        legend=f"{share_words(contrast)}; profiling makes layers slower",
    )


def share_words(contrast: LayerContrast) -> str:
    """What a share is of, or why there is none."""
    if all(row.share is None for row in contrast.rows):
        return "no share: no difference end to end, or sums that differ by less than 2 %"
    return "share: of the difference between both sums"


def shown(contrast: LayerContrast, most: int) -> tuple[LayerContrastRow, ...]:
    """The first `most` layers, and a row that sums up the others where there are several."""
    if len(contrast.rows) <= most + 1:
        return contrast.rows
    return (*contrast.rows[:most], _rest(contrast.rows[most:]))


def layer_name(row: LayerContrastRow) -> str:
    """The layer's name in the variant's engine and, where it has another there, the baseline's."""
    name, other = printable(row.layer), printable(row.baseline_layer)
    if row.variant_ms is None:
        return f"{other}\nonly in the baseline"
    if row.baseline_ms is None:
        return f"{name}\nnot in the baseline"
    if name != other:
        return f"{name}\nbaseline: {other}"
    return name if row.owner is None else f"{name}\nfor {printable(row.owner)}"


def decimal_places(contrast: LayerContrast) -> int:
    """Of all milliseconds of a contrast alike: the larger sum has five significant digits."""
    largest = max(contrast.variant_ms, contrast.baseline_ms)
    return min(7, max(1, 4 - floor(log10(largest)))) if largest > 0 else 1


def signed(difference_ms: float, places: int) -> str:
    """A difference with its sign; 0 has none."""
    text = f"{difference_ms:+,.{places}f}"
    return text if float(text.replace(",", "")) else text[1:]


def _layers_title(contrast: LayerContrast) -> str:
    sums = f"{figure(contrast.variant_ms)} ms instead of {figure(contrast.baseline_ms)} ms"
    difference = signed(contrast.variant_ms - contrast.baseline_ms, decimal_places(contrast))
    both = f"{printable(contrast.variant)} over {printable(contrast.baseline)}"
    return f"Layers of {both}: {sums} in sum ({difference} ms)"


def _rest(rows: Sequence[LayerContrastRow]) -> LayerContrastRow:
    name = f"{count(len(rows), 'more layer')}"
    variant_ms = sum(r.variant_ms or 0.0 for r in rows)
    baseline_ms = sum(r.baseline_ms or 0.0 for r in rows)
    shares = [r.share for r in rows if r.share is not None]
    return LayerContrastRow(
        layer=name,
        baseline_layer=name,
        variant_ms=variant_ms,
        baseline_ms=baseline_ms,
        ratio=variant_ms / baseline_ms if baseline_ms else None,
        difference_ms=sum(r.difference_ms for r in rows),
        share=sum(shares) if shares else None,
    )
