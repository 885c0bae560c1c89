"""Repeated layers share a row; no layer is lost or shown twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.report_cases import check, conv, matmul, report

from twofour.reports.eligibility_document import collapse


def test_layers_that_differ_in_one_number_share_a_row() -> None:
    names = [f"encoder.{i}.{part}" for i in range(12) for part in ("fc1", "fc2")]
    rows = collapse(report(*(matmul(name, 768, 768) for name in names)).verdicts)
    assert [(r.name, len(r.members)) for r in rows] == [
        ("encoder.{0-11}.fc1", 12),
        ("encoder.{0-11}.fc2", 12),
    ]


def test_gaps_in_the_numbers_are_shown() -> None:
    layers = [matmul(f"h.{i}.fc", 768, 768) for i in (0, 1, 2, 5, 7, 8)]
    (row,) = collapse(report(*layers).verdicts)
    assert row.name == "h.{0-2,5,7-8}.fc"


def test_numbers_with_leading_zeros_keep_them() -> None:
    layers = [matmul(f"h.{i}.fc", 768, 768) for i in ("00", "01")]
    (row,) = collapse(report(*layers).verdicts)
    assert row.name == "h.{00,01}.fc"


def test_layers_of_another_size_or_verdict_keep_rows_of_their_own() -> None:
    odd = conv("block.1.conv", 512, 512)
    made = report(
        conv("block.0.conv", 512, 512),
        (odd, check(odd, violations=3)),
        conv("block.2.conv", 256, 512),
        conv("block.3.conv", 512, 512),
    )
    assert [r.name for r in collapse(made.verdicts)] == [
        "block.{0,3}.conv",
        "block.1.conv",
        "block.2.conv",
    ]


def test_a_row_says_whether_the_figures_are_those_of_all_its_layers() -> None:
    layers = [conv(f"block.{i}.conv", 512, 512) for i in range(2)]
    made = report(*((w, check(w, violations=i + 1)) for i, w in enumerate(layers)))
    (row,) = collapse(made.verdicts)
    assert not row.same_reasons
    (same,) = collapse(report(*layers).verdicts)
    assert same.same_reasons


@given(st.lists(st.text(alphabet="ab.{}-,0129\u0661", max_size=12), max_size=12))
def test_every_layer_is_in_exactly_one_row(names: list[str]) -> None:
    verdicts = report(*(matmul(name, 512, 512) for name in names)).verdicts
    rows = collapse(verdicts)
    assert sorted(v.layer for r in rows for v in r.members) == sorted(names)
    for row in rows:
        if len(row.members) == 1:
            assert row.name == row.first.layer


def test_a_number_of_thousands_of_digits_is_just_a_name() -> None:
    names = ["9" * 5000, "8" * 5000]
    (row,) = collapse(report(*(matmul(name, 512, 512) for name in names)).verdicts)
    assert row.name == f"{{{names[0]},{names[1]}}}"
