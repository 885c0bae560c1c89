"""Where the tensors that go into and out of a Myelin region lie in the graph of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from twofour.records.export import GraphNode
from twofour.reports.join.dataflow import Dataflow
from twofour.reports.join.name_parts import PROFILE
from twofour.reports.join.regions import Region

_COPIES = 8
"""Copies of one tensor that are followed, one behind the other."""


@dataclass(frozen=True, slots=True)
class TensorEnds:
    """Names of the tensors that a layer reads and writes; None where they are not listed."""

    inputs: tuple[str, ...] | None
    outputs: tuple[str, ...] | None


class TensorLinks:
    """Tensors of an engine by the nodes of the model that make and read them.

    `copies` are the layers that only move a tensor, which it leaves under another name, and
    `constants` those that read nothing.
    """

    def __init__(
        self,
        copies: Iterable[TensorEnds],
        constants: Iterable[TensorEnds],
        nodes: Sequence[GraphNode],
    ) -> None:
        self._sources: dict[str, str] = {}
        self._copies: dict[str, str] = {}
        self._constants = {_plain(name) for layer in constants for name in layer.outputs or ()}
        for copy in copies:
            if copy.inputs and copy.outputs:
                given, made = _plain(copy.inputs[0]), _plain(copy.outputs[0])
                self._sources[made] = given
                self._copies[given] = made
        self._makers: dict[str, list[int]] = defaultdict(list)
        self._readers: dict[str, list[int]] = defaultdict(list)
        for at, node in enumerate(nodes):
            for name in filter(None, node.outputs):
                self._makers[name].append(at)
            for name in dict.fromkeys(filter(None, node.inputs)):
                if name not in node.constants:
                    self._readers[name].append(at)

    def bounded(self, region: Region, ends: TensorEnds, flow: Dataflow, apart: Set[int]) -> Region:
        """The region with the nodes that its tensors prove; closed where all of them are known."""
        if not ends.outputs:
            return region
        made = [self._found(name, self._copies) for name in ends.outputs]
        given = [
            self._found(name, self._sources)
            for name in ends.inputs or ()
            if _plain(name) not in self._constants
        ]
        makers = [at for name in made if name for at in self._makers[name]]
        if ends.inputs is None or None in made or None in given:
            return replace(region, inside=tuple(dict.fromkeys(makers)))
        stops = {at for name in given if name for at in self._makers[name]} | apart
        inside = _back_to(makers, stops, flow)
        ends_inside = all(at in inside for at in (*region.first, *region.last) if at not in apart)
        if not ends_inside:
            return replace(region, inside=tuple(dict.fromkeys(makers)))
        return replace(region, inside=inside, closed=True)

    def _found(self, name: str, links: dict[str, str]) -> str | None:
        """The model's name of a tensor, behind the copies of it; None where it has none."""
        name = _plain(name)
        for _ in range(_COPIES):
            makers = len(self._makers.get(name, ()))
            if makers == 1 or (makers == 0 and name in self._readers):
                return name
            if name not in links:
                return None
            name = links[name]
        return None


def _back_to(ends: Sequence[int], stops: Set[int], flow: Dataflow) -> tuple[int, ...]:
    found = {at: None for at in ends if at not in stops}
    for at in (waiting := list(found)):
        for source in flow.before[at]:
            if source not in found and source not in stops:
                found[source] = None
                waiting.append(source)
    return tuple(sorted(found))


def _plain(name: str) -> str:
    return PROFILE.sub("", name)
