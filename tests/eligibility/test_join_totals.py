from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from support.join_cases import (
    DENSE,
    SPARSE,
    build,
    chosen,
    eligible,
    information,
    layer,
    node,
    profile,
    report_from_log,
    tuned,
)
from support.rendered import to_html, to_markdown, to_table
from support.report_cases import check, context, conv, matmul, report, totals_of, validation

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report, report_from_engine
from twofour.eligibility.layer_gates import Gates, missed_gates
from twofour.eligibility.predict import predict
from twofour.errors import BadInputError
from twofour.records.eligibility import EligibilityReport, EligibilityTotals, ShareUnit
from twofour.records.export import GraphNode
from twofour.records.log import Build, BuildOutcome
from twofour.records.weights import ReasonCode
from twofour.reports.eligibility_words import evidence_lines
from twofour.reports.explain import find_verdict, layer_story
from twofour.reports.terminal import plain_text

NODES = (
    node("a", "Conv", "x", multiply_adds=100_000),
    node("b", "Conv", "a_out", multiply_adds=100_000),
    node("g", "Conv", "b_out", multiply_adds=100),
)
LOG = build(
    *tuned("b + relu", (DENSE, 0.02), (SPARSE, 0.03)), eligible("a", "b + relu"), chosen("a")
)


def whole(**changes: Any) -> EligibilityReport:
    """Chosen a, eligible b, grouped g."""
    weights = [conv(n, 512, 512, node=n) for n in "ab"]
    weights.append(conv("g", 128, 128, groups=32, node="g"))
    given: dict[str, Any] = {"build": LOG, "nodes": NODES}
    return join_report(report(*weights), BuildEvidence(**{**given, **changes}))


def totals(**changes: Any) -> EligibilityTotals:
    found = whole(**changes).totals
    assert found is not None
    return found


def test_the_confusion_table_counts_every_measured_layer() -> None:
    cells = {(c.predicted.value, c.measured.value): c.layers for c in totals().confusion}
    assert cells == {
        ("eligible", "chosen"): 1,
        ("eligible", "eligible"): 1,
        ("not-eligible", "not-eligible"): 1,
    }


@pytest.mark.parametrize(
    ("nodes", "total", "said"),
    [
        ((), None, "not counted in 3 layers (a, b and g): onnx does not know their shapes"),
        (NODES[:1], None, "not counted in 2 layers (b and g): onnx does not know their shapes"),
        (NODES[:2], 200_000, "not counted in 1 layer (g): onnx does not know their shapes"),
    ],
)
def test_layers_without_multiply_adds_are_named_and_the_others_count(
    nodes: tuple[GraphNode, ...], total: int | None, said: str
) -> None:
    found = totals(nodes=nodes)
    assert said in found.notes[0]
    counted = {share.unit: share.total for share in found.shares}
    assert counted.get(ShareUnit.MULTIPLY_ADDS) == total


def test_a_shared_weight_counts_once_under_its_best_verdict() -> None:
    weights = [matmul(n, 512, 512, node=n, weight="tied") for n in "ab"]
    found = join_report(report(*weights), BuildEvidence(build=build(eligible("b"), chosen("b"))))
    share = totals_of(found).shares[0]
    assert (share.total, share.runs_sparse, share.never) == (512 * 512, 512 * 512, 0)


def test_shares_of_time_come_from_the_profile_of_engine_layers() -> None:
    times = profile(**{"a": 1.0, "b + relu": 2.0, "g": 3.0, "pool": 4.0})
    found = totals(profile=times, nodes=(*NODES, node("pool", "MaxPool", "g_out")))
    share = found.shares[-1]
    assert share.unit is ShareUnit.MILLISECONDS
    assert (share.runs_sparse, share.eligible, share.never, share.other) == (1.0, 2.0, 3.0, 4.0)
    (ceiling,) = found.ceilings
    assert ceiling.eligible_gain == pytest.approx(10 / 9)
    assert ceiling.weighted_gain == pytest.approx(10 / 7.5)
    assert "2x" in ceiling.assumption


def test_in_a_dense_profile_the_chosen_layers_still_have_all_to_gain() -> None:
    times = profile(a=4.0, b=2.0, g=2.0, pool=2.0)
    (ceiling,) = totals(dense_profile=times).ceilings
    assert ceiling.profile == "dense engine"
    assert ceiling.eligible_gain == pytest.approx(10 / 7)


def test_a_profile_of_another_engine_gives_no_time_and_no_ceiling() -> None:
    found = totals(profile=profile(x=1.0, y=2.0))
    assert ShareUnit.MILLISECONDS not in {s.unit for s in found.shares}
    assert found.ceilings == ()
    (note,) = found.notes
    assert note.startswith("none of the 2")
    assert all(v.profile_ms is None for v in whole(profile=profile(x=1.0)).verdicts)


def test_time_of_an_engine_layer_that_leads_nowhere_is_not_known() -> None:
    share = totals(profile=profile(**{"a": 1.0, "stranger": 5.0, "a || b": 2.0})).shares[-1]
    assert (share.runs_sparse, share.unknown, share.other) == (1.0, 7.0, 0.0)


def test_without_a_prediction_the_ceiling_of_the_eligible_is_not_known() -> None:
    layers = information(
        layer("a", DENSE, parameter_type="Convolution"), layer("pool", layer_type="Pooling")
    )
    times = profile(a=4.0, pool=1.0)
    found = report_from_engine(BuildEvidence(layers=layers, profile=times)).totals
    assert found is not None
    assert found.ceilings == ()
    (note,) = found.notes
    assert "at most 1.667x" in note


def test_the_ceiling_of_a_build_without_sparse_weights_goes_by_the_rules() -> None:
    (ceiling,) = totals(build=build(flag="Disabled"), profile=profile(a=2.0, g=2.0)).ceilings
    assert ceiling.eligible_gain == pytest.approx(4 / 3)
    assert ceiling.weighted_gain == pytest.approx(2)


@pytest.mark.parametrize("ms", [0.0, float("nan")])
def test_a_profile_without_times_gives_no_shares_of_time(ms: float) -> None:
    found = totals(profile=profile(a=ms, b=ms))
    assert ShareUnit.MILLISECONDS not in {s.unit for s in found.shares}
    assert found.ceilings == ()


def test_shares_are_put_into_words_that_fit_them() -> None:
    layers = information(layer("a", SPARSE))
    absent = whole(build=None, layers=layers)
    assert "50.0 % are not" in evidence_lines(absent)[0]
    nothing = whole(build=None, profile=profile(a=1.0, pool=3.0))
    said = "of the time (4.000 ms), 25.0 % can run sparse"
    assert any(line.startswith(said) for line in evidence_lines(nothing))
    tiny = whole(build=None, layers=layers, profile=profile(a=1e-9, pool=3.0))
    assert not any(" 0.0 %" in line for line in evidence_lines(tiny))


def test_a_page_states_one_share_of_weights_for_what_can_run_sparse() -> None:
    float32 = conv("f", 512, 512, node="f", math_dtype="float32", dtype="float32")
    predicted = report(conv("a", 512, 512, node="a"), float32, conv("s", 64, 64, node="s"))
    silent = join_report(predicted, BuildEvidence(layers=information(layer("a"))))
    for made, expected in ((predicted, "50.4"), (silent, "49.6")):
        pages = (plain_text(to_table(made)), to_markdown(made), to_html(made))
        for page in pages:
            said = set(re.findall(r"eligible: can run sparse[^%]*?\((\d+\.\d) %\)", page))
            assert said == {expected}
            assert "100.0 %" not in page
    (weights, *_) = totals_of(silent).shares
    assert round(100 * (weights.eligible - weights.doubtful) / weights.total, 1) == 49.6


# --- gates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gates",
    [
        Gates(min_eligible=0.6, min_chosen=0.3, no_broken=True),
        Gates(min_eligible=1.0, allow_reasons=(ReasonCode.GROUPED_CONV,)),
        Gates(min_eligible=0.6, allow_reasons=(ReasonCode.QUALIFIES,)),
    ],
    ids=["met", "an allowed reason does not count", "a good layer counts whatever is allowed"],
)
def test_gates_that_are_met_offend_nobody(gates: Gates) -> None:
    assert missed_gates(whole(), gates) == ()


@pytest.mark.parametrize(
    ("gates", "headline", "layers"),
    [
        (
            Gates(allow_reasons=(ReasonCode.DTYPE,)),
            "2 of 3 layers eligible: 0.66, gate 1",
            ["g"],
        ),
        (Gates(min_chosen=0.5), "1 of 3 layers chosen: 0.33, gate 0.5", ["b", "g"]),
        (
            Gates(min_eligible=0.667),
            "2 of 3 layers eligible: 0.66, gate 0.667",
            ["g"],
        ),
    ],
    ids=["allowed reasons alone", "too few are chosen", "a share just below is not rounded up"],
)
def test_a_gate_that_is_missed_says_by_how_much_and_names_the_layers_in_order(
    gates: Gates, headline: str, layers: list[str]
) -> None:
    said, *lines = missed_gates(whole(), gates)
    assert (said, [line.split(":")[0] for line in lines]) == (headline, layers)


@pytest.mark.parametrize(
    "gates",
    [
        Gates(min_eligible=0.0),
        Gates(min_chosen=0.5),
        Gates(no_broken=True),
        Gates(allow_reasons=(ReasonCode.DTYPE,)),
    ],
)
def test_gates_with_no_layer_to_hold_to_them_are_refused(gates: Gates) -> None:
    with pytest.raises(BadInputError, match="no layer counts"):
        missed_gates(report(), gates)
    assert missed_gates(report(), Gates()) == ()


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (replace(LOG, outcome=BuildOutcome.FAILED), "no engine to check"),
        (build(eligible("x"), chosen("x")), "no engine to check"),
        (build(eligible("a"), chosen("a"), flag="Forced"), "--sparsity=force"),
    ],
    ids=["failed", "another model", "overwritten weights"],
)
def test_gates_of_the_engine_are_refused_where_nothing_is_known_of_it(
    log: Build, said: str
) -> None:
    found = whole(build=log)
    for gates in (Gates(min_eligible=0.1), Gates(min_chosen=0.1)):
        with pytest.raises(BadInputError, match=said):
            missed_gates(found, gates)
    assert missed_gates(found, Gates(no_broken=True)) == ()


def test_what_was_left_dense_on_purpose_is_held_to_no_gate() -> None:
    stem, dense = conv("stem", 3, 64, (7, 7)), conv("head", 512, 512)
    broken = conv("lost", 512, 512)
    left = [(w, replace(check(w, violations=9), required=False)) for w in (stem, dense)]
    gates = Gates(min_eligible=1.0, no_broken=True)
    assert missed_gates(report(conv("mix", 512, 512), *left), gates) == ()
    share, lost, pattern = missed_gates(report(*left, (broken, check(broken, violations=9))), gates)
    assert share == "0 of 1 layer eligible: 0, gate 1"
    assert lost.startswith("lost: ")
    assert pattern == "pattern broken in 1 of 1 weight, gate 0"
    with pytest.raises(BadInputError, match="no layer counts for the gates"):
        missed_gates(report(*left), gates)


def test_a_layer_whose_weight_is_computed_counts_although_nothing_could_be_pruned() -> None:
    computed = matmul("computed", 0, 0, weight=None, axis=None, shape=(), math_dtype="unknown")
    found = predict(
        [computed, conv("a", 512, 512)], validation(check(conv("a", 512, 512))), context()
    )
    assert [v.required for v in found.verdicts] == [None, True]
    (line, *_) = missed_gates(found, Gates(min_eligible=0.9))
    assert "1 of 2 layers" in line


def test_a_broken_weight_that_two_layers_share_is_one_broken_weight() -> None:
    pair = [matmul(name, 512, 512, weight="shared") for name in ("a", "b")]
    found = report(*((w, check(w, violations=3)) for w in pair), conv("c", 512, 512))
    lines = missed_gates(found, Gates(no_broken=True))
    assert "in 1 of 2" in lines[0]
    assert [line.split(":")[0] for line in lines[1:]] == ["a", "b"]


def test_a_model_known_from_its_engine_alone_is_held_to_the_gates_as_a_whole() -> None:
    layers = information(layer("a", SPARSE), layer("g", DENSE, groups=4))
    found = report_from_engine(BuildEvidence(build=LOG, layers=layers))
    assert {v.layer: v.required for v in found.verdicts}["g"] is False
    assert missed_gates(found, Gates(min_chosen=0.1)) == ()


def test_no_broken_is_refused_where_no_pattern_is_known() -> None:
    alone = report_from_log(LOG)
    with pytest.raises(BadInputError, match="the pattern of no") as caught:
        missed_gates(alone, Gates(no_broken=True))
    assert "--onnx model.onnx" in (caught.value.hint or "")


def test_any_reason_of_a_layer_may_be_the_allowed_one() -> None:
    weight = conv("a", 160, 160, (1, 1), node="a")
    broken = report((weight, check(weight, violations=3)), conv("b", 512, 512))
    assert [r.code.value for r in broken.verdicts[0].reasons] == [
        *("PATTERN_BROKEN", "SMALL_CHANNELS")
    ]
    for gates in (Gates(no_broken=True), Gates(min_eligible=1.0)):
        assert len(missed_gates(broken, gates)) == 2
        allowed = replace(gates, allow_reasons=(ReasonCode.SMALL_CHANNELS,))
        assert missed_gates(broken, allowed) == ()


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(BadInputError, match="--min-eligible 90"):
        Gates(min_eligible=90)


# --- explain --------------------------------------------------------------------------------------


def test_explain_tells_the_story_of_one_layer() -> None:
    evidence = BuildEvidence(build=LOG, nodes=NODES, layers=information(layer("b + relu", DENSE)))
    text = plain_text(layer_story(whole(), evidence, "b"), width=200)
    for line in (
        "b (Conv): eligible",
        "DENSE_FASTER: dense was faster: sparse 0.03 ms, dense 0.02 ms, sparse / dense 1.500",
        f"b + relu: {DENSE}",
        "build.log:10: (Sparsity) Found 2 layer(s) eligible to use sparse tactics: a, b + relu",
        "tactics of b + relu (2 timed)",
    ):
        assert line in text
    assert [w for w in text.split() if w in {"0.02", "0.03"}][-2:] == ["0.02", "0.03"]


def test_a_layer_is_found_by_its_engine_layer_and_by_a_node_in_it() -> None:
    assert find_verdict(whole(), "b + relu") == 1
    alone = report_from_log(LOG)
    assert [v.layer for v in alone.verdicts] == ["a", "b + relu"]
    assert [find_verdict(alone, name) for name in ("b", "relu")] == [1, 1]


def test_a_node_in_two_engine_layers_is_asked_for_by_their_names() -> None:
    fused = whole(layers=information(layer("a + relu"), layer("b + relu")))
    with pytest.raises(BadInputError, match="are named 'relu'") as caught:
        find_verdict(fused, "relu")
    assert ": a, b" in (caught.value.hint or "")


def test_several_nodes_of_one_layer_are_asked_for_by_their_nodes() -> None:
    report = whole()
    rows = tuple(
        replace(v, layer="head", node=f"node_{at}") for at, v in enumerate(report.verdicts)
    )
    with pytest.raises(BadInputError, match="layers are named 'head'") as caught:
        find_verdict(replace(report, verdicts=rows), "head")
    assert caught.value.hint == "name one of: " + ", ".join(str(v.node) for v in rows)
    rows = tuple(replace(v, node="head", weight=f"w{at}") for at, v in enumerate(rows[:2]))
    with pytest.raises(BadInputError) as caught:
        find_verdict(replace(report, verdicts=rows), "head")
    assert ": w0, w1" in (caught.value.hint or "")


def test_an_unknown_layer_names_those_that_are_near() -> None:
    predicted = report(matmul("encoder.0.fc1", 512, 512), matmul("encoder.0.fc2", 512, 512))
    with pytest.raises(BadInputError, match="no layer 'fc1'") as caught:
        find_verdict(predicted, "fc1")
    assert "encoder.0.fc1" in (caught.value.hint or "")
