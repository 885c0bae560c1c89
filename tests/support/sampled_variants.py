"""Variants and comparisons made from samples alone, for what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from support.comparison_cases import settings
from twofour.latency.ratios import ratios_and_noise
from twofour.records.export import LayerTime
from twofour.records.latency import (
    ComparedVariant,
    LatencyComparison,
    RoundLoad,
)
from twofour.records.options import CompareOptions

DENSE, SPARSE = "dense@onnxruntime:cpu", "sparse@onnxruntime:cpu"
TWIN = f"{DENSE} again"


def variant(
    name: str,
    samples_ms: Sequence[float] = (),
    *,
    batch: int | None = None,
    error: str | None = None,
    layers: Mapping[str, float] | None = None,
) -> ComparedVariant:
    """A variant without statistics of its samples."""
    times = tuple(LayerTime(name=n, mean_ms=ms) for n, ms in (layers or {}).items())
    return ComparedVariant(
        name=name,
        samples_ms=tuple(samples_ms),
        error=error,
        batch=batch,
        settings=settings(name) if samples_ms else None,
        layers=times,
    )


def around(ms: float, *, rounds: int = 20, part: float = 0.001, phase: int = 0) -> list[float]:
    """Times that alternate evenly within `part` of ms, in another order for each phase."""
    return [ms * (1 + part * ((7 * i + 3 * phase) % 11 - 5) / 5) for i in range(rounds)]


def two(
    ratio: float, *, part: float = 0.001, twin: float = 1.0, loads: tuple[RoundLoad, ...] = ()
) -> LatencyComparison:
    """Dense, its twin and sparse, with a known ratio and a narrow or wide interval."""
    variants = [
        variant(DENSE, around(10, part=part)),
        variant(TWIN, around(10 * twin, part=0)),
        variant(SPARSE, around(10 * ratio, part=part, phase=4)),
    ]
    return compared(variants, loads=loads)


def compared(
    variants: Sequence[ComparedVariant],
    *,
    baseline: str = "dense@onnxruntime:cpu",
    loads: tuple[RoundLoad, ...] = (),
) -> LatencyComparison:
    """With the ratios and the noise that follow from the samples."""
    ratios, noise = ratios_and_noise(variants, baseline, 0, loads)
    return LatencyComparison(
        source="runs/x",
        baseline=baseline,
        machine=None,
        options=CompareOptions(),
        variants=tuple(variants),
        ratios=ratios,
        noise=noise,
        loads=loads,
    )
