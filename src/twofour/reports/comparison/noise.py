"""The noise of each engine: what one variant opened twice differs by, and what load adds to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twofour.records.latency import ComparedVariant, NoiseFloor, RoundLoad
from twofour.reports.comparison.intervals import RatioEstimate, paired_ratio
from twofour.reports.comparison.naming import parse_variant_name, without_batch

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
    found = tuple(_noise_floors(variants, seed))
    return tuple(sorted(found, key=lambda n: without_batch(n.variant) != baseline))


def own_floor(
    noise: Sequence[NoiseFloor], variant: str, baseline: str, batch: int | None
) -> float | None:
    """The larger floor of the engines and modes of both; None where neither has a twin."""
    engines = {_engine(variant), _engine(baseline)}
    floors = (n.floor for n in noise if n.batch == batch and _engine(n.variant) in engines)
    return max(floors, default=None)


def load_at(loads: Sequence[RoundLoad], batch: int | None) -> RoundLoad | None:
    """Of the rounds at a batch; None where it was not measured."""
    return next((load for load in loads if load.batch == batch), None)


def load_on(
    loads: Sequence[RoundLoad], variant: ComparedVariant, baseline: ComparedVariant
) -> RoundLoad | None:
    """The load that a ratio of the two may show; None where both run on a GPU, or it was quiet."""
    load = load_at(loads, variant.batch)
    on_cpu = any(v.settings is None or v.settings.threads is not None for v in (variant, baseline))
    return load if on_cpu and load is not None and load.part > QUIET else None


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
