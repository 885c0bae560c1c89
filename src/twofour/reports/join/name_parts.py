"""Engine layer name -> the layers it was fused from: `A + B`, `A || B`, `PWN(A, B)`, regions.

Names are not quoted and ONNX allows any string as one, so known names are tried first and the
grammar only settles the rest. One pass from left to right; nothing is recursive in the input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

PROFILE = re.compile(r"(?: \[profile \d+\])+$")
"""Behind the names of layers and tensors of each further optimization profile."""
_POINTWISE = "PWN("
REGION, _REGION_END = "{ForeignNode[", "]}"
_DOTS = "..."
_ENDS = re.compile(r" \+ | \|\| |, |\)")
_SEPARATORS = re.compile(r" *(?: \+ | \|\| |, )")
_TOKENS = re.compile(r" \+ | \|\| |, |[(\[{)\]}]")
_REGION_TOKENS = re.compile(r"\{ForeignNode\[|\]\}")
_LONGEST_END = 4
_MOST_ENDS = 64
"""Ends tried for a known name that holds separators itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One layer that went into an engine layer, or a Myelin region with its two ends."""

    text: str
    first: tuple[str, ...] | None = None
    """For a region: the layers named before the dots; None for a plain layer."""
    last: tuple[str, ...] = ()
    """For a region: the layers named after the dots; () where it names one place alone."""

    @property
    def is_region(self) -> bool:
        """Whether it stands for all nodes between two."""
        return self.first is not None


@dataclass(frozen=True, slots=True)
class KnownNames:
    """Names that are taken whole wherever they stand, separators and brackets in them included."""

    names: Set[str]
    most_ends: int
    """Separators in the name that has the most of them."""
    longest: int

    @classmethod
    def of(cls, names: Iterable[str]) -> KnownNames:
        """Count once how far a name may reach."""
        known = frozenset(name for name in names if name)
        ends = max((len(_ENDS.findall(name)) for name in known), default=0)
        return cls(known, min(ends, _MOST_ENDS), max(map(len, known), default=0))


def split_name(name: str, known: KnownNames) -> tuple[Part, ...]:
    """The parts of an engine layer's name, in its order; never empty unless the name is."""
    if name in known.names:
        return (Part(text=name),)
    return tuple(_parts(name, known))


def _parts(name: str, known: KnownNames) -> Iterator[Part]:
    at = depth = 0
    while at < len(name):
        end = _known_end(name, at, known)
        if end is None and name.startswith(_POINTWISE, at):
            depth += 1
            at += len(_POINTWISE)
            continue
        if end is None and name.startswith(REGION, at):
            end = _region_end(name, at)
            yield _region(name[at:end], known)
        else:
            end = end if end is not None else _plain_end(name, at, inside=depth > 0)
            if text := name[at:end].strip():
                yield Part(text=text)
        while depth and name.startswith(")", end):
            depth -= 1
            end += 1
        separator = _SEPARATORS.match(name, end)
        at = separator.end() if separator else max(end, at + 1)


def _known_end(name: str, at: int, known: KnownNames) -> int | None:
    """Where the longest known name that starts here ends, if a separator follows it."""
    ends: list[int] = []
    horizon = at + known.longest + _LONGEST_END
    for match in _ENDS.finditer(name, at, horizon):
        ends.append(match.start())
        if len(ends) > known.most_ends:
            break
    else:
        ends.append(min(len(name), horizon))
    return next((end for end in reversed(ends) if name[at:end] in known.names), None)


def _plain_end(name: str, at: int, *, inside: bool) -> int:
    """Where an unknown name ends: a separator, or a closing bracket of PWN, at its own depth 0."""
    depth = 0
    for match in _TOKENS.finditer(name, at):
        found = match[0]
        if found in ("(", "[", "{"):
            depth += 1
        elif found in (")", "]", "}"):
            if depth == 0 and found == ")" and inside and match.start() > at:
                return match.start()
            depth = max(depth - 1, 0)
        elif depth == 0 and match.start() > at:
            return match.start()
    return len(name)


def _region_end(name: str, at: int) -> int:
    depth = 0
    for match in _REGION_TOKENS.finditer(name, at):
        depth += 1 if match[0] == REGION else -1
        if depth == 0:
            return match.end()
    return len(name)


def _region(text: str, known: KnownNames) -> Part:
    inner = text[len(REGION) :].removesuffix(_REGION_END)
    left, right = _ends_of(inner, known)
    return Part(text=text, first=_plain_texts(left, known), last=_plain_texts(right, known))


def _ends_of(inner: str, known: KnownNames) -> tuple[str, str]:
    """Both ends of `a...b`: at the dots that leave known names on both sides, else the first."""
    if inner in known.names or _DOTS not in inner:
        return inner, ""
    places = [m.start() for m in re.finditer(r"(?=\.\.\.)", inner)][:_MOST_ENDS]
    pairs = [(inner[:at], inner[at + len(_DOTS) :]) for at in places]
    best = max(pairs, key=lambda pair: sum(end in known.names for end in pair))
    return best if any(end in known.names for end in best) else pairs[0]


def _plain_texts(text: str, known: KnownNames) -> tuple[str, ...]:
    """Names at one end of a region; a region inside it gives its own ends no second look."""
    if not text:
        return ()
    if text in known.names:
        return (text,)
    if REGION in text:
        return tuple(piece for piece in re.split(r"\{ForeignNode\[|\]\}|\.{3}", text) if piece)
    return tuple(part.text for part in _parts(text, known))
