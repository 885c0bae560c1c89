"""Timing of runs: warm-up, samples within a time budget, and the statistics of the samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

from twofour.records.build import VariantLatency
from twofour.records.options import BuildOptions

BUDGET_S = 1.0
LEAST_SAMPLES = 5


def time_runs(
    run: Callable[[], object], options: BuildOptions, *, budget_s: float = BUDGET_S
) -> tuple[float, ...]:
    """Milliseconds of each timed run.

    Stops after `options.iterations` runs, or once `budget_s` is spent and 5 samples are there. The
    warm-up ends early when it has used the budget.
    """
    started = time.perf_counter()
    for _ in range(options.warmup):
        run()
        if time.perf_counter() - started > budget_s:
            break
    samples: list[float] = []
    started = time.perf_counter()
    while len(samples) < max(options.iterations, 1):
        before = time.perf_counter()
        run()
        after = time.perf_counter()
        samples.append((after - before) * 1e3)
        if after - started > budget_s and len(samples) >= LEAST_SAMPLES:
            break
    return tuple(samples)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of all samples do not exceed (nearest rank)."""
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[max(rank, 1) - 1]


def latency_of(
    variant: str,
    samples_ms: tuple[float, ...],
    *,
    timing: str,
    threads: int | None = None,
) -> VariantLatency:
    """Median (mean of the middle two), nearest-rank p90 and p99, and 1000 / median_ms runs/s."""
    median_ms = statistics.median(samples_ms)
    return VariantLatency(
        name=variant,
        samples_ms=samples_ms,
        median_ms=median_ms,
        p90_ms=percentile(samples_ms, 90),
        p99_ms=percentile(samples_ms, 99),
        throughput=1e3 / median_ms if median_ms > 0 else None,
        peak_memory_bytes=None,
        threads=threads,
        timing=timing,
    )


def no_latency(variant: str, error: str) -> VariantLatency:
    """The record of a variant that could not be timed, and why."""
    return VariantLatency(
        name=variant,
        samples_ms=(),
        median_ms=None,
        p90_ms=None,
        p99_ms=None,
        throughput=None,
        peak_memory_bytes=None,
        error=error,
    )
