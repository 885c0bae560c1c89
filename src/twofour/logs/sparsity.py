"""Lines about sparsity and fusion: which layers are eligible or chosen, and which became one."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

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
"""The mark of messages about the operations inside one Myelin region."""


def _form(words: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{words})(?:\s*:(?P<names>.*)|\W.*)?$")


_FORMS = {
    SparsityKind.ELIGIBLE: _form(
        r"Found (?P<n>\d{1,9}) layer\(s\) eligible to use sparse tactics"
        r"|Layers eligible for sparse math"
    ),
    SparsityKind.CHOSEN: _form(
        r"Chose (?P<n>\d{1,9}) layer\(s\) using sparse tactics"
        r"|TRT inference plan picked sparse implementation for layers"
    ),
}
"""The words of TensorRT 10, and those of TensorRT up to 8.4."""


def sparsity_line(message: str, line: int) -> SparsityLine | None:
    """The record; None where the message is none of the known forms."""
    before, _, text = message.partition(MARK)
    for kind, form in _FORMS.items():
        match = form.match(text.strip())
        if match is not None:
            without_list = SparsityLine(
                line=line,
                kind=kind,
                foreign_node=FOREIGN_NODE in before,
                printed_count=int(match["n"]) if match["n"] else None,
                names=None,
            )
            return with_list(without_list, match["names"])
    return None


def with_list(line: SparsityLine, listed: str | None) -> SparsityLine:
    """The record with the names in its list; None: it has none."""
    counted = line.printed_count or 0
    if listed is None:
        # TensorRT 10.3 counts 0 choices whatever it chose: there names alone are proof
        is_zero = line.printed_count == 0 and line.kind is SparsityKind.ELIGIBLE
        nothing = () if is_zero else None
        return replace(line, names=nothing, constituents=nothing, missing=counted)
    listed = listed.strip().lstrip(",").strip()
    entries, open_brackets = _split(listed, ", ")
    marked, elided = _without_dots(entries)
    elided = elided or listed.endswith((",", " +", " ||")) or open_brackets > 0
    if not marked and (counted or elided):
        # `grep -o` and authors leave nothing behind the colon
        return replace(line, elided=elided, missing=counted)
    names = tuple(without_profile(name) for name in marked)
    profiles = tuple(_profile_of(name) for name in marked)
    parts = constituents(names)
    return replace(
        line,
        names=names,
        constituents=parts,
        elided=elided,
        missing=max(0, counted - len(parts)),
        uncertain=open_brackets != 0,
        profiles=profiles if any(profiles) else (),
    )


def listed_names(lines: Iterable[SparsityLine], kind: SparsityKind) -> tuple[str, ...] | None:
    """Names in all lines of a kind, each once, in order; None where no line has a list.

    A layer that is eligible in one pass of the builder is eligible in all; choices count only in
    the pass that was kept.
    """
    lists = []
    for line in lines:
        counts = kind is SparsityKind.ELIGIBLE or line.discarded is False
        if line.kind is kind and line.names is not None and counts:
            lists.append(line.names)
    return tuple(dict.fromkeys(chain.from_iterable(lists))) if lists else None


def with_cuts(lines: Iterable[SparsityLine]) -> tuple[SparsityLine, ...]:
    """The lines; a list of choices is cut where its last entry only begins an eligible layer."""
    # eligible are conv_1 and conv_12 + relu, and the choices end in `conv_12 + re`
    lines = list(lines)
    eligible = sorted(alone_and_fused(listed_names(lines, SparsityKind.ELIGIBLE) or ()))
    for i, line in enumerate(lines):
        if line.kind is SparsityKind.CHOSEN and line.constituents:
            last = line.constituents[-1]
            place = bisect_left(eligible, last)
            following = "".join(eligible[place : place + 1])
            if following != last and following.startswith(last):
                lines[i] = replace(line, elided=True)
    return tuple(lines)


def alone_and_fused(names: Iterable[str]) -> set[str]:
    """The names, and the layers of the horizontal fusions among them one by one."""
    return {*names, *constituents(names)}


def contradictions(lines: tuple[SparsityLine, ...], flag: SparsityFlag) -> list[Contradiction]:
    """Counts that fit no list, chosen layers that are not eligible, lines in a dense build."""
    every = []
    for line in lines:
        message = _count_against_names(line)
        if message is not None:
            every.append(Contradiction(line=line.line, message=message))
    for name in unlisted_choices(lines):
        message = f"chosen but not listed as eligible: {name}"
        every.append(Contradiction(line=None, message=message))
    if lines and flag is SparsityFlag.DISABLED:
        message = "the options say that sparsity is disabled, and the builder lists sparse layers"
        every.append(Contradiction(line=lines[0].line, message=message))
    return every


def unlisted_choices(lines: tuple[SparsityLine, ...]) -> tuple[str, ...]:
    """Names of chosen layers that the lists of eligible ones lack, where these are whole."""
    eligible = listed_names(lines, SparsityKind.ELIGIBLE)
    if eligible is None or not all(map(_is_whole, lines)):
        return ()
    known = alone_and_fused(eligible)
    choices = listed_names(lines, SparsityKind.CHOSEN) or ()
    return tuple(name for name in choices if not known.issuperset(constituents([name])))


def _is_whole(line: SparsityLine) -> bool:
    """Whether the record has every name that the line stands for."""
    if line.elided or line.uncertain:
        return False
    return line.kind is SparsityKind.CHOSEN or (line.names is not None and not line.missing)


def _count_against_names(line: SparsityLine) -> str | None:
    if line.names is None or line.printed_count is None or line.elided:
        return None
    names = len(line.names)
    parts = len(line.constituents or ())
    if line.printed_count in {names, parts}:
        return None
    alone = "" if parts == names else f" ({parts} if fused ones count one by one)"
    return f"the log counts {line.printed_count} {line.kind.value} layers and names {names}{alone}"


# --- fusions --------------------------------------------------------------------------------------

FUSING = ": Fusing "
REGISTERING = "Registering layer: "
OPTIMIZATIONS = {
    "Merging layers: ": (FusionKind.MERGED, r"(?P<layers>\S.*)"),
    "Removing ": (FusionKind.REMOVED, r"(?P<layers>\S.*)"),
    "Swap the layer type of ": (FusionKind.SWAPPED, r"(?P<layers>.*) from (?P<rule>\w+ to \w+)$"),
    "Running: ": (FusionKind.TRANSFORMED, r"(?P<rule>\w*Transform\w*) on (?P<layers>.*)"),
}
"""The words with which messages about graph optimisations begin -> what follows them."""


def fused(message: str, line: int) -> Fusion | None:
    """`RULE: Fusing A with B`."""
    rule, _, layers = message.partition(FUSING)
    first, between, second = layers.partition(" with ")
    if not between or " " in rule.strip():
        return None
    pair = (first, second.strip())
    return Fusion(line=line, kind=FusionKind.FUSED, rule=rule.strip(), layers=pair)


def optimized(start: str, message: str, line: int) -> Fusion | None:
    """A graph optimisation whose message begins with one of OPTIMIZATIONS."""
    kind, form = OPTIMIZATIONS[start]
    match = re.match(form, message[len(start) :].strip())
    if match is None:
        return None
    layers = [match["layers"].strip()]
    if kind is FusionKind.MERGED:
        layers = layers[0].split(" || ")
    return Fusion(line=line, kind=kind, rule=match.groupdict().get("rule"), layers=tuple(layers))


def renamed(message: str) -> RenamedLayer | None:
    """`Registering layer: A for ONNX node: B` where the names differ."""
    names = message[len(REGISTERING) :]
    layer, node = (name.strip() for name in names.partition(" for ONNX node: ")[::2])
    if not layer or node in {"", layer}:
        return None
    return RenamedLayer(layer=layer, node=node)


# --- lists of names -------------------------------------------------------------------------------

_BRACKET_OR_SEPARATOR = re.compile(r"[(\[{]|[)\]}]|, | \|\| ")
_DOTS = re.compile(r"(?:\.{3,}|\N{HORIZONTAL ELLIPSIS})\s*(?:more)?$")
"""How authors of real pastes write that they left names out: `....`, `...more`."""
_PROFILE = re.compile(r" \[profile (\d{1,6})\]$")
"""TensorRT's mark of a layer's copy for a further optimization profile."""


def constituents(names: Iterable[str]) -> tuple[str, ...]:
    """The layers of horizontal fusions (`A || B`) one by one; brackets are kept whole."""
    layers: list[str] = []
    for name in names:
        if " || " in name:
            layers += _split(name, " || ")[0]
        else:
            layers.append(name)
    return tuple(layers)


def _split(text: str, separator: str) -> tuple[list[str], int]:
    """What stands between separators outside brackets; how many brackets have no partner.

    That number is negative where a bracket is closed that was not opened.
    """
    # `PWN(a, b), c` is PWN(a, b) and c: the first comma stands in an open bracket
    pieces = []
    start = 0
    depth = 0
    strays = 0
    for match in _BRACKET_OR_SEPARATOR.finditer(text):
        mark = match[0]
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            strays += depth == 0
            depth = max(depth - 1, 0)
        elif mark == separator and depth == 0:
            pieces.append(text[start : match.start()].strip())
            start = match.end()
    if start < len(text):
        pieces.append(text[start:].strip())
    return pieces, -strays or depth


def _without_dots(entries: list[str]) -> tuple[list[str], bool]:
    """Drop what an author put instead of names (`....`, `...more`), and names that it cuts.

    Marks of Markdown around a name or the list are no part of it.
    """
    names = []
    elided = False
    for entry in entries:
        name = entry.strip("`* ")
        dots = _DOTS.search(name)
        if dots is not None:
            # `conv1 ....` has the whole name, `conv1....` may have half of it
            elided = True
            name = name[: dots.start()]
            if not name.endswith(" "):
                continue
        if any(map(str.isalnum, name)):
            names.append(name.strip().rstrip(","))
    return names, elided


def without_profile(name: str) -> str:
    """The name without ` [profile 1]`."""
    return _PROFILE.sub("", name)


def _profile_of(name: str) -> int:
    """Number of the optimization profile that a name is marked with; 0, the first, has no mark."""
    mark = _PROFILE.search(name)
    return 0 if mark is None else int(mark[1])
