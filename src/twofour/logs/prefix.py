"""The prefix of a logger in front of a message: severity, time and tag."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from twofour.records.log import Producer

TAGS_START = 22
"""Place of the tags in `[MM/DD/YYYY-HH:MM:SS] [V] [TRT] message`."""
MESSAGE_START = 32
"""Place of the message there."""
AFTER_DATE: dict[Producer | str | None, dict[str, str]] = {
    Producer.TRTEXEC: {"[V] [TRT] ": "V", "[I] [TRT] ": "I"},
    Producer.PYTHON: {"[TRT] [V] ": "V", "[TRT] [I] ": "I"},
}
"""The tags of each producer there, with their severities."""
TAGS = frozenset(tag for tags in AFTER_DATE.values() for tag in tags)
BRACKETS = frozenset("([")
"""What a message behind a known prefix may not begin with: more of a prefix may follow."""
AVERAGE = "[I] Average on "
"""trtexec's progress, the most frequent line of all and without a fact."""
_NO_LINE = "\n"
"""Begins no line."""
_MOST = 6


class KnownPrefixes:
    """Prefixes met so far that have no clock in them, with their lengths and severities."""

    def __init__(self) -> None:
        self.first = (_NO_LINE, 0, "")
        """The first one met: most logs have no other."""
        self._known: list[tuple[str, int, str]] = []

    def of(self, line: str) -> tuple[str, int, str] | None:
        """The prefix of a line; None for any other, and where more of one may follow."""
        for known in self._known:
            if line.startswith(known[0]):
                return None if line[known[1] : known[1] + 1] in BRACKETS else known
        return None

    def learn(self, line: str, message: str, severity: str) -> None:
        """Remember the line's prefix where it will be the same on the next lines."""
        prefix = line[: len(line) - len(message)]
        if severity not in {"V", "I", ""} or not prefix or any(c.isdigit() for c in prefix):
            return
        known = (prefix, len(prefix), severity)
        if len(self._known) < _MOST and known not in self._known:
            self._known.append(known)
            self.first = self._known[0]


PLAIN = "plain"
"""Style of `[V] message`, which several producers share."""
DATED = "dated"
"""Style of `[date] [I] message`: trtexec's own lines, and whoever imitates them."""
BARE = "bare"
"""Style of a line without any prefix."""
ANY = "any"
"""Style of a prefix that could be of any producer."""


class LogicalLine(NamedTuple):
    """One message, whatever stood around it and over however many lines it was broken."""

    text: str
    """Without what stands before it."""
    number: int
    """Of the line where it begins."""
    raw: str
    """That line as it stands in the file; the rows of a broken message, one below the other."""
    severity: str
    """F E W I V, of TensorRT; "" where the prefix has none."""
    style: Producer | str | None
    """The producer its prefix speaks for; PLAIN, ANY or BARE; None for a prefix met before."""

    @property
    def quote(self) -> str:
        """The message as it stands in the file: all of its line where other programs changed it."""
        return self.raw if "\n" in self.raw else quoted(self.text, self.raw)


Message = tuple[str, int, str, str, Producer | str | None]
"""The same as a mere tuple: naming the parts of every line would cost a tenth of the time."""


def named(line: Message) -> LogicalLine:
    """The line with names for its parts."""
    return line if isinstance(line, LogicalLine) else LogicalLine._make(line)


def quoted(text: str, row: str) -> str:
    """The text where the row of the file has it to the letter; else the row."""
    text = text.strip()
    return text if text in row else row.strip()


class Prefixed(NamedTuple):
    """A line taken apart."""

    style: Producer | str | None
    """The producer its prefix speaks for; PLAIN; None where it could be any."""
    severity: str
    """F E W I V, of TensorRT; "" where the prefix has none."""
    message: str


_TAGS = re.compile(
    r"(?P<date>\[\d\d/\d\d/\d{2,4}-[\d:.]{8,15}\] ?)?"
    r"(?P<tags>(?:\[(?:TRT|TRT-LLM|TensorRT|[FEWIVXUSD!])\]:?[ \t]?){1,3})"
    r"(?:(?P<word>INTERNAL_ERROR|ERROR|WARNING|INFO|VERBOSE): )?"
)
_POLYGRAPHY_EXTRA = re.compile(r"(?:\(\d\d:\d\d:\d\d\) )?(?:\[[\w./\\-]+\.py:\d+\] )?")
_DATE = re.compile(r"\[\d\d/\d\d/\d{2,4}-[\d:.]{8,15}\] ?")
_WORD = re.compile(
    r"(?P<word>INTERNAL_ERROR|ERROR|WARNING|INFO|DEBUG|VERBOSE|GRAPH): ?-? ?"
    r"(?P<tag>\[TRT\]: ?|\[Torch-TensorRT[^\]]{0,60}\] ?- ?)"
)
_ORT = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\S{5,24} \[\w:onnxruntime:[^\]]{0,200}\] "
    r"\[\d{4}-\d\d-\d\d [\d:.]{5,18} +(?P<word>\w+)\] ?"
)
_LOGGING = re.compile(
    r"(?:\[?\d{4}-\d\d-\d\d[ T][\d:]{8}(?P<python>,\d{3})?(?:\.\d{1,9})?\]?(?: [-:|] |[ :]))?"
    r"(?P<before>(?:[\[(]?[\w./-]{1,60}[\])]?(?: [-:|] |: ?| )){0,2}?)"
    r"[\[(]?(?P<word>CRITICAL|ERROR|WARN(?:ING)?|INFO|DEBUG|VERBOSE)[\])]?"
    r"\s{0,8}(?:[-:|] |:|(?<= ))"
    r"(?P<after>[\[(]?[\w.]{0,40}(?i:trt|tensorrt)[\w.]{0,40}[\])]?(?: [-:|] |: ?))?",
)
"""Loggers of Python and the like, as `%(asctime)s - %(name)s - %(levelname)s - %(message)s`."""
_LOGGER = re.compile(r"trt|tensorrt", re.IGNORECASE)
_GSTREAMER = re.compile(
    r"\d{1,4}:\d\d:\d\d\.\d{1,9} +\d{1,9} +0x[0-9a-f]{1,16} +(?P<word>[A-Z]{3,7}) +\w{1,40} "
    r".{0,300}?\[TRT\]: ?"
)
"""GStreamer's log, in which nvinfer hands on what TensorRT says."""
_BANNER = re.compile(r"&&&& (?:RUNNING|PASSED|FAILED|WAIVED) TensorRT")
_INNER = re.compile(
    r"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[|&&&& (?:RUNNING|PASSED|FAILED) TensorRT"
    r"|(?:\(foreignNode\) )?\(Sparsity\) (?:Found|Chose|Layers eligible|TRT inference)"
    r"|-{15} Timing Runner: |\*{15} Autotuning format|>{15} Chose Runner"
)
_LETTERS = {
    "INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W", "INFO": "I", "VERBOSE": "V",
    "DEBUG": "V", "GRAPH": "V", "!": "F", "X": "V", "U": "V", "S": "V", "D": "V",
    "CRITICAL": "F", "WARN": "W", "LOG": "V", "TRACE": "V",
}  # fmt: skip
_OUTER = 200
"""Characters of somebody else's prefix (a container's clock, say) that are looked through."""


def take_apart(line: str) -> Prefixed | None:
    """The line's message without what stands before it; None where nothing known does."""
    first = line[:1]
    found = _own(line)
    if found is None and (first == "[" or first.isalnum()):
        found = _logged(line)
    elif found is None and first in {'"', " ", "\t"}:
        found = _quoted(line)
    return found or _inside(line)


def has_own_prefix(line: str, *, length: int | None = None) -> bool:
    """Whether the line begins with one of TensorRT's or its tools' prefixes (of that `length`).

    Not where a tag alone stands before more of a prefix: `[TRT] [VERBOSE] message`.
    """
    found = _own(line)
    if found is None or (not found.severity and found.message[:1] == "[" and line[0] == "["):
        return False
    return length in {None, len(line) - len(found.message)}


def _own(line: str) -> Prefixed | None:
    first = line[:1]
    if first == "[":
        return _tagged(line)
    if first.isdigit():
        return _matched(_ORT, line, Producer.ONNXRUNTIME) or _matched(
            _GSTREAMER, line, Producer.DEEPSTREAM
        )
    if first.isupper():
        return _worded(line)
    is_banner = first == "&" and _BANNER.match(line) is not None
    return Prefixed(Producer.TRTEXEC, "", line) if is_banner else None


def unquoted(line: str) -> str | None:
    """The text of a line that is one element of a JSON array of strings."""
    text = line.strip().rstrip(",")
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return None
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


_SURROGATES = re.compile(
    r"\\u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
"""A pair, which is how JSON spells one character of the higher planes, or half of one."""
_PAIR_LENGTH = 12


def loads(text: str) -> object:
    """json.loads, but half a character (a lone surrogate, which no file can hold) becomes U+FFFD.

    Raises what json.loads raises.
    """
    if "\\u" in text:
        text = _SURROGATES.sub(_whole, text)
    value: object = json.loads(text)
    return value


def _whole(found: re.Match[str]) -> str:
    return found[0] if len(found[0]) == _PAIR_LENGTH else "\\ufffd"


def _tagged(line: str) -> Prefixed | None:
    match = _TAGS.match(line)
    if match is None:
        date = _DATE.match(line)
        return None if date is None else Prefixed(None, "", line[date.end() :])
    tags, word = match["tags"].rstrip(), match["word"]
    message = line[match.end() :]
    letter = next((tag for tag in re.findall(r"\[([FEWIVXUSD!])\]", tags)), "")
    severity = _LETTERS.get(word or letter, letter)
    return Prefixed(_tag_style(tags, letter, dated=bool(match["date"])), severity, message)


def _tag_style(tags: str, letter: str, *, dated: bool) -> Producer | str | None:
    if letter in {"X", "U"}:
        return Producer.POLYGRAPHY
    if tags.startswith("[TRT-LLM]"):
        return Producer.TENSORRT_LLM
    if "[TensorRT]" in tags:
        return Producer.PYTHON
    if "[TRT]" in tags:
        if not letter:
            return Producer.JETSON_INFERENCE
        return Producer.PYTHON if tags.startswith("[TRT]") else Producer.TRTEXEC
    return DATED if dated else PLAIN


def _logged(line: str) -> Prefixed | None:
    """Behind the prefix of a logger with TensorRT's name; what others log is none of ours."""
    match = _LOGGING.match(line)
    if match is None:
        return None
    rest = line[match.end() :]
    inner = _tagged(rest) if _TAGS.match(rest) else None
    if inner is None and (match["after"] or _LOGGER.search(match["before"])):
        style = Producer.PYTHON if match["python"] else None
        return Prefixed(style, _LETTERS[match["word"]], rest)
    return inner


def _worded(line: str) -> Prefixed | None:
    match = _WORD.match(line)
    if match is not None:
        torch = match["tag"].startswith("[Torch")
        style = Producer.TORCH_TENSORRT if torch else Producer.DEEPSTREAM
        return Prefixed(style, _LETTERS[match["word"]], line[match.end() :])
    return None


def _matched(pattern: re.Pattern[str], line: str, style: Producer) -> Prefixed | None:
    match = pattern.match(line)
    if match is None:
        return None
    return Prefixed(style, _LETTERS.get(match["word"], ""), line[match.end() :])


def _quoted(line: str) -> Prefixed | None:
    text = unquoted(line)
    return None if text is None or text[:1] in {'"', " "} else take_apart(text.rstrip("\r\n"))


def _inside(line: str) -> Prefixed | None:
    """A message behind a prefix of somebody else."""
    match = _INNER.search(line, 1, _OUTER)
    if match is None:
        return None
    rest = line[match.start() :]
    return _tagged(rest) if rest[0] == "[" else Prefixed(None, "", rest)


def without_polygraphy_extras(message: str) -> str:
    """The message without the clock and source position Polygraphy puts before it on request."""
    match = _POLYGRAPHY_EXTRA.match(message)
    return message if match is None else message[match.end() :]
