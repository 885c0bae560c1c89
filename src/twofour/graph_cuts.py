"""Split and Slice: which part of each axis of a constant a node hands on.

Rules: ONNX operator schemas of Split (2 to 18) and Slice (1 to 13).
"""

from __future__ import annotations

from dataclasses import dataclass

from twofour.graph_scope import Node, Scope, integer, integers

CUTS = ("Split", "Slice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A piece of one axis."""

    axis: int
    start: int
    length: int
    step: int = 1


def cut_of(node: Node, scope: Scope, output: str, shape: tuple[int, ...]) -> tuple[Cut, ...]:
    """The pieces that one output of the node is made of, for an input of this shape.

    Raises LookupError or ValueError where they depend on what is no constant, or do not fit.
    """
    return (
        (_split(node, scope, output, shape),) if node.op == "Split" else _slice(node, scope, shape)
    )


def _split(node: Node, scope: Scope, output: str, shape: tuple[int, ...]) -> Cut:
    axis = _axis(integer(node.proto, "axis", 0), shape)
    index, parts = list(node.proto.output).index(output), len(node.proto.output)
    sizes = integers(node, scope, 1, "split")
    if sizes is None:
        each = -(-shape[axis] // parts)
        sizes = (*(each for _ in range(parts - 1)), shape[axis] - each * (parts - 1))
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
