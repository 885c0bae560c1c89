"""Which weights are pruned and which stay dense, each with its reasons; torch and ONNX alike."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from twofour.eligibility.reasons import REASONS, LeftDense
from twofour.eligibility.rules import groups_in_words, tail_in_words
from twofour.errors import BadInputError
from twofour.records.options import Selection
from twofour.records.weights import Pattern, Reason, ReasonCode, Weight
from twofour.words import listed

Choice = tuple[Weight, bool, tuple[Reason, ...]]
"""A weight, whether it is to be pruned, and what speaks against sparse math in it."""

_LEFT_DENSE = (LeftDense.ALWAYS, LeftDense.BY_SHAPE, LeftDense.UNLESS_ASKED)
"""What keeps a weight from being pruned by itself; all other reasons are only told."""


def choose(weights: Sequence[Weight], pattern: Pattern, selection: Selection) -> tuple[Choice, ...]:
    """Decide on every weight, in the order given; users of one array are decided together.

    Raises BadInputError for a glob that matches nothing, an include that asks for the impossible,
    and an array that two of its layers need pruned along different axes.
    """
    _check_globs(weights, selection)
    globs = _Globs(selection.include), _Globs(selection.exclude)
    choices = [_choose_one(weight, pattern, selection, globs) for weight in weights]
    users = _Users(choices)
    return tuple(_with_users(choice, users.beside(at)) for at, choice in enumerate(choices))


def wanted_by_default(weights: Sequence[Weight], pattern: Pattern) -> frozenset[str]:
    """Names of the arrays that pruning takes unless it is told otherwise."""
    none = _Globs(()), _Globs(())
    choices = (_choose_one(weight, pattern, Selection(), none) for weight in weights)
    return frozenset(w.weight for w, pruned, _ in choices if pruned and w.weight is not None)


def sharing_reasons(weight: Weight) -> tuple[Reason, ...]:
    """What it means that something else than layers uses the same array; () where nothing does.

    A pruned table damages every token; what another node or a caller does with the array is not
    known.
    """
    asked = f"left dense unless asked for (--include {weight.layer or weight.weight})"
    said = []
    if weight.looked_up_by:
        tables = ", ".join(weight.looked_up_by)
        said.append(f"its array is also the table of embedding {tables}, which pruning would")
    if weight.read_by:
        said.append(f"its array is also read by {listed(weight.read_by)}, which pruning would")
    return tuple(
        Reason(code=ReasonCode.SHARED_WEIGHT, message=f"{text} change too: {asked}")
        for text in said
    )


def shape_reasons(weight: Weight, pattern: Pattern) -> tuple[Reason, ...]:
    """What the weight's shape says against sparse math, in the words of the rules."""
    found = {}
    if weight.groups > 1:
        code = ReasonCode.DEPTHWISE_CONV if weight.is_depthwise else ReasonCode.GROUPED_CONV
        found[code] = groups_in_words(weight.groups, weight.in_channels)
    length = weight.in_channels // weight.groups  # that one output sums over, for a kernel position
    if weight.axis is not None and length % pattern.m and not weight.is_depthwise:
        found[ReasonCode.AXIS_NOT_MULTIPLE] = tail_in_words(length, pattern.m, weight.groups)
    return tuple(REASONS[c].reason(m) for c, m in found.items())


def _choose_one(
    weight: Weight, pattern: Pattern, selection: Selection, globs: tuple[_Globs, _Globs]
) -> Choice:
    """The choice for one row alone; `globs` are those to include and to exclude."""
    include, exclude = globs
    known = {reason.code for reason in weight.reasons}
    from_shape = (r for r in shape_reasons(weight, pattern) if r.code not in known)
    reasons = (*weight.reasons, *sharing_reasons(weight), *from_shape)
    excluded = exclude.first_match(weight)
    if excluded is not None:
        said_by = selection.said_by.get(excluded, f"--exclude {excluded}")
        message = f"left dense by {said_by}"
        return weight, False, (Reason(code=ReasonCode.EXCLUDED, message=message), *reasons)
    impossible = _impossible(weight, reasons)
    included = include.first_match(weight)
    if included is not None and impossible is not None:
        raise BadInputError(
            f"layer {weight.layer or weight.weight!r} cannot be pruned: {impossible}",
            hint=f"{selection.said_by.get(included, f'--include {included}')} asks for it; narrow "
            "the glob or --exclude the layer",
        )
    wanted = selection.all_layers or included is not None
    usable = not (
        weight.looked_up_by
        or weight.read_by
        or any(REASONS[r.code].left_dense in _LEFT_DENSE for r in reasons)
    )
    return weight, impossible is None and (wanted or usable), reasons


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


_Kind = tuple[bool, "int | None", bool]


class _Users:
    """The rows of each stored array: an array of an ONNX file may have thousands."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = choices
        self._by_layer: dict[str, list[int]] = defaultdict(list)
        self._by_array: dict[tuple[object, ...], dict[_Kind, list[int]]] = defaultdict(dict)
        for at, choice in enumerate(choices):
            weight = choice[0]
            self._by_layer[weight.layer].append(at)
            alike = self._by_array[weight.weight, weight.shape].setdefault(_kind(choice), [])
            alike += [at] if len(alike) < _FIRST_ALIKE else []

    def beside(self, at: int) -> list[Choice]:
        """Other rows for the same array, in order; of a file the first two that decide alike.

        Rows of a module name each other, those of a file the same initializer.
        """
        one = self._choices[at][0]
        if not one.tied_to or one.weight is None:
            return []
        if one.node is not None:
            groups: Iterable[list[int]] = self._by_array[one.weight, one.shape].values()
        else:
            groups = [self._by_layer.get(layer, []) for layer in dict.fromkeys(one.tied_to)]
        others = sorted(other for group in groups for other in group if other != at)
        found = [self._choices[other] for other in others]
        return [c for c in found if one.node is not None or _name_each_other(one, c[0])]


def _name_each_other(one: Weight, other: Weight) -> bool:
    return one.shape == other.shape and one.layer in other.tied_to


_FIRST_ALIKE = 2
"""One of them may be the row that asks."""


def _kind(choice: Choice) -> _Kind:
    """All that one row's decision tells another."""
    weight, pruned, reasons = choice
    return pruned, weight.axis, any(reason.code is ReasonCode.EXCLUDED for reason in reasons)


def _with_users(choice: Choice, others: Sequence[Choice]) -> Choice:
    """The choice, given the choices for the other users of the same array."""
    weight, pruned, reasons = choice
    for other, _, why in others:
        if pruned and any(reason.code is ReasonCode.EXCLUDED for reason in why):
            message = f"left dense: it shares its array with {other.layer}, which is excluded"
            return weight, False, (Reason(code=ReasonCode.EXCLUDED, message=message), *reasons)
    for other, other_pruned, _ in others:
        if pruned and other_pruned and other.axis != weight.axis:
            raise axis_conflict(weight, other)
    excluded = any(r.code is ReasonCode.EXCLUDED for _, _, why in (choice, *others) for r in why)
    for other, other_pruned, _ in others:
        if not pruned and other_pruned and not excluded and weight.weight is not None:
            message = f"its array is pruned along axis {other.axis} for {other.layer}"
            shared = Reason(code=ReasonCode.SHARED_WEIGHT, message=message)
            return weight, weight.axis == other.axis, (*reasons, shared)
    return choice


def axis_conflict(one: Weight, other: Weight) -> BadInputError:
    """The error for one array that two layers sum over along different axes."""
    return BadInputError(
        f"layers {one.layer} (axis {one.axis}) and {other.layer} (axis {other.axis}) share the "
        f"weight {one.weight} of shape {one.shape} and need it sparse along different axes",
        hint=f"leave it dense with --exclude {one.layer}, or untie the two layers",
    )


class _Globs:
    """Globs in order; those that spell one name alone are looked up, as lists of layers have."""

    def __init__(self, globs: Sequence[str]) -> None:
        self._globs = globs
        self._names: dict[str, int] = {}
        self._wild: list[int] = []
        for at, glob in enumerate(globs):
            name = _ESCAPED.sub(r"\1", glob)
            if _WILD.search(_ESCAPED.sub("", glob)):
                self._wild.append(at)
            else:
                self._names.setdefault(name, at)

    def first_match(self, weight: Weight) -> str | None:
        """The first that is a name of the weight."""
        names = _names_of(weight)
        exact = min((self._names[n] for n in names if n in self._names), default=len(self._globs))
        before = (self._globs[at] for at in self._wild if at < exact)
        wild = next((glob for glob in before if any(fnmatchcase(n, glob) for n in names)), None)
        return wild or (self._globs[exact] if exact < len(self._globs) else None)

    def first_idle(self, weights: Iterable[Weight]) -> str | None:
        """The first that no weight has as a name."""
        names = {name for weight in weights for name in _names_of(weight)}
        idle = [at for name, at in self._names.items() if name not in names]
        globs = ((at, self._globs[at]) for at in self._wild)
        idle += [at for at, glob in globs if not any(fnmatchcase(n, glob) for n in names)]
        return self._globs[min(idle)] if idle else None


_WILD = re.compile(r"[*?\[]")
_ESCAPED = re.compile(r"\[([*?\[])\]")
"""As `glob_of` writes the marks of globs in names."""


def _names_of(weight: Weight) -> list[str]:
    return [n for n in (weight.layer, weight.weight, weight.node) if n is not None]


def _check_globs(weights: Sequence[Weight], selection: Selection) -> None:
    for option, globs in (("--include", selection.include), ("--exclude", selection.exclude)):
        glob = _Globs(globs).first_idle(weights)
        if glob is not None:
            said_by = selection.said_by.get(glob)
            where = f"{option} {glob}" if said_by is None else f"{said_by}: {glob}"
            raise BadInputError(
                f"{where} matches none of {len(weights)} layers",
                hint=_close_names(glob, [w.layer for w in weights]),
            )


def _close_names(glob: str, layers: Sequence[str]) -> str:
    plain = "".join(c for c in glob if c not in "*?[]!")
    lowered = {layer.lower(): layer for layer in layers}
    close = difflib.get_close_matches(plain.lower(), lowered, n=5, cutoff=0.4)
    names = [lowered[name] for name in close] or list(dict.fromkeys(layers))[:5]
    return f"layers are named like {', '.join(names)}" if names else "the model has no such layers"
