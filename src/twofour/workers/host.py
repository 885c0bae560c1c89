"""Engines in a worker process: what it can do with them, and how this process asks it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from twofour.engines.machine import has_room_for, peak_resident_bytes
from twofour.engines.onnxruntime.session import LEVELS, OrtSession
from twofour.engines.protocol import Builder, BuildRequest, EngineRow, ProgressCallback, no_progress
from twofour.engines.timing import EngineTimes, RoundPlan, TimedRequest, time_engines
from twofour.errors import BuildFailedError
from twofour.inputs.fits import Array, Arrays
from twofour.records import frozen
from twofour.records.export import EngineStatus, FailedTry, TensorShape, VariantBuild
from twofour.records.run import OriginalOutputs, VariantCheck
from twofour.workers.process import (
    WorkerDiedError,
    WorkerProcess,
    is_out_of_memory,
    may_be_temporary,
)

T = TypeVar("T")
_SERVICE = "twofour.workers.host:EngineWorker"
CRASH_HINT = "--precision float32 or --static-batch may avoid it"
_OUT_OF_MEMORY = "out of memory"
_BY_MEMORY = {_OUT_OF_MEMORY, "SIGKILL"}
"""Endings of processes that took too much memory: the kernel kills them."""


@frozen
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
        """Load a file into ONNX Runtime; raises what OrtSession raises.

        Sessions of the files in `kept` stay open where memory allows it, to be timed later.
        """
        has_room = has_room_for(peak_resident_bytes() or 0)
        for other in list(self._kept):
            if other == path or other not in kept or not has_room:
                self._kept.pop(other).close()
        self._session = None
        session = OrtSession(path, threads=threads, level=level)
        self._session = session
        self._kept[path] = session
        return OpenedSession(
            inputs=session.inputs, providers=session.providers, load_s=session.load_s
        )

    def outputs(self, inputs: Arrays) -> dict[str, Array]:
        """Outputs of the session that was opened last, by name."""
        assert self._session is not None, "open comes first"
        return self._session.outputs(inputs)

    def time(self, wanted: Sequence[TimedRequest], inputs: Arrays, plan: RoundPlan) -> EngineTimes:
        """Rounds of all of them; those that are open already are not loaded again."""
        try:
            return time_engines(wanted, self._kept, inputs, plan, self._report)
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


class CrashedError(BuildFailedError):
    """Every try ended its process; `tries` says how."""

    def __init__(self, message: str, tries: tuple[FailedTry, ...]) -> None:
        super().__init__(message, hint=CRASH_HINT)
        self.tries = tries


class EngineHost(contextlib.AbstractContextManager["EngineHost"]):
    """One worker process at a time, started early, and another after a death.

    `note` gets a sentence on every death that is followed by another try.
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        note: Callable[[str], None] | None = None,
        service: str = _SERVICE,
    ) -> None:
        self.note = note or (lambda _text: None)
        self._threads = threads
        self._service = service
        # of now: while user code runs, its folders come first
        self._path = [*sys.path]
        self._process: WorkerProcess | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, without waiting until it can be asked."""
        if self._process is None:
            self._process = WorkerProcess(self._service, self._threads, path=self._path)

    def call(self, command: str, *arguments: object, report: ProgressCallback = no_progress) -> Any:  # noqa: ANN401  # each command has its own
        """The command's value; raises what it raised, and WorkerDiedError where it died.

        A process that ran out of memory is ended too, and counts as dead.
        """
        self.start()
        assert self._process is not None
        try:
            return self._process.call(command, *arguments, report=report)
        except WorkerDiedError:
            self.close()
            raise
        except BuildFailedError as error:
            if not is_out_of_memory(error.message):
                raise
            self.close()
            raise WorkerDiedError(error.message, ending=_OUT_OF_MEMORY) from error

    def status(self, row: EngineRow) -> EngineStatus:
        """Whether an engine can run here; one that ends the process when it is tried cannot."""
        try:
            status: EngineStatus = self.call("status", row)
        except BuildFailedError as error:
            why = f"trying it failed: {error.message}"
            return EngineStatus(
                engine=row.name, version=None, can_run=False, why_not=why, crashed=True
            )
        return status

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None


@dataclass(slots=True, kw_only=True)
class Tries:
    """What was tried of one model in one engine, the highest optimization level first."""

    engine: str
    levels: tuple[str, ...]
    note: Callable[[str], None]
    failed: tuple[FailedTry, ...] = ()

    @property
    def lowered(self) -> str | None:
        """The level after a death; None: the first, or none is left."""
        left = self.levels[len(self.failed) :]
        return left[0] if self.failed and left else None

    def until_alive(self, work: Callable[[str], T], doing: Callable[[], str]) -> T:
        """What `work` gives at the highest level that it survives; raises CrashedError.

        `doing` says, after a death, what it came from.
        """
        # ALL ends the process (SIGSEGV): noted, tried again at EXTENDED; that ends it too: raised
        while len(self.failed) < len(self.levels):
            level = self.levels[len(self.failed)]
            try:
                return work(level)
            except WorkerDiedError as error:
                failed = FailedTry(doing=doing(), level=level, ending=error.ending)
                self.failed += (failed,)
                if self.lowered is not None:
                    ended = f"{self.engine} ended: {tries_in_words((failed,))}"
                    self.note(f"{ended}; trying again at level {self.lowered}")
        raise CrashedError(f"{self.engine} ended: {tries_in_words(self.failed)}", self.failed)


def tries_in_words(tries: Sequence[FailedTry]) -> str:
    """Such as "SIGSEGV while loading dense.onnx at optimization level ALL"."""
    words = (f"{t.ending} while {t.doing} at optimization level {t.level}" for t in tries)
    return ", then ".join(words)


def tries_of(error: BuildFailedError) -> tuple[FailedTry, ...]:
    """What a crash tried; () for another error."""
    return error.tries if isinstance(error, CrashedError) else ()


def is_final(record: VariantBuild | VariantCheck | OriginalOutputs) -> bool:
    """Whether it is a result to keep: not for lack of memory, nor where every level crashed."""
    if any(failed.ending in _BY_MEMORY for failed in record.failed_tries):
        return False
    if isinstance(record, VariantBuild):
        errors = [record.error]
    elif isinstance(record, VariantCheck):
        errors = [record.not_compared, *(size.error for size in record.sizes)]
    else:
        errors = [record.why_not]
    return not any(map(may_be_temporary, filter(None, errors)))


def build_in(
    host: EngineHost, row: EngineRow, request: BuildRequest, report: ProgressCallback
) -> VariantBuild:
    """The engine's `build`; raises what that raises, and CrashedError."""
    for suffix in row.leaves:  # of an earlier build, which this one may not come to replace
        request.file(suffix).unlink(missing_ok=True)
    asked = request.options.optimization_level
    level = "default" if asked is None else str(asked)
    tries = Tries(engine=row.name, levels=(level,), note=host.note)
    built: VariantBuild = tries.until_alive(
        lambda _level: host.call("build", row, request, report=report),
        lambda: f"building {request.onnx.name}",
    )
    return built


def crashed_build(request: BuildRequest, row: EngineRow, error: CrashedError) -> VariantBuild:
    """The row of an engine that ended its process in every try, with the files it left."""
    return replace(
        request.result(0.0, error.message),
        sparse_weights=row.is_tensorrt and request.sparse_weights,
        failed_tries=error.tries,
    )


class Session:
    """One file in ONNX Runtime, in the host's process.

    Where a call ends the process, the file is loaded again at a lower optimization level and the
    call repeated; CrashedError is raised where that ends it too.
    """

    def __init__(
        self, host: EngineHost, path: Path, threads: int | None, kept: Collection[Path] = ()
    ) -> None:
        self.path = path
        self._host = host
        self._open = ("open", path, threads)
        self._kept = kept
        self._tries = Tries(engine="ONNX Runtime", levels=LEVELS, note=host.note)
        self._opened: OpenedSession | None = None
        self._doing = ""

    @property
    def failed_tries(self) -> tuple[FailedTry, ...]:
        """What ended its process before."""
        return self._tries.failed

    @property
    def level(self) -> str | None:
        """Optimization level after that; None: the usual one."""
        return self._tries.lowered

    def outputs(self, inputs: Arrays) -> dict[str, Array]:
        """Every output by name; raises what `OrtSession.outputs` raises."""
        return self._until_alive("running", lambda: self._host.call("outputs", dict(inputs)))

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """Inputs of the file."""
        return self.load().inputs

    def load(self) -> OpenedSession:
        """Load the file, unless it is loaded: its inputs, providers, seconds."""
        self._until_alive("loading", lambda: None)
        assert self._opened is not None, "or CrashedError was raised"
        return self._opened

    def _until_alive(self, doing: str, work: Callable[[], T]) -> T:
        def at(level: str) -> T:
            try:
                if self._opened is None:
                    self._doing = "loading"
                    self._opened = self._host.call(*self._open, level, self._kept)
                self._doing = doing
                return work()
            except WorkerDiedError:
                self._opened = None
                raise

        return self._tries.until_alive(at, lambda: f"{self._doing} {self.path.name}")


class Sessions:
    """Opens a session for a file, and closes the one of another file.

    Those of the files in `kept` stay open in the host's process, to be timed.
    """

    def __init__(self, host: EngineHost, threads: int | None = None) -> None:
        self.kept: frozenset[Path] = frozenset()
        self._host = host
        self._threads = threads
        self._session: Session | None = None

    def open(self, path: Path) -> Session:
        """The session of this file.

        Raises what OrtSession raises, CannotRunError without ONNX Runtime, and CrashedError where
        it ends its process at every level, at once where that is known of the last file.
        """
        if self._session is None or self._session.path != path:
            self._session = Session(self._host, path, self._threads, self.kept)
        self._session.load()
        return self._session

    def close(self) -> None:
        """Let go of the session and its memory; also after a file was written again."""
        if self._session is not None:
            with contextlib.suppress(WorkerDiedError):  # then its memory is free as well
                self._host.call("close")
        self._session = None
