"""Times of single layers, dense against sparse."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

from twofour.eligibility.resolve import index_nodes, resolve
from twofour.records.export import GraphNode, LayerTime
from twofour.records.latency import (
    ComparedVariant,
    LatencyRatio,
    LayerContrast,
    LayerContrastRow,
    without_batch,
)


def _parts_of(names: Sequence[str], nodes: Sequence[GraphNode]) -> Mapping[str, Collection[str]]:
    """Names of all layers of one engine -> the nodes of each; its own name where there are none."""
    if not nodes:
        return {name: frozenset({name}) for name in names}
    return {
        found.name: frozenset(str(at) for at in (*found.nodes, *found.region)) or {found.name}
        for found in resolve(names, index_nodes(nodes, None, names), whole=True)
    }


def contrasts(
    variants: Sequence[ComparedVariant],
    ratios: Sequence[LatencyRatio],
    nodes: Sequence[GraphNode] = (),
) -> tuple[LayerContrast, ...]:
    """Of every ratio whose two sides have a profile and at least one layer in common.

    A sweep is profiled once, at its last batch: only that one has a contrast.
    """
    profiled = {v.name: v for v in variants if v.layers}
    pairs = {
        (without_batch(r.variant), without_batch(r.baseline)): r
        for r in ratios
        if r.variant in profiled and r.baseline in profiled
    }
    found = (contrast(profiled[r.variant], profiled[r.baseline], nodes) for r in pairs.values())
    return tuple(c for c in found if any(row.ratio is not None for row in c.rows))


def contrast(
    variant: ComparedVariant, baseline: ComparedVariant, nodes: Sequence[GraphNode] = ()
) -> LayerContrast:
    """Layers of one name on both sides are one row; then all that share a node, on either side.

    `nodes` are the model's; without them names alone decide. So one fused layer and the three that
    do its work elsewhere are one row. A layer without a partner is a row of its own. The rows add
    up to the sums of the profiles.
    """
    ours, theirs = _by_name(variant.layers), _by_name(baseline.layers)
    total = fsum(layer.mean_ms for layer in variant.layers)
    other = fsum(layer.mean_ms for layer in baseline.layers)
    rows = (_row(group, ours, theirs) for group in _groups(ours, theirs, nodes))
    return LayerContrast(
        variant=variant.name,
        baseline=baseline.name,
        variant_ms=total,
        baseline_ms=other,
        rows=tuple(sorted(rows, key=lambda row: -abs(row.difference_ms))),
    )


@dataclass(slots=True, eq=False)
class _Group:
    """Names of layers that do one part of the model, and the nodes of that part."""

    variant: list[str] = field(default_factory=list)
    baseline: list[str] = field(default_factory=list)
    parts: set[str] = field(default_factory=set)


def _by_name(layers: Iterable[LayerTime]) -> Mapping[str, float]:
    """Milliseconds; layers that share a name count as one."""
    times: dict[str, list[float]] = defaultdict(list)
    for layer in layers:
        times[layer.name].append(layer.mean_ms)
    return {name: fsum(each) for name, each in times.items()}


def _groups(
    ours: Mapping[str, float], theirs: Mapping[str, float], nodes: Sequence[GraphNode]
) -> Iterator[_Group]:
    both = [name for name in ours if name in theirs]
    yield from (_Group([name], [name]) for name in both)
    left = [name for name in ours if name not in theirs]
    right = [name for name in theirs if name not in ours]
    # a region takes what no other layer of its engine names, so the engine's whole list is asked
    our_parts, their_parts = _parts_of(list(ours), nodes), _parts_of(list(theirs), nodes)
    owners: dict[str, _Group] = {}
    for names, parts in ((left, our_parts), (right, their_parts)):
        for name in names:
            shared = dict.fromkeys(owners[part] for part in parts[name] if part in owners)
            group = _Group(parts=set(parts[name]))
            for other in shared:
                group.variant += other.variant
                group.baseline += other.baseline
                group.parts |= other.parts
            (group.variant if names is left else group.baseline).append(name)
            owners.update(dict.fromkeys(group.parts, group))
    order = {name: at for at, name in enumerate((*left, *right))}
    for group in dict.fromkeys(owners.values()):
        group.variant.sort(key=order.__getitem__)
        group.baseline.sort(key=order.__getitem__)
        yield group


def _row(group: _Group, ours: Mapping[str, float], theirs: Mapping[str, float]) -> LayerContrastRow:
    variant = fsum(ours[name] for name in group.variant) if group.variant else None
    baseline = fsum(theirs[name] for name in group.baseline) if group.baseline else None
    return LayerContrastRow(
        layer=" + ".join(group.variant),
        baseline_layer=" + ".join(group.baseline),
        variant_ms=variant,
        baseline_ms=baseline,
        ratio=None if variant is None or not baseline else variant / baseline,
        difference_ms=(variant or 0.0) - (baseline or 0.0),
    )
