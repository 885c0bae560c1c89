"""The table of reasons: every code has a whole row, a case that brings it about, and its page."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest
from reason_cases import MAKERS
from reason_pages import page
from support.report_cases import codes, conv, matmul, report, verdict

from twofour.eligibility.build_facts import Case
from twofour.eligibility.reasons import REASONS, headline_changes
from twofour.eligibility.remedies import (
    LeftDense,
    Origin,
    ReasonRow,
    Remark,
    Remedy,
)
from twofour.pruning.selection import choose
from twofour.records.eligibility import Evidence, VerdictName
from twofour.records.weights import HARDWARE_PATTERN, Reason, ReasonCode, Selection
from twofour.reports.eligibility_words import advice_lines

_NOTHING_TO_DO = {ReasonCode.QUALIFIES, ReasonCode.FOLDED, ReasonCode.NOT_EXPORTED}
_BEST_FIRST = (
    *(VerdictName.CHOSEN, VerdictName.ELIGIBLE, VerdictName.UNKNOWN),
    *(VerdictName.NOT_ELIGIBLE, VerdictName.NOT_IN_ENGINE),
)


@pytest.mark.parametrize("code", ReasonCode)
def test_every_code_has_a_row_with_sentence_documentation_and_remedy(code: ReasonCode) -> None:
    row = REASONS[code]
    assert row.code is code
    assert row.sentence.endswith(".")
    assert row.documentation.endswith(".")
    assert bool(row.remedies) is (code not in _NOTHING_TO_DO)
    assert (row.origin in (Origin.STATED, Origin.EVIDENCE)) is (row.found_by == ())
    texts = [remedy.text for remedy in row.remedies]
    assert len(set(texts)) == len(texts)
    asked = [r for r in row.remedies if r.headline is not None]
    assert all(headline_changes(r.text) == (r.headline,) for r in asked)


def test_no_row_is_of_another_code_and_the_order_is_that_of_explaining() -> None:
    assert set(REASONS) == set(ReasonCode)
    origins = [row.origin for row in REASONS.values()]
    assert [origin for origin, _ in groupby(origins)] == list(Origin)


@pytest.mark.parametrize("code", ReasonCode)
def test_every_code_is_brought_about_by_a_case_with_remedies_of_its_rows(
    code: ReasonCode, tmp_path: Path
) -> None:
    found = MAKERS[code](tmp_path)
    assert code in {reason.code for reason in found.reasons}
    rows = [REASONS[reason.code] for reason in found.reasons]
    if found.evidence is Evidence.PREDICTED:
        worst = max(_BEST_FIRST.index(row.best) for row in rows)
        assert _BEST_FIRST.index(found.verdict) >= worst
    # the row of a layer says the remedy with any figures
    one = "|".join(f"{re.escape(remedy.text)}.*" for row in rows for remedy in row.remedies)
    assert found.remedy is None or re.fullmatch(f"({one})((;|,)? or ({one}))*", found.remedy)
    assert "…" not in "\n".join(page(REASONS[code])).partition("## What it gains")[0]


def test_pruning_leaves_dense_what_the_table_says_it_leaves_dense() -> None:
    for row in REASONS.values():
        weight = matmul("fc", 512, 512, reasons=(Reason(code=row.code, message="stated"),))
        ((_, pruned, _),) = choose([weight], HARDWARE_PATTERN, Selection())
        assert pruned is (row.left_dense in (LeftDense.NO, LeftDense.WHERE_SAID)), row.code


def test_pruning_and_the_report_say_the_same_of_groups() -> None:
    for weight in (conv("g", 128, 128, groups=4), conv("d", 128, 128, groups=128)):
        ((_, _, (reason, *_)),) = choose([weight], HARDWARE_PATTERN, Selection())
        assert reason == verdict(weight).reasons[0]


def test_a_rule_is_one_row_and_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy rule: prediction, remedy, headline, pruning and page know it from its row alone."""

    def named_toy(case: Case) -> Remark | None:
        name = case.weight.layer
        return Remark(message=f"{name} is a toy") if name.startswith("toy") else None

    row = ReasonRow(
        code=ReasonCode.GUESSED,
        origin=Origin.CAUSE,
        sentence="It is a toy.",
        documentation="Toys are named so.",
        best=VerdictName.NOT_ELIGIBLE,
        left_dense=LeftDense.ALWAYS,
        source="the toy box",
        found_by=(named_toy,),
        remedies=(Remedy(text="grow up", headline="let these layers grow up"),),
    )
    monkeypatch.setitem(REASONS, ReasonCode.GUESSED, row)
    made = report(matmul("toy.fc", 512, 512), matmul("fc", 512, 512))
    toy, other = made.verdicts
    assert (toy.verdict, toy.remedy) == (VerdictName.NOT_ELIGIBLE, "grow up")
    assert toy.reasons == (
        Reason(code=ReasonCode.GUESSED, message="toy.fc is a toy", source="the toy box"),
    )
    assert codes(other) == ["QUALIFIES"]
    assert any("(1 layer, 50.0 %" in line for line in advice_lines(made))
    weight = matmul("toy.fc", 512, 512, reasons=toy.reasons)
    assert choose([weight], HARDWARE_PATTERN, Selection())[0][1] is False
    assert any("It is a toy." in line for line in page(row))
