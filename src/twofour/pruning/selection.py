"""Which weights are pruned and which stay dense, each with its reasons; torch and ONNX alike."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from twofour.eligibility.reasons import REASONS
from twofour.eligibility.remedies import LeftDense
from twofour.eligibility.rules import groups_in_words, tail_in_words, too_small_in_words
from twofour.errors import BadInputError, system_errors
from twofour.pruning.methods.magnitude import Outcome
from twofour.records.weights import (
    Pattern,
    PrunedWeight,
    Reason,
    ReasonCode,
    Selection,
    Solution,
    Weight,
    shared,
)
from twofour.words import listed, printable

Choice = tuple[Weight, bool, tuple[Reason, ...]]
"""A weight, whether it is to be pruned, and what speaks against sparse math in it."""

_WILD = frozenset("*?[")
_LEFT_DENSE = (LeftDense.ALWAYS, LeftDense.UNLESS_ASKED, LeftDense.IF_STATED)
"""Reasons that keep a weight dense unless asked for; all others are only reported."""


def choose(weights: Sequence[Weight], pattern: Pattern, selection: Selection) -> tuple[Choice, ...]:
    """Decide on every weight, in the order given; users of one array are decided together.

    Raises BadInputError for a glob that matches nothing, and for an include that asks for the
    impossible.
    """
    _check_globs(weights, selection)
    choices = [_choose_one(weight, pattern, selection) for weight in weights]
    return tuple(_with_users(choice, choices) for choice in choices)


def wanted_by_default(weights: Sequence[Weight], pattern: Pattern) -> frozenset[str]:
    """Names of the arrays that pruning takes without options."""
    choices = (_choose_one(weight, pattern, Selection()) for weight in weights)
    return frozenset(w.weight for w, pruned, _ in choices if pruned and w.weight is not None)


def sharing_reasons(weight: Weight) -> tuple[Reason, ...]:
    """Reasons against pruning an array that other things than layers use; () without any.

    A pruned table damages every token; what another node or a caller does with the array is not
    known.
    """
    asked = f"left dense unless asked for (--include {weight.layer or weight.weight})"
    uses = []
    if weight.looked_up_by:
        uses.append(f"the table of embedding {', '.join(weight.looked_up_by)}")
    if weight.read_by:
        uses.append(f"read by {listed(weight.read_by)}")
    reasons = []
    for use in uses:
        message = f"its array is also {use}, which pruning would change too: {asked}"
        reasons.append(Reason(code=ReasonCode.SHARED_WEIGHT, message=message))
    return tuple(reasons)


def shape_reasons(weight: Weight, pattern: Pattern) -> tuple[Reason, ...]:
    """Reasons against sparse math in the weight's shape, in the words of the rules."""
    words = {}
    if weight.groups > 1:
        code = ReasonCode.DEPTHWISE_CONV if weight.is_depthwise else ReasonCode.GROUPED_CONV
        words[code] = groups_in_words(weight)
    length = weight.in_channels // weight.groups  # that one output sums over, for a kernel position
    if weight.axis is not None and length % pattern.m and not weight.is_depthwise:
        words[ReasonCode.AXIS_NOT_MULTIPLE] = tail_in_words(length, pattern.m, weight.groups)
    small = too_small_in_words(weight, pattern)
    if small is not None:
        words[ReasonCode.TOO_SMALL] = small
    return tuple(REASONS[code].reason(message) for code, message in words.items())


def _choose_one(weight: Weight, pattern: Pattern, selection: Selection) -> Choice:
    known = {reason.code for reason in weight.reasons}
    from_shape = (r for r in shape_reasons(weight, pattern) if r.code not in known)
    reasons = (*weight.reasons, *sharing_reasons(weight), *from_shape)
    excluded = _first_match(weight, selection.exclude)
    if excluded is not None:
        said_by = selection.said_by.get(excluded, f"--exclude {excluded}")
        message = f"left dense by {said_by}"
        return weight, False, (Reason(code=ReasonCode.EXCLUDED, message=message), *reasons)
    impossible = _impossible(weight, reasons)
    included = _first_match(weight, selection.include)
    if included is not None and impossible is not None:
        raise BadInputError(
            f"layer {weight.layer or weight.weight!r} cannot be pruned: {impossible}",
            hint=f"{selection.said_by.get(included, f'--include {included}')} asks for it; narrow "
            "the glob or --exclude the layer",
        )
    wanted = selection.all_layers or included is not None
    if not wanted:
        against = any(REASONS[reason.code].left_dense in _LEFT_DENSE for reason in reasons)
        wanted = not (against or weight.looked_up_by or weight.read_by)
    return weight, impossible is None and wanted, reasons


def _impossible(weight: Weight, reasons: Iterable[Reason]) -> str | None:
    """Why no option can prune this weight, or None."""
    for reason in reasons:
        if REASONS[reason.code].left_dense is LeftDense.ALWAYS:
            return reason.message
    if weight.weight is None:
        return "its weight is not stored in the model"
    if weight.axis is None:
        return "; ".join(r.message for r in reasons) or "it has no axis to group along"
    return None


def _share_an_array(one: Weight, other: Weight) -> bool:
    """Rows of a file name the same initializer, those of a module each other."""
    if one.shape != other.shape:
        return False
    if one.node is not None:
        return one.weight == other.weight
    return other.layer in one.tied_to and one.layer in other.tied_to


def _with_users(choice: Choice, choices: Sequence[Choice]) -> Choice:
    """The choice, given those for the other users of the same array."""
    weight, pruned, reasons = choice
    if not weight.tied_to or weight.weight is None:
        return choice
    others = [c for c in choices if c is not choice and _share_an_array(weight, c[0])]
    excluded = [other.layer for other, _, why in others if _is_excluded(why)]
    if pruned and excluded:
        message = f"left dense: it shares its array with {excluded[0]}, which is excluded"
        return weight, False, (Reason(code=ReasonCode.EXCLUDED, message=message), *reasons)
    pruned_for = [other for other, other_pruned, _ in others if other_pruned]
    if pruned_for and not pruned and not excluded and not _is_excluded(reasons):
        first = pruned_for[0]
        message = f"its array is pruned along axis {first.axis} for {first.layer}"
        reason = Reason(code=ReasonCode.SHARED_WEIGHT, message=message)
        return weight, weight.axis == first.axis, (*reasons, reason)
    return choice


def _is_excluded(reasons: Iterable[Reason]) -> bool:
    return any(reason.code is ReasonCode.EXCLUDED for reason in reasons)


def pruned_weight(choice: Choice, outcome: Outcome, solution: Solution) -> PrunedWeight:
    """The row of prune.json for a weight whose array was pruned so, or left as it is."""
    weight, pruned, reasons = choice
    if not pruned:
        return PrunedWeight(
            weight=weight, pruned=False, zeros=outcome.zeros, kept_magnitude=None, reasons=reasons
        )
    return PrunedWeight(
        weight=weight,
        pruned=True,
        zeros=outcome.zeros,
        kept_magnitude=outcome.kept_magnitude,
        held_before=outcome.held_before,
        reasons=reasons,
        **shared(solution, Solution),
    )


def _first_match(weight: Weight, globs: Iterable[str]) -> str | None:
    """The first glob that is a name of the weight; lists of layers are mostly plain names."""
    names = _names_of(weight)
    for glob in globs:
        if _is_among(glob, names):
            return glob
    return None


def _is_among(glob: str, names: Collection[str]) -> bool:
    if _WILD.isdisjoint(glob):
        return glob in names
    return any(fnmatchcase(name, glob) for name in names)


def _names_of(weight: Weight) -> list[str]:
    return [n for n in (weight.layer, weight.weight, weight.node) if n is not None]


def _check_globs(weights: Sequence[Weight], selection: Selection) -> None:
    names = {name for weight in weights for name in _names_of(weight)}
    for option, globs in (("--include", selection.include), ("--exclude", selection.exclude)):
        for glob in globs:
            if _is_among(glob, names):
                continue
            where = f"{option} {glob}"
            if glob in selection.said_by:
                where = f"{selection.said_by[glob]}: {glob}"
            raise BadInputError(
                f"{where} matches none of {len(weights)} layers",
                hint=_close_names(glob, [w.layer for w in weights]),
            )


def _close_names(glob: str, layers: Sequence[str]) -> str:
    plain = re.sub(r"[*?\[\]!]", "", glob)
    lowered = {layer.lower(): layer for layer in layers}
    close = difflib.get_close_matches(plain.lower(), lowered, n=5, cutoff=0.4)
    names = [lowered[name] for name in close] or list(dict.fromkeys(layers))[:5]
    if not names:
        return "the model has no such layers"
    return f"layers are named like {', '.join(names)}"


LAYER_LIST = "layers.txt"
_COMMENT = re.compile(r"(^|\s)#.*$")
_HINT = "a glob over layer names on each line stays dense, +GLOB is pruned too, # begins a comment"


def read_layers(path: Path, selection: Selection) -> Selection:
    """The selection with what the file adds to it, and where each glob of it stands.

    One of comments alone adds nothing. Raises BadInputError for a file that cannot be read, is no
    text, or is empty.
    """
    include = dict.fromkeys(selection.include)
    exclude = dict.fromkeys(selection.exclude)
    said_by = dict(selection.said_by)
    for number, line in enumerate(_lines(path), 1):
        glob = _COMMENT.sub("", line).strip()
        if not glob:
            continue
        own = exclude
        others = include
        if glob.startswith("+"):
            own = include
            others = exclude
            glob = glob.removeprefix("+").strip()
        where = f"{path} line {number}"
        if not glob:
            raise BadInputError(f"{where}: + without a name", hint=_HINT)
        if glob in others:
            raise BadInputError(
                f"{where}: {glob} is both to be pruned and to stay dense", hint=_HINT
            )
        own[glob] = None
        said_by.setdefault(glob, where)
    return replace(selection, include=tuple(include), exclude=tuple(exclude), said_by=said_by)


def layer_list(head: Iterable[str], rows: Iterable[tuple[str, str]]) -> str:
    """The text of such a file: comments on top, then a glob with its comment on each line."""
    lines = [f"# {printable(line)}".rstrip() for line in head]
    pairs = list(rows)
    width = min(48, max((len(glob) for glob, _ in pairs), default=0))
    for glob, why in pairs:
        # "encoder.*.fc1   # 0.4 % of the output lost"
        lines.append(f"{glob:<{width}}  # {printable(why)}" if why else glob)
    return "\n".join(lines) + "\n"


def glob_of(name: str) -> str:
    """A glob that matches this name alone, on one line of a file.

    What cannot stand there (a line break) matches any one character.
    """
    # "+a[0] #1" becomes "[+]a[[]0] [#]1"
    text = re.sub(r"[*?\[]", r"[\g<0>]", name)
    text = re.sub(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]", "?", text)
    text = re.sub(r"^\+|^\s|\s$", r"[\g<0>]", text)
    return re.sub(r"(^|\s)#", r"\1[#]", text)


def _lines(path: Path) -> list[str]:
    with system_errors(f"cannot read {path}"):
        data = path.read_bytes()
    if not data.strip():
        raise BadInputError(f"{path} is empty", hint=_HINT)
    try:
        return data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is no UTF-8 text: {error.reason}", hint=_HINT) from error
