"""The noise of each engine: what one variant opened twice differs by, and who is held to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twofour.latency_records import ComparedVariant, NoiseFloor
from twofour.reports.comparison.intervals import RatioEstimate, paired_ratio
from twofour.reports.comparison.naming import parse_variant_name, without_batch


def noise_floors(
    variants: Sequence[ComparedVariant], baseline: str, seed: int
) -> tuple[NoiseFloor, ...]:
    """One for every twin that ran: those of the baseline, all batches, before the others.

    `baseline` is a name without a batch. The base of a twin has its name without " again".
    """
    found = tuple(_noise_floors(variants, seed))
    return tuple(sorted(found, key=lambda n: without_batch(n.variant) != baseline))


def own_floor(
    noise: Sequence[NoiseFloor], variant: str, baseline: str, batch: int | None
) -> float | None:
    """The larger floor of the engines and modes of both; None where neither has a twin."""
    engines = {_engine(variant), _engine(baseline)}
    floors = (n.floor for n in noise if n.batch == batch and _engine(n.variant) in engines)
    return max(floors, default=None)


def floor_at(noise: Sequence[NoiseFloor], baseline: str, batch: int | None) -> float | None:
    """The floor of the comparison's baseline, which is held against where nothing better is known.

    `baseline` is a name without a batch; None where it ran only once.
    """
    floors = (n.floor for n in noise if n.batch == batch and without_batch(n.variant) == baseline)
    return next(floors, None)


def _noise_floors(variants: Sequence[ComparedVariant], seed: int) -> Iterator[NoiseFloor]:
    for twin, base in _twins(variants):
        found = paired_ratio(twin.samples_ms, base.samples_ms, seed=seed)
        if found is not None:
            yield NoiseFloor(
                variant=base.name,
                again=twin.name,
                ratio=found.ratio,
                low=found.low,
                high=found.high,
                floor=_floor(found),
                batch=twin.batch,
            )


def _twins(
    variants: Sequence[ComparedVariant],
) -> Iterator[tuple[ComparedVariant, ComparedVariant]]:
    """Every twin with what it is the twin of, at its batch."""
    named = [(parse_variant_name(v.name), v) for v in variants if v.samples_ms]
    bases = {(n.weights, n.engine_mode, v.batch): v for n, v in named if not n.again}
    for name, variant in named:
        base = bases.get((name.weights, name.engine_mode, variant.batch))
        if name.again and base is not None:
            yield variant, base


def _floor(found: RatioEstimate) -> float:
    """How far the interval reaches from 1; without one, how far the widest single round does."""
    if found.low is None or found.high is None:
        return found.widest - 1
    return max(found.high, 1 / found.low, 1.0) - 1


def _engine(name: str) -> str:
    return parse_variant_name(name).engine_mode
