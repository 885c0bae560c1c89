"""What comes back in a notebook: a line, and a table that no name can turn into markup."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from support.comparison_cases import by_trtexec, files, hostile
from support.render_cases import every_status as report
from torch import nn

import twofour
from twofour.records.log import BuildLog
from twofour.records.pruning import Validation
from twofour.records.weights import Pattern


def test_pruning_says_how_many_weights() -> None:
    result = twofour.prune(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3)), exclude="1")
    assert repr(result) == "PruneResult(2:4, 1 of 2 weights pruned)"
    assert "<td>64x64</td><td>yes</td><td>2,048</td>" in result._repr_html_()


def test_a_report_says_how_many_layers_of_each_verdict() -> None:
    found = report()
    assert repr(found).startswith(f"EligibilityReport({found.model}, {len(found.verdicts)} layers")
    assert repr(found).count("\n") == 0
    assert found._repr_html_().count("<tr>") == len(found.verdicts) + 1


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (BuildLog(files=(), builds=()), "BuildLog(0 files, 0 builds)"),
        (
            Validation(files=("m",), pattern=Pattern(2, 4), checks=()),
            "Validation(2:4, 0 weights, none broken)",
        ),
    ],
)
def test_a_record_without_rows_is_a_line(record: BuildLog | Validation, line: str) -> None:
    assert repr(record) == line
    assert record._repr_html_() == f"<p>{line}</p>"


def test_names_cannot_become_markup() -> None:
    found = report()
    evil = replace(found.verdicts[0], layer="<script>alert(1)</script>\x1b[31m")
    page = replace(found, model="<b>", verdicts=(evil,))._repr_html_()
    assert "<script" not in page
    assert "<b>" not in page
    assert "\x1b" not in page


def test_a_long_report_is_cut_and_says_so() -> None:
    found = report()
    many = replace(found, verdicts=found.verdicts[:1] * 250)
    assert many._repr_html_().endswith("<p>and 50 more</p>")


def test_records_are_imported_without_the_reports() -> None:
    code = "import sys, twofour.records; print('twofour.reports' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_comparison_has_the_medians_of_the_first_variants() -> None:
    found = files()
    first = found.variants[0]
    assert repr(found).startswith(f"LatencyComparison({found.source}, {len(found.variants)} var")
    assert f"{first.name} {first.median_ms:.4g} ms" in repr(found)


def test_a_comparison_has_a_row_for_each_variant_and_the_ratio_with_its_interval() -> None:
    found = by_trtexec()
    page = found._repr_html_()
    ratio = found.ratios[0]
    assert page.count("<tr>") == len(found.variants) + 1
    assert f"<td>{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})</td>" in page
    assert f"<td>{ratio.verdict.value}</td>" in page


def test_names_of_variants_stay_text() -> None:
    found = hostile()
    assert "<script" not in found._repr_html_()
    assert "\n" not in repr(found)
