"""The parts of a comparison that every format shows: batches, names without them, pairs, twins."""

from __future__ import annotations

from collections.abc import Sequence

from twofour.latency.naming import without_batch
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    LatencyRatio,
    NoiseFloor,
    VariantSettings,
)
from twofour.words import printable

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
