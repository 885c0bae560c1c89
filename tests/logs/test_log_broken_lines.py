"""Pastes that a terminal broke, and what other programs print between the lines."""

from __future__ import annotations

import pytest
from support.log_lines import parse_lines
from test_log_properties import MESSAGES, facts

from twofour.records.log import Tactic

BEFORE, NEW, AFTER = MESSAGES[1:2], MESSAGES[2:4], MESSAGES[4:]
OLD = (
    f"conv1 + relu1 Set {NEW[0].removesuffix(' Time: 0.5')}",
    "Tactic: 0x0000000000000001 Time: 0.5",
    f"conv1 + relu1 Set {NEW[1].removesuffix(' Time: 0.25')}",
    "Tactic: 0x0000000000000002 Time: 0.25",
)
DATED = "[07/07/2026-10:00:00] [V] [TRT] "


def broken_hard(line: str, width: int) -> list[str]:
    return [line[i : i + width] for i in range(0, len(line), width)]


@pytest.mark.parametrize("tactics", [NEW, OLD], ids=["one line", "two lines"])
def test_a_paste_that_a_terminal_broke_at_any_width_says_the_same(tactics: tuple[str, ...]) -> None:
    whole = [DATED + message for message in (*BEFORE, *tactics, *AFTER)]
    (expected,) = parse_lines(whole)
    assert expected.layers[0].best_sparse_ms == 0.25
    for width in range(70, 100):
        (build,) = parse_lines(piece for line in whole for piece in broken_hard(line, width))
        assert facts(build) == facts(expected), width


NAMES = [f"backbone.layer{i}.{i % 3}.conv{i % 2} + backbone.layer{i}.relu" for i in range(12)]


def test_one_long_list_alone_is_put_together_at_any_width() -> None:
    line = f"{DATED}(Sparsity) Layers eligible for sparse math: {', '.join(NAMES)}"
    for width in range(60, 200, 7):
        (build,) = parse_lines([*broken_hard(line, width), f"{DATED}Total Weights Memory: 9"])
        assert build.eligible == tuple(NAMES), width


def kernels(*lines: str) -> list[tuple[str | None, bool | None, float | None]]:
    (build,) = parse_lines(f"{DATED}{line}" for line in lines)
    found: tuple[Tactic, ...] = build.layers[0].tactics
    return [(tactic.kernel, tactic.sparse, tactic.ms) for tactic in found]


def test_half_a_kernel_name_is_no_name() -> None:
    half = "conv1 + relu1 Set Tactic Name: sm80_xmma_fprop_spar"
    assert kernels(*BEFORE, *OLD[:2], half, OLD[3])[0] == (None, None, 0.25)


def test_the_form_of_tensorrt_7_without_a_number_names_the_next_tactic() -> None:
    lines = (
        "--------------- Timing Runner: fc (caskFullyConnectedFP32)",
        "fc (caskFullyConnectedFP32) Set Tactic Name: volta_sgemm_128x32_relu_nn_v1",
        "Tactic: 8190451076631534509 time 0.028288",
    )
    assert kernels(*lines) == [("volta_sgemm_128x32_relu_nn_v1", False, 0.028288)]


def test_bare_lines_after_a_known_message_are_not_taken_for_its_rest() -> None:
    lines = [f"{DATED}Total Weights Memory: 9", "Set", f"{DATED}Removing conv1", "Tactic: 0x1"]
    (build,) = parse_lines(lines)
    assert [fusion.layers for fusion in build.fusions] == [("conv1",)]


# --- what is printed after a list ----------------------------------------------------------------

PRINTED = (
    "Done.", "```", "$ ls -la", "root@3f1c:/# trtexec --help", ">>> engine", "real    0m1.2s",
    "Engine saved to out.plan", "('a', 'b')", "tensor([1., 2.])", "- conv1 is fast",
    "100%|##########| 10/10 [00:01<00:00,  9.97it/s]", "+ trtexec --onnx=a.onnx", "</pre>",
    "| layer | ms |", "Traceback (most recent call last):", "...", "I got this, what now?",
    "*" * 79, "12.5", "conv", "https://x.y/z",
)  # fmt: skip
LISTS = {
    "counted": (
        "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: a.conv, b.conv",
        "(Sparsity) Chose 1 layer(s) using sparse tactics: b.conv",
    ),
    "with fusions": (
        "(Sparsity) Found 3 layer(s) eligible to use sparse tactics: a.conv || b.conv, c + relu",
        "(Sparsity) Chose 1 layer(s) using sparse tactics: c + relu",
    ),
    "uncounted": (
        "(Sparsity) Layers eligible for sparse math: a.conv, b.conv",
        "(Sparsity) TRT inference plan picked sparse implementation for layers: b.conv",
    ),
    "uncounted, none": (
        "(Sparsity) Layers eligible for sparse math: a.conv, b.conv",
        "(Sparsity) TRT inference plan picked sparse implementation for layers:",
    ),
    "none": (
        "(Sparsity) Found 0 layer(s) eligible to use sparse tactics:",
        "(Sparsity) Chose 0 layer(s) using sparse tactics:",
    ),
}


@pytest.mark.parametrize("prefix", [DATED, "[V] ", ""], ids=["dated", "plain", "bare"])
@pytest.mark.parametrize("name", LISTS)
def test_what_a_program_prints_after_a_list_is_no_part_of_its_last_name(
    name: str, prefix: str
) -> None:
    eligible, chosen = (prefix + line for line in LISTS[name])
    (expected,) = parse_lines([eligible, chosen])
    assert expected.contradictions == ()
    for printed in PRINTED:
        for lines in (
            [eligible, printed, chosen],
            [eligible, chosen, printed],
            [eligible, chosen, printed, printed, ""],
            [eligible, printed, prefix + "Total Weights Memory: 9", chosen, printed],
        ):
            (build,) = parse_lines(lines)
            assert (build.eligible, build.chosen) == (expected.eligible, expected.chosen), lines
            assert build.contradictions == ()


# --- progress between tactics ---------------------------------------------------------------------

PROGRESS = (".", "..", "." * 79, "=" * 20, "*")


@pytest.mark.parametrize("tactics", [NEW, OLD], ids=["8.6", "8.4"])
@pytest.mark.parametrize("prefix", [DATED, "[TensorRT] VERBOSE: ", ""], ids=["dated", "7", "bare"])
def test_progress_printed_between_tactics_changes_no_time_and_no_kernel(
    prefix: str, tactics: tuple[str, ...]
) -> None:
    lines = [prefix + line for line in (*BEFORE, *tactics, *AFTER)]
    (expected,) = parse_lines(lines)
    for progress in PROGRESS:
        between = [piece for line in lines for piece in (line, progress)]
        (build,) = parse_lines(between)
        assert facts(build) == facts(expected), progress
