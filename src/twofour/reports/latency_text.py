"""The times of the variants as a small table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twofour.records.build import VariantLatency
from twofour.records.options import EngineName
from twofour.reports.words import printable

BASELINE = "dense"
NOT_JUDGED = (
    "not judged: timed one after the other; twofour compare times them in rounds, with the noise"
)


def latency_table(variants: Sequence[VariantLatency], *, engine: EngineName) -> RenderableType:
    """Median, p90, throughput and time over dense; notes on what to expect.

    The variants were timed one after the other, each once: that is no evidence of a difference
    (decision 0004), so the ratio is shown and never judged.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for title in ("variant", "median ms", "p90 ms", "runs per s", f"time / {BASELINE}"):
        table.add_column(title, overflow="fold", justify="left" if title == "variant" else "right")
    baseline = next((v for v in variants if v.name == BASELINE), None)
    for variant in variants:
        table.add_row(Text(printable(variant.name), overflow="fold"), *_cells(variant, baseline))
    notes = [f"{v.name} failed: {v.error}" for v in variants if v.error is not None]
    if sum(v.median_ms is not None for v in variants) > 1:
        notes.append(NOT_JUDGED)
    if engine is EngineName.ONNXRUNTIME:
        notes.append("ONNX Runtime runs dense kernels for both: zeros bring no speed here")
    return Group(table, *(Text(printable(note)) for note in notes))


def _cells(variant: VariantLatency, baseline: VariantLatency | None) -> tuple[Text, ...]:
    figures = (variant.median_ms, variant.p90_ms, variant.throughput)
    return (*(Text("-" if f is None else f"{f:.4g}") for f in figures), _ratio(variant, baseline))


def _ratio(variant: VariantLatency, baseline: VariantLatency | None) -> Text:
    if baseline is None or variant is baseline or not variant.median_ms or not baseline.median_ms:
        return Text("-")
    return Text(f"{variant.median_ms / baseline.median_ms:.3f} (not judged)")
