"""Logs that tell of a model in pieces: regions of Myelin and DLA, several compilations."""

from __future__ import annotations

import pytest
from support.join_cases import (
    DENSE,
    build,
    chain,
    chosen,
    eligible,
    information,
    joined,
    layer,
    tuned,
)
from support.report_cases import big, codes, conv, int8, matmul, report

from twofour.records.eligibility import EligibilityReport, Evidence, VerdictName
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
