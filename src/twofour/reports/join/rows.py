"""Which node of the graph each verdict of a report is about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from twofour.records.eligibility import Verdict
from twofour.records.export import GraphNode

_STANDARD_DOMAINS = ("", "ai.onnx")
_Key = tuple[str, str]


def pair(
    verdicts: Sequence[Verdict], nodes: Sequence[GraphNode]
) -> tuple[tuple[GraphNode, ...], tuple[int, ...]]:
    """The nodes, with one made up for each verdict that none fits, and the index of each verdict's.

    By name and op. Nodes of one name are told apart by their labels; where those are no help they
    go in the order of the graph, as both lists come from one walk through it.
    """
    by_name: dict[_Key, list[int]] = defaultdict(list)
    by_label: dict[_Key, list[int]] = defaultdict(list)
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        by_name[node.name, _op(node)].append(index)
        by_label[node.label, _op(node)].append(index)
    complete = list(nodes)
    taken: set[int] = set()
    found = []
    for verdict in verdicts:
        named = by_name[verdict.node or verdict.layer, verdict.op]
        labelled = by_label[verdict.layer, verdict.op] if len(named) > 1 else []
        index = _first_free(labelled, taken)
        if index < 0:
            index = _first_free(named, taken)
        if index < 0:
            index = len(complete)
            complete.append(_made_up(verdict))
        taken.add(index)
        found.append(index)
    return tuple(complete), tuple(found)


def _first_free(waiting: list[int], taken: set[int]) -> int:
    """The index that is next in the graph, -1 where none is left."""
    while waiting and waiting[-1] in taken:
        waiting.pop()
    return waiting.pop() if waiting else -1


def _op(node: GraphNode) -> str:
    """As Weight.op has it."""
    return node.op if node.domain in _STANDARD_DOMAINS else f"{node.domain}::{node.op}"


def _made_up(verdict: Verdict) -> GraphNode:
    name = verdict.layer if verdict.node is None else verdict.node
    return GraphNode(
        name=name, label=verdict.layer, op=verdict.op, domain="", inputs=(), outputs=()
    )
