"""The ONNX Runtime sessions of a run: at most one alive, used for everything its file needs.

Creating a session reads and transforms every weight (about a second for 400 MB), and it holds
them; the stages are ordered so that one session serves the check, the metric and the timing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from twofour.engines.onnxruntime import CannotRunError, OrtSession
from twofour.store import write_text

_LOAD = (
    "import sys, onnxruntime\n"
    "onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
)


class Sessions:
    """Opens a session for a file, closing the one of another file."""

    def __init__(self, marker: Path, threads: int | None = None) -> None:
        self._marker = marker
        """Holds the name of the file that is being loaded: what is left of it if that crashes."""
        self._threads = threads
        self._path: Path | None = None
        self._session: OrtSession | None = None

    def open(self, path: Path) -> OrtSession:
        """The session of this file.

        Raises what OrtSession raises, and CannotRunError where ONNX Runtime is not installed (a
        box with TensorRT alone can go on without it) or takes the process down with it.
        """
        if self._session is None or self._path != path:
            self.close()
            self._refuse_crashing(path)
            write_text(self._marker, path.name)
            try:
                self._session = OrtSession(path, threads=self._threads)
            except ImportError as error:
                raise CannotRunError(f"ONNX Runtime cannot be imported: {error}") from error
            finally:
                self._marker.unlink(missing_ok=True)
            self._path = path
        return self._session

    def _refuse_crashing(self, path: Path) -> None:
        """Where the last run died while it loaded this file, try that in a process apart."""
        if not self._marker.is_file() or self._marker.read_text(encoding="utf-8") != path.name:
            return
        command = [sys.executable, "-c", _LOAD, str(path)]
        done = subprocess.run(command, check=False, capture_output=True)  # noqa: S603  # ours
        code = done.returncode
        if code < 0:
            raise CannotRunError(
                f"ONNX Runtime crashes with signal {-code} while it loads {path.name}",
                hint="--precision float32 or --static-batch may avoid it",
            )

    def close(self) -> None:
        """Let go of the session and its memory; also after a file was written again."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._path = None
