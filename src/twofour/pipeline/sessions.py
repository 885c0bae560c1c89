"""The ONNX Runtime sessions of a run: at most one alive, used for everything its file needs.

Creating a session reads and transforms every weight (about a second for 400 MB), and it holds
them; the stages are ordered so that one session serves the check, the metric and the timing.
"""

from __future__ import annotations

from pathlib import Path

from twofour.engines.onnxruntime import OrtSession


class Sessions:
    """Opens a session for a file, closing the one of another file."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._path: Path | None = None
        self._session: OrtSession | None = None

    def open(self, path: Path) -> OrtSession:
        """The session of this file; raises what OrtSession raises."""
        if self._session is None or self._path != path:
            self.close()
            self._session = OrtSession(path, threads=self._threads)
            self._path = path
        return self._session

    def close(self) -> None:
        """Let go of the session and its memory; also after a file was written again."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._path = None
