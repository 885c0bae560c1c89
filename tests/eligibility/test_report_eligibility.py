"""Verdicts on the cases that users of TensorRT met, and on any mixture of layers."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.report_cases import (
    check,
    codes,
    context,
    conv,
    gpu,
    int8,
    matmul,
    reason,
    report,
    validation,
    verdict,
)

from twofour.eligibility.build_facts import BuildFacts
from twofour.eligibility.predict import predict
from twofour.eligibility.remedies import BUILD_AND_TIME, QUANTIZE_OUTPUT
from twofour.eligibility.totals import LayerStatus, status_of
from twofour.errors import BadInputError
from twofour.records.eligibility import Evidence, VerdictName
from twofour.records.export import Gpu
from twofour.records.weights import Pattern, ReasonCode, Weight, WeightCheck


def test_a_large_float16_layer_that_holds_the_pattern_qualifies() -> None:
    found = verdict(conv("mix", 512, 512))
    assert (found.verdict, found.evidence) == (VerdictName.ELIGIBLE, Evidence.PREDICTED)
    assert codes(found) == ["QUALIFIES"]
    message = "2:4 holds along input channels; C=512, K=512, 3x3, float16"
    assert found.reasons[0].message == message
    assert found.remedy is None
    assert found.pattern_holds is True


def test_a_grouped_convolution_is_never_eligible_though_it_is_2_to_4() -> None:
    found = verdict(conv("resnext", 128, 128, groups=32))
    assert (found.verdict, codes(found)) == (VerdictName.NOT_ELIGIBLE, ["GROUPED_CONV"])
    message = "32 groups of 4 input channels: no sparse kernel for groups"
    assert found.reasons[0].message == message
    assert found.reasons[0].source == "NVIDIA/TensorRT issue 4054"
    assert found.remedy is not None
    assert "instead of 4,608" in found.remedy


def test_the_image_stem_is_ruled_out_by_its_three_channels() -> None:
    stem = conv("stem", 3, 64, (7, 7))
    found = verdict(stem, check(stem, violations=3136))
    assert found.verdict is VerdictName.NOT_ELIGIBLE
    assert codes(found) == ["AXIS_NOT_MULTIPLE", "PATTERN_BROKEN"]
    assert "C=3 is not" in found.reasons[0].message
    assert "leave it as it" in (found.remedy or "")


def test_a_one_channel_convolution_is_listed_as_logs_of_three_versions_show() -> None:
    found = verdict(conv("stem", 1, 256, (5, 5)))
    assert found.verdict is VerdictName.ELIGIBLE
    assert codes(found) == ["AXIS_NOT_MULTIPLE", "QUALIFIES"]
    assert "C=1 is not" in found.reasons[0].message
    assert "8.4.1, 10.14, 10.16" in (found.reasons[0].source or "")
    assert "leave it as it" in (found.remedy or "")


@pytest.mark.parametrize(
    ("width", "better"), [(1022, "1024"), (510, "512"), (322, "324 (better 384)")]
)
def test_a_matrix_product_with_a_rest_is_not_assumed_to_be_padded(width: int, better: str) -> None:
    found = verdict(matmul("fc", width, 512))
    assert (found.verdict, codes(found)) == (VerdictName.NOT_ELIGIBLE, ["AXIS_NOT_MULTIPLE"])
    wider, _, beside = better.partition(" ")
    words = f"{wider} input channels instead of {width} {beside}".rstrip()
    assert (found.remedy or "").endswith(words)


def test_a_mask_along_the_output_channels_is_named_as_such() -> None:
    weight = conv("conv", 256, 512, (1, 1))
    found = verdict(weight, check(weight, violations=30000, holds_along=0))
    assert found.verdict is VerdictName.NOT_ELIGIBLE
    assert codes(found) == ["WRONG_AXIS", "PATTERN_BROKEN"]
    assert "output channels (axis 0)" in found.reasons[0].message
    assert "30,000 of 32,768 groups" in found.reasons[1].message
    assert "input channels (axis 1)" in (found.remedy or "")
    assert found.pattern_holds is False


_TO_FLOAT16 = "export with --precision float16"
_FP16 = BuildFacts(types=frozenset({"FP16"}))


@pytest.mark.parametrize(
    ("build", "found", "message", "remedy"),
    [
        (BuildFacts(), ["DTYPE"], "no sparse kernel is", _TO_FLOAT16),
        (BuildFacts(types=frozenset()), ["DTYPE"], "no FP16 or INT8", "--fp16"),
        (_FP16, ["QUALIFIES"], "float32", ""),
        (BuildFacts(types=frozenset({"INT8"})), ["QUALIFIES"], "float32", ""),
        (BuildFacts(types=frozenset({"BF16"})), ["QUALIFIES"], "float32", ""),
        # flags for types count for nothing in a strongly typed build
        (replace(_FP16, tensorrt_version="11.0.0"), ["DTYPE"], "", _TO_FLOAT16),
        (replace(_FP16, strongly_typed=True), ["DTYPE"], "", _TO_FLOAT16),
    ],
)
def test_a_float32_layer_runs_sparse_only_in_a_build_that_may_lower_its_type(
    build: BuildFacts, found: list[str], message: str, remedy: str
) -> None:
    layer = matmul("query", 768, 768, dtype="float32", math_dtype="float32")
    judged = verdict(layer, build=replace(build, built=build.types is not None))
    assert (judged.verdict, codes(judged)) == (VerdictName.ELIGIBLE, found)
    assert message in judged.reasons[0].message
    assert remedy in (judged.remedy or "")
    assert (judged.remedy is None) == (found == ["QUALIFIES"])


def test_tensorrt_8_may_or_may_not_list_matrix_products_in_float() -> None:
    found = verdict(matmul("query", 768, 768), tensorrt_version="8.4.2.4")
    assert (found.verdict, codes(found)) == (VerdictName.UNKNOWN, ["UNSUPPORTED_OP"])
    assert "TensorRT 8.4.2.4 listed MatMul" in found.reasons[0].message
    source = found.reasons[0].source or ""
    assert all(issue in source for issue in ("4054", "4056", "2169", "2271", "1340"))
    assert "TensorRT 10.3 or later" in (found.remedy or "")
    lowered = verdict(
        matmul("query", 768, 768, dtype="float32", math_dtype="float32"),
        build=BuildFacts(tensorrt_version="8.4.2", types=frozenset({"INT8"})),
    )
    assert codes(lowered) == ["QUALIFIES"]
    in_int8 = matmul("query", 768, 768, **int8(output=True))
    assert codes(verdict(in_int8, tensorrt_version="8.4.2.4")) == ["QUALIFIES"]
    assert codes(verdict(matmul("query", 768, 768), tensorrt_version="10.3.0")) == ["QUALIFIES"]
    assert codes(verdict(conv("mix", 512, 512), tensorrt_version="8.6.1")) == ["QUALIFIES"]


def test_int8_without_a_quantised_output_is_eligible_and_loses_to_dense() -> None:
    found = verdict(matmul("up", 1536, 8960, **int8(output=False)))
    assert (found.verdict, codes(found)) == (VerdictName.ELIGIBLE, ["INT8_OUTPUT_NOT_QUANTIZED"])
    assert found.remedy == QUANTIZE_OUTPUT.text
    assert codes(verdict(matmul("up", 1536, 8960, **int8(output=True)))) == ["QUALIFIES"]
    assert codes(verdict(matmul("up", 1536, 8960, **int8(output=None)))) == ["QUALIFIES"]


@pytest.mark.parametrize(
    ("channels", "kernel", "expected", "remedy"),
    [
        ((160, 160), (3, 3), ["QUALIFIES", "SMALL_CHANNELS"], BUILD_AND_TIME.text),
        ((256, 256), (1, 1), ["QUALIFIES"], None),
        ((252, 252), (1, 1), ["QUALIFIES", "SMALL_CHANNELS"], BUILD_AND_TIME.text),
        # nine positions of the kernel count the input channels ninefold
        ((32, 256), (3, 3), ["QUALIFIES"], None),
        ((28, 256), (3, 3), ["QUALIFIES", "SMALL_CHANNELS"], BUILD_AND_TIME.text),
    ],
)
def test_small_layers_qualify_and_the_doubt_about_them_is_told(
    channels: tuple[int, int], kernel: tuple[int, ...], expected: list[str], remedy: str | None
) -> None:
    found = verdict(conv("c", *channels, kernel))
    assert (found.verdict, codes(found)) == (VerdictName.ELIGIBLE, expected)
    assert found.remedy == remedy


def test_a_gpu_before_ampere_rules_out_every_layer() -> None:
    found = verdict(conv("mix", 512, 512), gpu=gpu("Tesla T4", 7, 5))
    assert (found.verdict, codes(found)) == (VerdictName.NOT_ELIGIBLE, ["GPU_HAS_NO_SPARSE"])
    message = "Tesla T4 (compute capability 7.5) has no sparse tensor cores"
    assert found.reasons[0].message == message
    assert codes(verdict(conv("mix", 512, 512), gpu=gpu("A100", 8, 0))) == ["QUALIFIES"]


@pytest.mark.parametrize("device", [gpu("H100", 9, 0), gpu("RTX 4090", 8, 9), None])
def test_float8_is_doubtful_everywhere_as_no_log_shows_it_chosen(device: Gpu | None) -> None:
    weight = matmul("up", 4096, 4096, dtype="float8_e4m3fn", math_dtype="float8_e4m3fn")
    found = verdict(weight, gpu=device)
    assert (found.verdict, codes(found)) == (VerdictName.ELIGIBLE, ["DTYPE"])
    assert "on RTX 4090" in found.reasons[0].message
    assert "H100" not in found.reasons[0].message
    assert "use int8 or float16" in (found.remedy or "")


def test_int8_is_doubtful_on_compute_capability_10_3_alone() -> None:
    weight = matmul("up", 4096, 4096, **int8(output=True))
    found = verdict(weight, gpu=gpu("B300", 10, 3))
    assert (found.verdict, codes(found)) == (VerdictName.ELIGIBLE, ["DTYPE"])
    assert (found.reasons[0].source or "").startswith("2026-09-30, cuSPARSELt 0.10.0")
    assert codes(verdict(weight, build=BuildFacts(compute_capability=(10, 3)))) == ["DTYPE"]
    for name, major, minor in (("B200", 10, 0), ("Thor", 11, 0), ("RTX 5090", 12, 0)):
        assert codes(verdict(weight, gpu=gpu(name, major, minor))) == ["QUALIFIES"]
    assert codes(verdict(matmul("up", 4096, 4096), gpu=gpu("B300", 10, 3))) == ["QUALIFIES"]


def test_bfloat16_is_eligible_with_a_word_of_caution() -> None:
    found = verdict(matmul("up", 4096, 4096, dtype="bfloat16", math_dtype="bfloat16"))
    assert (found.verdict, codes(found)) == (VerdictName.ELIGIBLE, ["DTYPE"])
    assert "only float16 and int8" in found.reasons[0].message


@pytest.mark.parametrize("dtype", ["int4", "uint8", "float4_e2m1fn"])
def test_types_nobody_wrote_about_stay_unknown(dtype: str) -> None:
    found = verdict(matmul("up", 4096, 4096, dtype=dtype, math_dtype=dtype))
    assert (found.verdict, found.evidence) == (VerdictName.UNKNOWN, None)
    assert codes(found) == ["DTYPE"]


def test_transposed_and_3_d_convolutions_stay_unknown_until_a_log_names_them() -> None:
    up = conv("up", 256, 256, op="ConvTranspose", shape=(256, 256, 3, 3), axis=0)
    for weight in (up, conv("volume", 256, 256, (3, 3, 3))):
        found = verdict(weight)
        assert (found.verdict, found.evidence) == (VerdictName.UNKNOWN, None)
        assert codes(found) == ["UNSUPPORTED_OP"]
    broken = verdict(up, check(up, violations=1))
    assert broken.verdict is VerdictName.NOT_ELIGIBLE
    assert codes(broken) == ["PATTERN_BROKEN", "UNSUPPORTED_OP"]
    assert "input channels (axis 0)" in (broken.remedy or "")


@pytest.mark.parametrize(
    ("code", "name", "remedy"),
    [
        ("NOT_CONSTANT", VerdictName.NOT_ELIGIBLE, "make it a constant: fold it before export"),
        # computed from constants, so the builder may fold it
        ("UNSUPPORTED_OP", VerdictName.UNKNOWN, "fold constants, so that the weight is stored"),
        ("ZERO_POINT", VerdictName.NOT_ELIGIBLE, "quantise weights and activations symmetrically"),
    ],
)
def test_what_the_graph_states_of_a_weight_rules_the_layer_out_or_leaves_it_open(
    code: str, name: VerdictName, remedy: str
) -> None:
    noted = (reason(ReasonCode(code), "the weight is the graph input 'w'"),)
    unsized = {"shape": (), "axis": None, "dtype": "unknown", "math_dtype": "unknown"}
    found = verdict(matmul("fc", 0, 0, weight=None, **unsized, reasons=noted))
    assert (found.verdict, codes(found)) == (name, [code])
    assert "graph input 'w'" in found.reasons[0].message
    assert (found.remedy or "").startswith(remedy)
    assert found.pattern_holds is None


def test_an_excluded_layer_is_explained_by_the_exclusion_alone() -> None:
    weight = conv("head", 512, 512, reasons=(reason(ReasonCode.EXCLUDED, "--exclude head"),))
    tried = check(weight, violations=5)
    assert codes(verdict(weight, tried)) == ["EXCLUDED", "PATTERN_BROKEN"]
    found = verdict(weight, replace(tried, required=False))
    assert (found.verdict, codes(found)) == (VerdictName.NOT_ELIGIBLE, ["EXCLUDED"])
    assert "leave it dense" in (found.remedy or "")
    untouched = verdict(weight)
    assert (untouched.verdict, codes(untouched)) == (
        VerdictName.ELIGIBLE,
        ["QUALIFIES", "EXCLUDED"],
    )


def test_a_check_along_another_axis_does_not_count() -> None:
    weight = matmul("fc", 512, 512)
    along_other = replace(check(weight), axis=1)
    found = verdict(weight, along_other)
    assert (found.verdict, codes(found)) == (VerdictName.UNKNOWN, ["NOT_CHECKED"])


def test_a_model_pruned_to_another_pattern_is_told_so() -> None:
    weight = conv("mix", 512, 512)
    found = verdict(weight, check(weight, violations=7), pattern=Pattern(4, 8))
    assert "pruned 4:8" in found.reasons[0].message
    assert "prune to 2:4" in (found.remedy or "")


@pytest.mark.parametrize("version", [None, "8.6.1", "10.14.1"])
def test_of_an_einsum_nobody_says_whether_it_runs_sparse(version: str | None) -> None:
    found = verdict(matmul("up", 512, 512, op="Einsum"), tensorrt_version=version)
    assert (found.verdict, codes(found)) == (VerdictName.UNKNOWN, ["UNSUPPORTED_OP"])
    assert "whether Einsum layers" in found.reasons[0].message
    assert found.remedy is not None
    assert found.remedy.startswith("write it as a")


@pytest.mark.parametrize("form", ["a weight on the left of its product", "a stack of matrices"])
def test_a_product_of_a_form_that_no_log_lists_is_eligible_with_doubt(form: str) -> None:
    found = verdict(matmul("mix", 512, 512, form=form))
    assert (status_of(found), codes(found)) == (LayerStatus.DOUBTFUL, ["OPERAND_FORM"])
    assert f"log says whether {form} runs sparse" in found.reasons[0].message
    assert "build it and read" in (found.remedy or "")


def test_a_weight_picked_from_a_stack_is_left_dense_and_counts() -> None:
    noted = (reason(ReasonCode.PICKED_AT_RUN_TIME),)
    picked = matmul("up", 64, 64, shape=(4, 64, 64), axis=None, reasons=noted)
    made = predict([picked], validation(), context())
    (found,) = made.verdicts
    assert (found.verdict, codes(found)[0]) == (VerdictName.NOT_ELIGIBLE, "PICKED_AT_RUN_TIME")
    assert "leave it dense" in (found.remedy or "")
    assert (made.summary.weights, made.summary.weights_eligible) == (4 * 64 * 64, 0)


def test_a_validation_of_another_pattern_is_refused() -> None:
    with pytest.raises(BadInputError, match="2:4, not of 4:8"):
        predict([], validation(pattern=Pattern(4, 8)), context())


# --- one array, two layers that sum over different axes of it -------------------------------------


def _tied(
    rows: int, columns: int = 1, *, dense: bool = False
) -> tuple[tuple[Weight, WeightCheck], ...]:
    """Layers that need array `w` sparse along axis 0, and layers that need it along axis 1."""
    along_0 = [matmul(f"a{i}", 64, 64, weight="w") for i in range(rows)]
    along_1 = [matmul(f"b{i}", 64, 64, weight="w", op="Gemm", axis=1) for i in range(columns)]
    return (
        *((w, check(w, violations=7 if dense else 0)) for w in along_0),
        *((w, check(w, violations=9, holds_along=None if dense else 0)) for w in along_1),
    )


def test_a_layer_whose_shared_array_is_pruned_for_others_is_told_to_take_its_own_copy() -> None:
    *_, found = report(*_tied(3)).verdicts
    assert codes(found)[:3] == ["SHARED_WEIGHT", "WRONG_AXIS", "PATTERN_BROKEN"]
    assert found.reasons[0].message == (
        "its array w is shared with a0, for which 2:4 must hold along axis 0, "
        "and for this layer along axis 1"
    )
    copy = "give it its own copy of the weight, pruned 2:4 along input channels (axis 1)"
    assert (found.verdict, found.remedy) == (VerdictName.NOT_ELIGIBLE, copy)


def test_two_layers_on_a_dense_array_that_need_it_along_two_axes_each_get_a_copy() -> None:
    one, other = report(*_tied(1, dense=True)).verdicts
    assert [codes(v)[0] for v in (one, other)] == ["SHARED_WEIGHT"] * 2
    assert (one.remedy or "").endswith("(axis 0)")
    assert (other.remedy or "").endswith("(axis 1)")


def test_an_array_shared_along_one_axis_or_2_4_along_both_is_no_conflict() -> None:
    same = [matmul(f"a{i}", 64, 64, weight="w") for i in range(2)]
    broken = report(*((w, check(w, violations=7)) for w in same))
    assert [codes(v)[0] for v in broken.verdicts] == ["PATTERN_BROKEN"] * 2
    both = report(*(w for w, _ in _tied(1)))
    assert [v.verdict for v in both.verdicts] == [VerdictName.ELIGIBLE] * 2
    (one, _), (other, _) = _tied(1)
    left = (one, replace(check(one, violations=7), required=False))
    kept = report(left, (other, check(other, violations=9)))
    assert [codes(v)[0] for v in kept.verdicts] == ["SHARED_WEIGHT", "PATTERN_BROKEN"]


def test_what_never_runs_sparse_is_said_before_the_array_that_it_shares() -> None:
    (one, held), (other, _) = _tied(1)
    narrow = replace(other, weight="w", shape=(64, 6), in_channels=6)
    found = report((one, held), (narrow, check(narrow, violations=9))).verdicts[1]
    assert codes(found)[:2] == ["AXIS_NOT_MULTIPLE", "SHARED_WEIGHT"]
    assert (found.remedy or "").startswith("leave it dense")


def test_totals_count_a_shared_weight_once() -> None:
    embed = matmul("head", 64, 1000, weight="embed.weight")
    tied = matmul("embed", 64, 1000, weight="embed.weight")
    grouped = conv("grouped", 128, 128, groups=4)
    runtime = matmul("runtime", 0, 0, weight=None, axis=None, shape=(), math_dtype="unknown")
    found = predict(
        [embed, tied, grouped, runtime],
        validation(check(embed), check(grouped)),
        context(activation_products=24),
    ).summary
    assert (found.layers, found.eligible, found.not_eligible) == (4, 2, 2)
    assert (found.chosen, found.not_in_engine, found.unknown) == (0, 0, 0)
    assert found.weights == 64_000 + 128 * 32 * 9
    assert found.weights_eligible == 64_000
    assert found.activation_products == 24


_NOTED = "NOT_CONSTANT UNSUPPORTED_OP ZERO_POINT PICKED_AT_RUN_TIME DTYPE EXCLUDED SHARED_WEIGHT"
_CODES = st.sampled_from(
    [ReasonCode(name) for name in (*_NOTED.split(), "AXIS_NOT_MULTIPLE", "IN_PLUGIN")]
)
_DTYPES = st.sampled_from(["float32", "float16", "bfloat16", "int8", "uint8", "float8_e5m2"])


@st.composite
def _weights(draw: st.DrawFn) -> tuple[Weight, WeightCheck | None]:
    width = st.integers(1, 600)
    layer, dtype = draw(st.text(max_size=12)), draw(_DTYPES)
    noted = tuple(reason(code) for code in draw(st.lists(_CODES, max_size=2, unique=True)))
    more: dict[str, Any] = {"math_dtype": dtype, "reasons": noted}
    if dtype == "int8":
        more["output_quantized"] = draw(st.booleans())
    if draw(st.booleans()):
        weight = matmul(layer, draw(width), draw(width), **more)
    else:
        groups = draw(st.sampled_from([1, 1, 2, 32]))
        kernel = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        op = draw(st.sampled_from(["Conv", "ConvTranspose"]))
        weight = conv(
            layer, draw(width) * groups, draw(width) * groups, kernel, groups, op=op, **more
        )
    if draw(st.integers(0, 9)) == 0:
        return replace(weight, weight=None, axis=None), None
    if draw(st.integers(0, 9)) == 0:
        return replace(weight, axis=None), None
    violations = draw(st.integers(0, 3))
    axis = draw(st.sampled_from([None, 0])) if violations else None
    return weight, check(weight, violations=violations, holds_along=axis)


@given(
    st.lists(_weights(), max_size=8),
    st.sampled_from([None, gpu("V100", 7, 0), gpu("A100", 8, 0), gpu("H100", 9, 0)]),
    st.sampled_from([None, "8.6.1", "10.14.1"]),
)
def test_any_layers_get_exactly_one_predicted_verdict_each(
    drawn: list[tuple[Weight, WeightCheck | None]], device: object, version: str | None
) -> None:
    weights = [replace(w, weight=w.weight and f"{i}.weight") for i, (w, _) in enumerate(drawn)]
    checks = [replace(c, weight=f"{i}.weight") for i, (_, c) in enumerate(drawn) if c is not None]
    made = predict(weights, validation(*checks), context(gpu=device, tensorrt_version=version))
    assert [v.layer for v in made.verdicts] == [w.layer for w in weights]
    for found, weight in zip(made.verdicts, weights, strict=True):
        assert found.predicted is found.verdict
        assert (found.evidence is None) == (found.verdict is VerdictName.UNKNOWN)
        assert found.reasons
        assert len(set(codes(found))) == len(found.reasons)
        assert found.remedy or codes(found) == ["QUALIFIES"]
        if found.verdict is VerdictName.ELIGIBLE:
            assert found.pattern_holds is True
            assert weight.groups == 1
    totals = made.summary
    assert totals.eligible + totals.not_eligible + totals.unknown == totals.layers == len(weights)
    assert totals.weights == sum(prod(w.shape) for w in weights if w.weight is not None)
    assert totals.weights_eligible <= totals.weights
