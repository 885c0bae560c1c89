"""A worker process as its parent sees it: started, asked, closed; its death is an error."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import IO, Any

from twofour.errors import BuildFailedError, TwofourError

_START = (
    "import sys; sys.path[:] = {path!r}; from twofour.pipeline.comparing.worker import main; main()"
)
_CLOSING_S = 1.0
_IDLE = {"GOMP_SPINCOUNT": "10000"}
"""GNU OpenMP's idle threads spin for 2 ms at most, not 10, so that `settle` waits for their end.
Not at all (OMP_WAIT_POLICY=PASSIVE) makes torch up to 2 times as slow (benchmarks/LOG.md)."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerProcess:
    """One worker; `call` raises what the command raised, and BuildFailedError when it died.

    It is in a process group of its own, so that Ctrl-C reaches the parent alone, and it ends when
    the parent does, however that ends.
    """

    def __init__(self, threads: int) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(  # noqa: S603  # ourselves
            [sys.executable, "-c", _START.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**_IDLE, **os.environ, **dict.fromkeys(_THREADS, str(threads))},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands: IO[bytes] = self._process.stdin
        self._answers: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._number = 0
        # a thread of its own: an interrupted read would lose half an answer
        threading.Thread(
            target=_read, args=(self._process.stdout, self._answers), daemon=True
        ).start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def number(self) -> int:
        """The system's number of the process."""
        return self._process.pid

    def call(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # each command has its own
        """The command's value."""
        self._number += 1
        try:
            self._commands.write(pickle.dumps((self._number, command, arguments)))
            self._commands.flush()
        except OSError:
            raise self._died() from None
        while True:
            answer = self._answers.get()
            if answer is None:
                raise self._died()
            number, value = answer
            if number != self._number:  # of a call that was interrupted
                continue
            if isinstance(value, TwofourError):
                raise value
            return value

    def close(self) -> None:
        """End it, by force where it does not end by itself."""
        with contextlib.suppress(OSError):
            self._commands.close()
        try:
            self._process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _died(self) -> BuildFailedError:
        code = self._process.wait()
        said = self._last_words()
        if code == -signal.SIGTERM or code >= 0:
            return BuildFailedError(f"its process ended with code {code}{said}")
        name = signal.Signals(-code).name
        why = ", as the system does where memory runs out" if name == "SIGKILL" else said
        return BuildFailedError(f"its process was ended by {name}{why}")

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def _read(stream: IO[bytes], answers: queue.SimpleQueue[tuple[int, Any] | None]) -> None:
    try:
        while True:
            answers.put(pickle.load(stream))  # noqa: S301  # our own worker
    except (EOFError, pickle.UnpicklingError, OSError, ValueError):
        answers.put(None)
