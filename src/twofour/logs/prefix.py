"""The prefix of a logger in front of a message: severity, time and tag."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from twofour.records.log import Producer

_ENOUGH = 9
"""Characters by which a message is found in its line."""
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
        text, (row, *more) = self.text.strip(), self.raw.split("\n")
        if more:
            start = max(row.find(text[:_ENOUGH]), 0)
            return "\n".join((row[start:], *more))
        return text if text in row else row.strip()


Message = tuple[str, int, str, str, Producer | str | None]
"""The same as a mere tuple: naming the parts of every line would cost a tenth of the time."""


def named(line: Message) -> LogicalLine:
    """The line with names for its parts."""
    return line if isinstance(line, LogicalLine) else LogicalLine._make(line)


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
_BANNER = re.compile(r"&&&& (?:RUNNING|PASSED|FAILED|WAIVED) TensorRT")
LEVELS = {
    "TRACE": "V", "DEBUG": "V", "GRAPH": "V", "VERBOSE": "V", "INFO": "I",
    "NOTICE": "I", "WARNING": "W", "WARN": "W", "ERROR": "E", "ERR": "E", "CRITICAL": "F",
    "FATAL": "F", "INTERNAL_ERROR": "F", "!": "F", "X": "V", "U": "V", "S": "V", "D": "V",
}  # fmt: skip
"""TensorRT's letter for what a level is called elsewhere."""


def take_apart(line: str) -> Prefixed | None:
    """The line's message behind a prefix of TensorRT's or its tools' own; None for any other."""
    line = line.lstrip()
    first = line[:1]
    if first == "[":
        return _tagged(line)
    if first.isdigit() and (match := _ORT.match(line)) is not None:
        return Prefixed(Producer.ONNXRUNTIME, LEVELS.get(match["word"], ""), line[match.end() :])
    if first.isupper() and (match := _WORD.match(line)) is not None:
        torch = match["tag"].startswith("[Torch")
        style = Producer.TORCH_TENSORRT if torch else Producer.DEEPSTREAM
        return Prefixed(style, LEVELS[match["word"]], line[match.end() :])
    is_banner = first == "&" and _BANNER.match(line) is not None
    return Prefixed(Producer.TRTEXEC, "", line) if is_banner else None


def unquoted(line: str) -> str:
    """The text of a line that is one element of a JSON array of strings; any other as it is."""
    text = line.strip().rstrip(",")
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return line
    try:
        value = loads(text)
    except ValueError:
        return line
    return value.rstrip("\r\n") if isinstance(value, str) else line


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
    severity = LEVELS.get(word or letter, letter)
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
            return Producer.DEEPSTREAM if tags == "[TRT]:" else Producer.JETSON_INFERENCE
        return Producer.PYTHON if tags.startswith("[TRT]") else Producer.TRTEXEC
    return DATED if dated else PLAIN


def without_polygraphy_extras(message: str) -> str:
    """The message without the clock and source position Polygraphy puts before it on request."""
    match = _POLYGRAPHY_EXTRA.match(message)
    return message if match is None else message[match.end() :]


_ANY_LEVEL = "|".join(word for word in LEVELS if len(word) > 1)
_LEVEL = rf"(?:(?<![\w.])|(?<=Severity\.))k?(?i:{_ANY_LEVEL})(?![\w/]|[.-]\w)"
"""Never a part of a path or a file's name: `error.log:12:`."""
_LEVEL_LETTER = re.compile(r"(?<![\w.])(?:[\[(<]([FEWIVD])[\])>]|([FEWIV])(?=/|\d{4} ))")
_PIECE = re.compile(rf"(?P<level>\s*{_LEVEL}\s*)|[A-Za-z0-9]+|\s+|.", re.DOTALL)
_CALENDAR = re.compile(
    r"(?i:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun)$"
)


def level_in(prefix: str) -> str:
    """F E W I V by the last word (or letter) of a level in a prefix; "" where there is none."""
    words = re.findall(_LEVEL, prefix)
    if words:
        return LEVELS[words[-1].upper().removeprefix("K")]
    letters = _LEVEL_LETTER.findall(prefix)
    letter = "".join(letters[-1]) if letters else ""
    return "V" if letter == "D" else letter


def prefix_pattern(prefix: str) -> re.Pattern[str]:
    """The prefix with every number, clock, level and padding left open."""
    pieces = _PIECE.finditer(prefix)
    return re.compile("".join(_opened(piece, len(prefix)) for piece in pieces))


def _opened(match: re.Match[str], length: int) -> str:
    piece = match[0]
    if match["level"]:
        return rf"\s*k?(?i:{_ANY_LEVEL})\s*"
    if piece.isspace():
        alone = len(piece) == length
        return re.escape(piece) if alone else r"\s?" if match.end() == length else r"\s+"
    if any(c.isdigit() for c in piece):
        return r"\d+" if piece.isdigit() else "[A-Za-z0-9]+"
    if piece in "FEWIVDXUS":
        return "[FEWIVDXUS]"
    return "[A-Za-z]{3}" if _CALENDAR.match(piece) else re.escape(piece)
