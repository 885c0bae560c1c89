"""Variants against a baseline: ratio, interval and verdict, what else differs, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from math import fsum

from twofour.eligibility.layer_nodes import find_nodes, index_nodes
from twofour.latency.noise import (
    floor_at,
    half_ratios,
    is_too_busy,
    load_on,
    noise_floors,
    own_floor,
    paired_ratio,
    twin_of,
    widened,
)
from twofour.records.export import GraphNode, LayerTime
from twofour.records.latency import (
    ComparedVariant,
    LatencyRatio,
    LatencyVerdict,
    LayerContrast,
    LayerContrastRow,
    NoiseFloor,
    RoundLoad,
    VariantSettings,
    Withheld,
    engine_mode_of,
    parse_variant_name,
    without_batch,
)

_SPARSITY = frozenset({"weights", "model", "sparse_kernels"})
"""Settings in which two variants may differ and still differ in sparsity only."""


def differ_in_sparsity_only(
    variant: VariantSettings | None, baseline: VariantSettings | None
) -> bool:
    """Whether nothing differs but weights, model and sparse kernels; False if one is unknown.

    A mode that only names which kernels are allowed (tensorrt:gpu, tensorrt:gpu-sparsity-off) is
    the same mode: the kernels differ then, and both engines have them.
    """
    if variant is None or baseline is None:
        return False
    kernels = {variant.sparse_kernels, baseline.sparse_kernels}
    same_mode = {"mode"} if kernels == {True, False} else set()
    names = {setting.name for setting in fields(VariantSettings)} - _SPARSITY - same_mode
    return all(getattr(variant, name) == getattr(baseline, name) for name in names)


def ratios_and_noise(
    variants: Sequence[ComparedVariant],
    baseline: str,
    seed: int,
    loads: Sequence[RoundLoad] = (),
) -> tuple[tuple[LatencyRatio, ...], tuple[NoiseFloor, ...]]:
    """Ratios of samples taken in the same rounds; `baseline` is a name without a batch.

    Every variant with samples over the baseline of its batch, then, within every other engine and
    mode, each weights over those of the baseline. A ratio is held to the larger noise of the two
    engines it is of; where neither was measured twice, to the baseline's; and to what `loads` may
    have cost. Twins have no ratios.
    """
    noise = noise_floors(variants, baseline, seed)

    def judged(variant: ComparedVariant, base: ComparedVariant) -> LatencyRatio | None:
        own = own_floor(noise, variant.name, base.name, variant.batch)
        floor = own if own is not None else floor_at(noise, baseline, variant.batch) or 0.0
        load = load_on(loads, variant, base)
        return ratio_of((variant, base), among=variants, seed=seed, floor=floor, load=load)

    found = (judged(v, base) for v, base in _pairs(variants, baseline))
    return tuple(ratio for ratio in found if ratio is not None), noise


def ratio_of(
    pair: tuple[ComparedVariant, ComparedVariant],
    *,
    seed: int,
    floor: float,
    load: RoundLoad | None = None,
    among: Sequence[ComparedVariant] = (),
    limit: float = 1.0,
) -> LatencyRatio | None:
    """A variant over a baseline, with its verdict at a noise floor; None without samples of both.

    A ratio above `limit` is slower, one below it is faster. A difference must be in both halves of
    the rounds, with their twins `among` the variants in their places too, and none is claimed where
    `load` kept the machine too busy.
    """
    variant, baseline = pair
    floor = widened(floor, load)
    found = paired_ratio(variant.samples_ms, baseline.samples_ms, seed=seed)
    if found is None:
        return None
    verdict = verdict_of(found.low, found.high, floor, limit)
    halves = half_ratios(variant.samples_ms, baseline.samples_ms)
    twins = _twin_ratios(among, variant, baseline)
    withheld = None
    if verdict in {LatencyVerdict.FASTER, LatencyVerdict.SLOWER}:
        if any(verdict_of(r, r, floor, limit) is not verdict for r in halves):
            withheld = Withheld.HALVES
        # the floor holds what twins differ by already
        elif any(verdict_of(r, r, 0.0, limit) is not verdict for r in twins):
            withheld = Withheld.TWIN
    if found.low is not None and is_too_busy(load):
        withheld = Withheld.BUSY
    return LatencyRatio(
        variant=variant.name,
        baseline=baseline.name,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        verdict=verdict if withheld is None else LatencyVerdict.UNDECIDED,
        rounds=found.rounds,
        batch=variant.batch,
        only_sparsity=differ_in_sparsity_only(variant.settings, baseline.settings),
        withheld=withheld,
    )


def _twin_ratios(
    variants: Sequence[ComparedVariant], variant: ComparedVariant, baseline: ComparedVariant
) -> list[float]:
    """Ratios of both halves with the twin of the baseline, then of the variant, in its place."""
    ratios: list[float] = []
    swapped = (variant, twin_of(variants, baseline)), (twin_of(variants, variant), baseline)
    for one, other in swapped:
        if one is not None and other is not None:
            ratios += half_ratios(one.samples_ms, other.samples_ms)
    return ratios


def verdict_of(
    low: float | None, high: float | None, floor: float, limit: float = 1.0
) -> LatencyVerdict:
    """No difference where the interval reaches into limit/(1 + floor) to limit*(1 + floor)."""
    if low is None or high is None:
        return LatencyVerdict.UNDECIDED
    if high < limit / (1 + floor):
        return LatencyVerdict.FASTER
    if low > limit * (1 + floor):
        return LatencyVerdict.SLOWER
    return LatencyVerdict.NO_DIFFERENCE


def _pairs(
    variants: Sequence[ComparedVariant], baseline: str
) -> list[tuple[ComparedVariant, ComparedVariant]]:
    """Every variant with the baseline, then those of another engine with its weights there."""
    own = parse_variant_name(baseline)
    named = [(parse_variant_name(v.name), v) for v in variants if v.samples_ms]
    measured = [(name, variant) for name, variant in named if not name.again]
    over_baseline, within_engines = [], []
    for (name, variant), (base_name, base) in product(measured, measured):
        if base is variant or base.batch != variant.batch or base_name.weights != own.weights:
            continue
        if base_name.engine_mode == own.engine_mode:
            over_baseline.append((variant, base))
        elif base_name.engine_mode == name.engine_mode:
            within_engines.append((variant, base))
    return over_baseline + within_engines


# --- layer by layer -------------------------------------------------------------------------------


def _parts_of(names: Sequence[str], nodes: Sequence[GraphNode]) -> Mapping[str, Collection[str]]:
    """Names of all layers of one engine -> the nodes of each; its own name where there are none."""
    if not nodes:
        return {name: frozenset({name}) for name in names}
    return {
        found.name: frozenset(str(at) for at in (*found.nodes, *found.region)) or {found.name}
        for found in find_nodes(names, index_nodes(nodes, None, names), whole=True)
    }


def contrasts(
    variants: Sequence[ComparedVariant],
    ratios: Sequence[LatencyRatio],
    nodes: Sequence[GraphNode] = (),
) -> tuple[LayerContrast, ...]:
    """The layers of every ratio that says something, and has profiles with a layer in common.

    Layers have the same names in one engine and mode, and with and without sparse kernels. A sweep
    is profiled once, at its last batch: only that one has a contrast.
    """
    profiled = {v.name: v for v in variants if v.layers}
    pairs = {
        (without_batch(r.variant), without_batch(r.baseline)): r
        for r in ratios
        if r.variant in profiled and r.baseline in profiled and _has_contrast(r)
    }
    found = (contrast(profiled[r.variant], profiled[r.baseline], nodes) for r in pairs.values())
    return tuple(c for c in found if any(row.ratio is not None for row in c.rows))


def _has_contrast(ratio: LatencyRatio) -> bool:
    """Nothing is claimed of layers where nothing is of the whole, as on a busy machine."""
    if ratio.verdict is LatencyVerdict.UNDECIDED:
        return False
    return ratio.only_sparsity or engine_mode_of(ratio.variant) == engine_mode_of(ratio.baseline)


def contrast(
    variant: ComparedVariant, baseline: ComparedVariant, nodes: Sequence[GraphNode] = ()
) -> LayerContrast:
    """Layers of one name on both sides are one row; then all that share a node, on either side.

    `nodes` are the model's; without them names alone decide. So one fused layer and the three that
    do its work elsewhere are one row. A layer without a partner is a row of its own. The rows add
    up to the sums of the profiles.
    """
    ours, theirs = _by_name(variant.layers), _by_name(baseline.layers)
    rows = (_row(group, ours, theirs) for group in _groups(ours, theirs, nodes))
    return LayerContrast(
        variant=variant.name,
        baseline=baseline.name,
        variant_ms=fsum(layer.mean_ms for layer in variant.layers),
        baseline_ms=fsum(layer.mean_ms for layer in baseline.layers),
        rows=tuple(sorted(rows, key=lambda row: -abs(row.difference_ms))),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Names of layers that do one part of the model, and the nodes of that part."""

    variant: frozenset[str]
    baseline: frozenset[str]
    parts: frozenset[str]

    def __or__(self, other: _Group) -> _Group:
        return _Group(
            self.variant | other.variant, self.baseline | other.baseline, self.parts | other.parts
        )


def _by_name(layers: Iterable[LayerTime]) -> Mapping[str, float]:
    """Milliseconds; layers that share a name count as one."""
    times: dict[str, list[float]] = defaultdict(list)
    for layer in layers:
        times[layer.name].append(layer.mean_ms)
    return {name: fsum(each) for name, each in times.items()}


def _groups(
    ours: Mapping[str, float], theirs: Mapping[str, float], nodes: Sequence[GraphNode]
) -> list[_Group]:
    # a region takes what no other layer of its engine names, so the engine's whole list is asked
    our_parts, their_parts = _parts_of(list(ours), nodes), _parts_of(list(theirs), nodes)
    none = frozenset[str]()
    layers = [
        _Group(frozenset({name}), none, frozenset(our_parts[name]))
        for name in ours
        if name not in theirs
    ]
    layers += [
        _Group(none, frozenset({name}), frozenset(their_parts[name]))
        for name in theirs
        if name not in ours
    ]
    groups: list[_Group] = []
    # ours "conv1+conv2" does nodes 1 and 2, theirs are "conv1" (node 1) and "conv2" (node 2): each
    # of theirs shares a node with the group of ours, so that all three are one row
    for layer in layers:
        joined = layer
        for group in [group for group in groups if group.parts & layer.parts]:
            groups.remove(group)
            joined |= group
        groups.append(joined)
    both = [frozenset({name}) for name in ours if name in theirs]
    return [*(_Group(name, name, none) for name in both), *groups]


def _row(group: _Group, ours: Mapping[str, float], theirs: Mapping[str, float]) -> LayerContrastRow:
    variant = {name: ms for name, ms in ours.items() if name in group.variant}
    baseline = {name: ms for name, ms in theirs.items() if name in group.baseline}
    variant_ms, baseline_ms = fsum(variant.values()), fsum(baseline.values())
    return LayerContrastRow(
        layer=" + ".join(variant),
        baseline_layer=" + ".join(baseline),
        variant_ms=variant_ms if variant else None,
        baseline_ms=baseline_ms if baseline else None,
        ratio=variant_ms / baseline_ms if variant and baseline_ms else None,
        difference_ms=variant_ms - baseline_ms,
    )
