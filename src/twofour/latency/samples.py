"""The figures of one variant, from its samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from twofour.records.latency import ComparedVariant


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of all samples do not exceed (nearest rank)."""
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[max(rank, 1) - 1]


def with_samples(
    row: ComparedVariant, samples_ms: Sequence[float], runs_ms: Sequence[float] | None = None
) -> ComparedVariant:
    """The row with samples, their median (mean of the middle two), percentiles and throughput.

    Percentiles are of `runs_ms` where a sample is the median of several runs. Without samples the
    row is as it was.
    """
    runs = samples_ms if runs_ms is None else runs_ms
    if not samples_ms:
        return row
    median_ms = statistics.median(samples_ms)
    return replace(
        row,
        samples_ms=tuple(samples_ms),
        median_ms=median_ms,
        p90_ms=percentile(runs, 90) if runs else None,
        p99_ms=percentile(runs, 99) if runs else None,
        throughput=1e3 * (row.batch or 1) / median_ms if median_ms else None,
    )
