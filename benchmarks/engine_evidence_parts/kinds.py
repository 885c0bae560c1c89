"""Listed layers in, one finding for each kind of them out: a fitted rule, counts, ratios of times.

A layer is left out of the fit where nothing says whether it was chosen, where tactics were skipped
for memory (then its size is not why it runs dense), and where C or K is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from engine_evidence_parts.layers import is_small, op_kind
from engine_evidence_parts.records import Kind, KindFinding, Layer, Listing, RatioRange
from engine_evidence_parts.thresholds import Outcome, fit, foretells
from twofour.records.weights import ReasonCode

_SKIPPED = ReasonCode.TACTIC_SKIPPED.value
_NO_TACTIC = ReasonCode.NO_SPARSE_TACTIC.value


def listed(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Layers that the builder found eligible."""
    return tuple(layer for layer in layers if layer.listing is Listing.LISTED)


def findings_by_kind(layers: Iterable[Layer]) -> tuple[KindFinding, ...]:
    """One for each operation, kernel, type, batch and builder, in this order."""
    kinds: dict[Kind, list[Layer]] = defaultdict(list)
    for layer in listed(layers):
        kinds[_kind(layer)].append(layer)
    return tuple(_finding(kind, kinds[kind]) for kind in sorted(kinds, key=_order))


def outcome_of(layer: Layer) -> Outcome | None:
    """What the layer says about sizes; None where it says nothing."""
    if layer.chosen is None or _is_skipped(layer):
        return None
    if layer.in_channels is None or layer.out_channels is None:
        return None
    return Outcome(
        in_channels=layer.in_channels, out_channels=layer.out_channels, chosen=layer.chosen
    )


def _finding(kind: Kind, layers: Sequence[Layer]) -> KindFinding:
    telling = [(layer, o) for layer in layers if (o := outcome_of(layer)) is not None]
    fitted = fit([outcome for _, outcome in telling])
    told = [layer for layer, _ in telling]
    return KindFinding(
        kind=kind,
        listed=len(layers),
        chosen=sum(layer.chosen is True for layer in layers),
        not_known=sum(layer.chosen is None for layer in layers),
        skipped=sum(map(_is_skipped, layers)),
        no_size=sum(is_small(layer) is None for layer in layers),
        no_sparse_tactic=sum(_NO_TACTIC in layer.codes for layer in told),
        fit=fitted,
        in_use_right=sum(is_small(layer) is not layer.chosen for layer in told),
        ratios_chosen=_range(layer for layer in layers if layer.chosen),
        ratios_dense=_range(layer for layer in layers if layer.chosen is False),
        exceptions=tuple(
            layer for layer, o in telling if foretells(fitted, o) not in (None, o.chosen)
        ),
    )


def _is_skipped(layer: Layer) -> bool:
    return layer.chosen is False and _SKIPPED in layer.codes


def _range(layers: Iterable[Layer]) -> RatioRange | None:
    ratios = [r for layer in layers if (r := layer.sparse_over_dense) is not None]
    return RatioRange(low=min(ratios), high=max(ratios), layers=len(ratios)) if ratios else None


def _kind(layer: Layer) -> Kind:
    return Kind(
        op=op_kind(layer),
        kernel=layer.kernel,
        dtype=layer.dtype,
        batch=layer.batch,
        gpu=layer.gpu,
        tensorrt=layer.tensorrt,
    )


def _order(kind: Kind) -> tuple[str, tuple[int, ...], str, int, str, str]:
    """A batch that is not known comes first."""
    batch = -1 if kind.batch is None else kind.batch
    return kind.op, kind.kernel, kind.dtype, batch, kind.gpu or "", kind.tensorrt or ""
