"""Logs that tell of a model in pieces: regions of Myelin and DLA, several compilations."""

from __future__ import annotations

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
    report_from_log,
    tuned,
)
from support.report_cases import big, broken, codes, conv, grouped, int8, matmul, report, totals_of

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report
from twofour.eligibility.remedies import PRUNE_FUSED
from twofour.records.eligibility import EligibilityReport, Evidence, Verdict, VerdictName
from twofour.records.weights import Weight

CHOSEN, ELIGIBLE = VerdictName.CHOSEN, VerdictName.ELIGIBLE
NODES = chain(
    *((f"/{name}/Conv", "Conv") for name in "abc"),
    *(("/relu/Relu", "Relu"), ("/d/Conv", "Conv"), ("/e/Gemm", "Gemm")),
)
MODEL = report(
    *(big(f"/{name}/Conv") for name in "abcd"),
    matmul("/e/Gemm", 512, 512, node="/e/Gemm", op="Gemm"),
)
LISTS = eligible("/a/Conv", "/b/Conv"), chosen("/a/Conv")
C_TO_D = "{ForeignNode[/c/Conv.../d/Conv]}"


def timed(region: str) -> tuple[str, str]:
    runner = f"--------------- Timing Runner: {region} (Myelin[0x80000023])"
    return runner, "Tactic: 0x0000000000000000 Time: 0.0114"


def measured(found: EligibilityReport) -> str:
    """The layers of which something was measured."""
    return "".join(v.layer[1] for v in found.verdicts if v.evidence is Evidence.MEASURED)


RULE = "the DLA runs only INT8 convolutions of more than 64 input channels sparse"


@pytest.mark.parametrize("version", ["v8510", "v100300", "v101601"])
def test_no_list_says_what_is_eligible_on_dla(version: str) -> None:
    on_dla = information(*(layer(n.name) for n in NODES if n.name[1] not in "cd"))
    region = layer(C_TO_D, layer_type="DLA")
    given = {"version": version, "options": "--int8 --verbose"}
    listed = build(*tuned("/a/Conv", (DENSE, 0.1)), *LISTS, **given)
    seen = build(f"[DlaLayer] {C_TO_D}", *tuned("/a/Conv", (DENSE, 0.1)), *LISTS, **given)
    both = information(*on_dla.layers, region)
    for found in (
        joined(MODEL, build=seen, nodes=NODES),
        joined(MODEL, build=listed, layers=both, nodes=NODES),
    ):
        assert measured(found) == "abe"
        assert [v.engine_layer for v in found.verdicts[2:4]] == [C_TO_D] * 2
        assert found.verdicts[2].reasons[-1].message.endswith(f"; {RULE}")
        assert "uses_structured_sparsity" in (found.verdicts[2].remedy or "")


@pytest.mark.parametrize(
    ("weight", "precision", "why"),
    [
        (big("a"), "--fp16", "Conv, C=512, float16"),
        (conv("a", 64, 512, node="a", **int8()), "--int8", "Conv, C=64, int8"),
        (matmul("a", 512, 512, node="a", **int8()), "--int8", "MatMul, C=512, int8"),
    ],
)
def test_what_the_dla_cannot_run_sparse_has_a_reason_and_a_remedy(
    weight: Weight, precision: str, why: str
) -> None:
    log = build("[DlaLayer] a", eligible("b"), chosen(), options=precision)
    found = joined(report(weight, big("b")), build=log).verdicts[0]
    assert (found.verdict, codes(found)) == (VerdictName.NOT_ELIGIBLE, ["ON_DLA"])
    assert found.reasons[0].message == f"{RULE}: this is {why}"
    assert "(without --useDLACore)" in (found.remedy or "")


@pytest.mark.parametrize("version", ["v100900", "v101300", "v101601", "v110100"])
def test_a_myelin_region_of_the_log_alone_needs_a_list_of_its_own(version: str) -> None:
    stated = "".join(f"[ONNX Layer: /{name}]" for name in ("c/Conv", "d/Conv"))
    metadata = f"ForeignNode {C_TO_D} metadata: {stated}"
    other = "{ForeignNode[/e/Gemm]}"
    own = eligible("/e/Gemm", foreign=True), chosen(foreign=True)
    for lines, expected in (
        (timed(C_TO_D), "abe"),
        ((metadata, *timed(C_TO_D)), "abe"),
        ((metadata.replace(stated, stated[:21]), *timed(C_TO_D)), "abde"),
        ((*timed(C_TO_D), *own), "abcde"),
        ((*timed(C_TO_D), *timed(other), *own), "abe"),
        ((*timed(C_TO_D), *timed(other)), "ab"),
        ((*timed(C_TO_D), *tuned("/d/Conv", (DENSE, 0.1))), "abde"),
    ):
        found = joined(MODEL, build=build(*lines, *LISTS, version=version), nodes=NODES)
        assert measured(found) == expected, lines


@pytest.mark.parametrize(
    ("version", "options", "expected"),
    [
        ("v100300", "", "abcd"),
        ("v101300", "", "abcd"),
        ("v100300", "--verbose", "abcde"),
        ("v101601", "", "abcde"),
        ("v8601", "", "abcde"),
    ],
)
def test_myelins_list_may_be_missing_in_a_log_that_is_not_verbose(
    version: str, options: str, expected: str
) -> None:
    more = tuned("/a/Conv", (DENSE, 0.1)) if options else ()
    log = build(*more, *LISTS, version=version, options=options)
    assert measured(joined(MODEL, build=log, nodes=NODES)) == expected


@pytest.mark.parametrize(
    ("choices", "verdict"), [("1", CHOSEN), ("11", CHOSEN), ("10", ELIGIBLE), ("01", ELIGIBLE)]
)
def test_of_several_compilations_every_one_must_choose_sparse(
    choices: str, verdict: VerdictName
) -> None:
    lines = []
    for choice in choices:
        names = ["/e/Gemm"] * int(choice)
        lines += [eligible("/e/Gemm", foreign=True), chosen(*names, foreign=True)]
    found = joined(MODEL, build=build(*lines, *LISTS), nodes=NODES).verdicts[4]
    assert (found.verdict, found.evidence) == (verdict, Evidence.MEASURED)
    assert ("LOG_SILENT" in codes(found)) is (verdict is ELIGIBLE)


# --- layers that run as one, and what silence proves ----------------------------------------------


QKV = (
    *(node(n, "MatMul", "x", f"{n}.w", constants=(f"{n}.w",)) for n in "qkv"),
    node("o", "MatMul", "q_out", "o.w", constants=("o.w",)),
)


def verdicts(evidence: BuildEvidence) -> dict[str, Verdict]:
    weights = [matmul(n.name, 512, 512, node=n.name) for n in QKV]
    return {v.layer: v for v in join_report(report(*weights), evidence).verdicts}


@pytest.mark.parametrize("name", ["q || k || v", "v+q+k", "{ForeignNode[q]} || k + k2 || v + v2"])
def test_layers_that_share_an_input_and_an_engine_layer_name_each_other(name: str) -> None:
    log = build(eligible(name, "o"), chosen(name))
    found = verdicts(BuildEvidence(build=log, nodes=QKV))
    others = [n for n in "qkv" if codes(found[n])[-1] == "FUSED_SIBLINGS"]
    assert len(others) >= 2
    assert "FUSED_SIBLINGS" not in codes(found["o"])
    said = found["v"].reasons[-1]
    assert said.message.startswith("runs as one engine")
    assert "k: they" in said.message
    assert (said.source or "").startswith("build.log:4: ")
    assert (said.source or "").endswith(f": {name}")


def test_metadata_that_names_several_products_shows_those_of_one_input_alone() -> None:
    sources = tuple(n.name for n in QKV)
    layers = information(layer("__myl_Fc_myl0_1", SPARSE, onnx_nodes=sources))
    found = verdicts(BuildEvidence(layers=layers, nodes=QKV))
    assert "with k and v:" in found["q"].reasons[-1].message
    assert found["q"].reasons[-1].source == "layers.json: __myl_Fc_myl0_1"
    assert "FUSED_SIBLINGS" not in codes(found["o"])


@pytest.mark.parametrize("spoiler", [broken("k"), grouped("k")])
def test_a_layer_fused_with_one_that_cannot_run_sparse_names_that_one(spoiler: Any) -> None:
    nodes = tuple(node(n, "Conv", "x", f"{n}.weight", constants=(f"{n}.weight",)) for n in "qk")
    predicted = report(conv("q", 512, 512, node="q"), spoiler)
    named = build(*tuned("q || k", (DENSE, 0.02)), eligible(), chosen())
    shown = information(
        layer("q || k", DENSE, has_sparse_weights=False),
        layer("z", SPARSE, has_sparse_weights=True),
    )
    for evidence in (
        BuildEvidence(build=named, nodes=nodes),
        BuildEvidence(layers=shown, nodes=nodes),
    ):
        found = join_report(predicted, evidence)
        q = found.verdicts[0]
        assert (q.verdict, codes(q)) == (VerdictName.NOT_ELIGIBLE, ["FUSED_SIBLINGS", "NOT_LISTED"])
        assert "; of them k cannot run sparse" in q.reasons[0].message
        assert q.remedy == f"{PRUNE_FUSED.text}: k"
        assert totals_of(found).disagreements == ()


def one(evidence: BuildEvidence) -> Verdict:
    return join_report(report(conv("a", 512, 512, node="a")), evidence).verdicts[0]


def test_dense_was_faster_only_where_both_kinds_of_kernel_were_timed() -> None:
    silent = build(eligible("a"), chosen())
    assert codes(one(BuildEvidence(build=silent)))[0] == "DENSE_TAKEN"
    named = BuildEvidence(build=silent, layers=information(layer("a", DENSE)))
    assert codes(one(named))[0] == "DENSE_TAKEN"
    message = one(named).reasons[0].message
    assert f"the dense kernel {DENSE}" in message
    assert "no times of both" in message
    sparse_alone = build(*tuned("a", (SPARSE, 0.03)), eligible("a"), chosen())
    assert "DENSE_FASTER" not in codes(one(BuildEvidence(build=sparse_alone)))


def test_a_timing_cache_that_hides_the_times_does_not_make_dense_the_faster() -> None:
    log = build(
        "=============== Computing costs for a",
        "a [Half(1) -> Half(1)] got cached result: CaskConvolution, tactic 0x01, 0.002 ms",
        eligible("a"),
        chosen(),
    )
    found = one(BuildEvidence(build=log))
    assert (found.verdict, codes(found)[0]) == (VerdictName.ELIGIBLE, "DENSE_TAKEN")
    assert "a timing cache hides" in found.reasons[0].message
    assert "delete the timing cache" in (found.remedy or "")


@pytest.mark.parametrize("version", ["v100300", "v100700"])
def test_a_count_of_0_without_names_is_no_proof_where_counts_are_wrong(version: str) -> None:
    count = "(Sparsity) Chose 0 layer(s) using sparse tactics"
    found = one(BuildEvidence(build=build(eligible("a"), count, version=version)))
    assert (found.verdict, codes(found)) == (VerdictName.ELIGIBLE, ["QUALIFIES", "LOG_SILENT"])
    assert "TensorRT 10.3" in found.reasons[1].message


def test_a_count_of_0_is_a_proof_where_counts_are_right_or_an_empty_list_follows() -> None:
    count = "(Sparsity) Chose 0 layer(s) using sparse tactics"
    later = one(BuildEvidence(build=build(eligible("a"), count, version="v101601")))
    listed = one(BuildEvidence(build=build(eligible("a"), f"{count}:", version="v100300")))
    assert [codes(v)[0] for v in (later, listed)] == ["DENSE_TAKEN"] * 2


def test_without_a_model_a_layer_of_a_further_profile_is_no_row_of_its_own() -> None:
    log = build(eligible("a", "b"), eligible("a [profile 1]"), chosen("a [profile 1]"))
    found = report_from_log(log)
    assert [(v.layer, v.verdict.value) for v in found.verdicts] == [
        *(("a", "chosen"), ("b", "eligible"))
    ]
