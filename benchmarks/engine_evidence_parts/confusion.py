"""Layers in, counts of forecast against listing out; what is unknown never counts as agreement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from engine_evidence_parts.layers import op_kind
from engine_evidence_parts.records import Cell, Confusion, Forecast, Layer, Listing


def confusion_of(
    layers: Sequence[Layer],
    *,
    precision: str | None = None,
    dtype: str | None = None,
    op: str | None = None,
) -> Confusion:
    """All nine cells, empty ones too; the words say of which layers."""
    counts = Counter((layer.forecast, layer.listing) for layer in layers)
    cells = tuple(
        Cell(forecast=said, listing=found, layers=counts[said, found])
        for said in Forecast
        for found in Listing
    )
    judged = [layer.agrees for layer in layers if layer.agrees is not None]
    return Confusion(
        precision=precision,
        dtype=dtype,
        op=op,
        cells=cells,
        agreeing=sum(judged),
        comparable=len(judged),
    )


def confusion_by_kind(layers: Sequence[Layer]) -> tuple[Confusion, ...]:
    """One table for each precision of a net, type of a layer and operation."""
    kinds: dict[tuple[str, str, str], list[Layer]] = defaultdict(list)
    for layer in layers:
        kinds[layer.precision or "", layer.dtype, op_kind(layer)].append(layer)
    return tuple(
        confusion_of(kinds[key], precision=key[0] or None, dtype=key[1], op=key[2])
        for key in sorted(kinds)
    )


def disagreements(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Every layer that the rules were wrong about."""
    return tuple(layer for layer in layers if layer.agrees is False)
