"""Lines that a paste broke in two: which pieces belong together, and with a blank or without."""

from __future__ import annotations

import re
from collections.abc import Callable

from twofour.engines.buildlog.sparsity import MARK, raw_line

LONGEST = 1 << 20
_OPEN_ENDS = (",", "+", "|", "(", "[", "{")
_OPEN_STARTS = ("+ ", "|| ", ", ")
_TOKEN = re.compile(r"[(\[{]|[)\]}]|,(?= |$)|\|\|")
_NARROWEST = 40
"""No paste is narrower; below it a line's length says nothing of the width."""


class Broken:
    """A message that may go on in the next line without a prefix."""

    def __init__(self, message: str, line: int, physical: int) -> None:
        self.line = line
        self.is_sparsity = MARK in message[:120]
        self._pieces = [message]
        self._length = len(message)
        self._tail = message[-4:]
        self.physical = physical
        self._printed: int | None = None
        self._listed: bool | None = None
        self._depth = 0
        self._layers = 0
        if self.is_sparsity:
            self._measure_start()

    @property
    def text(self) -> str:
        """The pieces put together."""
        return "".join(self._pieces)

    @property
    def full(self) -> bool:
        """Too long to be one message of a real log."""
        return self._length > LONGEST

    def goes_on(self, piece: str, width: Callable[[], int], *, bare_seen: bool) -> bool:
        """Whether `piece` continues the list; `width` gives the longest line of the text around.

        It does where the list is plainly unfinished, where its next word would not have fitted
        into the width, and where bare lines are otherwise unheard of in this log.
        """
        if not piece.strip() or self.full:
            return False
        if not self._listed:
            return self._listed is None or piece.lstrip().startswith(":")
        if self._printed == 0 and not self._layers:
            return False
        word = piece.split(" ", 1)[0] or " "
        return (
            self._depth > 0
            or self._tail.rstrip().endswith(_OPEN_ENDS)
            or piece.lstrip().startswith(_OPEN_STARTS)
            or (self._printed or 0) > self._layers
            or not bare_seen
            or (self.physical > _NARROWEST and self.physical + len(word) > width())
        )

    def add(self, piece: str) -> None:
        """Append the next physical line."""
        self.physical = len(piece)
        between = glue(self._tail, piece)
        piece = between + piece.lstrip()
        self._pieces.append(piece)
        self._length += len(piece)
        self._tail = (self._tail + piece)[-4:]
        if self.is_sparsity and self._listed:
            self._count(piece)
        elif self.is_sparsity:
            self._measure_start()

    def _measure_start(self) -> None:
        """Find out whether the list has begun; it does within the first lines."""
        if len(self._pieces) > 16:
            return
        raw = raw_line(self.text, self.line)
        if raw is None:
            return
        self._printed, self._listed = raw.printed, raw.names is not None
        self._count((raw.names or "").strip().lstrip(","))

    def _count(self, text: str) -> None:
        """Follow the list: brackets that are open, layers so far (fusions taken apart)."""
        if text.strip() and not self._layers:
            self._layers = 1
        for match in _TOKEN.finditer(text.rstrip()):
            found = match[0]
            if found in {"(", "[", "{"}:
                self._depth += 1
            elif found in {")", "]", "}"}:
                self._depth = max(0, self._depth - 1)
            elif self._depth == 0:
                self._layers += 1


def glue(tail: str, piece: str) -> str:
    """What stood between two pieces: a blank where one was lost at the break, else nothing."""
    if tail.endswith((" ", "(", "[", "{", "/")) or not piece:
        return ""
    if piece[0] == " ":
        return " "
    return " " if tail.endswith((",", "+", "|", ":")) or piece.startswith(("+ ", "|| ")) else ""


def joinings(before: str, piece: str) -> tuple[str, ...]:
    """The two pieces joined in every way that could be right, the likeliest first."""
    between = dict.fromkeys((glue(before[-4:], piece), "", " "))
    return tuple(before.rstrip("\r\n") + blank + piece.strip() for blank in between)
