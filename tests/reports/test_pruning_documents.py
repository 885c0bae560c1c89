"""What pruning did to each layer and what each costs: prune's report, a run's page, sensitivity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.render_cases import every_status
from support.rendered import to_html, to_markdown, to_table
from support.report_cases import matmul, prune_result, pruned_row

from twofour.records.eligibility import ShareUnit
from twofour.records.options import BudgetOptions, LossKind
from twofour.records.run import BudgetResult, LayerCost, Measured, PrunedSet, SensitivityResult
from twofour.records.weights import HARDWARE_PATTERN, Calibration, OutputError, PrunedWeight
from twofour.reports.document import Table
from twofour.reports.pruning_document import (
    calibration_lines,
    in_order_of_worth,
    pruned_table,
    pruning_section,
    sensitivity_document,
)
from twofour.reports.terminal import draw, plain_text

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
    text = to_markdown(RESULT)
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
    page = to_html(replace(RESULT, weights=tuple(rows))).replace("<wbr>", "")
    assert all(one.weight.layer in page for one in rows)


def test_a_runs_page_shows_what_was_pruned_alone() -> None:
    left = replace(ROWS[0], pruned=False)
    result = replace(RESULT, weights=(left, *ROWS[1:]))
    section = pruning_section(result)
    assert section is not None
    (table,) = (block for block in section.blocks if isinstance(block, Table))
    assert cells(table)["layer"] == ("b", "c", "d")
    page = to_html(every_status(), pruned=result)
    assert "What pruning did" in page
    assert page.count(NOT_REACHED) == 1
    assert '<td class="figure">30 %</td>' in page


# --- sensitivity ----------------------------------------------------------------------------------


def _measured(accuracy: float, error: float) -> Measured:
    return Measured(outputs=error, metrics={"accuracy": accuracy})


def _row(layer: str, saves: float, loss: float | None, **more: Any) -> LayerCost:
    alone = None if loss is None else _measured(90 - loss, 0.01)
    return LayerCost(
        layer=layer, members=(layer,), globs=(layer,), saves=saves, alone=alone, loss=loss, **more
    )


def _set(layers: int, share: float, loss: float | None, dense: tuple[str, ...]) -> PrunedSet:
    measured = _measured(90 - (loss or 0), 0.02) if loss is not None else Measured(error="it broke")
    return PrunedSet(
        layers=layers, saves=100 * share, share=share, predicted=0.3 * layers, loss=loss,
        measured=measured, dense=dense,
    )  # fmt: skip


ALL_PRUNED = _set(3, 1.0, 4.0, ())
STUDY = SensitivityResult(
    source="model.py:make",
    pattern=HARDWARE_PATTERN,
    method="admm",
    loss=LossKind.METRIC,
    figure="accuracy",
    unit=ShareUnit.MULTIPLY_ADDS,
    dense=_measured(90.0, 0.0),
    layers=(
        _row("dear", 10.0, 3.0, pruned=False),
        _row("narrow", 0.0, None, why_dense="GROUPED_CONV: 4 groups", pruned=False),
        _row("cheap", 60.0, 0.2, pruned=True),
        _row("better", 30.0, -0.1, pruned=True),
    ),
    pareto=(_set(1, 0.6, 0.3, ("dear", "better")), ALL_PRUNED),
    budget=BudgetResult(
        asked=BudgetOptions(max_drop=0.5),
        chosen=_set(2, 0.9, 0.4, ("dear",)),
        trials=(ALL_PRUNED, _set(2, 0.9, 0.4, ("dear",))),
    ),
    notes=("a note",),
)


def _text(result: SensitivityResult) -> str:
    return plain_text(to_table(result))


def test_a_set_names_every_layer_that_stays_dense_in_few_words() -> None:
    dense = ("head", *(f"block.{number}.fc" for number in range(6)))
    text = _text(replace(STUDY, pareto=(_set(1, 0.6, 0.3, dense),)))
    assert "head, block.{0-5}.fc" in text


def test_the_answer_says_what_is_pruned_what_it_loses_and_what_was_allowed() -> None:
    text = " ".join(_text(STUDY).split())
    figures = ("2 layers: 90.0 %", "90.00 → 89.60", "allows 89.50", "left dense: dear")
    assert all(figure in text for figure in figures)
    assert "all 3 layers pruned" not in text  # the last row of the sets
    assert "narrow GROUPED_CONV: 4 groups" in text


def test_the_chosen_set_is_a_row_between_the_others_and_each_figure_says_its_change() -> None:
    sets = sensitivity_document(STUDY).tables[2]
    assert [c.head for c in sets.columns] == [
        "saves", "layers", "accuracy", "output error", "left dense", "decision",
    ]  # fmt: skip
    assert [(row[0], row[2], row[5]) for row in sets.rows] == [
        ("60.0 %", "89.70 (−0.3 points)", None),
        ("90.0 %", "89.60 (−0.4 points)", "chosen"),
        ("100.0 %", "86.00 (−4.0 points)", None),
    ]


def test_rows_stand_in_the_order_of_worth() -> None:
    assert [r.layer for r in in_order_of_worth(STUDY)] == ["better", "cheap", "dear", "narrow"]
    rows = sensitivity_document(STUDY).tables[0].rows
    assert [row[0] for row in rows] == ["better", "cheap", "dear"]


def test_what_could_not_be_measured_and_what_has_no_metric_is_told() -> None:
    broken = replace(STUDY, pareto=(_set(3, 1.0, None, ()),), budget=None)
    assert "(it broke)" in _text(broken)
    without = replace(
        STUDY, loss=LossKind.OUTPUTS, figure=None, budget=None, unit=ShareUnit.MILLISECONDS,
        dense=Measured(),
    )  # fmt: skip
    text = " ".join(_text(without).split())
    assert "output error 400 %" in text
    assert "possible" in text
