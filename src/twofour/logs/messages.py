"""Lines of anyone's log in, messages of TensorRT out: prefixes taken off, hard wraps undone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from twofour.records.log import LONGEST_RAW_LINE, Producer

_ENOUGH = 9
"""Characters that are enough to find a message in its line."""
PLAIN = "plain"
"""Style of `[V] message`, which several producers share."""
DATED = "dated"
"""Style of `[date] [I] message`: trtexec's own lines, and whoever imitates them."""
BARE = "bare"
"""Style of a line without any prefix."""
ANY = "any"
"""Style of a prefix that any producer may write."""


class LogicalLine(NamedTuple):
    """One message, whatever stood around it and over however many lines it was broken."""

    text: str
    """The message without its prefix."""
    number: int
    """Number of the line where it begins."""
    raw: str
    """That line as printed in the file; the rows of a broken message, one below the other."""
    severity: str
    """TensorRT's letter F, E, W, I or V; "" where the prefix has none."""
    style: Producer | str | None
    """Producer that writes such prefixes; PLAIN, DATED, ANY or BARE; None for one met before."""

    @property
    def quote(self) -> str:
        """The message as printed in the file; the whole line where another program changed it."""
        text = self.text.strip()
        row, *more = self.raw.split("\n")
        if more:
            start = max(row.find(text[:_ENOUGH]), 0)
            return "\n".join((row[start:], *more))
        return text if text in row else row.strip()

    @property
    def first_row(self) -> str:
        """The first row of `quote`, at most LONGEST_RAW_LINE characters of it."""
        return self.quote.partition("\n")[0][:LONGEST_RAW_LINE]


Message = tuple[str, int, str, str, Producer | str | None]
"""The fields of a LogicalLine as a tuple: a name for each would cost a tenth of the time."""


# --- TensorRT's own prefixes ----------------------------------------------------------------------


class Prefixed(NamedTuple):
    """A line taken apart."""

    style: Producer | str
    """Producer that writes such prefixes; PLAIN, DATED, ANY or BARE."""
    severity: str
    """TensorRT's letter F, E, W, I or V; "" where the prefix has none."""
    message: str


_TAGS = re.compile(
    r"(?P<date>\[\d\d/\d\d/\d{2,4}-[\d:.]{8,15}\] ?)?"
    r"(?:(?P<tags>(?:\[(?:TRT|TRT-LLM|TensorRT|[FEWIVXUSD!])\]:?[ \t]?){1,3})"
    r"(?:(?P<word>INTERNAL_ERROR|ERROR|WARNING|INFO|VERBOSE): )?)?"
)
"""trtexec, TensorRT's loggers in Python, Polygraphy, TensorRT-LLM, jetson-inference."""
_POLYGRAPHY_EXTRA = re.compile(r"^(?:\(\d\d:\d\d:\d\d\) )?(?:\[[\w./\\-]+\.py:\d+\] )?")
"""Clock and source position, which Polygraphy puts before the message on request."""
_LEVEL_FIRST = re.compile(
    r"(?P<word>INTERNAL_ERROR|ERROR|WARNING|INFO|DEBUG|VERBOSE|GRAPH): ?-? ?"
    r"(?:\[TRT\]: ?|(?P<torch>\[Torch-TensorRT[^\]]{0,60}\] ?- ?))"
)
"""DeepStream and the C++ of Torch-TensorRT."""
_ORT = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\S{5,24} \[\w:onnxruntime:[^\]]{0,200}\] "
    r"\[\d{4}-\d\d-\d\d [\d:.]{5,18} +(?P<word>\w+)\] ?"
)
_BANNER = re.compile(r"&&&& (?:RUNNING|PASSED|FAILED|WAIVED) TensorRT")
_LEVELS = {
    "TRACE": "V",
    "DEBUG": "V",
    "GRAPH": "V",
    "VERBOSE": "V",
    "INFO": "I",
    "NOTICE": "I",
    "WARNING": "W",
    "WARN": "W",
    "ERROR": "E",
    "ERR": "E",
    "CRITICAL": "F",
    "FATAL": "F",
    "INTERNAL_ERROR": "F",
}
"""The names of levels in other loggers -> TensorRT's letters."""
_LETTERS = {"!": "F", "X": "V", "U": "V", "S": "V", "D": "V"}
"""Letters of Polygraphy's levels -> TensorRT's, which is one level below."""


def take_apart(line: str) -> Prefixed | None:
    """Prefix and message of a line that TensorRT or one of its tools wrote; None for any other."""
    line = line.lstrip()
    first = line[:1]
    if first == "[":
        return _tagged(line)
    if first == "&" and _BANNER.match(line) is not None:
        return Prefixed(Producer.TRTEXEC, "", line)
    if first.isdigit():
        match = _ORT.match(line)
        style = Producer.ONNXRUNTIME
    else:
        match = _LEVEL_FIRST.match(line)
        style = Producer.DEEPSTREAM
        if match is not None and match["torch"]:
            style = Producer.TORCH_TENSORRT
    if match is None:
        return None
    return Prefixed(style, _LEVELS.get(match["word"], ""), line[match.end() :])


def _tagged(line: str) -> Prefixed | None:
    match = _TAGS.match(line)
    if match is None or not match.end():
        return None
    message = line[match.end() :]
    if match["tags"] is None:
        return Prefixed(ANY, "", message)
    tags = match["tags"].rstrip()
    letter = "".join(re.findall(r"\[([FEWIVXUSD!])\]", tags)[:1])
    severity = _LEVELS.get(match["word"], _LETTERS.get(letter, letter))
    style = _tag_style(tags, letter)
    if style is PLAIN and match["date"]:
        style = DATED
    return Prefixed(style, severity, message)


def _tag_style(tags: str, letter: str) -> Producer | str:
    # trtexec writes `[I] [TRT] message` and Python `[TRT] [I] message`
    if letter in {"X", "U"}:
        return Producer.POLYGRAPHY
    if tags.startswith("[TRT-LLM]"):
        return Producer.TENSORRT_LLM
    if "[TensorRT]" in tags:
        return Producer.PYTHON
    if "[TRT]" not in tags:
        return PLAIN
    if letter:
        return Producer.PYTHON if tags.startswith("[TRT]") else Producer.TRTEXEC
    return Producer.DEEPSTREAM if tags == "[TRT]:" else Producer.JETSON_INFERENCE


def _unquoted(line: str) -> str:
    """The text in a line of a JSON array of strings, such as `"[I] message",`; else the line."""
    text = line.strip().rstrip(",")
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return line
    try:
        value: object = json.loads(text)
    except ValueError:
        return line
    return value.rstrip("\r\n") if isinstance(value, str) else line


# --- prefixes of other programs -------------------------------------------------------------------

_ANY_LEVEL = "|".join(_LEVELS)
_LEVEL = rf"(?:(?<![\w.])|(?<=Severity\.))k?(?i:{_ANY_LEVEL})(?![\w/]|[.-]\w)"
"""A word for a level, which is never part of a path or a file's name: `error.log:12:`."""
_LEVEL_LETTER = re.compile(r"(?<![\w.])(?:[\[(<]([FEWIVD])[\])>]|([FEWIV])(?=/|\d{4} ))")
_PIECE = re.compile(rf"(?P<level>\s*{_LEVEL}\s*)|[A-Za-z0-9]+|(?P<blanks>\s+)|.", re.DOTALL)
_LOGGERS = {
    "torch_tensorrt": Producer.TORCH_TENSORRT,
    "torch-tensorrt": Producer.TORCH_TENSORRT,
    "nvdsinfer": Producer.DEEPSTREAM,
}
"""A word in the prefix of another program -> the producer of the line."""


class _ForeignPrefix(NamedTuple):
    """What another program puts before its lines."""

    pattern: re.Pattern[str]
    around_lines: bool
    """It is put before whole lines, which may have a prefix of their own."""


def _level_in(prefix: str) -> str:
    """TensorRT's letter for the last level that a prefix names; "" where it names none."""
    words = re.findall(_LEVEL, prefix)
    if words:
        return _LEVELS[words[-1].upper().removeprefix("K")]
    letters = "".join(map("".join, _LEVEL_LETTER.findall(prefix)))
    return letters[-1:].replace("D", "V")


def _prefix_pattern(prefix: str) -> re.Pattern[str]:
    """A pattern for the prefix on other lines, whatever their numbers, clocks and levels."""
    # "run 12 | INFO | " becomes run\s+\d+\s+\|\s*(?:...|INFO|WARNING|...)\s*\|\s?, which fits
    # "run 13 | WARNING | " too
    pieces = [_opened(piece) for piece in _PIECE.finditer(prefix.rstrip())]
    blanks = prefix[len(prefix.rstrip()) :]
    pieces.append(r"\s?" if pieces and blanks else re.escape(blanks))
    return re.compile("".join(pieces))


def _opened(match: re.Match[str]) -> str:
    piece = match[0]
    if match["level"]:
        return rf"\s*k?(?i:{_ANY_LEVEL})\s*"
    if match["blanks"]:
        return r"\s+"
    if piece.isdigit():
        return r"\d+"
    if any(map(str.isdigit, piece)):
        return "[A-Za-z0-9]+"
    return "[FEWIVDXUS]" if piece in "FEWIVDXUS" else re.escape(piece)


# --- messages of one source -----------------------------------------------------------------------

_LONGEST_PREFIX = 300
_MOST_FOREIGN = 12
_SAMPLE = 700
"""Lines looked at for another program's prefix before the first message is read."""
_MARK = re.compile(r"[^\w\s]")
_CUT = re.compile(r"(?<=[\s:|>\])-])(?=\S)")
_BARE_STARTS = ("Layer(", "Name: ", "Layers:", "Bindings:")
"""Lines without a prefix in TensorRT's own logs: lists of layers."""
_PROGRESS = " .=*-_#~`\N{HORIZONTAL ELLIPSIS}"
"""Marks that programs print while they wait; the rest of a message never begins with them."""
_NARROWEST = 40
"""Columns: a shorter line says nothing about the width of a paste."""
_BRACKETS = frozenset("([")
"""A line that has one of these behind a known prefix takes the long way: more prefix may follow."""
_MOST_KNOWN = 6
_SUREST = 6
"""Characters behind the last digit of a prefix that are enough to know it again."""


class Messages:
    """The messages of one source, batch by batch.

    `starts` are the words with which messages begin, `sure` those of them that TensorRT alone
    writes. TensorRT's own prefixes are known by their form; any other prefix is what stands before
    sure words, with its numbers left open.
    """

    def __init__(self, starts: Iterable[str], sure: Iterable[str]) -> None:
        self.number = 0
        """Lines read so far."""
        self._starts = (*_BARE_STARTS, *starts)
        layers = (r"Layer\(\w+\): ", r"Name: .{1,200}?, LayerType: ")
        self._sure = re.compile("|".join((*map(re.escape, sure), *layers)))
        self._foreign: list[_ForeignPrefix] = []
        self._known: list[tuple[int, str, int, str]] = []
        """Prefixes met: where the last number ends, what follows it, the length, the severity."""

    def of(self, lines: Sequence[str], raw: Sequence[str]) -> Iterator[Message]:
        """The messages of these lines, which stand as `raw` in the file.

        A line whose prefix was met before takes the short way, which has to be fast.
        """
        if not self._foreign:
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
                yield self._long_way(line, row)

    def _long_way(self, line: str, row: str) -> Message:
        if "\r" in line:  # what a progress bar left before the message
            line = line.rstrip("\r").rpartition("\r")[2]
        style, severity, message = self._parts(line)
        if style is BARE:
            return LogicalLine(message.strip(), self.number, row, "", BARE)
        if style != DATED and severity in {"V", "I", ""} and line.endswith(message):
            self._learn(line[: len(line) - len(message)], severity)
        if style in {PLAIN, ANY, Producer.POLYGRAPHY}:
            message = _POLYGRAPHY_EXTRA.sub("", message, count=1)
        return LogicalLine(message.lstrip(), self.number, row, severity, style)

    def _learn(self, prefix: str, severity: str) -> None:
        """Remember a prefix where it will have the same length and end on the next lines."""
        # "[10:02:31] [V] [TRT] " is remembered as: at column 9, behind the last digit, stands
        # "] [V] [TRT] ", the prefix has 21 characters, and the severity is V.
        start = max((n for n, c in enumerate(prefix, 1) if c.isdigit()), default=0)
        enough = _SUREST if start else 1
        # a level before the last digit may be another one on other lines
        if len(prefix) - start < enough or _level_in(prefix[:start]):
            return
        known = (start, prefix[start:], len(prefix), severity)
        if known not in self._known and len(self._known) < _MOST_KNOWN:
            self._known.append(known)

    def _parts(self, line: str) -> Prefixed:
        text = _unquoted(line).lstrip()
        own = take_apart(text)
        # a tag alone may stand before more of a prefix: `[TRT] [VERBOSE] message`
        is_tag_alone = own is not None and not own.severity and own.message[:1] == "["
        if own is None or (is_tag_alone and not own.message.startswith(self._starts)):
            own = self._behind_another(text) or own
        return own or Prefixed(BARE, "", text)

    # --- prefixes of other programs -----------------------------------------------------------

    def _behind_another(self, line: str) -> Prefixed | None:
        """The message behind another program's prefix; a new prefix is remembered."""
        for known in self._foreign:
            match = known.pattern.match(line)
            if match is not None:
                return self._taken(known, match[0], line[match.end() :].lstrip())
        end = self._foreign_end(line)
        prefix = line[:end]
        is_prefix = _MARK.search(prefix) or _level_in(prefix)  # half a message is none
        if not is_prefix or len(self._foreign) == _MOST_FOREIGN:
            return None
        whole_line = line.startswith(("&&&& ", *_BARE_STARTS), end)
        around = whole_line or take_apart(line[end:]) is not None
        self._foreign.append(_ForeignPrefix(_prefix_pattern(prefix), around))
        return self._taken(self._foreign[-1], prefix, line[end:])

    def _foreign_end(self, line: str) -> int:
        """Where another program's prefix ends, if sure words follow; 0 where there is none."""
        # `app 12 | Parsing node: conv1`: "Parsing node" is TensorRT's alone, so what stands before
        # it is a prefix, and `app 13 | ` is one too. In `app | [V] Parsing node: conv1` TensorRT's
        # own `[V] ` is no part of it: such a prefix is put before whole lines.
        sure = self._sure.search(line, 0, _LONGEST_PREFIX)
        if sure is None:
            return 0
        message = line[sure.start() :]
        for cut in _CUT.finditer(line, 1, sure.start()):
            own = take_apart(line[cut.start() :])
            if own is not None and own.message == message:
                return cut.start()
        return sure.start()

    def _taken(self, known: _ForeignPrefix, prefix: str, rest: str) -> Prefixed:
        inner = take_apart(rest)
        if inner is None and known.around_lines:
            inner = self._behind_another(rest)
        if inner is not None:
            return inner._replace(severity=inner.severity or _level_in(prefix))
        if known.around_lines or rest.startswith(_BARE_STARTS):
            return Prefixed(BARE, "", rest)
        style: Producer | str = PLAIN
        for word, producer in _LOGGERS.items():
            if word in prefix.lower():
                style = producer
        return Prefixed(style, _level_in(prefix) or "I", rest)

    # --- hard wraps ---------------------------------------------------------------------------

    def _unwrapped(
        self, lines: Sequence[str], raw: Sequence[str]
    ) -> tuple[Sequence[str], Sequence[str]]:
        """The lines of a paste that a terminal broke, joined; an empty line stands for each rest.

        A line continues in the next one where it is as long as the widest line of the paste and the
        next one begins no message; one such pair may be chance.
        """
        # A terminal of 40 columns makes three lines of one message:
        #     [V] [TRT] (Sparsity) Found 3 layer(s) el    line 0: 40 characters, as no line has more
        #     igible to use sparse tactics: conv1, con    line 1: begins no message
        #     v2, conv3                                   line 2: begins no message
        # runs is [[0, 1, 2]]: line 0 becomes the message, and lines 1 and 2 become "", so that
        # the numbers of later lines stay right.
        width = max(map(len, lines), default=0)
        if width < _NARROWEST:
            return lines, raw
        runs: list[list[int]] = []
        for n, (line, after) in enumerate(pairwise(lines)):
            if len(line) == width and self._is_rest(after, line):
                if not runs or runs[-1][-1] != n:
                    runs.append([n])
                runs[-1].append(n + 1)
        if sum(map(len, runs)) < len(runs) + 2:
            return lines, raw
        whole = list(lines)
        rows = list(raw)
        for run in runs:
            first = run[0]
            whole[first] = "".join(lines[n] for n in run)
            rows[first] = "\n".join(raw[n] for n in run)
            for n in run[1:]:
                whole[n] = ""
                rows[n] = ""
        return whole, rows

    def _is_rest(self, line: str, before: str) -> bool:
        """Whether a line can continue the one before it: no message begins in it."""
        text = line.strip()
        if not text.strip(_PROGRESS) or take_apart(text) is not None:
            return False
        if any(known.pattern.match(text) for known in self._foreign):
            return False
        if take_apart(before) is not None:  # then a message without a prefix is no message
            return self._sure.match(text) is None
        return not text.startswith(self._starts)
