"""A stored array as its node sees it, and back: through casts, views and Q/DQ nodes.

A method works on the values that the node sees; written are numbers of the stored type whose values
at the node are as near to the method's result as that type allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from twofour.graph.files import DTYPES, Array, dtype_name, numpy_dtype, read_tensor
from twofour.graph.layers import quantized_dtype
from twofour.graph.scope import Scope, integer
from twofour.graph.trace import (
    DEQUANTIZE,
    QUANTIZE,
    Move,
    Trace,
    TraceStep,
    move_of,
)
from twofour.records import frozen


@frozen
class _Change:
    """A change of type: a Cast, or a node that quantizes or dequantizes with the zero point 0."""

    before: np.dtype[Any]
    after: np.dtype[Any]
    scale: Array | None = None
    """One for each value, in the node's order; None: a Cast."""
    quantizes: bool = False

    def forward(self, values: Array) -> Array:
        return self._computed(values, self.after, divides=self.quantizes)

    def back(self, values: Array) -> Array:
        return self._computed(values, self.before, divides=not self.quantizes)

    def _computed(self, values: Array, kind: np.dtype[Any], *, divides: bool) -> Array:
        # int8 with the scale 1/16: forward, 24 becomes 24 x 1/16 = 1.5 in float32; back, 1.53
        # becomes 1.53 / (1/16) = 24.48, and that is rounded to 24
        if self.scale is None:
            return rounded_to(values, kind)
        if not divides:
            return rounded_to(values.astype(np.float32) * self.scale, kind)
        is_zero = self.scale == 0
        quotients = values.astype(np.float64) / np.where(is_zero, 1, self.scale)
        return rounded_to(np.where(is_zero, 0, quotients), kind)


@frozen
class StoredView:
    """The steps between a stored array and a node, as functions of the values."""

    # An int8 array (16, 8) -> DequantizeLinear -> Transpose -> MatMul has the moves [transpose] and
    # the changes [scale by s], s as (8, 16): what is computed is moved to the end, so that `kept`
    # and `flowing` work in the node's order, and one last `write` undoes all moves.
    shape: tuple[int, ...]
    """Shape of the stored array."""
    dtype: np.dtype[Any]
    """Type of the stored array."""
    moves: tuple[Move, ...] = ()
    """In the order from the stored array to the node."""
    changes: tuple[_Change, ...] = ()
    """Changes of type in the same order, on elements in the node's order."""

    def seen(self, stored: Array) -> Array:
        """The values at the node; a view of `stored` where nothing changes them."""
        return self.flowing(self.moved(stored))

    def kept(self, values: Array) -> Array:
        """The numbers to store for these values, still in the node's order."""
        at_node = self.changes[-1].after if self.changes else self.dtype
        kept = rounded_to(values, at_node)
        for change in reversed(self.changes):
            kept = change.back(kept)
        return kept

    def flowing(self, kept: Array) -> Array:
        """The values at the node for the numbers that `kept` gives."""
        for change in self.changes:
            kept = change.forward(kept)
        return kept

    def moved(self, stored: Array) -> Array:
        """The stored numbers in the node's order."""
        return _through(self.moves, stored)

    def write(self, kept: Array, stored: Array) -> None:
        """Write numbers of `kept` to their places in the stored array."""
        place = self.moved(stored)
        if np.shares_memory(place, stored):
            place[...] = kept
        else:
            stored.reshape(-1)[self.places().reshape(-1)] = kept.reshape(-1)

    def places(self) -> NDArray[np.int64]:
        """Flat index in the stored array of every element at the node."""
        count = math.prod(self.shape)
        places: NDArray[np.int64] = self.moved(np.arange(count, dtype=np.int64).reshape(self.shape))
        return places

    def then(self, *moves: Move) -> StoredView:
        """The same with further moves."""
        changes = []
        for change in self.changes:
            if change.scale is not None:
                change = replace(change, scale=_through(moves, change.scale))  # noqa: PLW2901
            changes.append(change)
        return replace(self, moves=(*self.moves, *moves), changes=tuple(changes))


def view_of(way: Trace, shapes: tuple[tuple[int, ...], ...]) -> StoredView | None:
    """The steps of a trace; None where a step's parameters are no readable constants.

    `shapes` are what `traced_shapes` gives.
    """
    assert way.tensor is not None
    kind = numpy_dtype(dtype_name(way.tensor))
    view = StoredView(shape=shapes[-1], dtype=kind)
    try:
        # from the stored array on; `shape` is the one before the step
        for step, shape in zip(reversed(way.steps), reversed(shapes), strict=False):
            change = _change(step, shape, kind)
            if change is None:
                move = move_of(step)
                if move is not None:
                    view = view.then(move)
            else:
                view = replace(view, changes=(*view.changes, change))
                kind = change.after
    except (LookupError, ValueError):
        return None
    return view


def rounded_to(values: Array, kind: np.dtype[Any]) -> Array:
    """The values in another type: rounded to nearest even, limited to its largest number."""
    if values.dtype == kind:
        return values
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        values = np.clip(np.rint(values.astype(np.float64)), limits.min, limits.max)
    elif values.dtype.itemsize > kind.itemsize:
        import ml_dtypes

        largest = float(ml_dtypes.finfo(kind).max)  # type: ignore[no-untyped-call]  # its own
        values = np.clip(values.astype(np.float64), -largest, largest)
    return np.asarray(values.astype(kind))


def _through(moves: Sequence[Move], values: Array) -> Array:
    for move in moves:
        values = move(values)
    return values


def _change(step: TraceStep, shape: tuple[int, ...], before: np.dtype[Any]) -> _Change | None:
    """The step as a change of values; None where it only moves them."""
    node = step.node.proto
    if node.op_type == "Cast":
        return _Change(before=before, after=numpy_dtype(DTYPES[integer(node, "to", 0)]))
    if node.op_type == "CastLike":
        return _Change(before=before, after=_constant(step.scope, node.input[1]).dtype)
    if node.op_type not in (*QUANTIZE, *DEQUANTIZE):
        return None
    scale = _constant(step.scope, node.input[1])
    quantizes = node.op_type in QUANTIZE
    return _Change(
        before=before,
        after=numpy_dtype(quantized_dtype(step)) if quantizes else _dequantized_type(node, scale),
        scale=_spread(scale.astype(np.float32), step, shape),
        quantizes=quantizes,
    )


def _dequantized_type(node: onnx.NodeProto, scale: Array) -> np.dtype[Any]:
    asked = integer(node, "output_dtype", 0)
    return numpy_dtype(DTYPES[asked]) if asked else scale.dtype


def _spread(scale: Array, step: TraceStep, shape: tuple[int, ...]) -> Array:
    """A scale for each value: of the tensor, of an index of one axis, or of blocks along it."""
    # for an array (32, 16) and axis 0, scales (32,) become (32, 1); with blocks of 8, scales
    # (4, 16) become (32, 16)
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(()), shape)
    axis = integer(step.node.proto, "axis", 1) % len(shape)
    block = integer(step.node.proto, "block_size", 0)
    if block:
        scale = np.repeat(scale, block, axis=axis).take(np.arange(shape[axis]), axis=axis)
    else:
        along = [1] * len(shape)
        along[axis] = -1
        scale = scale.reshape(along)
    return np.broadcast_to(scale, shape)


def _constant(scope: Scope, name: str) -> Array:
    tensor = scope.constant(name)
    if tensor is None:
        raise LookupError(name)
    return read_tensor(tensor, scope.path)
