"""What no row names is in every total of a report, in every form of it."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from typing import Any

import pytest
from support.join_cases import (
    DENSE,
    SPARSE,
    build,
    chain,
    chosen,
    eligible,
    information,
    layer,
    node,
)
from support.rendered import to_csv, to_html, to_markdown, to_table
from support.report_cases import check, conv, matmul, pruned_row, reason, report, totals_of

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report
from twofour.eligibility.layer_gates import Gates, missed_gates
from twofour.eligibility.predict import not_exported, with_not_exported
from twofour.records.eligibility import EligibilityReport, Evidence, Share, ShareUnit, VerdictName
from twofour.records.log import Build
from twofour.records.weights import NotCovered, PrunedWeight, ReasonCode
from twofour.reports.explain import layer_story
from twofour.reports.terminal import plain_text


def group(op: str, weights: int, *, multiplies: bool = True, uses: int = 1) -> NotCovered:
    return NotCovered(
        op=op, uses=uses, weights=weights, multiplies=multiplies, users=(f"{op}:0",), arrays=("w",)
    )


LSTM = group("LSTM", 600_000, uses=2)
EMBEDDING = group("Gather", 50_000, multiplies=False)


def recurrent() -> EligibilityReport:
    """A layer of 200,000 weights that qualifies, beside an LSTM of 600,000 and an embedding."""
    return report(matmul("head", 400, 500), not_covered=(LSTM, EMBEDDING))


def test_percentages_are_of_all_factors_and_of_no_embedding() -> None:
    summary = recurrent().summary
    assert (summary.weights, summary.weights_eligible) == (800_000, 200_000)
    assert (summary.weights_not_covered, summary.weights_elsewhere) == (600_000, 50_000)
    page = to_html(recurrent())
    assert "not covered: 600,000 weights in LSTM (2)" in page
    assert "not covered 75.0 %" in page


def test_the_weights_of_the_table_add_up_to_all_that_is_stored() -> None:
    given = report(
        conv("a", 64, 64, weight="shared"),
        conv("b", 64, 64, weight="shared"),
        not_covered=(LSTM, EMBEDDING),
    )
    rows = list(csv.DictReader(io.StringIO(to_csv(given))))
    assert [(r["layer"], r["verdict"], int(r["weights"])) for r in rows] == [
        ("a", "eligible", 64 * 64 * 9),
        ("b", "eligible", 0),
        ("LSTM (2)", "not covered", 600_000),
        ("Gather (1)", "no factor", 50_000),
    ]


def test_shares_with_evidence_have_a_part_that_is_not_covered() -> None:
    joined = join_report(recurrent(), BuildEvidence())
    assert joined.summary == recurrent().summary
    assert totals_of(joined).shares == (
        Share(
            unit=ShareUnit.WEIGHTS,
            total=800_000.0,
            runs_sparse=0.0,
            eligible=200_000.0,
            never=0.0,
            unknown=0.0,
            not_covered=600_000.0,
        ),
    )
    assert "(head and LSTM:0)" in totals_of(joined).notes[0]


def test_multiply_adds_of_recurrent_layers_are_not_covered() -> None:
    nodes = (node("node_head", "MatMul", multiply_adds=2_000), node("LSTM:0", multiply_adds=9_000))
    joined = join_report(recurrent(), BuildEvidence(nodes=nodes))
    (share,) = (s for s in totals_of(joined).shares if s.unit is ShareUnit.MULTIPLY_ADDS)
    assert (share.total, share.eligible, share.not_covered) == (11_000, 2_000, 9_000)
    assert not any("multiply-adds" in note for note in totals_of(joined).notes)


def test_multiply_adds_of_a_layer_count_once_where_another_array_of_it_is_not_covered() -> None:
    adds = replace(LSTM, op="MatMul", users=("node_head",))
    nodes = (node("node_head", "MatMul", multiply_adds=2_000),)
    found = report(matmul("head", 400, 500), not_covered=(adds,))
    totals = join_report(found, BuildEvidence(nodes=nodes)).totals
    assert totals is not None
    (share,) = (s for s in totals.shares if s.unit is ShareUnit.MULTIPLY_ADDS)
    assert (share.total, share.eligible, share.not_covered) == (2_000, 2_000, 0)


# --- gates ----------------------------------------------------------------------------------------


def test_a_share_of_layers_counts_the_nodes_that_no_row_names() -> None:
    share, uncovered = missed_gates(recurrent(), Gates(min_eligible=0.9))
    assert "1 of 3 layers" in share
    assert "LSTM (2)" in uncovered
    assert "--allow-reason UNSUPPORTED_OP" in uncovered
    allowed = Gates(min_eligible=1.0, allow_reasons=(ReasonCode.UNSUPPORTED_OP,))
    for met in (Gates(min_eligible=0.3), Gates(no_broken=True), allowed):
        assert missed_gates(recurrent(), met) == ()


def test_weights_that_the_models_own_code_uses_count_as_well() -> None:
    by_hand = matmul("hand", 512, 512, reasons=(reason(ReasonCode.NOT_A_LAYER),))
    dense = replace(check(by_hand, violations=9), required=False)
    made = report(matmul("head", 512, 512), (by_hand, dense))
    (headline, line) = missed_gates(made, Gates(min_eligible=0.9))
    assert "1 of 2 layers" in headline
    assert line.startswith("hand: not-eligible, NOT_A_LAYER")
    allowed = Gates(min_eligible=1.0, allow_reasons=(ReasonCode.NOT_A_LAYER,))
    assert missed_gates(made, allowed) == ()
    assert missed_gates(made, Gates(no_broken=True)) == ()


# --- layers that the export lacks -----------------------------------------------------------------


def pruned(layer: str, *, tied_to: tuple[str, ...] = ()) -> PrunedWeight:
    return pruned_row(matmul(layer, 64, 32, op="Linear", node=None, tied_to=tied_to))


def test_layers_without_a_product_or_constant_in_the_graph_are_missing() -> None:
    rows = (pruned("head"), pruned("aux"), pruned("by_hand"), pruned("twin", tied_to=("head",)))
    missing = not_exported(rows, ["head.weight"], ["by_hand.weight", "val_3"])
    assert [(row.weight.layer, row.weight.weight) for row in missing] == [
        ("aux", "aux.weight"),
        ("twin", None),
    ]


def test_a_layer_that_was_not_exported_is_a_row_that_counts() -> None:
    joined = join_report(report(matmul("head", 512, 512)), BuildEvidence())
    made = with_not_exported(joined, (pruned("aux"),))
    row = made.verdicts[-1]
    assert (row.layer, row.evidence) == ("aux", Evidence.PREDICTED)
    assert row.verdict is VerdictName.NOT_IN_ENGINE
    assert row.reasons[0].code is ReasonCode.NOT_EXPORTED
    assert "of the exported graph" in row.reasons[0].message
    summary = made.summary
    assert (summary.layers, summary.not_in_engine) == (2, 1)
    assert (summary.weights, summary.weights_eligible) == (512 * 512 + 64 * 32, 512 * 512)
    assert (totals_of(made).shares[0].total, totals_of(made).shares[0].other) == (264_192.0, 2048.0)
    assert missed_gates(made, Gates(min_eligible=1.0)) == ()


# --- layers that the rules were wrong about -------------------------------------------------------


_BROKEN = matmul("fc", 512, 512, node="fc")
_WEIGHTS = (conv("conv", 512, 512, node="conv"), (_BROKEN, check(_BROKEN, violations=3)))
_NODES = chain(("conv", "Conv"), ("relu", "Relu"), ("fc", "MatMul"))
_ALL = information(layer("conv + relu", SPARSE), layer("fc", SPARSE))
_REGION = "{ForeignNode[ONNXTRT_castHelper_8...ONNXTRT_castHelper_9]}"
_OLD = "Compute Capability: 7.5"

_CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "sparse weights were switched off": ({"build": build(flag="Disabled")}, set()),
    "switched off, with layer information": (
        {"build": build(flag="Disabled"), "layers": information(layer("conv", DENSE))},
        set(),
    ),
    "the GPU is too old": ({"build": build(_OLD, eligible(), chosen())}, set()),
    "a log without a word about sparsity": ({"build": build()}, set()),
    "the lists are as predicted": ({"build": build(eligible("conv"), chosen("conv"))}, set()),
    "listed the other way round": ({"build": build(eligible("fc"), chosen())}, {"conv", "fc"}),
    "a broken weight runs sparse": ({"layers": _ALL}, {"fc"}),
    "in a plugin": ({"layers": information(layer("conv", layer_type="PluginV2"))}, set()),
    "in a region that may hold anything": (
        {"layers": information(layer("conv + relu"), layer(_REGION, layer_type="Myelin"))},
        set(),
    ),
    "folded away": ({"layers": information(layer("fc", DENSE))}, set()),
}


def _joined(given: dict[str, Any]) -> tuple[EligibilityReport, BuildEvidence]:
    evidence = BuildEvidence(nodes=_NODES, **given)
    return join_report(report(*_WEIGHTS), evidence), evidence


@pytest.mark.parametrize("case", _CASES)
def test_rows_totals_and_formats_name_the_same_layers(case: str) -> None:
    given, wrong = _CASES[case]
    found, evidence = _joined(given)
    assert {d.layer for d in totals_of(found).disagreements} == wrong
    said = {v.layer for v in found.verdicts if "the rules said" in str(v.reasons)}
    assert said == wrong
    rows = {row["layer"]: row for row in csv.DictReader(io.StringIO(to_csv(found)))}
    assert {name for name, row in rows.items() if row["rules_were_wrong"] == "true"} == wrong
    told = {name for name in rows if "rules said" in plain_text(layer_story(found, evidence, name))}
    assert told == wrong
    for page in (plain_text(to_table(found)), to_markdown(found), to_html(found)):
        assert len(re.findall(r"\(rules\b", page)) == len(wrong)


def test_a_gate_names_what_the_rules_said_before_what_the_log_says_of_itself() -> None:
    odd: Build = build(eligible("conv", "fc"), chosen("conv", "fc", "new"))
    found, _ = _joined({"build": odd, "layers": information(layer("fc", SPARSE))})
    fc = next(v for v in found.verdicts if v.layer == "fc")
    assert fc.verdict is VerdictName.CHOSEN
    line = missed_gates(found, Gates(no_broken=True))[-1]
    assert line.startswith("fc: chosen, LOG_CONTRADICTS:")


def test_a_row_that_was_not_predicted_keeps_the_reason_of_the_rules() -> None:
    found, _ = _joined({"build": build(eligible("fc"), chosen())})
    said = {v.layer: v.refuted and v.refuted.code.value for v in found.verdicts}
    assert said == {"conv": "QUALIFIES", "fc": "PATTERN_BROKEN"}
    agreed, _ = _joined({"build": build(eligible("conv"), chosen("conv"))})
    assert [v.refuted for v in agreed.verdicts] == [None, None]
