"""Broken messages put together: lines of anyone's log in, whole messages of TensorRT out.

A terminal, a mail or an editor breaks long lines; which pieces belong together, and with a blank or
without, is told by what a message must hold, by the paste's width and by names met before.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from twofour.logs.layer_info import listed_layer
from twofour.logs.prefix import (
    AFTER_DATE,
    ANY,
    AVERAGE,
    BARE,
    BRACKETS,
    DATE_END,
    MESSAGE,
    PLAIN,
    KnownPrefixes,
    LogicalLine,
    quoted,
    take_apart,
    without_polygraphy_extras,
)
from twofour.logs.sparsity import MARK, raw_line
from twofour.logs.tactics import CHOICE, NAME, SET_NAME, is_cut, time_of
from twofour.records.log import Producer, SparsityKind

KEY_LENGTH = 7
"""Characters of a message by which the words that begin it are looked up."""
_WORDS = (MARK, SET_NAME, "Skipping tactic ", "no valid tactics for", "got cached result: ")
"""Words that say what a message is wherever in it they stand."""
_NUMBER_TAIL = re.compile(r"[\d.e+-]{1,13}")
_PROGRESS = " .=*-_#~`\N{HORIZONTAL ELLIPSIS}"
"""Marks that programs print while they wait, and that no message goes on with."""
_MOST_ROWS = 40
"""Of a message that is no list."""
_MOST_DIGITS = 6
_NEARBY = 20
"""Lines before and after a broken one that show how wide the paste is."""
_NAME = "Name: "
_LISTED = "Layer("
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


class Unwrapper:
    """The lines of one source on their way to the parser: prefixes off, broken messages whole.

    A message is handed on when the next line shows that it does not go on. `starts` are the words
    with which messages begin, by their first characters; `is_layer` tells names met before.
    """

    def __init__(
        self, starts: Mapping[str, tuple[str, ...]], is_layer: Callable[[str], bool]
    ) -> None:
        self.number = 0
        """Lines read so far."""
        self._starts = starts
        self._is_layer = is_layer
        self._around = _Around()
        self._prefixes = KnownPrefixes()
        self._style: Producer | str | None = None
        self._held: LogicalLine | None = None
        """The last message, which the next line may go on with."""
        self._broken: Broken | None = None
        """What was put together of it, where it goes on or ends too early."""
        self._joined: LogicalLine | None = None
        """The message that was put together last."""
        self._lengthened: LogicalLine | None = None
        self._blank = False

    def messages(self, lines: Sequence[str], raw: Sequence[str]) -> Iterator[LogicalLine]:
        """The messages that end in these lines, which stand as `raw` in the file.

        Prefixes of fixed width and those met before take the short way; it has to be fast.
        """
        self._around.next_batch(lines, self.number + 1)
        held, broken = self._held, self._broken
        prefix, size, severity = self._prefixes.first
        after_date = AFTER_DATE.get(self._style, {}).get
        number = self.number
        for line, row in zip(lines, raw, strict=True):
            number += 1
            level: str | None
            if line.startswith(prefix) and line[size : size + 1] not in BRACKETS:
                message, level = line[size:], severity
            elif (level := after_date(line[DATE_END:MESSAGE])) is not None:
                message = line[MESSAGE:]
            elif line.startswith(AVERAGE, DATE_END):
                message, level = line[MESSAGE:], "I"
            elif (met := self._prefixes.of(line)) is not None:
                message, level = line[met[1] :], met[2]
            else:
                self._held = held
                yield from self._long_way(line, number, row)
                held, broken = self._held, self._broken
                prefix, size, severity = self._prefixes.first
                after_date = AFTER_DATE.get(self._style, {}).get
                continue
            if held is not None:
                yield held if broken is None else self._whole(held)
                broken = None
            message = message.lstrip() if message[:1] == " " else message
            held = LogicalLine(message, number, row, level or "", None)
        self._held = held
        self.number = number

    def last(self) -> Iterator[LogicalLine]:
        """The message that the end of the source completes."""
        yield from self._released()

    # --- one line ----------------------------------------------------------------------------

    def _long_way(self, line: str, number: int, row: str) -> Iterator[LogicalLine]:
        pieces, rows = line.split("\r"), row.split("\r")
        rows = rows if len(rows) == len(pieces) else [row] * len(pieces)
        for piece, piece_row in zip(pieces, rows, strict=True):
            found = take_apart(piece) if piece else None
            if found is None:
                if not self._goes_on(piece, number, piece_row):
                    yield from self._released()
                    yield from self._bare(piece.strip(), number, piece_row)
                continue
            yield from self._released()
            if isinstance(found.style, Producer) or (found.style and self._style is None):
                self._style = found.style
            if line.endswith(found.message) and "\r" not in line:
                self._prefixes.learn(line, found.message, found.severity)
            message = found.message
            if message.startswith("&&&& RUNNING"):
                self._around.since = number
            if found.style in {PLAIN, None, Producer.POLYGRAPHY}:
                message = without_polygraphy_extras(message)
            self._held = LogicalLine(
                message.lstrip(), number, piece_row, found.severity, found.style or ANY
            )

    def _bare(self, text: str, number: int, row: str) -> Iterator[LogicalLine]:
        """Hold a line without a prefix; of blank ones, which end lists, the first is enough."""
        line = LogicalLine(text, number, row, "", BARE)
        if text:
            self._held = line
        elif not self._blank:
            yield line
        self._blank = not text

    def _released(self) -> Iterator[LogicalLine]:
        held, self._held = self._held, None
        if held is not None:
            yield self._whole(held)

    def _whole(self, held: LogicalLine) -> LogicalLine:
        """The message with what was added to it; as it began, where nothing made it whole."""
        broken, self._broken = self._broken, None
        if broken is None or not broken.is_list:
            return held
        return held._replace(text=broken.text, raw="\n".join(broken.rows))

    # --- continuation ------------------------------------------------------------------------

    def _goes_on(self, text: str, number: int, row: str) -> bool:
        """Whether a line without a prefix is a part of the message before it."""
        held = self._held
        if held is None:
            return False
        broken = self._broken = self._broken or self._opened(held)
        if broken is not None and self._continues(broken, text, number, row):
            return True
        if not text.strip():
            return broken is not None and broken.waits and broken.part()
        if broken is None and self._lengthens(held, text.strip(), number):
            self._join(held, held.text.rstrip() + text.strip(), text, row)
            self._lengthened = self._held
            return True
        is_one_prefixed = held.style is not BARE and held is not self._joined
        return is_one_prefixed and broken is None and self._crosses_over(held, text, row)

    def _opened(self, held: LogicalLine) -> Broken | None:
        """The message as one that may go on; None for one that is whole."""
        text, is_bare = held.text, held.style is BARE
        cut_layer = text.startswith(_LISTED) and listed_layer(text) is None
        layer = is_bare and (text.startswith(_NAME) or cut_layer)
        if not layer and MARK not in text[:60] and not is_cut(text):
            return None
        return Broken(held, self._around.length(held.number))

    def _continues(self, broken: Broken, text: str, number: int, row: str) -> bool:
        if not text.strip():
            return False
        if self._begins_something(text.strip()):
            ends = broken.text.startswith((CHOICE, NAME))
            return ends and self._put_together(broken, text, row)
        paste = self._paste(number)
        if broken.is_sparsity and broken.takes_point(text, paste, row):
            return True
        more = broken.goes_on(text, paste) if broken.is_sparsity else not broken.full
        if more and broken.is_list:
            broken.add(text, row)
            return True
        return more and self._may_complete(broken, text, paste) and self._adds(broken, text, row)

    def _may_complete(self, broken: Broken, text: str, paste: Paste) -> bool:
        """Whether a message can go on so: a kernel's name alone is whole, unless its line broke."""
        if not text.strip(_PROGRESS):
            return False
        name = broken.text.rpartition(NAME)[2]
        alone = name != broken.text and "Tactic:" not in name and ":" not in text
        return not alone or paste.breaks_at(broken.physical)

    def _adds(self, broken: Broken, text: str, row: str) -> bool:
        """Whether the message may be whole with this piece, or with one more."""
        if broken.full or len(broken.rows) > _MOST_ROWS:
            return False
        if not self._put_together(broken, text, row):
            broken.add(text, row)
        return True

    def _put_together(self, broken: Broken, text: str, row: str) -> bool:
        """Try the message with the next piece, joined with and without a blank."""
        held = self._held
        for joined in joinings(broken.text, text):
            cut_layer = joined.startswith(_LISTED) and listed_layer(joined) is None
            if held is not None and not cut_layer and not is_cut(joined):
                self._broken = None
                rows = "\n".join((*broken.rows, quoted(text, row)))
                self._held = self._joined = held._replace(text=joined, raw=rows)
                return True
        return False

    def _join(self, held: LogicalLine, joined: str, text: str, row: str) -> None:
        rows = f"{held.quote}\n{quoted(text, row)}"
        self._held = self._joined = held._replace(text=joined, raw=rows)

    def _lengthens(self, held: LogicalLine, digits: str, number: int) -> bool:
        """Whether the last time's number was broken here, and this is no program's progress."""
        if held is self._lengthened or not _NUMBER_TAIL.fullmatch(digits):
            return False
        time = time_of(held.text)
        if time is None or not _is_printed(time + digits):
            return False
        if time.endswith((".", "e", "-", "+")) or ("." not in time and digits[0] in ".e"):
            return True  # no number is printed so
        pairs = self._around.followed(number)
        width = max((len(line) for line, _ in pairs), default=0)
        found = [(line, after.strip()) for line, after in pairs if _NUMBER_TAIL.fullmatch(after)]
        if any(len(line) != width for line, _ in found):
            return False
        values = [int(after) for _, after in found if after.isdigit()]
        counting = len(values) > 1 and all(a < b for a, b in pairwise(values))
        return bool(found) and not counting

    def _paste(self, number: int) -> Paste:
        around = self._around

        def breaks_at(length: int) -> bool:
            own, pairs = around.before(number), around.followed(number)
            if any(len(line) > length for line, _ in pairs):
                return False  # a paste has no line beyond its width
            broken = (after for line, after in pairs if len(line) == length and line != own)
            return any(map(self._is_rest, broken))

        return Paste(self._is_layer, breaks_at)

    def _is_rest(self, text: str) -> bool:
        """Whether a line can be the rest of the one before: no message begins in it."""
        bare = bool(text.strip()) and take_apart(text) is None
        return bare and not self._begins_something(text.strip())

    def _crosses_over(self, held: LogicalLine, text: str, row: str) -> bool:
        """Whether a known word was broken in two between the message and the line."""
        if held.severity in {"E", "F"} and held.text.rstrip().endswith(":"):
            return False  # what an error says of its cause
        for joined in joinings(held.text, text):
            if self._crosses(joined, len(held.text)):
                self._join(held, joined, text, row)
                assert self._held is not None
                self._broken = self._opened(self._held)
                if self._broken is not None:
                    self._broken.physical = len(text)
                return True
        return False

    def _crosses(self, text: str, place: int) -> bool:
        """Whether a known word stands around `place`, where two pieces were joined."""
        known = self._starts.get(text[:KEY_LENGTH], ())
        if any(len(start) > place > 0 and text.startswith(start) for start in known):
            return True
        nearby = (
            (word, text[max(0, place - len(word) + 1) : place + len(word)]) for word in _WORDS
        )
        return any(word in around for word, around in nearby)

    def _begins_something(self, text: str) -> bool:
        if text.startswith((_LISTED, _NAME, "Layers:", "Bindings:", "&&&& ")):
            return True
        if MARK in text[:60]:
            return True
        known = self._starts.get(text[:KEY_LENGTH], ())
        return any(map(text.startswith, known))


def _is_printed(time: str) -> bool:
    """Whether C++ prints a number so: with six significant digits."""
    try:
        float(time)
    except ValueError:
        return False
    return len(time.partition("e")[0].replace(".", "").lstrip("0")) <= _MOST_DIGITS


class _Around:
    """The batch of lines that is being read, and the last line of the one before."""

    def __init__(self) -> None:
        self._batch: Sequence[str] = ()
        self._first = 1
        """Line number of the batch's first line."""
        self._last_of_before = ""
        self.since = 1
        """Number of the line where the present run begins."""

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
        if place == -1:
            return len(self._last_of_before)
        return len(self._batch[place]) if 0 <= place < len(self._batch) else 0

    def followed(self, number: int) -> tuple[tuple[str, str], ...]:
        """Lines of the run around line `number`, each with the one after it."""
        start = max(self.since, number - _NEARBY) - self._first
        end = number + _NEARBY - self._first
        return tuple(pairwise(self._batch[max(start, 0) : max(end, 0)]))


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
        self.is_list = self.is_sparsity or message.startswith(_NAME)
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
