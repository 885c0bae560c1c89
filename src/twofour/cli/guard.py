"""One handler for every command: errors become a message and an exit code, bugs a saved traceback.

Exit codes: errors.py. A bug of ours ends in 1, and its traceback goes to a file.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer

from twofour.cli.console import TerminalProgress, reports_apart, say, say_error
from twofour.cli.cut_short import tell_of_files_cut_short
from twofour.errors import (
    INTERRUPTED,
    BadInputError,
    MissingToolError,
    TwofourError,
    first_line,
)
from twofour.version import __version__
from twofour.words import printable, printable_lines

P = ParamSpec("P")
T = TypeVar("T")
_BUG = 1
_INTERRUPTED = {"compare": "interrupted before the first round: nothing was kept"}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SURROGATE = re.compile("[\ud800-\udfff\0]")
"""Bytes of an argument or a file's name that are no text (PEP 383); and NUL, which ends a name."""
_LARGEST_NUMBER = 2**63 - 1
_LONGEST_PATH = 4096
"""Bytes with the NUL behind it (PATH_MAX of Linux): folders one by one could be made beyond it."""
_NO_TEMPORARY = "No usable temporary directory"
"""How `tempfile` begins."""
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
            tell_of_files_cut_short()
            refuse_unusable((*args, *kwargs.values()))
            with reports_apart():
                return command(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            say(
                _INTERRUPTED.get(
                    command.__name__, "interrupted; the same command goes on from here"
                )
            )
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # noqa: BLE001  # the one place where a bug of ours ends
            raise typer.Exit(_told(error)) from None

    return run


def refuse_unusable(values: Iterable[object]) -> None:
    """Raise BadInputError for a text or a number that no record and no library could take."""
    for value in values:
        if isinstance(value, (list, tuple)):
            refuse_unusable(value)
        elif is_dataclass(value) and not isinstance(value, type):
            refuse_unusable(getattr(value, field.name) for field in fields(value))
        elif isinstance(value, (str, Path)) and _SURROGATE.search(str(value)):
            raise BadInputError(f"{str(value)!r} is not text in {_encoding()}", hint=_other_name())
        elif isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise BadInputError(
                f"a number of {value.bit_length()} bits", hint=f"up to {_LARGEST_NUMBER} is counted"
            )
        elif isinstance(value, float) and math.isnan(value):
            raise BadInputError("nan is no number to work with")
        elif isinstance(value, Path) and len(os.fsencode(value)) >= _LONGEST_PATH:
            raise BadInputError(f"{value}: {os.strerror(errno.ENAMETOOLONG)}")


def _encoding() -> str:
    return sys.getfilesystemencoding().upper()


def _other_name() -> str:
    if _encoding() == "UTF-8":
        return "rename it: names are to be UTF-8"
    return "set LC_ALL=C.UTF-8, or PYTHONUTF8=1: this locale has no such characters"


def _told(error: Exception) -> int:
    """Say what went wrong; the exit code."""
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    known = error if isinstance(error, TwofourError) else _of_surroundings(error)
    known = known or _of_memory(error)
    if known is None:
        return _bug(error)
    say_error(known)
    return known.exit_code


def _of_surroundings(error: Exception) -> TwofourError | None:
    """What the system refused, or names in an encoding it has not; None for a bug of ours."""
    if isinstance(error, UnicodeEncodeError) and _SURROGATE.search(error.object):
        return BadInputError(
            f"{error.object[:200]!r} is not text in {_encoding()}", hint=_other_name()
        )
    if isinstance(error, OSError) and error.strerror is not None:
        return _of_system(error, error.strerror)
    return None


def _of_system(error: OSError, words: str) -> TwofourError | None:
    if error.errno in _FULL:
        return _full(error)
    if not _has_folder():
        return BadInputError("the current folder is no longer there", hint="cd into another one")
    if _NO_TEMPORARY in words:
        return BadInputError(words, hint="set TMPDIR to a folder that can be written to")
    return None if error.filename is None else BadInputError(f"{error.filename}: {words}")


def _of_memory(error: Exception) -> TwofourError | None:
    """What Python, numpy or torch say in this process where memory runs out."""
    if not isinstance(error, MemoryError):
        from twofour.pipeline.workers import is_out_of_memory

        if not isinstance(error, RuntimeError) or not is_out_of_memory(str(error)):
            return None
    return BadInputError(
        f"memory ran out: {first_line(error)}",
        hint="end what else needs it, or take a smaller batch, smaller inputs or fewer samples; "
        "the same command goes on from here",
    )


def _has_folder() -> bool:
    try:
        Path.cwd()
    except OSError:
        return False
    return True


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
    say_error(missing)
    return missing.exit_code


def _full(error: OSError) -> BadInputError:
    """A disk or a quota that is used up: named where it is known, and no bug of ours."""
    place = error.filename or _traceback_folder
    return BadInputError(
        f"{error.strerror}{'' if place is None else f': {place}'}",
        hint="make room, or choose another disk (--out, and TMPDIR for temporary files); the same "
        "command goes on from here",
    )


def _bug(error: Exception) -> int:
    say_error(TwofourError(f"{type(error).__name__}: {error}"))
    say(f"This is a bug in twofour {__version__}; the traceback is in {_saved_traceback()}")
    return _BUG


def _saved_traceback() -> Path:
    handle, name = _traceback_file()
    command = " ".join(map(printable, sys.argv))
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f"twofour {__version__}, Python {sys.version}\n{command}\n\n")
        file.write(printable_lines(traceback.format_exc()))
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
