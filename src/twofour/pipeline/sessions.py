"""The ONNX Runtime sessions of a run: at most one alive, used for everything its file needs.

Creating a session reads and transforms every weight (about a second for 400 MB), and it holds
them; the stages are ordered so that one session serves the check, the metric and the timing.
"""

from __future__ import annotations

from pathlib import Path

from twofour.engines.onnxruntime import CannotRunError, OrtSession


class Sessions:
    """Opens a session for a file, closing the one of another file."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._path: Path | None = None
        self._session: OrtSession | None = None

    def open(self, path: Path) -> OrtSession:
        """The session of this file.

        Raises what OrtSession raises, and CannotRunError where ONNX Runtime is not installed: a
        box with TensorRT alone can go on without it.
        """
        if self._session is None or self._path != path:
            self.close()
            try:
                self._session = OrtSession(path, threads=self._threads)
            except ImportError as error:
                raise CannotRunError(f"ONNX Runtime cannot be imported: {error}") from error
            self._path = path
        return self._session

    def close(self) -> None:
        """Let go of the session and its memory; also after a file was written again."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._path = None
