"""What other loggers put around TensorRT's lines: found in the file itself and taken off."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from twofour.logs.prefix import MESSAGE_START, TAGS, TAGS_START, has_own_prefix, loads, unquoted

_PAIR = re.compile(
    r"(?:^|(?<=[\s{,]))([A-Za-z_@][\w.@-]{0,40})="
    r"(?:\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'|([^\s\"']*))"
)
_LEVEL_KEYS = frozenset(("level", "levelname", "severity", "lvl", "loglevel", "log_level"))
_DEEPEST = 3


def fields_of(line: str) -> dict[str, str] | None:
    """Texts by their keys (`a.b` inside an object); None for a line of any other form."""
    text = line.strip()
    if text[:1] == "{" and text[-1:] == "}":
        return _of_json(text)
    if '="' not in text and "='" not in text:
        return None
    return {
        key: _unescaped(double) if double else single or bare
        for key, double, single, bare in _PAIR.findall(text)
    }


def level_in(fields: dict[str, str]) -> str:
    """The level that the fields state, in the logger's own word."""
    keys = (key for key in fields if _LEVEL_KEYS.intersection(key.lower().split(".")))
    return " ".join(fields[key] for key in keys)


def _of_json(text: str) -> dict[str, str] | None:
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        return None
    return dict(_texts(value, "", 0)) if isinstance(value, dict) else None


def _texts(value: dict[str, object], before: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, str):
            yield before + key, item
        elif isinstance(item, dict) and depth < _DEEPEST:
            yield from _texts(item, f"{before}{key}.", depth + 1)


def _unescaped(text: str) -> str:
    try:
        value = loads(f'"{text}"')
    except ValueError:
        return text
    return value if isinstance(value, str) else text


_SENTENCE = re.compile(
    r"-{15} Timing Runner: |\*{15} Autotuning format|>{15} Chose Runner Type|={15} Computing costs"
    r"|(?<!Set )Tactic Name: \S|(?<!Fastest )Tactic: (?:0x)?-?\w+ (?:[Tt]ime:? [\d.inf]|skipped\.)"
    r"|(?:\(foreignNode\) )?\(Sparsity\) (?:Found|Chose|Layers eligible|TRT inference)"
    r"|\(foreignNode\) |\[MemUsage(?:Change|Stats|Snapshot)\] |Engine generation completed in "
    r"|Engine (?:built|deserialized|loaded) in [\d.]+ sec|Loaded engine size: \d"
    r"|(?:Local|Global) timing cache in use|Detected \d+ inputs and \d+ output"
    r"|Total (?:Host Persistent|Device Persistent|Scratch|Activation|Weights) Memory: \d"
    r"|Applying generic optimizations|Registering (?:layer|tensor): |Parsing node: "
    r"|Importing initializer: |Searching for input: |Original: \d+ layers"
    r"|After [\w /-]{4,40}: \d+ layers|Graph optimization time: |Building graph using backend"
    r"|Loaded shared library \S*nvinfer|Setting workspace to \d+ ?enables|CUDA lazy loading is "
    r"|TensorRT was linked against|TensorRT version: \d|Set number of tactics to \d"
    r"|Adding network input: |Input filename: |ONNX IR version: |Registered plugin creator"
    r"|Plugin creator |Constructing optimization profile number |Deserialization required \d"
    r"|Formats and tactics selection|Engine Layer Information:|Selected Device: "
    r"|=== (?:Model|Build|System|Inference|Reporting|Performance) |&&&& (?:RUNNING|PASSED|FAILED) "
    r"|Throughput: [\d.]+ qps|Loaded Module: (?:polygraphy|tensorrt)|Layer\(\w+\): "
    r"|(?:RUNNING|PASSED|FAILED) \| (?:Command|Runtime): |Found (?:non-)?sparse tensor: "
    r"|==== TensorRT (?:Network|Engine) ====|Algorithm: \(Implementation: "
    r"|Building engine with configuration:|Finished engine building in \d"
    r"|Loading tactic replay file|ModelImporter\.cpp:\d+: |Name: .{1,200}?, LayerType: "
)
"""Words with which a message of TensorRT or its tools begins, and no message goes on."""
_LONGEST = 300
"""Characters of a prefix."""
_MOST_PATTERNS = 12
_SAMPLE = 700
"""Lines looked at in every batch, to find out whether anything stands before its messages."""
_LEVEL_WORDS = {
    "trace": "V", "debug": "V", "verbose": "V", "info": "I", "notice": "I", "success": "I",
    "warning": "W", "warn": "W", "error": "E", "err": "E", "critical": "F", "fatal": "F",
    "internal_error": "F", "kverbose": "V", "kinfo": "I", "kwarning": "W", "kerror": "E",
    "kinternal_error": "F",
}  # fmt: skip
_ANY_LEVEL = "|".join(sorted(_LEVEL_WORDS, key=len, reverse=True))
_LEVEL = re.compile(
    rf"(?<![\w.])(?:{_ANY_LEVEL.upper()})(?![\w/]|\.\w)"
    rf"|(?:(?<![\w./-])|(?<=Severity\.))(?i:{_ANY_LEVEL})(?![\w/]|[.-]\w)"
)
"""Never a part of a path or a file's name: `error.log:12:`."""
_LEVEL_LETTER = re.compile(r"(?<![\w.])(?:[\[(<]([FEWIVD])[\])>]|([FEWIV])(?=/|\d{4} ))")
_CLOCK = re.compile(r"\d{1,2}:\d\d|\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d\d|\d\.\d{3,9}\s$")
_NUMBERED = re.compile(r"(?:[^\s:][^:]{0,150}[:-])?\d{1,9}[:-]\s?$")
"""`grep -n`: a line's number, with the file's name where there are several."""
_MARKS = re.compile(r"\s*[^\w\s]{1,3}(?:\s?[^\w\s]{1,3})?\s*$")
"""Marks alone: `> ` of a quotation, `| ` of a frame."""
_DELIMITED = re.compile(r"[|:>\])-]\s*$")
_LETTERS = "FEWIVDXUS"
_PIECE = re.compile(rf"(?P<level>{_LEVEL.pattern})|[A-Za-z0-9]+|\s+|.", re.DOTALL)
_CALENDAR = re.compile(r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat"
                       r"|sun)$", re.IGNORECASE)  # fmt: skip
_CUT = re.compile(r"(?<=[\s:|>\])-])(?=\S)")
_BARE = ("&&&& ", "Layer(", "Name: ", "Layers:", "Bindings:")
"""Lines without a prefix in TensorRT's own logs: of trtexec, or lists of layers."""
_TORCH = re.compile(r"torch[_-]tensorrt", re.IGNORECASE)
_TORCH_WORDS = {"V": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "INTERNAL_ERROR"}


class _Outer(NamedTuple):
    """One form of prefix."""

    pattern: re.Pattern[str]
    around_lines: bool
    """It stands before whole lines, which have a prefix of their own; else before messages."""


class OuterPrefixes:
    """The prefixes of one source, learned batch by batch."""

    def __init__(self) -> None:
        self._known: list[_Outer] = []
        self._key: str | None = None
        """Name of the field that holds the message, where lines are JSON or key=value."""

    def removed(self, lines: Sequence[str]) -> Sequence[str]:
        """The lines without what other programs put around them; most logs come back as given."""
        step = max(1, len(lines) // _SAMPLE)
        unknown = self._learn_from(lines[::step])
        if step > 1 and 2 * unknown > _SAMPLE:
            self._learn_from(lines)
        if not self._known and self._key is None:
            return lines
        return [self._inner(line) for line in lines]

    # --- learning ----------------------------------------------------------------------------

    def _learn_from(self, lines: Sequence[str]) -> int:
        """How many of the lines begin with no known prefix; what stands before those is learned."""
        unknown = 0
        for line in lines:
            if line[TAGS_START:MESSAGE_START] not in TAGS and not has_own_prefix(line):
                unknown += 1
                self._learn(line)
        return unknown

    def _learn(self, line: str) -> None:
        message = self._message_of_fields(line)
        text = _element(line) if message is None else message
        start = _SENTENCE.search(text, 0, _LONGEST + 40)
        if start is None or not start.start() or has_own_prefix(text):
            return
        cut = _outer_length(text, start.start())
        around_lines = cut < start.start() or start[0].startswith(_BARE)
        cut = min(cut, len(text[:cut].rstrip()) + 1) if text[:cut].strip() else cut
        known = self._outer_of(text)
        if known is not None:
            if around_lines and known[1] <= cut:
                self._known[0] = known[0]._replace(around_lines=True)
        elif len(self._known) < _MOST_PATTERNS and _is_prefix(
            text[:cut], around_lines=around_lines
        ):
            self._known.append(_Outer(prefix_pattern(text[:cut]), around_lines))

    def _message_of_fields(self, line: str) -> str | None:
        """The message in a line of JSON or of key=value pairs, told by its sentence."""
        fields = fields_of(line)
        if fields is None:
            return None
        if self._key is None:
            held = [key for key, value in fields.items() if _SENTENCE.search(value[:_LONGEST])]
            self._key = min(held, key=lambda key: len(fields[key]), default=None)
        return None if self._key is None else fields.get(self._key)

    # --- removing ----------------------------------------------------------------------------

    def _inner(self, line: str) -> str:
        if self._key is not None and (fields := fields_of(line)) and self._key in fields:
            text = fields[self._key].rstrip("\n")
            inner = self._without_prefix(text, _severity(level_in(fields)))
            return "\r" + inner.replace("\n", "\r") if "\n" in inner else inner
        element = _element(line)
        inner = self._without_prefix(element, "")
        return line if inner == element else inner

    def _without_prefix(self, line: str, level: str) -> str:
        """What is behind the prefix; a message of a logger with its level as TensorRT writes it."""
        found = self._outer_of(line)
        outer = "" if found is None else line[: found[1]]
        rest, severity = line[len(outer) :], level
        if found is not None:
            severity = "" if found[0].around_lines else _severity(outer) or level or "I"
        if not severity or rest.startswith(_BARE) or has_own_prefix(rest):
            return rest
        if _TORCH.search(outer):
            return f"{_TORCH_WORDS[severity]}: [Torch-TensorRT] - {rest}"
        return f"[{severity}] {rest}"

    def _outer_of(self, line: str) -> tuple[_Outer, int] | None:
        for place, outer in enumerate(self._known):
            match = outer.pattern.match(line)
            if match is not None:
                if place:
                    self._known.insert(0, self._known.pop(place))
                return outer, match.end()
        return None


def _element(line: str) -> str:
    """The text of a line that is one string of a JSON array, whose quotes are no prefix."""
    text = unquoted(line) if line.lstrip()[:1] == '"' else None
    return line if text is None else text.rstrip("\r\n")


def _severity(text: str) -> str:
    """F E W I V by the last word (or letter) of a level in a prefix; "" where there is none."""
    words = _LEVEL.findall(text)
    if words:
        return _LEVEL_WORDS[words[-1].lower()]
    letters = _LEVEL_LETTER.findall(text)
    letter = "".join(letters[-1]) if letters else ""
    return "V" if letter == "D" else letter


def _outer_length(line: str, message: int) -> int:
    """Where a prefix that is TensorRT's own begins; else the place of the message."""
    for match in _CUT.finditer(line, 1, message):
        if has_own_prefix(line[match.start() :], length=message - match.start()):
            return match.start()
    return message


def _is_prefix(text: str, *, around_lines: bool) -> bool:
    """Whether the text looks like what a logger or a tool writes, not like half a message."""
    if len(text) > _LONGEST:
        return False
    if not text.strip():
        return around_lines
    marked = _NUMBERED.match(text) or _MARKS.match(text) or _DELIMITED.search(text)
    return bool(marked or _CLOCK.search(text) or _severity(text))


def prefix_pattern(prefix: str) -> re.Pattern[str]:
    """The prefix with every number, clock, level and padding left open."""
    pattern = "".join(_open_pieces(prefix))
    return re.compile(pattern.replace(r"\s+(?i:", r"\s*(?i:"))  # `[ DEBUG  ]`, `[WARNING ]`


def _open_pieces(prefix: str) -> Iterator[str]:
    after_level = False
    for match in _PIECE.finditer(prefix):
        if match["level"]:
            yield f"(?i:{_ANY_LEVEL})"
        else:
            last = match.end() == len(prefix)
            alone = last and not match.start()
            yield _open_piece(match[0], after_level=after_level, last=last, alone=alone)
        after_level = bool(match["level"])


def _open_piece(piece: str, *, after_level: bool, last: bool, alone: bool) -> str:
    if piece.isspace():
        if alone:
            return re.escape(piece)
        if after_level:
            return r"\s*"
        return r"\s?" if last else r"\s+"
    if any(c.isdigit() for c in piece):
        return r"\d+" if piece.isdigit() else "[A-Za-z0-9]+"
    if piece in _LETTERS:
        return f"[{_LETTERS}]"
    return "[A-Za-z]{3}" if _CALENDAR.match(piece) else re.escape(piece)


_WHOLE = re.compile(
    r"Tactic: (?:0x)?-?\w+ Time: [\d.]+(?:e[+-]?\d+)?"
    r"|Engine generation completed in [\d.]+ seconds\."
    r"|CUDA lazy loading is enabled\.|\[MemUsageChange\] .{1,200}?\(MiB\)"
    r"|(?:Trying to load|Loaded) shared library \S+?\.so(?:\.\d+){0,4}"
    r"|Total (?:(?:Host|Device) Persistent|Scratch|Activation|Weights) Memory: \d+(?: bytes)?"
    r"|Detected \d+ inputs and \d+ output network tensors\."
    r"|Graph optimization time: [\d.]+ seconds\."
    r"|Original: \d+ layers|After [\w /-]{4,40}: \d+ layers"
    r"|Chose Runner Type: \S+ Tactic: 0x[0-9a-fA-F]+"
)
"""Messages up to their last character."""
_NONE_CHOSEN = re.compile(
    r"\(Sparsity\) (?:Chose 0 layer\(s\) using sparse tactics"
    r"|TRT inference plan picked sparse implementation for layers):"
)
"""Where nothing need follow; TensorRT 8 prints no count."""
_ELIGIBLE = re.compile(r"\(Sparsity\) (?:Found|Layers eligible)[^:]{1,60}:")
_FIELD = re.compile(r'(?P<key>[\w.]+=|"[\w.]+": ?)(?:"[^"]*"|[^\s,}\]"]+)')
_VALUE = r'(?:"[^"]*"|[^\s,}\]"]+)'
_NAME_GOES_ON = (",", ":", "+", "|", "(")
"""Behind these, a list's last words are a name, though another line ends with them."""
_MARK = "(Sparsity)"
_MESSAGES = 200
"""Looked at in every batch, besides all that have the mark."""
_CLEAN = 40
"""Messages with nothing behind them, after which a source is known to have no suffix."""
_MOST_SUFFIXES = 6


class OuterSuffixes:
    """The suffixes of one source, learned batch by batch."""

    def __init__(self) -> None:
        self._known: list[re.Pattern[str]] = []
        self._clean = 0

    def removed(self, lines: Sequence[str]) -> Sequence[str]:
        """The lines without what other programs put behind them; most logs come back as given."""
        if self._known or self._clean < _CLEAN:
            step = max(1, len(lines) // _MESSAGES)
            self._learn([x for i, x in enumerate(lines) if not i % step or _MARK in x])
        if not self._known:
            return lines
        return [self._without(line) for line in lines]

    def _learn(self, lines: Sequence[str]) -> None:
        """Patterns behind two messages at least, and behind most of those whose end is known.

        One behind a list of no choices needs no majority where a list of eligible layers ends with
        the very same: what another program glued to both is no name.
        """
        lines = [line for line in lines if "\r" not in line and self._without(line) == line]
        rests = [line[found.end() :] for line in lines if (found := _WHOLE.search(line))]
        behind = [rest for rest in rests if rest.strip() and len(rest) <= _LONGEST]
        clean = len(rests) - len(behind)
        self._clean += clean
        lists = [line[found.end() :] for line in lines if (found := _ELIGIBLE.search(line))]
        nones = [line[none.end() :] for line in lines if (none := _NONE_CHOSEN.search(line))]
        for rest in behind if clean <= len(behind) else ():
            pattern = suffix_pattern(rest)
            alike = sum(1 for other in (*behind, *nones) if pattern.fullmatch(other))
            if alike + sum(1 for names in lists if _ends_a_name(pattern, names)) > 1:
                self._add(rest, pattern)
        for rest in nones:
            same = re.compile(re.escape(rest.strip()) + r"\Z")
            if rest.strip() and any(_ends_a_name(same, names) for names in lists):
                self._add(rest, suffix_pattern(rest))

    def _add(self, rest: str, pattern: re.Pattern[str]) -> None:
        known = any(known.fullmatch(rest) for known in self._known)
        if not known and len(self._known) < _MOST_SUFFIXES and len(rest) <= _LONGEST:
            self._known.append(pattern)

    def _without(self, line: str) -> str:
        for pattern in self._known:
            match = pattern.search(line, max(0, len(line) - _LONGEST))
            if match is not None:
                rest = line[: match.start()]
                return rest.rstrip() if match[0][0].isspace() else rest
        return line


def _ends_a_name(suffix: re.Pattern[str], names: str) -> bool:
    """Whether a list ends with the suffix, behind what can be the end of a name."""
    match = suffix.search(names, max(0, len(names) - _LONGEST))
    before = "" if match is None else names[: match.start()].rstrip()
    return bool(before) and not before.endswith(_NAME_GOES_ON)


def suffix_pattern(suffix: str) -> re.Pattern[str]:
    """The suffix with every number, level, padding and field's value left open."""
    parts, place = [], 0
    for field in _FIELD.finditer(suffix):
        parts += [_open(suffix[place : field.start()]), re.escape(field["key"]), _VALUE]
        place = field.end()
    return re.compile("".join((*parts, _open(suffix[place:]))) + r"\Z")


def _open(text: str) -> str:
    inner = text.strip()
    if not inner:
        return r"\s+" if text else ""
    before = r"\s+" if text[0].isspace() else ""
    after = r"\s+" if text[-1].isspace() else ""
    return before + prefix_pattern(inner).pattern + after
