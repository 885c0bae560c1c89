"""A latency comparison, for every format."""

from __future__ import annotations

from collections.abc import Sequence

from twofour.latency.naming import parse_variant_name, without_batch
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    NoiseFloor,
    VariantSettings,
)
from twofour.reports.latency_grids import (
    Column,
    Grid,
    Kind,
    column,
    grid,
    metric_columns,
    output_columns,
    settings_grid,
)
from twofour.words import count, figure, interval_word, mebibytes, printable, ratio_word

TRTEXEC = "trtexec"
"""VariantSettings.engine of what was timed elsewhere: a sample is the median of a pass."""


def batches(comparison: LatencyComparison) -> tuple[int | None, ...]:
    """Batches at which anything was measured, in the order of the variants."""
    return tuple(dict.fromkeys(v.batch for v in comparison.variants if v.samples_ms))


def measured(comparison: LatencyComparison, batch: int | None) -> tuple[ComparedVariant, ...]:
    """Variants with samples at this batch."""
    return tuple(v for v in comparison.variants if v.samples_ms and v.batch == batch)


def failed(comparison: LatencyComparison) -> tuple[ComparedVariant, ...]:
    """Variants with an error, whether or not they ran before it."""
    return tuple(v for v in comparison.variants if v.error is not None)


def noise_of(comparison: LatencyComparison, batch: int | None) -> NoiseFloor | None:
    """The baseline against its twin at this batch; other engines may have noise of their own."""
    found = (n for n in comparison.noise if n.batch == batch)
    return next((n for n in found if without_batch(n.variant) == comparison.baseline), None)


def is_baseline(comparison: LatencyComparison, variant: ComparedVariant) -> bool:
    """Whether the variant is the comparison's baseline at its batch."""
    return without_batch(variant.name) == comparison.baseline


def over_baseline(comparison: LatencyComparison, batch: int | None) -> tuple[LatencyRatio, ...]:
    """Ratios over the comparison's baseline at this batch."""
    return tuple(r for r in _at(comparison, batch) if _base(r) == comparison.baseline)


def within_engines(comparison: LatencyComparison, batch: int | None) -> tuple[LatencyRatio, ...]:
    """Ratios over another baseline than the comparison's: sparse over dense in one engine."""
    return tuple(r for r in _at(comparison, batch) if _base(r) != comparison.baseline)


def pair_name(comparison: LatencyComparison, ratio: LatencyRatio) -> str:
    """What is divided by what, as short as it is clear; the batch is not in it.

    The variant alone where the baseline is the comparison's, "sparse / dense in torch:eager" where
    both ran in one engine and mode, else both names.
    """
    variant = without_batch(ratio.variant)
    if _base(ratio) == comparison.baseline:
        return printable(variant)
    both = settings_of(comparison, ratio)
    if both is not None and same_engine(*both):
        return printable(f"{both[0].weights} / {both[1].weights} in {engine_word(both[0])}")
    return printable(f"{variant} / {_base(ratio)}")


def settings_of(
    comparison: LatencyComparison, ratio: LatencyRatio
) -> tuple[VariantSettings, VariantSettings] | None:
    """Settings of the variant and of the baseline; None where one of them is not known."""
    found = [_settings(comparison.variants, name) for name in (ratio.variant, ratio.baseline)]
    variant, baseline = found
    return None if variant is None or baseline is None else (variant, baseline)


def same_engine(variant: VariantSettings, baseline: VariantSettings) -> bool:
    """The weights differ, engine and mode do not."""
    same = (variant.engine, variant.mode) == (baseline.engine, baseline.mode)
    return same and variant.weights != baseline.weights


def engine_word(settings: VariantSettings) -> str:
    """engine:mode, as --engines takes it."""
    return f"{settings.engine}:{settings.mode}"


def _settings(variants: Sequence[ComparedVariant], name: str) -> VariantSettings | None:
    return next((v.settings for v in variants if v.name == name), None)


def _at(comparison: LatencyComparison, batch: int | None) -> tuple[LatencyRatio, ...]:
    return tuple(r for r in comparison.ratios if r.batch == batch)


def _base(ratio: LatencyRatio) -> str:
    return without_batch(ratio.baseline)


BASELINE, TWIN, OTHER_TWIN = "baseline", "baseline again", "again"
_FEWEST_FOR_P99 = 100
"""Runs from which the 99th percentile by nearest rank is not the slowest of all."""


def all_grids(comparison: LatencyComparison) -> tuple[Grid, ...]:
    """Every table but those of layers: sweep, each batch, settings, what failed."""
    grids = (
        sweep_grid(comparison),
        *(made for batch in batches(comparison) for made in batch_grids(comparison, batch)),
        settings_grid(comparison),
        failures_grid(comparison),
    )
    return tuple(made for made in grids if made.columns)


def batch_grids(comparison: LatencyComparison, batch: int | None) -> tuple[Grid, ...]:
    """The tables of one batch, without those that would be empty."""
    grids = (
        times_grid(comparison, batch),
        pairs_grid(comparison, batch),
        costs_grid(comparison, batch),
    )
    return tuple(made for made in grids if made.columns)


def times_grid(comparison: LatencyComparison, batch: int | None) -> Grid:
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

    def over(row: ComparedVariant) -> str | None:
        found = ratios.get(row.name)
        return None if found is None else ratio_word(found.ratio)

    def interval(row: ComparedVariant) -> str | None:
        found = ratios.get(row.name)
        return None if found is None else interval_word(found)

    return grid(
        _title("Times", batch),
        (
            _names(rows),
            column("median ms", Kind.FIGURE, rows, lambda v: figure(v.median_ms)),
            column("p90 ms", Kind.FIGURE, rows, lambda v: figure(v.p90_ms)),
            column("p99 ms", Kind.FIGURE, rows, lambda v: figure(v.p99_ms)),
            column(_per_second(batch), Kind.FIGURE, rows, lambda v: figure(v.throughput)),
            column("time / baseline", Kind.FIGURE, rows, over),
            column("95 % interval", Kind.FIGURE, rows, interval),
            column("verdict", Kind.VERDICT, rows, verdict),
        ),
        legend=_p99_legend(comparison, batch),
    )


def costs_grid(comparison: LatencyComparison, batch: int | None) -> Grid:
    """A row per variant that ran: memory, size, time to open, outputs and the user's metrics."""
    rows = measured(comparison, batch)
    baseline = next((v for v in rows if is_baseline(comparison, v)), None)
    columns = (
        column("peak MiB", Kind.FIGURE, rows, lambda v: mebibytes(v.peak_memory_bytes)),
        column("GPU MiB", Kind.FIGURE, rows, lambda v: mebibytes(v.peak_device_memory_bytes)),
        column("size MiB", Kind.FIGURE, rows, lambda v: mebibytes(v.size_bytes)),
        column("open s", Kind.FIGURE, rows, lambda v: figure(v.open_s)),
        *output_columns(rows),
        *metric_columns(rows, baseline),
    )
    made = grid(_title("Memory, size and outputs", batch), columns)
    if not made.columns:
        return made
    drop = any(c.head.startswith("drop of ") for c in made.columns)
    legend = "drop: the baseline's metric minus the variant's" if drop else None
    return grid(made.title, (_names(rows), *made.columns), legend=legend)


def pairs_grid(comparison: LatencyComparison, batch: int | None) -> Grid:
    """A row per ratio over another baseline than the comparison's."""
    rows = within_engines(comparison, batch)
    return grid(
        _title("Within the other engines", batch),
        (
            column("time / time", Kind.NAME, rows, lambda r: pair_name(comparison, r)),
            column("ratio", Kind.FIGURE, rows, lambda r: ratio_word(r.ratio)),
            column("95 % interval", Kind.FIGURE, rows, interval_word),
            column("verdict", Kind.VERDICT, rows, lambda r: r.verdict.value),
        ),
    )


def sweep_grid(comparison: LatencyComparison) -> Grid:
    """A row per pair, a column per batch; no columns where there are not several batches."""
    sizes = tuple(b for b in batches(comparison) if b is not None)
    if len(sizes) < 2:
        return grid("", ())
    found = {(pair_name(comparison, r), r.batch): r for r in comparison.ratios}
    names = tuple(dict.fromkeys(name for name, _ in found))

    def at(batch: int) -> Column:
        cells = (found.get((name, batch)) for name in names)
        return Column(
            head=f"batch {batch}",
            kind=Kind.FIGURE,
            cells=tuple(None if r is None else _sweep_cell(r) for r in cells),
        )

    return grid(
        "Time / baseline over batch",
        (Column(head="variant", kind=Kind.NAME, cells=names), *map(at, sizes)),
    )


def failures_grid(comparison: LatencyComparison) -> Grid:
    """A row per reason why variants failed: which, why, and what to do."""
    rows = failed(comparison)
    alike: dict[tuple[str, str | None], list[str]] = {}
    for row in rows:
        hint = printable(row.hint) if row.hint else None
        alike.setdefault((_why(row), hint), []).append(printable(row.name))
    reasons = tuple(alike.items())
    return grid(
        "Not measured" if not any(v.samples_ms for v in rows) else "Not measured to the end",
        (
            column("variant", Kind.NAME, reasons, lambda reason: "\n".join(reason[1])),
            column("why", Kind.TEXT, reasons, lambda reason: reason[0][0]),
            column("what to do", Kind.TEXT, reasons, lambda reason: reason[0][1]),
        ),
    )


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
