"""Lines about sparsity and fusion: which layers are eligible or chosen, and which became one."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

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
    """A pattern for these words, `#` for the count; a broken paste has a blank more or less."""
    letters = (r"(?P<n>\d{1,9})" if c == "#" else re.escape(c) for c in words.replace(" ", ""))
    rest = r"(?P<rest>\W.*)?$" if "#" in words else r"(?P<n>)(?P<rest>\s*:.*)?$"
    return re.compile(r"\s*".join(letters) + rest)


_PICKED = "TRT inference plan picked sparse implementation for layers"
_FORMS = (
    (SparsityKind.ELIGIBLE, _form("Layers eligible for sparse math")),
    (SparsityKind.CHOSEN, _form(_PICKED)),
    (SparsityKind.ELIGIBLE, _form("Found # layer(s) eligible to use sparse tactics")),
    (SparsityKind.CHOSEN, _form("Chose # layer(s) using sparse tactics")),
)
"""The words of TensorRT up to 8.4, then those of later releases."""


def sparsity_line(message: str, line: int) -> SparsityLine | None:
    """The record; None where the message is none of the known forms, or cut before its colon."""
    before, mark, text = message.partition(MARK)
    if not mark:
        return None
    for kind, form in _FORMS:
        match = form.match(text.strip())
        if match is not None:
            colon, names = (match["rest"] or "").strip()[:1], (match["rest"] or "").strip()[1:]
            listed = names if colon == ":" else None
            found = SparsityLine(
                line=line,
                kind=kind,
                foreign_node=FOREIGN_NODE in before,
                printed_count=int(match["n"]) if match["n"] else None,
                names=None,
            )
            return with_list(found, listed)
    return None


def with_list(found: SparsityLine, listed: str | None) -> SparsityLine:
    """The record with the names in its list; None: it has none."""
    names: tuple[str, ...] | None = None
    elided = uncertain = False
    if listed is not None:
        entries, uncertain = _entries(listed.strip().lstrip(",").strip())
        names, elided = _without_dots(entries)
        elided = elided or listed.endswith((",", " +", " ||"))
    elif found.printed_count == 0 and found.kind is SparsityKind.ELIGIBLE:
        names = ()  # TensorRT 10.3 counts 0 choices whatever it chose: there names are proof alone
    if names == () and (found.printed_count or elided):
        names = None  # `grep -o` and authors leave nothing behind the colon
    profiles = tuple(map(profile_of, names or ()))
    names = None if names is None else tuple(map(without_profile, names))
    parts = None if names is None else constituents(names)
    missing = max(0, (found.printed_count or 0) - len(parts or ()))
    return replace(
        found,
        names=names,
        constituents=parts,
        elided=elided or (listed is not None and _open_brackets(listed) > 0),
        missing=missing,
        uncertain=uncertain,
        profiles=profiles if any(profiles) else (),
    )


def listed_names(lines: Iterable[SparsityLine], kind: SparsityKind) -> tuple[str, ...] | None:
    """Names in all lines of a kind, each once, in order; None where no line has a list.

    A layer that is eligible in one pass of the builder is eligible in all; choices count only in
    the pass that was kept.
    """
    lists = [
        line.names
        for line in lines
        if line.kind is kind
        and line.names is not None
        and (kind is SparsityKind.ELIGIBLE or line.discarded is False)
    ]
    return tuple(dict.fromkeys(name for names in lists for name in names)) if lists else None


def with_cuts(lines: Iterable[SparsityLine]) -> tuple[SparsityLine, ...]:
    """The lines; a list of choices is cut where its last entry only begins an eligible layer."""
    lines = tuple(lines)
    eligible = sorted(alone_and_fused(listed_names(lines, SparsityKind.ELIGIBLE) or ()))
    found = []
    for line in lines:
        last = (line.constituents or ("",))[-1]
        at = bisect_left(eligible, last)
        begun = [name for name in eligible[at : at + 1] if name != last and name.startswith(last)]
        is_cut = bool(last and begun) and line.kind is SparsityKind.CHOSEN
        found.append(replace(line, elided=line.elided or is_cut))
    return tuple(found)


def alone_and_fused(names: Iterable[str]) -> set[str]:
    """The names, and the layers of the horizontal fusions among them one by one."""
    return {*names, *constituents(names)}


def contradictions(lines: tuple[SparsityLine, ...], flag: SparsityFlag) -> list[Contradiction]:
    """Counts that fit no list, chosen layers that are not eligible, lines in a dense build."""
    found = [c for line in lines for c in _count_against_names(line)]
    found += [
        Contradiction(line=None, message=f"chosen but not listed as eligible: {name}")
        for name in unlisted_choices(lines)
    ]
    if lines and flag is SparsityFlag.DISABLED:
        message = "the options say that sparsity is disabled, and the builder lists sparse layers"
        found.append(Contradiction(line=lines[0].line, message=message))
    return found


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
    counted = (line.names is not None or line.printed_count == 0) and not line.missing
    return line.kind is SparsityKind.CHOSEN or counted


def _count_against_names(line: SparsityLine) -> list[Contradiction]:
    names, parts, printed = line.names, line.constituents, line.printed_count
    if names is None or parts is None or printed is None or line.elided:
        return []
    if printed in {len(names), len(parts)}:
        return []
    alone = "" if len(parts) == len(names) else f" ({len(parts)} if fused ones count one by one)"
    message = f"the log counts {printed} {line.kind.value} layers and names {len(names)}{alone}"
    return [Contradiction(line=line.line, message=message)]


FUSING = ": Fusing "
REGISTERING = "Registering layer: "
OPTIMIZATIONS = ("Merging layers: ", "Removing ", "Swap the layer type of ", "Running: ")
"""The words with which messages about graph optimisations begin."""
_OPTIMIZED = (
    (FusionKind.MERGED, re.compile(r"Merging layers: \s*(?P<layers>\S.*)")),
    (FusionKind.REMOVED, re.compile(r"Removing \s*(?P<layers>\S.*)")),
    (FusionKind.SWAPPED,
     re.compile(r"Swap the layer type of (?P<layers>.*) from (?P<rule>\w+ to \w+)$")),
    (FusionKind.TRANSFORMED, re.compile(r"Running: (?P<rule>\w+) on (?P<layers>.*)")),
)  # fmt: skip


def fused(message: str, line: int) -> Fusion | None:
    """`RULE: Fusing A with B`."""
    rule, found, rest = message.partition(FUSING)
    first, between, second = rest.partition(" with ")
    if not found or not between or " " in rule.strip():
        return None
    layers = (first, second.strip())
    return Fusion(line=line, kind=FusionKind.FUSED, rule=rule.strip(), layers=layers)


def optimized(message: str, line: int) -> Fusion | None:
    """A graph optimisation whose message begins with one of OPTIMIZATIONS."""
    for kind, form in _OPTIMIZED:
        match = form.match(message)
        if match is not None:
            rule, layers = match.groupdict().get("rule"), match["layers"].strip()
            if kind is FusionKind.TRANSFORMED and "Transform" not in match["rule"]:
                return None
            parts = layers.split(" || ") if kind is FusionKind.MERGED else [layers]
            return Fusion(line=line, kind=kind, rule=rule, layers=tuple(parts))
    return None


def renamed(message: str) -> RenamedLayer | None:
    """`Registering layer: A for ONNX node: B` where the names differ."""
    layer, found, node = message[len(REGISTERING) :].partition(" for ONNX node: ")
    layer, node = layer.strip(), node.strip()
    if not found or not layer or not node or layer == node:
        return None
    return RenamedLayer(layer=layer, node=node)


# --- lists of names -------------------------------------------------------------------------------

_SEPARATOR = ", "
_BRACKET_OR_SEPARATOR = re.compile(r"[(\[{]|[)\]}]|, ")
_DOTS = re.compile(r"(?:\.{3,}|\N{HORIZONTAL ELLIPSIS})\s*(?:more)?$")
"""How authors of real pastes write that they left names out: `....`, `...more`."""
_PROFILE = re.compile(r" \[profile (\d{1,6})\]")


def constituents(names: Iterable[str]) -> tuple[str, ...]:
    """The layers of horizontal fusions (`A || B`) one by one; brackets are kept whole."""
    found: list[str] = []
    for name in names:
        depth = 0
        for piece in name.split(" || "):
            if depth > 0:
                found[-1] += f" || {piece}"
            else:
                found.append(piece)
            depth += _open_brackets(piece)
    return tuple(found)


def _open_brackets(text: str) -> int:
    return sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))


def _entries(text: str) -> tuple[list[str], bool]:
    """The entries, separated by ", " outside brackets; whether a bracket has no partner."""
    entries, start, depth, odd = [], 0, 0, False
    for match in _BRACKET_OR_SEPARATOR.finditer(text):
        found = match[0]
        if found in {"(", "[", "{"}:
            depth += 1
        elif found == _SEPARATOR:
            if depth == 0:
                entries.append(text[start : match.start()].strip())
                start = match.end()
        elif depth:
            depth -= 1
        else:
            odd = True
    return [*entries, text[start:].strip()] if start < len(text) else entries, odd or depth > 0


def _without_dots(entries: list[str]) -> tuple[tuple[str, ...], bool]:
    """Drop what an author put instead of names (`....`, `...more`), and names that it cuts.

    Marks of Markdown around a name or the list are no part of it.
    """
    names, elided = [], False
    for entry in (entry.strip("`* ") for entry in entries):
        dots = _DOTS.search(entry)
        if dots is None:
            names.append(entry.rstrip(","))
            continue
        elided = True
        before = entry[: dots.start()]
        if before.endswith(" "):
            names.append(before.strip().rstrip(","))
    return tuple(name for name in names if any(map(str.isalnum, name))), elided


def without_profile(name: str) -> str:
    """The name without ` [profile 1]`, TensorRT's mark of a copy for a further profile."""
    end = len(name)
    while (marked := _profile_before(name, end)) is not None:
        end = marked.start()
    return name[:end]


def profile_of(name: str) -> int:
    """Number of the optimization profile that a name is marked with; 0, the first, has no mark."""
    marked = _profile_before(name, len(name))
    return 0 if marked is None else int(marked[1])


def _profile_before(name: str, end: int) -> re.Match[str] | None:
    """The mark that ends there; a search for all marks would try every place of a long name."""
    if name[end - 1 : end] != "]":
        return None
    start = name.rfind(" [", 0, end)
    return None if start < 0 else _PROFILE.fullmatch(name, start, end)
