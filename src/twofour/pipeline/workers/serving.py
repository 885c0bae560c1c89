"""The worker's side of its process: commands on stdin, answers on stdout, prints on stderr."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from twofour.errors import BuildFailedError, TwofourError

PROTOCOL = 5
"""Of pickle: arrays go without a copy of their own."""
PROGRESS = "progress"
VALUE = "value"
_PR_SET_PDEATHSIG = 1


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
        answers.value(_value(getattr(service, command), arguments))


def _value(command: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
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
