"""The findings as Markdown, in the order of a reader's questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from engine_evidence_parts.cells import LAYER_TITLES, builder_cell, choice_cell, layer_cells
from engine_evidence_parts.kind_tables import kind_sections
from engine_evidence_parts.records import Confusion, Findings, Forecast, Layer, Listing
from twofour.reports.text import code, escaped, markdown_table
from twofour.words import count, share


def markdown(findings: Findings) -> str:
    """Header, confusion, disagreements, thresholds and their exceptions, what was left out."""
    sections = (
        _header(findings),
        *_confusion(findings),
        *_disagreements(findings.disagreements, findings.confusion),
        *kind_sections(findings.kinds),
        *_left_out(findings),
    )
    return "\n\n".join(sections) + "\n"


def nothing_measured(findings: Findings) -> str | None:
    """What to say where no build tells of any layer; None where one does."""
    if findings.measured:
        return None
    known = count(len(findings.layers), "layer")
    return f"nothing was measured: of {known}, none is known to be listed or not ({_why(findings)})"


def _header(findings: Findings) -> str:
    builders = Counter((layer.gpu, layer.tensorrt) for layer in _one_of_each_net(findings.layers))
    where = "; ".join(
        f"{escaped(builder_cell(gpu, version))} ({count(nets, 'net')})"
        for (gpu, version), nets in sorted(builders.items(), key=lambda item: str(item[0]))
    )
    size = f"{count(len(findings.nets), 'net')}, {count(len(findings.layers), 'layer')}"
    return (
        "## What engine builds say about the rules\n\n"
        f"{size} with a weight, of which {findings.measured:,} measured. {where or 'No layers'}. "
        "A layer counts once for each build of its net."
    )


def _one_of_each_net(layers: Iterable[Layer]) -> Iterable[Layer]:
    return {layer.folder: layer for layer in layers}.values()


def _confusion(findings: Findings) -> Iterator[str]:
    of = findings.confusion
    rows = [
        (said.value, *(_number(of.layers(said, found)) for found in Listing)) for said in Forecast
    ]
    yield "### Predicted against measured eligibility"
    yield markdown_table(("predicted / measured", *(x.value for x in Listing)), rows)
    yield _agreement(findings)
    titles = ("precision", "dtype", "op", *_PAIRS, "unknown", "agree")
    yield markdown_table(titles, (_kind_row(kind) for kind in findings.by_kind))


_PAIRS = {
    f"{said.value}, {found.value}": (said, found)
    for said in Forecast
    for found in (Listing.LISTED, Listing.NOT_LISTED)
}
"""Title of a column, and what it counts."""


def _kind_row(kind: Confusion) -> tuple[str, ...]:
    unknown = sum(kind.layers(said, Listing.UNKNOWN) for said in Forecast)
    return (
        escaped(kind.precision or "?"),
        escaped(kind.dtype or "?"),
        escaped(kind.op or "?"),
        *(_number(kind.layers(said, found)) for said, found in _PAIRS.values()),
        _number(unknown),
        agreement_words(kind),
    )


def agreement_words(of: Confusion) -> str:
    """The share with what it is a share of; never one of nothing."""
    if not of.comparable:
        return "not known"
    return f"{of.agreeing:,} of {of.comparable:,} ({share(of.agreeing, of.comparable)})"


def _agreement(findings: Findings) -> str:
    nothing = nothing_measured(findings)
    if nothing is not None:
        return f"**{escaped(nothing[0].upper() + nothing[1:])}.**"
    words = agreement_words(findings.confusion)
    why = _why(findings)
    unknown = f" Unknown: {why}." if why else ""
    ruled_out = _ruled_out(findings.layers)
    foretold = f" Rightly not eligible, by rule: {ruled_out}." if ruled_out else ""
    of = "of the layers with a forecast and a known listing"
    return f"Agreement: {words}, {of}.{foretold}{unknown}"


def _ruled_out(layers: Iterable[Layer]) -> str:
    """Main rules of the layers that were rightly said not to be eligible."""
    right = (x for x in layers if x.agrees and x.forecast is Forecast.NOT_ELIGIBLE)
    return _tally(code for layer in right for code in layer.codes[:1])


def _why(findings: Findings) -> str:
    return _tally(layer.why_unknown for layer in findings.layers if layer.why_unknown)


def _tally(codes: Iterable[str]) -> str:
    """Each code with how often it is there, the most frequent first."""
    counted = sorted(Counter(codes).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{code} {number:,}" for code, number in counted)


def _disagreements(layers: Sequence[Layer], of: Confusion) -> Iterator[str]:
    yield f"### Disagreements: {len(layers):,} of {count(of.comparable, 'comparable layer')}"
    if layers:
        titles = ("predicted", "measured", "evidence", "what the rules said")
        yield markdown_table((*LAYER_TITLES, *titles), map(_disagreement, layers))


def _disagreement(layer: Layer) -> tuple[str, ...]:
    return (
        *layer_cells(layer),
        layer.forecast.value,
        f"{layer.listing.value}{choice_cell(layer)}",
        "?" if layer.source is None else code(layer.source),
        "" if layer.rule is None else escaped(layer.rule),
    )


def _left_out(findings: Findings) -> Iterator[str]:
    lines = [f"left out: {lost.folder}: {lost.why}" for lost in findings.left_out]
    strange = findings.unmatched_engine_layers
    if strange:
        lines.append(f"{count(strange, 'name')} in engines or logs lead to no layer of their net")
    lines += findings.notes
    if lines:
        yield "### Notes"
        yield "\n".join(f"- {escaped(line)}" for line in lines)


def _number(layers: int) -> str:
    return f"{layers:,}"
