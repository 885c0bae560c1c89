"""A service whose jobs succeed, fail, or end their process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from twofour.engines.protocol import ProgressCallback
from twofour.errors import BadInputError


class JobService:
    """What the tests of `sensitivity.jobs` ask for."""

    def __init__(self, report: ProgressCallback) -> None:
        self._report = report

    def square(self, number: int, value: int) -> tuple[int, int]:  # noqa: ARG002  # the service's
        """The square, and the process that worked it out."""
        return value * value, os.getpid()

    def refuse_odd(self, number: int, value: int) -> int:  # noqa: ARG002
        """Raises for an odd number."""
        if value % 2:
            raise BadInputError(f"{value} is odd")
        return value

    def die_before(self, number: int, tries: int) -> int:
        """Ends its process in every try before this one; then gives the number of the try."""
        if number < tries:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def end_first(self, number: int) -> int:
        """The first try is ended as Ray ends a worker, in code that reports what it raises."""
        if number == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        return number

    def slow(self, number: int, value: int, seconds: float, log: str) -> int:  # noqa: ARG002
        """Say in a file that it was begun, in which process and whose child that is, and sleep."""
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{value} {os.getpid()} {os.getppid()}\n")
        time.sleep(seconds)
        return 10 * value
