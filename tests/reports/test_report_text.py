"""The terminal tables, against golden files and with hostile names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from support.comparison_cases import agreement
from support.render_cases import predicted
from support.rendered import to_table
from support.report_cases import (
    check,
    conv,
    matmul,
    prune_result,
    pruned_row,
    reason,
    report,
    validation,
)

from twofour.records.eligibility import Verdict
from twofour.records.export import Accuracy, Metric
from twofour.records.weights import ReasonCode, Validation
from twofour.reports.document import Fold, unfolded
from twofour.reports.eligibility_document import eligibility_document
from twofour.reports.eligibility_words import drift_lines
from twofour.reports.layers_table import layers_table, pattern_word
from twofour.reports.pruning_document import prune_document, validation_document
from twofour.reports.terminal import plain_text, render

GOLDEN = Path(__file__).parent / "golden"
LONG = "blocks." + "very_long_module_name." * 13 + "fc1"
HOSTILE = ("[red]x", "[/red]", "\x1b[31mred\x1b[0m", "two\nlines", LONG, ":smile:", "")


def _checked(validation: Validation, width: int = 120) -> str:
    return plain_text(render(validation_document(validation)), width=width)


def test_the_eligibility_table_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / "eligibility.txt", plain_text(to_table(predicted())))


@pytest.mark.parametrize("width", [100, 120, 200])
def test_no_line_is_wider_than_the_console_and_no_name_is_cut(width: int) -> None:
    made = report(*(matmul(name, 512, 512, weight=f"w{i}") for i, name in enumerate(HOSTILE)))
    text = plain_text(to_table(made), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert LONG in "".join(line.split("  ")[0].strip() for line in text.splitlines())
    assert "[red]x" in text
    assert "\x1b" not in text
    assert r"\x1b[31mred" in text
    assert r"two\nlines" in text


def test_the_validation_table_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    stem, mix, wrong = conv("stem", 3, 64), conv("mix", 512, 512), matmul("[b]fc", 512, 512)
    made = validation(
        replace(check(stem, violations=500), required=False),
        check(mix),
        check(wrong, violations=1200, holds_along=1),
    )
    runtime = matmul("runtime", 0, 0, weight=None, reasons=(reason(ReasonCode.NOT_CONSTANT),))
    golden(GOLDEN / "validation.txt", _checked(replace(made, skipped=(runtime,))))


def test_a_validation_says_how_many_weights_had_to_hold() -> None:
    row = replace(check(conv(LONG, 512, 512)), required=False)
    text = _checked(validation(row))
    none = text.splitlines()[-1]
    assert none.startswith("no weight was to")
    assert "1 weight not to" in none
    assert LONG in "".join(line.split("  ")[0].strip() for line in text.splitlines())
    text = _checked(validation(replace(row, required=True)))
    assert "in 1 of 1" in text.splitlines()[-1]
    two = validation(replace(row, file="a"), replace(row, file="b", required=True, violations=1))
    of_a, of_b = _checked(two).splitlines()[-2:]
    assert of_a == f"a: {none}"
    assert of_b.startswith("b: ")
    assert "in 0 of 1" in of_b


def test_the_prune_table_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    mix, grouped = conv("mix", 512, 512), conv("grouped", 128, 128, groups=4)
    reasons = (reason(ReasonCode.GROUPED_CONV, "4 groups of 32 input channels"),)
    made = prune_result(
        pruned_row(mix, zeros=1_179_648, kept_magnitude=0.7731),
        pruned_row(grouped, pruned=False, zeros=3, kept_magnitude=None, reasons=reasons),
        source="digits.py:make",
    )
    golden(GOLDEN / "prune.txt", plain_text(render(prune_document(made))))


def test_the_drift_lines_give_cosine_error_and_metrics(
    golden: Callable[[Path, str], None],
) -> None:
    drift = replace(
        agreement(1.25, 0.98765432), shape=(8, 10), relative_error=0.1564, dense_largest=3.5
    )
    metric = Metric(name="accuracy", dense=0.9867, sparse=0.9844)
    drift = replace(drift, row_cosine_mean=0.98, row_cosine_min=0.91)
    made = Accuracy(drift=(drift,), examples=8, metrics=(metric,))
    golden(GOLDEN / "drift.txt", plain_text(Group(*drift_lines(made))))


def test_what_cannot_break_the_pattern_does_not_count_as_holding_it() -> None:
    dw, image = conv("dw", 96, 96, groups=96), conv("image", 1, 64)
    rgb, mix = conv("rgb", 3, 64), conv("mix", 512, 512)
    checks = validation(*map(check, (dw, image, mix)), check(rgb, violations=5))
    table = _checked(checks).splitlines()
    said = "2:4 holds in 1 of 2 weights to be pruned; 2 weights with so few inputs that it always "
    assert table[-1] == f"{said}holds"
    assert ["always" in line for line in table if line.startswith(("dw", "image", "mix"))] == [
        *(True, True, False)
    ]
    (dense,) = report((mix, replace(check(mix, violations=5), required=False))).verdicts
    assert pattern_word(dense) == "dense"
    words = {v.layer: pattern_word(v) for v in report(dw, image, mix).verdicts}
    assert words == {"dw": "always holds", "image": "always holds", "mix": "2:4"}


@pytest.mark.parametrize("names", [("h.00.fc", "h.01.fc"), ("9" * 5000, "8" * 5000)])
def test_numbers_that_a_range_would_change_keep_rows_of_their_own(names: tuple[str, ...]) -> None:
    rows = _folds(report(*(matmul(name, 512, 512) for name in names)).verdicts)
    assert tuple(row.name for row in rows) == names


def test_layers_of_another_size_or_verdict_keep_rows_of_their_own() -> None:
    odd = conv("block.1.conv", 512, 512)
    made = report(
        conv("block.0.conv", 512, 512),
        (odd, check(odd, violations=3)),
        conv("block.2.conv", 256, 512),
        conv("block.3.conv", 512, 512),
    )
    assert [r.name for r in _folds(made.verdicts)] == [
        "block.{0,3}.conv",
        "block.1.conv",
        "block.2.conv",
    ]


def test_a_terminal_leaves_out_the_last_columns_and_breaks_no_code() -> None:
    made = predicted()
    for width, heads in ((200, {"layer", "verdict", "reasons", "pattern", "type"}), (60, set())):
        first = plain_text(to_table(made), width=width).splitlines()[0]
        assert heads | {"layer", "verdict"} <= set(first.split())
    narrow = plain_text(to_table(made), width=60)
    assert "type" not in narrow.splitlines()[0]
    assert "PATTERN_BROKEN" in narrow


def test_all_gives_a_row_to_each_layer() -> None:
    document = eligibility_document(report(*(matmul(f"h.{i}.fc", 768, 768) for i in range(12))))
    (folded,) = (t.folded() for t in document.tables if t.style == "layers")
    (each,) = (t.folded() for t in unfolded(document).tables if t.style == "layers")
    assert (len(folded.rows), len(each.rows)) == (1, 12)


def _folds(verdicts: Sequence[Verdict]) -> tuple[Fold, ...]:
    folds = layers_table(replace(report(), verdicts=tuple(verdicts))).folds
    assert folds is not None
    return folds()


@given(st.lists(st.text(alphabet="ab.{}-,0129\u0661", max_size=12), max_size=12))
def test_every_layer_is_in_exactly_one_row(names: list[str]) -> None:
    verdicts = report(*(matmul(name, 512, 512) for name in names)).verdicts
    rows = _folds(verdicts)
    assert sorted(at for row in rows for at in row.rows) == list(range(len(names)))
    for row in rows:
        if len(row.rows) == 1:
            assert row.name == (names[row.rows[0]] or "(no name)")
