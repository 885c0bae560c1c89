"""What the process that the engines of a run live in can do: sessions, builds, times in rounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from twofour.engines.machine import has_room_for, peak_resident_bytes
from twofour.engines.onnxruntime.session import CannotRunError, OrtSession
from twofour.engines.protocol import Arrays, BuildRequest, ProgressCallback
from twofour.engines.registry import EngineRow
from twofour.records.build import EngineStatus, VariantBuild
from twofour.records.export import TensorShape

if TYPE_CHECKING:
    from twofour.pipeline.engine_times import EngineTimes, TimedRequest, Timing


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
        what OrtSession raises, and CannotRunError where ONNX Runtime is not installed.
        """
        room = has_room_for(peak_resident_bytes() or 0)
        for other in [p for p in self._kept if p == path or p not in kept or not room]:
            self._kept.pop(other).close()
        self._session = None
        try:
            session = OrtSession(path, threads=threads, level=level)
        except ImportError as error:
            raise CannotRunError(f"ONNX Runtime cannot be imported: {error}") from error
        self._session = self._kept[path] = session
        return OpenedSession(
            inputs=session.inputs, providers=session.providers, load_s=session.load_s
        )

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Outputs of the session that was opened last, by name."""
        assert self._session is not None, "open comes first"
        return self._session.outputs(inputs)

    def time(self, wanted: Sequence[TimedRequest], how: Timing) -> EngineTimes:
        """Rounds of all of them; those that are open already are not loaded again."""
        from twofour.pipeline.engine_times import time_engines

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
        return row.engine().build(request, self._report)
