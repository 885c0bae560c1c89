"""From the live variants and their samples to the rows of the comparison."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from twofour.engines.latency import percentile
from twofour.engines.timed.rounds import Rounds
from twofour.errors import TwofourError
from twofour.pipeline.comparing.live import LiveVariant
from twofour.pipeline.comparing.planning import Planned
from twofour.records.latency import ComparedVariant


def planned_rows(planned: Sequence[Planned], batches: Sequence[int]) -> tuple[ComparedVariant, ...]:
    """Rows as they will be named, without anything measured."""
    return tuple(
        _without_times(row.name_at(batch), batch)
        for row in planned
        for batch in (batches or (None,))
    )


def complete_rows(
    lives: Sequence[LiveVariant], rows: Sequence[tuple[LiveVariant, ComparedVariant]]
) -> Iterator[ComparedVariant]:
    """Rows with what came after the rounds, and one for each variant that was never timed."""
    for live in lives:
        own = [row for timed, row in rows if timed is live]
        for row in own:
            yield replace(row, metrics=live.metrics, layers=live.layers)
        if not own:
            yield _never_timed(live)


def timed_row(
    live: LiveVariant,
    batch: int | None,
    rounds: Rounds,
    error: TwofourError | None,
    *,
    sweep: bool,
) -> ComparedVariant:
    """One variant at one batch, right after its rounds; `sweep` puts the batch into its name."""
    samples = rounds.samples_ms.get(live.name, ())
    memory = live.memory() if error is None else None
    opened = live.opened
    assert opened is not None, "only running variants are timed"
    median_ms = statistics.median(samples) if samples else None
    return ComparedVariant(
        name=live.planned.name_at(batch if sweep else None),
        samples_ms=samples,
        median_ms=median_ms,
        p90_ms=percentile(samples, 90) if samples else None,
        p99_ms=percentile(samples, 99) if samples else None,
        throughput=1e3 * (batch or 1) / median_ms if median_ms else None,
        peak_memory_bytes=memory.host_bytes if memory else None,
        error=None if error is None else error.message,
        hint=None if error is None else error.hint,
        batch=batch,
        settings=opened.settings,
        peak_device_memory_bytes=memory.device_bytes if memory else None,
        size_bytes=opened.size_bytes,
        open_s=opened.open_s if live.build_s is None else live.build_s,
        agreement=live.agreement,
        top1_agreement=live.top1_agreement,
    )


def _never_timed(live: LiveVariant) -> ComparedVariant:
    error = live.error
    return replace(
        _without_times(live.name, None),
        error="not timed" if error is None else error.message,
        hint=None if error is None else error.hint,
        settings=None if live.opened is None else live.opened.settings,
        agreement=live.agreement,
        top1_agreement=live.top1_agreement,
    )


def _without_times(name: str, batch: int | None) -> ComparedVariant:
    return ComparedVariant(
        name=name,
        samples_ms=(),
        median_ms=None,
        p90_ms=None,
        p99_ms=None,
        throughput=None,
        peak_memory_bytes=None,
        batch=batch,
    )
