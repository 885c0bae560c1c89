"""What evidence is worth: of overwritten weights, of another model, of parts, of silent lists."""

from __future__ import annotations

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
    joined,
    layer,
    node,
    profile,
    report_from_log,
    tuned,
)
from support.report_cases import big, broken, check, codes, gpu, grouped, matmul, report, totals_of

from twofour.eligibility.build_evidence import BuildEvidence, choose_build
from twofour.eligibility.build_facts import build_facts
from twofour.eligibility.join import report_from_engine
from twofour.eligibility.layer_gates import Gates, missed_gates
from twofour.errors import BadInputError
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.log import BuildOutcome, EngineLayer, SparsityFlag
from twofour.records.weights import Weight
from twofour.reports.eligibility_words import advice_lines, title_line, totals
from twofour.reports.log_document import answer

CHOSEN, ELIGIBLE = VerdictName.CHOSEN, VerdictName.ELIGIBLE
NOT_ELIGIBLE, UNKNOWN = VerdictName.NOT_ELIGIBLE, VerdictName.UNKNOWN
SWITCH_ON = "build with sparse weights allowed (trtexec --sparsity=enable, SPARSE_WEIGHTS)"


def names(found: EligibilityReport) -> list[VerdictName]:
    return [v.verdict for v in found.verdicts]


# --- overwritten weights --------------------------------------------------------------------------


def test_what_runs_on_overwritten_weights_says_nothing_of_the_models_own() -> None:
    log = build(eligible("a", "b", "g"), chosen("a", "b", "g"), flag="Forced")
    layers = information(layer("a", SPARSE), layer("b", SPARSE), layer("g", DENSE))
    for evidence in ({"build": log}, {"build": log, "layers": layers}):
        found = joined(report(big("a"), broken("b"), grouped()), **evidence)
        assert names(found) == [ELIGIBLE, NOT_ELIGIBLE, NOT_ELIGIBLE]
        assert [v.evidence for v in found.verdicts] == [Evidence.PREDICTED] * 3
        assert all("SPARSITY_FORCED" in codes(v) for v in found.verdicts)
        assert codes(found.verdicts[0]) == ["QUALIFIES", "SPARSITY_FORCED"]
        assert codes(found.verdicts[1]) == ["PATTERN_BROKEN", "SPARSITY_FORCED"]
        assert [s.runs_sparse for s in totals_of(found).shares] == [0.0]
        assert advice_lines(found)[0].startswith("WARNING: --sparsity=force overwrote")


def test_choices_of_a_pass_that_was_not_kept_do_not_count() -> None:
    log = build(eligible("a"), chosen("a"), eligible("a"), chosen())
    undone = replace(log.sparsity_lines[1], discarded=True)
    lines = (log.sparsity_lines[0], undone, *log.sparsity_lines[2:])
    for kept, verdict in ((log, CHOSEN), (replace(log, sparsity_lines=lines), ELIGIBLE)):
        assert names(joined(report(big()), build=kept)) == [verdict]
    only = replace(log, sparsity_lines=lines[:2])
    (found,) = joined(report(big()), build=only).verdicts
    assert codes(found) == ["QUALIFIES", "LOG_SILENT"]


def test_of_passes_that_were_not_compared_only_what_both_chose_is_chosen() -> None:
    log = build(eligible(*"abc"), chosen("a", "b"), eligible(*"abc"), chosen("b", "c"))
    lines = tuple(replace(line, discarded=None) for line in log.sparsity_lines)
    model = report(*map(big, "abc"))
    for listed, last in ((lines, CHOSEN), (lines[:3], ELIGIBLE)):
        found = joined(model, build=replace(log, sparsity_lines=listed))
        assert names(found) == [ELIGIBLE, last, ELIGIBLE]
        silent = found.verdicts[0].reasons[1]
        assert "which pass of the" in silent.message
        assert "let the build finish" in (found.verdicts[0].remedy or "")


# --- names that lead nowhere ----------------------------------------------------------------------


def unlisted(log: Any, **evidence: Any) -> Verdict:
    found = joined(report(big("a"), big("b")), build=log, **evidence)
    return found.verdicts[0]


@pytest.mark.parametrize(
    "name",
    ["stranger", "[CONVOLUTION]-[aten_ops.conv.default]-[elsewhere/convolution]", "__myl_FcAdd"],
)
def test_a_layer_may_be_behind_a_listed_name_that_leads_to_none(name: str) -> None:
    log = build(eligible("b", name), chosen("b"))
    found = unlisted(log, nodes=chain(("a", "Conv"), ("b", "Conv")))
    assert (found.verdict, found.evidence) == (ELIGIBLE, Evidence.PREDICTED)
    assert codes(found)[-1] == "LOG_SILENT"
    assert "list of eligible layers" in found.reasons[-1].message


@pytest.mark.parametrize(
    "name", ["b.", "b |", "a || b |", "b (sparse)", "__myl_FcAdd_myl0_3", "[CONV]-[aten]-[x/conv]"]
)
def test_an_eligible_layer_may_be_behind_a_chosen_name_that_leads_to_none(name: str) -> None:
    nodes = chain(("a", "Conv"), ("b", "Conv"))
    log = build(eligible("a", "b"), chosen(name))
    given: list[dict[str, Any]] = [{"nodes": nodes}, {}]
    for evidence in given:
        b = joined(report(big("a"), big("b")), build=log, **evidence).verdicts[1]
        assert (b.verdict, codes(b)) == (ELIGIBLE, ["QUALIFIES", "LOG_SILENT"])
        assert "list of chosen layers" in b.reasons[1].message
    alone = {v.layer: v for v in report_from_log(log).verdicts}
    assert codes(alone["b"]) == ["QUALIFIES", "LOG_SILENT"]
    known = joined(report(big("b")), build=log, layers=information(layer("b", DENSE)))
    assert codes(known.verdicts[0])[0] == "DENSE_TAKEN"


def test_a_strange_name_beside_a_layer_on_one_list_is_another_layer() -> None:
    log = build(eligible("a", "stranger"), chosen("stranger"))
    found = joined(report(big("a")), build=log, nodes=chain(("a", "Conv")))
    assert codes(found.verdicts[0]) == ["DENSE_TAKEN", "QUALIFIES"]


@pytest.mark.parametrize("end", ["b", "`b`", "**b**", "b**", "b`"])
def test_marks_of_markdown_are_no_part_of_a_name(end: str) -> None:
    log = build(eligible("a", end), chosen(end), chosen("**"))
    assert names(joined(report(big("a"), big("b")), build=log)) == [ELIGIBLE, CHOSEN]
    assert log.chosen == ("b",)
    assert build(eligible("a"), chosen("**", count=0)).chosen == ()


def test_a_layer_is_not_listed_where_every_name_leads_to_another() -> None:
    found = unlisted(build(eligible("b + relu", "c"), chosen()), nodes=chain(("c", "MatMul")))
    assert (found.verdict, found.evidence) == (NOT_ELIGIBLE, Evidence.MEASURED)


# --- the wrong file -------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [broken("b"), (grouped("b"), check(grouped("b")))])
def test_a_ruled_out_layer_that_is_chosen_asks_whether_the_files_belong_together(
    weight: tuple[Weight, Any],
) -> None:
    by_line = joined(report(big(), weight), build=build(eligible("a", "b"), chosen("b")))
    by_kernel = joined(
        report(big(), weight), layers=information(layer("a", DENSE), layer("b", SPARSE))
    )
    listed = joined(report(big(), weight), build=build(eligible("a", "b"), chosen("a")))
    for found in (by_line, by_kernel, listed):
        assert "from this ONNX file" in (found.verdicts[1].remedy or "")


def test_broken_weights_that_run_sparse_are_noted_for_the_whole_report() -> None:
    found = joined(report(big(), broken("b")), build=build(eligible("a", "b"), chosen("b")))
    assert found.notes[0].startswith("WARNING: the engine calls 1 layer eligible or chosen")


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"build": build(eligible("x", "y"), chosen("x"))}, "the log and"),
        ({"layers": information(layer("/x/Conv", SPARSE), layer("/y", DENSE))}, "the layer info"),
        ({"dense_build": build(*tuned("x", (DENSE, 0.02)), flag="Disabled")}, "the dense log and"),
    ],
    ids=["log", "layer information", "dense log"],
)
def test_a_file_of_another_model_is_left_aside_with_a_warning_and_the_others_count(
    other: dict[str, Any], note: str
) -> None:
    own = {"build": build(eligible("a"), chosen("a")), "layers": information(layer("a", SPARSE))}
    found = joined(report(big()), **{**own, **other})
    assert names(found) == [CHOSEN]
    assert found.unmatched_engine_layers == ()
    assert found.not_evidence is None
    assert found.notes[0].startswith(f"WARNING: {note}")
    file = "layers.json" if "layers" in other else "build.log"
    assert found.notes[0].endswith(f"; {file} is left aside")


def test_a_layer_that_the_log_times_is_not_absent_from_the_engine() -> None:
    log = build(*tuned("c", (DENSE, 0.02)), eligible("a"), chosen("a"))
    part = information(layer("a", SPARSE))
    found = joined(report(big("a"), big("c")), build=log, layers=part)
    assert names(found) == [CHOSEN, NOT_ELIGIBLE]
    assert codes(found.verdicts[1])[0] == "NOT_LISTED"


# --- engine and GPU -------------------------------------------------------------------------------


def test_gpu_and_capability_come_from_the_log_and_not_from_this_machine() -> None:
    log = replace(build(eligible("a"), chosen("a")), gpu="RTX 3090", compute_capability=(8, 6))
    here = report(big(), engine="no engine", gpu=gpu("NVIDIA H200", 9, 0))
    found = joined(here, build=log)
    assert found.gpu is None
    assert "tensorrt 10.16.1 (trtexec) on RTX 3090 (compute capability 8.6)" in title_line(found)
    same = replace(log, gpu="NVIDIA H200", compute_capability=(9, 0))
    assert joined(here, build=same).gpu == gpu("NVIDIA H200", 9, 0)


def test_an_engine_without_a_stated_version_is_an_engine_all_the_same() -> None:
    log = replace(build(eligible("a"), chosen("a")), tensorrt_version=None)
    found = joined(report(big(), engine="no engine"), build=log)
    unstated = "tensorrt, version not stated"
    assert found.engine == f"{unstated} (trtexec)"
    layers = joined(report(big(), engine="no engine"), layers=information(layer("a", DENSE)))
    assert layers.engine == unstated
    assert report_from_log(log).engine == f"{unstated} (trtexec)"
    known = joined(report(big()), build=log, built_with="tensorrt 10.3.0 on Orin")
    assert known.engine == "tensorrt 10.3.0 on Orin"


# --- switched off, or on an old GPU ---------------------------------------------------------------


def test_what_the_model_itself_lacks_comes_before_the_switch() -> None:
    off = build(flag="Disabled")
    turing = replace(build(eligible(), chosen()), compute_capability=(7, 5), gpu="Tesla T4")
    for log, code, step in (
        (off, "SPARSITY_OFF", SWITCH_ON),
        (turing, "GPU_HAS_NO_SPARSE", "run on a GPU of compute capability 8.0 or later"),
    ):
        found = joined(report(big("a"), broken("b"), grouped()), build=log)
        a, b, g = found.verdicts
        assert names(found) == [NOT_ELIGIBLE] * 3
        assert codes(a) == [code]
        assert codes(b) == ["PATTERN_BROKEN", code]
        assert codes(g) == ["GROUPED_CONV", code]
        assert (b.remedy or "").startswith("prune it 2:4")
        assert step in (b.remedy or "")
        assert (g.remedy or "").startswith("leave it dense")
        assert step not in (g.remedy or "")


def test_the_summary_and_the_shares_of_a_build_without_sparse_weights_agree() -> None:
    found = joined(report(big("a"), broken("b"), grouped()), build=build(flag="Disabled"))
    (share,) = totals_of(found).shares
    size = 512 * 512 * 9
    assert (share.unknown, share.never) == (0, 2 * size + 128 * 4 * 9)
    assert found.summary.not_eligible == 3
    rows = {t.status.value: (t.layers, t.codes) for t in totals(found)}
    assert rows["not-eligible: runs dense"] == (
        "3 layers",
        ", ".join(("GROUPED_CONV 1", "PATTERN_BROKEN 1", "SPARSITY_OFF 1")),
    )
    assert "not known" not in rows
    assert totals_of(found).disagreements == ()
    assert totals_of(found).confusion == ()
    assert advice_lines(found)[0].startswith("change first: build with")
    assert "(2 layers, 99.9 %" in advice_lines(found)[0]
    assert advice_lines(found)[1].startswith("then (2): prune 2:4")
    assert "(1 layer, 50.0 %" in advice_lines(found)[1]


# --- what the log leaves out, and what would say it -----------------------------------------------


FOUND = "(Sparsity) Found {} layer(s) eligible to use sparse tactics"
CHOSE = "(Sparsity) Chose {} layer(s) using sparse tactics"


def test_each_kind_of_silence_has_its_own_words_and_remedy() -> None:
    unfinished = replace(build(*tuned("a", (DENSE, 0.02))), outcome=BuildOutcome.UNFINISHED)
    whole, cut = "give the whole log", "names are missing in the list of eligible layers"
    counted = f"{whole} with the names behind the counts"
    unnamed = "the log has no names behind its (Sparsity) lines"
    for log, remedy, why in (
        (unfinished, "let the build finish, and give its whole log", "without a word about"),
        (build(FOUND.format(9) + ": b, ....", chosen()), f"{whole}: its list of layers", cut),
        (build(eligible("b", count=9), chosen()), whole, cut),
        (build(*tuned("a", (DENSE, 0.02)), FOUND.format(2), CHOSE.format(1)), counted, unnamed),
        (build(eligible("a", "b"), CHOSE.format(1)), counted, "1 layer without names"),
        (build(), "rebuild with a verbose log", "not verbose enough"),
    ):
        found = joined(report(big("a"), big("b")), build=log).verdicts[0]
        assert (found.remedy or "").startswith(remedy), remedy
        assert why in found.reasons[-1].message


@pytest.mark.parametrize(
    "made", ["Engine generation completed in 8.4 seconds.", "Engine built in 9.2 sec."]
)
def test_a_run_that_fails_after_the_build_leaves_the_lists_as_evidence(made: str) -> None:
    log = build(eligible("a", "b"), chosen("a"), made, ends="FAILED")
    assert log.outcome is BuildOutcome.FAILED
    found = joined(report(big("a"), big("b")), build=log)
    assert names(found) == [CHOSEN, ELIGIBLE]
    assert found.not_evidence is None
    assert missed_gates(found, Gates(min_chosen=0.5)) == ()
    assert answer(log) == "1 layer runs sparse"
    assert build_facts(log, None).built
    none = replace(log, build_s=None)
    assert choose_build((log, none), (), SparsityFlag.ENABLED).build is log


@pytest.mark.parametrize(
    ("dtype", "options", "warned"),
    [
        ("float16", "--verbose", True),
        ("int8", "--verbose", True),
        ("float32", "--verbose", False),
        ("float16", "--verbose --stronglyTyped", False),
        ("float16", "--verbose --fp16", False),
    ],
)
def test_the_log_of_a_float32_build_is_not_of_a_file_of_a_lower_type(
    dtype: str, options: str, warned: bool
) -> None:
    kernel = "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwc"
    log = build(*tuned("a", (kernel, 0.02)), eligible("a"), chosen(), options=options)
    found = joined(report(big("a", math_dtype=dtype)), build=log)
    assert any("FP32 alone" in note for note in found.notes) is warned


CUT_LISTS = (
    (eligible("b", count=9), chosen()),
    (eligible("b || c", count=3), chosen()),
    (eligible(count=2), chosen(count=0)),
    (eligible("b", count=9), eligible("b", count=9), chosen("b")),
    (eligible("b", foreign=True, count=5), chosen(foreign=True), eligible("c"), chosen()),
)


@pytest.mark.parametrize("lines", CUT_LISTS)
def test_a_list_that_lacks_names_says_nothing_of_a_layer_it_leaves_out(
    lines: tuple[str, ...],
) -> None:
    found = joined(report(big("a"), big("b"), big("c")), build=build(*lines))
    a = found.verdicts[0]
    assert (a.verdict, a.evidence, a.remedy is not None) == (ELIGIBLE, Evidence.PREDICTED, True)
    assert codes(a) == ["QUALIFIES", "LOG_SILENT"]
    assert totals_of(found).disagreements == ()
    assert not any("NOT_LISTED" in codes(v) for v in found.verdicts)
    assert missed_gates(found, Gates(min_eligible=1.0)) == ()


def test_a_list_of_choices_that_lacks_names_leaves_the_other_choices_open() -> None:
    log = build(eligible("a", "b", "c"), chosen("b", count=2))
    found = joined(report(big("a"), big("b"), big("c")), build=log)
    assert names(found) == [ELIGIBLE, CHOSEN, ELIGIBLE]
    assert codes(found.verdicts[0]) == ["QUALIFIES", "LOG_SILENT"]
    assert "names are missing" in found.verdicts[0].reasons[-1].message
    with pytest.raises(BadInputError, match="sparse kernels run in"):
        missed_gates(found, Gates(min_chosen=0.5))


def test_a_gate_on_choices_is_refused_where_nothing_says_what_was_chosen() -> None:
    unfinished = replace(build(*tuned("a", (DENSE, 0.02))), outcome=BuildOutcome.UNFINISHED)
    for found in (joined(report(big()), build=unfinished), report(big())):
        with pytest.raises(BadInputError, match="in 1 layer"):
            missed_gates(found, Gates(min_chosen=0.5))
        assert missed_gates(found, Gates(min_eligible=1.0)) == ()


def test_choices_that_are_not_told_are_refused_only_where_they_decide() -> None:
    log = build(eligible("a", "b"), CHOSE.format(1))
    found = joined(report(big("a"), big("b"), grouped()), build=log)
    with pytest.raises(BadInputError, match="in 2 layers"):
        missed_gates(found, Gates(min_chosen=0.5))
    assert "0 of 3 layers" in missed_gates(found, Gates(min_chosen=1.0))[0]
    assert missed_gates(found, Gates(min_chosen=0.0)) == ()
    assert "eligible and dense" not in " ".join(advice_lines(found))


# --- the engine alone -----------------------------------------------------------------------------


def test_groups_in_layer_information_are_the_reason_where_no_model_is_given() -> None:
    layers = information(
        layer("a", SPARSE, has_sparse_weights=True, parameter_type="Convolution", groups=1),
        layer("g", DENSE, has_sparse_weights=False, parameter_type="Convolution", groups=4),
        layer("b", DENSE, has_sparse_weights=False, parameter_type="Convolution", groups=1),
    )
    a, g, b = report_from_engine(BuildEvidence(layers=layers)).verdicts
    assert (a.verdict, g.verdict, b.verdict) == (CHOSEN, NOT_ELIGIBLE, NOT_ELIGIBLE)
    assert codes(g) == ["GROUPED_CONV", "NOT_LISTED"]
    assert g.reasons[0].message.startswith("4 groups: ")
    assert codes(b)[0] == "NOT_LISTED"
    assert "(--onnx)" in (b.remedy or "")


# --- one layer, several kernels -------------------------------------------------------------------

POOL, PRODUCT, ADD = "__myl_MeanResh_myl0_5", "__myl_MulSum_myl0_6", "__myl_Add_myl0_7"


def spread(product: EngineLayer) -> Any:
    return information(
        layer(POOL, "__myl_MeanResh_0x48", layer_type="kgen", onnx_nodes=("gap", "fc")),
        product,
        layer(ADD, "__myl_Add_0x08", layer_type="kgen", onnx_nodes=("fc",)),
    )


def test_a_layer_in_several_kernels_is_not_said_to_be_in_the_first() -> None:
    nodes = (node("gap", "GlobalAveragePool", "x"), node("fc", "Gemm", "gap_out"))
    predicted = report(matmul("fc", 512, 512, node="fc", op="Gemm"))
    layers = spread(layer(PRODUCT, "__myl_MulSum_0x6c", layer_type="kgen", onnx_nodes=("fc",)))
    (found,) = joined(predicted, layers=layers, nodes=nodes, build=build()).verdicts
    assert found.engine_layer == PRODUCT
    kernels = "__myl_MulSum_0x6c, __myl_Add_0x08 and __myl_MeanResh_0x48"
    assert f"the kernels {kernels}, none" in found.reasons[0].message


def test_only_the_time_of_the_sparse_kernel_runs_sparse() -> None:
    nodes = (node("gap", "GlobalAveragePool", "x"), node("fc", "Gemm", "gap_out"))
    predicted = report(matmul("fc", 512, 512, node="fc", op="Gemm"))
    times = profile(**{POOL: 0.002, "fc_myl0_6": 0.004, ADD: 0.001})
    layers = spread(layer("fc_myl0_6", SPARSE))
    found = joined(predicted, layers=layers, nodes=nodes, profile=times)
    share = totals_of(found).shares[-1]
    assert share.runs_sparse == 0.004
    assert share.other == pytest.approx(0.003)
    assert found.verdicts[0].profile_ms == 0.004
