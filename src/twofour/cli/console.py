"""Where the command line talks: data on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, cast

from twofour.cli.streams import AsIs
from twofour.words import printable, printable_lines

if TYPE_CHECKING:  # rich takes a third of the time of --help
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import TextIO

    from rich.console import RenderableType
    from rich.progress import TaskID

    from twofour.errors import TwofourError
    from twofour.reports.terminal import PrintableConsole

_UNFOLDED = 1 << 20
"""Columns; no name in a log is longer."""
_LONGEST_MESSAGE = 2_000
_reports: TextIO | None = None
"""Where reports go while a command runs; None: sys.stdout."""


@contextlib.contextmanager
def reports_apart() -> Iterator[None]:
    """Have stdout to reports alone within the block: what anyone else prints goes to stderr."""
    global _reports  # the streams belong to the process
    outer, before = _reports, sys.stdout
    _reports, sys.stdout = before, sys.stderr
    try:
        yield
    finally:
        _reports, sys.stdout = outer, before


def _stdout() -> TextIO:
    return sys.stdout if _reports is None else _reports


def data_console() -> PrintableConsole:
    """Console of stdout, for reports; colour only on a terminal and without NO_COLOR."""
    from twofour.reports.terminal import PLAIN_WIDTH, PrintableConsole

    width = None if _stdout().isatty() else PLAIN_WIDTH
    return PrintableConsole(_as_is(_stdout()), width=width, no_color=_no_color())


def talk_console() -> PrintableConsole:
    """Console of stderr, for progress and errors."""
    from twofour.reports.terminal import PrintableConsole

    return PrintableConsole(_as_is(sys.stderr), soft_wrap=True, no_color=_no_color())


def say(text: str) -> None:
    """A message on stderr, taken literally; further lines of it, a library's say, are set in."""
    talk_console().print("\n  ".join(map(printable, text.split("\n"))))


def say_error(error: TwofourError) -> None:
    """What went wrong, and on a line of its own what to do about it."""
    say(f"error: {_shortened(error.message)}")
    if error.hint is not None:
        say(f"hint: {_shortened(error.hint)}")


def show(report: RenderableType) -> None:
    """A report on stdout; a text is taken literally."""
    if isinstance(report, str):
        show_text(report)
    else:
        data_console().print(report)


def show_rows(renderable: RenderableType) -> None:
    """A table on stdout; where that is no terminal every row is one line and no name is folded."""
    if _stdout().isatty():
        show(renderable)
        return
    from twofour.reports.terminal import plain_text

    show_text(plain_text(renderable, width=_UNFOLDED, encoding=_encoding()))


def show_text(text: str) -> None:
    """A document on stdout, and nothing else there."""
    _as_is(_stdout()).write(printable_lines(text))


def show_record(record: object) -> None:
    """A record on stdout as JSON, and nothing else there."""
    from twofour.store import to_json

    show_json((to_json(record),))


def show_json(pieces: Iterable[str]) -> None:
    """JSON on stdout piece by piece, in ASCII where the encoding of stdout has not all of it."""
    stream = _as_is(_stdout())
    for piece in pieces:
        stream.write(_encodable(piece))


def _encodable(text: str) -> str:
    if text.isascii():
        return text
    try:
        text.encode(_encoding())
    except UnicodeEncodeError:
        from twofour.store import json_in_ascii

        return json_in_ascii(text)
    return text


def _encoding() -> str:
    return _stdout().encoding or "utf-8"


def _as_is(stream: TextIO) -> TextIO:
    """The stream for a text that is printable already, or rich's."""
    return cast("TextIO", AsIs(stream))


def _shortened(text: str) -> str:
    """Names in files may be of any length; begin and end of a message tell what is wrong."""
    if len(text) <= _LONGEST_MESSAGE:
        return text
    half = _LONGEST_MESSAGE // 2
    return f"{text[:half]} ... {text[-half:]}"


def _no_color() -> bool:
    return bool(os.environ.get("NO_COLOR"))


def show_result(
    record: object,
    view: Callable[[], RenderableType],
    folder: Path,
    *,
    json: bool,
    quiet: bool,
) -> None:
    """What a command that fills a run folder says at its end: the record, or its view and where."""
    if json:
        show_record(record)
        return
    show(view())
    if not quiet:
        say(f"everything is in {folder}")


class TerminalProgress:
    """Draws the stages of a run on stderr: a spinner and bar on a terminal, nothing elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = talk_console()
        self._console = console
        self._quiet = quiet
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, name: str, title: str) -> None:  # noqa: ARG002  # the Protocol's names
        """Start a new line for the stage."""
        self._clear()
        self._title = printable(title)
        self._task = self._bar.add_task(self._title, total=None)

    def done(self, name: str, *, seconds: float, reused: bool) -> None:  # noqa: ARG002  # Protocol
        """Leave a finished line behind."""
        self._clear()
        if not self._quiet and self._console.is_terminal:
            from rich.text import Text

            mark = "as before" if reused else f"{seconds:.1f} s"
            self._bar.console.print(Text.assemble(f"  {self._title} ", (f"({mark})", "dim")))

    def step(self, text: str, done: int, total: int | None) -> None:
        """Move the bar of the running stage."""
        if self._task is not None:
            description = f"{self._title}: {printable(text)}" if text else self._title
            self._bar.update(self._task, description=description, completed=done, total=total)

    def note(self, text: str) -> None:
        """Say something that matters even when the bar is not drawn."""
        if not self._quiet:
            self._bar.console.print(printable(text))

    def _clear(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
