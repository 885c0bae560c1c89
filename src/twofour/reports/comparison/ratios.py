"""From the samples of all variants to ratios with verdicts, and to the noise they are held to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from twofour.latency_records import (
    ComparedVariant,
    LatencyRatio,
    LatencyVerdict,
    NoiseFloor,
)
from twofour.reports.comparison.intervals import RatioEstimate, paired_ratio, unpaired_ratio
from twofour.reports.comparison.naming import VariantName, parse_variant_name, without_batch
from twofour.reports.comparison.noise import floor_at, noise_floors, own_floor
from twofour.reports.comparison.setting_differences import differ_in_sparsity_only, differences_of


class Estimator(Protocol):
    """`paired_ratio` or `unpaired_ratio`."""

    def __call__(  # noqa: D102 -- see intervals
        self, variant_ms: Sequence[float], baseline_ms: Sequence[float], *, seed: int
    ) -> RatioEstimate | None: ...


def ratios_and_noise(
    variants: Sequence[ComparedVariant], baseline: str, seed: int
) -> tuple[tuple[LatencyRatio, ...], tuple[NoiseFloor, ...]]:
    """Of samples that were taken in the same rounds; `baseline` is a name without a batch.

    Every variant with samples over the baseline of its batch, then, within every other engine and
    mode, each weights over those of the baseline. A ratio is held to the larger noise of the two
    engines it is of; where neither was measured twice, to the baseline's. Twins have no ratios.
    """
    noise = noise_floors(variants, baseline, seed)

    def held_to(variant: ComparedVariant, base: ComparedVariant) -> float:
        own = own_floor(noise, variant.name, base.name, variant.batch)
        return own if own is not None else floor_at(noise, baseline, variant.batch) or 0.0

    found = (
        ratio_of(v, base, seed=seed, floor=held_to(v, base))
        for v, base in _pairs(variants, baseline)
    )
    return tuple(ratio for ratio in found if ratio is not None), noise


def unpaired_ratios(
    variants: Sequence[ComparedVariant], baseline: str, seed: int
) -> tuple[LatencyRatio, ...]:
    """The same ratios of samples that were taken one variant after the other; no noise is known."""
    found = (
        ratio_of(v, base, seed=seed, floor=0.0, paired=False)
        for v, base in _pairs(variants, baseline)
    )
    return tuple(ratio for ratio in found if ratio is not None)


def ratio_of(
    variant: ComparedVariant,
    baseline: ComparedVariant,
    *,
    seed: int,
    floor: float,
    paired: bool = True,
) -> LatencyRatio | None:
    """One ratio with its verdict at a noise floor; None without samples of both."""
    estimate: Estimator = paired_ratio if paired else unpaired_ratio
    found = estimate(variant.samples_ms, baseline.samples_ms, seed=seed)
    if found is None:
        return None
    return LatencyRatio(
        variant=variant.name,
        baseline=baseline.name,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        verdict=verdict_of(found.low, found.high, floor),
        rounds=found.rounds,
        batch=variant.batch,
        differences=differences_of(variant.settings, baseline.settings),
        only_sparsity=differ_in_sparsity_only(variant.settings, baseline.settings),
        paired=paired,
    )


def verdict_of(low: float | None, high: float | None, floor: float) -> LatencyVerdict:
    """No difference where the interval reaches into 1/(1 + floor) to 1 + floor."""
    if low is None or high is None:
        return LatencyVerdict.UNDECIDED
    if high < 1 / (1 + floor):
        return LatencyVerdict.FASTER
    return LatencyVerdict.SLOWER if low > 1 + floor else LatencyVerdict.NO_DIFFERENCE


def _pairs(
    variants: Sequence[ComparedVariant], baseline: str
) -> Iterator[tuple[ComparedVariant, ComparedVariant]]:
    names = _parsed(variants)
    bases = _bases(variants, baseline)
    measured = [v for v in variants if v.samples_ms and not names[v.name].again]
    for variant in measured:
        base = bases.get(variant.batch)
        if base is not None and base is not variant:
            yield variant, base
    own = parse_variant_name(baseline)
    local = {
        (names[v.name].engine_mode, v.batch): v
        for v in measured
        if names[v.name].weights == own.weights
    }
    for variant in measured:
        name = names[variant.name]
        base = local.get((name.engine_mode, variant.batch))
        if name.engine_mode != own.engine_mode and base is not None and base is not variant:
            yield variant, base


def _parsed(variants: Sequence[ComparedVariant]) -> Mapping[str, VariantName]:
    return {v.name: parse_variant_name(v.name) for v in variants}


def _bases(
    variants: Sequence[ComparedVariant], baseline: str
) -> Mapping[int | None, ComparedVariant]:
    """The baseline of each batch."""
    return {v.batch: v for v in variants if v.samples_ms and without_batch(v.name) == baseline}
