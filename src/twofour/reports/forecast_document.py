"""A forecast as a document: the answer, the gains by GPU and batch, the layers that make them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from twofour.records.forecast import WORTH, Basis, Forecast, ForecastCell, LayerForecast
from twofour.records.options import MathPrecision
from twofour.reports.document import (
    Column,
    Details,
    Document,
    Kind,
    Lines,
    Role,
    Table,
    Value,
    column,
    figures,
    fold_rows,
    present,
    table,
    verdict_column,
)
from twofour.words import count, printable, share

STEPS = (WORTH, 1.15, 1.3, 1.5)
"""Gains from which a cell of the matrix has the next darker colour."""
_LISTED, _DETAILED = 6, 24
"""Most cells whose sentences are listed, and whose layers are shown; the JSON has all."""
_MAKERS = 3
_GAINS = {"products": "products", "model_at_most": "model", "engine": "engine"}
_BASES = {Basis.BEYOND: "extrapolated beyond measured shapes"}
_LEGEND = "Each cell: the largest gain to expect of the model, and its interval."


def forecast_document(forecast: Forecast) -> Document:
    """The whole forecast; a terminal gets the layers of a single cell alone."""
    cells = forecast.cells
    sentences = tuple(printable(cell.sentence) for cell in cells)
    is_one = len(cells) == 1
    most = max(cells, key=lambda cell: cell.answer.gain)
    best = "" if is_one else f"The best of {len(cells)}. "
    layers = tuple(_details(c, is_open=is_one) for c in cells) if len(cells) <= _DETAILED else ()
    words = sentences if 1 < len(cells) <= _LISTED else ()
    precisions = dict.fromkeys(cell.precision for cell in cells)
    blocks = (
        *(() if is_one else (_matrix(forecast, precision) for precision in precisions)),
        Lines(role=Role.LIST, lines=words),
        *(layers if is_one else ()),
        Lines(role=Role.NOTE, lines=tuple(map(printable, forecast.notes))),
    )
    title = f"Forecast of 2:4 for {printable(forecast.name)}"
    return Document(
        name=printable(forecast.name),
        about="forecast",
        title=title,
        lead=(
            Lines(role=Role.TEXT, lines=(f"{title}: kernels measured elsewhere, not this model",)),
            Lines(role=Role.ANSWER, lines=(f"{best}{printable(most.sentence)}",)),
        ),
        blocks=present(*blocks),
        appendix=() if is_one else layers,
        data=partial(_data, cells),
    )


def _matrix(forecast: Forecast, precision: MathPrecision) -> Table:
    """A row for each GPU, a column for each batch."""
    there = {(c.gpu, c.batch): c for c in forecast.cells if c.precision is precision}
    gpus = list(dict.fromkeys(gpu for gpu, _ in there))
    columns = [column("GPU", Kind.NAME, gpus, printable)]
    for batch in dict.fromkeys(batch for _, batch in there):
        found = [there[gpu, batch] for gpu in gpus]
        head = "the file's sizes" if batch is None else f"batch {batch:,}"
        one = figures(head, found, lambda c: c.answer.gain)
        cells = tuple(c.answer.in_words.replace(" (", "\n").rstrip(")") for c in found)
        slugs = tuple(f"gain-{sum(c.answer.gain >= step for step in STEPS)}" for c in found)
        columns.append(replace(one, cells=cells, slugs=slugs))
    return table(f"Forecast of the model's gain, {precision.value}", columns, legend=_LEGEND)


def _details(cell: ForecastCell, *, is_open: bool) -> Details:
    groups = _groups(cell)
    bases = Counter(_BASES.get(layer.basis, layer.basis.value) for layer in cell.layers)
    legend = ", ".join(f"{basis} ({count(n, 'layer')})" for basis, n in bases.most_common())
    title = f"Layers, forecast for {cell.name}"
    shown = table(title, _layer_columns(groups), legend=f"Source of the kernel times: {legend}.")
    makers = Lines(role=Role.TEXT, lines=_makers(groups))
    rest = f"{cell.dense_us:,.0f} us in products, at least {cell.rest_us:,.0f} us in other work"
    said = [] if is_open else [printable(cell.sentence)]
    said.append(f"Forecast of the dense model: {rest}")
    if (measured := cell.engine) is not None:
        times = f"{measured.products_us:,.0f} us in {count(measured.layers, 'layer')} of the model"
        said.append(f"Measured in --profile: {times}, {measured.rest_us:,.0f} us in the rest")
    lines = Lines(role=Role.TEXT, lines=tuple(said))
    return Details(title=cell.name, blocks=present(lines, makers, shown), is_open=is_open)


_Group = tuple[str, int, LayerForecast]
"""Layers of one size and time whose names differ in a number: one name, how many, and the first."""


def _groups(cell: ForecastCell) -> list[_Group]:
    rows = cell.layers
    alike = fold_rows(
        (x.layer, (x.op, _size(x), x.dense_us, x.sparse_us, x.can_run_sparse, x.reason[:20]))
        for x in rows
    )
    return [(fold.name, len(fold.rows), rows[fold.rows[0]]) for fold in alike]


def _makers(groups: Sequence[_Group]) -> tuple[str, ...]:
    """Where most of the gain comes from."""
    saved = [(number * layer.saves_us, name) for name, number, layer in groups if layer.gains]
    whole = sum(us for us, _ in saved)
    parts = [f"{name} {share(us, whole)}" for us, name in sorted(saved, key=lambda one: -one[0])]
    return (f"Most of the forecast gain: {', '.join(parts[:_MAKERS])}",) if parts else ()


def _layer_columns(groups: Sequence[_Group]) -> list[Column]:
    return [
        column("layer", Kind.NAME, groups, lambda g: g[0]),
        figures("layers", groups, lambda g: g[1], "{:,.0f}".format),
        column("op", Kind.VERDICT, groups, lambda g: g[2].op),
        column("rows x reduction x outputs", Kind.FIGURE, groups, lambda g: _size(g[2])),
        figures("dense us", groups, lambda g: g[1] * g[2].dense_us, "{:,.1f}".format),
        figures("sparse us", groups, lambda g: g[1] * g[2].sparse_us, "{:,.1f}".format),
        column("gain of the kernel", Kind.FIGURE, groups, lambda g: g[2].in_words),
        verdict_column(
            "runs",
            [layer for *_, layer in groups],
            lambda x: "unknown" if x.can_run_sparse is None else "sparse" if x.gains else "dense",
            lambda x: "can" if x.gains else "",
        ),
        column("because", Kind.TEXT, groups, lambda g: _because(g[2])),
    ]


def _size(layer: LayerForecast) -> str:
    times = f"{layer.count} x " if layer.count > 1 else ""
    return f"{times}{layer.rows:,} x {layer.reduction:,} x {layer.outputs:,}"


def _because(layer: LayerForecast) -> str:
    """Why it runs so: which kernel is faster, or the code of what rules sparse math out."""
    if not layer.can_run_sparse:
        return layer.reason.partition(":")[0] or "left dense"
    return "faster" if layer.gains else "sparse is no faster"


def _data(cells: Sequence[ForecastCell]) -> dict[str, list[Value]]:
    """A line for each cell, its figures in full."""
    gains: dict[str, list[Value]] = {
        f"forecast_{name}_{end}": [getattr(getattr(cell, field), end, None) for cell in cells]
        for name, field in _GAINS.items()
        for end in ("gain", "low", "high")
    }
    return {
        "gpu": [cell.gpu for cell in cells],
        "precision": [cell.precision.value for cell in cells],
        "batch": [cell.batch for cell in cells],
        **gains,
        "layers_that_gain": [sum(x.gains for x in cell.layers) for cell in cells],
        "layers_that_lose": [sum(x.loses for x in cell.layers) for cell in cells],
        "forecast_dense_products_us": [cell.dense_us for cell in cells],
        "forecast_rest_at_least_us": [cell.rest_us for cell in cells],
        "basis": [cell.basis.value for cell in cells],
    }
