"""The terminal's view of a log: which errors, which layers, how many rows."""

from __future__ import annotations

from support.rendered import log_text

from twofour.logs.read import parse_lines
from twofour.records.log import BuildLog

DATED = "[11/21/2026-13:02:35] [TRT] "


def view(*lines: str) -> list[str]:
    log = BuildLog(files=(), builds=parse_lines(lines))
    return [" ".join(line.split()) for line in log_text(log).splitlines()]


def test_names_of_the_lists_are_rows_even_where_nothing_was_timed() -> None:
    lines = view(
        f"{DATED}[I] (Sparsity) Found 4 layer(s) eligible to use sparse tactics: a, b || c, d",
        f"{DATED}[I] (Sparsity) Chose 1 layer(s) using sparse tactics: d",
    )
    assert [line for line in lines if line.endswith((" yes", " eligible"))] == [
        "d yes",
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
    assert [line for line in lines if line.startswith("error at ")] == [
        "error at line 5: ModelImporter.cpp:151: ERROR: checkers.cpp:9 In function check: "
        "[6] Plugin not found",
        "error at line 1: ModelImporter.cpp:140: While parsing node number 0:",
        "error at line 4: Failed to parse onnx file",
    ]


def test_a_file_of_many_builds_shows_fewer_rows_of_each() -> None:
    names = ", ".join(f"conv{i}" for i in range(50))
    pair = (
        f"{DATED}[I] (Sparsity) Found 50 layer(s) eligible to use sparse tactics: {names}",
        f"{DATED}[I] (Sparsity) Chose 0 layer(s) using sparse tactics:",
    )
    assert not any("more layers" in line for line in view(*pair))
    many = view(*pair * 100)
    assert many.count("30 more layers: see --json") == 100


def test_types_that_the_command_asked_for_are_not_said_to_be_of_kernels() -> None:
    banner = "&&&& RUNNING TensorRT.trtexec [TensorRT v100300] # trtexec --onnx=m.onnx --fp16"
    assert "precision not stated, FP16 by the command" in "\n".join(view(banner))
    best = "\n".join(view(banner.replace("--fp16", "--best")))
    assert "precision not stated, FP16+INT8 by the command" in best


def test_a_run_that_loads_an_engine_and_passes_built_none() -> None:
    run = "TensorRT.trtexec [TensorRT v8503] # trtexec --loadEngine=main.plan --verbose"
    lines = view(f"&&&& RUNNING {run}", "[07/07/2026-06:14:38] [I] Sparsity: Disabled",
                 f"&&&& PASSED {run}")  # fmt: skip
    assert "an engine or a model is loaded or inspected, none built" in "\n".join(lines)
