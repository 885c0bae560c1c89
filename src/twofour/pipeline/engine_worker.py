"""What the process that the engines of a run live in can do: one session at a time, and builds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from twofour.engines.onnxruntime.session import CannotRunError, OrtSession
from twofour.engines.protocol import Arrays, BuildRequest, ProgressCallback
from twofour.engines.registry import EngineRow
from twofour.records.build import EngineStatus, VariantBuild, VariantLatency
from twofour.records.export import TensorShape
from twofour.records.options import BuildOptions


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

    def status(self, row: EngineRow) -> EngineStatus:
        """Whether an engine can run here, established by trying."""
        return row.engine().status()

    def open(self, path: Path, threads: int | None, level: str) -> OpenedSession:
        """Load a file into ONNX Runtime at an optimization level, in place of the one before.

        Raises what OrtSession raises, and CannotRunError where ONNX Runtime is not installed.
        """
        self.close()
        try:
            self._session = OrtSession(path, threads=threads, level=level)
        except ImportError as error:
            raise CannotRunError(f"ONNX Runtime cannot be imported: {error}") from error
        return OpenedSession(
            inputs=self._session.inputs,
            providers=self._session.providers,
            load_s=self._session.load_s,
        )

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Outputs of the session by name."""
        return self._opened.outputs(inputs)

    def measure(self, variant: str, inputs: Arrays, options: BuildOptions) -> VariantLatency:
        """Times of the session's runs."""
        return self._opened.measure(variant, inputs, options)

    def close(self) -> None:
        """Let go of the session and its memory."""
        if self._session is not None:
            self._session.close()
        self._session = None

    def build(self, row: EngineRow, request: BuildRequest) -> VariantBuild:
        """Build and time one variant, with the progress reported."""
        return row.engine().build(request, self._report)

    @property
    def _opened(self) -> OrtSession:
        assert self._session is not None, "open comes first"
        return self._session
