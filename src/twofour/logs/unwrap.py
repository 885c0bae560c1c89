"""Broken messages put together: lines of anyone's log in, whole messages of TensorRT out.

A terminal, a mail or an editor breaks long lines; which pieces belong together, and with a blank or
without, is told by what a message must hold, by the paste's width and by names met before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from twofour.logs.joining import DETAILED, Broken, Paste, joinings
from twofour.logs.layer_info import listed_layer
from twofour.logs.prefix import (
    AFTER_DATE,
    ANY,
    AVERAGE,
    BARE,
    BRACKETS,
    MESSAGE_START,
    PLAIN,
    TAGS_START,
    KnownPrefixes,
    LogicalLine,
    Message,
    named,
    quoted,
    take_apart,
    without_polygraphy_extras,
)
from twofour.logs.sparsity import MARK
from twofour.logs.tactics import CHOICE, NAME, SET_NAME, is_cut, time_of
from twofour.records.log import Producer

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
_LISTED = "Layer("


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
        self._held: Message | None = None
        """The last message, which the next line may go on with."""
        self._broken: Broken | None = None
        """What was put together of it, where it goes on or ends too early."""
        self._joined: LogicalLine | None = None
        """The message that was put together last."""
        self._lengthened: LogicalLine | None = None
        self._blank = False

    def messages(self, lines: Sequence[str], raw: Sequence[str]) -> Iterator[Message]:
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
            elif (level := after_date(line[TAGS_START:MESSAGE_START])) is not None:
                message = line[MESSAGE_START:]
            elif line.startswith(AVERAGE, TAGS_START):
                message, level = line[MESSAGE_START:], "I"
            elif (met := self._prefixes.of(line)) is not None:
                message, level = line[met[1] :], met[2]
            else:
                self._held = held
                if "\r" in line:
                    yield from self._pieces(line, number, row)
                elif (done := self._long_way(line, number, row)) is not None:
                    yield done
                held, broken = self._held, self._broken
                prefix, size, severity = self._prefixes.first
                after_date = AFTER_DATE.get(self._style, {}).get
                continue
            if held is not None:
                yield held if broken is None else self._whole(held)
                broken = None
            message = message.lstrip() if message[:1] == " " else message
            held = (message, number, row, level or "", None)
        self._held = held
        self.number = number

    def last(self) -> Message | None:
        """The message that the end of the source completes."""
        held, self._held = self._held, None
        return None if held is None else self._whole(held)

    # --- one line ----------------------------------------------------------------------------

    def _pieces(self, line: str, number: int, row: str) -> Iterator[Message]:
        """A line with carriage returns in it, each of which begins a line of its own."""
        pieces, rows = line.split("\r"), row.split("\r")
        rows = rows if len(rows) == len(pieces) else [row] * len(pieces)
        for piece, piece_row in zip(pieces, rows, strict=True):
            done = self._long_way(piece, number, piece_row)
            if done is not None:
                yield done

    def _long_way(self, line: str, number: int, row: str) -> Message | None:
        """Hold the line, or add it to the message that is held; the one it completes."""
        found = take_apart(line) if line else None
        if found is None:
            return None if self._goes_on(line, number, row) else self._bare(line, number, row)
        done = self.last()
        message, severity, style = found.message, found.severity, found.style
        if isinstance(style, Producer) or (style and self._style is None):
            self._style = style
        if line.endswith(message):
            self._prefixes.learn(line, message, severity)
        if message.startswith("&&&& RUNNING"):
            self._around.since = number
        if style in {PLAIN, None, Producer.POLYGRAPHY}:
            message = without_polygraphy_extras(message)
        self._held = LogicalLine(message.lstrip(), number, row, severity, style or ANY)
        return done

    def _bare(self, line: str, number: int, row: str) -> Message | None:
        """Hold a line without a prefix; of blank ones, which end lists, the first is enough."""
        done, text = self.last(), line.strip()
        if text or not self._blank:
            self._held = LogicalLine(text, number, row, "", BARE)
        self._blank = not text
        return done

    def _whole(self, held: Message) -> Message:
        """The message with what was added to it; as it began, where nothing made it whole."""
        broken, self._broken = self._broken, None
        if broken is None or not broken.is_list:
            return held
        return LogicalLine(broken.text, held[1], "\n".join(broken.rows), held[3], held[4])

    # --- continuation ------------------------------------------------------------------------

    def _goes_on(self, text: str, number: int, row: str) -> bool:
        """Whether a line without a prefix is a part of the message before it."""
        if self._held is None:
            return False
        held = self._held = named(self._held)
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
        layer = is_bare and (text.startswith(DETAILED) or cut_layer)
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
                self._held = self._joined = LogicalLine(joined, held[1], rows, held[3], held[4])
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
                assert self._joined is not None
                self._broken = self._opened(self._joined)
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
        if text.startswith((_LISTED, DETAILED, "Layers:", "Bindings:", "&&&& ")):
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
