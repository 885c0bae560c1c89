"""The measurement of a comparison: variants are opened, judged and timed in rounds, side by side.

`comparison` calls `measure` with the variants that `variants` planned, each of which gets a
process (`variant_process`).
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.comparing.compared import ComparisonSetup
from twofour.comparing.variant_process import (
    VariantProcess,
    prepare_request,
    refuse_without_memory,
)
from twofour.comparing.variants import PlannedVariant
from twofour.engines.machine import cpu_use, load_between
from twofour.engines.timing import (
    RoundPlan,
    Rounds,
    batch_of,
    interleave,
    with_error,
    with_samples,
)
from twofour.errors import BadInputError, TwofourError
from twofour.export.agreement import agreement
from twofour.inputs.fits import Arrays, at_shapes, save_arrays
from twofour.pipeline.stages import Progress
from twofour.records import frozen
from twofour.records.export import LayerTime
from twofour.records.latency import ComparedVariant, RoundLoad
from twofour.records.options import CompareOptions, ShapeProfile

_SCORES = ("logit", "score", "prob", "class")
PROFILES = 3
"""Profiles of each variant, taken in turns; a layer's time is their median."""
PROFILED_RUNS = 5
"""Runs in each profile."""


def top1_agreement(name: str, reference: NDArray[Any], other: NDArray[Any]) -> float | None:
    """Share of rows with the same largest entry along the last axis.

    None where the output has no class scores: they are floats over at least two classes, one row
    per example, or of any rank where the output's name says so (logits of a language model).
    """
    # "logits" [2, 7, 50257] has 14 rows of scores, "pooled" [2, 7, 768] none, "y" [2, 1000] two
    has_rows = reference.ndim == 2
    if any(word in name.lower() for word in _SCORES):
        has_rows = reference.ndim >= 2
    is_float = reference.dtype.kind not in "iub"
    if not (has_rows and is_float and reference.size) or reference.shape[-1] < 2:
        return None
    same = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return float(np.mean(same))


def at_batch(inputs: Arrays, batch: int) -> dict[str, np.ndarray]:
    """The inputs cut, or repeated, to so many rows.

    Raises BadInputError where they have no common first axis.
    """
    if not batch_of(inputs):
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
        raise BadInputError(
            f"--batch: the inputs have no common first axis ({shapes})",
            hint="leave --batch out, and give inputs of the size you want with --inputs",
        )
    return at_shapes(inputs, {name: (batch, *a.shape[1:]) for name, a in inputs.items()})


def profiles_over(inputs: Arrays, batches: Sequence[int]) -> tuple[ShapeProfile, ...]:
    """Shapes for an engine that serves all batches; tactics are chosen for the largest."""
    profiles = []
    for name, array in inputs.items():
        least = most = array.shape
        if batches:
            least = (min(batches), *array.shape[1:])
            most = (max(batches), *array.shape[1:])
        profiles.append(ShapeProfile(input=name, min=least, opt=most, max=most))
    return tuple(profiles)


@frozen
class MeasuredVariants:
    """All rows, and what is missing where the measurement was interrupted."""

    variants: tuple[ComparedVariant, ...]
    partial: str | None
    notes: tuple[str, ...] = ()
    loads: tuple[RoundLoad, ...] = ()


def measure(
    compared: ComparisonSetup,
    planned: Sequence[PlannedVariant],
    options: CompareOptions,
    progress: Progress,
) -> MeasuredVariants:
    """Load, check, time. Ctrl-C in the rounds or after them keeps what is there.

    Raises BadInputError where the options do not fit the inputs, and KeyboardInterrupt where
    nothing was timed yet.
    """
    batches: list[Arrays] = [at_batch(compared.inputs, batch) for batch in options.batches]
    with contextlib.ExitStack() as stack:
        measuring = _Measuring(compared, planned, options, progress)
        for variant in measuring.variants:
            stack.callback(variant.close)
        measuring.open_all()
        measuring.judge_outputs()
        partial = measuring.time_batches(batches or [compared.inputs])
        if partial is None:
            partial = measuring.layers_and_metrics()
        return MeasuredVariants(
            variants=tuple(measuring.complete_rows()),
            partial=partial,
            notes=tuple(measuring.notes),
            loads=tuple(measuring.loads),
        )


class _Measuring:
    """One measurement; its steps are called in the order of the methods."""

    def __init__(
        self,
        compared: ComparisonSetup,
        planned: Sequence[PlannedVariant],
        options: CompareOptions,
        progress: Progress,
    ) -> None:
        self.compared = compared
        self.options = options
        self.progress = progress
        self.variants = [VariantProcess(row) for row in planned]
        self.rows: list[tuple[VariantProcess, ComparedVariant]] = []
        """Timed variants, for each batch."""
        self.loads: list[RoundLoad] = []
        self.notes: list[str] = []

    @property
    def running(self) -> list[VariantProcess]:
        """Variants that are loaded and have not failed."""
        return [variant for variant in self.variants if variant.runs]

    @contextlib.contextmanager
    def stage(self, name: str, title: str) -> Iterator[None]:
        """Report the beginning and the end of a step."""
        self.progress.stage(name, title)
        started = time.perf_counter()
        yield
        self.progress.done(name, seconds=time.perf_counter() - started)

    def open_all(self) -> None:
        """Load every variant that can run; why another one cannot is kept as its error."""
        compared = self.compared
        compared.work.mkdir(parents=True, exist_ok=True)
        save_arrays(compared.examples, dict(compared.inputs))
        largest_bytes = 0
        with self.stage("open", "load the variants"):
            for number, variant in enumerate(self.variants):
                planned = variant.planned
                if planned.why_not is not None:
                    variant.fail(BadInputError(planned.why_not, hint=planned.hint))
                    continue
                self.progress.step(variant.name, number, len(self.variants))
                try:
                    refuse_without_memory(largest_bytes)
                    self._open(variant)
                    peak_bytes = variant.with_peaks(variant.row).peak_memory_bytes or 0
                    largest_bytes = max(largest_bytes, peak_bytes)
                except TwofourError as error:
                    variant.fail(error)

    def _open(self, variant: VariantProcess) -> None:
        compared, options = self.compared, self.options
        assert options.threads is not None, "decided before"
        shapes = profiles_over(compared.inputs, options.batches)
        note = self.notes.append
        opening, build_s = prepare_request(compared, variant.planned, options.threads, shapes, note)
        variant.open(opening, build_s, note)

    def judge_outputs(self) -> None:
        """Compare the outputs with the dense module's, else with those of the first variant."""
        running = self.running
        reference = self.compared.dense_outputs
        with self.stage("outputs", "compare the outputs"):
            for number, variant in enumerate(running):
                self.progress.step(variant.name, number, len(running))
                try:
                    outputs: Arrays = variant.call("outputs", self.compared.inputs)
                    reference = outputs if reference is None else reference
                    variant.row = _judged(variant.row, outputs, reference)
                except BadInputError as error:  # a fixed batch: it may run at those asked for
                    self.notes.append(
                        f"outputs of {variant.name} were not compared: {error.message}"
                    )
                except TwofourError as error:
                    variant.fail(error)

    def time_batches(self, batches: Sequence[Arrays]) -> str | None:
        """Time all variants at each batch; what is missing after Ctrl-C, None: nothing."""
        for number, inputs in enumerate(batches):
            left = ", ".join(map(str, self.options.batches[number + 1 :]))
            not_timed = f"; batches not timed: {left}" if left else ""
            try:
                partial = self._time_batch(inputs)
            except KeyboardInterrupt:  # while warming up
                if not self.rows:
                    raise
                return f"interrupted before batch {batch_of(inputs)} was timed{not_timed}"
            if partial is not None:
                return f"{partial}{not_timed}"
        return None

    def _time_batch(self, inputs: Arrays) -> str | None:
        """Add the rows of one batch; what is missing of it. KeyboardInterrupt before its rounds."""
        batch = batch_of(inputs)
        where = f" at batch {batch}" if self.options.batches else ""
        with self.stage("rounds", f"time the variants{where}"):
            failed = self._warm_up(inputs)
            ready = [variant for variant in self.running if variant.name not in failed]
            rounds = self._run_rounds(ready, batch)
            failed.update(rounds.failed)
            for variant in self.running:
                row = self._row_at(variant, batch, failed.get(variant.name))
                if row.error is None and not rounds.interrupted:
                    row = variant.with_peaks(row)
                samples_ms = rounds.samples_ms.get(variant.name, ())
                self.rows.append((variant, with_samples(row, samples_ms)))
        if not rounds.interrupted:
            return None
        return f"interrupted after {rounds.done} of {self.options.rounds} rounds{where}"

    def _warm_up(self, inputs: Arrays) -> dict[str, TwofourError]:
        """Give every variant the inputs; why some cannot take them."""
        failed: dict[str, TwofourError] = {}
        for variant in self.running:
            self.progress.step(f"warming up {variant.name}", 0, None)
            try:
                settings = variant.call("prepare", inputs, self.options.warmup)
                variant.row = replace(variant.row, settings=settings)
            except TwofourError as error:
                failed[variant.name] = error
        return failed

    def _run_rounds(self, ready: Sequence[VariantProcess], batch: int | None) -> Rounds:
        options = self.options
        plan = RoundPlan(
            rounds=options.rounds, time_limit_s=options.time_limit_s, seed=options.seed
        )
        workers = [variant.process.number for variant in ready if variant.process is not None]
        before = cpu_use(workers)
        rounds = interleave(ready, plan, self.progress.step)
        if not rounds.done:
            if rounds.interrupted:
                raise KeyboardInterrupt
            return rounds
        load = load_between(before, cpu_use(workers), batch)
        if load is not None:
            self.loads.append(load)
        return rounds

    def _row_at(
        self, variant: VariantProcess, batch: int | None, error: TwofourError | None
    ) -> ComparedVariant:
        name = variant.planned.name_at(batch) if self.options.batches else variant.name
        row = replace(variant.row, name=name, batch=batch)
        return row if error is None else with_error(row, error)

    def layers_and_metrics(self) -> str | None:
        """Take the slowest measurements last, so that an interruption costs no times."""
        doing = "the layers' times"
        try:
            with self.stage("layers", "time the layers"):
                self._profile()
            doing = "the metric"
            if self.options.metric is not None:
                with self.stage("metric", "evaluate the metric"):
                    self._evaluate(self.options.metric)
        except KeyboardInterrupt:
            return f"interrupted during {doing}"
        return None

    def _profile(self) -> None:
        """Times of the layers where the engine has them; the median of profiles taken in turns."""
        running = self.running
        profiles: dict[str, list[tuple[LayerTime, ...]]] = {v.name: [] for v in running}
        for number in range(PROFILES):
            for variant in running:
                self.progress.step(variant.name, number, PROFILES)
                with contextlib.suppress(TwofourError):
                    profiles[variant.name].append(variant.call("layer_times", PROFILED_RUNS))
        for variant in running:
            layers = middle_profile(profiles[variant.name])
            variant.row = replace(variant.row, layers=layers)

    def _evaluate(self, metric: str) -> None:
        for variant in self.running:
            if variant.planned.again:
                continue
            self.progress.step(variant.name, 0, None)
            try:
                metrics = variant.call("metric", metric, self.options.seed)
                variant.row = replace(variant.row, metrics=metrics)
            except TwofourError as error:
                self.notes.append(f"no metric of {variant.name}: {error.message}")

    def complete_rows(self) -> Iterator[ComparedVariant]:
        """Rows with what came after the rounds, and one for each variant that was never timed."""
        for variant in self.variants:
            last = variant.row
            own = [row for timed, row in self.rows if timed is variant]
            for row in own:
                yield replace(row, metrics=last.metrics, layers=last.layers)
            if not own:
                yield replace(last, error=last.error or "not timed")


def _judged(row: ComparedVariant, outputs: Arrays, reference: Arrays) -> ComparedVariant:
    """Outputs are compared by name, or by position where the names are others."""
    if outputs.keys() == reference.keys():
        outputs = {name: outputs[name] for name in reference}
    elif len(outputs) == len(reference):
        outputs = dict(zip(reference, outputs.values(), strict=True))
    rows = agreement(reference, outputs, bounds=None)
    first = rows[0].output
    return replace(
        row,
        agreement=rows,
        top1_agreement=top1_agreement(first, reference[first], outputs[first]),
    )


def middle_profile(profiles: Sequence[Sequence[LayerTime]]) -> tuple[LayerTime, ...]:
    """Layers that all profiles have, in the order of the first, each with its median time."""
    times: dict[str, list[float]] = {}
    for profile in profiles:
        for layer in profile:
            times.setdefault(layer.name, []).append(layer.mean_ms)
    layers = []
    for name, times_ms in times.items():
        if len(times_ms) == len(profiles):
            layers.append(LayerTime(name=name, mean_ms=statistics.median(times_ms)))
    return tuple(layers)
