"""Small hand-written logs, one for each trap of the format; what each must give."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.log_lines import parse_lines
from support.rendered import log_text

from twofour.logs.read import read_build_log
from twofour.records.log import (
    Build,
    BuildLog,
    BuildOutcome,
    FusionKind,
    Producer,
    SkipReason,
    SparsityFlag,
    SparsityKind,
)

LOGS = Path(__file__).parents[1] / "data" / "logs"


def builds(name: str) -> tuple[Build, ...]:
    return read_build_log(LOGS / name).builds


def only(name: str) -> Build:
    (build,) = builds(name)
    return build


def test_the_wording_of_tensorrt_8_gives_two_builds_with_names_and_no_counts() -> None:
    first, second = builds("wording_8.log")
    assert (first.last_line, second.first_line) == (5, 6)
    names = ("conv1 + relu1", "(Unnamed Layer* 3) [Convolution]", "PWN(PWN(a, b), c)")
    assert first.eligible == names
    assert first.chosen == ("conv1 + relu1",)
    assert [line.printed_count for line in first.sparsity_lines] == [None, None]
    assert (first.build_s, second.build_s) == (3.5, 2.25)
    assert (second.eligible, second.chosen) == ((), ())
    assert (first.first_line, second.first_line) == (1, 6)


def test_foreign_node_lists_are_united_with_the_rest_and_never_added_up() -> None:
    build = only("foreign_node.log")
    assert build.eligible == ("fc1", "fc2", "fc3", "conv1 + relu")
    assert build.chosen == ("fc2", "conv1 + relu")
    assert [line.foreign_node for line in build.sparsity_lines] == [True] * 4 + [False] * 2
    assert build.contradictions == ()
    assert build.tensorrt_version is None


def test_a_sorted_table_gives_the_operation_its_sparse_and_dense_times() -> None:
    layers = {layer.name: layer for layer in only("foreign_node.log").layers}
    fc1 = layers["fc1"]
    assert (fc1.best_dense_ms, fc1.best_sparse_ms, fc1.foreign_node) == (0.004, 0.005, True)
    assert [tactic.id for tactic in fc1.tactics] == ["0x0004b9ef35ad8721", "0x0005c6c62dcbe95d"]
    assert (fc1.eligible, fc1.chosen) == (True, False)
    region = layers["{ForeignNode[fc1...fc3]}"]
    assert (region.best_dense_ms, region.best_sparse_ms) == (None, None)
    assert region.tactics[0].ms == 0.0114
    assert (region.eligible, region.chosen) == (None, None)


def test_a_count_that_fits_no_list_is_a_contradiction_and_the_names_stand() -> None:
    build = only("contradiction.log")
    eligible, chosen = build.sparsity_lines
    assert eligible.printed_count == 3
    assert eligible.constituents is not None
    assert len(eligible.names or ()) == 2
    assert len(eligible.constituents) == 3
    assert chosen.names == ("/a/Conv || /b/Conv", "/d/Conv")
    assert build.chosen == chosen.names
    assert [(c.line, c.message) for c in build.contradictions] == [
        (5, "the log counts 0 chosen layers and names 2 (3 if fused ones count one by one)"),
        (None, "chosen but not listed as eligible: /d/Conv"),
    ]
    assert (build.tensorrt_version, build.sparsity) == ("10.3.0", SparsityFlag.ENABLED)
    assert (build.producer, build.outcome) == (Producer.TRTEXEC, BuildOutcome.BUILT)


def test_lines_broken_by_a_terminal_are_joined_inside_names_and_numbers() -> None:
    build = only("wrapped.log")
    assert build.eligible == (
        "backbone.layer1.conv1 + relu",
        "backbone.layer2.conv1 + relu",
        "backbone.layer3.conv1",
    )
    assert build.chosen == ("backbone.layer1.conv1 + relu",)
    (layer,) = build.layers
    assert layer.name == "backbone.layer1.conv1 + relu"
    assert layer.best_dense_ms == 0.0129196
    assert layer.best_sparse_ms == 0.01
    assert layer.chosen is True


def test_a_shortened_list_says_so_and_keeps_only_whole_names() -> None:
    first, second, third = only("elided.log").sparsity_lines
    assert (first.names, first.printed_count) == (None, 39)
    assert second.names == ("conv1", "{ForeignNode[a...b]}", "conv2")
    assert third.names == ("conv1", "conv2")
    assert (first.elided, second.elided, third.elided) == (False, True, True)
    assert only("elided.log").contradictions == ()


@pytest.mark.parametrize(
    ("first", "rest", "expected"),
    [
        ("Layers eligible for sparse math: a, b,", "c, d", (("a", "b"), True)),
        ("Layers eligible for sparse math:", "[I] [TRT] Total Host Memory: 1", ((), False)),
        ("Found 4 layer(s) eligible to use sparse tactics: a,", "b, c, d", (("a",), True)),
    ],
)
def test_a_list_that_was_wrapped_between_two_names_is_cut_and_contradicts_nothing(
    first: str, rest: str, expected: tuple[tuple[str, ...] | None, bool]
) -> None:
    (build,) = parse_lines(["[V] [TRT] Original: 4 layers", f"[I] [TRT] (Sparsity) {first}", rest])
    (line,) = build.sparsity_lines
    assert (line.names, line.elided) == expected
    assert build.contradictions == ()


def test_sparse_in_names_of_files_layers_and_other_operators_is_no_sparse_tactic() -> None:
    build = only("named_sparse.log")
    (layer,) = build.layers
    assert [tactic.sparse for tactic in layer.tactics] == [False] * 4
    assert (layer.best_sparse_ms, layer.best_dense_ms) == (None, 0.2)
    assert (build.eligible, build.chosen) == (None, None)
    assert (layer.eligible, layer.chosen) == (None, None)
    assert build.sparsity is SparsityFlag.DISABLED


def test_decimal_and_hex_tactic_numbers_are_the_same_number() -> None:
    fc, conv = only("tactic_ids.log").layers
    assert [(t.id, t.ms) for t in fc.tactics] == [
        ("0xa8609adc4e0ceb90", 0.028288),
        ("0x0000000000000000", None),
    ]
    assert fc.tactics[0].kernel == "volta_sgemm_128x32_relu_nn_v1"
    assert (conv.best_sparse_ms, conv.best_dense_ms, conv.runner) == (1.25, 1.5, "CaskConvolution")
    assert conv.kernel == "sm80_xmma_fprop_sparse_conv_f16f16_sptensor16x8x32"


def test_skipped_tactics_say_why_and_how_much_memory_they_asked_for() -> None:
    scratch, error = only("tactic_ids.log").skipped_tactics
    assert scratch.reason is SkipReason.WORKSPACE
    assert (scratch.requested_bytes, scratch.available_bytes) == (7527202816, 1073741824)
    assert (scratch.layer, scratch.id) == ("conv1 + relu1", "0x0000000000000004")
    assert error.reason is SkipReason.ERROR
    memory, exception = only("cached.log").skipped_tactics
    assert (memory.reason, memory.requested_bytes) == (SkipReason.MEMORY, 2688)
    assert (memory.id, exception.id) == ("0x0000000000000007", "0x0000000000000003")
    assert exception.reason is SkipReason.ERROR


def test_a_forced_build_is_marked_and_its_failure_too() -> None:
    build = only("forced.log")
    assert (build.sparsity, build.optimization_level) == (SparsityFlag.FORCED, 5)
    assert (build.outcome, build.tensorrt_version) == (BuildOutcome.FAILED, "8.5.3")
    assert build.model == "dense.onnx"


def test_a_timing_cache_that_may_hide_timings_is_reported() -> None:
    build = only("cached.log")
    cache = build.timing_cache
    assert (cache.mode, cache.hits) == ("global", 158)
    assert (cache.cached_results, cache.silent_combinations) == (1, 1)
    assert cache.hides_timings
    assert (build.warning_count, build.error_count) == (1, 1)
    assert {layer.name: layer.cached for layer in build.layers} == {
        "conv1": 0,
        "conv1 [profile 1]": 1,
    }


def test_messages_behind_the_prefix_of_another_program_are_found() -> None:
    build = only("docker.log")
    assert (build.eligible, build.chosen) == (("conv1",), ())
    assert build.layers[0].best_dense_ms == 0.5
    assert all(fusion.kind is not FusionKind.REMOVED for fusion in build.fusions)
    assert [line.kind for line in build.sparsity_lines] == list(SparsityKind)


def test_a_real_log_of_tensorrt_rtx_without_a_gpu_gives_one_built_engine() -> None:
    build = only("rtx_small.log")
    assert build.outcome is BuildOutcome.BUILT
    assert (build.eligible, build.chosen) == (None, None)
    assert build.sparsity is SparsityFlag.UNKNOWN
    assert build.model == "small.onnx"
    assert build.error_count == 0


def test_comparing_outputs_is_no_build_and_ends_none() -> None:
    lines = (
        "[I] RUNNING | Command: polygraphy run model.onnx --trt --onnxrt",
        "[I] Finished engine building in 2.5 seconds",
        "[I]         PASSED | Output: 'y' | Difference is within tolerance",
        "[I]     Comparing Output: 'z' (dtype=float32) with 'z' (dtype=float32)",
        "[W]         runner | Output: z: Some values are 0.",
        "[I]         FAILED | Output: 'z' | Difference exceeds tolerance",
        "[W] one more",
        "[E] FAILED | Runtime: 3.5s | Command: polygraphy run model.onnx --trt --onnxrt",
    )
    (build,) = parse_lines(lines)
    assert (build.outcome, build.producer) == (BuildOutcome.BUILT, Producer.POLYGRAPHY)
    assert (build.first_line, build.last_line, build.warning_count) == (1, 8, 2)


def test_inspecting_a_model_or_an_engine_is_no_unfinished_build() -> None:
    model = (
        "[I] RUNNING | Command: /usr/bin/polygraphy inspect sparsity model.onnx",
        "[I] Found sparse tensor: conv1.weight",
    )
    engine = ("Layers:", "Name: conv1, LayerType: CaskConvolution, Inputs: []", "")
    network = (
        "[V] Loaded Module: tensorrt | Version: 10.16.2.5 | Path: []",
        "[I] ==== TensorRT Network ====",
    )
    assert [build.outcome for build in parse_lines(network)] == [BuildOutcome.LOADED]
    assert [build.outcome for build in parse_lines(model)] == [BuildOutcome.LOADED]
    assert [build.outcome for build in parse_lines(engine)] == [BuildOutcome.LOADED]


def test_a_run_that_fails_after_its_build_is_failed_and_the_view_says_both() -> None:
    lines = (
        "&&&& RUNNING TensorRT.trtexec [TensorRT v101600] # trtexec --onnx=m.onnx",
        "[07/02/2026-03:24:28] [I] [TRT] Engine generation completed in 0.25 seconds.",
        "&&&& FAILED TensorRT.trtexec [TensorRT v101600] # trtexec --onnx=m.onnx",
    )
    (build,) = parse_lines(lines)
    assert (build.outcome, build.build_s) == (BuildOutcome.FAILED, 0.25)
    log = BuildLog(files=(), builds=(build,))
    assert "build 1: log, lines 1 to 3: failed, after the engine was built" in log_text(log)


def test_an_error_of_building_after_a_finished_engine_is_the_next_build() -> None:
    lines = (
        "[07/02/2026-03:24:28] [TRT] [I] Engine generation completed in 0.25 seconds.",
        "[07/02/2026-03:24:29] [TRT] [I] Loaded engine size: 0 MiB",
        "[07/02/2026-03:24:30] [TRT] [E] Error Code: 9: Skipping tactic 0x0 due to exception x",
        "[07/02/2026-03:24:30] [TRT] [E] IBuilder::buildSerializedNetwork: Error Code 10: x",
        "[07/02/2026-03:24:30] [TRT] [E] Building engine failed",
    )
    first, second = parse_lines(lines)
    assert (first.outcome, second.outcome) == (BuildOutcome.BUILT, BuildOutcome.FAILED)
    assert (first.error_count, second.error_count, second.first_line) == (0, 3, 3)
    assert second.producer is Producer.PYTHON
