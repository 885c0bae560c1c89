"""`twofour log`: its rows, and its answer: what runs sparse or the first thing in the way."""

from __future__ import annotations

import pytest
from support.log_lines import parse_lines
from support.rendered import log_text

from twofour.eligibility.build_facts import NO_ENGINES_OF_LLM
from twofour.records.log import BuildLog
from twofour.reports.log_document import answer

TRTEXEC = "[11/21/2026-13:02:35] [V] [TRT] "
OWN = "[11/21/2026-13:02:35] [I] "
PYTHON = "[11/21/2026-13:02:35] [TRT] [V] "
RUNNER = "--------------- Timing Runner: a (CaskConvolution[0x80000009])"
DENSE = "Tactic Name: sm80_xmma_fprop_implicit_gemm_f16f16_f16f16 Tactic: 0x1 Time: 0.5"
SPARSE = "Tactic Name: sm80_xmma_fprop_sparse_conv_f16f16_sptensor Tactic: 0x2 Time: 0.75"
FLOAT32 = "Tactic Name: sm80_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32 Tactic: 0x1 Time: 0.5"
FOUND = "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: a, b"
NONE = "(Sparsity) Chose 0 layer(s) using sparse tactics:"
DONE = "Engine generation completed in 3.5 seconds."


def answer_to(*lines: str) -> str:
    (build,) = parse_lines(lines)
    return answer(build)


def shown(*lines: str) -> str:
    return log_text(BuildLog(files=(), builds=parse_lines(lines)))


def verbose(*messages: str) -> str:
    return answer_to(*(PYTHON + message for message in (*messages, DONE)))


def test_layers_that_run_sparse_are_counted() -> None:
    assert verbose(FOUND, f"{NONE.replace('0', '1')} a") == "1 layer runs sparse"
    assert verbose(FOUND, f"{NONE.replace('0', '2')} a, b") == "2 layers run sparse"
    for end in ("a, ....", "a, ...", "a, ...more"):
        assert "at least 1 layer" in verbose(FOUND, f"{NONE.replace('0', '8')} {end}")
    cut = "Name: a, LayerType: gemm, TacticName: sm80_xmma_sparse_gemm_f16f16_sptensor16x8x32"
    assert "nothing was built" in answer_to(PYTHON + "Engine Layer Information:", "Layers:", cut)
    assert answer_to(PYTHON + DONE, "Layers:", cut) == "1 layer runs sparse"


def test_sparsity_that_was_off_says_how_to_allow_it_where_the_log_comes_from() -> None:
    off = f"{OWN}Sparsity: Disabled"
    assert "rebuild with --sparsity=enable" in answer_to(off, TRTEXEC + DONE)
    old = f"{OWN}Compute Capability: 7.0"
    assert "(compute capability 7.0)" in answer_to(off, old, TRTEXEC + DONE)
    flags = ("[I] Building engine with configuration:", "    Flags                  | [FP16]")
    finished = "[I] Finished engine building in 3.5 seconds"
    assert "rebuild with --sparse-weights" in answer_to(*flags, finished)
    assert "config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)" in verbose(RUNNER, DENSE)


def test_sparse_kernels_that_were_timed_show_that_sparsity_was_on() -> None:
    assert "were timed" in verbose(RUNNER, DENSE, SPARSE.replace("0.75", "0.25"))


def test_a_timing_cache_is_named_where_it_may_have_hidden_sparse_kernels() -> None:
    hit = "a [profile 1] [Half(1,8) -> Half(1,8)] got cached result: CaskConvolution, tactic 0x2"
    assert "timing cache" in verbose(RUNNER, DENSE, f"{hit}, 0.45 ms", FOUND, NONE)
    assert "timing cache" not in verbose(RUNNER, DENSE, FOUND, NONE)


def test_an_engine_in_float32_is_told_before_anything_else_is_blamed() -> None:
    said = verbose(RUNNER, FLOAT32, FOUND, NONE)
    assert "build ran in FP32" in said
    assert "precision FP32 (" in shown(PYTHON + RUNNER, PYTHON + FLOAT32)


def test_times_say_whether_a_sparse_kernel_was_tried() -> None:
    start = "2 layers are eligible, none runs sparse: "
    assert verbose(RUNNER, DENSE, FOUND, NONE).startswith(start + "no sparse kernel")
    slower = verbose(RUNNER, DENSE, SPARSE, FOUND, NONE)
    assert slower.startswith(f"{start}sparse kernels were timed for 1 layer")
    assert "a logger at VERBOSE" in verbose(FOUND, NONE)


def test_what_is_no_build_of_this_log_is_said() -> None:
    loads = "&&&& RUNNING TensorRT.trtexec [TensorRT v8503] # trtexec --loadEngine=a.plan"
    loaded = f"{OWN}[TRT] Loaded engine size: 2 MiB"
    assert "an engine was loaded" in answer_to(loads, f"{OWN}Sparsity: Disabled", loaded)
    passed = loads.replace("RUNNING", "PASSED")
    assert "no build in it" in shown(loads, f"{OWN}Sparsity: Disabled", passed)
    tensors = "[I] Found sparse tensor: a", "[W] Found non-sparse tensor: b"
    assert "1 of 2 tensors" in answer_to(*tensors)
    error = "[11/21/2026-13:02:35] [TRT] [E] In node 3: not supported"
    failed = "[11/21/2026-13:02:35] [TRT] [E] Building engine failed"
    assert "In node 3: not" in answer_to(error, failed)


def test_forced_weights_are_no_evidence() -> None:
    said = answer_to(f"{OWN}Sparsity: Forced", TRTEXEC + FOUND, TRTEXEC + NONE, TRTEXEC + DONE)
    assert "no layer runs sparse" in said
    assert "--sparsity=force overwrote" in said


def test_a_log_of_tensorrt_llm_says_that_its_engines_ended() -> None:
    said = answer_to(*(f"[TRT-LLM] [V] {line}" for line in (RUNNER, DENSE, DONE)))
    assert said.endswith(f"rebuild with --weight_sparsity. {NO_ENGINES_OF_LLM.in_words}")


@pytest.mark.parametrize("end", ["a, b, ....", "a, b, ...more"])
def test_a_shortened_list_counts_at_least_the_names_it_has(end: str) -> None:
    said = shown(f"{PYTHON}(Sparsity) Found 39 layer(s) eligible to use sparse tactics: {end}")
    assert "the log counts 39" in said
    assert "the list of eligible layers is cut" in said
    assert "names of layers are missing" in said.splitlines()[-1]


def test_the_answers_of_several_builds_stand_together_at_the_end() -> None:
    lines = [PYTHON + message for message in (f"{NONE} a", DONE)] * 2
    answers = shown(*lines).splitlines()[-2:]
    assert [line.split(":")[0] for line in answers] == ["answer to build 1", "answer to build 2"]


COUNTED = "(Sparsity) Found 39 layer(s) eligible to use sparse tactics"
CHOSE = "(Sparsity) Chose 16 layer(s) using sparse tactics"


@pytest.mark.parametrize("rest", ["", ":", ": "])
def test_counts_without_names_are_never_taken_for_lists_of_nothing(rest: str) -> None:
    assert "names of layers are missing" in verbose(COUNTED + rest, CHOSE + rest)
    assert "names of layers are missing" in verbose(COUNTED + rest, NONE)
    quoted = answer_to(COUNTED + rest, CHOSE.replace("16", "0") + rest)
    assert quoted.startswith("39 eligible and 0 chosen layers are counted; ")


def test_a_list_with_fewer_names_than_its_count_says_at_least() -> None:
    said = verbose(f"{COUNTED}: a || b, c", f"{CHOSE}: a || b")
    assert "at least 1 layer" in said
    (build,) = parse_lines([PYTHON + f"{COUNTED}: a || b, c"])
    (line,) = build.sparsity_lines
    assert (line.missing, line.elided, line.constituents) == (36, False, ("a", "b", "c"))
    three = "(Sparsity) Found 3 layer(s) eligible to use sparse tactics: a || b, c"
    assert "2 engine layers (3 layers" in shown(PYTHON + three)
    whole = verbose(three, NONE)
    assert whole.startswith("2 layers are eligible")
    assert "names of layers are missing" in verbose(f"{COUNTED}: a, b", NONE)


def test_a_list_that_ends_inside_a_name_says_at_least() -> None:
    found = "(Sparsity) Found 5 layer(s) eligible to use sparse tactics: a, b, PWN(PWN(c), d), e, f"
    cut = verbose(found, "(Sparsity) Chose 0 layer(s) using sparse tactics: a, PWN(PWN(c")
    assert "although it counts 0" in cut
    old = "(Sparsity) TRT inference plan picked sparse implementation for layers: a, PWN(PWN(c"
    assert "at least 2 layers" in verbose(found, old)


@pytest.mark.parametrize(
    ("found", "picked", "cut"),
    [
        ("Found 2 layer(s) eligible to use sparse tactics: conv_1, conv_12",
         "Chose 0 layer(s) using sparse tactics: conv_1, con", "chosen"),
        ("Found 2 layer(s) eligible to use sparse tactics: conv_1, conv_12",
         "Chose 1 layer(s) using sparse tactics: conv_1 ||", "chosen"),
        ("Found 2 layer(s) eligible to use sparse tactics: conv_1, {ForeignNode[a",
         "Chose 0 layer(s) using sparse tactics:", "eligible"),
    ],
)  # fmt: skip
def test_a_list_that_is_cut_is_said_to_be_cut(found: str, picked: str, cut: str) -> None:
    said = shown(f"{PYTHON}(Sparsity) {found}", f"{PYTHON}(Sparsity) {picked}")
    assert f"the list of {cut} layers" in said
    assert said.count(" is cut: ") == 1


def test_a_log_that_ends_before_the_last_list_does_not_say_what_was_chosen() -> None:
    foreign = (
        " (foreignNode) (Sparsity) Found 1 layer(s) eligible to use sparse tactics: a",
        " (foreignNode) (Sparsity) Chose 0 layer(s) using sparse tactics:",
    )
    whole = "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: b, c"
    answered = answer_to(*(PYTHON + m for m in (*foreign, whole)))
    assert answered.startswith("3 layers are eligible; ")


def test_the_two_lines_that_people_paste_say_that_nothing_was_chosen() -> None:
    eligible = "(Sparsity) Layers eligible for sparse math: Conv_0"
    picked = "(Sparsity) TRT inference plan picked sparse implementation for layers:"
    answered = answer_to(PYTHON + eligible, PYTHON + picked)
    assert answered.startswith("1 layer is eligible, none runs sparse: ")


DATED = "[11/21/2026-13:02:35] [TRT] "


def view(*lines: str) -> list[str]:
    return [" ".join(line.split()) for line in shown(*lines).splitlines()]


def test_names_of_the_lists_are_rows_even_where_nothing_was_timed() -> None:
    lines = view(
        f"{DATED}[I] (Sparsity) Found 4 layer(s) eligible to use sparse tactics: a, b || c, d",
        f"{DATED}[I] (Sparsity) Chose 1 layer(s) using sparse tactics: d",
    )
    assert [line for line in lines if line.endswith((" chosen", " eligible"))] == [
        "d chosen",
        "a eligible",
        "b || c eligible",
    ]


def test_a_name_that_was_timed_has_one_row_also_as_a_part_of_a_fusion() -> None:
    lines = view(
        f"{DATED}[V] --------------- Timing Runner: a (CaskConvolution[0x80000009])",
        f"{DATED}[V] Tactic Name: k Tactic: 0x1 Time: 0.5",
        f"{DATED}[I] (Sparsity) Found 1 layer(s) eligible to use sparse tactics: a",
        f"{DATED}[I] (Sparsity) Chose 0 layer(s) using sparse tactics:",
    )
    assert [line for line in lines if line.startswith("a ")] == ["a CaskConvolution 0.5 eligible"]


def test_the_error_that_says_why_comes_first_and_frames_are_not_shown() -> None:
    lines = view(
        f"{DATED}[E] ModelImporter.cpp:140: While parsing node number 0:",
        f"{DATED}[E] ModelImporter.cpp:142: --- Begin node ---",
        f"{DATED}[E] ModelImporter.cpp:143: --- End node ---",
        f"{DATED}[E] Failed to parse onnx file",
        f"{DATED}[E] ModelImporter.cpp:151: ERROR: checkers.cpp:9 In function check:",
        "[6] Plugin not found",
    )
    errors = [line for line in lines if line.startswith("error at ")]
    assert [line.split(":")[0] for line in errors] == [f"error at line {n}" for n in (5, 1, 4)]
    assert errors[0].endswith("[6] Plugin not found")


def test_rows_beyond_the_shown_ones_are_counted() -> None:
    names = ", ".join(f"conv{i}" for i in range(230))
    pair = (
        f"{DATED}[I] (Sparsity) Found 230 layer(s) eligible to use sparse tactics: {names}",
        f"{DATED}[I] (Sparsity) Chose 0 layer(s) using sparse tactics:",
    )
    assert "30 more layers: see --json" in view(*pair)


def test_types_that_the_command_asked_for_are_not_said_to_be_of_kernels() -> None:
    banner = "&&&& RUNNING TensorRT.trtexec [TensorRT v100300] # trtexec --onnx=m.onnx"
    assert "precision FP16 (" in shown(f"{banner} --fp16")
    assert "precision FP16+INT8 (" in shown(f"{banner} --best")
