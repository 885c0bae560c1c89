"""What a method did to each layer, in prune's own report and on a run's page."""

from __future__ import annotations

from dataclasses import replace

from support.render_cases import every_status
from support.report_cases import matmul, prune_result, pruned_row

from twofour.records.weights import (
    Calibration,
    OutputError,
    PrunedWeight,
)
from twofour.reports import html
from twofour.reports.document import Table
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.pruning_document import (
    calibration_lines,
    prune_document,
    pruned_table,
    pruning_section,
)
from twofour.reports.terminal import draw, plain_text
from twofour.reports.text import markdown

NOT_REACHED = "no calibration input reached it"


def row(layer: str, calibration: float | None, held_out: float | None) -> PrunedWeight:
    if calibration is None:
        return pruned_row(matmul(layer, 64, 64), method="magnitude", note=NOT_REACHED)
    error = OutputError(calibration=calibration, held_out=held_out)
    return pruned_row(matmul(layer, 64, 64), method="admm", output_error=error)


ROWS = (row("a", 0.01, 0.012), row("b", 0.0002, None), row("c", None, None), row("d", 0.2, 0.3))
CALIBRATION = Calibration(
    source="texts.txt", samples=256, held_out=25, notes=("3 lines were blank",)
)
RESULT = prune_result(*ROWS, method="admm", calibration=CALIBRATION)


def cells(table: Table) -> dict[str, tuple[str | None, ...]]:
    return {column.head: column.cells for column in table.columns}


def test_a_row_says_by_which_method_and_at_which_error() -> None:
    found = cells(pruned_table(ROWS))
    assert found["method"] == ("admm", "admm", "magnitude", "admm")
    assert found["output error"] == ("1 %", "0.02 %", None, "20 %")
    assert found["held out"] == ("1.2 %", None, None, "30 %")
    assert found["notes"] == (None, None, NOT_REACHED, None)


def test_without_data_there_are_no_such_columns() -> None:
    assert "output error" not in cells(pruned_table([ROWS[2]]))
    assert calibration_lines(replace(RESULT, calibration=None)) == ()


def test_the_data_and_the_largest_error_are_said_first() -> None:
    data, note, error = calibration_lines(RESULT)
    assert "with 256 samples of" in data
    assert "25 of them held" in data
    assert note == "3 lines were blank"
    assert error.endswith("worst 30 % (d)")
    text = markdown(prune_document(RESULT))
    assert "worst 30 % (d)" in text
    assert "held out: on" in text


def test_layers_that_differ_in_one_number_share_a_row_but_not_on_the_page() -> None:
    rows = [
        replace(row(f"h.{i}.{part}", 0.01 * (i + 1), None), zeros=2048 - i)
        for i in range(24)
        for part in ("fc1", "fc2")
    ]
    note = "magnitude's mask would have lost less"
    rows[4] = replace(rows[4], note=note)
    rows[6] = replace(rows[6], method="wanda")
    table = pruned_table(rows)
    assert len(table.rows) == 48
    found = cells(table.folded())
    names = ("h.{0-1,4-23}.fc1", "h.{0-23}.fc2", "h.2.fc1", "h.3.fc1")
    assert found["layer"] == names
    folded, zeros = "1 % to 24 %", "49.4 % to 50.0 %"
    assert found["output error"][:2] == (folded, folded)
    assert found["zeros"][:3] == (zeros, zeros, "50.0 %")
    assert found["kept |w|"] == ("80.0 %",) * 4
    assert found["notes"] == (None, None, note, None)
    shown = plain_text(draw((table,)))
    assert "h.{0-23}.fc2 x24" in " ".join(shown.split())
    assert len(shown.splitlines()) < 30
    document = prune_document(replace(RESULT, weights=tuple(rows)))
    page = html.page(document).replace("<wbr>", "")
    assert all(one.weight.layer in page for one in rows)


def test_a_runs_page_shows_what_was_pruned_alone() -> None:
    left = replace(ROWS[0], pruned=False)
    result = replace(RESULT, weights=(left, *ROWS[1:]))
    section = pruning_section(result)
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    assert cells(table)["layer"] == ("b", "c", "d")
    page = html.page(eligibility_document(every_status(), pruned=result))
    assert "What pruning did" in page
    assert page.count(NOT_REACHED) == 1
    assert '<td class="figure">30 %</td>' in page
