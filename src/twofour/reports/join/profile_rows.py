"""The rows of a per-layer profile, by the layers of the model whose time they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from twofour.records.export import GraphNode
from twofour.records.log import EngineLayer, Profile
from twofour.reports.join.node_index import NodeIndex
from twofour.reports.join.resolve import NameInUse, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One row of a profile: its time and the layers of the model in it (indices of nodes)."""

    name: str
    ms: float
    nodes: tuple[int, ...]
    matched: bool = True
    """It leads to the model, or is the builder's own; else nobody knows what it computes."""
    sparse: bool | None = None
    """Whether its kernel is sparse; None where the engine does not name it."""


def timed_rows(
    profile: Profile | None, engine: Iterable[EngineLayer], index: NodeIndex
) -> tuple[Timed, ...]:
    """The rows with a time; `engine` are the layers of the engine that was profiled."""
    if profile is None:
        return ()
    known = {layer.name: layer for layer in engine}
    rows = [
        (row.name, ms)
        for row in profile.layers
        if (ms := row.average_ms) is not None and isfinite(ms)
    ]
    uses = [
        NameInUse(name=name, sources=known[name].onnx_nodes if name in known else ())
        for name, _ in rows
    ]
    return tuple(
        Timed(
            name=name,
            ms=ms,
            nodes=(*found.nodes, *found.region),
            matched=found.matched,
            sparse=known[name].sparse if name in known else None,
        )
        for (name, ms), found in zip(rows, resolve(uses, index, whole=True), strict=True)
    )


class EngineNames:
    """Tells the profile of this engine from that of another."""

    def __init__(
        self, engine: frozenset[str], rows: Iterable[int], *, nodes: Sequence[GraphNode]
    ) -> None:
        self._engine = engine
        self._rows = frozenset(rows)
        # without the graph, what the engine names and no row holds is known to have no weight
        self._accounted = frozenset() if nodes else engine

    def keep(self, profile: tuple[Timed, ...]) -> tuple[tuple[Timed, ...], int]:
        """The profile and 0; () and its length where it is of another engine."""
        if not any(t.name in self._engine or self._rows.intersection(t.nodes) for t in profile):
            return (), len(profile)
        kept = (replace(t, matched=t.matched or t.name in self._accounted) for t in profile)
        return tuple(kept), 0
