"""Processes of their own for whatever loads a model into a library that may crash or hang.

A worker as its parent sees it (started, asked, closed; its death is an error), and its own side:
commands on stdin, answers on stdout, prints on stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import pkgutil
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from twofour.engines.machine import family_s
from twofour.engines.protocol import ProgressCallback, no_progress
from twofour.errors import BuildFailedError, TwofourError
from twofour.packages import missing

LIMIT_S = 300.0
"""A process that used no processor time for so long, its children neither, will never answer.

Builds, calibration and downloads of hours use some all the time; a process that is stopped
(SIGSTOP) or waits for a lock that nobody opens uses none. One that spins is not found: Ctrl-C.
"""
LIMIT_VARIABLE = "TWOFOUR_WORKER_SILENCE_S"
"""Seconds instead of LIMIT_S; 0 waits for ever."""
LOOKING_S = 5.0
"""Between two looks."""
_IDLE_S = 0.02
_IDLE_PART = 5e-4
"""What processes use in which nothing goes on: threads of libraries that look now and then whether
somebody is still there (torch's compile workers, each second)."""
PROTOCOL = 5
"""pickle's protocol 5 sends arrays without a copy of their own."""
PROGRESS = "progress"
VALUE = "value"
_PR_SET_PDEATHSIG = 1
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from twofour.workers.process import serve_parent; serve_parent({service!r}, {parent})"
)
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
"""Without the current folder on the path from the start; older ones lose it with the first line of
_START, before anything is imported."""
_CLOSING_S = 1.0
_ENDING_S = 0.01
_LAST_BYTES = 1 << 14
_IDLE = {"GOMP_SPINCOUNT": "10000"}
"""GNU OpenMP's idle threads spin for 2 ms at most, not 10, so that `settle` waits for their end.
Not at all (OMP_WAIT_POLICY=PASSIVE) makes torch up to 2 times as slow (benchmarks/LOG.md)."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_MEMORY = re.compile(
    r"bad.?alloc|out.?of.?memory|MemoryAllocation|MemoryError|(not enough|insufficient) memory|"
    r"((failed|unable) to|can't|cannot|could not) allocate|could not be allocated|ALLOC_FAILED|"
    r"available memory of \d+ is smaller than requested",
    re.IGNORECASE,
)
"""Words for it in C++, Python, numpy, torch, ONNX Runtime, TensorRT and CUDA's libraries."""
_ENDED = re.compile(
    r"\b(its|worker) process |\bended: .* while |no space left on device", re.IGNORECASE
)
"""A process that ended or was ended (WorkerDiedError, CrashedError), and a full disk."""


class Answers:
    """What goes back to the parent; progress may come from any thread of a library."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.number = 0
        """Number of the command that is being done."""

    def report(self, text: str, done: int, total: int | None) -> None:
        """Meets ProgressCallback."""
        self._send(PROGRESS, (text, done, total))

    def value(self, value: object) -> None:
        """The end of the command."""
        self._send(VALUE, value)

    def _send(self, kind: str, value: object) -> None:
        answer = pickle.dumps((self.number, kind, value), PROTOCOL)
        with self._lock:
            self._stream.write(answer)
            self._stream.flush()


def serve(service: object, commands: IO[bytes], answers: Answers) -> None:
    """Do (number, command, arguments) as methods of `service` until the input ends."""
    # The parent sends (3, "outputs", (arrays,)). Back go any number of (3, "progress", ("run", 1,
    # 8)) and one (3, "value", result), which is a TwofourError where the command raised. The number
    # lets the parent drop what comes late for a call that Ctrl-C ended.
    while True:
        try:
            answers.number, command, arguments = pickle.load(commands)  # noqa: S301  # our parent
        except EOFError:
            return
        answers.value(run_command(getattr(service, command), arguments))


def run_command(command: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
    """The command's value, or the TwofourError that it ends in; a bug is one here too."""
    try:
        return command(*arguments)
    except TwofourError as error:
        return error
    except MemoryError:
        return BuildFailedError("out of memory")
    except ModuleNotFoundError as error:
        return missing(error) or BuildFailedError(f"ModuleNotFoundError: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a library's, or the user's code
        text = (str(error).strip() or "no message").splitlines()[0]
        return BuildFailedError(f"{type(error).__name__}: {text}")


def serve_parent(service: str, parent: int) -> None:
    """Serve the parent; `service` is a `package.module:Class`. Other prints go to stderr."""
    if sys.platform == "linux":  # killed with its parent, also inside a long call
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            sys.exit()
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    commands = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    answers = Answers(stream)
    serve(pkgutil.resolve_name(service)(answers.report), commands, answers)


class WorkerDiedError(BuildFailedError):
    """The process ended inside a call, or was ended because it showed no sign of life."""

    def __init__(self, message: str, *, ending: str) -> None:
        super().__init__(message)
        self.ending = ending
        """The signal, such as SIGSEGV, or another word for how it ended."""


def is_out_of_memory(text: str) -> bool:
    """Whether a library's message says that memory ran out, such as `std::bad_alloc`."""
    return _MEMORY.search(text) is not None


def may_be_temporary(text: str) -> bool:
    """Whether a message says that memory ran out or a process ended, which is never a result."""
    return is_out_of_memory(text) or _ENDED.search(text) is not None


def silence_limit_s() -> float:
    """Seconds without a sign of life after which a process counts as dead; infinite: for ever."""
    try:
        asked_s = float(os.environ.get(LIMIT_VARIABLE, LIMIT_S))
    except ValueError:
        asked_s = LIMIT_S
    return asked_s if asked_s > 0 else math.inf


class IdleClock:
    """How long a process and its children have used no processor time, while it was looked at."""

    def __init__(
        self,
        number: int,
        *,
        used_s: Callable[[int], float | None] = family_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s = silence_limit_s()
        self._family_s = used_s
        self._clock = clock
        self._number = number
        self.broken()

    def broken(self) -> None:
        """Start again: the process has just answered, or was just asked."""
        self._silent_s = 0.0
        self._used_s: float | None = None
        self._looked = self._clock()

    def too_long(self) -> bool:
        """Whether the limit is over, as of now."""
        # a look every 5 s; processor time 10.00, 10.01, 10.01, ... s counts as silence, because
        # idle threads use some; 10.00 then 10.30 starts again. A laptop that slept for an hour
        # between two looks adds 10 s, not 3600.
        now = self._clock()
        self._silent_s += min(now - self._looked, 2 * LOOKING_S)
        self._looked = now
        used_s = self._family_s(self._number)
        idle_s = _IDLE_S + _IDLE_PART * self._silent_s
        if used_s is None or self._used_s is None or used_s - self._used_s > idle_s:
            self._used_s = used_s
            self._silent_s = 0.0
        return self._silent_s > self.limit_s


class WorkerProcess(contextlib.AbstractContextManager["WorkerProcess"]):
    """One worker; `call` raises what the command raised, and WorkerDiedError when it died.

    `service` is the `package.module:Class` whose methods are the commands; `threads` of None
    leaves the libraries' defaults. It has a process group of its own, so that Ctrl-C reaches the
    parent alone, and it ends with the parent. Raises BuildFailedError where none can start.
    """

    def __init__(
        self,
        service: str,
        threads: int | None,
        *,
        path: Sequence[str] | None = None,
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = _start(service, threads, path or sys.path, self._stderr)
        self._silence = IdleClock(self._process.pid)
        self._answers: queue.SimpleQueue[tuple[int, str, Any] | None] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._number = 0
        self._answered = 0
        self._ended: WorkerDiedError | None = None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # threads of their own: an interrupted read would lose half an answer, and a worker that
        # hangs takes no command
        reading = (self._process.stdout, self._answers)
        writing = (self._process.stdin, self._commands)
        threading.Thread(target=_read, args=reading, daemon=True).start()
        threading.Thread(target=_write, args=writing, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def number(self) -> int:
        """The system's number of the process."""
        return self._process.pid

    def call(self, command: str, *arguments: object, report: ProgressCallback = no_progress) -> Any:  # noqa: ANN401  # each command has its own
        """The command's value; `report` gets its progress."""
        self._number += 1
        if self._ended is None:
            self._commands.put(pickle.dumps((self._number, command, arguments), PROTOCOL))
        self._silence.broken()
        while True:
            number, kind, value = self._next_answer()
            if number != self._number:  # of a call that was interrupted
                continue
            if kind == PROGRESS:
                report(*value)
                continue
            self._answered = number
            if isinstance(value, TwofourError):
                raise value
            return value

    def _next_answer(self) -> tuple[int, str, Any]:
        """What it sends next, progress too; raises WorkerDiedError where nothing will come."""
        while self._ended is None:
            try:
                answer = self._answers.get(timeout=min(LOOKING_S, self._silence.limit_s))
            except queue.Empty:
                if self._has_ended() and self._answers.empty():  # a child of it holds the pipe
                    self._ended = self._died()
                elif self._silence.too_long():
                    self._kill()
                    ending = f"no sign of life for {self._silence.limit_s:.0f} s"
                    message = f"its process showed {ending} and was ended"
                    self._ended = WorkerDiedError(message, ending=ending)
                continue
            if answer is not None:
                return answer
            self._ended = self._died()
        raise WorkerDiedError(self._ended.message, ending=self._ended.ending)

    def close(self) -> None:
        """End it and its children, by force where it does not end by itself."""
        self._commands.put(None)
        try:
            if self._answered != self._number:  # interrupted: half-written files are removed
                self._signal(signal.SIGINT)
            self._wait()
        finally:
            self._kill()
            self._stderr.close()

    def _kill(self) -> None:
        """End all, then wait: until then its number is nobody else's."""
        self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        self._process.wait()

    def _wait(self) -> None:
        """Wait for a moment until it ends; its number is not reused before `_kill`."""
        deadline = time.monotonic() + _CLOSING_S
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(_ENDING_S)

    def _has_ended(self) -> bool:
        if self._process.returncode is None and hasattr(os, "waitid"):
            ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
            with contextlib.suppress(ChildProcessError):
                return os.waitid(os.P_PID, self._process.pid, ended) is not None
        return self._process.poll() is not None

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker and the processes that it started, such as compilers."""
        if self._process.returncode is not None:  # its number may be another's by now
            return
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _died(self) -> WorkerDiedError:
        self._wait()
        self._kill()
        code = self._process.returncode
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _LAST_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        why = f": {lines[-1]}" if lines else ""
        if code >= 0:
            message = f"its process ended with code {code}{why}"
            return WorkerDiedError(message, ending=f"exit code {code}")
        ending = signal.Signals(-code).name  # -11: SIGSEGV
        if ending == "SIGKILL":
            why = ", as the system does where memory runs out"
        return WorkerDiedError(f"its process was ended by {ending}{why}", ending=ending)


def _start(
    service: str, threads: int | None, path: Sequence[str], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    # others than texts are ignored in sys.path, and may have no literal
    entries = [entry for entry in path if isinstance(entry, str)]
    code = _START.format(path=entries, service=service, parent=os.getpid())
    environment = dict(os.environ)
    if threads is not None:
        environment = {**_IDLE, **environment, **dict.fromkeys(_THREADS, str(threads))}
    try:
        return subprocess.Popen(  # noqa: S603  # ourselves
            [sys.executable, *_SAFE_PATH, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise BuildFailedError(
            f"no worker process can be started: {error.strerror or error}"
        ) from error


def _read(stream: IO[bytes], answers: queue.SimpleQueue[tuple[int, str, Any] | None]) -> None:
    try:
        while True:
            answers.put(pickle.load(stream))  # noqa: S301  # our own worker
    except (EOFError, pickle.UnpicklingError, OSError, ValueError):
        answers.put(None)


def _write(stream: IO[bytes], commands: queue.SimpleQueue[bytes | None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while (command := commands.get()) is not None:
            stream.write(command)
            stream.flush()
    with contextlib.suppress(OSError, ValueError):
        stream.close()
