"""Which parts of the model each layer of an engine does, as far as its name or the graph tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from twofour.records.export import GraphNode
from twofour.reports.join.name_parts import KnownNames, split_name
from twofour.reports.join.node_index import MYELIN_SUFFIX, mangle
from twofour.reports.join.resolve import COPY, index_nodes, resolve

PartsOf: TypeAlias = Callable[[Sequence[str]], Mapping[str, frozenset[str]]]
"""Names of all layers of one engine -> the parts of each; parts are compared between engines."""

OwnersOf: TypeAlias = Callable[[Sequence[str]], Mapping[str, str]]
"""Names of the layers of one engine, in the order they ran -> the node that an added one is for."""

_NO_NAMES = KnownNames.of(())
_GENERATED = "__my"
_ADDED_BEFORE, _ADDED_BEHIND = ("InsertedPrecisionFreeCast_", "fused "), ("_nchwc",)
"""What ONNX Runtime puts before and behind the name of a node or tensor (seen in 1.31.1)."""
_NEXT_LAYER = "ReorderInput"
"""Copies a layer's input into its layout; every other node without a name is for the one before."""


def parts_by_name(names: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """What the names say themselves: `A + B`, `A || B`, `PWN(A, B)`, `A_myl0_2`, regions.

    A region `{ForeignNode[a...b]}` gives its two ends, as only the graph says what lies between.
    Copies and the kernels that Myelin names itself have no part but their own name. Other
    characters than letters and digits count as "_", since TensorRT 10 writes them so.
    """
    return {name: frozenset(_parts(name)) for name in names}


def parts_by_graph(nodes: Sequence[GraphNode]) -> PartsOf:
    """What the names mean in a model with these nodes: all nodes of a region, every spelling."""

    def parts_of(names: Sequence[str]) -> Mapping[str, frozenset[str]]:
        index = index_nodes(nodes, None, names)
        return {
            found.name: frozenset(str(at) for at in (*found.nodes, *found.region))
            for found in resolve(names, index, whole=True)
        }

    return parts_of


def no_owners(_: Sequence[str]) -> Mapping[str, str]:
    """Of an engine that adds no nodes, or where no graph is at hand."""
    return {}


def owners_by_graph(nodes: Sequence[GraphNode]) -> OwnersOf:
    """For ONNX Runtime: by the node or tensor in the name, else by what ran before (or behind)."""
    known = {out: node.name for node in nodes for out in node.outputs}
    known |= {node.name: node.name for node in nodes}

    def owners_of(names: Sequence[str]) -> Mapping[str, str]:
        own = [known.get(_bare(name)) for name in names]
        if not any(own):
            return {}
        found: dict[str, set[str]] = defaultdict(set)
        for at, (name, owner) in enumerate(zip(names, own, strict=True)):
            beside = own[at + 1 :] if name.startswith(_NEXT_LAYER) else own[:at][::-1]
            found[name].add(owner or next(filter(None, beside), ""))
        # nodes of one name are one row: of several owners none is said
        single = {name: owners.pop() for name, owners in found.items() if len(owners) == 1}
        return {name: owner for name, owner in single.items() if owner not in ("", name)}

    return owners_of


def _bare(name: str) -> str:
    for before in _ADDED_BEFORE:
        name = name.removeprefix(before)
    for behind in _ADDED_BEHIND:
        name = name.removesuffix(behind)
    return name


def _parts(name: str) -> Iterator[str]:
    if COPY.match(name) or name.startswith(_GENERATED):
        yield name
        return
    for part in split_name(name, _NO_NAMES):
        if part.is_region:
            yield from map(mangle, (*(part.first or ()), *part.last))
        elif MYELIN_SUFFIX.search(part.text):
            yield from map(mangle, MYELIN_SUFFIX.sub("", part.text).split("+"))
        else:
            yield mangle(part.text)
