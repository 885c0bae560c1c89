"""What the process that the engines of a run live in can do: sessions, builds, times in rounds.

One process holds them because its sessions are open already when a run times them: `compare` starts
one for each variant, which takes longer than the main job times.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twofour.engines.machine import cpu_use, has_room_for, load_between, peak_resident_bytes
from twofour.engines.onnxruntime.engine import as_timed
from twofour.engines.onnxruntime.session import OrtSession
from twofour.engines.protocol import Builder, BuildRequest, EngineRow, OpenRequest, ProgressCallback
from twofour.engines.timing import RoundPlan, WarmModel, interleave, with_samples
from twofour.errors import BuildFailedError, TwofourError
from twofour.inputs.fits import Arrays
from twofour.records.export import EngineStatus, TensorShape, VariantBuild
from twofour.records.latency import ComparedVariant, RoundLoad

_LONG_MS = 5.0
"""As long as the untimed runs that a shorter run follows: in one process threads are awake in time
without them (benchmarks/LOG.md, two sessions in turn)."""
_LARGE_BYTES = 32 << 20
"""A larger model is its own twin: a second one takes too much memory for a first answer (MiniLM: 72
of 870 MB), and `compare` loads twins of all sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """A variant to time, or its twin."""

    name: str
    engine: EngineRow
    opening: OpenRequest
    again: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What is alike for everything that is timed."""

    inputs: Mapping[str, np.ndarray]
    plan: RoundPlan
    warmup: int
    batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """What came out; a twin has no row where one variant alone could run."""

    rows: tuple[ComparedVariant, ...]
    loads: tuple[RoundLoad, ...] = ()
    in_rounds: bool = True
    """False: one variant after the other, as memory holds one at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    warm: WarmModel
    open_s: float


class _NoRoomError(BuildFailedError):
    """Another variant would not fit beside those that are loaded."""


def time_engines(
    wanted: Sequence[TimedRequest],
    opened: MutableMapping[Path, OrtSession],
    how: Timing,
    report: ProgressCallback,
) -> EngineTimes:
    """Time all of them in rounds; where memory is short one after the other, without twins.

    Sessions in `opened` are taken out and used in place of loading their file. What fails has a row
    with its error.
    """
    try:
        return _in_rounds(wanted, opened, how, report)
    except _NoRoomError:
        for session in opened.values():
            session.close()
        opened.clear()
        alone = [_in_rounds((one,), {}, how, report) for one in wanted if not one.again]
        return EngineTimes(rows=tuple(row for of in alone for row in of.rows), in_rounds=False)


def _in_rounds(
    wanted: Sequence[TimedRequest],
    opened: MutableMapping[Path, OrtSession],
    how: Timing,
    report: ProgressCallback,
) -> EngineTimes:
    failed: dict[str, TwofourError] = {}
    with contextlib.ExitStack() as stack:
        loaded = _load_all(wanted, opened, failed, stack)
        running = []
        for name, one in loaded.items():
            try:
                one.warm.prepare(how.inputs, how.warmup)
                running.append(one.warm)
            except TwofourError as error:
                failed[name] = error
        parent = (os.getppid(),)
        before = cpu_use(parent)
        rounds = interleave(running, how.plan, report)
        load = load_between(before, cpu_use(parent), how.batch) if rounds.done else None
    failed.update(rounds.failed)
    rows = [
        _row(name, loaded.get(name), rounds.samples_ms.get(name, ()), how.batch, failed.get(name))
        for name in (one.name for one in wanted)
        if name in loaded or name in failed
    ]
    return EngineTimes(rows=tuple(rows), loads=() if load is None else (load,))


def _load_all(
    wanted: Sequence[TimedRequest],
    opened: MutableMapping[Path, OrtSession],
    failed: dict[str, TwofourError],
    stack: contextlib.ExitStack,
) -> dict[str, _Loaded]:
    """Everything that can be loaded, by name; raises _NoRoomError where memory is short."""
    loaded: dict[str, _Loaded] = {}
    for one in wanted:
        if one.again:
            if len(loaded) < 2:
                continue
            first = next(iter(loaded.values()))
            if (first.warm.model.size_bytes or 0) > _LARGE_BYTES or not _has_room():
                again = WarmModel(one.name, first.warm.model, long_ms=_LONG_MS)
                loaded[one.name] = replace(first, warm=again)
                continue
        if loaded and one.opening.file not in opened and not _has_room():
            raise _NoRoomError(f"{one.name} was not loaded: memory is short")
        try:
            loaded[one.name] = _load(one, opened)
            stack.callback(loaded[one.name].warm.model.close)
        except TwofourError as error:
            failed[one.name] = error
    return loaded


def _has_room() -> bool:
    """For as much again as this process took so far."""
    return has_room_for(peak_resident_bytes() or 0)


def _load(one: TimedRequest, opened: MutableMapping[Path, OrtSession]) -> _Loaded:
    opening = one.opening
    assert opening.file is not None, "the main job times files"
    session = None if one.again else opened.pop(opening.file, None)
    if session is not None and session.level == opening.level:
        model = as_timed(session, weights=opening.weights, precision=opening.precision)
        warm = WarmModel(one.name, model, long_ms=_LONG_MS)
        return _Loaded(warm=warm, open_s=session.load_s)
    if session is not None:
        session.close()
    started = time.perf_counter()
    warm = WarmModel(one.name, one.engine.engine().open(opening), long_ms=_LONG_MS)
    return _Loaded(warm=warm, open_s=time.perf_counter() - started)


def _row(
    name: str,
    loaded: _Loaded | None,
    samples_ms: Sequence[float],
    batch: int | None,
    error: TwofourError | None,
) -> ComparedVariant:
    row = ComparedVariant(
        name=name,
        batch=batch,
        error=None if error is None else error.message,
        hint=None if error is None else error.hint,
        settings=None if loaded is None else loaded.warm.model.settings,
        open_s=None if loaded is None else loaded.open_s,
    )
    return with_samples(row, samples_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """What is known of a file once ONNX Runtime has loaded it."""

    inputs: tuple[TensorShape, ...]
    providers: tuple[str, ...]
    load_s: float


class EngineWorker:
    """The commands; each is a method, and what it raises goes back to the parent."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report
        self._session: OrtSession | None = None
        self._kept: dict[Path, OrtSession] = {}

    def status(self, row: EngineRow) -> EngineStatus:
        """Whether an engine can run here, established by trying."""
        return row.engine().status()

    def open(
        self, path: Path, threads: int | None, level: str, kept: Collection[Path] = ()
    ) -> OpenedSession:
        """Load a file into ONNX Runtime at an optimization level, to be run.

        Sessions of the files in `kept` stay open where memory allows it, to be timed later. Raises
        what OrtSession raises.
        """
        room = has_room_for(peak_resident_bytes() or 0)
        for other in [p for p in self._kept if p == path or p not in kept or not room]:
            self._kept.pop(other).close()
        self._session = None
        self._session = self._kept[path] = session = OrtSession(path, threads=threads, level=level)
        return OpenedSession(
            inputs=session.inputs, providers=session.providers, load_s=session.load_s
        )

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Outputs of the session that was opened last, by name."""
        assert self._session is not None, "open comes first"
        return self._session.outputs(inputs)

    def time(self, wanted: Sequence[TimedRequest], how: Timing) -> EngineTimes:
        """Rounds of all of them; those that are open already are not loaded again."""
        try:
            return time_engines(wanted, self._kept, how, self._report)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the sessions and their memory."""
        for session in self._kept.values():
            session.close()
        self._kept.clear()
        self._session = None

    def build(self, row: EngineRow, request: BuildRequest) -> VariantBuild:
        """Build one variant, with the progress reported."""
        return cast("Builder", row.engine()).build(request, self._report)
