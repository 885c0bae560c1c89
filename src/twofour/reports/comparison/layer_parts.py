"""Which parts of the model each layer of an engine does, as far as its name or the graph tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from twofour.records import GraphNode
from twofour.reports.join.name_parts import KnownNames, split_name
from twofour.reports.join.node_index import MYELIN_SUFFIX, mangle
from twofour.reports.join.resolve import COPY, index_nodes, resolve

PartsOf: TypeAlias = Callable[[Sequence[str]], Mapping[str, frozenset[str]]]
"""Names of all layers of one engine -> the parts of each; parts are compared between engines."""

_NO_NAMES = KnownNames.of(())
_GENERATED = "__my"


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
            for found in resolve(names, index)
        }

    return parts_of


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
