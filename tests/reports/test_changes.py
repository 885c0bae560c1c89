"""What to change first: by the rows' own remedies, each array counted once, as in the totals."""

from __future__ import annotations

from dataclasses import replace

from support.report_cases import check, conv, matmul, reason, report

from twofour.eligibility import remedies
from twofour.eligibility.predict import summarize
from twofour.eligibility.reasons import headline_changes, leaves_dense
from twofour.eligibility.remedies import Remedy
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.weights import ReasonCode
from twofour.reports.eligibility_words import advice_lines, totals

_FLOAT16 = "use float16 (--precision float16)"
_FP32 = {"dtype": "float32", "math_dtype": "float32"}
_ABOUT_EVIDENCE = ("rebuild", "give layer information", "build it", "delete the timing cache")


def _of(made: EligibilityReport) -> list[str]:
    lines = advice_lines(made)
    return [x.partition(": ")[2] for x in lines if x.startswith(("change first:", "then ("))]


def _with(made: EligibilityReport, *verdicts: Verdict) -> EligibilityReport:
    return replace(made, verdicts=verdicts, summary=summarize(verdicts, 0))


def test_a_change_counts_every_row_whose_remedy_says_it_whatever_its_first_reason() -> None:
    made = report(matmul("large", 512, 512, **_FP32), matmul("small", 64, 64, **_FP32))
    large, small = made.verdicts
    taken = (reason(ReasonCode.DENSE_TAKEN), *large.reasons)
    measured = replace(large, reasons=taken, evidence=Evidence.MEASURED)
    (change,) = _of(_with(made, measured, small))
    assert change.startswith(f"{_FLOAT16} (2 layers, 100.0 %")


def test_fp8_layers_ask_for_int8() -> None:
    made = report(matmul("up", 512, 512, dtype="float32", math_dtype="float8_e4m3fn"))
    (change,) = _of(made)
    assert "use int8 (--quantize int8)" in change
    assert "(1 layer, 100.0 %" in change


def test_a_remedy_that_leaves_a_layer_dense_is_no_change() -> None:
    stem = matmul("stem", 3, 64)
    chosen = matmul("chosen", 64, 64, reasons=(reason(ReasonCode.EXCLUDED),))
    dense = [(w, check(w, violations=9)) for w in (stem, chosen)]
    made = report(*dense, conv("g", 128, 128, groups=4))
    assert all(leaves_dense(v.remedy or "") for v in made.verdicts)
    assert _of(made) == []


def test_a_change_has_the_share_of_arrays_that_the_totals_count_under_its_rows() -> None:
    tied = conv("tied", 64, 64, (1, 1), weight="w")
    made = report(tied, conv("other", 64, 64, (1, 1), weight="w"), matmul("own", 64, 64, **_FP32))
    one, other, own = made.verdicts
    dense = replace(other, verdict=VerdictName.NOT_ELIGIBLE, remedy="prune it 2:4 along axis 1")
    found = _with(made, one, dense, own)
    (change,) = _of(found)
    assert "(1 layer, 50.0 %" in change
    assert [t.weights for t in totals(found)] == [
        "4,096 weights (50.0 %)",
        "4,096 weights (50.0 %)",
        "0 weights (0.0 %)",
    ]


def test_each_step_about_a_build_changes_something_or_only_shows_more() -> None:
    steps = (r for r in vars(remedies).values() if isinstance(r, Remedy) and r.taken is not None)
    for step in steps:
        asked = bool(headline_changes(step.text))
        assert asked is not step.text.startswith(_ABOUT_EVIDENCE), step.text
