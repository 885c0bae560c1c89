"""One handler for every command: errors become a message and an exit code, bugs a saved traceback.

Exit codes: errors.py. A bug of ours ends in 1, and its traceback goes to a file.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer

from twofour.cli.console import TerminalProgress, say
from twofour.errors import INTERRUPTED, BadInputError, MissingToolError, TwofourError
from twofour.version import __version__

P = ParamSpec("P")
T = TypeVar("T")
_BUG = 1
_INTERRUPTED = {"compare": "interrupted before the first round: nothing was kept"}
_LONGEST_MESSAGE = 2_000
_FULL = (errno.ENOSPC, errno.EDQUOT)
_traceback_folder: Path | None = None


def keep_tracebacks_in(folder: Path) -> None:
    """Name the run folder; a traceback of ours goes there once the folder exists."""
    global _traceback_folder  # noqa: PLW0603  # one process runs one command
    _traceback_folder = folder


@contextmanager
def running(out: Path | None, *, quiet: bool) -> Iterator[TerminalProgress]:
    """Progress on stderr while a run folder is filled; tracebacks of ours go there."""
    if out is not None:
        keep_tracebacks_in(out)
    with TerminalProgress(quiet=quiet) as progress:
        yield progress


def guarded(command: Callable[P, T]) -> Callable[P, T]:
    """Wrap a command so that whatever it raises ends in the exit code of its kind."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except typer.Exit:
            raise
        except TwofourError as error:
            say(f"error: {_shortened(str(error))}")
            raise typer.Exit(error.exit_code) from None
        except ModuleNotFoundError as error:
            raise typer.Exit(_missing(error)) from None
        except KeyboardInterrupt:
            say(
                _INTERRUPTED.get(
                    command.__name__, "interrupted; the same command goes on from here"
                )
            )
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _silence_stdout()
            raise typer.Exit(0) from None
        except Exception as error:  # noqa: BLE001  # the one place where a bug of ours ends
            if isinstance(error, OSError) and error.errno in _FULL:
                raise typer.Exit(_full(error)) from None
            raise typer.Exit(_bug(error)) from None

    return run


def _shortened(text: str) -> str:
    """Names in files may be of any length; begin and end of a message tell what is wrong."""
    if len(text) <= _LONGEST_MESSAGE:
        return text
    half = _LONGEST_MESSAGE // 2
    return f"{text[:half]} ... {text[-half:]}"


def _missing(error: ModuleNotFoundError) -> int:
    """A package of others that this command needs, torch on a machine with TensorRT alone say."""
    from twofour.pipeline.doctor import how_to_install

    package = (error.name or "").partition(".")[0]
    if package in ("", "twofour"):
        return _bug(error)
    missing = MissingToolError(
        f"this command needs the Python package {package}, which is not installed",
        hint=how_to_install(package),
    )
    say(f"error: {missing}")
    return missing.exit_code


def _full(error: OSError) -> int:
    """A disk or a quota that is used up: named where it is known, and no bug of ours."""
    place = error.filename or _traceback_folder
    full = BadInputError(
        f"{error.strerror}{'' if place is None else f': {place}'}",
        hint="make room, or choose another disk (--out, and TMPDIR for temporary files); the same "
        "command goes on from here",
    )
    say(f"error: {full}")
    return full.exit_code


def _bug(error: Exception) -> int:
    say(f"error: {type(error).__name__}: {error}")
    say(f"This is a bug in twofour {__version__}; the traceback is in {_saved_traceback()}")
    return _BUG


def _saved_traceback() -> Path:
    handle, name = _traceback_file()
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"twofour {__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n")
        file.write(traceback.format_exc())
    return Path(name)


def _traceback_file() -> tuple[int, str]:
    """In the run folder; elsewhere where that is not there, not writable, or on a full disk."""
    import tempfile

    for folder in (_traceback_folder, None):
        try:
            if folder is None or folder.is_dir():
                return tempfile.mkstemp("-traceback.txt", "twofour-", folder, text=True)
        except OSError:
            continue
    return os.open(os.devnull, os.O_WRONLY), os.devnull


def _silence_stdout() -> None:
    """Keep the interpreter from complaining at exit about the pipe the reader closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
