"""Prediction against evidence, in the page and in Markdown."""

from __future__ import annotations

from dataclasses import replace

from support.render_cases import every_status
from support.rendered import to_html, to_markdown

from twofour.records.eligibility import (
    ConfusionCell,
    Disagreement,
    EligibilityReport,
    EligibilityTotals,
    VerdictName,
)
from twofour.reports.document import Section, Table
from twofour.reports.eligibility_document import eligibility_document

ELIGIBLE, NOT, CHOSEN = VerdictName.ELIGIBLE, VerdictName.NOT_ELIGIBLE, VerdictName.CHOSEN


def measured() -> EligibilityReport:
    cells = (
        ConfusionCell(predicted=ELIGIBLE, measured=CHOSEN, layers=7),
        ConfusionCell(predicted=ELIGIBLE, measured=NOT, layers=1),
        ConfusionCell(predicted=NOT, measured=NOT, layers=1200),
    )
    odd = Disagreement(
        layer="<b>head|</b>", predicted=ELIGIBLE, measured=NOT, message="line 3 leaves it out"
    )
    totals = EligibilityTotals(confusion=cells, disagreements=(odd,), shares=())
    return replace(every_status(), totals=totals)


def _tables(report: EligibilityReport) -> list[Table]:
    blocks = eligibility_document(report).appendix
    found = [b for b in blocks if isinstance(b, Section) and b.style == "evidence"]
    return [b for one in found for b in one.blocks if isinstance(b, Table)]


def test_every_pair_has_its_count_and_pairs_that_never_were_have_nought() -> None:
    counts, wrong = _tables(measured())
    assert [c.head for c in counts.columns] == [
        "predicted",
        "measured chosen",
        "measured not-eligible",
    ]
    assert counts.rows == (("eligible", "7", "1"), ("not-eligible", "0", "1,200"))
    assert wrong.rows == (("<b>head|</b>", "eligible", "not-eligible", "line 3 leaves it out"),)


def test_without_evidence_there_is_no_table() -> None:
    nothing = replace(every_status(), totals=None)
    assert _tables(nothing) == []
    assert "Prediction against evidence" not in to_html(nothing)
    assert "Prediction against evidence" not in to_markdown(nothing)


def test_the_page_shows_counts_and_each_disagreement_and_escapes_names() -> None:
    page = to_html(measured())
    assert '<td class="figure">1,200</td>' in page
    assert 'class="name">&lt;b&gt;head|&lt;/<wbr>b&gt;</th>' in page
    assert "<b>head" not in page


def test_markdown_shows_both_tables() -> None:
    text = to_markdown(measured())
    assert "| predicted | measured chosen | measured not-eligible |" in text
    assert "| not-eligible | 0 | 1,200 |" in text
    assert "| eligible | not-eligible | line 3 leaves it out |" in text
