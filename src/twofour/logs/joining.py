"""Which pieces of a broken message belong together, and with a blank between them or without."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from twofour.logs.prefix import LogicalLine, quoted
from twofour.logs.sparsity import MARK, raw_line
from twofour.records.log import SparsityKind

DETAILED = "Name: "
"""Begins a layer of detailed layer information."""
LONGEST = 1 << 20
_OPEN_ENDS = (",", "+", "|")
_OPEN_STARTS = ("|| ", ", ")
_TOKEN = re.compile(r"[(\[{]|[)\]}]|,(?= |$)|\|\|")
_NARROWEST = 40
"""No paste is narrower; below it a line's length says nothing of the width."""
_MOST_PIECES = 20_000
_LONGEST_NAME = 4_000
_SIBLINGS = 50
_DIGITS = re.compile(r"\d+")
_ATOM = r"(?:\(Unnamed Layer\* \d+\) \[[\w ]+\]|[^\s,'\"\[\]()]+)"
_SIGN = r" (?:\+|\|\|)"
_ENTRY = rf"{_ATOM}(?:{_SIGN} {_ATOM})*"
_CUT_NAME = r" \(Unnamed(?: Layer\*(?: \d+\))?)?"
_NAMES = re.compile(rf"{_ENTRY}(?:,(?: {_ENTRY})?)+(?:{_SIGN}|{_CUT_NAME})?|{_ENTRY}{_SIGN}")
"""Two names at least, or one and a sign that more follows; no blanks as in common text."""
_UNNAMED = re.compile(r"\(Unnamed(?: Layer\*(?: \d+\))?)?$")
"""A name of TensorRT's own, broken at one of its blanks."""
_PROMPT = re.compile(r"(?:\([\w.-]+\) )?(?:[\w.-]+@[\w.-]+:?[^\s$#%]{0,200}\s?)?[$#%>]{1,3}(?: |$)")
"""Of a shell: `$ `, `(venv) user@host:~/x$ `, `root@1f2e:/# `, `>>> `."""

_POINT = re.compile(
    r"\s*(?:[-*+\N{BULLET}\N{MIDDLE DOT}\N{EN DASH}\N{EM DASH}\N{TRIANGULAR BULLET}]"
    r"|\d{1,4}[.)])[ \t]+(?P<name>\S.*?)[,;]?\s*$"
)
"""A line of a list with a mark before every entry, as an issue's author makes of a long one."""
_INNERMOST = re.compile(r"\([^()]*\)")
_PLAIN_NAME = re.compile(rf"\S+(?:{_SIGN} \S+)*")


class Paste(NamedTuple):
    """What a log knows that tells the rest of a list from what another program printed."""

    is_layer: Callable[[str], bool]
    """Whether a name stands elsewhere in the build."""
    breaks_at: Callable[[int], bool]
    """Whether another line around was broken at that length."""


class Broken:
    """A message that may go on in the next line without a prefix."""

    def __init__(self, begun: LogicalLine, physical: int) -> None:
        message = begun.text
        self.is_sparsity = MARK in message[:120]
        self.is_list = self.is_sparsity or message.startswith(DETAILED)
        """It takes in any number of pieces; else it is whole with the last that it lacks."""
        self._pieces = [message]
        self.rows = begun.quote.split("\n")
        """What stands on its lines, one after the other."""
        self._length = len(message)
        self._tail = message[-4:]
        self.physical = physical
        self._printed: int | None = None
        self._listed: bool | None = None
        self._of_eligible = False
        self.parted = False
        """A blank line stands between the colon and the names."""
        self._points = False
        """Its names have a line each, with a mark before them."""
        self._depth = 0
        self._layers = 0
        self._entry = ""
        """The last name of the list, as far as it goes."""
        self._before: deque[str] = deque(maxlen=_SIBLINGS)
        """Names before it."""
        if self.is_sparsity:
            self._measure_start()

    @property
    def text(self) -> str:
        """The pieces put together."""
        return "".join(self._pieces)

    @property
    def full(self) -> bool:
        """Too long to be one message of a real log."""
        return self._length > LONGEST or len(self._pieces) > _MOST_PIECES

    @property
    def waits(self) -> bool:
        """Whether the list has begun and names nothing yet."""
        return bool(self._listed) and not self._layers

    def part(self) -> bool:
        """Take a blank line between the colon and the names."""
        self.parted = True
        self.rows.append("")
        return True

    def takes_point(self, text: str, paste: Paste, row: str) -> bool:
        """Take the line as one name of a list that has a mark before each; whether it is one."""
        match = _POINT.match(text) if self.waits or (self._listed and self._points) else None
        if match is None or self.full:
            return False
        name = match["name"]
        if not paste.is_layer(name):
            printed = self._printed
            missing = self._of_eligible if printed is None else self._layers < printed
            if not missing or _PLAIN_NAME.fullmatch(_without_brackets(name)) is None:
                return False
        self._points = True
        piece = f", {name}" if self._layers else f" {name}"
        self._pieces.append(piece)
        self.rows.append(quoted(text, row))
        self._length += len(piece)
        self._count(piece)
        return True

    def goes_on(self, piece: str, paste: Paste) -> bool:
        """Whether `piece` continues the list, rather than being what another program printed.

        It does where the list is plainly unfinished, by its brackets, marks or printed count;
        a list that may be complete goes on only where something shows that its line was broken.
        """
        text = piece.strip()
        if not text or self.full or _PROMPT.match(text) or self.parted or self._points:
            return False
        if not self._listed:
            return self._listed is None or text.startswith(":")
        if self._depth > 0:
            return not paste.is_layer(self._entry.strip())
        empty = self._printed == 0 and not self._layers
        if empty or not any(map(str.isalnum, text)):
            return False
        return self._is_open(text) or self._counts_on(text) or self._was_broken(piece, paste)

    def _is_open(self, text: str) -> bool:
        """Whether signs show that a name or a list goes on."""
        if text.startswith("+ "):  # a shell's trace and a list of points begin so, too
            return _NAMES.fullmatch(text[2:]) is not None
        if text.startswith("[") and _UNNAMED.search(self._entry):
            return True
        return self._tail.rstrip().endswith(_OPEN_ENDS) or text.startswith(_OPEN_STARTS)

    def _counts_on(self, text: str) -> bool:
        """Whether layers are missing, all or some of the count, and the piece lists them."""
        if not self._layers and _NAMES.fullmatch(text):
            return True
        missing = (self._printed or 0) - self._layers
        more = text.count(", ") + text.count(" || ") + text.endswith(",")
        return missing > 0 and (0 < more <= missing or (not self._layers and missing == 1))

    def _was_broken(self, piece: str, paste: Paste) -> bool:
        """Whether the last name becomes one that is known, or like the others, by the piece."""
        entry = self._entry.strip()
        if len(entry) > _LONGEST_NAME:
            return False
        whole = [joined.split(", ", 1)[0] for joined in joinings(entry, piece)]
        if any(map(paste.is_layer, whole)):
            return True
        if entry and paste.is_layer(entry):
            return False
        if any(self._is_like_others(entry, name) for name in whole):
            return True
        return self.physical >= _NARROWEST and paste.breaks_at(self.physical)

    def _between(self, piece: str) -> str:
        """What stood at the break; a blank that an editor lost is told by the other names."""
        between = glue(self._tail, piece)
        entry = self._entry.lstrip()
        if between or len(entry) > _LONGEST_NAME or " " in {self._tail[-1:], piece[:1]}:
            return between
        if _UNNAMED.search(entry):
            return " "
        ways = (blank for blank in ("", " ") if self._is_like_others(entry, entry + blank + piece))
        return next(ways, between)

    def _is_like_others(self, entry: str, name: str) -> bool:
        """Whether another name of the list goes on as this one does, whatever the numbers."""
        if not entry or not self._before:
            return False
        short, long = (_DIGITS.sub("0", text) for text in (entry, name))
        start = long[: len(short) + 1 + long.startswith(" ", len(short))]
        others = (_DIGITS.sub("0", other) for other in self._before)
        return len(long) > len(short) and any(o.startswith(start) for o in others)

    def add(self, piece: str, row: str) -> None:
        """Append the next physical line."""
        self.physical = len(piece)
        self.rows.append(quoted(piece, row))
        between = self._between(piece)
        in_sign = _inside_sign(self._tail, piece)
        piece = between + piece.lstrip()
        self._pieces.append(piece)
        self._length += len(piece)
        self._tail = (self._tail + piece)[-4:]
        if self.is_sparsity and self._listed:
            self._entry = self._entry.removesuffix("|") if in_sign else self._entry
            self._count(f"|{piece}" if in_sign else piece)
        elif self.is_sparsity:
            self._measure_start()

    def _measure_start(self) -> None:
        """Find out whether the list has begun; it does within the first lines."""
        if len(self._pieces) > 16:
            return
        raw = raw_line(self.text, 0)
        if raw is None:
            return
        self._printed, self._listed = raw.printed, raw.names is not None
        self._of_eligible = raw.kind is SparsityKind.ELIGIBLE
        self._count((raw.names or "").strip().lstrip(","))

    def _count(self, text: str) -> None:
        """Follow the list: brackets that are open, layers so far (fusions taken apart)."""
        if text.strip() and not self._layers:
            self._layers = 1
        start = 0
        for match in _TOKEN.finditer(text):
            found = match[0]
            if found in {"(", "[", "{"}:
                self._depth += 1
            elif found in {")", "]", "}"}:
                self._depth = max(0, self._depth - 1)
            elif self._depth == 0:
                self._layers += 1
                if found == ",":
                    self._before.append((self._entry + text[start : match.start()]).strip())
                    self._entry, start = "", match.end()
        self._entry += text[start:]


def _without_brackets(name: str) -> str:
    """The name without what its round brackets hold, where blanks stand between arguments."""
    short = _INNERMOST.sub("", name[:_LONGEST_NAME])
    return short.strip() if short == name else _without_brackets(short)


def _inside_sign(tail: str, piece: str) -> bool:
    """Whether the break is between the two marks of `||`."""
    return tail.endswith("|") and not tail.endswith("||") and piece.startswith("| ")


def glue(tail: str, piece: str) -> str:
    """What stood between two pieces: a blank where one was lost at the break, else nothing."""
    if tail.endswith((" ", "(", "[", "{", "/")) or not piece or _inside_sign(tail, piece):
        return ""
    if piece[0] == " ":
        return " "
    unnamed = tail.endswith(")") and piece[0] == "["  # `(Unnamed Layer* 0) [Convolution]`
    open_end = tail.endswith((",", "+", "|", ":"))
    return " " if open_end or unnamed or piece.startswith(("+ ", "|| ")) else ""


def joinings(before: str, piece: str) -> tuple[str, ...]:
    """The two pieces joined in every way that could be right, the likeliest first."""
    between = dict.fromkeys((glue(before[-4:], piece), "", " "))
    return tuple(before.rstrip("\r\n") + blank + piece.strip() for blank in between)
