"""The lines around a broken one: how wide the paste is, and what stands before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_AROUND = 20
"""Lines before and after a broken one that show how wide the paste is."""


class Surroundings:
    """The batch of lines that is being read, and the last line of the one before."""

    def __init__(self) -> None:
        self._batch: Sequence[str] = ()
        self._first = 1
        """Line number of the batch's first line."""
        self._last_of_before = ""

    def next_batch(self, lines: Sequence[str], first: int) -> None:
        """The lines that are read from now on; `first` is the number of the first."""
        self._last_of_before = self._batch[-1] if self._batch else ""
        self._batch, self._first = lines, first

    def before(self, number: int) -> str:
        """The line before line `number`."""
        place = number - 1 - self._first
        return self._batch[place] if place >= 0 else self._last_of_before

    def length(self, number: int) -> int:
        """Length of line `number`; 0 where it is no more at hand."""
        place = number - self._first
        return len(self._batch[place]) if 0 <= place < len(self._batch) else 0

    def followed(self, number: int, since: int) -> tuple[tuple[str, str], ...]:
        """Lines around line `number`, from line `since` on, each with the one after it."""
        start = max(since, number - _AROUND) - self._first
        end = number + _AROUND - self._first
        return tuple(pairwise(self._batch[max(start, 0) : max(end, 0)]))
