"""Repeated layers share a row; no layer is lost or shown twice."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.report_cases import check, conv, matmul, report

from twofour.records.eligibility import Verdict
from twofour.reports.document import Fold
from twofour.reports.eligibility_document import layers_table


def test_layers_that_differ_in_one_number_share_a_row() -> None:
    names = [f"encoder.{i}.{part}" for i in range(12) for part in ("fc1", "fc2")]
    rows = _folds(report(*(matmul(name, 768, 768) for name in names)).verdicts)
    assert [(r.name, len(r.rows)) for r in rows] == [
        ("encoder.{0-11}.fc1", 12),
        ("encoder.{0-11}.fc2", 12),
    ]


def test_gaps_in_the_numbers_are_shown() -> None:
    layers = [matmul(f"h.{i}.fc", 768, 768) for i in (0, 1, 2, 5, 7, 8)]
    (row,) = _folds(report(*layers).verdicts)
    assert row.name == "h.{0-2,5,7-8}.fc"


def test_numbers_with_leading_zeros_keep_them() -> None:
    layers = [matmul(f"h.{i}.fc", 768, 768) for i in ("00", "01")]
    (row,) = _folds(report(*layers).verdicts)
    assert row.name == "h.{00,01}.fc"


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


def test_a_row_says_whether_the_figures_are_those_of_all_its_layers() -> None:
    layers = [conv(f"block.{i}.conv", 512, 512) for i in range(2)]
    made = report(*((w, check(w, violations=i + 1)) for i, w in enumerate(layers)))
    (why,) = _column(made.verdicts, "why")
    assert (why or "").endswith(" (figures of the first)")
    (why,) = _column(report(*layers).verdicts, "why")
    assert not (why or "").endswith(" (figures of the first)")


def _folds(verdicts: Sequence[Verdict]) -> tuple[Fold, ...]:
    folds = layers_table(verdicts).folds
    assert folds is not None
    return folds()


def _column(verdicts: Sequence[Verdict], key: str) -> tuple[str | None, ...]:
    """Cells of a column, rows that are alike as one."""
    return next(c.cells for c in layers_table(verdicts).folded().columns if c.key == key)


@given(st.lists(st.text(alphabet="ab.{}-,0129\u0661", max_size=12), max_size=12))
def test_every_layer_is_in_exactly_one_row(names: list[str]) -> None:
    verdicts = report(*(matmul(name, 512, 512) for name in names)).verdicts
    rows = _folds(verdicts)
    assert sorted(at for row in rows for at in row.rows) == list(range(len(names)))
    for row in rows:
        if len(row.rows) == 1:
            assert row.name == (names[row.rows[0]] or "(no name)")


def test_a_number_of_thousands_of_digits_is_just_a_name() -> None:
    names = ["9" * 5000, "8" * 5000]
    (row,) = _folds(report(*(matmul(name, 512, 512) for name in names)).verdicts)
    assert row.name == f"{{{names[0]},{names[1]}}}"
