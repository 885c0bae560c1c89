"""Which data files the user's code reads, so that a stage is done again when one of them changes.

Seen are files opened through Python (`open`, and with it torch.load, numpy.load, json), by the
interpreter's own audit events; a library that opens files by itself is not seen.
Source: Python's documentation, "Audit events table", event `open`.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_LARGEST = 10_000
"""Files that are kept: a training set of single files is watched by its first ones."""
_CODE = (".py", ".pyc", ".pyi", ".so", ".pth")
_opened: dict[str, None] | None = None


@contextlib.contextmanager
def files_read() -> Iterator[list[Path]]:
    """A list that holds, once the block has ended, the data files that were read inside."""
    global _opened  # an audit hook belongs to the process and cannot be removed
    _install_hook()
    found: list[Path] = []
    outer, _opened = _opened, {}
    try:
        yield found
    finally:
        inner, _opened = _opened, outer
        found.extend(path for name in inner if _is_data(path := Path(name)))


def state_of(path: Path) -> str:
    """Size and time of change: cheap, and wrong only for who restores both."""
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} bytes, {status.st_mtime_ns}"


@cache
def _install_hook() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or _opened is None or len(_opened) >= _LARGEST:
        return
    name, mode, flags = arguments
    writes = isinstance(mode, str) and mode[:1] in "wax"
    writes |= mode is None and isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))
    if not writes and isinstance(name, str):
        _opened[os.path.abspath(name)] = None  # noqa: PTH100  # resolve would follow links


def _is_data(path: Path) -> bool:
    if path.suffix in _CODE or not path.is_file():
        return False
    return not any(path.is_relative_to(folder) for folder in _not_data())


@cache
def _not_data() -> tuple[Path, ...]:
    """The interpreter, installed packages and the system's own folders."""
    names = [sys.prefix, sys.base_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()]
    return tuple(Path(name) for name in (*names, "/proc", "/sys", "/dev", "/etc", "/usr"))
