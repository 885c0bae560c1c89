"""A stored array as its node sees it, and back: through casts, views and Q/DQ nodes.

A method works on the values that the node sees; written are numbers of the stored type whose values
at the node are as near to the method's result as that type allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.graph.files import DTYPES, Array, dtype_name, numpy_dtype, read_tensor, shape_of
from twofour.graph.scope import Scope, integer
from twofour.graph.trace import (
    DEQUANTIZE,
    QUANTIZE,
    Trace,
    TraceStep,
    cut_of,
    permutation,
    shape_after,
)

Move = Callable[[Array], Array]
"""Changes the order of elements or leaves some out; computes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cast:
    """A change of type."""

    before: np.dtype[Any]
    after: np.dtype[Any]

    def forward(self, values: Array) -> Array:
        return rounded_to(values, self.after)

    def back(self, values: Array) -> Array:
        return rounded_to(values, self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled:
    """DequantizeLinear with the zero point 0, or with `quantizes` QuantizeLinear."""

    before: np.dtype[Any]
    after: np.dtype[Any]
    scale: Array
    """One for each value, in the node's order."""
    quantizes: bool

    def forward(self, values: Array) -> Array:
        return self._quantized(values) if self.quantizes else self._dequantized(values)

    def back(self, values: Array) -> Array:
        return self._dequantized(values) if self.quantizes else self._quantized(values)

    def _quantized(self, values: Array) -> Array:
        safe = np.where(self.scale == 0, 1, self.scale)
        integers = self.after if self.quantizes else self.before
        return rounded_to(np.where(self.scale == 0, 0, values.astype(np.float64) / safe), integers)

    def _dequantized(self, values: Array) -> Array:
        floats = self.before if self.quantizes else self.after
        return rounded_to(values.astype(np.float32) * self.scale, floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredView:
    """The steps between a stored array and a node, as functions of the values."""

    # An int8 array (16, 8) -> DequantizeLinear -> Transpose -> MatMul has the moves [transpose] and
    # the changes [scale by s], s as (8, 16): what is computed is moved to the end, so that `kept`
    # and `flowing` work in the node's order, and one last `write` undoes all moves.
    shape: tuple[int, ...]
    """Shape of the stored array."""
    moves: tuple[Move, ...]
    """In the order from the stored array to the node."""
    changes: tuple[_Cast | _Scaled, ...]
    """Changes of type in the same order, on elements in the node's order."""

    def seen(self, stored: Array) -> Array:
        """The values at the node; a view of `stored` where nothing changes them."""
        return self.flowing(self.moved(stored))

    def kept(self, values: Array) -> Array:
        """The numbers to store for these values, still in the node's order."""
        for change in reversed(self.changes):
            values = change.back(values)
        return values

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
            place[...] = rounded_to(kept, stored.dtype)
        else:
            stored.reshape(-1)[self.places().reshape(-1)] = rounded_to(kept, stored.dtype).reshape(
                -1
            )

    def places(self) -> NDArray[np.int64]:
        """Flat index in the stored array of every element at the node."""
        count = int(np.prod(self.shape, dtype=np.int64))
        places: NDArray[np.int64] = self.moved(np.arange(count, dtype=np.int64).reshape(self.shape))
        return places

    def then(self, *moves: Move) -> StoredView:
        """The same with further moves."""
        changes = tuple(
            replace(change, scale=_through(moves, change.scale))
            if isinstance(change, _Scaled)
            else change
            for change in self.changes
        )
        return replace(self, moves=(*self.moves, *moves), changes=changes)


def view_of(found: Trace) -> StoredView | None:
    """The steps of a trace; None where a step's parameters are no readable constants."""
    assert found.tensor is not None
    shape = shape_of(found.tensor)
    view = StoredView(shape=shape, moves=(), changes=())
    kind = numpy_dtype(dtype_name(found.tensor))
    try:
        for step in reversed(found.steps):
            change = _change(step, shape, kind)
            if change is not None:
                view, kind = replace(view, changes=(*view.changes, change)), change.after
            elif (move := _move(step, shape)) is not None:
                view = view.then(move)
            after = shape_after(step, shape)
            if after is None:
                return None
            shape = after
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


def _change(
    step: TraceStep, shape: tuple[int, ...], before: np.dtype[Any]
) -> _Cast | _Scaled | None:
    """The step as a change of values; None where it only moves them."""
    node, op = step.node.proto, step.node.proto.op_type
    if op == "Cast":
        return _Cast(before=before, after=numpy_dtype(DTYPES[integer(node, "to", 0)]))
    if op == "CastLike":
        like = _constant(step.scope, node.input[1])
        return _Cast(before=before, after=like.dtype)
    if op not in (*QUANTIZE, *DEQUANTIZE):
        return None
    scale = _constant(step.scope, node.input[1])
    if op in QUANTIZE:
        after = _quantized_type(step)
    else:
        asked = integer(node, "output_dtype", 0)
        after = numpy_dtype(DTYPES[asked]) if asked else scale.dtype
    return _Scaled(
        before=before,
        after=after,
        scale=_spread(scale.astype(np.float32), step, shape),
        quantizes=op in QUANTIZE,
    )


def _quantized_type(step: TraceStep) -> np.dtype[Any]:
    node = step.node.proto
    if node.op_type == "TRT_FP8QuantizeLinear":
        return numpy_dtype("float8_e4m3fn")
    if len(node.input) > 2 and node.input[2]:
        tensor = step.scope.constant(node.input[2])
        if tensor is None:
            raise LookupError(node.input[2])
        return numpy_dtype(dtype_name(tensor))
    return numpy_dtype(DTYPES[integer(node, "output_dtype", 0) or 2])


def _spread(scale: Array, step: TraceStep, shape: tuple[int, ...]) -> Array:
    """A scale for each value: of the tensor, of an index of one axis, or of blocks along it."""
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(()), shape)
    axis = integer(step.node.proto, "axis", 1) % len(shape)
    block = integer(step.node.proto, "block_size", 0)
    if block:
        scale = np.repeat(scale, block, axis=axis).take(np.arange(shape[axis]), axis=axis)
    else:
        scale = scale.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return np.broadcast_to(scale, shape)


def _constant(scope: Scope, name: str) -> Array:
    tensor = scope.constant(name)
    if tensor is None:
        raise LookupError(name)
    return read_tensor(tensor, scope.path)


def _move(step: TraceStep, shape: tuple[int, ...]) -> Move | None:
    """The step as a change of the order of elements; None where it keeps the order."""
    node, op = step.node, step.node.proto.op_type
    if op == "Identity":
        return None
    if op == "Transpose":
        order = permutation(node, len(shape))
        return lambda values: values.transpose(order)
    if op in ("Split", "Slice"):
        index = [slice(None)] * len(shape)
        for cut in cut_of(node, step.scope, step.output, shape):
            end = cut.start + cut.length * cut.step
            index[cut.axis] = slice(cut.start, end if end >= 0 else None, cut.step)
        return lambda values: values[tuple(index)]
    if op == "Gather":
        axis = integer(node.proto, "axis", 0)
        indices = _constant(step.scope, node.proto.input[1])
        return lambda values: values.take(indices, axis=axis)
    after = shape_after(step, shape)
    if after is None:
        raise ValueError(op)
    return lambda values: values.reshape(after)
