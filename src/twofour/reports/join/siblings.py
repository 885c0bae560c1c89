"""Horizontal fusion: layers that read one input and run as one layer of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from twofour.records.export import GraphNode

_BESIDE = " || "


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """The layers that one layer of the model is fused with, and the name they have together."""

    name: str
    nodes: tuple[int, ...]
    """Indices of the others, in the order of the graph."""


def find_siblings(
    together: Iterable[tuple[str, Sequence[int]]], nodes: Sequence[GraphNode], rows: Set[int]
) -> Mapping[int, Siblings]:
    """By node of a row; `together` are names of engine and log with the nodes that each holds.

    `A || B` is the builder's own sign of it; of other names those nodes count that share an input.
    The first name that tells of a node is taken.
    """
    found: dict[int, Siblings] = {}
    for name, held in together:
        members = tuple(dict.fromkeys(at for at in held if at in rows))
        if len(members) < 2:
            continue
        for at in members:
            others = tuple(o for o in members if o != at and _beside(name, nodes[at], nodes[o]))
            if others:
                found.setdefault(at, Siblings(name=name, nodes=others))
    return found


def _beside(name: str, one: GraphNode, other: GraphNode) -> bool:
    if not one.inputs or not other.inputs:
        return _BESIDE in name
    return not _data(one).isdisjoint(_data(other))


def _data(node: GraphNode) -> set[str]:
    return {name for name in node.inputs if name and name not in node.constants}
