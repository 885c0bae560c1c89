"""The times of the variants as a small table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import quantiles

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twofour.records import EngineName, VariantLatency
from twofour.reports.words import printable

BASELINE = "dense"


def latency_table(variants: Sequence[VariantLatency], *, engine: EngineName) -> RenderableType:
    """Median, p90, throughput and time over dense (below 1: faster); a note on what to expect."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for title in ("variant", "median ms", "p90 ms", "runs per s", f"time / {BASELINE}"):
        table.add_column(title, overflow="fold", justify="left" if title == "variant" else "right")
    baseline = next((v for v in variants if v.name == BASELINE), None)
    for variant in variants:
        table.add_row(Text(printable(variant.name), overflow="fold"), *_cells(variant, baseline))
    notes = [f"{v.name} failed: {v.error}" for v in variants if v.error is not None]
    if engine is EngineName.ONNXRUNTIME:
        notes.append("ONNX Runtime runs dense kernels for both: zeros bring no speed here")
    return Group(table, *(Text(printable(note)) for note in notes))


def _cells(variant: VariantLatency, baseline: VariantLatency | None) -> tuple[Text, ...]:
    figures = (variant.median_ms, variant.p90_ms, variant.throughput)
    return (*(Text("-" if f is None else f"{f:.4g}") for f in figures), _ratio(variant, baseline))


def _ratio(variant: VariantLatency, baseline: VariantLatency | None) -> Text:
    if baseline is None or variant is baseline or not variant.median_ms or not baseline.median_ms:
        return Text("-")
    ratio = f"{variant.median_ms / baseline.median_ms:.3f}"
    noisy = within_noise(variant.samples_ms, baseline.samples_ms)
    return Text(f"{ratio} (no difference)" if noisy else ratio)


def within_noise(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether the middle halves of two sets of samples overlap; fewer than four decide nothing."""
    if min(len(a), len(b)) < 4:
        return True
    low_a, _, high_a = quantiles(a, n=4)
    low_b, _, high_b = quantiles(b, n=4)
    return low_a <= high_b and low_b <= high_a
