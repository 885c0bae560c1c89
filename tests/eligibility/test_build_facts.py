"""What is known of a build, and that no remedy asks for what was done already."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from support.join_cases import DENSE, build, chosen, eligible, information, joined, layer, tuned
from support.report_cases import check, conv, gpu, int8, matmul, reason, report

from twofour.eligibility import build_facts as support
from twofour.eligibility import remedies
from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.build_facts import (
    NOTHING_KNOWN,
    build_facts,
)
from twofour.eligibility.join import join_report, report_from_engine
from twofour.eligibility.remedies import Remedy, still_to_do
from twofour.records.eligibility import EligibilityReport
from twofour.records.export import Gpu
from twofour.records.log import Build, BuildOutcome, SparsityFlag, TimingCache
from twofour.records.weights import ReasonCode, Weight
from twofour.reports.eligibility_words import advice_lines

STEPS = tuple(r for r in vars(remedies).values() if isinstance(r, Remedy) and r.taken is not None)
_DONE = (
    "Compute Capability: 8.7",
    "Precision: FP32+FP16+INT8",
    "Local timing cache in use. Profiling results in this builder pass will not be stored.",
    "*************** Autotuning format combination: Half(1,1) -> Half(1,1) ***************",
)
_OPTIONS = "--fp16 --int8 --sparsity=enable --verbose --noBuilderCache"
_LAYERS = information(layer("fc", DENSE), layer("conv", DENSE))


def _log(*messages: str) -> Build:
    """A build in which everything was done that a step of STEPS could ask for."""
    return build(*_DONE, *messages, options=_OPTIONS)


def _zoo() -> tuple[Weight, ...]:
    """Layers with every reason that module, graph and rules know, of several types and sizes."""
    noted = [
        matmul(f"noted_{code.value}", 512, 512, reasons=(reason(code),)) for code in ReasonCode
    ]
    typed = [
        conv(f"conv_{dtype}", 512, 512, dtype=dtype, math_dtype=dtype)
        for dtype in ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int4")
    ]
    return (
        *noted,
        *typed,
        matmul("fc", 768, 768, dtype="float32", math_dtype="float32"),
        matmul("int8", 768, 768, **int8(output=False)),
        conv("small", 64, 64),
        conv("grouped", 128, 128, groups=4),
        conv("narrow", 3, 64),
        conv("volume", 256, 256, (3, 3, 3)),
    )


def _reports(log: Build) -> tuple[EligibilityReport, ...]:
    evidence = BuildEvidence(build=log, layers=_LAYERS)
    known = build_facts(log, _LAYERS.layers)
    zoo = [(w, check(w, 3 if w.layer == "narrow" else 0)) for w in _zoo()]
    predicted = report(*zoo, build=known)
    return (predicted, join_report(predicted, evidence), report_from_engine(evidence))


def _logs() -> dict[str, Build]:
    names = [w.layer for w in _zoo()]
    nodes = [w.node or "" for w in _zoo()]
    silent = _log()
    return {
        "silent": silent,
        "eligible and dense": _log(eligible(*names), chosen()),
        "not listed": _log(eligible("fc"), chosen()),
        "none timed sparse": _log(
            *chain(*(tuned(n, (DENSE, 0.1)) for n in nodes)), eligible(*nodes), chosen()
        ),
        "cut list": _log("(Sparsity) Found 9 layer(s) eligible to use sparse tactics: fc, ...."),
        "strange names": _log(eligible("fc", "nobody_knows"), chosen()),
        "hidden by a cache": replace(
            _log(eligible(*names), chosen()), timing_cache=TimingCache(mode="local", hits=9)
        ),
        "failed": replace(silent, outcome=BuildOutcome.FAILED),
    }


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.text[:24])
def test_a_step_that_the_build_shows_as_taken_is_in_no_remedy(step: Remedy) -> None:
    for name, log in _logs().items():
        assert step.taken is not None
        assert step.taken(build_facts(log, _LAYERS.layers)) or name == "failed", name
        if name == "failed" and step in (remedies.BUILD_AND_READ, remedies.BUILD_AND_TIME):
            continue
        for made in _reports(log):
            asked = (*(v.remedy or "" for v in made.verdicts), *advice_lines(made))
            assert step.text not in "\n".join(asked), name


def test_every_step_is_asked_for_where_nothing_is_known_of_a_build() -> None:
    assert still_to_do(NOTHING_KNOWN, *STEPS) == tuple(step.text for step in STEPS)


@pytest.mark.parametrize(
    ("options", "lines", "expected"),
    [
        ("--fp16", (), {"FP16"}),
        ("--int8 --fp16", (), {"FP16", "INT8"}),
        ("--best", (), {"FP16", "INT8"}),
        ("--bf16", (), {"BF16"}),
        ("--verbose", ("Precision: FP32",), set()),
        ("--verbose", ("Precision: FP32+FP16 (obey precision constraints)",), {"FP16"}),
        ("--fp16-looking-file.onnx", (), None),
        ("--verbose", (), None),
        ("", tuned("a", ("ampere_h16816cudnn_128x64_ldg8_relu_v1", 1.0)), {"FP16"}),
        ("", tuned("a", ("sm80_xmma_fprop_interleaved_i8i8_i8i32_f32", 1.0)), {"INT8"}),
        ("", tuned("a", ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize", 1.0)), {"BF16"}),
        ("", tuned("a", ("ampere_scudnn_128x64_relu_small_nn_v1", 1.0)), set()),
        ("", tuned("a", ("sm80_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwc", 1.0)), set()),
        ("", tuned("a", ("sm50_xmma_pooling_max_nhwc_FP32FP32_WINDOWSIZE_3", 1.0)), None),
    ],
)
def test_the_types_of_a_build_come_from_its_options_its_words_or_its_kernels(
    options: str, lines: tuple[str, ...], expected: set[str] | None
) -> None:
    found = build_facts(build(*lines, options=options), None)
    assert found.types == expected


@pytest.mark.parametrize(
    ("version", "options", "lines", "expected"),
    [
        ("v8601", "--fp16", (), False),
        ("v101601", "--stronglyTyped", (), True),
        ("v101601", "", ("Precision: Strongly Typed",), True),
        ("v101601", "--fp16", ("Precision: FP32+FP16",), False),
        ("v101601", "", (), None),
        ("v9300", "", (), None),
        ("v110100", "", (), None),
    ],
)
def test_strong_typing_is_told_by_options_words_and_version(
    version: str, options: str, lines: tuple[str, ...], expected: bool | None
) -> None:
    found = build_facts(build(*lines, options=options, version=version), None)
    assert found.strongly_typed is expected
    assert found.is_strongly_typed is (expected is True or version == "v110100")


def test_forced_sparsity_is_not_sparse_weights_allowed_as_they_are() -> None:
    log = replace(build(), sparsity=SparsityFlag.FORCED)
    assert build_facts(log, None).sparse_weights is False
    off = build(flag="Disabled")
    assert still_to_do(build_facts(off, None), remedies.ALLOW_SPARSE) != ()


# --- where support for 2:4 ended: each time with the source and its date --------------------------


NO_INT8 = "NVIDIA's sparse library has no int8 kernels for compute capability 10.3"
QDQ = "TensorRT 11 quantises by Q/DQ pairs alone: --int8, --calib and calibrators ended with "


ROWS = [row for row in vars(support).values() if isinstance(row, support.Support)]


@pytest.mark.parametrize("row", ROWS)
def test_each_fact_has_a_link_and_a_date(row: support.Support) -> None:
    assert re.search(r"https://\S+", row.source)
    assert re.fullmatch(r"202\d-\d\d(-\d\d)?", row.since)
    assert row.in_words == f"{row.what} ({row.since}, {row.source})"


@pytest.mark.parametrize(
    ("device", "tensorrt", "packages", "said"),
    [
        (gpu("B300", 10, 3), "10.16.1", (), [NO_INT8]),
        (gpu("B200", 10, 0), "11.4.0.106", ("torch",), [QDQ]),
        (None, None, ("vllm",), ["vLLM 0.19 and later refuse compressed 2:4 checkpoints"]),
        (None, "8.6.1", ("tensorrt-llm",), ["TensorRT-LLM builds no TensorRT engines any more: "]),
        (gpu("H200", 9, 0), "8.6.0", (), ["on compute capability 9.0, TensorRT 8.6 has sparse "]),
        (gpu("A100", 8, 0), "8.6.0", ("torch",), []),
        (gpu("H200", 9, 0), "10.16.1", ("torch",), []),
    ],
)
def test_doctor_says_what_concerns_this_machine(
    device: Gpu | None, tensorrt: str | None, packages: tuple[str, ...], said: list[str]
) -> None:
    found = support.of_machine(device, tensorrt, packages)
    assert len(found) == len(said)
    assert all(map(str.startswith, found, said))


@pytest.mark.parametrize(
    ("fact", "version", "given", "is_said"),
    [
        (support.FORCE_DEPRECATED, "v100001", {"flag": "Forced"}, True),
        (support.FORCE_DEPRECATED, "v8601", {"flag": "Forced"}, False),
        (support.FORCE_DEPRECATED, "v110100", {}, False),
        (support.QDQ_ONLY, "v8601", {"options": "--int8"}, True),
        (support.QDQ_ONLY, "v101601", {"options": "--fp16"}, False),
        (support.AMPERE_PRODUCTS, "v8601", {"capability": (9, 0)}, True),
        (support.AMPERE_PRODUCTS, "v8601", {"capability": (8, 0)}, False),
        (support.AMPERE_PRODUCTS, "v101601", {"capability": (9, 0)}, False),
    ],
)
def test_a_report_says_once_what_concerns_its_build(
    fact: support.Support, version: str, given: dict[str, Any], is_said: bool
) -> None:
    options = {name: value for name, value in given.items() if name != "capability"}
    log = replace(build(version=version, **options), compute_capability=given.get("capability"))
    weight = conv("a", 512, 512)
    notes = joined(report(weight), build=log).notes
    assert notes.count(fact.in_words) == is_said
    pairs = joined(report(replace(weight, **int8(output=True))), build=log).notes
    assert pairs.count(fact.in_words) == (is_said and fact is not support.QDQ_ONLY)
