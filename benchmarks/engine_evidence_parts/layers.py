"""One report in, its layers out: what each was foretold to be, and what the builder made of it."""

from __future__ import annotations

from math import isfinite

from engine_evidence_parts.records import Forecast, Layer, Listing, Net
from twofour.eligibility.predict import contradicted
from twofour.eligibility.rules import narrow_widths
from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.weights import ReasonCode
from twofour.reports.layers_table import tactic_times

_FORECASTS = {
    VerdictName.ELIGIBLE: Forecast.ELIGIBLE,
    VerdictName.CHOSEN: Forecast.ELIGIBLE,
    VerdictName.NOT_ELIGIBLE: Forecast.NOT_ELIGIBLE,
}
_LEAVE_OPEN = (
    *(ReasonCode.SPARSITY_OFF, ReasonCode.GPU_HAS_NO_SPARSE, ReasonCode.IN_PLUGIN),
    *(ReasonCode.FOLDED, ReasonCode.SPARSITY_FORCED, ReasonCode.LOG_SILENT),
)
"""Why a build says nothing about whether the builder would list a layer."""
_PROOFS = {
    Listing.LISTED: (ReasonCode.QUALIFIES, ReasonCode.LOG_CONTRADICTS, ReasonCode.DENSE_FASTER),
    Listing.NOT_LISTED: (ReasonCode.NOT_LISTED,),
    Listing.UNKNOWN: _LEAVE_OPEN,
}
"""Reasons whose source is the evidence, the best first."""


def layers_of(net: Net) -> tuple[Layer, ...]:
    """One record for each verdict of the net's report."""
    is_evidence = net.report.not_evidence is None
    return tuple(_layer(net, v, is_evidence=is_evidence) for v in net.report.verdicts)


def listing_of(verdict: Verdict) -> Listing:
    """Not listed is what a whole list or layer information leaves out, and nothing else."""
    if verdict.evidence is not Evidence.MEASURED:
        return Listing.UNKNOWN
    if verdict.verdict in (VerdictName.CHOSEN, VerdictName.ELIGIBLE):
        return Listing.LISTED
    codes = {reason.code for reason in verdict.reasons}
    if verdict.verdict is VerdictName.NOT_ELIGIBLE and ReasonCode.NOT_LISTED in codes:
        return Listing.NOT_LISTED
    return Listing.UNKNOWN


def is_small(layer: Layer) -> bool | None:
    """The rule of thumb in use (twofour.eligibility.rules.small_layer); None without sizes."""
    if layer.in_channels is None or layer.out_channels is None:
        return None
    return bool(narrow_widths(layer.in_channels, layer.out_channels, layer.kernel))


def op_kind(layer: Layer) -> str:
    """The operation, with grouped convolutions apart."""
    return layer.op if layer.groups == 1 else f"{layer.op} grouped"


def _layer(net: Net, verdict: Verdict, *, is_evidence: bool) -> Layer:
    listing = listing_of(verdict) if is_evidence else Listing.UNKNOWN
    both = tactic_times(verdict)
    return Layer(
        folder=net.folder,
        net=net.net,
        precision=net.precision,
        batch=net.batch,
        gpu=net.gpu,
        tensorrt=net.tensorrt,
        input_shapes=net.input_shapes,
        node=verdict.node or verdict.layer,
        op=verdict.op,
        in_channels=verdict.in_channels or None,
        out_channels=verdict.out_channels or None,
        kernel=verdict.kernel,
        groups=verdict.groups,
        dtype=verdict.dtype,
        forecast=_FORECASTS.get(verdict.predicted, Forecast.SILENT),
        listing=listing,
        why_unknown=_why_unknown(verdict) if listing is Listing.UNKNOWN else None,
        chosen=_chosen(verdict) if listing is Listing.LISTED else None,
        best_dense_ms=_finite(verdict.dense_ms),
        best_sparse_ms=_finite(verdict.sparse_ms),
        sparse_over_dense=None if both is None else both[0] / both[1],
        codes=tuple(dict.fromkeys(r.code.value for r in verdict.reasons)),
        source=_within(net.folder, _source(verdict, listing)),
        rule=_rule(verdict),
    )


def _chosen(verdict: Verdict) -> bool | None:
    if verdict.verdict is VerdictName.CHOSEN:
        return True
    silent = any(r.code is ReasonCode.LOG_SILENT for r in verdict.reasons)
    return None if silent else False


def _why_unknown(verdict: Verdict) -> str:
    codes = {reason.code for reason in verdict.reasons}
    return next((code.value for code in _LEAVE_OPEN if code in codes), "NO_EVIDENCE")


def _source(verdict: Verdict, listing: Listing) -> str | None:
    """Of the reason that proves the listing; its sentence where it has no source."""
    order = _PROOFS[listing]
    proofs = [r for code in order for r in verdict.reasons if r.code is code]
    source = next((r.source for r in proofs if r.source is not None), None)
    return source or next((r.message for r in proofs), None)


def _within(folder: str, source: str | None) -> str | None:
    """Files as they are named in the net's own folder, wherever that lay before."""
    if source is None:
        return None
    _, found, inside = source.partition(f"{folder}/")
    return inside if found else source


def _rule(verdict: Verdict) -> str | None:
    """The sentence in which the report says that rules and evidence differ."""
    said = verdict.refuted
    return None if said is None else contradicted(verdict.predicted, said).message


def _finite(ms: float | None) -> float | None:
    return ms if ms is not None and isfinite(ms) else None
