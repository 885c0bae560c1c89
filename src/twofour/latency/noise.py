"""Intervals of a ratio of medians, and the noise that a difference must exceed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from twofour.records import frozen
from twofour.records.latency import (
    ComparedVariant,
    NoiseFloor,
    RoundLoad,
    engine_mode_of,
    parse_variant_name,
    without_batch,
)

Floats: TypeAlias = npt.NDArray[np.float64]
Pair: TypeAlias = tuple[ComparedVariant, ComparedVariant]
"""A variant and what it is compared with."""

LEAST_ROUNDS = 10
"""For an interval: the fewest that were simulated and cover as they should."""
_RESAMPLES = 2000
"""Each is used twice, once mirrored, so that swapping the sides mirrors the interval exactly."""
_TAIL = 0.025
_NORMAL = NormalDist()


@frozen
class RatioEstimate:
    """Time over time, with its interval where there are samples enough for one."""

    ratio: float
    low: float | None
    high: float | None
    rounds: int
    """Rounds in which both ran."""
    widest: float
    """Largest factor (1 or more) between the two times of one round."""


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
    low = high = None
    if logs.size >= LEAST_ROUNDS:
        weights = _resampled_weights(logs.size, seed)
        means = np.concatenate([weights @ logs, weights[:, ::-1] @ logs])
        tail = _tail(logs.size)
        low, high = map(math.exp, np.quantile(means, [tail, 1 - tail]))
    return RatioEstimate(
        ratio=math.exp(middle),
        low=low,
        high=high,
        rounds=int(logs.size),
        widest=math.exp(float(np.abs(logs).max())),
    )


def half_ratios(variant_ms: Sequence[float], baseline_ms: Sequence[float]) -> tuple[float, ...]:
    """The ratio of `paired_ratio` of the first and the second half of the rounds; () of too few."""
    rounds = min(len(variant_ms), len(baseline_ms))
    if rounds < LEAST_ROUNDS:
        return ()
    ratios = []
    for half in (slice(0, rounds // 2), slice(rounds // 2, rounds)):
        logs = _log_ratios(variant_ms[half], baseline_ms[half])
        if logs.size:
            ratios.append(math.exp(_middle(logs)))
    return tuple(ratios)


def _log_ratios(variant_ms: Sequence[float], baseline_ms: Sequence[float]) -> Floats:
    """Those of the rounds in which both ran, sorted; a clock that stood still gives no ratio."""
    rounds = min(len(variant_ms), len(baseline_ms))
    variant = np.asarray(variant_ms[:rounds], np.float64)
    baseline = np.asarray(baseline_ms[:rounds], np.float64)
    ran = np.isfinite(variant) & np.isfinite(baseline) & (variant > 0) & (baseline > 0)
    return np.sort(np.log(variant[ran]) - np.log(baseline[ran]))


def _middle(logs: Floats) -> float:
    return float(_middle_weights(np.ones((1, logs.size)))[0] @ logs)


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
    # 8 values, the second of them twice and the fourth never: counts 1 2 1 0 1 1 1 1, summed
    # 1 3 4 4 5 6 7 8. The middle half are the 3rd to 6th: clipped to 2..6 and differenced, the
    # second value weighs 1 (of its two), the third 1, the fifth 1, the sixth 1, each over 4
    size = counts.shape[1]
    cut = size // 4
    inside = np.clip(np.cumsum(counts, axis=1), cut, size - cut)
    weights: Floats = np.diff(inside, axis=1, prepend=float(cut)) / (size - 2 * cut)
    return weights


def _tail(size: int) -> float:
    """Part to leave out at either end of the resampled values.

    2.5 % makes intervals of small samples too narrow, as the spread of resamples lacks the factor
    n / (n - 1) that a sample's own has (T. Hesterberg, "What Teachers Should Know about the
    Bootstrap", 2015, narrowness bias). A quantile of t besides, as he has it, covers too much here.
    """
    return _NORMAL.cdf(_NORMAL.inv_cdf(_TAIL) * math.sqrt(size / (size - 1)))


QUIET = 0.05
"""Part of the cores that others may take without a word: what an idle system does of its own."""
TOO_BUSY = 0.25
"""Part of the cores from which on no difference between variants on the CPU is claimed."""
_SLOWED = 2.0
"""Times the part that others take: how much they may slow one variant and not another; a choice."""


def noise_floors(
    variants: Sequence[ComparedVariant], baseline: str, seed: int
) -> tuple[NoiseFloor, ...]:
    """One for every twin that ran: those of the baseline, all batches, before the others.

    `baseline` is a name without a batch. The base of a twin has its name without " again".
    """
    floors = []
    for twin, base in _twins(variants):
        ratio = paired_ratio(twin.samples_ms, base.samples_ms, seed=seed)
        if ratio is None:
            continue
        reach = ratio.widest  # without an interval, that of the widest single round
        if ratio.low is not None and ratio.high is not None:
            reach = max(ratio.high, 1 / ratio.low, 1.0)
        floor = NoiseFloor(
            variant=base.name,
            again=twin.name,
            ratio=ratio.ratio,
            low=ratio.low,
            high=ratio.high,
            floor=reach - 1,
            batch=twin.batch,
        )
        floors.append(floor)
    return tuple(sorted(floors, key=lambda n: without_batch(n.variant) != baseline))


def own_floor(
    noise: Sequence[NoiseFloor], variant: str, baseline: str, batch: int | None
) -> float | None:
    """The larger floor of the engines and modes of both; None where neither has a twin."""
    engines = {engine_mode_of(variant), engine_mode_of(baseline)}
    floors = (n.floor for n in noise if n.batch == batch and engine_mode_of(n.variant) in engines)
    return max(floors, default=None)


def floor_of(noise: Sequence[NoiseFloor], pair: Pair, baseline: str) -> float | None:
    """`own_floor` of a pair, else `floor_at` of the comparison's baseline."""
    variant, base = pair
    own = own_floor(noise, variant.name, base.name, variant.batch)
    return floor_at(noise, baseline, variant.batch) if own is None else own


def load_on(
    loads: Sequence[RoundLoad], variant: ComparedVariant, baseline: ComparedVariant
) -> RoundLoad | None:
    """The load that a ratio of the two may show; None where both run on a GPU, or it was quiet."""
    on_cpu = any(v.settings is None or v.settings.threads is not None for v in (variant, baseline))
    for load in loads:
        if load.batch == variant.batch and load.part > QUIET and on_cpu:
            return load
    return None


def widened(floor: float, load: RoundLoad | None) -> float:
    """The floor with what others' work may have cost one of the two variants and not the other."""
    return floor if load is None else (1 + floor) * (1 + _SLOWED * load.part) - 1


def is_too_busy(load: RoundLoad | None) -> bool:
    """Whether nothing can be claimed of variants on the CPU."""
    return load is not None and load.part > TOO_BUSY


def twin_of(
    variants: Sequence[ComparedVariant], variant: ComparedVariant
) -> ComparedVariant | None:
    """The same opened a second time, at its batch, where it was timed."""
    return next((twin for twin, base in _twins(variants) if base is variant), None)


def floor_at(noise: Sequence[NoiseFloor], baseline: str, batch: int | None) -> float | None:
    """The floor of the comparison's baseline, which is held against where nothing better is known.

    `baseline` is a name without a batch; None where it ran only once.
    """
    floors = (n.floor for n in noise if n.batch == batch and without_batch(n.variant) == baseline)
    return next(floors, None)


def _twins(
    variants: Sequence[ComparedVariant],
) -> Iterator[Pair]:
    """Every twin with what it is the twin of, at its batch."""
    named = [(parse_variant_name(v.name), v) for v in variants if v.samples_ms]
    bases = {(n.weights, n.engine_mode, v.batch): v for n, v in named if not n.again}
    for name, variant in named:
        base = bases.get((name.weights, name.engine_mode, variant.batch))
        if name.again and base is not None:
            yield variant, base
