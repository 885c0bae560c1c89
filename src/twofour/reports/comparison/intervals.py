"""The ratio of two sets of times and its 95 % bootstrap interval, robust to outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

LEAST_ROUNDS = 10
"""For an interval of paired samples: the fewest that were simulated and cover as they should."""
LEAST_UNPAIRED = 20
"""For an interval of unpaired samples, on each side."""
_RESAMPLES = 2000
"""Each is used twice, once mirrored, so that swapping the sides mirrors the interval exactly."""
_TAIL = 0.025
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioEstimate:
    """Time over time, with its interval where there are samples enough for one."""

    ratio: float
    low: float | None
    high: float | None
    rounds: int
    """Pairs, or the samples of the side that has fewer."""
    widest: float
    """Largest factor (1 or more) between the two times of one round, or between any two times."""


def paired_ratio(
    variant_ms: Sequence[float], baseline_ms: Sequence[float], *, seed: int
) -> RatioEstimate | None:
    """Mean of the middle half of the per-round log ratios, as a ratio; None without any round.

    Item i of both was measured in round i. What slows a round down is in both and cancels; up to a
    quarter of the rounds may be outliers on either side. The interval resamples rounds. In 2000
    simulated comparisons for each case it covered the true ratio in 93.5 to 95.8 % at 10 to 200
    rounds: log-normal noise of 1 and 5 %, a coarse clock, drift by half, waves, bursts, 5 % of the
    runs three times as slow, heavy tails, two clock states (`benchmarks/compare_coverage.py`).
    """
    logs = _log_ratios(variant_ms, baseline_ms)
    if not logs.size:
        return None
    middle = _middle(logs)
    ends: tuple[float | None, float | None] = (None, None)
    if logs.size >= LEAST_ROUNDS:
        weights = _resampled_weights(logs.size, seed)
        means = np.concatenate([weights @ logs, weights[:, ::-1] @ logs])
        ends = _ends(means, _tail(logs.size))
    return RatioEstimate(
        ratio=math.exp(middle),
        low=ends[0],
        high=ends[1],
        rounds=int(logs.size),
        widest=math.exp(float(np.abs(logs).max())),
    )


def half_ratios(variant_ms: Sequence[float], baseline_ms: Sequence[float]) -> tuple[float, ...]:
    """The ratio of `paired_ratio` of the first and the second half of the rounds; () of too few."""
    rounds = min(len(variant_ms), len(baseline_ms))
    if rounds < LEAST_ROUNDS:
        return ()
    halves = (slice(0, rounds // 2), slice(rounds // 2, rounds))
    found = (_log_ratios(variant_ms[half], baseline_ms[half]) for half in halves)
    return tuple(math.exp(_middle(logs)) for logs in found if logs.size)


def unpaired_ratio(
    variant_ms: Sequence[float], baseline_ms: Sequence[float], *, seed: int
) -> RatioEstimate | None:
    """Ratio of the medians of samples that were not taken in rounds; None where a side has none.

    Both sides are resampled independently. What changed between the two measurements (clocks, heat,
    other work) is in the ratio and not in the interval, nor is it that samples of one process
    resemble each other: the interval says too little.
    """
    variant, baseline = _sorted_logs(variant_ms), _sorted_logs(baseline_ms)
    if not variant.size or not baseline.size:
        return None
    ends: tuple[float | None, float | None] = (None, None)
    fewest = int(min(variant.size, baseline.size))
    if fewest >= LEAST_UNPAIRED:
        first, second = (_resampled_medians(variant, seed, stream) for stream in (0, 1))
        third, fourth = (_resampled_medians(baseline, seed, stream) for stream in (1, 0))
        ends = _ends(np.concatenate([first - third, second - fourth]), _TAIL)
    return RatioEstimate(
        ratio=math.exp(float(np.median(variant) - np.median(baseline))),
        low=ends[0],
        high=ends[1],
        rounds=fewest,
        widest=math.exp(float(max(variant[-1], baseline[-1]) - min(variant[0], baseline[0]))),
    )


def _log_ratios(variant_ms: Sequence[float], baseline_ms: Sequence[float]) -> Floats:
    """Sorted, of the rounds in which both ran; a clock that stood still gives no ratio."""
    rounds = min(len(variant_ms), len(baseline_ms))
    variant = np.asarray(variant_ms[:rounds], dtype=np.float64)
    baseline = np.asarray(baseline_ms[:rounds], dtype=np.float64)
    ran = np.isfinite(variant) & np.isfinite(baseline) & (variant > 0) & (baseline > 0)
    return np.sort(np.log(variant[ran]) - np.log(baseline[ran]))


def _middle(logs: Floats) -> float:
    return float(_middle_weights(np.ones((1, logs.size)))[0] @ logs)


def _sorted_logs(samples_ms: Sequence[float]) -> Floats:
    samples = np.asarray(samples_ms, dtype=np.float64)
    return np.sort(np.log(samples[np.isfinite(samples) & (samples > 0)]))


@lru_cache(maxsize=4)
def _resampled_weights(rounds: int, seed: int) -> Floats:
    """[resample, rank]: what each sorted value weighs in the middle mean of a resample.

    They depend on the number of rounds alone, so that one table serves every ratio.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, rounds, (_RESAMPLES, rounds))
    places = drawn + rounds * np.arange(_RESAMPLES)[:, None]
    counts = np.bincount(places.ravel(), minlength=_RESAMPLES * rounds)
    return _middle_weights(counts.reshape(_RESAMPLES, rounds).astype(np.float64))


def _middle_weights(counts: Floats) -> Floats:
    """Weights of sorted values that occur `counts` times, in the mean of their middle half."""
    size = counts.shape[1]
    cut = size // 4
    inside = np.clip(np.cumsum(counts, axis=1), cut, size - cut)
    weights: Floats = np.diff(inside, axis=1, prepend=float(cut)) / (size - 2 * cut)
    return weights


def _resampled_medians(values: Floats, seed: int, stream: int) -> Floats:
    """Medians of resamples of sorted values, for any number of them in the same time.

    The k-th smallest of n uniform numbers is Beta(k, n - k + 1) distributed, and its rank in the
    sample is where the k-th smallest value of a resample comes from.
    """
    rng = np.random.default_rng([seed, stream])
    size = values.size
    k = (size + 1) // 2
    lower = rng.beta(k, size - k + 1, _RESAMPLES)
    upper = lower if size % 2 else lower + (1 - lower) * rng.beta(1, size - k, _RESAMPLES)
    below, above = (
        values[np.minimum((size * at).astype(np.int64), size - 1)] for at in (lower, upper)
    )
    medians: Floats = (below + above) / 2
    return medians


def _tail(size: int) -> float:
    """Part to leave out at either end of the resampled values.

    2.5 % makes intervals of small samples too narrow, as the spread of resamples lacks the factor
    n / (n - 1) that a sample's own has (T. Hesterberg, "What Teachers Should Know about the
    Bootstrap", 2015, narrowness bias). A quantile of t besides, as he has it, covers too much here.
    """
    return _NORMAL.cdf(_NORMAL.inv_cdf(_TAIL) * math.sqrt(size / (size - 1)))


def _ends(logs: Floats, tail: float) -> tuple[float, float]:
    low, high = np.quantile(logs, [tail, 1 - tail])
    return math.exp(float(low)), math.exp(float(high))
