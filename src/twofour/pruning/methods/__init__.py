"""The methods of pruning: one module each behind one signature, and one row each in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from array_api_compat import array_namespace

from twofour.errors import BadInputError
from twofour.pruning.methods import admm, keep, sparsegpt, wanda
from twofour.pruning.methods.magnitude import Outcome, prune_in_place
from twofour.pruning.methods.problem import (
    REFIT_STEPS,
    Array,
    Problem,
    Solve,
    best_of_groups,
    masked,
)
from twofour.records import frozen
from twofour.records.options import CalibrationOptions, MethodOptions
from twofour.records.weights import Pattern

InPlace = Callable[[Array, int, Pattern], Outcome]
"""Prunes an array along an axis in its own memory, without data, and reports on it."""


@frozen
class Method:
    """One way to choose the weights that stay, and their values."""

    solve: Solve
    """Prunes with calibration data: a matrix and the Gram matrix of its inputs."""
    prepare: Callable[[Problem], Any] | None = None
    """Computed once for all weights with one Gram matrix: becomes `Problem.prepared`.

    Where it has a `damping`, that is what was really added."""
    in_place: InPlace | None = None
    """Without data; None: the method needs some."""
    refit: int = REFIT_STEPS
    """Conjugate-gradient steps after it, unless the user says how many."""


def _largest(problem: Problem) -> Array:
    """Magnitude's mask; what the data is for comes after it: refit and bias correction."""
    xp = array_namespace(problem.weight)
    return masked(problem.weight, best_of_groups(xp.abs(problem.weight), problem.pattern))


METHODS: dict[str, Method] = {
    "magnitude": Method(
        solve=_largest,
        in_place=prune_in_place,
    ),
    "wanda": Method(solve=wanda.solve),
    "sparsegpt": Method(
        solve=sparsegpt.solve,
        prepare=sparsegpt.prepare,
    ),
    "admm": Method(
        solve=admm.solve,
        prepare=admm.prepare,
        refit=4,  # it ends near the best values for its mask already
    ),
    "keep": Method(solve=keep.solve, in_place=keep.keep_in_place),
}
"""Name, as `--method` and `twofour.prune(method=...)` take it and prune.json gives it."""

DEFAULT_WITH_DATA = "admm"
DEFAULT_WITHOUT_DATA = "magnitude"


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
            f"--method {name} needs calibration samples",
            hint="add --calibrate DATA (in Python: calibrate=batches), or choose magnitude",
        )
    return method.in_place


def left_to(name: str) -> str:
    """The method for weights that a method with data cannot take."""
    return name if method_named(name).in_place is not None else DEFAULT_WITHOUT_DATA


def refuse_without_data(method: MethodOptions, calibration: CalibrationOptions) -> None:
    """Raise BadInputError for options that do nothing without calibration data."""
    for given, option in (
        (method.refit is not None, f"--refit {method.refit}"),
        (method.damping is not None, f"--damping {method.damping}"),
        (calibration.samples != CalibrationOptions().samples, "--calibrate-samples"),
        (bool(calibration.image_mean), "--mean"),
        (bool(calibration.image_std), "--std"),
        (calibration.image_size is not None, "--size"),
    ):
        if given:
            raise BadInputError(
                f"{option} needs calibration samples",
                hint="add --calibrate DATA (in Python: calibrate=batches)",
            )
