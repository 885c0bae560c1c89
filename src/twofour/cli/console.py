"""Where the command line talks, data on stdout and all else on stderr, and where errors end.

Errors become a message and an exit code (errors.py); a bug of ours ends in 1, and its traceback
goes to a file.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import functools
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from twofour.errors import INTERRUPTED, BadInputError, TwofourError, first_line
from twofour.packages import __version__, missing
from twofour.words import printable, printable_lines

if TYPE_CHECKING:  # rich takes a third of the time of --help
    from typing import TextIO

    from rich.console import RenderableType
    from rich.progress import TaskID
    from typing_extensions import Buffer

    from twofour.records.weights import Report
    from twofour.reports.terminal import PrintableConsole

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
"""Select Graphic Rendition, ECMA-48 8.3.117."""
_UNFOLDED = 1 << 20
"""Columns; no name in a log is longer."""
_reports: TextIO | None = None
"""Where reports go while a command runs; None: sys.stdout."""


def _lead_nowhere(number: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


class _Descriptor(io.FileIO):
    """A descriptor whose reader may go away: it has read what it wanted, the rest goes nowhere."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _lead_nowhere(self.fileno())
            return memoryview(data).nbytes


class Stream(io.TextIOWrapper):
    """A text stream of the process on which a terminal finds nothing to obey.

    `write` shows control characters as escapes; a carriage return that begins a text stays, for
    progress bars. `write_as_is` is for what is safe already.
    """

    def __init__(self, number: int, encoding: str) -> None:
        raw = _Descriptor(number, "w", closefd=False)
        super().__init__(
            io.BufferedWriter(raw),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=number == 2 or raw.isatty(),
        )

    def write(self, text: str, /) -> int:
        """Write what anyone else prints."""
        start = "\r" if text.startswith("\r") else ""
        lines = text.removeprefix("\r").replace("\r\n", "\n")
        super().write(start + printable_lines(_COLOURS.sub("", lines)))
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


def open_streams() -> None:
    """Replace Python's streams by streams of ours; descriptor 1 of C libraries leads to stderr."""
    sys.stdout = Stream(os.dup(1), sys.stdout.encoding)
    sys.stderr = Stream(2, sys.stderr.encoding)
    os.dup2(2, 1)


def flushed(code: int) -> int:
    """Write what is left of the output; the exit code: `code`, or 2 where output is lost."""
    try:
        sys.stdout.flush()
    except OSError as error:
        lost = BadInputError(f"cannot write to stdout: {error.strerror}", hint="make room")
        _lead_nowhere(sys.stdout.fileno())
        say_error(lost)
        return code or lost.exit_code
    return code


@contextlib.contextmanager
def reports_apart() -> Iterator[None]:
    """Have stdout to reports alone within the block: what anyone else prints goes to stderr."""
    global _reports  # noqa: PLW0603  # the streams belong to the process
    outer = _reports
    before = sys.stdout
    _reports = before
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        _reports = outer
        sys.stdout = before


def _stdout() -> TextIO:
    return sys.stdout if _reports is None else _reports


def talk_console() -> PrintableConsole:
    """Console of stderr, for progress and errors."""
    from twofour.reports.terminal import PrintableConsole

    return PrintableConsole(_as_is(sys.stderr), soft_wrap=True)


def say(text: str) -> None:
    """A message on stderr, taken literally; further lines of it, a library's say, are set in."""
    talk_console().print("\n  ".join(map(printable, text.split("\n"))))


def say_error(error: TwofourError) -> None:
    """What went wrong, and on a line of its own what to do about it."""
    say(f"error: {error.message}")
    if error.hint is not None:
        say(f"hint: {error.hint}")


def show(report: RenderableType) -> None:
    """A report on stdout, in colour on a terminal alone; a text is taken literally."""
    if isinstance(report, str):
        show_text(report)
        return
    from twofour.reports.terminal import PLAIN_WIDTH, PrintableConsole

    width = None if _stdout().isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    PrintableConsole(_as_is(_stdout()), width=width).print(report)


def document_view(record: Report) -> RenderableType:
    """The document of a record, as a terminal shows it."""
    from twofour.reports import document_of
    from twofour.reports.terminal import render

    return render(document_of(record))


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
    """A record on stdout as JSON, in ASCII where that is not UTF-8, and nothing else there."""
    from twofour.store import json_in_ascii, to_json

    text = to_json(record)
    if codecs.lookup(_encoding()).name != "utf-8":
        text = json_in_ascii(text)
    _as_is(_stdout()).write(text)


def _encoding() -> str:
    return _stdout().encoding or "utf-8"


def _as_is(stream: TextIO) -> TextIO:
    """The stream for a text that is printable already, or rich's."""
    return cast("TextIO", AsIs(stream))


def show_result(
    record: object,
    view: Callable[[], RenderableType],
    place: Path | str,
    *,
    json: bool,
    quiet: bool,
    then: str | None = None,
) -> None:
    """End a command that fills a run folder: its record, or its view, its place and what next."""
    if json:
        show_record(record)
        return
    show(view())
    if not quiet:
        say(f"Results: {place}")
        if then is not None:
            say(f"Next: {then}")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Lead nowhere what others print within the block, from Python or from C."""
    kept = os.dup(2)
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115  # stays open: log handlers keep it
    try:
        _lead_nowhere(2)
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


class TerminalProgress:
    """Draws the stages of a run on a terminal, else writes a line for each that begins to stderr.

    While `quiet`, nobody prints there.
    """

    def __init__(self, *, quiet: bool) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        console = talk_console()
        self._quiet = quiet
        self._draws = console.is_terminal and not quiet
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._draws,
        )
        self._task: TaskID | None = None
        self._silence = silence() if quiet else contextlib.nullcontext()

    def __enter__(self) -> TerminalProgress:
        self._bar.start()
        self._silence.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._silence.__exit__(None, None, None)
        if self._draws:  # rich before 14.3 ends a bar that is not drawn with an empty line
            self._bar.stop()

    def stage(self, name: str, title: str) -> None:  # noqa: ARG002  # the Protocol's names
        """Start a new line for the stage."""
        self._clear()
        self._title = printable(title)
        if not self._draws:
            self.note(title)
        self._task = self._bar.add_task(self._title, total=None)

    def done(self, name: str, *, seconds: float) -> None:  # noqa: ARG002  # the Protocol's names
        """Leave a finished line behind."""
        self._clear()
        if self._draws:
            from rich.text import Text

            time = (f"({seconds:.1f} s)", "dim")
            self._bar.console.print(Text.assemble(f"  {self._title} ", time))

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


P = ParamSpec("P")
T = TypeVar("T")
_BUG = 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_traceback_folder: Path | None = None


def keep_tracebacks_in(folder: Path) -> None:
    """Name the run folder; a traceback of ours goes there once the folder exists."""
    global _traceback_folder  # noqa: PLW0603  # one process runs one command
    _traceback_folder = folder


@contextlib.contextmanager
def running(out: Path | None, *, quiet: bool) -> Iterator[TerminalProgress]:
    """Progress on stderr while a run folder is filled; tracebacks of ours go there."""
    if out is not None:
        keep_tracebacks_in(out)
    with TerminalProgress(quiet=quiet) as progress:
        yield progress


def guarded(command: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command so that whatever it raises ends in the exit code of its kind."""
    import typer  # the streams are opened before it is known whether it is installed

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with reports_apart():
                return command(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            say(f"interrupted{_after_interrupt(command.__name__)}")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # noqa: BLE001  # the one place where a bug of ours ends
            known = _known(error)
            if known is None:
                say_error(TwofourError(f"{type(error).__name__}: {error}"))
                saved = _saved_traceback()
                say(f"This is a bug in twofour {__version__}; the traceback is {saved}")
                raise typer.Exit(_BUG) from None
            say_error(known)
            raise typer.Exit(known.exit_code) from None

    return run


def _after_interrupt(command: str) -> str:
    if command == "compare":
        return " before the first round: nothing was kept"
    if _traceback_folder is not None:
        return ": the same command with --resume continues"
    return ""


def _known(error: Exception) -> TwofourError | None:
    """The error to tell the user; None for a bug of ours."""
    if isinstance(error, TwofourError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return missing(error)
    if isinstance(error, OSError) and error.strerror is not None:
        return _refused(error, error.strerror)
    return _of_memory(error)


def _refused(error: OSError, why: str) -> TwofourError | None:
    """What the system refused; None: a bug."""
    if error.errno in _FULL:
        place = error.filename or _traceback_folder
        return BadInputError(
            why if place is None else f"{why}: {place}",
            hint="make room, or choose another disk (--out, and TMPDIR for temporary files), then "
            "run the same command again",
        )
    if error.filename is not None:
        return BadInputError(f"{error.filename}: {why}")
    if isinstance(error, FileNotFoundError):
        return BadInputError(why, hint="the current folder must be there, and TMPDIR writable")
    return None


def _of_memory(error: Exception) -> TwofourError | None:
    """What Python, numpy or torch say in this process where memory runs out."""
    if not isinstance(error, MemoryError):
        from twofour.workers.process import is_out_of_memory

        if not isinstance(error, RuntimeError) or not is_out_of_memory(str(error)):
            return None
    return BadInputError(
        f"memory ran out: {first_line(error)}",
        hint="free memory, or take a smaller batch, smaller inputs or fewer samples, then "
        "run the same command again",
    )


def _saved_traceback() -> str:
    """Where the traceback of the error at hand is: in a file, or else on stderr."""
    import tempfile

    command = " ".join(map(printable, sys.argv))
    text = f"twofour {__version__}, Python {sys.version}\n{command}\n\n"
    text += printable_lines(traceback.format_exc())
    folder = _traceback_folder
    if folder is not None and not folder.is_dir():
        folder = None  # the system's folder of temporary files
    with contextlib.suppress(OSError):  # a full disk
        handle, name = tempfile.mkstemp("-traceback.txt", "twofour-", folder, text=True)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        return f"in {name}"
    say(text)
    return "above"
