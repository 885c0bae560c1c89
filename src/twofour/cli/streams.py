"""stdout and stderr of the process: what is written there is shown, never obeyed, and never raises.

A reader that goes away, a full disk or a descriptor that was closed is remembered, and told at the
end: a command decides its exit code as if everything had been read.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from typing import TYPE_CHECKING, TextIO

from twofour.errors import BadInputError
from twofour.words import printable_lines

if TYPE_CHECKING:
    from typing_extensions import Buffer

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
"""Select Graphic Rendition, ECMA-48 8.3.117: all that prints of libraries lose without a trace."""
_NOWHERE = -1
"""A descriptor that no file has: writing to it fails as it does to one that was closed."""


class Outlet(io.RawIOBase):
    """A descriptor that takes all it is given; from the first refusal on it goes nowhere."""

    def __init__(self, number: int, *, is_open: bool, name: str = "") -> None:
        super().__init__()
        self._number = number
        self._to = number if is_open else _NOWHERE
        self.refused: OSError | None = None
        """What the system said to the first write that failed."""
        self.name = name
        self.mode = "w"

    def write(self, data: Buffer, /) -> int:
        """Give as much to the system as it takes; all, where it takes nothing any more."""
        view = memoryview(data).cast("B")
        while self.refused is None:
            try:
                return os.write(self._to, view)
            except BlockingIOError:  # a pipe that its other end has set to O_NONBLOCK
                select.select([], [self._to], [])
            except OSError as error:
                self.refused = error
        return view.nbytes

    def fileno(self) -> int:
        """Of the descriptor that is written to."""
        return self._number

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._to != _NOWHERE and os.isatty(self._to)

    def writable(self) -> bool:
        """It always is."""
        return True


class Stream(io.TextIOWrapper):
    """Text on an outlet; a character that its encoding has not is an escape.

    `write` is for libraries, warnings and the user's code, whose texts hold names from models:
    what a terminal might obey is an escape. A carriage return that begins a text is a progress
    bar's and stays, colours are left out. `write_as_is` is for what is safe already.
    """

    def __init__(self, outlet: Outlet, encoding: str, *, line_buffering: bool) -> None:
        super().__init__(
            io.BufferedWriter(outlet),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=line_buffering,
        )

    def write(self, text: str, /) -> int:
        """Write what anyone else prints."""
        super().write(_harmless(text))
        return len(text)

    def write_as_is(self, text: str) -> int:
        """Write a text without looking into it."""
        return super().write(text)


class AsIs:
    """A file for rich, whose own colours and cursor movements are to reach the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.write = stream.write_as_is if isinstance(stream, Stream) else stream.write

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _harmless(text: str) -> str:
    text = text.replace("\r\n", "\n")
    start = "\r" if text.startswith("\r") else ""
    return start + printable_lines(_COLOURS.sub("", text.removeprefix("\r")))


class Streams:
    """The standard streams of one command, from its start to its exit code."""

    def __init__(self) -> None:
        """Put them in the place of Python's; a descriptor that is closed is held by nothing else.

        Else the next file that is opened would get its number, and prints of C libraries with it.
        What is printed to descriptor 1 past Python goes to stderr: reports have a number of their
        own.
        """
        self._out = Outlet(_apart(1), is_open=sys.stdout is not None, name="<stdout>")
        self._talk = Outlet(2, is_open=sys.stderr is not None, name="<stderr>")
        self.stdout = _stream(self._out, sys.stdout, line_buffering=self._out.isatty())
        self.stderr = _stream(self._talk, sys.stderr, line_buffering=True)
        for number in range(3):
            _hold(number)
        if self._out.fileno() != 1:
            os.dup2(2, 1)
        sys.stdout, sys.stderr = self.stdout, self.stderr

    def finish(self, code: int) -> int:
        """Write what is left; the exit code: `code`, or 2 in place of 0 where output was lost.

        A reader that went away has read what it wanted. Where stderr takes nothing, nobody can be
        told, and nothing was lost that counts.
        """
        self.stdout.flush()
        refused = self._out.refused
        if refused is not None and refused.errno != errno.EPIPE:
            lost = BadInputError(
                f"cannot write to stdout: {refused.strerror}",
                hint="make room or write elsewhere; what is said to be in a folder is there",
            )
            self.stderr.write(f"error: {lost}\n")
            code = code or lost.exit_code
        self.stderr.flush()
        return code


def _stream(outlet: Outlet, before: TextIO | None, *, line_buffering: bool) -> Stream:
    if before is not None:
        before.flush()
    encoding = "utf-8" if before is None else before.encoding
    return Stream(outlet, encoding, line_buffering=line_buffering)


def _apart(number: int) -> int:
    """Another number for the same file, above the three; the number itself where it is closed."""
    try:
        held = [os.dup(number)]
    except OSError:
        return number
    while held[-1] < 3:
        held.append(os.dup(number))
    for low in held[:-1]:
        os.close(low)
    return held[-1]


def _hold(number: int) -> None:
    try:
        os.fstat(number)
    except OSError:
        # the lowest number that is free, which is this one: those below are held
        os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
