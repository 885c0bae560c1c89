"""Einsum equations that are a matrix product of an activation with a weight, and along which axis.

Rules of the notation: ONNX operator schema of Einsum, which is numpy's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERM = re.compile(r"[A-Za-z]*(?:\.\.\.)?[A-Za-z]*")
_DOTS = "..."
_OPERANDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EinsumWeight:
    """How one operand is used: the axis that is summed over, and those that outputs run along."""

    axis: int
    out_axes: tuple[int, ...]
    batch_axes: tuple[int, ...]
    """Shared with the other operand and the output: a stack of weights, as experts are."""


def einsum_weight(equation: str, position: int) -> EinsumWeight | None:
    """The operand at `position` as a weight; None where the equation is no product with one.

    It is one where there are two operands and exactly one letter that both have and the output
    lacks. No letter may stand twice in an operand (a diagonal) or in one operand alone without
    being in the output (a sum over it), and the weight has no dots.
    """
    terms = _terms(equation)
    if terms is None:
        return None
    weight, other, output = terms[position], terms[1 - position], terms[2]
    summed = [letter for letter in weight if letter in other and letter not in output]
    lost = [x for x in (*weight, *other) if x not in output and x not in summed]
    if len(summed) != 1 or lost or _DOTS in weight:
        return None
    if any(len(set(term)) != len(term) for term in (weight, other)):
        return None
    return EinsumWeight(
        axis=weight.index(summed[0]),
        out_axes=tuple(a for a, x in enumerate(weight) if x not in other),
        batch_axes=tuple(a for a, x in enumerate(weight) if x in other and x in output),
    )


def _terms(equation: str) -> tuple[tuple[str, ...], ...] | None:
    """Letters of both operands and of the output, with "..." as one of them."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    given = left.split(",")
    if len(given) != _OPERANDS or not all(_TERM.fullmatch(term) for term in (*given, right)):
        return None
    first, second = map(_letters, given)
    if arrow:
        return first, second, _letters(right)
    every = [*first, *second]
    once = sorted(x for x in set(every) if every.count(x) == 1 and x != _DOTS)
    return first, second, (*([_DOTS] if _DOTS in every else []), *once)


def _letters(term: str) -> tuple[str, ...]:
    before, dots, after = term.partition(_DOTS)
    return (*before, *([_DOTS] if dots else []), *after)
