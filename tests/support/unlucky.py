"""A file system that fails, or a process that is killed, at the n-th change inside a folder.

CPython tells of every file that is opened, renamed or made before it is (audit events), and what a
hook raises is raised there. A hook stays for the life of the process, so one serves all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = frozenset({"os.rename", "os.mkdir", "os.link", "os.truncate"})
_watched: Path | None = None
_at_change: Callable[[int], None] | None = None
_changes = 0


@contextlib.contextmanager
def at_change(folder: Path, act: Callable[[int], None]) -> Iterator[None]:
    """`act` is told the number of each change in the folder, from 0, before it is made."""
    global _watched, _at_change, _changes  # noqa: PLW0603  # the hook has no other way to know
    _install()
    _watched, _at_change, _changes = folder, act, 0
    try:
        yield
    finally:
        _watched = _at_change = None


def full_from(number: int) -> Callable[[int], None]:
    """No room for this change, nor for any behind it."""

    def act(change: int) -> None:
        if change >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return act


def killed_at(number: int) -> Callable[[int], None]:
    """The process ends before this change."""

    def act(change: int) -> None:
        if change == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


@cache
def _install() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    global _changes  # as above
    if _watched is None or _at_change is None:
        return
    if event == "open":
        path, _, flags = arguments
        if not isinstance(flags, int) or not flags & _WRITES:
            return
    elif event in _CHANGES:
        path = arguments[0]
    else:
        return
    if isinstance(path, (str, os.PathLike)) and _watched in Path(path).parents:
        number, _changes = _changes, _changes + 1
        _at_change(number)


if __name__ == "__main__":
    from twofour.jobs import run_all
    from twofour.records.options import RunOptions

    model, out, change = sys.argv[1:]
    with at_change(Path(out).absolute().parent, killed_at(int(change))):
        run_all(model, Path(out), RunOptions())
