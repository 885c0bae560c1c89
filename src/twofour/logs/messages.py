"""Lines of anyone's log in, messages of TensorRT out: prefixes taken off, hard wraps undone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from twofour.logs.prefix import (
    ANY,
    BARE,
    DATED,
    PLAIN,
    LogicalLine,
    Message,
    Prefixed,
    level_in,
    prefix_pattern,
    take_apart,
    unquoted,
    without_polygraphy_extras,
)
from twofour.logs.wordings import KEY_LENGTH, Wording, sentence
from twofour.records.log import Producer

_LONGEST_PREFIX = 300
_SHORTEST = 12
"""Characters: no line with a prefix and a message has fewer."""
_MOST_FORMS = 12
_SAMPLE = 700
"""Lines looked at for another program's prefix before the first message is read."""
_MARK = re.compile(r"[^\w\s]")
_CUT = re.compile(r"(?<=[\s:|>\])-])(?=\S)")
_BARE_STARTS = ("Layer(", "Name: ", "Layers:", "Bindings:")
"""Lines without a prefix in TensorRT's own logs: lists of layers."""
_LOGGERS = {"torch_tensorrt": Producer.TORCH_TENSORRT, "torch-tensorrt": Producer.TORCH_TENSORRT,
            "nvdsinfer": Producer.DEEPSTREAM}  # fmt: skip
"""Whose lines they are, by a word in the prefix of another program."""
_PROGRESS = " .=*-_#~`\N{HORIZONTAL ELLIPSIS}"
"""Marks that programs print while they wait, and that no message goes on with."""
_NARROWEST = 40
"""Columns: below it a line's length says nothing of the width of a paste."""


_BRACKETS = frozenset("([")
"""What a message behind a known prefix may not begin with: more of a prefix may follow."""
_MOST_KNOWN = 6
_SUREST = 6
"""Characters behind the last digit of a prefix that are enough to know it again."""


class _Form(NamedTuple):
    """What another program puts before its lines."""

    pattern: re.Pattern[str]
    around_lines: bool
    """It stands before whole lines, which may have a prefix of their own."""


class Messages:
    """The messages of one source, batch by batch.

    A prefix of TensorRT's own is known by its form. Any other is what stands before one of the
    sentences that are TensorRT's alone, with its numbers left open.
    """

    def __init__(self, table: dict[str, tuple[Wording, ...]]) -> None:
        self.number = 0
        """Lines read so far."""
        self._table = table
        self._sentence = sentence(row for rows in table.values() for row in rows)
        self._forms: list[_Form] = []
        self._known: list[tuple[int, str, int, str]] = []
        """Prefixes met: where the last number ends, what follows it, the length, the severity."""
        self._blank = False

    def of(self, lines: Sequence[str], raw: Sequence[str]) -> Iterator[Message]:
        """The messages of these lines, which stand as `raw` in the file.

        Prefixes met before take the short way; it has to be fast.
        """
        if not self._forms:
            for line in lines[:_SAMPLE]:
                self._parts(line)
        lines, raw = self._unwrapped(lines, raw)
        for line, row in zip(lines, raw, strict=True):
            self.number += 1
            for start, tail, size, severity in self._known:
                if line.startswith(tail, start) and line[size : size + 1] not in _BRACKETS:
                    yield line[size:].lstrip(), self.number, row, severity, None
                    break
            else:
                found = self._long_way(line, row)
                if found is not None:
                    yield found

    def _long_way(self, line: str, row: str) -> Message | None:
        if "\r" in line:  # what a progress bar left before the message
            line = line.rstrip("\r").rpartition("\r")[2]
        style, severity, message = self._parts(line)
        if style is BARE:
            return self._bare(message.strip(), row)
        if style != DATED and severity in {"V", "I", ""} and line.endswith(message):
            self._learn(line[: len(line) - len(message)], severity)
        if style in {PLAIN, None, Producer.POLYGRAPHY}:
            message = without_polygraphy_extras(message)
        return LogicalLine(message.lstrip(), self.number, row, severity, style or ANY)

    def _learn(self, prefix: str, severity: str) -> None:
        """Remember a prefix where it will be as long, and end the same, on the next lines."""
        start = max((n for n, c in enumerate(prefix, 1) if c.isdigit()), default=0)
        known = (start, prefix[start:], len(prefix), severity)
        sure = len(prefix) - start >= (_SUREST if start else 1)
        told = not level_in(prefix[:start])  # else another level may stand there on other lines
        if sure and told and known not in self._known and len(self._known) < _MOST_KNOWN:
            self._known.append(known)

    def _parts(self, line: str) -> Prefixed:
        text = unquoted(line).lstrip()
        found = take_apart(text)
        # a tag alone may stand before more of a prefix: `[TRT] [VERBOSE] message`
        tag_alone = found is not None and not found.severity and found.message[:1] == "["
        if found is None or (tag_alone and not self._begins(found.message)):
            found = self._behind_another(text) or found
        return found or Prefixed(BARE, "", text)

    def _bare(self, text: str, row: str) -> Message | None:
        """A line without a prefix; of blank ones, which end lists, the first is enough."""
        again, self._blank = self._blank and not text, not text
        return None if again else LogicalLine(text, self.number, row, "", BARE)

    def _begins(self, text: str) -> bool:
        """Whether a message begins so, or a line of a list of layers."""
        if text.startswith(_BARE_STARTS):
            return True
        rows = self._table.get(text[:KEY_LENGTH], ())
        return any(text.startswith(row.start) for row in rows)

    # --- prefixes of other programs -----------------------------------------------------------

    def _behind_another(self, line: str) -> Prefixed | None:
        """What stands behind another program's prefix; its form is learned where it is new."""
        for form in self._forms:
            match = form.pattern.match(line)
            if match is not None:
                return self._taken(form, match[0], line[match.end() :].lstrip())
        if len(line) < _SHORTEST:
            return None
        found = self._sentence.search(line, 0, _LONGEST_PREFIX)
        if found is None or not found.start():
            return None
        end = _own_prefix(line, found.start())
        prefix = line[:end]
        if len(self._forms) == _MOST_FORMS or not (_MARK.search(prefix) or level_in(prefix)):
            return None  # half a message is no prefix
        around = end < found.start() or line.startswith(("&&&& ", *_BARE_STARTS), end)
        self._forms.append(_Form(prefix_pattern(prefix), around))
        return self._taken(self._forms[-1], prefix, line[end:])

    def _taken(self, form: _Form, prefix: str, rest: str) -> Prefixed:
        inner = take_apart(rest)
        if inner is None and form.around_lines:
            inner = self._behind_another(rest)
        if inner is not None:
            return inner._replace(severity=inner.severity or level_in(prefix))
        if form.around_lines or rest.startswith(_BARE_STARTS):
            return Prefixed(BARE, "", rest)
        said = prefix.lower()
        style = next((whose for word, whose in _LOGGERS.items() if word in said), PLAIN)
        return Prefixed(style, level_in(prefix) or "I", rest)

    # --- hard wraps ---------------------------------------------------------------------------

    def _unwrapped(
        self, lines: Sequence[str], raw: Sequence[str]
    ) -> tuple[Sequence[str], Sequence[str]]:
        """The lines of a paste that a terminal broke, whole, with empty ones for the rests.

        A line goes on in the next where it is as long as the widest of the paste and the next
        begins no message; one such pair may be chance.
        """
        width = max(map(len, lines), default=0)
        if width < _NARROWEST:
            return lines, raw
        broken = [n for n, (line, after) in enumerate(pairwise(lines))
                  if len(line) == width and self._is_rest(after, line)]  # fmt: skip
        if len(broken) < 2:
            return lines, raw
        whole, rows, begun = list(lines), list(raw), dict[int, int]()
        for n in broken:
            begun[n + 1] = begun.get(n, n)
        for first, rests in groupby(begun, begun.__getitem__):
            places = (first, *rests)
            whole[first] = "".join(lines[n] for n in places)
            rows[first] = "\n".join(raw[n] for n in places)
            for n in places[1:]:
                whole[n] = rows[n] = ""
        return whole, rows

    def _is_rest(self, line: str, before: str) -> bool:
        """Whether a line can be the end of the one before it: no message begins in it."""
        text = line.strip()
        if not text.strip(_PROGRESS) or take_apart(text) is not None:
            return False
        if any(form.pattern.match(text) for form in self._forms):
            return False
        sure = take_apart(before) is not None  # then a message without a prefix is no message
        return not (self._sentence.match(text) if sure else self._begins(text))


def _own_prefix(line: str, message: int) -> int:
    """Where TensorRT's own prefix begins behind that of another program; else the message."""
    for match in _CUT.finditer(line, 1, message):
        found = take_apart(line[match.start() :])
        if found is not None and len(line) - len(found.message) == message:
            return match.start()
    return message
