"""How sizes, builders and times stand in the cells of the tables."""

from __future__ import annotations

from engine_evidence_parts.records import Layer, RatioRange
from twofour.reports.text import code, escaped
from twofour.words import name_cell, times

LAYER_TITLES = ("net", "node", "op", "C x K kernel", "dtype")


def figure(value: float | None) -> str:
    """Four significant digits; "?" for what is not known."""
    return "?" if value is None else f"{value:.4g}"


def kernel_cell(kernel: tuple[int, ...]) -> str:
    """3x3, or "-" for a matrix product."""
    return times(kernel) if kernel else "-"


def shape_text(layer: Layer) -> str:
    """C, K, kernel and groups: "64 x 128 3x3 g4"."""
    kernel = f" {times(layer.kernel)}" if layer.kernel else ""
    groups = f" g{layer.groups}" if layer.groups > 1 else ""
    return f"{layer.in_channels or '?'} x {layer.out_channels or '?'}{kernel}{groups}"


def builder_cell(gpu: str | None, tensorrt: str | None) -> str:
    """GPU and version of TensorRT, each in words where it is not known."""
    version = "version not known" if tensorrt is None else tensorrt
    return f"{gpu or 'GPU not known'}, TensorRT {version}"


def node_cell(layer: Layer) -> str:
    """The node's name, for a table of Markdown."""
    return code(name_cell(layer.node))


def layer_cells(layer: Layer) -> tuple[str, str, str, str, str]:
    """What LAYER_TITLES stand above."""
    return (
        escaped(layer.folder),
        node_cell(layer),
        escaped(layer.op),
        shape_text(layer),
        escaped(layer.dtype),
    )


def choice_cell(layer: Layer) -> str:
    """What is added to "listed"."""
    return {True: ", chosen", False: ", runs dense", None: ""}[layer.chosen]


def ratio_cell(ratios: RatioRange | None) -> str:
    """Range of sparse / dense, and of how many layers; "-" for none."""
    if ratios is None:
        return "-"
    low, high = f"{ratios.low:.3f}", f"{ratios.high:.3f}"
    return f"{low if low == high else f'{low} to {high}'} ({ratios.layers:,})"
