"""Channels of classes in another order: in the constants of a new file, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError, naming
from twofour.graph.files import read_tensor
from twofour.graph.opened import OpenedModel
from twofour.graph.scope import scopes
from twofour.pruning.onnx_file import data_copies, write_back, written
from twofour.pruning.permutation.channels import varying
from twofour.pruning.permutation.classes import Classes, Placement

Array = NDArray[Any]
Orders = Mapping[str, Sequence[int]]
"""By key of the class: which channel comes to each slot."""

_TOLERANCES = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1.6e-1, "int8": 2e-2}
"""Largest difference, as a part of the value and of the largest value of the output.

Another order of summation moves the outputs of deep nets by some 1e-6 in float32 (measured on
ResNet- and BERT-like nets: at most 2e-6), a wrong permutation by the size of the output itself.
float16 and bfloat16 as in export/agreement; in int8 a sum near a rounding edge takes another step.
"""


def permute_onnx(
    opened: OpenedModel, target: Path, classes: Classes, orders: Orders
) -> tuple[str, ...]:
    """Write the model to `target` with the channels in these orders; gives the constants changed.

    No node is added: inputs and outputs keep their order, and every value its bits. External data
    stays external, as `prune_onnx` leaves it. Raises BadInputError for an order that is no
    permutation, a class the model has not, and a target that would overwrite the model.
    """
    by_number = orders_by_number(classes, orders)
    copies, model = data_copies(opened, target), opened.copy()
    constants = next(scopes(model, opened.path)).constants
    changed = []
    with naming(opened.path), written(opened, model, target, copies) as data:
        for name, placements in classes.placements.items():
            if any(_is_moved(placement, by_number) for placement in placements):
                values = read_tensor(constants[name], opened.path)
                moved = permuted(values, placements, by_number)
                write_back(constants[name], moved, opened.path, data)
                changed.append(name)
    return tuple(changed)


def orders_by_number(classes: Classes, orders: Orders) -> dict[int, NDArray[np.intp]]:
    """Orders by the number of their class; raises BadInputError for one that is none."""
    numbers = {each.key: (at, each.size) for at, each in enumerate(classes.classes)}
    found = {}
    for key, order in orders.items():
        if key not in numbers:
            raise BadInputError(f"the model has no class of channels {key!r}")
        number, size = numbers[key]
        if sorted(order) != list(range(size)):
            raise BadInputError(f"the order of class {key!r} is no permutation of {size} channels")
        found[number] = np.array(order, np.intp)
    return found


def _is_moved(placement: Placement, orders: Mapping[int, NDArray[np.intp]]) -> bool:
    return any((placement.group == number).any() for number in orders)


def permuted(
    values: Array, placements: Sequence[Placement], orders: Mapping[int, NDArray[np.intp]]
) -> Array:
    """The values of a constant, in the same memory layout, with its channels in these orders."""
    for placement in placements:
        axes = varying(placement.group)
        front = np.moveaxis(values, axes, range(len(axes)))
        lengths = [values.shape[axis] for axis in axes]
        flat = front.reshape(int(np.prod(lengths)), -1)
        taken = flat[source_places(placement, orders)]
        values = np.moveaxis(taken.reshape(front.shape), range(len(axes)), axes)
    return np.ascontiguousarray(values)


def source_places(
    placement: Placement, orders: Mapping[int, NDArray[np.intp]]
) -> NDArray[np.int64]:
    """For each place, flat, the one whose entries come to it."""
    group, slot, rank = (
        part.reshape(-1) for part in (placement.group, placement.slot, placement.rank)
    )
    source = np.arange(len(group))
    for number, order in orders.items():
        places = np.flatnonzero(group == number)
        wanted = order[slot[places]]
        depth = int(rank[places].max(initial=0)) + 1
        at = np.full(len(order) * depth, -1, np.int64)
        at[slot[places] * depth + rank[places]] = places
        source[places] = at[wanted * depth + rank[places]]
    assert (source >= 0).all(), "every channel of a class has as many places as every other"
    return source


def same_outputs(
    before: Mapping[str, Array], after: Mapping[str, Array], *, dtype: str
) -> str | None:
    """Why the outputs of a permuted model are not those of the model it was; None where they are.

    `dtype` is the coarsest type the model computes in ("float32", "float16", "bfloat16", "int8").
    Whole numbers, booleans and texts must be equal, and NaN and infinities must stand where they
    stood.
    """
    tolerance = _TOLERANCES.get(dtype)
    if tolerance is None:
        return f"no bound is known for a model that computes in {dtype}"
    if set(before) != set(after):
        return f"outputs {sorted(after)} where {sorted(before)} are expected"
    for name, one in before.items():
        reason = _difference(np.asarray(one), np.asarray(after[name]), tolerance)
        if reason is not None:
            return f"output {name}: {reason}"
    return None


def _difference(one: Array, other: Array, tolerance: float) -> str | None:
    if one.shape != other.shape:
        return f"shape {list(other.shape)} where {list(one.shape)} is expected"
    if one.dtype.kind in "iubOSU":
        unlike = int((one != other).sum())
        return f"{unlike} of {one.size} values differ" if unlike else None
    a, b = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(np.where(finite, 0, a), np.where(np.isfinite(b), 0, b), equal_nan=True):
        return "NaN or infinity in other places"
    scale = float(np.abs(a[finite]).max(initial=0))
    error = np.abs(a[finite] - b[finite])
    too_far = error > tolerance * (np.abs(a[finite]) + scale)
    if not too_far.any():
        return None
    return (
        f"off by {error.max():.3g} where the largest value is {scale:.3g}, more than"
        f" {tolerance:g} of it"
    )
