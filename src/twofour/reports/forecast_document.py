"""A forecast as a document: the answer, the gains by GPU and batch, the layers that make them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from twofour.records.forecast import (
    LIKELY,
    WORTH,
    Basis,
    Forecast,
    ForecastCell,
    LayerForecast,
    Worth,
)
from twofour.records.options import MathPrecision
from twofour.reports.document import (
    Block,
    Column,
    Details,
    Document,
    Kind,
    Role,
    Table,
    Value,
    column,
    figures,
    fold_rows,
    lines_of,
    names,
    present,
    table,
    texts,
    verdict_column,
)
from twofour.words import count, listed, printable, share

STEPS = (WORTH, LIKELY, 1.35, 1.5)
"""Bounds of the gain from which a cell of the matrix has the next darker colour."""
_DETAILED = 24
"""Most cells whose layers are shown."""
_MAKERS = 3
_GAINS = {
    "expected": "expected",
    "products": "products",
    "model_at_most": "model",
    "engine": "engine",
}
_BASES = {Basis.BEYOND: "extrapolated beyond measured shapes"}
_LEGEND = "Each cell: the expected gain of the model, its interval, and the largest gain."


def forecast_document(forecast: Forecast) -> Document:
    """The whole forecast; a terminal gets the layers of a single cell alone."""
    cells = forecast.cells
    is_one = len(cells) == 1
    layers = _layers(cells)
    title = f"Forecast of 2:4 for {printable(forecast.name)}"
    return Document(
        name=printable(forecast.name),
        about="forecast",
        title=title,
        lead=present(
            lines_of(Role.TEXT, [f"{title}: kernels measured elsewhere, not this model"]),
            lines_of(Role.ANSWER, [cells[0].sentence]),
            None if is_one else lines_of(Role.LIST, _verdicts(cells)),
        ),
        blocks=present(
            *(layers if is_one else _comparing(cells)),
            lines_of(Role.NOTE, forecast.notes),
        ),
        appendix=() if is_one else layers,
        data=partial(_data, cells),
    )


def _comparing(cells: Sequence[ForecastCell]) -> Iterator[Block]:
    """The gains of several cells side by side."""
    for precision in dict.fromkeys(cell.precision for cell in cells):
        yield _matrix(cells, precision)


def _verdicts(cells: Sequence[ForecastCell]) -> Iterator[str]:
    """A sentence for each verdict and cause; that of the first cell is the headline."""
    # "2 of 3 (A100 float16 batch 1 and A100 float16 batch 8): Not worth it. No layer can run ..."
    alike = defaultdict[tuple[Worth, str], list[ForecastCell]](list)
    for cell in cells:
        alike[cell.verdict, cell.why].append(cell)
    for there in alike.values():
        names = listed([cell.name.replace(",", "") for cell in there])
        part = f"{len(there)} of {len(cells)} ({names})"
        if cells[0] in there:
            yield f"{part}: {there[0].verdict.in_words}"
        else:
            yield f"{part}: {there[0].verdict_in_words}. {there[0].why}"


def _layers(cells: Sequence[ForecastCell]) -> tuple[Details, ...]:
    if len(cells) > _DETAILED:
        return ()
    return tuple(_details(cell, is_open=len(cells) == 1) for cell in cells)


def _matrix(cells: Sequence[ForecastCell], precision: MathPrecision) -> Table:
    """A row for each GPU, a column for each batch."""
    there = {(c.gpu, c.batch): c for c in cells if c.precision is precision}
    gpus = list(dict.fromkeys(gpu for gpu, _ in there))
    columns = [names("GPU", gpus, str)]
    for batch in dict.fromkeys(batch for _, batch in there):
        head = "the file's sizes" if batch is None else f"batch {batch:,}"
        columns.append(_gains(head, [there[gpu, batch] for gpu in gpus]))
    return table(f"Forecast of the model's gain, {precision.value}", columns, legend=_LEGEND)


def _gains(head: str, cells: Sequence[ForecastCell]) -> Column:
    """Gains with intervals and bounds below, the larger the darker."""
    shown: list[str] = []
    slugs: list[str] = []
    for cell in cells:
        # "1.11x (1.05 to 1.30)" is set in lines: "1.11x", "1.05 to 1.30", "at most 1.35"
        gain = cell.expected.in_words.replace(" (", "\n").rstrip(")")
        most = round(cell.answer.gain, 2)
        shown.append(f"{gain}\nat most {most:.2f}")
        slugs.append(f"gain-{sum(most >= step for step in STEPS)}")
    gains = figures(head, cells, lambda cell: cell.expected.gain)
    return replace(gains, cells=tuple(shown), slugs=tuple(slugs))


# --- the layers of a cell -------------------------------------------------------------------------


def _details(cell: ForecastCell, *, is_open: bool) -> Details:
    groups = _groups(cell)
    lines = [] if is_open else [cell.sentence]
    usable_us = sum(layer.dense_us for layer in cell.layers if layer.can_run_sparse)
    part = share(usable_us, cell.dense_us + cell.rest_us)
    rest = f"at least {cell.rest_us:,.0f} us in other work"
    lines += (
        f"Forecast of the dense model: {cell.dense_us:,.0f} us in products, {rest}; at most {part} "
        f"in layers that can run sparse. The products alone gain {cell.products.in_words}",
    )
    measured = cell.engine
    if measured is not None:
        times = f"{measured.products_us:,.0f} us in {count(measured.layers, 'layer')} of the model"
        lines.append(f"Measured in --profile: {times}, {measured.rest_us:,.0f} us in the rest")
    makers = lines_of(Role.TEXT, _makers(groups))
    layers = table(f"Layers, forecast for {cell.name}", _layer_columns(groups), legend=_bases(cell))
    blocks = present(lines_of(Role.TEXT, lines), makers, layers)
    return Details(title=cell.name, blocks=blocks, is_open=is_open)


def _bases(cell: ForecastCell) -> str:
    bases = Counter(layer.basis for layer in cell.layers)
    words: list[str] = []
    for basis, number in bases.most_common():
        words.append(f"{_BASES.get(basis, basis.value)} ({count(number, 'layer')})")
    return f"Source of the kernel times: {', '.join(words)}."


_Group = tuple[str, int, LayerForecast]
"""Layers of one size and time whose names differ in a number: one name, how many, and the first."""


def _groups(cell: ForecastCell) -> list[_Group]:
    folds = fold_rows((layer.layer, _alike(layer)) for layer in cell.layers)
    return [(fold.name, len(fold.rows), cell.layers[fold.rows[0]]) for fold in folds]


def _alike(layer: LayerForecast) -> tuple[object, ...]:
    times = (layer.dense_us, layer.sparse_us)
    return layer.op, _size(layer), *times, layer.can_run_sparse, layer.reason[:20]


def _makers(groups: Sequence[_Group]) -> Iterator[str]:
    """Where most of the gain comes from."""
    saved: list[tuple[float, str]] = []
    for name, number, layer in groups:
        if layer.gains:
            saved.append((number * layer.saves_us, name))
    if saved:
        # "block.{0-2}.fc 71.2 %, head 20.1 %, proj 8.7 %"
        whole = sum(us for us, _ in saved)
        saved.sort(key=lambda one: -one[0])
        most = [f"{name} {share(us, whole)}" for us, name in saved[:_MAKERS]]
        yield f"Most of the forecast gain: {', '.join(most)}"


def _layer_columns(groups: Sequence[_Group]) -> tuple[Column, ...]:
    layers = [layer for _, _, layer in groups]
    return (
        names("layer", groups, lambda g: g[0]),
        figures("layers", groups, lambda g: g[1], "{:,.0f}".format),
        column("op", Kind.VERDICT, layers, lambda x: x.op),
        column("rows x reduction x outputs", Kind.FIGURE, layers, _size),
        figures("dense us", groups, lambda g: g[1] * g[2].dense_us, "{:,.1f}".format),
        figures("sparse us", groups, lambda g: g[1] * g[2].sparse_us, "{:,.1f}".format),
        column("gain of the kernel", Kind.FIGURE, layers, lambda x: x.in_words),
        verdict_column("runs", layers, _runs, lambda x: "can" if x.gains else ""),
        texts("because", layers, _because),
    )


def _size(layer: LayerForecast) -> str:
    size = f"{layer.rows:,} x {layer.reduction:,} x {layer.outputs:,}"
    return f"{layer.count} x {size}" if layer.count > 1 else size


def _runs(layer: LayerForecast) -> str:
    if layer.can_run_sparse is None:
        return "unknown"
    return "sparse" if layer.gains else "dense"


def _because(layer: LayerForecast) -> str:
    """Why it runs so: which kernel is faster, or the code of what rules sparse math out."""
    if not layer.can_run_sparse:
        return layer.reason.partition(":")[0] or "left dense"
    return "faster" if layer.gains else "sparse is no faster"


def _data(cells: Sequence[ForecastCell]) -> dict[str, list[Value]]:
    """A line for each cell, its figures in full."""
    columns: dict[str, list[Value]] = {
        "gpu": [cell.gpu for cell in cells],
        "precision": [cell.precision.value for cell in cells],
        "batch": [cell.batch for cell in cells],
    }
    for name, field in _GAINS.items():
        gains = [getattr(cell, field) for cell in cells]
        for end in ("gain", "low", "high"):
            columns[f"forecast_{name}_{end}"] = [getattr(gain, end, None) for gain in gains]
    return columns | {
        "layers_that_gain": [sum(x.gains for x in cell.layers) for cell in cells],
        "layers_that_lose": [sum(x.loses for x in cell.layers) for cell in cells],
        "forecast_dense_products_us": [cell.dense_us for cell in cells],
        "forecast_rest_at_least_us": [cell.rest_us for cell in cells],
        "basis": [cell.basis.value for cell in cells],
        "verdict": [cell.verdict.value for cell in cells],
    }
