"""Lines without a prefix: layer lists, the rest of broken lines, and what other programs print."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from twofour.logs.layer_info import detailed_layer, listed_layer
from twofour.logs.messages import KEY_LENGTH
from twofour.logs.prefix import take_apart
from twofour.logs.sparsity import MARK, raw_line
from twofour.logs.tactics import CHOICE, NAME, SET_NAME
from twofour.logs.unwrap import Broken, Paste, glue, joinings
from twofour.records.log import LONGEST_RAW, EngineLayer

if TYPE_CHECKING:
    from twofour.logs.parser import LogParser

_WORDS = (MARK, SET_NAME, "Skipping tactic ", "no valid tactics for", "got cached result: ")
"""Words that say what a message is wherever in it they stand."""
_NUMBER_TAIL = re.compile(r"[\d.e+-]{1,13}")
_PROGRESS = " .=*-_#~`\N{HORIZONTAL ELLIPSIS}"
"""Marks that programs print while they wait, and that no message goes on with."""
_EVERYDAY = ("Removing ", "Merging layers", "Running: ", "Model: ", "Loading model: ")
"""Words other programs print too; believed only in a log whose lines have no prefixes at all."""
_MOST_PIECES = 40
_NAME = "Name: "
_LISTED = "Layer("
_FOREIGN_WORDS = ("Tactic", "-----", "*****", ">>>>>", "=====", "(Sparsity)", "(foreignNode)")


class BareLines:
    """What is open between one line and the next."""

    def __init__(self, parser: LogParser) -> None:
        self._parser = parser
        self.broken: Broken | None = None
        self.in_list = False
        """Inside a list of bare layer names, after `Layers:`."""
        self.prefixed_seen = False
        self._pieces = 0
        self._last = 0
        """Number of the last bare line."""
        self._completed = (0, 0)
        """First and last line of the last message that was put together."""

    def begin(self, message: str, number: int) -> None:
        """A message that may go on in the next line."""
        self.flush()
        self.broken = Broken(message, number, self._parser.around.length(number))
        self._pieces = 0
        self._parser.calm = False

    def flush(self) -> None:
        """Nothing continues the open message: take it as it is."""
        broken, self.broken = self.broken, None
        self.in_list = False
        if broken is None:
            return
        if broken.is_sparsity:
            self._sparsity(broken)
        elif broken.text.startswith(_NAME):
            layer = detailed_layer(broken.text)
            if layer is not None:
                self._parser.segments.build.add_engine_layer(layer, detailed=True)

    def line(self, text: str, number: int) -> None:
        """One line that carries no prefix."""
        after_prefixed, self._last = self._last != number - 1 and self.broken is None, number
        if self.broken is not None and self._continues(text, number):
            return
        if self.broken is not None and self.broken.waits and not text.strip():
            self.broken.parted = True
            self.broken.rows.append("")
            return
        tuning = self._parser.segments.build.tuning
        just = tuning.last_line == number - 1 or self._completed == (tuning.last_line, number - 1)
        if just and self._lengthens(text.strip(), number):
            tuning.lengthen(text.strip())
            return
        stripped = text.strip()
        if self.in_list and stripped and stripped != "Bindings:":
            self._list_entry(stripped)
            return
        self.flush()
        if stripped and not (after_prefixed and self._goes_with_last(text, number)):
            self._start(stripped, number)

    # --- continuation ------------------------------------------------------------------------

    def _continues(self, text: str, number: int) -> bool:
        broken = self.broken
        if broken is None or not text.strip():
            return False
        if self._begins_something(text.strip()):
            ends = broken.text.startswith((CHOICE, NAME))
            return ends and self._put_together(broken, text, number)
        if broken.is_sparsity and broken.takes_point(text, self._paste()):
            return True
        more = broken.goes_on(text, self._paste()) if broken.is_sparsity else not broken.full
        if more and (broken.is_sparsity or broken.text.startswith(_NAME)):
            broken.add(text)
            return True
        return more and self._may_complete(broken, text) and self._completes(broken, text, number)

    def _may_complete(self, broken: Broken, text: str) -> bool:
        """Whether a message can go on so: a kernel's name alone is whole, unless its line broke."""
        if not text.strip(_PROGRESS):
            return False
        name = broken.text.rpartition(NAME)[2]
        alone = name != broken.text and "Tactic:" not in name and ":" not in text
        return not alone or self._paste().breaks_at(broken.physical)

    def _lengthens(self, digits: str, number: int) -> bool:
        """Whether the last time's number was broken here, and this is no program's progress."""
        if not _NUMBER_TAIL.fullmatch(digits):
            return False
        time = self._parser.segments.build.tuning.time_with(digits)
        if time is None or time.cut:
            return time is not None
        pairs = self._parser.around.followed(number, self._parser.segments.build.first_line)
        width = max((len(line) for line, _ in pairs), default=0)
        found = [(line, after.strip()) for line, after in pairs if _NUMBER_TAIL.fullmatch(after)]
        if any(len(line) != width for line, _ in found):
            return False
        values = [int(after) for _, after in found if after.isdigit()]
        counting = len(values) > 1 and all(a < b for a, b in pairwise(values))
        return bool(found) and not counting

    def _paste(self) -> Paste:
        parser = self._parser
        build = parser.segments.build

        def breaks_at(length: int) -> bool:
            own = parser.around.before(parser.number)
            pairs = parser.around.followed(parser.number, build.first_line)
            if any(len(line) > length for line, _ in pairs):
                return False  # a paste has no line beyond its width
            broken = (after for line, after in pairs if len(line) == length and line != own)
            return any(map(self._is_rest, broken))

        return Paste(build.knows_layer, breaks_at)

    def _is_rest(self, text: str) -> bool:
        """Whether a line can be the rest of the one before: no message begins in it."""
        bare = bool(text.strip()) and take_apart(text) is None
        return bare and not self._begins_something(text.strip())

    def _goes_with_last(self, text: str, number: int) -> bool:
        """The rest of an error, or of a known word that was broken in two."""
        parser = self._parser
        if parser.segments.build.explain(text.strip(), number):
            return True
        found = take_apart(parser.around.before(number))
        if found is None:
            return False
        for joined in joinings(found.message, text):
            if self._crosses(joined, len(found.message)):
                if not parser.listed(joined, number - 1):
                    parser.unlisted(joined, number - 1)
                if self.broken is not None:
                    self.broken.physical = len(text)
                return True
        return False

    def _crosses(self, joined: str, place: int) -> bool:
        """Whether a known word stands around `place`, where two pieces were joined."""
        text = joined.lstrip()
        place -= len(joined) - len(text)
        known = self._parser.table.get(text[:KEY_LENGTH], ())
        if any(len(start) > place > 0 and text.startswith(start) for start, _ in known):
            return True
        nearby = (
            (word, text[max(0, place - len(word) + 1) : place + len(word)]) for word in _WORDS
        )
        return any(word in around for word, around in nearby)

    def _completes(self, broken: Broken, text: str, number: int) -> bool:
        """Try the message with the next piece, joined with and without a blank."""
        self._pieces += 1
        if self._pieces > _MOST_PIECES:
            return False
        if self._put_together(broken, text, number):
            return True
        before = broken.text
        joined = before + glue(before[-4:], text) + text.strip("\r\n")
        self.broken = Broken(joined, broken.line, len(text))
        return True

    def _put_together(self, broken: Broken, text: str, number: int) -> bool:
        for joined in joinings(broken.text, text):
            if self._complete(joined, broken.line):
                self.broken = None if self.broken is broken else self.broken
                self._completed = (broken.line, number)
                return True
        return False

    def _complete(self, message: str, number: int) -> bool:
        build = self._parser.segments.build
        if message.startswith(_LISTED):
            layer = listed_layer(message)
            if layer is not None:
                build.add_engine_layer(layer, detailed=False)
            return layer is not None
        if "Set Tactic Name: " in message:
            return build.tuning.set_name(message, number)
        whole = False
        for start, handler in self._parser.table.get(message[:KEY_LENGTH], ()):
            if message.startswith(start):
                whole = handler(self._parser.segments.build, message, number)
        return whole

    def _begins_something(self, text: str) -> bool:
        if text.startswith((_LISTED, _NAME, "Layers:", "Bindings:", "&&&& ")):
            return True
        if MARK in text[:60]:
            return True
        known = self._parser.table.get(text[:KEY_LENGTH], ())
        return any(text.startswith(start) for start, _ in known)

    # --- a new line --------------------------------------------------------------------------

    def _start(self, text: str, number: int) -> None:
        parser = self._parser
        build = parser.segments.build
        if text.startswith(_LISTED):
            layer = listed_layer(text)
            if layer is None:
                self.begin(text, number)
            else:
                build.add_engine_layer(layer, detailed=False)
        elif text.startswith(_NAME):
            self.begin(text, number)
        elif text == "Layers:":
            self.in_list = True
        elif text == "Bindings:":
            self.in_list = False
        elif MARK in text[:60]:
            self.begin(text, number)
        elif build.results.in_profile and build.results.row(text):
            return
        elif self._is_everyday(text) or not parser.listed(text, number):
            self._unlisted(text, number)

    def _unlisted(self, text: str, number: int) -> None:
        if any(word in text for word in _FOREIGN_WORDS):
            self._parser.unlisted(text, number)

    def _is_everyday(self, text: str) -> bool:
        believed = self._parser.segments.build.touched and not self.prefixed_seen
        return text.startswith(_EVERYDAY) and not believed

    def _list_entry(self, text: str) -> None:
        if text.startswith(_NAME):
            self.begin(text, 0)
            return
        build = self._parser.segments.build
        build.add_engine_layer(EngineLayer(name=text), detailed=False)

    def _sparsity(self, broken: Broken) -> None:
        raw = raw_line(broken.text, broken.line)
        if raw is None:
            return
        raw = replace(raw, rows="\n".join(broken.rows)[:LONGEST_RAW])
        self._parser.segments.before_sparsity(raw).add_sparsity(raw)
