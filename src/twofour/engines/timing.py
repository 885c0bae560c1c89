"""Interleaved timing: rounds in which every variant runs once, in random order, each run warm.

Whatever drifts (clocks, temperature, other processes) then hits all variants alike, and cancels out
of the ratios within a round. The main job times all its variants in one process, whose sessions are
open already; `compare` starts a process for each variant, which takes longer.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from twofour.engines.machine import (
    cpu_use,
    has_room_for,
    load_between,
    peak_resident_bytes,
    reset_peak,
)
from twofour.engines.onnxruntime.engine import as_timed
from twofour.engines.onnxruntime.session import LEVELS, OrtSession
from twofour.engines.protocol import EngineRow, OpenRequest, ProgressCallback, TimedModel
from twofour.errors import BuildFailedError, TwofourError
from twofour.inputs.fits import Arrays
from twofour.records import frozen
from twofour.records.latency import ComparedVariant, RoundLoad
from twofour.words import in_seconds

FEWEST_ROUNDS = 10
LONG_MS = 50.0
"""Runs longer than this gain nothing measurable from untimed runs before them."""
_LONG_AT_ONCE_MS = 5.0
"""The same where one process holds all variants: its threads are awake in time without untimed runs
(benchmarks/LOG.md, two sessions in turn)."""
_LARGE_BYTES = 32 << 20
"""A larger model is its own twin: a second one takes too much memory for a first answer (MiniLM: 72
of 870 MB), and `compare` loads twins of all sizes."""
_WAKING_S = 5e-3
"""Untimed runs before a timed one: a scheduler's slice (4 ms), in which a thread may wake late."""
_QUIET_S = 1e-3
_MOST_WAITING_S = 2e-2
_BUSY_PART = 0.2


class Contestant(Protocol):
    """A variant that is ready to run."""

    @property
    def name(self) -> str:
        """Its name in the comparison."""

    def run_ms(self) -> float:
        """One timed run; raises TwofourError where it fails."""


@frozen
class RoundPlan:
    """How many rounds, and how long at most."""

    rounds: int
    time_limit_s: float
    """No round is begun after it, once `least` are done."""
    seed: int
    least: int = FEWEST_ROUNDS
    warmup: int = 0
    """Untimed runs of each variant before the rounds, where nobody has warmed it up."""


@frozen
class Rounds:
    """What came out: samples by round, in the order of the contestants."""

    samples_ms: dict[str, tuple[float, ...]]
    """Name -> milliseconds of round 0, 1, ...; shorter where the contestant failed."""
    failed: dict[str, TwofourError]
    """Those that dropped out, with what they said."""
    done: int
    """Rounds that every contestant still running has completed."""
    interrupted: bool
    """Ctrl-C ended it; the round it fell into is left out."""


def interleave(
    contestants: Sequence[Contestant], plan: RoundPlan, report: ProgressCallback
) -> Rounds:
    """Run the rounds without those that fail; Ctrl-C ends them and keeps the complete ones."""
    order = random.Random(plan.seed)  # noqa: S311  # no secret: the order of runs
    samples: dict[str, list[float]] = {c.name: [] for c in contestants}
    failed: dict[str, TwofourError] = {}
    done = 0
    started = time.perf_counter()
    interrupted = False
    try:
        while done < plan.rounds:
            running = [c for c in contestants if c.name not in failed]
            elapsed_s = time.perf_counter() - started
            is_over = done >= plan.least and elapsed_s > plan.time_limit_s
            if is_over or not running:
                break
            report(_time_left(done, plan, elapsed_s), done, plan.rounds)
            order.shuffle(running)
            _run_round(running, samples, failed)
            done += 1
    except KeyboardInterrupt:
        interrupted = True
    return Rounds(
        samples_ms={name: tuple(values[:done]) for name, values in samples.items()},
        failed=failed,
        done=done,
        interrupted=interrupted,
    )


def _run_round(
    running: Sequence[Contestant],
    samples: Mapping[str, list[float]],
    failed: MutableMapping[str, TwofourError],
) -> None:
    for contestant in running:
        try:
            samples[contestant.name].append(contestant.run_ms())
        except TwofourError as error:
            failed[contestant.name] = error


def _time_left(done: int, plan: RoundPlan, elapsed_s: float) -> str:
    """From the mean length of a round so far; the time limit may come first."""
    text = f"round {done + 1} of {plan.rounds}"
    if not done:
        return text
    length_s = elapsed_s / done
    by_time = max(plan.time_limit_s - elapsed_s, (plan.least - done) * length_s)
    left_s = min((plan.rounds - done) * length_s, by_time)
    return f"{text}, {in_seconds(max(left_s, 0.0))} left"


class WarmModel:
    """A loaded model whose timed runs are as in a loop, whatever ran before them."""

    def __init__(
        self, name: str, model: TimedModel, *, long_ms: float = LONG_MS, open_s: float | None = None
    ) -> None:
        self.name = name
        self.model = model
        self.open_s = open_s
        self._long_ms = long_ms
        self._last_ms = 0.0

    def prepare(self, inputs: Arrays, warmup: int) -> None:
        """Take the inputs of the runs that follow, and warm up."""
        self.model.prepare(inputs)
        for _ in range(warmup):
            self._last_ms = self.model.run_ms()
        settle()

    def run_ms(self) -> float:
        """One timed run; returns when the process is idle again.

        A short one follows untimed runs at once, as in a loop: threads that were asleep are awake,
        and the caches hold this variant, not the one before.
        """
        if self._last_ms < self._long_ms:
            awake = time.perf_counter() + _WAKING_S
            self.model.run_ms()
            while time.perf_counter() < awake:
                self.model.run_ms()
        self._last_ms = self.model.run_ms()
        settle()
        return self._last_ms


def settle(cpu_s: Callable[[], float] = time.process_time) -> None:
    """Wait until this process is idle by its own clock `cpu_s`, 20 ms at most.

    Thread pools go on spinning after a run and would take cores from the next variant.
    """
    deadline = time.perf_counter() + _MOST_WAITING_S
    while time.perf_counter() < deadline:
        before = cpu_s()
        time.sleep(_QUIET_S)
        if cpu_s() - before < _BUSY_PART * _QUIET_S:
            return


def batch_of(inputs: Arrays) -> int | None:
    """Length of the first axis that all inputs share; None where there is none."""
    lengths = {array.shape[0] if array.ndim else None for array in inputs.values()}
    return lengths.pop() if len(lengths) == 1 else None


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of all samples do not exceed (nearest rank)."""
    rank = math.ceil(len(samples) * percent / 100)
    return sorted(samples)[max(rank, 1) - 1]


def with_samples(
    row: ComparedVariant, samples_ms: Sequence[float], runs_ms: Sequence[float] | None = None
) -> ComparedVariant:
    """The row with samples, their median (mean of the middle two), percentiles and throughput.

    Percentiles are of `runs_ms` where a sample is the median of several runs.
    """
    if not samples_ms:
        return row
    runs = runs_ms or samples_ms
    median_ms = statistics.median(samples_ms)
    return replace(
        row,
        samples_ms=tuple(samples_ms),
        median_ms=median_ms,
        p90_ms=percentile(runs, 90),
        p99_ms=percentile(runs, 99),
        throughput=1e3 * (row.batch or 1) / median_ms if median_ms else None,
    )


def with_error(row: ComparedVariant, error: TwofourError) -> ComparedVariant:
    """The row of a variant that failed."""
    return replace(row, error=error.message, hint=error.hint)


@frozen
class TimedRequest:
    """A variant to time, or its twin."""

    name: str
    engine: EngineRow
    opening: OpenRequest
    again: bool = False


@frozen
class EngineTimes:
    """What came out; a twin has no row where one variant alone could run."""

    rows: tuple[ComparedVariant, ...]
    loads: tuple[RoundLoad, ...] = ()
    in_rounds: bool = True
    """False: one variant after the other, as memory holds one at a time."""


class _NoRoomError(BuildFailedError):
    """Another variant would not fit beside those that are loaded."""


def time_engines(
    wanted: Sequence[TimedRequest],
    opened: MutableMapping[Path, OrtSession],
    inputs: Arrays,
    plan: RoundPlan,
    report: ProgressCallback,
) -> EngineTimes:
    """Time all of them in rounds; where memory is short one after the other, without twins.

    Sessions in `opened` are taken out and used instead of loading their file. What fails has a row
    with its error.
    """
    reset_peak()  # a build took more in this process than what it built will take
    try:
        return _in_rounds(wanted, opened, inputs, plan, report)
    except _NoRoomError:
        for session in opened.values():
            session.close()
        opened.clear()
    rows: list[ComparedVariant] = []
    for request in wanted:
        if not request.again:
            rows += _in_rounds((request,), {}, inputs, plan, report).rows
    return EngineTimes(rows=tuple(rows), in_rounds=False)


def _in_rounds(
    wanted: Sequence[TimedRequest],
    opened: MutableMapping[Path, OrtSession],
    inputs: Arrays,
    plan: RoundPlan,
    report: ProgressCallback,
) -> EngineTimes:
    own = (os.getppid(),)
    batch = batch_of(inputs)
    with contextlib.ExitStack() as stack:
        loaded, failed = _load_all(wanted, opened, stack)
        ready = []
        for name, model in loaded.items():
            try:
                model.prepare(inputs, plan.warmup)
                ready.append(model)
            except TwofourError as error:
                failed[name] = error
        before = cpu_use(own)
        rounds = interleave(ready, plan, report)
        load = load_between(before, cpu_use(own), batch) if rounds.done else None
    failed.update(rounds.failed)
    rows = []
    for request in wanted:
        name = request.name
        if name in loaded or name in failed:  # or it is the twin of one variant alone
            samples_ms = rounds.samples_ms.get(name, ())
            rows.append(_row(name, batch, loaded.get(name), failed.get(name), samples_ms))
    return EngineTimes(rows=tuple(rows), loads=() if load is None else (load,))


def _row(
    name: str,
    batch: int | None,
    loaded: WarmModel | None,
    error: TwofourError | None,
    samples_ms: Sequence[float],
) -> ComparedVariant:
    row = ComparedVariant(name=name, batch=batch)
    if loaded is not None:
        row = replace(row, settings=loaded.model.settings, open_s=loaded.open_s)
    if error is not None:
        row = with_error(row, error)
    return with_samples(row, samples_ms)


def _load_all(
    wanted: Sequence[TimedRequest],
    opened: MutableMapping[Path, OrtSession],
    stack: contextlib.ExitStack,
) -> tuple[dict[str, WarmModel], dict[str, TwofourError]]:
    """Everything that can be loaded, by name, and why the others cannot.

    Raises _NoRoomError where memory is short.
    """
    loaded: dict[str, WarmModel] = {}
    failed: dict[str, TwofourError] = {}
    for request in wanted:
        if request.again:
            if len(loaded) < 2:
                continue
            first = next(iter(loaded.values()))
            if (first.model.size_bytes or 0) > _LARGE_BYTES or not _has_room():
                loaded[request.name] = _warm(request.name, first.model, first.open_s)
                continue
        if loaded and request.opening.file not in opened and not _has_room():
            raise _NoRoomError(f"{request.name} was not loaded: memory is short")
        try:
            model = _load(request, opened)
            stack.callback(model.model.close)
            loaded[request.name] = model
        except TwofourError as error:
            failed[request.name] = error
    return loaded, failed


def _has_room() -> bool:
    """Whether memory has room for as much again as this process took so far."""
    return has_room_for(peak_resident_bytes() or 0)


def _load(request: TimedRequest, opened: MutableMapping[Path, OrtSession]) -> WarmModel:
    opening = request.opening
    assert opening.file is not None, "the main job times files"
    session = None if request.again else opened.pop(opening.file, None)
    if session is not None and session.level == (opening.level or LEVELS[0]):
        model = as_timed(session, weights=opening.weights, precision=opening.precision)
        return _warm(request.name, model, session.load_s)
    if session is not None:
        session.close()
    started = time.perf_counter()
    loaded = request.engine.engine().open(opening)
    return _warm(request.name, loaded, time.perf_counter() - started)


def _warm(name: str, model: TimedModel, open_s: float | None) -> WarmModel:
    return WarmModel(name, model, long_ms=_LONG_AT_ONCE_MS, open_s=open_s)
