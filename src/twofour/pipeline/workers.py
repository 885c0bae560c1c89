"""Processes of their own for whatever loads a model into a library that may crash or hang.

A worker as its parent sees it (started, asked, closed; its death is an error), and its own side:
commands on stdin, answers on stdout, prints on stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from twofour.engines.protocol import ProgressCallback, no_progress
from twofour.errors import BuildFailedError, TwofourError
from twofour.pipeline.deadlines import LEFT_S, LOOKING_S, Silence

PROTOCOL = 5
"""Of pickle: arrays go without a copy of their own."""
PROGRESS = "progress"
VALUE = "value"
_PR_SET_PDEATHSIG = 1
_START = (
    "import sys; sys.path[:] = {path!r}; "
    "from twofour.pipeline.workers import main; main({service!r}, {parent})"
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
_OWN_FAULTS = ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
"""Signals that a program brings on itself; the others come from outside, SIGKILL from a system
without memory, SIGBUS from a file system without space."""
_MEMORY = re.compile(
    r"bad.?alloc|out.?of.?memory|MemoryAllocation|MemoryError|(not enough|insufficient) memory|"
    r"((failed|unable) to|can't|cannot|could not) allocate|could not be allocated|ALLOC_FAILED|"
    r"available memory of \d+ is smaller than requested",
    re.IGNORECASE,
)
"""Of C++, Python, numpy, torch, ONNX Runtime, TensorRT and CUDA's libraries."""
_PASSING = re.compile(
    r"no space left on device|disk quota exceeded|too many open files|file table overflow|"
    r"resource temporarily unavailable|can't start new thread|no worker process can be started|"
    r"no sign of life|no answer for|input/output error|"
    r"\bSIG(KILL|TERM|INT|HUP|QUIT|BUS|ALRM|XCPU|XFSZ|PIPE|PWR|STOP|USR1|USR2)\b",
    re.IGNORECASE,
)
"""What else comes from a machine that is short of something, or from somebody else."""


class Answers:
    """What goes back to the parent; progress may come from any thread of a library."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.number = 0
        """Of the command that is being done."""

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
    while True:
        try:
            answers.number, command, arguments = pickle.load(commands)  # noqa: S301  # our parent
        except EOFError:
            return
        answers.value(outcome(getattr(service, command), arguments))


def outcome(command: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
    """What the command gives, or the TwofourError that it ends in; a bug is one here too."""
    try:
        return command(*arguments)
    except TwofourError as error:
        return error
    except MemoryError:
        return BuildFailedError("out of memory")
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a library's, or the user's code
        text = (str(error).strip() or "no message").splitlines()[0]
        return BuildFailedError(f"{type(error).__name__}: {text}")


def main(service: str, parent: int) -> None:
    """Serve the parent; whatever prints on stdout (libraries, user code) is sent to stderr.

    `service` is a `package.module:Class`, made with the callback for its progress.
    """
    _end_with(parent)
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    commands = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    module, _, name = service.partition(":")
    answers = Answers(stream)
    serve(getattr(importlib.import_module(module), name)(answers.report), commands, answers)


def _end_with(parent: int) -> None:
    """Have Linux kill this process with its parent, which it may not notice inside a long call.

    Elsewhere it ends with the call, when it finds its input at an end.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        sys.exit()


class WorkerDiedError(BuildFailedError):
    """The process ended inside a call, or was ended because it showed no sign of life."""

    def __init__(self, message: str, *, ending: str, passing: bool) -> None:
        super().__init__(message)
        self.ending = ending
        """SIGSEGV, say."""
        self.passing = passing
        """It may go well another time: memory ran out, or somebody ended the process."""


def is_out_of_memory(text: str) -> bool:
    """Whether a library's message says that memory ran out (`std::bad_alloc` is such a one)."""
    return _MEMORY.search(text) is not None


def may_pass(text: str) -> bool:
    """Whether a message tells of what may be otherwise another time, and so is no result.

    Memory, space, open files or threads ran out, or a process was ended from outside.
    """
    return is_out_of_memory(text) or _PASSING.search(text) is not None


class WorkerProcess:
    """One worker; `call` raises what the command raised, and WorkerDiedError when it died.

    `service` is the `package.module:Class` whose methods are the commands; `threads` of None leaves
    the libraries' own defaults. It is in a process group of its own, so that Ctrl-C reaches the
    parent alone, and it ends when the parent does, however that ends. Modules come from `path`, by
    default the parent's sys.path. Raises BuildFailedError where no process can be started.
    """

    def __init__(
        self,
        service: str,
        threads: int | None,
        *,
        path: Sequence[str] | None = None,
        silence_s: float | None = None,
    ) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = _started(
            [sys.executable, *_SAFE_PATH, "-c", _code(service, path)],
            self._stderr,
            _environment(threads),
        )
        self._silence = Silence(self._process.pid, silence_s)
        self._answers: queue.SimpleQueue[tuple[int, str, Any] | None] = queue.SimpleQueue()
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._number = 0
        self._answered = 0
        self._longest_s: dict[str, float] = {}
        self._ended: WorkerDiedError | None = None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # threads of their own: an interrupted read would lose half an answer, and a worker that
        # hangs takes no command
        for work in (
            threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True),
            threading.Thread(
                target=_write, args=(self._process.stdin, self._commands), daemon=True
            ),
        ):
            work.start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def number(self) -> int:
        """The system's number of the process."""
        return self._process.pid

    def call(self, command: str, *arguments: object, report: ProgressCallback = no_progress) -> Any:  # noqa: ANN401  # each command has its own
        """The command's value; `report` is told the progress that it reports."""
        self.begin(command, *arguments)
        return self.answer(report)

    def repeat(self, command: str, *arguments: object) -> Any:  # noqa: ANN401  # as `call`
        """As `call`, for what takes as long each time: the longest so far sets the deadlines."""
        started = time.monotonic()
        self.begin(command, *arguments)
        value = self.answer(longest_s=self._longest_s.get(command))
        took_s = time.monotonic() - started
        self._longest_s[command] = max(took_s, self._longest_s.get(command, 0.0))
        return value

    def forget(self, command: str) -> None:
        """What comes next of this command may take longer than what was repeated."""
        self._longest_s.pop(command, None)

    def begin(self, command: str, *arguments: object) -> None:
        """Start a command; `answer` gives its value, and other work can be done before."""
        self._number += 1
        if self._ended is None:
            self._commands.put(pickle.dumps((self._number, command, arguments), PROTOCOL))

    def answer(
        self,
        report: ProgressCallback = no_progress,
        *,
        longest_s: float | None = None,
        within_s: float = math.inf,
    ) -> Any:  # noqa: ANN401  # as `call`
        """The value of the command that was begun last.

        `longest_s`: what others like it took; WorkerDiedError is raised after `within_s` too.
        """
        self._silence.broken()
        if self._number - self._answered > 1:  # busy with a call that was interrupted
            within_s = min(within_s, LEFT_S)
        silent_s, busy_s = self._silence.limits(longest_s)
        deadlines = silent_s, min(busy_s, within_s)
        while True:
            answer = self._next_answer(*deadlines)
            number, kind, value = answer
            if number != self._number:  # of a call that was interrupted
                continue
            if kind == PROGRESS:
                report(*value)
                continue
            self._answered = number
            if isinstance(value, TwofourError):
                raise value
            return value

    def _next_answer(self, silent_s: float, busy_s: float) -> tuple[int, str, Any]:
        """What it sends next, progress too; raises WorkerDiedError where nothing will come."""
        while self._ended is None:
            try:
                answer = self._answers.get(timeout=min(LOOKING_S, silent_s, busy_s))
            except queue.Empty:
                if self._has_ended() and self._answers.empty():  # a child of it holds the pipe
                    self._ended = self._died()
                elif self._silence.too_long(silent_s):
                    self._ended = self._hung("showed", f"no sign of life for {silent_s:.0f} s")
                elif self._silence.waited_s > busy_s:
                    self._ended = self._hung("gave", f"no answer for {busy_s:.0f} s")
                continue
            if answer is not None:
                return answer
            self._ended = self._died()
        raise WorkerDiedError(
            self._ended.message, ending=self._ended.ending, passing=self._ended.passing
        )

    def close(self) -> None:
        """End it and its children, by force where it does not end by itself."""
        self._commands.put(None)
        try:
            if self._answered != self._number:  # interrupted: half-written files are removed
                self._signal(signal.SIGINT)
            self._wait(_CLOSING_S)
        finally:
            self._kill()
            self._stderr.close()

    def _kill(self) -> None:
        """Before it is waited for, so that its number, which its children have as their group's,
        is nobody else's.
        """
        self._signal(getattr(signal, "SIGKILL", signal.SIGTERM))
        self._process.wait()

    def _wait(self, seconds: float) -> None:
        """For its end, and no longer; its number stays its own."""
        deadline = time.monotonic() + seconds
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(_ENDING_S)

    def _has_ended(self) -> bool:
        if self._process.returncode is None and hasattr(os, "waitid"):
            ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
            with contextlib.suppress(ChildProcessError):
                return os.waitid(os.P_PID, self._process.pid, ended) is not None
        return self._process.poll() is not None

    def _signal(self, number: signal.Signals) -> None:
        """To the worker and the processes it started, compilers say."""
        if self._process.returncode is not None:  # its number may be another's by now
            return
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    def _hung(self, did: str, ending: str) -> WorkerDiedError:
        self._kill()
        return WorkerDiedError(
            f"its process {did} {ending} and was ended", ending=ending, passing=True
        )

    def _died(self) -> WorkerDiedError:
        self._wait(_CLOSING_S)
        self._kill()
        code = self._process.returncode
        lines = self._last_lines()
        last = f": {lines[-1]}" if lines else ""
        if code >= 0:
            ending, told = f"exit code {code}", f"its process ended with code {code}{last}"
        else:
            ending = _signal_name(-code)
            killed = ", as the system does where memory runs out" if ending == "SIGKILL" else last
            told = f"its process was ended by {ending}{killed}"
        outside = code < 0 and ending not in _OWN_FAULTS
        return WorkerDiedError(told, ending=ending, passing=outside or may_pass(" ".join(lines)))

    def _last_lines(self) -> list[str]:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _LAST_BYTES))
        return self._stderr.read().decode(errors="replace").strip().splitlines()[-5:]


def _code(service: str, path: Sequence[str] | None) -> str:
    # others than texts are ignored in sys.path, and may have no literal
    entries = [str(entry) for entry in sys.path if isinstance(entry, str)]
    return _START.format(
        path=list(path) if path is not None else entries, service=service, parent=os.getpid()
    )


def _environment(threads: int | None) -> Mapping[str, str]:
    if threads is None:
        return os.environ
    return {**_IDLE, **os.environ, **dict.fromkeys(_THREADS, str(threads))}


def _started(
    command: Sequence[str], stderr: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(  # noqa: S603  # ourselves
            command,
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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


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
