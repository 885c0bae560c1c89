"""Keep: the mask that a weight has already; its values stay until a refit changes them."""

from __future__ import annotations

from array_api_compat import array_namespace

from twofour.errors import PatternBrokenError
from twofour.pruning.methods.magnitude import Outcome, prune_in_place
from twofour.pruning.methods.problem import Array, Problem, masked
from twofour.records.weights import Pattern


def solve(problem: Problem) -> Array:
    """The weight as it came; raises PatternBrokenError where it does not hold the pattern."""
    weight = problem.pruned_before
    if weight is None:
        weight = problem.weight
    xp = array_namespace(weight)
    groups = xp.reshape(weight != 0, (-1, problem.pattern.m))
    excess = xp.sum(groups, axis=-1, dtype=xp.int64) - problem.pattern.n
    _refuse(int(xp.sum(masked(excess, excess > 0))), problem.pattern)
    return weight


def keep_in_place(values: Array, axis: int, pattern: Pattern) -> Outcome:
    """Nothing is changed; raises PatternBrokenError where the array does not hold the pattern."""
    outcome = prune_in_place(values.copy(), axis, pattern)
    if not outcome.non_finite:
        _refuse(outcome.zeros - outcome.zeros_before, pattern)
    return outcome


def _refuse(excess: int, pattern: Pattern) -> None:
    if excess:
        raise PatternBrokenError(
            f"there is no mask to keep: {excess} non-zeros are more than {pattern} allows",
            hint="prune the layer with another method, or leave it out with --exclude",
        )
