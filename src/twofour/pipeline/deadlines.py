"""When a process that was asked something is given up: it is silent, or takes far too long."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from twofour.engines.machine import family_s

LIMIT_S = 300.0
"""A process that used no processor time for so long, its children neither, will never answer.

Builds, calibration and downloads of hours use some all the time; a process that is stopped
(SIGSTOP) or waits for a lock that nobody opens uses none. One that spins is not found: Ctrl-C.
"""
LIMIT_VARIABLE = "TWOFOUR_WORKER_SILENCE_S"
"""Seconds in place of LIMIT_S; 0 waits for ever."""
LEAST_S = 30.0
"""Of silence, in a call that is like ones before, however short those were."""
_TIMES_AS_LONG = 100.0
"""As the longest like it: what a call may be silent for, where that is less than LIMIT_S."""
_TIMES_AS_BUSY = 1000.0
"""As the longest like it: what a call may take that is not silent, where that is longer than twice
LIMIT_S; a loop without end is found by nothing else."""
_ANSWERS = 20.0
"""As the longest wait for an answer of any of many so far: what the next may take."""
_FIRST_ANSWER = 12.0
"""As LIMIT_S: what the first of them may take."""
_IDLE_PART = 5e-4
_IDLE_S = 0.02
"""What a family of processes uses in which nothing goes on: threads of libraries that look now and
then whether somebody is still there (torch's compile workers, each second)."""
LOOKING_S = 5.0
"""Between two looks."""
LEFT_S = 2.0
"""For each thing that is still asked once the user has ended it all."""


class Silence:
    """How long a process and its children have used no processor time, as far as it was looked at.

    Time in which nobody looked counts little: this process was stopped too, the machine asleep.
    """

    def __init__(
        self,
        number: int,
        limit_s: float | None = None,
        *,
        used_s: Callable[[int], float | None] = family_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s = _asked_limit_s() if limit_s is None else limit_s
        self._family_s, self._clock = used_s, clock
        self.waited_s = 0.0
        """Since `broken`."""
        self._number = number
        self.broken()

    def broken(self) -> None:
        """Something was heard just now: the silence counts from here."""
        self.waited_s = self._silent_s = 0.0
        self._used_s: float | None = None
        self._looked = self._clock()

    def limits(self, longest_s: float | None) -> tuple[float, float]:
        """Seconds of silence, and seconds in all, for a call.

        `longest_s` is what others like it took; None: nobody knows how long it takes, and silence
        alone ends it.
        """
        if longest_s is None or self.limit_s == math.inf:
            return self.limit_s, math.inf
        silent_s = min(self.limit_s, max(LEAST_S, _TIMES_AS_LONG * longest_s))
        return silent_s, max(2 * self.limit_s, _TIMES_AS_BUSY * longest_s)

    def too_long(self, limit_s: float | None = None) -> bool:
        """Look: whether the limit, its own or one for this call, is over."""
        now = self._clock()
        looked_s = min(now - self._looked, 2 * LOOKING_S)
        self._looked = now
        self.waited_s += looked_s
        self._silent_s += looked_s
        used_s = self._family_s(self._number)
        idle_s = _IDLE_S + _IDLE_PART * self._silent_s
        if used_s is None or self._used_s is None or used_s - self._used_s > idle_s:
            self._used_s = used_s
            self._silent_s = 0.0
        return self._silent_s > (self.limit_s if limit_s is None else limit_s)


def _asked_limit_s() -> float:
    try:
        asked = float(os.environ.get(LIMIT_VARIABLE, LIMIT_S))
    except ValueError:
        return LIMIT_S
    return asked if asked > 0 else math.inf


class Patience:
    """How long to wait for any of many who work elsewhere, where nobody tells what they use."""

    def __init__(
        self, limit_s: float | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._least_s = _asked_limit_s() if limit_s is None else limit_s
        self._longest_s: float | None = None
        self._clock = clock
        self._since = clock()

    @property
    def limit_s(self) -> float:
        """Seconds from the last answer on."""
        if self._longest_s is None:
            return _FIRST_ANSWER * self._least_s
        return max(self._least_s, _ANSWERS * self._longest_s)

    def answered(self) -> None:
        """One has."""
        now = self._clock()
        self._longest_s = max(now - self._since, self._longest_s or 0.0)
        self._since = now

    def is_over(self) -> bool:
        """Whether none will; the next ones are waited for anew."""
        if self._clock() - self._since <= self.limit_s:
            return False
        self._since = self._clock()
        return True
