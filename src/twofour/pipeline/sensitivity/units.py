"""What is pruned or left dense together, and where it lies in the exported files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twofour.graph.mixture import changed_places
from twofour.graph.opened import OpenedModel
from twofour.pipeline.layer_lists import glob_of
from twofour.records.export import LayerMap, LayerName
from twofour.records.pruning import PrunedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Weights that are pruned together, or not at all: users of one array, siblings."""

    name: str
    """Layer of the first; with its weight where the layer has several."""
    rows: tuple[PrunedWeight, ...]
    globs: tuple[str, ...]
    """Each matches one of the weights, and they all of them."""
    nodes: tuple[str, ...]
    """Labels of the nodes in the graph; () for layers that were not exported."""
    places: tuple[int, ...]
    """Of the constants that pruning changed, as `Mixture` counts them."""

    @property
    def pruned(self) -> bool:
        """Whether pruning everything takes any of them."""
        return any(row.pruned for row in self.rows)

    @property
    def members(self) -> tuple[str, ...]:
        """Their layers."""
        return tuple(dict.fromkeys(row.weight.layer for row in self.rows))


def find_units(
    rows: Sequence[PrunedWeight],
    layers: LayerMap,
    dense: OpenedModel,
    sparse: OpenedModel,
    *,
    siblings: bool,
) -> tuple[Unit, ...]:
    """The weights of prune.json in units, in its order.

    Both files are exports of one model, before and after. With `siblings`, matrix products of one
    tensor (q, k and v) are one unit: TensorRT fuses them, and sparse are all or none.
    """
    of_key: dict[str | None, list[LayerName]] = defaultdict(list)
    for name in layers.layers:
        of_key[name.parameter].append(name)
    nodes = [tuple(n.node for n in of_key[r.weight.weight or r.weight.layer]) for r in rows]
    joined = _Joined(len(rows))
    for key in (_by_array(rows, of_key), _by_input(nodes, dense) if siblings else {}):
        for members in key.values():
            joined.join(members)
    changed = changed_places(dense, sparse)
    names = Counter(row.weight.layer for row in rows)
    return tuple(
        _unit([rows[i] for i in members], [n for i in members for n in nodes[i]], changed, names)
        for members in joined.groups()
    )


def _unit(
    rows: Sequence[PrunedWeight],
    nodes: Iterable[str],
    changed: Mapping[str, tuple[int, ...]],
    names: Mapping[str, int],
) -> Unit:
    there = tuple(dict.fromkeys(nodes))
    return Unit(
        name=_name(rows[0], names),
        rows=tuple(rows),
        globs=tuple(dict.fromkeys(glob_of(_name(row, names)) for row in rows)),
        nodes=there,
        places=tuple(sorted({p for label in there for p in changed.get(label, ())})),
    )


def _name(row: PrunedWeight, names: Mapping[str, int]) -> str:
    """The layer, or its weight where the layer has several, or no name: a model of one layer."""
    weight = row.weight
    by_layer = names[weight.layer] == 1 and weight.layer != ""
    return weight.layer if by_layer or weight.weight is None else weight.weight


def _by_array(
    rows: Sequence[PrunedWeight], of_key: Mapping[str | None, Sequence[LayerName]]
) -> dict[object, list[int]]:
    """Rows by what they share: a stored array before or after the export."""
    found: dict[object, list[int]] = defaultdict(list)
    places = {row.weight.layer: i for i, row in enumerate(rows)}
    for i, row in enumerate(rows):
        weight = row.weight
        if weight.weight is not None:
            found["key", weight.weight].append(i)
        for name in of_key.get(weight.weight, ()):
            found["initializer", name.initializer].append(i)
        for other in weight.tied_to:
            j = places.get(other)
            if j is not None and weight.layer in rows[j].weight.tied_to:
                found["tied", min(i, j), max(i, j)] += [i, j]
    return found


def _by_input(nodes: Sequence[tuple[str, ...]], model: OpenedModel) -> dict[object, list[int]]:
    """Rows by the tensor that their products multiply with."""
    data = {
        node.label: (node.op, tuple(n for n in node.inputs if n and n not in node.constants))
        for node in model.nodes
        if node.op in ("MatMul", "Gemm")
    }
    weights = {w.node for w in model.weights().weights}
    found: dict[object, list[int]] = defaultdict(list)
    for i, labels in enumerate(nodes):
        for label in labels:
            if label in data and label in weights:
                found[data[label][1][:1]].append(i)
    return {key: members for key, members in found.items() if key}


class _Joined:
    """Numbers, those of one group under the first of them."""

    def __init__(self, count: int) -> None:
        self._first = list(range(count))

    def join(self, members: Iterable[int]) -> None:
        """All of these are one group from now on."""
        roots = {self._root(i) for i in members}
        for root in roots:
            self._first[root] = min(roots)

    def groups(self) -> list[list[int]]:
        """The groups in order of their first members."""
        found: dict[int, list[int]] = defaultdict(list)
        for i in range(len(self._first)):
            found[self._root(i)].append(i)
        return list(found.values())

    def _root(self, i: int) -> int:
        while self._first[i] != i:
            i = self._first[i]
        return i
