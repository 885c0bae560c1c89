"""Engines in a worker process, as the main job uses them: a crash is tried again, then an error.

The second try is at a lower optimization level of the engine, where fewer of its rewritings run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from twofour.engines.latency import no_latency
from twofour.engines.protocol import BuildRequest, ProgressCallback, say_nothing
from twofour.errors import BuildFailedError
from twofour.pipeline.workers.process import WorkerDiedError, WorkerProcess, is_out_of_memory
from twofour.records.build import EngineStatus, FailedTry, VariantBuild
from twofour.records.options import EngineName
from twofour.records.run import OriginalOutputs, VariantCheck

T = TypeVar("T")
_SERVICE = "twofour.pipeline.engine_worker:EngineWorker"
CRASH_HINT = "--precision float32 or --static-batch may avoid it"
BUILT = (".plan", ".log", ".layers.json", ".profile.json")
"""What TensorRT leaves, after the name of the variant."""
_OUT_OF_MEMORY = "out of memory"
_DEFAULT_LEVEL = 3
_WITHOUT_COMPILING = 2
"""TensorRT compiles kernels of its own from level 3 on; up to 2 it takes those of its libraries."""


class CrashedError(BuildFailedError):
    """Every try ended its process; `tries` says how."""

    def __init__(self, message: str, tries: tuple[FailedTry, ...]) -> None:
        super().__init__(message, hint=CRASH_HINT)
        self.tries = tries


class EngineHost:
    """One worker process at a time, started early, and another after a death.

    `note` is told of every death that is followed by another try.
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
        self._path = [entry for entry in sys.path if isinstance(entry, str)]
        self._process: WorkerProcess | None = None

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, without waiting until it can be asked."""
        if self._process is None:
            self._process = WorkerProcess(self._service, self._threads, path=self._path)

    def call(self, command: str, *arguments: object, report: ProgressCallback = say_nothing) -> Any:  # noqa: ANN401  # each command has its own
        """The command's value; raises what it raised, and WorkerDiedError where it died.

        A process that found no memory is ended, for what it holds and its broken libraries, and
        counts as dead.
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
            raise WorkerDiedError(error.message, ending=_OUT_OF_MEMORY, passing=True) from error

    def status(self, name: EngineName) -> EngineStatus:
        """Whether an engine can run here; one that ends the process when it is tried cannot."""
        try:
            found: EngineStatus = self.call("status", name)
        except BuildFailedError as error:
            why = f"trying it failed: {error.message}"
            return EngineStatus(engine=name, version=None, can_run=False, why_not=why, hint=None)
        return found

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
        while len(self.failed) < len(self.levels):
            level = self.levels[len(self.failed)]
            try:
                return work(level)
            except WorkerDiedError as error:
                self._keep(error, level, doing())
        raise CrashedError(f"{self.engine} ended: {in_words(self.failed)}", self.failed)

    def _keep(self, error: WorkerDiedError, level: str, doing: str) -> None:
        failed = FailedTry(doing=doing, level=level, ending=error.ending, passing=error.passing)
        self.failed += (failed,)
        if self.lowered is not None:
            told = in_words((failed,))
            self.note(f"{self.engine} ended: {told}; trying again at level {self.lowered}")


def in_words(tries: Sequence[FailedTry]) -> str:
    """Such as "SIGSEGV while loading dense.onnx at optimization level ALL"."""
    return ", then ".join(
        f"{t.ending} while {t.doing} at optimization level {t.level}" for t in tries
    )


def tries_of(error: BuildFailedError) -> tuple[FailedTry, ...]:
    """What a crash tried; () for another error."""
    return error.tries if isinstance(error, CrashedError) else ()


def lasts(record: VariantBuild | VariantCheck | OriginalOutputs) -> bool:
    """Whether the result would be the same another time; not where memory ran out, say."""
    if any(failed.passing for failed in record.failed_tries):
        return False
    if isinstance(record, VariantBuild):
        error = record.latency.error
    else:
        error = record.not_compared if isinstance(record, VariantCheck) else record.why_not
    return error is None or not is_out_of_memory(error)


def crashed_build(request: BuildRequest, engine: EngineName, error: CrashedError) -> VariantBuild:
    """The row of an engine that ended its process in every try, with the files it left."""

    def left(suffix: str) -> str | None:
        file = request.file(suffix)
        return file.name if engine is EngineName.TENSORRT and file.is_file() else None

    return VariantBuild(
        variant=request.variant,
        onnx=request.onnx.name,
        sparse_weights=engine is EngineName.TENSORRT and request.sparse_weights,
        providers=(),
        build_s=0.0,
        size_bytes=None,
        plan=left(".plan"),
        log=left(".log"),
        layers=left(".layers.json"),
        profile=left(".profile.json"),
        latency=no_latency(request.variant, error.message),
        failed_tries=error.tries,
    )


def build_tensorrt(
    host: EngineHost, request: BuildRequest, report: ProgressCallback
) -> VariantBuild:
    """`TensorRtEngine.build`, at a lower optimization level where it takes its process down.

    The second try goes without the timing cache, which may be what the first one died of. Raises
    what a build raises, and CrashedError.
    """
    asked = request.options.optimization_level
    levels = tuple(map(str, _levels(_DEFAULT_LEVEL if asked is None else asked)))
    tries = Tries(engine=EngineName.TENSORRT.value, levels=levels, note=host.note)

    def build(level: str) -> VariantBuild:
        wanted = request
        for suffix in BUILT:  # of an earlier build, which this one may not come to replace
            request.file(suffix).unlink(missing_ok=True)
        if tries.failed:
            options = replace(request.options, optimization_level=int(level))
            wanted = replace(request, options=options, timing_cache=None)
        built: VariantBuild = host.call("build", EngineName.TENSORRT, wanted, report=report)
        return replace(built, failed_tries=tries.failed, level=tries.lowered)

    return tries.until_alive(build, lambda: f"building {request.onnx.name}")


def _levels(asked: int) -> Iterator[int]:
    yield asked
    if asked > 0:
        yield min(asked - 1, _WITHOUT_COMPILING)
