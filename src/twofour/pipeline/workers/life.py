"""Whether a process still does anything: a call's length is not known, its silence is."""

from __future__ import annotations

import math
import os
import time

from twofour.engines.machine import family_s

LIMIT_S = 300.0
"""A process that used no processor time for so long, its children neither, will never answer.

Builds, calibration and downloads of hours use some all the time; a process that is stopped
(SIGSTOP) or waits for a lock that nobody opens uses none. One that spins is not found: Ctrl-C.
"""
LIMIT_VARIABLE = "TWOFOUR_WORKER_SILENCE_S"
"""Seconds in place of LIMIT_S; 0 waits for ever."""


class Silence:
    """How long a process and its children have used no processor time."""

    def __init__(self, number: int, limit_s: float | None = None) -> None:
        self.limit_s = _asked_limit_s() if limit_s is None else limit_s
        self._number = number
        self._used_s: float | None = None
        self._since = time.monotonic()

    def broken(self) -> None:
        """Something was heard just now: the silence counts from here."""
        self._since = time.monotonic()

    def too_long(self) -> bool:
        """Look: whether the limit is over."""
        used_s = family_s(self._number)
        if used_s is None or used_s != self._used_s:
            self._used_s = used_s
            self._since = time.monotonic()
        return time.monotonic() - self._since > self.limit_s


def _asked_limit_s() -> float:
    try:
        asked = float(os.environ.get(LIMIT_VARIABLE, LIMIT_S))
    except ValueError:
        return LIMIT_S
    return asked if asked > 0 else math.inf
