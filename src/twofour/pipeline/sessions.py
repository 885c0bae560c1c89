"""The ONNX Runtime sessions of a run: at most one alive, used for everything its file needs.

Creating a session reads and transforms every weight (about a second for 400 MB), and it holds
them; the stages are ordered so that one session serves the check, the metric and the timing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt

from twofour.engines.ort_session import LEVELS
from twofour.engines.protocol import Arrays
from twofour.pipeline.engine_host import CrashedError, EngineHost, Tries
from twofour.pipeline.engine_worker import OpenedSession
from twofour.pipeline.workers.process import WorkerDiedError
from twofour.records.build import FailedTry, VariantLatency
from twofour.records.export import TensorShape
from twofour.records.options import BuildOptions

T = TypeVar("T")
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
"""Packages that ONNX Runtime comes in: what it gives hangs on their versions."""


class Session:
    """One file in ONNX Runtime, in the host's process.

    Where a call ends the process, the file is loaded again at a lower optimization level and the
    call repeated; CrashedError is raised where that ends it too.
    """

    def __init__(self, host: EngineHost, path: Path, threads: int | None) -> None:
        self._host = host
        self._path = path
        self._threads = threads
        self._tries = Tries(engine="ONNX Runtime", levels=LEVELS, note=host.note)
        self._opened: OpenedSession | None = None
        self._doing = ""
        self._until_alive("loading", lambda: None)

    @property
    def failed_tries(self) -> tuple[FailedTry, ...]:
        """What ended its process before."""
        return self._tries.failed

    @property
    def level(self) -> str | None:
        """Optimization level after that; None: the usual one."""
        return self._tries.lowered

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """The model's inputs; an unnamed dynamic dimension is "?"."""
        return self._loaded.inputs

    @property
    def providers(self) -> tuple[str, ...]:
        """The providers in use."""
        return self._loaded.providers

    @property
    def load_s(self) -> float:
        """Seconds of the load that lives."""
        return self._loaded.load_s

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """As `OrtSession.outputs`."""
        return self._until_alive("running", lambda: self._host.call("outputs", dict(inputs)))

    def measure(self, variant: str, inputs: Arrays, options: BuildOptions) -> VariantLatency:
        """As `OrtSession.measure`."""

        def measure() -> VariantLatency:
            found: VariantLatency = self._host.call("measure", variant, dict(inputs), options)
            return found

        return self._until_alive("timing", measure)

    @property
    def _loaded(self) -> OpenedSession:
        assert self._opened is not None, "opened when it was made"
        return self._opened

    def _until_alive(self, doing: str, work: Callable[[], T]) -> T:
        def at(level: str) -> T:
            try:
                if self._opened is None:
                    self._doing = "loading"
                    self._opened = self._host.call("open", self._path, self._threads, level)
                self._doing = doing
                return work()
            except WorkerDiedError:
                self._opened = None
                raise

        return self._tries.until_alive(at, lambda: f"{self._doing} {self._path.name}")


class Sessions:
    """Opens a session for a file, in place of the one of another file."""

    def __init__(self, host: EngineHost, threads: int | None = None) -> None:
        self._host = host
        self._threads = threads
        self._path: Path | None = None
        self._session: Session | None = None
        self._crashed: dict[Path, CrashedError] = {}

    def open(self, path: Path) -> Session:
        """The session of this file.

        Raises what OrtSession raises, CannotRunError where ONNX Runtime is not installed (a box
        with TensorRT alone can go on without it), and CrashedError where it ends its process at
        every level, then at once for the same file.
        """
        if path in self._crashed:
            raise self._crashed[path]
        if self._session is None or self._path != path:
            self.close()
            try:
                self._session = Session(self._host, path, self._threads)
            except CrashedError as error:
                self._crashed[path] = error
                raise
            self._path = path
        return self._session

    def close(self) -> None:
        """Let go of the session and its memory; also after a file was written again."""
        if self._session is not None:
            with contextlib.suppress(WorkerDiedError):  # what it held is let go of as well
                self._host.call("close")
        self._session = None
        self._path = None
