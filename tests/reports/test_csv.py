"""The CSV table: exact, one line per layer, and nothing in it that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.render_cases import every_status
from support.rendered import to_csv
from support.report_cases import matmul, report

from twofour.words import printable

GOLDEN = Path(__file__).parent / "golden"


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_table_of_every_status_is_as_expected(golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / "report.csv", to_csv(every_status()))


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("  =1+1", "'  =1+1"),
        ("\uff1d1", "'\uff1d1"),
        ("'quoted", "''quoted"),
        ("\t=1", r"\t=1"),
        ("fc-1=2", "fc-1=2"),
    ],
)
def test_a_name_that_a_spreadsheet_would_run_gets_an_apostrophe(name: str, cell: str) -> None:
    (row,) = _rows(to_csv(report(matmul(name, 512, 512, weight="w"))))
    assert row["layer"] == cell


@given(st.text())
def test_the_exact_name_comes_back_by_dropping_one_apostrophe(name: str) -> None:
    (row,) = _rows(to_csv(report(matmul(name, 512, 512, weight="w"))))
    assert row["layer"].removeprefix("'") == printable(name)
    assert row["layer"].lstrip()[:1] not in tuple("=+-@\t\r\n")
