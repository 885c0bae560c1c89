"""The way of a weight back to its constant, through casts, views and Q/DQ nodes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import onnx

from twofour.errors import BadInputError
from twofour.graph.files import Array, read_tensor, shape_of
from twofour.graph.scope import (
    Node,
    Place,
    Scope,
    attribute,
    evaluate,
    integer,
    is_standard,
    tensor_shape,
)
from twofour.records import frozen
from twofour.records.weights import Reason, ReasonCode

CUTS = ("Split", "Slice")
QUANTIZE = ("QuantizeLinear", "TRT_FP8QuantizeLinear")
DEQUANTIZE = ("DequantizeLinear", "TRT_FP8DequantizeLinear")
_RESHAPES = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
LOOKUPS = ("Gather", "GatherND", "GatherElements")
"""Ops that take rows, or matrices of a stack, by indices."""
STACK = 3
"""Least rank of an array from which products pick a matrix; a look-up in others picks rows."""
FOLLOWED = (
    *(*QUANTIZE, *DEQUANTIZE, *_RESHAPES, *CUTS),
    *("Cast", "CastLike", "Gather", "Identity", "Transpose"),
)
"""Ops that give the values of their first input, in other places or as another type."""
_BREAKS = ("Transpose", "Gather", *CUTS)
"""Steps that end a run of reshapes, which count as one reshape."""
_OWN_DOMAINS = ("TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear")
_MOST_STEPS = 64
"""Steps; no real weight has a longer way, and the bound keeps tracing linear in the graph."""
_FOLD = "fold constants (onnxruntime offline optimisation, onnxsim) and try again"


@frozen
class TraceStep:
    """A node on the way, and the graph that contains it."""

    node: Node
    scope: Scope
    output: str
    """The output of the node that is on the way."""


@frozen
class Trace:
    """The way from a node's weight back to its constant, beginning at the node."""

    steps: tuple[TraceStep, ...]
    places: tuple[Place, ...]
    """Every tensor on the way, the constant last, with the graph that defines it."""
    tensor: onnx.TensorProto | None
    stopped: Reason | None
    """Why no constant was reached."""

    @property
    def constant(self) -> str:
        """Name of the last tensor reached."""
        return self.places[-1][1] if self.places else ""

    @property
    def looked_up(self) -> TraceStep | None:
        """The step that picks part of the constant at run time, such as an expert."""
        steps = (s for s in self.steps if s.node.proto.op_type in LOOKUPS)
        return next((s for s in steps if not s.scope.is_fixed(s.output)), None)


def trace(scope: Scope, name: str) -> Trace:
    """Follow a tensor back to its constant through the ops that keep its values in place."""
    steps: list[TraceStep] = []
    places: list[Place] = []
    tensor: onnx.TensorProto | None = None
    stopped: Reason | None = None
    while tensor is None and stopped is None:
        owner = scope.owner(name)
        if len(steps) > _MOST_STEPS:
            stopped = _unsupported(f"more than {_MOST_STEPS} nodes are before the weight; {_FOLD}")
        elif owner is None:
            stopped = _not_constant(f"nothing in the graph makes {name!r}")
        else:
            places.append((owner, name))
            tensor = owner.constants.get(name)
            stopped = _stop(owner, name)
            if tensor is None and stopped is None:
                node = owner.producers[name]
                steps.append(TraceStep(node=node, scope=owner, output=name))
                scope, name = owner, node.proto.input[0]
    return Trace(steps=tuple(steps), places=tuple(places), tensor=tensor, stopped=stopped)


def traced_shapes(origin: Trace) -> tuple[tuple[int, ...], ...] | Reason:
    """Shape at the node, then behind each step, the stored one last; or why they are not known."""
    assert origin.tensor is not None
    shapes = [shape_of(origin.tensor)]
    for step in reversed(origin.steps):
        shape = shape_after(step, shapes[0])
        if shape is None:
            return _unsupported(
                f"{_called(step.node)} gives weight {origin.constant!r} of shape"
                f" {list(shapes[0])} a shape that cannot be worked out; {_FOLD}"
            )
        shapes.insert(0, shape)
    return tuple(shapes)


def land(origin: Trace, shapes: tuple[tuple[int, ...], ...], axis: int) -> int | Reason:
    """Where the node's axis is in the stored array, or which step takes it apart."""
    # A MatMul reads (768, 12 x 64) through Transpose and Reshape from a stored (12, 64, 768). Its
    # axis 0, of 768, is axis 1 before the Transpose, of (768, 768), and axis 2 before the Reshape.
    # Its axis 1 would be two axes of the stored array: it is taken apart.
    at = 0
    while at < len(origin.steps):
        step = origin.steps[at]
        end = at + 1
        if step.node.proto.op_type in _RESHAPES:  # one after the other they are one
            while end < len(origin.steps) and origin.steps[end].node.proto.op_type not in _BREAKS:
                end += 1
        moved = _before(step, axis, shapes[at], shapes[end])
        if moved is None:
            return _unsupported(
                f"{_called(step.node)} from {list(shapes[end])} to {list(shapes[at])} takes"
                f" the reduction axis of weight {origin.constant!r} apart; {_FOLD}"
            )
        axis = moved
        at = end
    return axis


def _unsupported(message: str) -> Reason:
    return Reason(code=ReasonCode.UNSUPPORTED_OP, message=message)


def _not_constant(message: str) -> Reason:
    return Reason(code=ReasonCode.NOT_CONSTANT, message=message)


def _stop(owner: Scope, name: str) -> Reason | None:
    """Why the trace ends at this tensor; None where it is a constant or the trace continues."""
    if name in owner.constants:
        return None
    node = owner.producers.get(name)
    if node is None:
        if name in owner.inputs:
            return _not_constant(f"the weight is the graph input {name!r}, known at run time only")
        return _unsupported(f"weight {name!r} is a sparse initializer")
    first = node.proto.input[0] if node.proto.input else ""
    is_fixed = name in owner.fixed
    is_lookup = node.proto.op_type in LOOKUPS and is_standard(node.proto)
    is_picked = is_lookup and first and not is_fixed
    if is_picked or (_is_followed(node) and (is_fixed or not owner.is_fixed(first))):
        return None
    if is_fixed:
        return _unsupported(f"the weight is computed from constants by {_called(node)}; {_FOLD}")
    return _not_constant(f"the weight is computed at run time by {_called(node)}")


def _called(node: Node) -> str:
    return f"{node.op} node {node.label!r}"


def _is_followed(node: Node) -> bool:
    proto = node.proto
    named = proto.op_type in FOLLOWED and bool(proto.input) and bool(proto.input[0])
    return named and (is_standard(proto) or proto.op_type in _OWN_DOMAINS)


def _before(
    step: TraceStep, axis: int, after: tuple[int, ...], before: tuple[int, ...]
) -> int | None:
    """Where an axis behind the node is before it; None where the node takes it apart."""
    node = step.node
    op = node.proto.op_type
    if op == "Gather":
        return _before_gather(step, axis, len(after), len(before))
    if op == "Transpose":
        return permutation(node, len(before))[axis]
    if op in _RESHAPES:
        return _before_reshape(axis, after, before)
    return None if after[axis] != before[axis] else axis


def _before_reshape(axis: int, after: tuple[int, ...], before: tuple[int, ...]) -> int | None:
    # [12, 64] reshaped to [12, 8, 8]: axis 1 becomes axes 1 and 2, and neither was an axis before.
    # [64, 12] reshaped to [8, 8, 12]: axis 2 was axis 1, of the same length, with 1 behind it.
    inner = prod(after[axis + 1 :])
    for at, length in enumerate(before):
        if length == after[axis] and prod(before[at + 1 :]) == inner:
            return at
    return None


def _before_gather(step: TraceStep, axis: int, after: int, before: int) -> int | None:
    """The axes of the indices replace one axis, which they take apart; `after`, `before`: ranks."""
    # indices of rank 2 along axis 0 turn (8, 5, 7) into (2, 3, 5, 7): axis 3 comes from axis 2
    rank = after - before + 1
    picked = integer(step.node.proto, "axis", 0)
    if picked < 0:
        picked += before
    if axis < picked:
        return axis
    return None if axis < picked + rank else axis - rank + 1


def shape_after(step: TraceStep, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape behind the node; None where it depends on a tensor that is not a constant.

    Raises BadInputError for a damaged one.
    """
    proto = step.node.proto
    try:
        if proto.op_type == "Gather":
            picked = tensor_shape(step.scope, proto.input[1])
            axis = range(len(shape))[integer(proto, "axis", 0)]
            return None if picked is None else (*shape[:axis], *picked, *shape[axis + 1 :])
        move = move_of(step)
        # an array of that shape that takes no memory
        return shape if move is None else tuple(move(np.broadcast_to(False, shape)).shape)
    except BadInputError:  # a constant that the file does not hold whole
        raise
    except Exception:  # noqa: BLE001  # the evaluator raises anything at a damaged node
        return None


# --- how a node moves values ----------------------------------------------------------------------

Move = Callable[[Array], Array]
"""Changes the order of elements or leaves some out; computes nothing."""


def move_of(step: TraceStep) -> Move | None:
    """What the node does to the order of elements; None where it keeps each in its place.

    Raises LookupError where that depends on a tensor that is no constant.
    """
    proto = step.node.proto
    if proto.op_type not in _BREAKS + _RESHAPES:
        return None
    constants = {}
    for name in filter(None, proto.input[1:]):
        tensor = step.scope.constant(name)
        if tensor is None:
            raise LookupError(name)
        constants[name] = read_tensor(tensor, step.scope.path)

    def move(values: Array) -> Array:
        given = {proto.input[0]: values, **constants}
        return evaluate(proto, given, step.scope.opset)[step.output]

    return move


def permutation(node: Node, rank: int) -> tuple[int, ...]:
    """Order of the axes behind a Transpose."""
    given = attribute(node.proto, "perm")
    if given is None or not given.ints:
        return tuple(reversed(range(rank)))
    return tuple(given.ints)
