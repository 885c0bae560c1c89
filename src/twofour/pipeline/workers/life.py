"""Whether a process still does anything: a call's length is not known, its silence is."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

LIMIT_S = 300.0
"""A process that used no processor time for so long, its children neither, will never answer.

Builds, calibration and downloads of hours use some all the time; a process that is stopped
(SIGSTOP) or waits for a lock that nobody opens uses none. One that spins is not found: Ctrl-C.
"""
LIMIT_VARIABLE = "TWOFOUR_WORKER_SILENCE_S"
"""Seconds in place of LIMIT_S; 0 waits for ever."""
_PROC = Path("/proc")
_PARENT, _TIMES = 1, slice(11, 15)
"""Fields of /proc/PID/stat after the name: ppid, and utime, stime, cutime, cstime."""


class Silence:
    """How long a process and its children have used no processor time; known on Linux alone."""

    def __init__(self, number: int, limit_s: float | None = None) -> None:
        self.limit_s = _asked_limit_s() if limit_s is None else limit_s
        self._number = number
        self._ticks: int | None = None
        self._since = time.monotonic()

    def broken(self) -> None:
        """Something was heard just now: the silence counts from here."""
        self._since = time.monotonic()

    def too_long(self) -> bool:
        """Look: whether the limit is over."""
        ticks = processor_ticks(self._number)
        if ticks is None or ticks != self._ticks:
            self._ticks = ticks
            self._since = time.monotonic()
        return time.monotonic() - self._since > self.limit_s


def processor_ticks(number: int) -> int | None:
    """Clock ticks that a process and all below it have used; None where /proc does not tell."""
    found = {int(p.name): _stat(p) for p in _PROC.glob("[0-9]*")}
    if not found.get(number):
        return None
    family, parents = {number}, {child: int(s[_PARENT]) for child, s in found.items() if s}
    grown = True
    while grown:
        below = {child for child, parent in parents.items() if parent in family} - family
        family |= below
        grown = bool(below)
    return sum(int(ticks) for member in family for ticks in found[member][_TIMES])


def _stat(folder: Path) -> list[str]:
    """Fields after the name, which may hold anything; () for a process that just ended."""
    with contextlib.suppress(OSError):
        return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _asked_limit_s() -> float:
    try:
        asked = float(os.environ.get(LIMIT_VARIABLE, LIMIT_S))
    except ValueError:
        return LIMIT_S
    return asked if asked > 0 else math.inf
