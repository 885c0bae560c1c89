from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.join_cases import (
    DENSE,
    SPARSE,
    build,
    chain,
    chosen,
    eligible,
    information,
    joined,
    layer,
    node,
    profile,
    report_from_log,
    tuned,
)
from support.report_cases import big, codes, conv, int8, matmul, report, totals_of

from twofour.eligibility.build_facts import build_facts
from twofour.eligibility.totals import LayerStatus, status_of
from twofour.records.eligibility import Evidence, Verdict, VerdictName
from twofour.records.log import (
    Build,
    BuildOutcome,
    EngineLayer,
    LogMessage,
    SkippedTactic,
    SkipReason,
    SparsityFlag,
)
from twofour.records.weights import ReasonCode, Weight
from twofour.reports.eligibility_words import advice_lines
from twofour.reports.layers_table import verdict_note

CHOSEN, ELIGIBLE = VerdictName.CHOSEN, VerdictName.ELIGIBLE
NOT_ELIGIBLE, UNKNOWN = VerdictName.NOT_ELIGIBLE, VerdictName.UNKNOWN


def verdict(weight: Weight | tuple[Weight, Any], **evidence: Any) -> Verdict:
    layers = evidence.get("layers")
    known = build_facts(evidence.get("build"), None if layers is None else layers.layers)
    (found,) = joined(report(weight, build=known), **evidence).verdicts
    return found


# --- what proves a choice -------------------------------------------------------------------------


def test_a_name_on_the_chosen_line_means_chosen_although_the_count_says_none() -> None:
    log = build(eligible("a", "b"), chosen("a", count=0))
    a, b = joined(report(big("a"), big("b")), build=log).verdicts
    assert (a.verdict, b.verdict) == (CHOSEN, ELIGIBLE)
    assert "build.log:4: " in (a.reasons[0].source or "")
    assert "LOG_CONTRADICTS" in codes(a)
    assert "LOG_CONTRADICTS" not in codes(b)


def test_a_dense_kernel_in_the_engine_outweighs_the_chosen_line() -> None:
    log = build(eligible("a"), chosen("a"))
    found = verdict(big(), build=log, layers=information(layer("a", DENSE)))
    assert found.verdict is ELIGIBLE
    assert codes(found)[0] == "LOG_CONTRADICTS"
    assert DENSE in found.reasons[0].message


def test_weights_not_marked_beside_marked_ones_are_not_eligible() -> None:
    layers = information(
        layer("a", DENSE, has_sparse_weights=True), layer("b", DENSE, has_sparse_weights=False)
    )
    a, b = joined(report(big("a"), big("b")), layers=layers).verdicts
    assert (a.verdict, a.evidence) == (ELIGIBLE, Evidence.MEASURED)
    assert any("HasSparseWeights: 1" in (r.source or "") for r in a.reasons)
    assert (b.verdict, codes(b)[0]) == (NOT_ELIGIBLE, "NOT_LISTED")


def test_the_kernel_of_a_tactic_number_is_looked_up_in_the_log() -> None:
    log = build(
        *tuned("a", (SPARSE, 0.01), (DENSE, 0.02)),
        "Engine Layer Information:",
        "Layer(CaskConvolution): a, Tactic: 0x0000000000000001, x (Half[1]) -> y (Half[1])",
    )
    found = verdict(big(), build=log)
    assert found.verdict is CHOSEN
    assert SPARSE in found.reasons[0].message
    assert (found.sparse_ms, found.dense_ms) == (0.01, 0.02)


# --- why an eligible layer is dense ---------------------------------------------------------------


def test_dense_faster_states_both_times_and_their_ratio() -> None:
    log = build(*tuned("a", (DENSE, 0.02), (SPARSE, 0.025)), eligible("a"), chosen())
    found = verdict(big(), build=log)
    assert (found.verdict, codes(found)[0]) == (ELIGIBLE, "DENSE_FASTER")
    assert (found.sparse_ms, found.dense_ms) == (0.025, 0.02)
    assert "sparse / dense 1.250" in found.reasons[0].message
    assert (found.reasons[0].source or "").startswith(f"build.log:7: Tactic Name: {SPARSE}")
    small = verdict(conv("a", 160, 160, (1, 1), node="a"), build=log)
    assert codes(small) == ["DENSE_FASTER", "SMALL_CHANNELS", "QUALIFIES"]
    assert (small.remedy or "").startswith("try a larger batch")


def test_no_sparse_kernel_among_the_timed_ones_is_said() -> None:
    in_tf32 = "sm80_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc"
    log = build(*tuned("a", (in_tf32, 0.02)), eligible("a"), chosen())
    found = verdict(big(math_dtype="float32"), build=log)
    assert codes(found)[:2] == ["NO_SPARSE_TACTIC", "DTYPE"]
    assert "build is in FP32" in found.reasons[0].message
    assert (found.remedy or "").startswith("export with --precision float16")
    made = report_from_log(log)
    said = "change first: use float16 (--precision float16) (1 layer)"
    assert advice_lines(made)[0] == said  # without a model no weight is known
    alone = made.verdicts[0]
    assert alone.reasons[0].message == found.reasons[0].message


def test_kernels_in_half_precision_show_that_a_float32_file_was_built_with_it() -> None:
    log = build(*tuned("a", (DENSE, 0.02)), eligible("a"), chosen())
    found = verdict(big(math_dtype="float32"), build=log)
    assert codes(found) == ["NO_SPARSE_TACTIC", "QUALIFIES"]
    assert "accept dense" in (found.remedy or "")


def test_a_tactic_skipped_for_workspace_states_both_sizes() -> None:
    log = build(*tuned("a", (DENSE, 0.02)), eligible("a"), chosen())
    skipped = SkippedTactic(
        line=9,
        layer="a",
        id="0x0000000000000004",
        reason=SkipReason.WORKSPACE,
        requested_bytes=7_527_202_816,
        available_bytes=1_073_741_824,
    )
    found = verdict(big(), build=replace(log, skipped_tactics=(skipped,)))
    assert codes(found)[0] == "TACTIC_SKIPPED"
    assert "7,527,202,816 bytes wanted, 1,073,741,824" in found.reasons[0].message
    assert "7,179 MiB" in (found.remedy or "")


# --- not eligible, not there, not known -----------------------------------------------------------


def test_grouped_convolutions_are_not_listed_as_the_rules_say() -> None:
    """NVIDIA/TensorRT issue 4054."""
    log = build(eligible("dense"), chosen())
    grouped = conv("grouped", 128, 128, groups=32, node="grouped")
    found = joined(report(grouped, big("dense")), build=log)
    first = found.verdicts[0]
    assert (first.verdict, first.evidence) == (NOT_ELIGIBLE, Evidence.MEASURED)
    assert codes(first) == ["GROUPED_CONV", "NOT_LISTED"]
    assert totals_of(found).disagreements == ()


def test_bert_in_float_on_tensorrt_8_lists_nothing_and_chooses_nothing() -> None:
    """NVIDIA/TensorRT issues 2271 and 1340: both lists empty."""
    log = build(
        "(Sparsity) Layers eligible for sparse math: ",
        "(Sparsity) TRT inference plan picked sparse implementation for layers: ",
        version="v8402",
    )
    weight = matmul("query", 768, 768, node="query", math_dtype="float32")
    predicted = report(weight, tensorrt_version="8.4.2")
    (found,) = joined(predicted, build=log).verdicts
    assert (found.verdict, found.evidence) == (NOT_ELIGIBLE, Evidence.MEASURED)
    assert found.predicted is UNKNOWN
    assert codes(found) == ["NOT_LISTED", "UNSUPPORTED_OP", "DTYPE"]
    assert "TensorRT 10.3 or later" in (found.remedy or "")
    assert verdict_note(found) == ""


def test_a_product_that_tensorrt_8_lists_in_float_is_eligible_and_no_surprise() -> None:
    """NVIDIA/TensorRT issues 4054, 4056: MatMul_401 stands first in the list."""
    log = build(
        "(Sparsity) Layers eligible for sparse math: MatMul_401, conv",
        "(Sparsity) TRT inference plan picked sparse implementation for layers: MatMul_401",
        version="v8601",
        options="--fp16 --verbose",
    )
    found = verdict(matmul("MatMul_401", 768, 768, node="MatMul_401"), build=log)
    assert (found.verdict, found.predicted) == (CHOSEN, UNKNOWN)
    assert found.reasons[0].code is ReasonCode.QUALIFIES
    assert verdict_note(found) == ""


def test_int8_with_a_quantised_output_is_chosen_and_without_is_not() -> None:
    log = build(eligible("with", "without"), chosen("with"))
    quantised = matmul("with", 1536, 1536, node="with", **int8(output=True))
    plain = matmul("without", 1536, 1536, node="without", **int8(output=False))
    a, b = joined(report(quantised, plain), build=log).verdicts
    assert (a.verdict, b.verdict) == (CHOSEN, ELIGIBLE)
    assert "INT8_OUTPUT_NOT_QUANTIZED" in codes(b)
    assert "quantise its output" in (b.remedy or "")


@pytest.mark.parametrize(
    "shows", [layer("b", SPARSE), layer("b", has_sparse_weights=True)], ids=["kernel", "weights"]
)
def test_an_engine_that_shows_sparse_weights_was_allowed_them(shows: EngineLayer) -> None:
    told = information(layer("a", DENSE), shows)
    silent = replace(build(), sparsity=SparsityFlag.UNKNOWN)
    loaded = build(options="--verbose --loadEngine=m.plan")
    for log in (None, silent, loaded):
        assert build_facts(log, told.layers).sparse_weights is True
        a = joined(report(big("a"), big("b")), layers=told, build=log).verdicts[0]
        assert (a.verdict, a.evidence) == (ELIGIBLE, Evidence.PREDICTED)
        assert codes(a) == ["LOG_SILENT", "QUALIFIES"]
        assert status_of(a) is LayerStatus.DOUBTFUL
        assert "--sparsity=enable" not in (a.remedy or "")


def test_an_engine_that_shows_no_sparse_weights_may_not_have_been_allowed_them() -> None:
    told = information(layer("a", DENSE), layer("b", DENSE))
    assert build_facts(None, told.layers).sparse_weights is None
    a = joined(report(big("a"), big("b")), layers=told).verdicts[0]
    assert codes(a) == ["QUALIFIES", "LOG_SILENT"]
    assert status_of(a) is LayerStatus.CAN
    assert "--sparsity=enable" in (a.remedy or "")


def test_the_list_of_the_native_layers_says_nothing_of_a_myelin_region() -> None:
    nodes = chain(("a", "Conv"), ("b", "MatMul"), ("c", "Softmax"))
    layers = information(layer("a"), layer("{ForeignNode[b...c]}", layer_type="Myelin"))
    log = build(eligible("a"), chosen())
    weight = matmul("b", 512, 512, node="b")
    _, b = joined(report(big("a"), weight), build=log, layers=layers, nodes=nodes).verdicts
    assert (b.verdict, b.evidence) == (ELIGIBLE, Evidence.PREDICTED)
    assert b.engine_layer == "{ForeignNode[b...c]}"
    assert "Myelin" in b.reasons[-1].message


def test_a_node_of_constants_alone_is_folded_into_the_layer_behind_it() -> None:
    nodes = (
        node("fold", "MatMul", "w1", "w2", constants=("w1", "w2")),
        node("a", "Conv", "x", "fold_out"),
    )
    weights = (matmul("fold", 512, 512, node="fold"), big("a"))
    layers = information(layer("a + relu", DENSE))
    fold, _ = joined(report(*weights), layers=layers, nodes=nodes).verdicts
    assert (fold.verdict, fold.evidence) == (VerdictName.NOT_IN_ENGINE, Evidence.MEASURED)
    assert "folded into a +" in fold.reasons[0].message


def test_a_layer_is_not_called_absent_while_a_layer_of_the_engine_is_unmatched() -> None:
    layers = information(layer("b", DENSE), layer("__myl_FcMul_myl0_1", layer_type="kgen"))
    found = joined(report(big("a"), big("b")), layers=layers)
    assert found.verdicts[0].evidence is Evidence.PREDICTED
    assert found.unmatched_engine_layers == ("__myl_FcMul_myl0_1",)


# --- what is no evidence --------------------------------------------------------------------------


def test_a_log_of_another_model_measures_nothing_and_the_report_says_so_first() -> None:
    log = build(*tuned("x + relu", (DENSE, 0.02)), eligible("x + relu", "pool"), chosen("y"))
    nodes = chain(("a", "Conv"), ("relu2", "Relu"), ("pool", "MaxPool"))
    found = joined(report(big()), build=log, nodes=nodes, profile=profile(pool=1.0))
    (a,) = found.verdicts
    assert (a.verdict, a.evidence) == (ELIGIBLE, Evidence.PREDICTED)
    assert codes(a) == ["QUALIFIES", "LOG_SILENT"]
    assert "of 3 engine names" in found.notes[0]
    assert found.not_evidence == found.notes[0]
    assert found.totals is None
    assert found.unmatched_engine_layers == ("x + relu", "y")


def test_kernels_that_the_builder_names_itself_do_not_tell_another_model() -> None:
    found = joined(report(big()), layers=information(layer("__myl_Conv_myl0_1", DENSE)))
    assert found.not_evidence is None


def test_layers_listed_for_myelin_count_among_those_a_layer_is_missing_from() -> None:
    log = build(eligible("m", foreign=True), chosen(foreign=True), eligible("b"), chosen())
    a, _, _ = joined(report(big("a"), big("b"), big("m")), build=log).verdicts
    assert "among the 2 layers" in a.reasons[0].message
    sources = (a.reasons[0].source or "").split("; ")
    assert [source.split(": ")[0] for source in sources] == ["build.log:3", "build.log:5"]


def test_a_failed_build_measures_nothing_and_its_first_error_comes_first() -> None:
    log = replace(
        build(eligible("a", "b"), chosen("a")),
        outcome=BuildOutcome.FAILED,
        errors=(LogMessage(line=9, text="out of\nmemory"), LogMessage(line=10, text="again")),
    )
    found = joined(report(big("a"), big("b")), build=log)
    assert "line 9: out of" in found.notes[0]
    assert "no engine:" in found.engine
    assert found.totals is None
    for v in found.verdicts:
        assert (v.verdict, v.evidence) == (ELIGIBLE, Evidence.PREDICTED)
        assert v.reasons[-1].code is ReasonCode.LOG_SILENT
        assert v.reasons[-1].message.startswith("the build failed")
    alone = report_from_log(log)
    assert [(v.verdict, v.evidence) for v in alone.verdicts] == [(UNKNOWN, None)] * 2


def test_a_log_without_an_end_proves_what_it_lists_and_nothing_of_the_rest() -> None:
    log = replace(build(eligible("b"), chosen("b")), outcome=BuildOutcome.UNFINISHED)
    found = joined(report(big("a"), big("b")), build=log)
    a, b = found.verdicts
    assert (a.verdict, a.evidence) == (ELIGIBLE, Evidence.PREDICTED)
    assert a.reasons[-1].message.startswith("the log ends before")
    assert (b.verdict, b.evidence) == (CHOSEN, Evidence.MEASURED)
    assert found.notes[0].startswith("build.log ends before")


def test_a_cut_list_of_engine_layers_does_not_tell_that_a_layer_is_absent() -> None:
    log = replace(build(), outcome=BuildOutcome.UNFINISHED, engine_layers=(layer("b", DENSE),))
    a, _ = joined(report(big("a"), big("b")), build=log).verdicts
    assert (a.verdict, a.evidence) == (ELIGIBLE, Evidence.PREDICTED)


LOGS: tuple[Build | None, ...] = (
    None,
    build(),
    build(flag="Disabled"),
    build(eligible("a", "b + relu"), chosen("a", count=0)),
    build(eligible("a"), chosen("a"), flag="Forced"),
    build("(Sparsity) Found 3 layer(s) eligible to use sparse tactics"),
    build(eligible("x, y", "PWN("), chosen("stranger")),
)
LAYERS = (
    None,
    information(),
    information(layer("a", SPARSE), layer("b", DENSE), layer("c", has_sparse_weights=True)),
    information(layer("{ForeignNode[a...c]}", layer_type="Myelin")),
    information(layer("stranger", DENSE)),
)
PROFILES = (None, profile(a=1.0, b=2.0), profile(stranger=0.0))
GRAPHS = (
    (),
    chain(("a", "Conv"), ("b", "Conv"), ("relu", "Relu"), ("c", "Conv")),
    chain(("z", "Conv")),
)


@given(
    st.sampled_from(LOGS),
    st.sampled_from(LAYERS),
    st.sampled_from(PROFILES),
    st.sampled_from(PROFILES),
    st.sampled_from(GRAPHS),
)
@settings(max_examples=100, deadline=None)
def test_every_row_gets_one_verdict_with_a_reason_for_any_evidence(
    log: Any, layers: Any, times: Any, dense_times: Any, nodes: Any
) -> None:
    weights = [big("a"), big("b"), big("c"), conv("g", 128, 128, groups=32)]
    predicted = report(*weights)
    found = joined(
        predicted, build=log, layers=layers, profile=times, dense_profile=dense_times, nodes=nodes
    )
    assert [v.layer for v in found.verdicts] == ["a", "b", "c", "g"]
    assert [v.predicted for v in found.verdicts] == [v.verdict for v in predicted.verdicts]
    for v in found.verdicts:
        assert v.reasons
        assert (v.evidence is None) == (v.verdict is UNKNOWN)
        if log is None and layers is None:
            assert v.evidence is Evidence.PREDICTED
    assert found.summary.layers == 4
    assert found.totals is not None or found.not_evidence is not None
    for share in found.totals.shares if found.totals is not None else ():
        parts = share.runs_sparse + share.eligible + share.never + share.unknown + share.other
        assert parts == pytest.approx(share.total)
