"""Weights pruned in the arrays that they are stored in: each array once, and a row for each weight.

A module in memory, a checkpoint and an ONNX file differ in where an array is kept alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path

import numpy as np

from twofour.errors import BadInputError, naming
from twofour.inputs.fits import Array
from twofour.pattern import count_zeros
from twofour.pruning.methods import InPlace, left_to, without_data
from twofour.pruning.methods.magnitude import Outcome
from twofour.pruning.selection import Choice, choose, pruned_weight
from twofour.records import frozen
from twofour.records.weights import (
    Calibration,
    Pattern,
    PrunedWeight,
    PruneResult,
    Selection,
    Solution,
    Weight,
)

Write = Callable[[int, Array], None]
"""Puts the changed values of a row's array back to where they are kept."""
Progress = Callable[[str, int, int | None], None]
"""Called with the work in progress and the time left, how much is done, and how much there is."""
_TILE = 1 << 20
_BROKEN_HINT = "repair the model, or leave the layer out with --exclude"


@frozen
class Place:
    """Where the array of a weight is kept."""

    key: Hashable
    """Equal for weights of one array."""
    step: int
    """Elements between neighbours of a group: in a transposed view of an array it is another."""
    read: Callable[[], Array]
    """Gives the values, which may be changed."""


@frozen
class ArrayPlan:
    """Which weights are pruned, and the arrays that they are kept in."""

    pattern: Pattern
    selection: Selection
    choices: tuple[Choice, ...]
    places: tuple[Place | None, ...]
    """One for each of `choices`; None: no array, or one whose zeros cannot be counted."""
    wanted: Mapping[Hashable, int]
    """Each array that is to be pruned -> the row of its first weight."""

    def place(self, row: int) -> Place:
        """The place of an array that is to be pruned."""
        place = self.places[row]
        assert place is not None, "chosen for its array"
        return place


@frozen
class Calibrated:
    """New values for weights and biases of a file, found with calibration data."""

    calibration: Calibration | None = None
    """None: there are no data, and all is pruned without."""
    rows: Mapping[int, Solution] = field(default_factory=dict)
    """Row of the graph's weights -> its solution."""
    arrays: Mapping[int, Path] = field(default_factory=dict)
    """Row -> a file with the array to be stored; rows without one are pruned here."""
    biases: Mapping[str, Path] = field(default_factory=dict)
    """Name of a constant in the main graph -> a file with its new values."""


WITHOUT_DATA = Calibrated()


def plan_arrays(
    weights: Sequence[Weight],
    places: Sequence[Place | None],
    pattern: Pattern,
    selection: Selection,
) -> ArrayPlan:
    """Choose the weights; `places` are beside them.

    Raises BadInputError as `choose` does, and for an array that two weights need along different
    axes.
    """
    choices = choose(weights, pattern, selection)
    wanted: dict[Hashable, int] = {}
    groups: dict[Hashable, tuple[int, int]] = {}
    for row, ((weight, pruned, _), place) in enumerate(zip(choices, places, strict=True)):
        if not pruned:
            continue
        assert place is not None, "chosen for its array"
        assert weight.axis is not None, "chosen for its axis"
        first = wanted.setdefault(place.key, row)
        own = (place.step, weight.shape[weight.axis])
        if groups.setdefault(place.key, own) != own:
            raise _axis_conflict(weights[first], weight)
    return ArrayPlan(
        pattern=pattern,
        selection=selection,
        choices=choices,
        places=tuple(places),
        wanted=wanted,
    )


def _axis_conflict(one: Weight, other: Weight) -> BadInputError:
    """The error for one array that two layers sum over along different axes."""
    return BadInputError(
        f"layers {one.layer} (axis {one.axis}) and {other.layer} (axis {other.axis}) share the "
        f"weight {one.weight} of shape {one.shape} and need it sparse along different axes",
        hint=f"leave it dense with --exclude {one.layer}, or untie the two layers",
    )


def prune_arrays(
    plan: ArrayPlan,
    method: str,
    write: Write,
    calibrated: Calibrated = WITHOUT_DATA,
    step: Progress = lambda *_: None,
) -> PruneResult:
    """Prune the arrays of a plan, one in memory at a time, and report all weights.

    With `calibrated`, weights get the values that were found with calibration data, for the same
    pattern and selection, and `method` prunes only what is left. Raises BadInputError for NaN and
    infinity, and a method that needs data; some arrays are written then.
    """
    prune = without_data(method if calibrated.calibration is None else left_to(method))
    solved = {plan.place(row).key: file for row, file in calibrated.arrays.items()}
    outcomes: dict[Hashable, Outcome] = {}
    for number, (key, row) in enumerate(plan.wanted.items(), 1):
        if key in solved:
            outcomes[key] = _replace(plan, row, solved[key], write)
        else:
            outcomes[key] = _prune(plan, row, prune, write)
        step(plan.choices[row][0].layer, number, len(plan.wanted))
    return PruneResult(
        source="",
        pattern=plan.pattern,
        method=method,
        selection=plan.selection,
        weights=tuple(_rows(plan, outcomes, calibrated.rows, method)),
        calibration=calibrated.calibration,
    )


def _rows(
    plan: ArrayPlan,
    outcomes: dict[Hashable, Outcome],
    solutions: Mapping[int, Solution],
    method: str,
) -> Iterator[PrunedWeight]:
    """The report on every weight; in an array that was not pruned the zeros are counted."""
    for row, (choice, place) in enumerate(zip(plan.choices, plan.places, strict=True)):
        outcome = Outcome()
        if place is not None:
            if place.key not in outcomes:
                outcomes[place.key] = Outcome(zeros=count_zeros(place.read()))
            outcome = outcomes[place.key]
        yield pruned_weight(choice, outcome, solutions.get(row, Solution(method=method)))


def overwrite(file: Path, offset: int, values: Array) -> None:
    """Put the bytes of an array to a place in a file."""
    with file.open("r+b") as handle:
        handle.seek(offset)
        values.reshape(-1).view(np.uint8).tofile(handle)


def refuse_not_finite(weight: Weight, count: int, hint: str = _BROKEN_HINT) -> None:
    """Raise BadInputError where some values of a weight are NaN or infinite."""
    if count:
        raise BadInputError(
            f"layer {weight.layer!r}: {count} of {math.prod(weight.shape)} values of "
            f"{weight.weight} are NaN or infinite",
            hint=hint,
        )


def _prune(plan: ArrayPlan, row: int, prune: InPlace, write: Write) -> Outcome:
    """Prune an array without data."""
    weight = plan.choices[row][0]
    values = plan.place(row).read()
    assert weight.axis is not None, "chosen for its axis"
    with naming(f"layer {weight.layer!r}"):
        outcome = prune(values, weight.axis, plan.pattern)
    refuse_not_finite(weight, outcome.non_finite)
    write(row, values)
    return outcome


def _replace(plan: ArrayPlan, row: int, solved: Path, write: Write) -> Outcome:
    """Write the values that were found with data."""
    before = plan.place(row).read()
    after = np.fromfile(solved, before.dtype).reshape(before.shape)
    write(row, after)
    kept = None
    if whole := _magnitude(before):
        kept = _magnitude(after) / whole
    return Outcome(
        kept_magnitude=kept,
        zeros=count_zeros(after),
        zeros_before=count_zeros(before),
    )


def _magnitude(values: Array) -> float:
    """Sum of |w|, tile by tile: a copy of the whole is never made."""
    flat = values.reshape(-1)
    sums = []
    for start in range(0, flat.size, _TILE):
        tile = flat[start : start + _TILE].astype(np.float64)
        sums.append(float(np.abs(tile).sum()))
    return math.fsum(sums)
