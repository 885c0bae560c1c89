"""Lines about sparsity and fusion: what is eligible, what was chosen, what became one layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twofour.logs.names import NameSplitter, constituents, profile_of, without_profile
from twofour.records.log import (
    Contradiction,
    Fusion,
    FusionKind,
    RenamedLayer,
    SparsityFlag,
    SparsityKind,
    SparsityLine,
)

MARK = "(Sparsity)"
FOREIGN_NODE = "(foreignNode)"
"""Before what is said of the operations inside one Myelin region."""
_COUNT = r"\s*(?P<n>\d{1,9})\s*"
_OLD_REST = r"(?P<n>)(?P<rest>\s*:.*)?$"
_REST = r"(?P<rest>\W.*)?$"


def _words(text: str) -> str:
    """The words as a pattern; a paste that was broken among them has a blank more or less."""
    return r"\s*".join(map(re.escape, text.replace(" ", "")))


_FORMS = (
    (
        SparsityKind.ELIGIBLE,
        re.compile(_words("Layers eligible for sparse math") + _OLD_REST),
    ),
    (
        SparsityKind.CHOSEN,
        re.compile(
            _words("TRT inference plan picked sparse implementation for layers") + _OLD_REST
        ),
    ),
    (
        SparsityKind.ELIGIBLE,
        re.compile(
            _words("Found")
            + _COUNT
            + r"\s*"
            + _words("layer(s) eligible to use sparse tactics")
            + _REST
        ),
    ),
    (
        SparsityKind.CHOSEN,
        re.compile(_words("Chose") + _COUNT + _words("layer(s) using sparse tactics") + _REST),
    ),
)


_MARKS = r"(?:\*{2,3}|~~|`{1,3}|</?(?:b|i|em|strong|code|pre|span|p|br|li|div)\b[^<>]{0,80}>){1,3}"
_MARKED = re.compile(rf"^\s*{_MARKS}|{_MARKS}(?=\s*:)|(?<=[\w)\]}}:]){_MARKS}(?=\s|$)")
_MARKED_NAME = re.compile(r"(?:^|(?<=, ))(\*{2,3}|`)([^*`,]+)(?:\1(?=,|$)|$)")
"""Markdown and HTML of a paste: around the whole message, around its words, around each name."""


@dataclass(frozen=True, slots=True)
class RawLine:
    """A (Sparsity) line whose list is not split yet: the names that help come later."""

    line: int
    kind: SparsityKind
    foreign_node: bool
    printed: int | None
    names: str | None
    rows: str = ""
    """As in SparsityLine.raw."""
    discarded: bool = False


def raw_line(message: str, line: int) -> RawLine | None:
    """The line's parts; None where it is none of the known forms, or cut before its colon."""
    before, mark, text = message.partition(MARK)
    if not mark:
        return None
    foreign_node = FOREIGN_NODE in before
    text = _unmarked(text)
    for kind, form in _FORMS:
        match = form.match(text)
        if match is not None:
            printed = int(match["n"]) if match["n"] else None
            return RawLine(line, kind, foreign_node, printed, _list(match["rest"]))
    return None


def _unmarked(text: str) -> str:
    text = text.strip()
    if not any(mark in text for mark in ("*", "`", "~~", "</", "<br")):
        return text
    return _MARKED.sub("", text).strip()


def _list(rest: str | None) -> str | None:
    rest = (rest or "").strip()
    if not rest.startswith(":"):
        return None
    return _MARKED_NAME.sub(r"\2", rest[1:].strip()) if "`" in rest or "**" in rest else rest[1:]


def sparsity_line(raw: RawLine, splitter: NameSplitter) -> SparsityLine:
    """The record, its list split with the help of the layer names known by now."""
    names: tuple[str, ...] | None = None
    elided = uncertain = False
    if raw.names is not None:
        names, elided, uncertain = splitter.split(raw.names, raw.printed)
    elif raw.printed == 0 and raw.kind is SparsityKind.ELIGIBLE:
        names = ()  # TensorRT 10.3 counts 0 choices whatever it chose: there names are proof alone
    if names == () and (raw.printed or elided):
        names = None  # `grep -o` and authors leave nothing behind the colon
    profiles = tuple(map(profile_of, names or ()))
    names = None if names is None else tuple(map(without_profile, names))
    parts = None if names is None else constituents(names)
    missing = max(0, (raw.printed or 0) - len(parts or ()))
    ends_inside = uncertain and _ends_inside_a_name(raw.names or "", splitter)
    return SparsityLine(
        line=raw.line,
        kind=raw.kind,
        foreign_node=raw.foreign_node,
        printed_count=raw.printed,
        names=names,
        constituents=parts,
        elided=elided or (ends_inside and (missing > 0 or not raw.printed)),
        missing=missing,
        uncertain=uncertain,
        discarded=raw.discarded,
        profiles=profiles if any(profiles) else (),
        raw=raw.rows,
    )


def _ends_inside_a_name(names: str, splitter: NameSplitter) -> bool:
    """Whether the last name's brackets are open, in a list that no longer layer's name ends."""
    last = names.rpartition(", ")[2].strip()
    return names.count("(") > names.count(")") and not splitter.knows(last)


def union(lines: Iterable[SparsityLine], kind: SparsityKind) -> tuple[str, ...] | None:
    """Names of all lines of a kind, each once, in order; None where no line carries a list.

    What is eligible in one pass of the builder is so in all; choices count in the pass kept.
    """
    lists = [
        line.names
        for line in lines
        if line.kind is kind
        and line.names is not None
        and (kind is SparsityKind.ELIGIBLE or not line.discarded)
    ]
    return tuple(dict.fromkeys(name for names in lists for name in names)) if lists else None


def _whole_list(lines: tuple[SparsityLine, ...]) -> set[str] | None:
    """Every eligible layer, alone and in its fusion; None where some may be missing."""
    eligible = union(lines, SparsityKind.ELIGIBLE)
    if eligible is None or not all(map(_is_whole, lines)):
        return None
    return {*eligible, *constituents(eligible)}


def _within(name: str, known: set[str]) -> bool:
    return name in known or known.issuperset(constituents([name]))


def contradictions(lines: tuple[SparsityLine, ...], flag: SparsityFlag) -> list[Contradiction]:
    """Counts that fit no list, chosen layers that are not eligible, lines in a dense build."""
    found = [c for line in lines for c in _count_against_names(line)]
    known = _whole_list(lines)
    if known is not None:
        found += [
            Contradiction(line=None, message=f"chosen but not listed as eligible: {name}")
            for name in union(lines, SparsityKind.CHOSEN) or ()
            if not _within(name, known)
        ]
    if lines and flag is SparsityFlag.DISABLED:
        message = "the options say that sparsity is disabled, and the builder lists sparse layers"
        found.append(Contradiction(line=lines[0].line, message=message))
    return found


def _is_whole(line: SparsityLine) -> bool:
    """Whether nothing of an eligible line's names can be missing from the record."""
    if line.kind is SparsityKind.CHOSEN:
        return not line.elided and not line.uncertain
    listed = line.names is not None or line.printed_count == 0
    return listed and not (line.elided or line.uncertain or line.missing)


def _count_against_names(line: SparsityLine) -> list[Contradiction]:
    names, parts, printed = line.names, line.constituents, line.printed_count
    if names is None or parts is None or printed is None or line.elided:
        return []
    if printed in {len(names), len(parts)}:
        return []
    alone = "" if len(parts) == len(names) else f" ({len(parts)} layers, fusions taken apart)"
    message = f"prints {printed} {line.kind.value} layers and lists {len(names)}{alone}"
    return [Contradiction(line=line.line, message=message)]


FUSING = ": Fusing "
REGISTERING = "Registering layer: "
_FOR_NODE = " for ONNX node: "
_SWAP = re.compile(r"Swap the layer type of (.*) from (\w+) to (\w+)$")
_RUNNING = "Running: "
_WORD = re.compile(r"\w+")


def fused(message: str, line: int) -> Fusion | None:
    """`RULE: Fusing A with B`."""
    rule, found, rest = message.partition(FUSING)
    first, between, second = rest.partition(" with ")
    if not found or not between or " " in rule.strip():
        return None
    return Fusion(
        line=line, kind=FusionKind.FUSED, rule=rule.strip(), layers=(first, second.strip())
    )


def renamed(message: str) -> RenamedLayer | None:
    """`Registering layer: A for ONNX node: B` where the names differ."""
    layer, found, node = message[len(REGISTERING) :].partition(_FOR_NODE)
    layer, node = layer.strip(), node.strip()
    if not found or not layer or not node or layer == node:
        return None
    return RenamedLayer(layer=layer, node=node)


def _merged(message: str, line: int) -> Fusion | None:
    names = message[len("Merging layers: ") :].strip()
    layers = tuple(names.split(" || "))
    return Fusion(line=line, kind=FusionKind.MERGED, rule=None, layers=layers) if names else None


def _removed(message: str, line: int) -> Fusion | None:
    name = message[len("Removing ") :].strip()
    return Fusion(line=line, kind=FusionKind.REMOVED, rule=None, layers=(name,)) if name else None


def _swapped(message: str, line: int) -> Fusion | None:
    match = _SWAP.match(message)
    if match is None:
        return None
    rule = f"{match[2]} to {match[3]}"
    return Fusion(line=line, kind=FusionKind.SWAPPED, rule=rule, layers=(match[1],))


def _transformed(message: str, line: int) -> Fusion | None:
    rule, found, layer = message[len(_RUNNING) :].partition(" on ")
    if not found or "Transform" not in rule or not _WORD.fullmatch(rule):
        return None
    layers = (layer.strip(),)
    return Fusion(line=line, kind=FusionKind.TRANSFORMED, rule=rule, layers=layers)


BY_START: tuple[tuple[str, Callable[[str, int], Fusion | None]], ...] = (
    ("Merging layers: ", _merged),
    ("Removing ", _removed),
    ("Swap the layer type of ", _swapped),
    (_RUNNING, _transformed),
)
