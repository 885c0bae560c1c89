"""Sensitivity in words: the answer, rows in the order of worth, and the plot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twofour.records.eligibility import ShareUnit
from twofour.records.options import BudgetOptions, LossKind
from twofour.records.run import BudgetResult, LayerCost, Measured, PrunedSet, SensitivityResult
from twofour.records.weights import HARDWARE_PATTERN
from twofour.reports import renderer
from twofour.reports.pruning_document import in_order_of_worth, sensitivity_document
from twofour.reports.terminal import plain_text


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


EVERYTHING = _set(3, 1.0, 4.0, ())
RESULT = SensitivityResult(
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
    pareto=(_set(1, 0.6, 0.3, ("dear", "better")), EVERYTHING),
    budget=BudgetResult(
        asked=BudgetOptions(max_drop=0.5),
        chosen=_set(2, 0.9, 0.4, ("dear",)),
        trials=(EVERYTHING, _set(2, 0.9, 0.4, ("dear",))),
    ),
    notes=("a note",),
)


def _text(result: SensitivityResult) -> str:
    return plain_text(renderer("table")(sensitivity_document(result)))


def test_a_set_names_every_layer_that_stays_dense_in_few_words() -> None:
    dense = ("head", *(f"block.{number}.fc" for number in range(6)))
    text = _text(replace(RESULT, pareto=(_set(1, 0.6, 0.3, dense),)))
    assert "head, block.{0-5}.fc" in text


def test_the_answer_says_what_is_pruned_what_it_loses_and_what_was_allowed() -> None:
    text = " ".join(_text(RESULT).split())
    figures = ("2 layers: 90.0 %", "90.00 → 89.60", "allows 89.50", "left dense: dear")
    assert all(figure in text for figure in figures)
    assert "all 3 layers pruned" not in text  # the last row of the sets
    assert "narrow GROUPED_CONV: 4 groups" in text


def test_the_chosen_set_is_a_row_between_the_others_and_each_figure_says_its_change() -> None:
    sets = sensitivity_document(RESULT).tables[2]
    assert [c.head for c in sets.columns] == [
        "saves", "layers", "accuracy", "output error", "left dense", "decision",
    ]  # fmt: skip
    assert [(row[0], row[2], row[5]) for row in sets.rows] == [
        ("60.0 %", "89.70 (−0.3 points)", None),
        ("90.0 %", "89.60 (−0.4 points)", "chosen"),
        ("100.0 %", "86.00 (−4.0 points)", None),
    ]


def test_rows_stand_in_the_order_of_worth() -> None:
    assert [r.layer for r in in_order_of_worth(RESULT)] == ["better", "cheap", "dear", "narrow"]
    assert [r[0] for r in sensitivity_document(RESULT).tables[0].rows] == [
        "better",
        "cheap",
        "dear",
    ]


def test_what_could_not_be_measured_and_what_has_no_metric_is_told() -> None:
    broken = replace(RESULT, pareto=(_set(3, 1.0, None, ()),), budget=None)
    assert "(it broke)" in _text(broken)
    without = replace(
        RESULT, loss=LossKind.OUTPUTS, figure=None, budget=None, unit=ShareUnit.MILLISECONDS,
        dense=Measured(),
    )  # fmt: skip
    text = " ".join(_text(without).split())
    assert "output error 400 %" in text
    assert "possible" in text
