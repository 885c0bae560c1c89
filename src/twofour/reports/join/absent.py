"""Where a layer went that no layer of the engine holds: into a constant, another layer, nowhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from twofour.records.export import GraphNode
from twofour.records.log import Build, EngineLayer, Fusion
from twofour.records.weights import Reason, ReasonCode
from twofour.reports.join.dataflow import Dataflow
from twofour.reports.join.sources import quoted_source

_FARTHEST = 64
"""Nodes looked at behind the missing one."""


class Whereabouts:
    """Answers for one engine; the graph is walked once, when the first question comes."""

    def __init__(
        self,
        nodes: Sequence[GraphNode],
        holders_of: Mapping[int, EngineLayer],
        build: Build | None,
    ) -> None:
        self._nodes = nodes
        self._holders_of = holders_of
        self._build = build
        self._flow: Dataflow | None = None
        self._fusions: dict[str, Fusion] = {}

    def reason(self, node: int) -> Reason:
        """Into what the node was folded or fused, with the log's line where one says so."""
        flow = self._walked()
        fusion = self._fusions.get(self._nodes[node].name)
        into = self._behind(node, flow)
        goes = f" into {into.name}" if into is not None else ""
        if node in flow.fixed:
            message = f"all its inputs are constants: folded{goes}"
        elif fusion is not None:
            message = f"{fusion.kind.value} by {fusion.rule or 'the builder'}{goes}"
        elif into is not None:
            message = f"no layer of the engine is named after it; what follows it is in {into.name}"
        else:
            message = "no layer of the engine is named after it, nor after what follows it"
        return Reason(code=ReasonCode.FOLDED, message=message, source=self._source(fusion))

    def _source(self, fusion: Fusion | None) -> str | None:
        if fusion is None or self._build is None:
            return None
        return quoted_source(self._build.file, fusion)

    def _walked(self) -> Dataflow:
        if self._flow is None:
            self._flow = Dataflow(self._nodes)
            for fusion in self._build.fusions if self._build is not None else ():
                for name in fusion.layers:
                    self._fusions.setdefault(name, fusion)
        return self._flow

    def _behind(self, node: int, flow: Dataflow) -> EngineLayer | None:
        """The engine layer that holds the nearest node that uses this one's output."""
        waiting, seen = deque([node]), {node}
        while waiting and len(seen) < _FARTHEST:
            at = waiting.popleft()
            if at != node and at in self._holders_of:
                return self._holders_of[at]
            for user in flow.after[at][:_FARTHEST]:
                if user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return None
