"""Commands as processes of their own at a hundredth of the price: forks of one that imported all.

The streams of a fork are what a test asks for (a file, a pipe whose reader has gone, a full disk,
closed, a terminal); Python's own are made anew as at its start.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

KEPT, GONE, FULL, CLOSED = "kept", "gone", "full", "closed"
_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def said(self) -> str:
        return self.stderr.decode()

    @property
    def shown(self) -> str:
        return self.stdout.decode()


class Commands:
    """The process that forks; `run` gives what a command of these arguments does."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Commands:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def run(
        self,
        *arguments: str | Path,
        stdout: str = KEPT,
        stderr: str = KEPT,
        cwd: Path | None = None,
        **more: Any,
    ) -> Ended:
        """`stdout` and `stderr` are KEPT, GONE, FULL, CLOSED or the columns of a terminal.

        `encoding` is that of Python's streams, `environment` is added (None takes away), and
        `gone` is a folder to be removed once it is the current one.
        """
        case = {
            "arguments": [str(argument) for argument in arguments],
            "stdout": stdout,
            "stderr": stderr,
            "cwd": None if cwd is None else str(cwd),
            **more,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case).encode() + b"\n")
        self._process.stdin.flush()
        code, out, err = json.loads(self._process.stdout.readline())
        return Ended(code=code, stdout=out.encode("latin-1"), stderr=err.encode("latin-1"))


def serve() -> None:
    """Fork for each case that stdin brings."""
    import twofour.cli.app
    import twofour.pipeline.reporting
    import twofour.pipeline.validating
    import twofour.reports.csv
    import twofour.reports.html
    import twofour.reports.log_document
    import twofour.reports.markdown
    import twofour.reports.terminal  # noqa: F401  # all that forks share

    for line in sys.stdin.buffer:
        case = json.loads(line)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(_place(case[name])) for name in ("stdout", "stderr")]
            child = os.fork()
            if not child:
                _become(case, [place.written for place in files])
                return
            code = _end_of(child)
            found = [place.found().decode("latin-1") for place in files]
        sys.__stdout__.write(json.dumps([code, *found]) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]


@dataclass
class _Place:
    written: int | None
    kept: io.BufferedRandom | None = None

    def found(self) -> bytes:
        if self.kept is None:
            return b""
        self.kept.seek(0)
        return self.kept.read()


@contextlib.contextmanager
def _place(kind: str | int) -> Iterator[_Place]:
    """What the descriptor of this kind is in the child; None where it is closed."""
    if kind == CLOSED:
        yield _Place(None)
    elif kind == FULL:
        with Path("/dev/full").open("wb") as full:
            yield _Place(full.fileno())
    elif kind == GONE:
        reader, writer = os.pipe()
        os.close(reader)
        yield _Place(writer)
        os.close(writer)
    elif kind == KEPT:
        with tempfile.TemporaryFile() as kept:
            yield _Place(kept.fileno(), kept)
    else:
        with _terminal(int(kind)) as place:
            yield place


@contextlib.contextmanager
def _terminal(columns: int) -> Iterator[_Place]:
    """A terminal whose output is copied to a file by a process of its own."""
    import fcntl
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with tempfile.TemporaryFile() as kept:
        copier = os.fork()
        if not copier:
            for number in {*range(3, 256)} - {ours, kept.fileno()}:
                with contextlib.suppress(OSError):
                    os.close(number)
            with contextlib.suppress(OSError):
                while found := os.read(ours, 1 << 16):
                    os.write(kept.fileno(), found)
            os._exit(0)
        place = _Place(theirs, kept)
        place.found = lambda: _read_to_end(theirs, copier, kept)  # type: ignore[method-assign]
        yield place
    os.close(ours)


def _read_to_end(theirs: int, copier: int, kept: io.BufferedRandom) -> bytes:
    os.close(theirs)
    os.waitpid(copier, 0)
    kept.seek(0)
    return kept.read()


def _become(case: Mapping[str, Any], places: Sequence[int | None]) -> None:
    signal.alarm(_SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = _stream(0, "r", "utf-8")
    for number, place in enumerate(places, 1):
        if place is None:
            os.close(number)
        else:
            os.dup2(place, number)
    encoding = case.get("encoding", "utf-8")
    sys.stdout = None if places[0] is None else _stream(1, "w", encoding)
    sys.stderr = None if places[1] is None else _stream(2, "w", encoding)
    if case["cwd"] is not None:
        os.chdir(case["cwd"])
    if case.get("gone"):
        Path(case["cwd"]).rmdir()
    for name, value in case.get("environment", {}).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    sys.argv = ["twofour", *case["arguments"]]
    from twofour.cli import main

    try:
        main()
    except SystemExit as end:
        os._exit(_flushed(end.code))
    os._exit(_flushed(0))


def _flushed(code: Any) -> int:
    """What Python makes of an exit code: 120 where a standard stream cannot be flushed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            return 120
    return int(code or 0)


def _stream(number: int, mode: Literal["r", "w"], encoding: str) -> TextIO:
    errors = "backslashreplace" if number == 2 else "strict"
    return open(number, mode, encoding=encoding, errors=errors, closefd=False)


def _end_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    serve()
