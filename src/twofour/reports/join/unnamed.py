"""`(Unnamed Layer* 12) [Convolution]`: layers without a name, told by their kind and their order.

The number counts every layer of the network, the builder's own included, so it is no index into the
graph. Where a log names as many layers of a kind as the model has nodes of it that no other name
leads to, the order of the numbers is the order of the nodes; else nothing is settled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set

from twofour.records.export import GraphNode

_UNNAMED = re.compile(r"\(Unnamed Layer\* (\d{1,9})\) \[([^\[\]]{1,80})\]")
_KINDS: Mapping[str, frozenset[str]] = {
    "Convolution": frozenset({"Conv"}),
    "Deconvolution": frozenset({"ConvTranspose"}),
    "Fully Connected": frozenset({"Gemm", "MatMul"}),
    "Matrix Multiply": frozenset({"Gemm", "MatMul"}),
}


def number_unnamed(
    names: Iterable[str], nodes: Sequence[GraphNode], named: Set[int]
) -> dict[str, int]:
    """Node of each unnamed layer in the names; `named` are the nodes that have another name."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        for match in _UNNAMED.finditer(name):
            numbers.setdefault(match[2], set()).add(int(match[1]))
    found: dict[str, int] = {}
    for kind, seen in numbers.items():
        ops = _KINDS.get(kind, frozenset())
        free = [i for i, node in enumerate(nodes) if node.op in ops and i not in named]
        if len(free) == len(seen):
            for number, index in zip(sorted(seen), free, strict=True):
                found[f"(Unnamed Layer* {number}) [{kind}]"] = index
    return found
