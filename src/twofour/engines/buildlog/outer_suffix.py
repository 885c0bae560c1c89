"""What loggers put behind every message: a source position, a closing quote, key=value fields.

Some of TensorRT's sentences have an end that is known. What follows them there becomes a pattern,
as prefixes do, and goes from every line that ends with it; so no name of a list takes it in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from twofour.engines.buildlog.outer_prefix import prefix_pattern

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
_LONGEST = 300
"""Characters of a suffix."""
_SAMPLE = 200
_CLEAN = 40
"""Messages with nothing behind them, after which a source is known to have no suffix."""
_MOST_PATTERNS = 6


class OuterSuffixes:
    """The suffixes of one source, learned batch by batch."""

    def __init__(self) -> None:
        self._known: list[re.Pattern[str]] = []
        self._clean = 0

    def removed(self, lines: Sequence[str]) -> Sequence[str]:
        """The lines without what other programs put behind them; most logs come back as given."""
        if self._known or self._clean < _CLEAN:
            step = max(1, len(lines) // _SAMPLE)
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
        if not known and len(self._known) < _MOST_PATTERNS and len(rest) <= _LONGEST:
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
