"""Timing an engine: rounds, samples and their settling."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from twofour.engines.protocol import ProgressCallback
from twofour.errors import TwofourError
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


LEAST_ROUNDS = 10


class Contestant(Protocol):
    """A variant that is ready to run."""

    @property
    def name(self) -> str:
        """Its name in the comparison."""

    def run_ms(self) -> float:
        """One timed run; raises TwofourError where it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """How many rounds, and how long at most."""

    rounds: int
    time_limit_s: float
    """No round is begun after it, once `LEAST_ROUNDS` are done."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What came out: samples by round, in the order of the contestants."""

    samples_ms: dict[str, tuple[float, ...]]
    """Name -> milliseconds of round 0, 1, ...; shorter where the contestant failed."""
    failed: dict[str, TwofourError]
    """Those that dropped out, with what they said."""
    done: int
    """Rounds that every contestant still running has completed."""
    interrupted: bool
    """Ctrl-C ended it; the round it fell into is left out."""


def interleave(
    contestants: Sequence[Contestant], plan: RoundPlan, report: ProgressCallback
) -> Rounds:
    """Run the rounds; one that fails drops out, and the others go on.

    Ctrl-C (KeyboardInterrupt) ends the rounds and keeps those that were complete.
    """
    order = random.Random(plan.seed)  # noqa: S311  # no secret: the order of runs
    samples: dict[str, list[float]] = {c.name: [] for c in contestants}
    failed: dict[str, TwofourError] = {}
    lengths_s: list[float] = []
    started = time.perf_counter()
    interrupted = False
    try:
        while len(lengths_s) < plan.rounds:
            running = [c for c in contestants if c.name not in failed]
            elapsed_s = time.perf_counter() - started
            if not running or (len(lengths_s) >= LEAST_ROUNDS and elapsed_s > plan.time_limit_s):
                break
            report(_time_left(lengths_s, plan, elapsed_s), len(lengths_s), plan.rounds)
            order.shuffle(running)
            _one_round(running, samples, failed)
            lengths_s.append(time.perf_counter() - started - elapsed_s)
    except KeyboardInterrupt:
        interrupted = True
    done = len(lengths_s)
    return Rounds(
        samples_ms={name: tuple(values[:done]) for name, values in samples.items()},
        failed=failed,
        done=done,
        interrupted=interrupted,
    )


def _one_round(
    running: Sequence[Contestant],
    samples: dict[str, list[float]],
    failed: dict[str, TwofourError],
) -> None:
    for contestant in running:
        try:
            samples[contestant.name].append(contestant.run_ms())
        except TwofourError as error:
            failed[contestant.name] = error


def _time_left(lengths_s: Sequence[float], plan: RoundPlan, elapsed_s: float) -> str:
    """From the median length of a round so far; the time limit may come first."""
    if not lengths_s:
        return f"round 1 of {plan.rounds}"
    length_s = statistics.median(lengths_s)
    by_rounds = (plan.rounds - len(lengths_s)) * length_s
    by_time = max(plan.time_limit_s - elapsed_s, (LEAST_ROUNDS - len(lengths_s)) * length_s)
    left_s = max(min(by_rounds, by_time), 0.0)
    return f"round {len(lengths_s) + 1} of {plan.rounds}, {in_words(left_s)} left"


def in_words(seconds: float) -> str:
    """Such as "9 s" or "2 min 5 s"."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"
