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

from twofour.comparing.variant_process import VariantProcess, prepare_request, refuse_without_memory
from twofour.comparing.variants import ComparisonSetup, PlannedVariant
from twofour.engines.machine import cpu_use, load_between
from twofour.engines.timing import RoundPlan, Rounds, batch_of, interleave, with_samples
from twofour.errors import BadInputError, TwofourError
from twofour.export.agreement import agreement
from twofour.inputs.fits import at_shapes, save_arrays
from twofour.pipeline.stages import Progress
from twofour.records.export import LayerTime
from twofour.records.latency import ComparedVariant, RoundLoad
from twofour.records.options import CompareOptions, ShapeProfile

_SCORES = ("logit", "score", "prob", "class")
PROFILES = 3
"""Of each variant, taken in turns; a layer's time is the middle one."""
PROFILED_RUNS = 5
"""In each profile."""


def top1_agreement(name: str, reference: NDArray[Any], other: NDArray[Any]) -> float | None:
    """Share of rows with the same largest entry along the last axis.

    None where the output holds no class scores: they are floats over at least two classes, one row
    per example, or of any rank where the output's name says so (logits of a language model).
    """
    named = any(word in name.lower() for word in _SCORES)
    scores = reference.ndim == 2 or (named and reference.ndim > 2)
    if not (scores and reference.size) or reference.dtype.kind in "iub" or reference.shape[-1] < 2:
        return None
    same = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return float(np.mean(same))


def planned_rows(
    planned: Sequence[PlannedVariant], batches: Sequence[int]
) -> tuple[ComparedVariant, ...]:
    """Rows as they will be named, without anything measured."""
    return tuple(
        ComparedVariant(name=row.name_at(batch), batch=batch)
        for row in planned
        for batch in (batches or (None,))
    )


def complete_rows(
    variants: Sequence[VariantProcess], rows: Sequence[tuple[VariantProcess, ComparedVariant]]
) -> Iterator[ComparedVariant]:
    """Rows with what came after the rounds, and one for each variant that was never timed."""
    for variant in variants:
        own = [row for timed, row in rows if timed is variant]
        for row in own:
            yield replace(row, metrics=variant.metrics, layers=variant.layers)
        if not own:
            error = variant.error
            yield ComparedVariant(
                name=variant.name,
                error="not timed" if error is None else error.message,
                hint=None if error is None else error.hint,
                settings=None if variant.opened is None else variant.opened.settings,
                agreement=variant.agreement,
                top1_agreement=variant.top1_agreement,
            )


def timed_row(
    variant: VariantProcess,
    batch: int | None,
    rounds: Rounds,
    error: TwofourError | None,
    *,
    sweep: bool,
) -> ComparedVariant:
    """One variant at one batch, right after its rounds; `sweep` puts the batch into its name."""
    samples = rounds.samples_ms.get(variant.name, ())
    memory = variant.peak if error is None else None
    opened = variant.opened
    assert opened is not None, "only running variants are timed"
    row = ComparedVariant(
        name=variant.planned.name_at(batch if sweep else None),
        peak_memory_bytes=memory.host_bytes if memory else None,
        error=None if error is None else error.message,
        hint=None if error is None else error.hint,
        batch=batch,
        settings=opened.settings,
        peak_device_memory_bytes=memory.device_bytes if memory else None,
        size_bytes=opened.size_bytes,
        open_s=opened.open_s if variant.build_s is None else variant.build_s,
        agreement=variant.agreement,
        top1_agreement=variant.top1_agreement,
    )
    return with_samples(row, samples)


def at_batch(inputs: Mapping[str, np.ndarray], batch: int) -> dict[str, np.ndarray]:
    """The inputs cut, or repeated, to so many rows.

    Raises BadInputError where they have no common first axis.
    """
    rows = batch_of(inputs)
    if not rows:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        raise BadInputError(
            f"--batch: the inputs have no common first axis ({shapes})",
            hint="leave --batch out, and give inputs of the size you want with --inputs",
        )
    return at_shapes(inputs, {name: (batch, *a.shape[1:]) for name, a in inputs.items()})


def profiles_over(
    inputs: Mapping[str, np.ndarray], batches: Sequence[int]
) -> tuple[ShapeProfile, ...]:
    """Shapes for an engine that serves all batches; tactics are chosen for the largest."""
    profiles = []
    for name, array in inputs.items():
        rows, rest = array.shape[:1], array.shape[1:]
        smallest, largest = ((min(batches),), (max(batches),)) if batches else (rows, rows)
        most = (*largest, *rest)
        profiles.append(ShapeProfile(input=name, min=(*smallest, *rest), opt=most, max=most))
    return tuple(profiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredVariants:
    """All rows, and what is missing where it was interrupted."""

    variants: tuple[ComparedVariant, ...]
    partial: str | None
    notes: tuple[str, ...] = ()
    loads: tuple[RoundLoad, ...] = ()


def measure(
    compared: ComparisonSetup,
    planned: Sequence[PlannedVariant],
    options: CompareOptions,
    threads: int,
    progress: Progress,
) -> MeasuredVariants:
    """Load, check, time. Ctrl-C in the rounds or after them keeps what is there.

    Raises BadInputError where the options do not fit the inputs, and KeyboardInterrupt where
    nothing was timed yet.
    """
    batches: list[Mapping[str, np.ndarray]] = [
        at_batch(compared.inputs, batch) for batch in options.batches
    ] or [compared.inputs]
    with contextlib.ExitStack() as stack:
        variants = [VariantProcess(planned=row) for row in planned]
        for variant in variants:
            stack.callback(variant.close)
        notes: list[str] = []
        _open_all(compared, variants, threads, options, progress, notes=notes)
        _judge_outputs(compared, variants, notes, progress)
        loads: list[RoundLoad] = []
        rows, partial = _time_batches(variants, batches, options, loads, progress)
        if partial is None:
            partial = _layers_and_metrics(variants, options, progress, notes)
        return MeasuredVariants(
            variants=tuple(complete_rows(variants, rows)),
            partial=partial,
            notes=tuple(notes),
            loads=tuple(loads),
        )


def _open_all(
    compared: ComparisonSetup,
    variants: Sequence[VariantProcess],
    threads: int,
    options: CompareOptions,
    progress: Progress,
    *,
    notes: list[str],
) -> None:
    compared.work.mkdir(parents=True, exist_ok=True)
    save_arrays(compared.examples, dict(compared.inputs))
    shapes = profiles_over(compared.inputs, options.batches)
    largest_bytes = 0
    with _stage(progress, "open", "load the variants"):
        for number, variant in enumerate(variants):
            if variant.planned.why_not is not None:
                variant.error = BadInputError(variant.planned.why_not, hint=variant.planned.hint)
                continue
            progress.step(variant.name, number, len(variants))
            try:
                refuse_without_memory(largest_bytes)
                opening, variant.build_s = prepare_request(
                    compared, variant.planned, threads, shapes, notes.append
                )
            except TwofourError as error:
                variant.fail(error)
                continue
            variant.open(opening, notes.append)
            if variant.runs:
                largest_bytes = max(largest_bytes, variant.memory().host_bytes or 0)


def _judge_outputs(
    compared: ComparisonSetup,
    variants: Sequence[VariantProcess],
    notes: list[str],
    progress: Progress,
) -> None:
    running = [variant for variant in variants if variant.runs]
    reference = compared.reference
    with _stage(progress, "outputs", "compare the outputs"):
        for number, variant in enumerate(running):
            progress.step(variant.name, number, len(running))
            try:
                outputs: dict[str, np.ndarray] = variant.call("outputs", compared.inputs)
                if reference is None:
                    reference = outputs
                _judge(variant, reference, outputs)
            except BadInputError as error:  # a fixed batch, say: it may run at those asked for
                notes.append(f"outputs of {variant.name} were not compared: {error.message}")
            except TwofourError as error:
                variant.fail(error)


def _judge(
    variant: VariantProcess, reference: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> None:
    """Outputs by name; by position where the names are others. Raises BadInputError for shapes."""
    expected, found = list(reference.values()), list(outputs.values())
    if set(reference) == set(outputs):
        found = [outputs[name] for name in reference]
    variant.agreement = agreement(list(reference), expected, found, bounds=None)
    if expected:
        variant.top1_agreement = top1_agreement(next(iter(reference)), expected[0], found[0])


def _time_batches(
    variants: Sequence[VariantProcess],
    batches: Sequence[Mapping[str, np.ndarray]],
    options: CompareOptions,
    loads: list[RoundLoad],
    progress: Progress,
) -> tuple[list[tuple[VariantProcess, ComparedVariant]], str | None]:
    rows: list[tuple[VariantProcess, ComparedVariant]] = []
    for number, inputs in enumerate(batches):
        left = [str(batch) for batch in options.batches[number + 1 :]]
        try:
            timed, partial = _time_batch(variants, inputs, options, loads, progress)
        except KeyboardInterrupt:  # while warming up
            if not rows:
                raise
            return rows, f"interrupted before batch {batch_of(inputs)} was timed{_not_timed(left)}"
        rows += timed
        if partial is not None:
            return rows, f"{partial}{_not_timed(left)}"
    return rows, None


def _time_batch(
    variants: Sequence[VariantProcess],
    inputs: Mapping[str, np.ndarray],
    options: CompareOptions,
    loads: list[RoundLoad],
    progress: Progress,
) -> tuple[list[tuple[VariantProcess, ComparedVariant]], str | None]:
    """Rows of one batch, and what is missing of it; KeyboardInterrupt before its first round.

    What other processes did meanwhile is added to `loads`.
    """
    batch, sweep = batch_of(inputs), bool(options.batches)
    title = f"time the variants at batch {batch}" if sweep else "time the variants"
    with _stage(progress, "rounds", title):
        failed: dict[str, TwofourError] = {}
        running = _prepare(variants, inputs, options.warmup, failed, progress)
        plan = RoundPlan(
            rounds=options.rounds, time_limit_s=options.time_limit_s, seed=options.seed
        )
        workers = [variant.process.number for variant in running if variant.process is not None]
        before = cpu_use(workers)
        rounds = interleave(running, plan, progress.step)
        load = load_between(before, cpu_use(workers), batch) if rounds.done else None
        loads += [] if load is None else [load]
        if rounds.interrupted and not rounds.done:
            raise KeyboardInterrupt
        failed.update(rounds.failed)
        timed = [variant for variant in running if variant.name not in failed]
        interrupted = take_peaks(timed, interrupted=rounds.interrupted)
        rows = [
            (variant, timed_row(variant, batch, rounds, failed.get(variant.name), sweep=sweep))
            for variant in variants
            if variant.runs
        ]
    if not interrupted:
        return rows, None
    where = f" at batch {batch}" if sweep else ""
    return rows, f"interrupted after {rounds.done} of {options.rounds} rounds{where}"


def take_peaks(variants: Sequence[VariantProcess], *, interrupted: bool) -> bool:
    """Ask each for its peaks, and none after Ctrl-C; whether that came, before or meanwhile."""
    for variant in variants:
        variant.peak = None
        try:
            variant.peak = None if interrupted else variant.memory()
        except KeyboardInterrupt:
            interrupted = True
    return interrupted


def _not_timed(left: Sequence[str]) -> str:
    return f"; batches not timed: {', '.join(left)}" if left else ""


def _prepare(
    variants: Sequence[VariantProcess],
    inputs: Mapping[str, np.ndarray],
    warmup: int,
    failed: dict[str, TwofourError],
    progress: Progress,
) -> list[VariantProcess]:
    running = []
    for variant in (v for v in variants if v.runs):
        progress.step(f"warming up {variant.name}", 0, None)
        try:
            variant.call("prepare", inputs, warmup)
            running.append(variant)
        except TwofourError as error:
            failed[variant.name] = error
    return running


def _profile(running: Sequence[VariantProcess], progress: Progress) -> None:
    """Times of the layers where the engine has them; the middle of profiles taken in turns."""
    profiles: dict[str, list[tuple[LayerTime, ...]]] = {variant.name: [] for variant in running}
    for number in range(PROFILES):
        for variant in running:
            progress.step(variant.name, number, PROFILES)
            with contextlib.suppress(TwofourError):
                profiles[variant.name].append(variant.call("layer_times", PROFILED_RUNS))
    for variant in running:
        variant.layers = middle_profile(profiles[variant.name])


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
    variants: Sequence[VariantProcess],
    options: CompareOptions,
    progress: Progress,
    notes: list[str],
) -> str | None:
    """The slowest last, so that an interruption costs no times."""
    doing = "the layers' times"
    try:
        with _stage(progress, "layers", "time the layers"):
            _profile([variant for variant in variants if variant.runs], progress)
        if options.metric is not None:
            doing = "the metric"
            with _stage(progress, "metric", "evaluate the metric"):
                for variant in (v for v in variants if v.runs and not v.planned.again):
                    progress.step(variant.name, 0, None)
                    try:
                        variant.metrics = variant.call("metric", options.metric, options.seed)
                    except TwofourError as error:
                        notes.append(f"no metric of {variant.name}: {error.message}")
    except KeyboardInterrupt:
        return f"interrupted during {doing}"
    return None


@contextlib.contextmanager
def _stage(progress: Progress, name: str, title: str) -> Iterator[None]:
    progress.stage(name, title)
    started = time.perf_counter()
    yield
    progress.done(name, seconds=time.perf_counter() - started, reused=False)
