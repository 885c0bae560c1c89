"""The way of a weight back to its constant, through casts, views and Q/DQ nodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

import onnx

from twofour.graph.files import shape_of
from twofour.graph.scope import (
    Node,
    Place,
    Scope,
    attribute,
    integer,
    integers,
    is_standard,
    tensor_shape,
)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A piece of one axis."""

    axis: int
    start: int
    length: int
    step: int = 1


def cut_of(node: Node, scope: Scope, output: str, shape: tuple[int, ...]) -> tuple[Cut, ...]:
    """The pieces that one output of the node is made of, for an input of this shape.

    Raises LookupError or ValueError where they depend on a tensor that is no constant, or do not
    fit.
    """
    if node.op == "Split":
        return (_split(node, scope, output, shape),)
    return _slice(node, scope, shape)


def _split(node: Node, scope: Scope, output: str, shape: tuple[int, ...]) -> Cut:
    axis = _axis(integer(node.proto, "axis", 0), shape)
    index, parts = scope.output_at[output], len(node.proto.output)
    sizes = integers(node, scope, 1, "split")
    if sizes is None:  # equal but for the last; none of thousands is worked out with all others
        each = -(-shape[axis] // parts)
        last = shape[axis] - each * (parts - 1)
        if last < 0:
            raise ValueError(last)
        return Cut(axis=axis, start=each * index, length=each if index < parts - 1 else last)
    if sum(sizes) != shape[axis] or min(sizes) < 0:
        raise ValueError(sizes)
    return Cut(axis=axis, start=sum(sizes[:index]), length=sizes[index])


def _slice(node: Node, scope: Scope, shape: tuple[int, ...]) -> tuple[Cut, ...]:
    starts = integers(node, scope, 1, "starts") or ()
    ends = integers(node, scope, 2, "ends") or ()
    axes = integers(node, scope, 3, "axes") or tuple(range(len(starts)))
    steps = integers(node, scope, 4, "steps") or (1,) * len(starts)
    cuts = []
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        at = _axis(axis, shape)
        kept = range(*slice(start, end, step).indices(shape[at]))
        cuts.append(Cut(axis=at, start=kept.start, length=len(kept), step=step))
    return tuple(cuts)


def _axis(axis: int, shape: tuple[int, ...]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(axis)
    return axis % len(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """A node on the way, and the graph that contains it."""

    node: Node
    scope: Scope
    output: str
    """The output of the node that is on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """An axis, and the run of it that groups must not cross (None: the whole axis)."""

    axis: int
    run: int | None = None


def trace(scope: Scope, name: str) -> Trace:
    """Follow a tensor back to its constant through the ops that keep its values in place."""
    steps: list[TraceStep] = []
    places: list[Place] = []
    while True:
        owner, tensor, stopped = scope.owner(name), None, None
        if len(steps) > _MOST_STEPS:
            stopped = _unsupported(f"more than {_MOST_STEPS} nodes are before the weight; {_FOLD}")
        elif owner is None:
            message = f"nothing in the graph makes {name!r}"
            stopped = Reason(code=ReasonCode.NOT_CONSTANT, message=message)
        else:
            places.append((owner, name))
            tensor = owner.constants.get(name)
            stopped = None if tensor is not None else _stop(owner, name)
        if owner is None or tensor is not None or stopped is not None:
            return Trace(steps=tuple(steps), places=tuple(places), tensor=tensor, stopped=stopped)
        node = owner.producers[name]
        steps.append(TraceStep(node=node, scope=owner, output=name))
        scope, name = owner, node.proto.input[0]


def traced_shapes(found: Trace) -> tuple[tuple[int, ...], ...] | Reason:
    """Shape at the node, then behind each step, the stored one last; or why they are not known."""
    assert found.tensor is not None
    known = [shape_of(found.tensor)]
    for step in reversed(found.steps):
        shape = shape_after(step, known[0])
        if shape is None:
            return _unsupported(
                f"{_called(step.node)} gives weight {found.constant!r} of shape"
                f" {list(known[0])} a shape that cannot be worked out; {_FOLD}"
            )
        known.insert(0, shape)
    return tuple(known)


def land(found: Trace, known: tuple[tuple[int, ...], ...], start: Landing) -> Landing | Reason:
    """Where the node's axis is in the stored array, or which step takes it apart."""
    # A MatMul reads (768, 12 x 64) through Transpose and Reshape from a stored (12, 64, 768). Its
    # axis 0, of 768, is axis 1 before the Transpose, of (768, 768), and axis 2 before the Reshape.
    # Had the weight been stored as (12, 64, 24, 32), the axis would be split into 24 runs of 32,
    # and groups must not cross the runs: Landing(axis=3, run=32).
    landing, at = start, 0
    while at < len(found.steps):
        step, end = found.steps[at], at + 1
        if step.node.proto.op_type in _RESHAPES:  # one after the other they are one
            while end < len(found.steps) and found.steps[end].node.proto.op_type not in _BREAKS:
                end += 1
        moved = _before(step, landing, known[at], known[end])
        if moved is None:
            return _unsupported(
                f"{_called(step.node)} from {list(known[end])} to {list(known[at])} takes"
                f" the reduction axis of weight {found.constant!r} apart; {_FOLD}"
            )
        landing, at = moved, end
    return landing


def crossing(found: Trace, landing: Landing) -> Reason:
    """The reason for runs that M does not divide."""
    step = next(s for s in found.steps if s.node.proto.op_type in (*_RESHAPES, *CUTS))
    return _unsupported(
        f"{_called(step.node)} lays runs of {landing.run} along axis {landing.axis} of"
        f" weight {found.constant!r}, which groups would cross; {_FOLD}"
    )


def _unsupported(message: str) -> Reason:
    return Reason(code=ReasonCode.UNSUPPORTED_OP, message=message)


def _stop(owner: Scope, name: str) -> Reason | None:
    """Why the trace ends at this tensor, which is no dense constant; None where it continues."""
    node = owner.producers.get(name)
    if node is None:
        if name in owner.inputs:
            return Reason(
                code=ReasonCode.NOT_CONSTANT,
                message=f"the weight is the graph input {name!r}, known at run time only",
            )
        return _unsupported(f"weight {name!r} is a sparse initializer")
    if name in owner.fixed:
        if _is_followed(node):
            return None
        return _unsupported(f"the weight is computed from constants by {_called(node)}; {_FOLD}")
    first = node.proto.input[0] if node.proto.input else ""
    is_lookup = node.proto.op_type in LOOKUPS and is_standard(node.proto)
    if (is_lookup and first) or (_is_followed(node) and not owner.is_fixed(first)):
        return None
    return Reason(
        code=ReasonCode.NOT_CONSTANT,
        message=f"the weight is computed at run time by {_called(node)}",
    )


def _called(node: Node) -> str:
    return f"{node.op} node {node.label!r}"


def _is_followed(node: Node) -> bool:
    proto = node.proto
    named = proto.op_type in FOLLOWED and bool(proto.input) and bool(proto.input[0])
    return named and (is_standard(proto) or proto.op_type in _OWN_DOMAINS)


def _before(
    step: TraceStep, landing: Landing, after: tuple[int, ...], before: tuple[int, ...]
) -> Landing | None:
    """Where an axis behind the node is before it; None where the node takes it apart."""
    node = step.node
    if node.proto.op_type == "Gather":
        return _before_gather(step, landing, len(after), len(before))
    if node.proto.op_type in CUTS:
        return _before_cuts(cut_of(node, step.scope, step.output, before), landing, before)
    if node.proto.op_type == "Transpose":
        return Landing(axis=permutation(node, len(before))[landing.axis], run=landing.run)
    return _before_reshape(landing, after, before) if node.op in _RESHAPES else landing


def _before_reshape(
    landing: Landing, after: tuple[int, ...], before: tuple[int, ...]
) -> Landing | None:
    length, inner = after[landing.axis], prod(after[landing.axis + 1 :])
    # with axes of length 1 several fit: the one of the same length first, else the one with data
    fits = [a for a in range(len(before)) if prod(before[a + 1 :]) == inner]
    same = [a for a in fits if before[a] == length]
    if same:
        return Landing(axis=same[0], run=landing.run)
    if not fits:
        return None
    return Landing(axis=fits[0], run=gcd(before[fits[0]], landing.run or length))


def _before_gather(step: TraceStep, landing: Landing, after: int, before: int) -> Landing | None:
    """The axes of the indices replace one axis, which they take apart; `after`, `before`: ranks."""
    # indices of rank 2 along axis 0 turn (8, 5, 7) into (2, 3, 5, 7): axis 3 comes from axis 2
    rank = after - before + 1
    axis = integer(step.node.proto, "axis", 0)
    axis += before if axis < 0 else 0
    if axis <= landing.axis < axis + rank:
        return None
    behind = landing.axis >= axis + rank
    return Landing(axis=landing.axis - (rank - 1 if behind else 0), run=landing.run)


def _before_cuts(
    cuts: tuple[Cut, ...], landing: Landing, before: tuple[int, ...]
) -> Landing | None:
    """The same axis; where it is cut, groups must not cross the start and end of the piece."""
    # weights 6 to 18 of an axis of 24: runs of gcd(6, 12) = 6 keep groups of 2 or 3 whole, not of 4
    cut = next((c for c in cuts if c.axis == landing.axis), None)
    if cut is None or (cut.start, cut.length, cut.step) == (0, before[cut.axis], 1):
        return landing
    if cut.step != 1:
        return None
    return Landing(axis=landing.axis, run=gcd(cut.start, cut.length, landing.run or cut.length))


def shape_after(step: TraceStep, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape behind the node; None where it depends on a tensor that is not a constant."""
    try:
        if step.node.proto.op_type == "Transpose":
            return tuple(shape[a] for a in permutation(step.node, len(shape)))
        if step.node.proto.op_type in CUTS:
            lengths = {c.axis: c.length for c in cut_of(step.node, step.scope, step.output, shape)}
            return tuple(lengths.get(a, length) for a, length in enumerate(shape))
        if step.node.proto.op_type == "Gather":
            axis = _axis(integer(step.node.proto, "axis", 0), shape)
            indices = tensor_shape(step.scope, step.node.proto.input[1])
            return None if indices is None else (*shape[:axis], *indices, *shape[axis + 1 :])
        if step.node.proto.op_type in _RESHAPES:
            after = _reshaped(step, shape)
            return after if prod(after) == prod(shape) and min(after, default=1) >= 0 else None
    except (LookupError, ValueError):
        return None
    return shape


def permutation(node: Node, rank: int) -> tuple[int, ...]:
    """Order of the axes behind a Transpose; raises ValueError where it does not fit the rank."""
    given = attribute(node.proto, "perm")
    perm = () if given is None else tuple(given.ints)
    if not perm:
        return tuple(reversed(range(rank)))
    if sorted(perm) != list(range(rank)):
        raise ValueError(perm)
    return perm


def _reshaped(step: TraceStep, shape: tuple[int, ...]) -> tuple[int, ...]:
    node, scope, op = step.node, step.scope, step.node.proto.op_type
    if op == "Flatten":
        cut = integer(node.proto, "axis", 1)
        cut = cut + len(shape) if cut < 0 else cut
        return prod(shape[:cut]), prod(shape[cut:])
    given = integers(node, scope, 1, "shape" if op == "Reshape" else "axes")
    if op == "Reshape":
        copies = not integer(node.proto, "allowzero", 0)  # a 0 copies the size before
        sizes = [shape[a] if n == 0 and copies else n for a, n in enumerate(given or ())]
        known = prod(n for n in sizes if n != -1)
        if -1 in sizes and known:  # it takes the rest
            sizes[sizes.index(-1)] = prod(shape) // known
        return tuple(sizes)
    if op == "Squeeze":
        gone = {a % len(shape) for a in given} if given and shape else None
        return tuple(n for a, n in enumerate(shape) if (n != 1 if gone is None else a not in gone))
    rank = len(shape) + len(given or ())
    added, rest = {a % rank for a in given or ()}, iter(shape)
    return tuple(1 if a in added else next(rest, 1) for a in range(rank))
