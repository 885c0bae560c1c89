"""Variants against a baseline: ratio, interval and verdict, what else differs, layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import product
from math import fsum
from typing import TypeAlias

from twofour.eligibility.layer_nodes import find_nodes, index_nodes
from twofour.latency.noise import (
    Pair,
    floor_of,
    half_ratios,
    is_too_busy,
    load_on,
    noise_floors,
    paired_ratio,
    twin_of,
    widened,
)
from twofour.records import frozen
from twofour.records.export import GraphNode
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

_SPARSITY = frozenset({"weights", "model", "sparse_kernels", "launches", "enqueue_ms"})
"""Settings in which two variants may differ and still differ in sparsity only: the last two are
measured."""


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


@frozen
class Measurements:
    """What a ratio of one comparison is judged by."""

    variants: Sequence[ComparedVariant]
    baseline: str
    """Its name without a batch."""
    seed: int
    noise: Sequence[NoiseFloor]
    loads: Sequence[RoundLoad]


def ratios_and_noise(
    variants: Sequence[ComparedVariant],
    baseline: str,
    seed: int,
    loads: Sequence[RoundLoad] = (),
) -> tuple[tuple[LatencyRatio, ...], tuple[NoiseFloor, ...]]:
    """Ratios of samples taken in the same rounds; `baseline` is a name without a batch.

    Every variant with samples over the baseline of its batch, then, within every other engine and
    mode, each weights over those of the baseline, and an engine with sparse kernels over the same
    without. A ratio is held to the larger noise of the two engines it is of; where neither was
    measured twice, to the baseline's; and to what `loads` may have cost. Twins have no ratios.
    """
    noise = noise_floors(variants, baseline, seed)
    measured = Measurements(
        variants=variants, baseline=baseline, seed=seed, noise=noise, loads=loads
    )
    ratios = (ratio_of(pair, measured) for pair in _pairs(variants, baseline))
    return tuple(filter(None, ratios)), noise


def ratio_of(pair: Pair, measured: Measurements, limit: float = 1.0) -> LatencyRatio | None:
    """A variant over a baseline, with its verdict; None without samples of both.

    A ratio above `limit` is slower, one below it is faster. A difference must be in both halves of
    the rounds, with their twins in their places too, and none is claimed where the machine was too
    busy.
    """
    variant, baseline = pair
    estimate = paired_ratio(variant.samples_ms, baseline.samples_ms, seed=measured.seed)
    if estimate is None:
        return None
    load = load_on(measured.loads, *pair)
    floor = widened(floor_of(measured.noise, pair, measured.baseline) or 0.0, load)
    verdict = verdict_of(estimate.low, estimate.high, floor, limit)
    withheld = None
    if estimate.low is not None and is_too_busy(load):
        withheld = Withheld.BUSY
    elif verdict in {LatencyVerdict.FASTER, LatencyVerdict.SLOWER}:
        withheld = _contradiction(verdict, pair, measured.variants, floor, limit)
    return LatencyRatio(
        variant=variant.name,
        baseline=baseline.name,
        ratio=estimate.ratio,
        low=estimate.low,
        high=estimate.high,
        verdict=verdict if withheld is None else LatencyVerdict.UNDECIDED,
        rounds=estimate.rounds,
        batch=variant.batch,
        only_sparsity=differ_in_sparsity_only(variant.settings, baseline.settings),
        withheld=withheld,
    )


def _contradiction(
    verdict: LatencyVerdict,
    pair: Pair,
    variants: Sequence[ComparedVariant],
    floor: float,
    limit: float,
) -> Withheld | None:
    """What does not show the difference: half of the rounds, or a twin in either place."""
    variant, baseline = pair
    halves = half_ratios(variant.samples_ms, baseline.samples_ms)
    if any(verdict_of(ratio, ratio, floor, limit) is not verdict for ratio in halves):
        return Withheld.HALVES
    # the floor holds what twins differ by already
    twins = _twin_ratios(variants, pair)
    if any(verdict_of(ratio, ratio, 0.0, limit) is not verdict for ratio in twins):
        return Withheld.TWIN
    return None


def _twin_ratios(variants: Sequence[ComparedVariant], pair: Pair) -> list[float]:
    """Ratios of both halves with the twin of the baseline, then of the variant, in its place."""
    variant, baseline = pair
    ratios: list[float] = []
    twin = twin_of(variants, baseline)
    if twin is not None:
        ratios += half_ratios(variant.samples_ms, twin.samples_ms)
    twin = twin_of(variants, variant)
    if twin is not None:
        ratios += half_ratios(twin.samples_ms, baseline.samples_ms)
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


def _pairs(variants: Sequence[ComparedVariant], baseline: str) -> list[Pair]:
    """Every variant with the baseline, then those of another engine with its weights there."""
    # dense@onnxruntime:cpu is the baseline: sparse@onnxruntime:cpu and dense@torch:eager over it,
    # then sparse@torch:eager over dense@torch:eager
    own = parse_variant_name(baseline)
    named = [(parse_variant_name(v.name), v) for v in variants if v.samples_ms]
    measured = [(name, variant) for name, variant in named if not name.again]
    over_baseline = []
    within_engines = []
    for (name, variant), (base_name, base) in product(measured, measured):
        if base is variant or base.batch != variant.batch:
            continue
        if base_name.weights != own.weights:
            if base_name.weights == name.weights and _is_by_kernels(variant, base):
                within_engines.append((variant, base))
            continue
        if base_name.engine_mode == own.engine_mode:
            over_baseline.append((variant, base))
        elif base_name.engine_mode == name.engine_mode:
            within_engines.append((variant, base))
    return over_baseline + within_engines


def _is_by_kernels(variant: ComparedVariant, baseline: ComparedVariant) -> bool:
    """Whether the variant alone may use sparse kernels, and they differ in nothing else."""
    is_allowed = variant.settings is not None and variant.settings.sparse_kernels is True
    return is_allowed and differ_in_sparsity_only(variant.settings, baseline.settings)


# --- layer by layer -------------------------------------------------------------------------------


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
    last: dict[tuple[str, str], LatencyRatio] = {}
    for ratio in ratios:
        if ratio.variant in profiled and ratio.baseline in profiled and _has_contrast(ratio):
            last[without_batch(ratio.variant), without_batch(ratio.baseline)] = ratio
    all_layers = []
    for ratio in last.values():
        layers = contrast(profiled[ratio.variant], profiled[ratio.baseline], nodes)
        if any(row.ratio is not None for row in layers.rows):
            all_layers.append(layers)
    return tuple(all_layers)


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
    ours = _layers_of(variant, baseline, nodes)
    theirs = _layers_of(baseline, variant, nodes)
    rows = (_row(part, ours, theirs) for part in _common_parts((*ours, *theirs)))
    return LayerContrast(
        variant=variant.name,
        baseline=baseline.name,
        variant_ms=fsum(layer.mean_ms for layer in variant.layers),
        baseline_ms=fsum(layer.mean_ms for layer in baseline.layers),
        rows=tuple(sorted(rows, key=lambda row: -abs(row.difference_ms))),
    )


_Part: TypeAlias = frozenset[int | str]
"""A part of the model: indices of nodes, or the name of a layer whose nodes are not known."""


@frozen
class _Layer:
    """All layers of one name in one engine."""

    name: str
    ms: float
    part: _Part
    """Its nodes, as indices; its name where none is known, or the other engine has that name."""


def _layers_of(
    own: ComparedVariant, other: ComparedVariant, nodes: Sequence[GraphNode]
) -> list[_Layer]:
    times: dict[str, list[float]] = defaultdict(list)
    for layer in own.layers:
        times[layer.name].append(layer.mean_ms)
    in_other = {layer.name for layer in other.layers}
    # a region takes what no other layer of its engine names, so the engine's whole list is asked
    named = find_nodes(times, index_nodes(nodes, {}, times), whole=True)
    layers = []
    for name in named:
        part: _Part = frozenset((*name.nodes, *name.region))
        if name.name in in_other or not part:
            part = frozenset({name.name})
        layers.append(_Layer(name=name.name, ms=fsum(times[name.name]), part=part))
    return layers


def _common_parts(layers: Iterable[_Layer]) -> Iterable[_Part]:
    """The parts of the model of which both engines have whole layers, as small as can be."""
    # ours "conv1+conv2" does nodes 1 and 2, theirs are "conv1" (node 1) and "conv2" (node 2): each
    # of theirs shares a node with the part of ours, so that all three are one row
    part_of: dict[int | str, _Part] = {}
    for layer in layers:
        joined = layer.part.union(*(part_of.get(node, ()) for node in layer.part))
        part_of |= dict.fromkeys(joined, joined)
    return dict.fromkeys(part_of.values())


def _row(part: _Part, ours: Iterable[_Layer], theirs: Iterable[_Layer]) -> LayerContrastRow:
    variant = [layer for layer in ours if layer.part <= part]
    baseline = [layer for layer in theirs if layer.part <= part]
    variant_ms = fsum(layer.ms for layer in variant)
    baseline_ms = fsum(layer.ms for layer in baseline)
    return LayerContrastRow(
        layer=" + ".join(layer.name for layer in variant),
        baseline_layer=" + ".join(layer.name for layer in baseline),
        variant_ms=variant_ms if variant else None,
        baseline_ms=baseline_ms if baseline else None,
        ratio=variant_ms / baseline_ms if variant and baseline_ms else None,
        difference_ms=variant_ms - baseline_ms,
    )
