"""A forecast in its formats: golden text, the heat map, and a line for each cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.forecast_cases import LAYER

from twofour.forecasting.expected import expected_gain, verdict_of
from twofour.forecasting.model_forecast import total_gain
from twofour.records.forecast import (
    Basis,
    Forecast,
    ForecastCell,
    LayerForecast,
)
from twofour.records.options import MathPrecision
from twofour.reports import html, terminal, text
from twofour.reports.document import Lines, Role
from twofour.reports.forecast_document import forecast_document

GOLDEN = Path(__file__).parent / "golden"


def layer(name: str, gain: float, *, reason: str = "") -> LayerForecast:
    return replace(
        LAYER,
        layer=name,
        rows=1024,
        outputs=3072,
        reduction=768,
        sparse_us=100.0 / gain,
        gain=gain,
        low=0.9 * gain,
        high=1.1 * gain,
        basis=Basis.BETWEEN,
        reason=reason,
        can_run_sparse=not reason,
    )


def cell(gpu: str, batch: int, gain: float) -> ForecastCell:
    layers = (
        *(layer(f"block.{i}.fc", gain) for i in range(3)),
        layer("proj", 0.9),
        layer("head", 1.5, reason="SHARED_WEIGHT: its array is also the table of embedding ids"),
    )
    model = total_gain(layers, 50.0)
    return ForecastCell(
        gpu=gpu,
        precision=MathPrecision.FLOAT16,
        batch=batch,
        products=total_gain(layers, 0.0),
        model=model,
        engine=None,
        expected=expected_gain(layers, 50.0),
        verdict=verdict_of(model),
        rest_us=50.0,
        basis=Basis.BETWEEN,
        layers=layers,
        sentence=f"Forecast for {gpu}, float16, batch {batch}: at most {model.in_words}",
        why=f"A cause of {verdict_of(model).value}",
        command="twofour prune-export-build net.onnx",
    )


def forecast(*cells: ForecastCell) -> Forecast:
    return Forecast(
        name="net",
        cells=cells,
        notes=("every figure is a forecast",),
    )


MATRIX = forecast(*(cell(g, b, s) for g, x in (("A", 1.0), ("B\x1b", 1.5)) for b, s in
                    ((1, x), (8, x + 0.5))))  # fmt: skip


@pytest.mark.parametrize("shown", ["forecast_cell.txt", "forecast_matrix.txt", "forecast_cell.md"])
def test_a_forecast_reads_as_expected(shown: str, golden: Callable[[Path, str], None]) -> None:
    """One cell with its layers, several as a matrix."""
    one = forecast(cell("A100", 8, 1.6))
    document = forecast_document(one if "cell" in shown else MATRIX)
    made = text.markdown(document)
    if shown.endswith("txt"):
        made = terminal.plain_text(terminal.render(document))
    golden(GOLDEN / shown, made)


def test_layers_of_one_size_that_take_other_times_are_not_in_one_row() -> None:
    """As in ResNet-50, where a convolution of stride 2 reads fewer values twice than the others."""
    one = cell("A100", 8, 1.6)
    strided = replace(one.layers[0], dense_us=90.0, sparse_us=95.0, gain=90 / 95)
    unknown = replace(one.layers[0], layer="up", can_run_sparse=None, reason="UNSUPPORTED_OP: ?")
    made = text.markdown(
        forecast_document(forecast(replace(one, layers=(strided, *one.layers[1:3], unknown))))
    )
    rows = [line.split(" | ") for line in made.splitlines() if line.startswith("| `")]
    assert [(row[0], row[4], row[7]) for row in rows] == [
        ("| `block.0.fc`", "90.0", "dense"),
        ("| `block.{1-2}.fc`", "200.0", "sparse"),
        ("| `up`", "100.0", "unknown"),
    ]


def test_a_short_name_leaves_the_room_that_words_need() -> None:
    """At 96 columns MatMul was broken in two beside a name of fewer than 16 letters."""
    one = cell("A100", 8, 1.6)
    grouped = replace(one.layers[0], layer="up/a", count=12, rows=64, reduction=12288)
    document = forecast_document(forecast(replace(one, layers=(grouped,))))
    made = terminal.plain_text(terminal.render(document), width=96)
    assert "MatMul" in made
    assert "sparse\n" in made


def test_a_page_colours_a_cell_by_its_bound_with_the_numbers_in_it() -> None:
    page = html.page(forecast_document(MATRIX))
    shades = [part.split('"', 1)[0] for part in page.split('<td class="figure ')[1:]]
    bounds = [c.model.gain for c in MATRIX.cells]
    assert shades == [f"gain-{sum(b >= s for s in (1.05, 1.2, 1.35, 1.5))}" for b in bounds]
    assert shades[0] == "gain-0"
    for one in MATRIX.cells:
        gain = one.expected
        most = f"at most {one.model.gain:.2f}"
        assert f'">{gain.gain:.2f}x<br>{gain.low:.2f} to {gain.high:.2f}<br>{most}<' in page
    assert page.count("<details>") == len(MATRIX.cells)


def test_several_cells_are_headed_by_the_first_and_cells_of_one_cause_share_a_sentence() -> None:
    many = forecast(*(cell("A", batch, gain) for batch, gain in ((1, 1.0), (2, 1.0), (8, 1.25))))
    document = forecast_document(many)
    lead = {lines.role: lines.lines for lines in document.lead if isinstance(lines, Lines)}
    assert lead[Role.ANSWER] == (many.cells[0].sentence,)
    assert many.cells[2].command in many.cells[2].verdict_in_words
    assert lead[Role.LIST] == (
        "2 of 3 (A float16 batch 1 and A float16 batch 2): Not worth it",
        f"1 of 3 (A float16 batch 8): {many.cells[2].verdict_in_words}. A cause of try-first",
    )


def test_every_figure_stands_beside_the_word_forecast() -> None:
    for line in text.csv(forecast_document(MATRIX)).splitlines()[0].split(","):
        is_figure = line.endswith(("gain", "low", "high", "us")) and not line.startswith("layers")
        assert line.startswith("forecast_") == is_figure
    for table in forecast_document(MATRIX).tables:
        assert "forecast" in table.title.lower()
