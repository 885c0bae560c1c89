"""How builds end: errors of the ONNX parser, and builders that build several times."""

from __future__ import annotations

import pytest
from support.log_lines import parse_lines

from twofour.records.log import Build, BuildOutcome, Producer, SparsityFlag

DATED = "[11/21/2026-13:02:35] [TRT] "
REFUSED = (
    f"{DATED}[I] Input filename:   custom.onnx",
    f'{DATED}[E] ModelImporter.cpp:140: While parsing node number 0 [MyOp -> "a"]:',
    f"{DATED}[E] ModelImporter.cpp:142: --- Begin node ---",
    "Node name: myop",
    f"{DATED}[E] ModelImporter.cpp:143: --- End node ---",
    f"{DATED}[E] ModelImporter.cpp:151: ERROR: onnxOpCheckers.cpp:998 In function checkPlugin:",
    '[6] creator && "Plugin not found, are the plugin name and version correct?"',
)
BUILT = f"{DATED}[I] Engine generation completed in 0.25 seconds."


def test_a_node_that_the_parser_refuses_is_a_failed_build_and_its_error_is_whole() -> None:
    (build,) = parse_lines(REFUSED)
    assert build.outcome is BuildOutcome.FAILED
    assert (build.error_count, len(build.errors)) == (4, 4)
    assert build.errors[3].text == (
        "ModelImporter.cpp:151: ERROR: onnxOpCheckers.cpp:998 In function checkPlugin: "
        '[6] creator && "Plugin not found, are the plugin name and version correct?"'
    )
    assert build.errors[3].line == 6


def test_onnx_runtime_goes_on_without_the_node_and_inspecting_asks_about_it() -> None:
    ort = (
        "2026-05-01 10:00:00.123456789 [E:onnxruntime:Default, tensorrt_execution_provider.h:84 "
        "log] [2026-05-01 10:00:00   ERROR] ModelImporter.cpp:773: While parsing node number 3 []:"
    )
    (build,) = parse_lines([ort])
    assert (build.producer, build.outcome) == (Producer.ONNXRUNTIME, BuildOutcome.UNFINISHED)
    command = "[I] RUNNING | Command: polygraphy inspect capability m.onnx"
    (inspected,) = parse_lines([command, *REFUSED[1:3]])
    assert inspected.outcome is BuildOutcome.LOADED


def test_an_error_that_does_not_end_in_a_colon_takes_no_line_after_it() -> None:
    (build,) = parse_lines([f"{DATED}[E] Building engine failed", "Traceback follows", BUILT])
    assert [error.text for error in build.errors] == ["Building engine failed"]


# --- passes ---------------------------------------------------------------------------------------


def passes(last: str) -> tuple[Build, ...]:
    """Two passes, of which the first is kept; then the line `last`."""
    messages = (
        "Building graph using backend strategy 4",
        "Global timing cache in use. Profiling results in this builder pass will be stored.",
        "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: conv1, conv2",
        "(Sparsity) Chose 1 layer(s) using sparse tactics: conv1",
        "Engine generation completed in 8.5 seconds.",
        "Use backend strategy 4 with estimated inference time (0.22) as the initial choice.",
        "Building graph using backend strategy 3",
        "Global timing cache in use. Profiling results in this builder pass will be stored.",
        "(Sparsity) Found 3 layer(s) eligible to use sparse tactics: conv1, conv2, fc",
        "(Sparsity) Chose 1 layer(s) using sparse tactics: conv2",
        "Engine generation completed in 0.25 seconds.",
        last,
    )
    return parse_lines(f"[TRT] [V] {message}" for message in messages)


SKIPPED = "Skip backend strategy 3since its estimated inference time (0.25) is not faster than it."


def test_what_a_discarded_pass_chose_is_not_in_the_engine() -> None:
    (build,) = passes(SKIPPED)
    assert (build.outcome, build.build_s) == (BuildOutcome.BUILT, 8.75)
    assert (build.eligible, build.chosen) == (("conv1", "conv2", "fc"), ("conv1",))
    assert [line.discarded for line in build.sparsity_lines] == [False, False, True, True]
    (used,) = passes("Use backend strategy 3 since it is faster.")
    assert used.chosen == ("conv2",)
    (cut,) = passes("Total Weights Memory: 9")
    assert (cut.outcome, cut.chosen) == (BuildOutcome.UNFINISHED, None)
    assert [line.discarded for line in cut.sparsity_lines] == [None] * 4


def test_the_times_of_a_discarded_pass_are_not_those_of_the_engine() -> None:
    runner = "--------------- Timing Runner: a (CaskConvolution[0x80000009])"
    builds = "Building graph using backend strategy 4"
    done = "Engine generation completed in 8.5 seconds."
    first = "Use backend strategy 4 as the initial choice."
    times = [(runner, f"Tactic: 0x{n:016x} Time: 0.{n}") for n in (1, 2)]
    for last, second, expected in (
        (SKIPPED, times[1], 0.1),
        (BETTER, times[1], 0.2),
        (BETTER, times[1][:1], 0.1),  # its kernel is in the timing cache
    ):
        messages = (builds, *times[0], done, first, builds, *second, done, last)
        (build,) = parse_lines(f"[TRT] [V] {message}" for message in messages)
        assert [t.ms for layer in build.layers for t in layer.tactics] == [expected]


BETTER = (
    "Chose this engine with backend strategy 3 since its estimated inference time (0.310688) is "
    "faster than the previous engine with estimated inference time (0.33)."
)


@pytest.mark.parametrize("width", [300, 80])
def test_the_engine_of_a_middle_pass_that_replaced_the_first_is_the_one_in_use(width: int) -> None:
    lines = []
    compared = ("Use backend strategy 4 as the initial choice.", BETTER, SKIPPED)
    for name, seconds, last in zip("abc", (8.5, 7.25, 8.0), compared, strict=True):
        lines += [
            "Building graph using backend strategy 4",
            "(Sparsity) Found 3 layer(s) eligible to use sparse tactics: a, b, c",
            f"(Sparsity) Chose 1 layer(s) using sparse tactics: {name}",
            f"Engine generation completed in {seconds} seconds.",
            last,
        ]
    run = [f"&&&& RUNNING {TREXEC}", *(DATED + line for line in lines), f"&&&& PASSED {TREXEC}"]
    (build,) = parse_lines(
        line[at : at + width] for line in run for at in range(0, len(line), width)
    )
    assert (build.eligible, build.chosen) == (("a", "b", "c"), ("b",))
    assert build.build_s == 23.75


def test_a_build_that_is_no_pass_of_the_last_one_stands_alone() -> None:
    lines = [f"{DATED}[V] Building graph using backend strategy 2", BUILT] * 2
    starts = f"{DATED}[I] Local timing cache in use."
    first, second = parse_lines([lines[0], starts, lines[1], lines[2], starts, lines[3]])
    assert (first.build_s, second.build_s) == (0.25, 0.25)


def test_what_surrounds_the_builder_is_its_time_only_where_it_says_nothing() -> None:
    around = "[07/07/2026-10:00:00] [I] Engine built in 15.5 sec."
    (alone,) = parse_lines([around])
    (both,) = parse_lines(
        ["&&&& RUNNING TensorRT.trtexec [TensorRT v101601] # trtexec --onnx=m.onnx", BUILT, around]
    )
    assert (alone.build_s, both.build_s) == (15.5, 0.25)


# --- engines from files ---------------------------------------------------------------------------

LOADS = (
    "&&&& RUNNING TensorRT.trtexec [TensorRT v8503] # trtexec --loadEngine=a.plan --dumpProfile",
    "[03/12/2026-16:06:58] [I] === Build Options ===",
    "[03/12/2026-16:06:58] [I] Precision: FP32",
    "[03/12/2026-16:06:58] [I] Sparsity: Disabled",
    "[03/12/2026-16:06:58] [I] Load engine: a.plan",
    "[03/12/2026-16:06:58] [I] Profiling verbosity: 0",
    "[03/12/2026-16:06:58] [I] [TRT] Loaded engine size: 21 MiB",
    "[03/12/2026-16:07:02] [I] Throughput: 100 qps",
    "&&&& PASSED TensorRT.trtexec [TensorRT v8503] # trtexec --loadEngine=a.plan --dumpProfile",
)


def test_a_loaded_engine_was_not_built_here_so_no_printed_default_is_its_own() -> None:
    for lines in (LOADS, LOADS[1:-1]):
        (build,) = parse_lines(lines)
        assert (build.outcome, build.engine_loaded) == (BuildOutcome.LOADED, True)
        assert (build.sparsity, build.precision) == (SparsityFlag.UNKNOWN, None)
    failed = [*LOADS[:6], LOADS[-1].replace("PASSED", "FAILED")]
    (broken,) = parse_lines(failed)
    assert (broken.outcome, broken.engine_loaded) == (BuildOutcome.FAILED, True)
    assert broken.sparsity is SparsityFlag.UNKNOWN


def test_an_engine_loaded_after_its_build_is_the_one_that_was_built() -> None:
    (build,) = parse_lines([f"{DATED}[I] Sparsity: Disabled", BUILT, LOADS[6]])
    assert (build.outcome, build.engine_loaded) == (BuildOutcome.BUILT, False)
    assert build.sparsity is SparsityFlag.DISABLED


# --- layers of another name than their node -------------------------------------------------------


def test_layers_that_the_parser_renames_are_kept_with_their_nodes() -> None:
    registered = (
        f"{DATED}[V] Registering layer: conv for ONNX node: conv",
        f"{DATED}[V] Registering layer: node_linear_1 for ONNX node: node_linear",
        f"{DATED}[V] Registering layer: node_linear_1_2 for ONNX node: node_linear_1",
        f"{DATED}[V] Registering layer: gemm1.weight required by ONNX-TRT",
        f"{DATED}[V] Registering layer: (Unnamed Layer* 3) [Shuffle] for ONNX node: ",
        f"{DATED}[V] Registering tensor: x for ONNX tensor: x",
        BUILT,
    )
    (build,) = parse_lines(registered)
    assert [(layer.layer, layer.node) for layer in build.renamed_layers] == [
        ("node_linear_1", "node_linear"),
        ("node_linear_1_2", "node_linear_1"),
    ]


# --- builds that say little -----------------------------------------------------------------------

EIGHT = (
    "[MemUsageChange] Init CUDA: CPU +329, GPU +0, now: CPU 343, GPU 403 (MiB)",
    "Local timing cache in use. Profiling results in this builder pass will not be stored.",
    "Detected 1 inputs and 1 output network tensors.",
    "Total Host Persistent Memory: 16960",
    "(Sparsity) Layers eligible for sparse math: conv1, conv2",
    "(Sparsity) TRT inference plan picked sparse implementation for layers: conv1",
    "[MemUsageChange] TensorRT-managed allocation in building engine: CPU +0, GPU +4, now: CPU 0",
)
LOADED = ("[MemUsageChange] Init CUDA: CPU +0, GPU +0", "Loaded engine size: 0 MiB")


def test_a_python_log_of_tensorrt_8_at_info_shows_that_the_engine_was_built() -> None:
    for prefix in (f"{DATED}[I] ", "[TRT] [I] ", "INFO:trt:", ""):
        lines = [prefix + message for message in (*EIGHT, *LOADED)]
        (build,) = parse_lines(lines)
        assert (build.outcome, build.engine_loaded) == (BuildOutcome.BUILT, False)
        first, second = parse_lines([*lines, *lines])
        assert {first.outcome, second.outcome} == {BuildOutcome.BUILT}
        assert first.chosen == second.chosen == ("conv1",)
    old = "[TensorRT] INFO: [MemUsageSnapshot] Builder end: CPU 772 MiB, GPU 776 MiB"
    (eight_zero,) = parse_lines([f"[TensorRT] INFO: {EIGHT[2]}", old])
    assert eight_zero.outcome is BuildOutcome.BUILT
    (cut,) = parse_lines(f"{DATED}[I] {message}" for message in EIGHT[:4])
    assert cut.outcome is BuildOutcome.UNFINISHED


TREXEC = "TensorRT.trtexec [TensorRT v8503] # trtexec --onnx=a.onnx"
WARNS = "[03/12/2026-16:06:58] [W] --workspace flag has been deprecated"
RUN = (
    f"&&&& RUNNING {TREXEC}",
    "[03/12/2026-16:06:58] [I] Engine built in 3.5 sec.",
    f"&&&& PASSED {TREXEC}",
)
POLYGRAPHY = (
    "[I] RUNNING | Command: polygraphy run a.onnx --trt",
    "[I] Finished engine building in 3.5 seconds",
    "[I] PASSED | Runtime: 3.5s | Command: polygraphy run a.onnx --trt",
)


def test_warnings_before_a_run_are_its_own_and_those_after_it_are_no_build() -> None:
    for run, warning in ((RUN, WARNS), (POLYGRAPHY, "[W] 'colored' module is not installed")):
        (build,) = parse_lines([warning, warning, *run, warning])
        assert (build.outcome, build.build_s) == (BuildOutcome.BUILT, 3.5)
        assert (build.warning_count, len(build.warnings)) == (2, 2)
        assert [w.line for w in build.warnings] == [1, 2]
        assert len(parse_lines([warning, *run, warning, *run, warning])) == 2
    (alone,) = parse_lines([WARNS])
    assert alone.warning_count == 1


# --- versions and profiles ------------------------------------------------------------------------


def test_the_version_of_the_library_that_was_loaded_wins_and_the_difference_is_said() -> None:
    loads = (
        "[07/07/2026-10:00:00] [V] [TRT] Loaded shared library "
        "libnvinfer_builder_resource_sm90.so.10.16.2"
    )
    banner = "&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b11] # trtexec --onnx=a.onnx"
    said = "[07/07/2026-10:00:00] [I] TensorRT version: 10.16.1"
    for lines in ((banner, said, loads), (banner, loads, said)):
        (build,) = parse_lines(lines)
        assert build.tensorrt_version == "10.16.2"
        assert [found.message for found in build.contradictions] == [
            "the program is compiled for TensorRT 10.16.1 and loads library 10.16.2"
        ]
    (same,) = parse_lines([banner, loads.replace("10.16.2", "10.16.1")])
    assert (same.tensorrt_version, same.contradictions) == ("10.16.1", ())


def test_the_profile_of_a_listed_layer_stands_apart_from_its_name() -> None:
    lines = (
        "--------------- Timing Runner: conv1 [profile 1] (CaskConvolution[0x80000009])",
        "Tactic Name: k Tactic: 0x1 Time: 0.5",
        "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: conv1, a || b",
        "(Sparsity) Chose 3 layer(s) using sparse tactics: conv1, conv1 [profile 1], "
        "a || b [profile 2]",
    )
    (build,) = parse_lines(f"{DATED}[V] {line}" for line in lines)
    assert (build.eligible, build.chosen) == (("conv1", "a || b"), ("conv1", "a || b"))
    chosen = build.sparsity_lines[1]
    assert chosen.names == ("conv1", "conv1", "a || b")
    assert (chosen.profiles, build.sparsity_lines[0].profiles) == ((0, 1, 2), ())
    assert build.contradictions == ()
    assert build.layers[0].chosen is True
