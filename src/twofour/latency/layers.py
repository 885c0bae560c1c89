"""Times of single layers, dense against sparse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import TypeAlias

from twofour.eligibility.names import NO_NAMES, split_name
from twofour.eligibility.nodes import MYELIN_SUFFIX, mangle
from twofour.eligibility.resolve import COPY, index_nodes, resolve
from twofour.latency.variants import without_batch
from twofour.records.build import LayerTime
from twofour.records.export import GraphNode
from twofour.records.latency import (
    ComparedVariant,
    LatencyRatio,
    LatencyVerdict,
    LayerContrast,
    LayerContrastRow,
)

PartsOf: TypeAlias = Callable[[Sequence[str]], Mapping[str, frozenset[str]]]
"""Names of all layers of one engine -> the parts of each; parts are compared between engines."""

OwnersOf: TypeAlias = Callable[[Sequence[str]], Mapping[str, str]]
"""Names of the layers of one engine, in the order they ran -> the node that an added one is for."""

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
    for part in split_name(name, NO_NAMES):
        if part.is_region:
            yield from map(mangle, (*(part.first or ()), *part.last))
        elif MYELIN_SUFFIX.search(part.text):
            yield from map(mangle, MYELIN_SUFFIX.sub("", part.text).split("+"))
        else:
            yield mangle(part.text)


_LEAST_DIFFERENCE = 0.02
"""Part of the baseline's sum below which the difference of the sums is noise, as are shares of it.
Two profiles of one plan on a busy machine differ by much more, so that the runs must differ too."""
_DIFFERENT = frozenset({LatencyVerdict.FASTER, LatencyVerdict.SLOWER})


def contrasts(
    variants: Sequence[ComparedVariant],
    ratios: Sequence[LatencyRatio],
    parts_of: PartsOf = parts_by_name,
    owners_of: OwnersOf = no_owners,
) -> tuple[LayerContrast, ...]:
    """Of every ratio whose two sides have a profile and at least one layer in common.

    Shares are given only where the variants themselves differ, and in the direction of the
    profiles' sums: what is left explains nothing. A sweep is profiled once, at its last batch: only
    that one has a contrast.
    """
    profiled = {v.name: v for v in variants if v.layers}
    pairs = {
        (without_batch(r.variant), without_batch(r.baseline)): r
        for r in ratios
        if r.variant in profiled and r.baseline in profiled
    }
    found = (
        _explaining(contrast(profiled[r.variant], profiled[r.baseline], parts_of, owners_of), r)
        for r in pairs.values()
    )
    return tuple(c for c in found if any(row.ratio is not None for row in c.rows))


def _explaining(found: LayerContrast, ratio: LatencyRatio) -> LayerContrast:
    """Without shares where there is no difference end to end that they could be shares of."""
    same_direction = (found.variant_ms > found.baseline_ms) == (ratio.ratio > 1)
    if ratio.verdict in _DIFFERENT and same_direction:
        return found
    return replace(found, rows=tuple(replace(row, share=None) for row in found.rows))


def contrast(
    variant: ComparedVariant,
    baseline: ComparedVariant,
    parts_of: PartsOf = parts_by_name,
    owners_of: OwnersOf = no_owners,
) -> LayerContrast:
    """Layers of one name on both sides are one row; then all that share a part, on either side.

    So one fused layer and the three that do its work elsewhere are one row. A layer without a
    partner is a row of its own. The rows add up to the sums of the profiles.
    """
    ours, theirs = _by_name(variant.layers), _by_name(baseline.layers)
    total = fsum(layer.mean_ms for layer in variant.layers)
    other = fsum(layer.mean_ms for layer in baseline.layers)
    whole = total - other if abs(total - other) >= _LEAST_DIFFERENCE * other else None
    sides = (variant.layers, baseline.layers)
    owners = {k: v for side in sides for k, v in owners_of([layer.name for layer in side]).items()}
    rows = (
        replace(_row(group, ours, theirs, whole), owner=_owner(group, owners))
        for group in _groups(ours, theirs, parts_of)
    )
    return LayerContrast(
        variant=variant.name,
        baseline=baseline.name,
        variant_ms=total,
        baseline_ms=other,
        rows=tuple(sorted(rows, key=lambda row: -abs(row.difference_ms))),
    )


@dataclass(slots=True)
class _Group:
    """Names of layers that do one part of the model; dicts keep the order of the engines."""

    variant: list[str] = field(default_factory=list)
    baseline: list[str] = field(default_factory=list)


def _owner(group: _Group, owners: Mapping[str, str]) -> str | None:
    found = {owners.get(name) for name in (*group.variant, *group.baseline)}
    return found.pop() if len(found) == 1 else None


def _by_name(layers: Iterable[LayerTime]) -> Mapping[str, float]:
    """Milliseconds; layers that share a name count as one."""
    times: dict[str, list[float]] = defaultdict(list)
    for layer in layers:
        times[layer.name].append(layer.mean_ms)
    return {name: fsum(each) for name, each in times.items()}


def _groups(
    ours: Mapping[str, float], theirs: Mapping[str, float], parts_of: PartsOf
) -> Iterator[_Group]:
    both = [name for name in ours if name in theirs]
    yield from (_Group([name], [name]) for name in both)
    left = [name for name in ours if name not in theirs]
    right = [name for name in theirs if name not in ours]
    # a region takes what no other layer of its engine names, so the engine's whole list is asked
    our_parts, their_parts = parts_of(list(ours)), parts_of(list(theirs))
    sets = _DisjointSets()
    for side, names, parts in ((0, left, our_parts), (1, right, their_parts)):
        for name in names:
            for part in parts[name]:
                sets.join((side, name), (2, part))
    groups: dict[_Key, _Group] = defaultdict(_Group)
    for name in left:
        groups[sets.root((0, name))].variant.append(name)
    for name in right:
        groups[sets.root((1, name))].baseline.append(name)
    yield from groups.values()


_Key = tuple[int, str]
"""Side (0: variant, 1: baseline, 2: a part) and name."""


class _DisjointSets:
    """Which keys were joined, directly or over others; near linear."""

    def __init__(self) -> None:
        self._parent: dict[_Key, _Key] = {}

    def root(self, key: _Key) -> _Key:
        """One key for all that are joined with this one; halves the way for the next who asks."""
        self._parent.setdefault(key, key)
        while self._parent[key] != key:
            self._parent[key] = self._parent[self._parent[key]]
            key = self._parent[key]
        return key

    def join(self, one: _Key, other: _Key) -> None:
        """From now on both have one root."""
        self._parent[self.root(one)] = self.root(other)


def _row(
    group: _Group, ours: Mapping[str, float], theirs: Mapping[str, float], whole: float | None
) -> LayerContrastRow:
    variant = fsum(ours[name] for name in group.variant) if group.variant else None
    baseline = fsum(theirs[name] for name in group.baseline) if group.baseline else None
    difference = (variant or 0.0) - (baseline or 0.0)
    return LayerContrastRow(
        layer=" + ".join(group.variant),
        baseline_layer=" + ".join(group.baseline),
        variant_ms=variant,
        baseline_ms=baseline,
        ratio=None if variant is None or not baseline else variant / baseline,
        difference_ms=difference,
        share=difference / whole if whole else None,
    )
