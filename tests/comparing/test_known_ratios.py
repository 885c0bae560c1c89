"""The whole chain from timed runs to verdicts, on a fake engine whose true ratios are set."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from twofour.engines.protocol import no_progress
from twofour.engines.timing import RoundPlan, interleave
from twofour.latency.ratios import ratios_and_noise
from twofour.records.latency import ComparedVariant, LatencyRatio, LatencyVerdict

BASE_MS = 4.0
BASELINE = "dense@fake:sleep"
TWIN = "dense@fake:sleep again"


@dataclass
class Clock:
    """Drift that hits whatever runs next: slower and slower, with a wave."""

    runs: int = 0

    def factor(self) -> float:
        self.runs += 1
        return 1 + self.runs / 400 + 0.1 * math.sin(self.runs / 15)


@dataclass
class Sleeper:
    """A variant of a set ratio to the baseline; one run in 20 takes twice as long.

    Its times are made, not measured: a test must not depend on how busy the machine is.
    """

    name: str
    ratio: float
    clock: Clock
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def run_ms(self) -> float:
        outlier = 2.0 if self.chance.random() < 0.05 else 1.0
        jitter = 1 + 0.01 * self.chance.random()
        return BASE_MS * self.ratio * self.clock.factor() * outlier * jitter


def compared(true: dict[str, float], rounds: int) -> tuple[dict[str, LatencyRatio], float]:
    clock = Clock()
    sleepers = [Sleeper(name, ratio, clock, random.Random(name)) for name, ratio in true.items()]
    plan = RoundPlan(rounds=rounds, time_limit_s=60, seed=3)
    found = interleave(sleepers, plan, no_progress)
    variants = tuple(variant(name, samples) for name, samples in found.samples_ms.items())
    ratios, noise = ratios_and_noise(variants, BASELINE, 0)
    return {r.variant: r for r in ratios}, noise[0].floor


def variant(name: str, samples_ms: tuple[float, ...]) -> ComparedVariant:
    return ComparedVariant(
        name=name,
        samples_ms=samples_ms,
        median_ms=sorted(samples_ms)[len(samples_ms) // 2],
        p90_ms=None,
        p99_ms=None,
        throughput=None,
        peak_memory_bytes=None,
    )


def test_set_ratios_come_out_under_drift_and_outliers_and_equals_are_no_difference() -> None:
    true = {
        BASELINE: 1.00,
        TWIN: 1.00,
        "same@fake:sleep": 1.00,
        "near@fake:sleep": 1.02,
        "slow@fake:sleep": 1.30,
        "fast@fake:sleep": 0.70,
    }
    ratios, floor = compared(true, rounds=60)
    assert floor < 0.06
    for name in ("same@fake:sleep", "near@fake:sleep", "slow@fake:sleep", "fast@fake:sleep"):
        found = ratios[name]
        assert found.low is not None
        assert found.high is not None
        assert abs(found.ratio / true[name] - 1) < 0.03, name
        assert found.low * 0.98 < true[name] < found.high * 1.02, name
    assert ratios["same@fake:sleep"].verdict is LatencyVerdict.NO_DIFFERENCE
    assert ratios["slow@fake:sleep"].verdict is LatencyVerdict.SLOWER
    assert ratios["fast@fake:sleep"].verdict is LatencyVerdict.FASTER
