"""The methods of pruning: one module each behind one signature, and one row each in `METHODS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.pruning.methods import magnitude, wanda
from twofour.pruning.methods.magnitude import Outcome
from twofour.pruning.methods.problem import Array, Problem, Solve, best_of_groups, masked
from twofour.records.weights import Pattern


class InPlace(Protocol):
    """Prunes one array in its own memory without data.

    `bits` are the raw bits of the weights as integers, `kind` the numpy name of their type
    (`bfloat16` and the float8 types too).
    """

    def __call__(self, bits: NDArray[Any], axis: int, pattern: Pattern, *, kind: str) -> Outcome:
        """What was done to the array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to choose the weights that stay, and their values."""

    about: str
    """In a few words, for `--help`."""
    solve: Solve
    """With calibration data: a matrix and the Gram matrix of its inputs."""
    in_place: InPlace | None = None
    """Without data; None: the method needs some."""
    refit: int = 0
    """Conjugate-gradient steps after it, unless the user says how many."""


def _largest(problem: Problem) -> Array:
    """Magnitude's mask; what the data is for comes after it: refit and bias correction."""
    xp_abs = abs(problem.weight)
    return masked(problem.weight, best_of_groups(xp_abs, problem.pattern))


METHODS: dict[str, Method] = {
    "magnitude": Method(
        about="largest |w|, no data needed",
        solve=_largest,
        in_place=magnitude.prune_bits_in_place,
    ),
    "wanda": Method(about="largest |w| times the norm of its input", solve=wanda.solve),
}
"""Name, as `--method` and `twofour.prune(method=...)` take it and prune.json gives it."""


def method_named(name: str) -> Method:
    """The method of a name; raises BadInputError for another one."""
    if name in METHODS:
        return METHODS[name]
    raise BadInputError(
        f"there is no pruning method {name!r}", hint=f"the methods are {', '.join(METHODS)}"
    )


def without_data(name: str) -> InPlace:
    """The method's part that needs no data; raises BadInputError where it has none."""
    method = method_named(name)
    if method.in_place is None:
        raise BadInputError(
            f"--method {name} needs calibration data",
            hint="give some with --calibrate (twofour.prune: calibrate=batches), or take magnitude",
        )
    return method.in_place
