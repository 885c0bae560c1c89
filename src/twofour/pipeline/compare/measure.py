"""Rounds of a comparison, and the row of each variant."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.engines.machine import cpu_use, load_between
from twofour.engines.timing import RoundPlan, Rounds, interleave
from twofour.errors import BadInputError, TwofourError
from twofour.export.agreement import agreement
from twofour.latency.samples import with_samples
from twofour.pipeline.compare.plan import Planned, start_worker
from twofour.pipeline.compare.prepare import at_batch, batch_of, prepare_request, profiles_over
from twofour.pipeline.compare.process import LiveVariant, refuse_without_memory
from twofour.pipeline.compare.variants import Subject
from twofour.pipeline.stages import Progress
from twofour.records.build import LayerTime
from twofour.records.latency import ComparedVariant, RoundLoad
from twofour.records.options import CompareOptions

_SCORES = ("logit", "score", "prob", "class")


def top1_agreement(name: str, reference: NDArray[Any], other: NDArray[Any]) -> float | None:
    """Share of rows with the same largest entry along the last axis.

    None where the output holds no class scores: they are floats over at least two classes, one row
    per example, or of any rank where the output's name says so (logits of a language model).
    """
    named = any(word in name.lower() for word in _SCORES)
    scores = reference.ndim == 2 or (named and reference.ndim > 2)
    if not scores or reference.dtype.kind in "iub" or reference.shape[-1] < 2:
        return None
    if not reference.size:
        return None
    same = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return float(np.mean(same))


def planned_rows(planned: Sequence[Planned], batches: Sequence[int]) -> tuple[ComparedVariant, ...]:
    """Rows as they will be named, without anything measured."""
    return tuple(
        ComparedVariant(name=row.name_at(batch), batch=batch)
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
    row = ComparedVariant(
        name=live.planned.name_at(batch if sweep else None),
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
    return with_samples(row, samples)


def _never_timed(live: LiveVariant) -> ComparedVariant:
    error = live.error
    return ComparedVariant(
        name=live.name,
        error="not timed" if error is None else error.message,
        hint=None if error is None else error.hint,
        settings=None if live.opened is None else live.opened.settings,
        agreement=live.agreement,
        top1_agreement=live.top1_agreement,
    )


PROFILES = 3
"""Of each variant, taken in turns; a layer's time is the middle one."""
PROFILED_RUNS = 5
"""In each profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All rows, and what is missing where it was interrupted."""

    variants: tuple[ComparedVariant, ...]
    partial: str | None
    notes: tuple[str, ...] = ()
    loads: tuple[RoundLoad, ...] = ()


def measure(
    subject: Subject,
    planned: Sequence[Planned],
    options: CompareOptions,
    threads: int,
    progress: Progress,
) -> Measured:
    """Load, check, time. Ctrl-C in the rounds or after them keeps what is there.

    Raises BadInputError where the options do not fit the inputs, and KeyboardInterrupt where
    nothing was timed yet.
    """
    batches: list[Mapping[str, np.ndarray]] = [
        at_batch(subject.inputs, batch) for batch in options.batches
    ] or [subject.inputs]
    with contextlib.ExitStack() as stack:
        lives = [LiveVariant(planned=row) for row in planned]
        for live in lives:
            stack.callback(live.close)
        notes: list[str] = []
        _open_all(subject, lives, threads, options, progress, notes=notes)
        _judge_outputs(subject, lives, notes, progress)
        loads: list[RoundLoad] = []
        rows, partial = _time_batches(lives, batches, options, loads, progress)
        if partial is None:
            partial = _layers_and_metrics(lives, options, progress, notes)
        variants = tuple(complete_rows(lives, rows))
        return Measured(variants=variants, partial=partial, notes=tuple(notes), loads=tuple(loads))


def check_metric(reference: str) -> None:
    """Raises BadInputError where the user's metric cannot be imported or called."""
    with start_worker(1) as process:
        process.call("check_metric", reference)


def _open_all(
    subject: Subject,
    lives: Sequence[LiveVariant],
    threads: int,
    options: CompareOptions,
    progress: Progress,
    *,
    notes: list[str],
) -> None:
    subject.save_examples()
    shapes = profiles_over(subject.inputs, options.batches)
    largest_bytes = 0
    with _stage(progress, "open", "load the variants"):
        for number, live in enumerate(lives):
            if live.planned.why_not is not None:
                live.error = BadInputError(live.planned.why_not, hint=live.planned.hint)
                continue
            progress.step(live.name, number, len(lives))
            try:
                refuse_without_memory(largest_bytes)
                prepared = prepare_request(subject, live.planned, threads, shapes, notes.append)
            except TwofourError as error:
                live.fail(error)
                continue
            live.build_s = prepared.build_s
            live.open(prepared.request, notes.append)
            if live.runs:
                largest_bytes = max(largest_bytes, live.memory().host_bytes or 0)


def _judge_outputs(
    subject: Subject, lives: Sequence[LiveVariant], notes: list[str], progress: Progress
) -> None:
    """Outputs of each variant on the example inputs against the reference."""
    running = [live for live in lives if live.runs]
    reference = subject.reference
    with _stage(progress, "outputs", "compare the outputs"):
        for number, live in enumerate(running):
            progress.step(live.name, number, len(running))
            try:
                outputs: dict[str, np.ndarray] = live.call("outputs", subject.inputs)
                if reference is None:
                    reference = outputs
                _judge(live, reference, outputs)
            except BadInputError as error:  # a fixed batch, say: it may run at those asked for
                notes.append(f"outputs of {live.name} were not compared: {error.message}")
            except TwofourError as error:
                live.fail(error)


def _judge(
    live: LiveVariant, reference: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> None:
    """Outputs by name; by position where the names are others. Raises BadInputError for shapes."""
    expected, found = list(reference.values()), list(outputs.values())
    if set(reference) == set(outputs):
        found = [outputs[name] for name in reference]
    live.agreement = agreement(list(reference), expected, found, bounds=None)
    if expected:
        live.top1_agreement = top1_agreement(next(iter(reference)), expected[0], found[0])


def _time_batches(
    lives: Sequence[LiveVariant],
    batches: Sequence[Mapping[str, np.ndarray]],
    options: CompareOptions,
    loads: list[RoundLoad],
    progress: Progress,
) -> tuple[list[tuple[LiveVariant, ComparedVariant]], str | None]:
    rows: list[tuple[LiveVariant, ComparedVariant]] = []
    for number, inputs in enumerate(batches):
        left = [str(batch) for batch in options.batches[number + 1 :]]
        try:
            timed, partial = _time_batch(lives, inputs, options, loads, progress)
        except KeyboardInterrupt:  # while warming up
            if not rows:
                raise
            return rows, f"interrupted before batch {batch_of(inputs)} was timed{_not_timed(left)}"
        rows += timed
        if partial is not None:
            return rows, f"{partial}{_not_timed(left)}"
    return rows, None


def _time_batch(
    lives: Sequence[LiveVariant],
    inputs: Mapping[str, np.ndarray],
    options: CompareOptions,
    loads: list[RoundLoad],
    progress: Progress,
) -> tuple[list[tuple[LiveVariant, ComparedVariant]], str | None]:
    """Rows of one batch, and what is missing of it; KeyboardInterrupt before its first round.

    What other processes did meanwhile is added to `loads`.
    """
    batch, sweep = batch_of(inputs), bool(options.batches)
    title = f"time the variants at batch {batch}" if sweep else "time the variants"
    with _stage(progress, "rounds", title):
        failed: dict[str, TwofourError] = {}
        running = _prepare(lives, inputs, options.warmup, failed, progress)
        plan = RoundPlan(
            rounds=options.rounds, time_limit_s=options.time_limit_s, seed=options.seed
        )
        workers = [live.process.number for live in running if live.process is not None]
        before = cpu_use(workers)
        rounds = interleave(running, plan, progress.step)
        load = load_between(before, cpu_use(workers), batch)
        loads += [] if load is None else [load]
        if rounds.interrupted and not rounds.done:
            raise KeyboardInterrupt
        failed.update(rounds.failed)
        rows = [
            (live, timed_row(live, batch, rounds, failed.get(live.name), sweep=sweep))
            for live in lives
            if live.runs
        ]
    if not rounds.interrupted:
        return rows, None
    where = f" at batch {batch}" if sweep else ""
    return rows, f"interrupted after {rounds.done} of {options.rounds} rounds{where}"


def _not_timed(left: Sequence[str]) -> str:
    return f"; batches not timed: {', '.join(left)}" if left else ""


def _prepare(
    lives: Sequence[LiveVariant],
    inputs: Mapping[str, np.ndarray],
    warmup: int,
    failed: dict[str, TwofourError],
    progress: Progress,
) -> list[LiveVariant]:
    running = []
    for live in (live for live in lives if live.runs):
        progress.step(f"warming up {live.name}", 0, None)
        try:
            live.prepare(inputs, warmup)
            running.append(live)
        except TwofourError as error:
            failed[live.name] = error
    return running


def _profile(running: Sequence[LiveVariant], progress: Progress) -> None:
    """Times of the layers where the engine has them; the middle of profiles taken in turns."""
    profiles: dict[str, list[tuple[LayerTime, ...]]] = {live.name: [] for live in running}
    for number in range(PROFILES):
        for live in running:
            progress.step(live.name, number, PROFILES)
            with contextlib.suppress(TwofourError):
                profiles[live.name].append(live.call("layer_times", PROFILED_RUNS))
    for live in running:
        live.layers = middle_profile(profiles[live.name])


def middle_profile(profiles: Sequence[Sequence[LayerTime]]) -> tuple[LayerTime, ...]:
    """Layers that all profiles have, in the order of the first, each with its median time."""
    times: dict[str, list[float]] = {}
    for profile in profiles:
        for layer in profile:
            times.setdefault(layer.name, []).append(layer.mean_ms)
    return tuple(
        LayerTime(name=name, mean_ms=statistics.median(of))
        for name, of in times.items()
        if len(of) == len(profiles)
    )


def _layers_and_metrics(
    lives: Sequence[LiveVariant],
    options: CompareOptions,
    progress: Progress,
    notes: list[str],
) -> str | None:
    """The slowest last, so that an interruption costs no times."""
    doing = "the layers' times"
    try:
        with _stage(progress, "layers", "time the layers"):
            _profile([live for live in lives if live.runs], progress)
        if options.metric is not None:
            doing = "the metric"
            with _stage(progress, "metric", "evaluate the metric"):
                for live in (live for live in lives if live.runs and not live.planned.again):
                    progress.step(live.name, 0, None)
                    try:
                        live.metrics = live.call("metric", options.metric, options.seed)
                    except TwofourError as error:
                        notes.append(f"no metric of {live.name}: {error.message}")
    except KeyboardInterrupt:
        return f"interrupted during {doing}"
    return None


@contextlib.contextmanager
def _stage(progress: Progress, name: str, title: str) -> Iterator[None]:
    progress.stage(name, title)
    started = time.perf_counter()
    yield
    progress.done(name, seconds=time.perf_counter() - started, reused=False)
