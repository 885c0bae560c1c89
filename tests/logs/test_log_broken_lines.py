"""Pastes that a terminal, a mail or an editor broke, at any width and with blanks lost or kept."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from twofour.logs.layers import Budget
from twofour.logs.parser import LogParser
from twofour.logs.read import parse_lines
from twofour.records.log import Build, Tactic

BEFORE = ("--------------- Timing Runner: conv1 + relu1 (CaskConvolution[0x80000009])",)
NEW = (
    "Tactic Name: sm80_xmma_fprop_implicit_gemm_f16f16 Tactic: 0x00000000000000a1 Time: 0.5",
    "Tactic Name: sm80_xmma_fprop_sparse_conv_sptensor Tactic: 0x00000000000000a2 Time: 0.25",
)
OLD = (
    f"conv1 + relu1 Set {NEW[0].removesuffix(' Time: 0.5')}",
    "Tactic: 0x00000000000000a1 Time: 0.5",
    f"conv1 + relu1 Set {NEW[1].removesuffix(' Time: 0.25')}",
    "Tactic: 0x00000000000000a2 Time: 0.25",
)
AFTER = (
    ">>>>>>>>>>>>>>> Chose Runner Type: CaskConvolution Tactic: 0x00000000000000a2",
    " (foreignNode) (Sparsity) Found 1 layer(s) eligible to use sparse tactics: fc",
    " (foreignNode) (Sparsity) Chose 0 layer(s) using sparse tactics:",
    "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: conv1 + relu1, conv2",
    "(Sparsity) Chose 1 layer(s) using sparse tactics: conv1 + relu1",
    "Engine generation completed in 8.5 seconds.",
)
DATED = "[07/07/2026-10:00:00] [V] [TRT] "
SHORTEST = 25


def broken_hard(line: str, width: int) -> list[str]:
    return [line[i : i + width] for i in range(0, len(line), width)]


def broken_at_blanks(line: str, width: int) -> list[str]:
    """Every blank at a break is lost, as an editor loses it."""
    pieces = []
    while len(line) > width:
        place = line.rfind(" ", SHORTEST, width + 1)
        place, after = (width, width) if place < 0 else (place, place + 1)
        pieces.append(line[:place])
        line = line[after:]
    return [*pieces, line]


def without_places(build: Build) -> tuple[object, ...]:
    """What the log says, without line numbers."""
    layers = tuple(
        replace(layer, tactics=tuple(replace(t, line=0, raw=None) for t in layer.tactics))
        for layer in build.layers
    )
    lists = tuple((line.kind, line.printed_count, line.names) for line in build.sparsity_lines)
    return build.eligible, build.chosen, build.build_s, build.outcome, build.counts, layers, lists


@pytest.mark.parametrize("prefix", [DATED, "[V] "], ids=["dated", "plain"])
@pytest.mark.parametrize("tactics", [NEW, OLD], ids=["one line", "two lines"])
@pytest.mark.parametrize("width", range(70, 130))
def test_a_paste_broken_at_any_width_says_the_same(
    width: int, tactics: tuple[str, ...], prefix: str
) -> None:
    whole = [prefix + message for message in (*BEFORE, *tactics, *AFTER)]
    (expected,) = parse_lines(whole)
    assert expected.layers[0].best_sparse_ms == 0.25
    for breaking in (broken_hard, broken_at_blanks):
        (build,) = parse_lines(piece for line in whole for piece in breaking(line, width))
        assert without_places(build) == without_places(expected)


@pytest.mark.parametrize(
    "message",
    [
        "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: conv1, fc",
        "(Sparsity) Layers eligible for sparse math: conv1, fc",
        "(foreignNode) (Sparsity) Found 2 layer(s) eligible to use sparse tactics: conv1, fc",
    ],
)
def test_a_break_anywhere_in_the_fixed_words_of_a_list_loses_nothing(message: str) -> None:
    blanks = [i for i, c in enumerate(message) if c == " " and i < message.index(": ")]
    assert len(blanks) > 4
    for place in blanks:
        first, rest = message[:place], message[place + 1 :]
        (build,) = parse_lines([f"{DATED}{first}", rest, f"{DATED}Total Weights Memory: 9"])
        assert build.eligible == ("conv1", "fc")


def kernels(*lines: str) -> list[tuple[str | None, bool | None, float | None]]:
    (build,) = parse_lines(f"{DATED}{line}" if line[0] != "|" else line[1:] for line in lines)
    found: tuple[Tactic, ...] = build.layers[0].tactics
    return [(tactic.kernel, tactic.sparse, tactic.ms) for tactic in found]


def test_half_a_kernel_name_is_put_together_or_is_no_name() -> None:
    rest = "|se_conv_sptensor Tactic: 0x00000000000000a2"
    half = "conv1 + relu1 Set Tactic Name: sm80_xmma_fprop_spar"
    whole = ("sm80_xmma_fprop_sparse_conv_sptensor", True, 0.25)
    assert kernels(*BEFORE, *OLD[:2], half, rest, OLD[3])[0] == whole
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
    "Done.", "done", "OK", "```", "~~~", "$ ", "$ ls -la", "root@3f1c:/# trtexec --help",
    "user@host:~/x$ cat a.log", "(venv) me@box:/w$ ", "PS C:\\work> dir", ">>> engine", "---",
    "real    0m1.2s", "user\t0m0.9s", "real 0m1.234s", "[*] Building done", "Elapsed: 3.2 s",
    "Engine saved to out.plan", "('a', 'b')", "[1, 2, 3]", "{'a': 1, 'b': 2}", "tensor([1., 2.])",
    "100%|##########| 10/10 [00:01<00:00,  9.97it/s]", "  5%|5         | 1/20 [00:01<00:20]",
    "- conv1 is fast", "* conv1", "+ trtexec --onnx=a.onnx", "# Results", "## Log", "1. next step",
    "| layer | ms |", "<details>", "</pre>", "&&&&", "Traceback (most recent call last):",
    "Saving engine...", "...", "Segmentation fault (core dumped)", "Building took 3 s, saved 4 MB",
    "I got this, what now?", "=" * 20, "*" * 79, "exit code 0", "0", "12.5", "conv", "https://x.y/z",
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


def test_a_list_shortened_by_its_author_takes_no_line_after_it() -> None:
    for end in ("a, b", "a, b, ....", "a, b, ...more"):
        line = f"{DATED}(Sparsity) Found 9 layer(s) eligible to use sparse tactics: {end}"
        for printed in ("Done.", "```", "root@3f1c:/# ls", "100%|##| 10/10 [00:01<00:00]"):
            (build,) = parse_lines([line, printed])
            assert build.eligible == ("a", "b"), (line, printed)


NAMES = [f"backbone.layer{i}.{i % 3}.conv{i % 2} + backbone.layer{i}.relu" for i in range(12)]


@pytest.mark.parametrize("wording", ["Found 12 layer(s) eligible to use sparse tactics",
                                     "Layers eligible for sparse math"])  # fmt: skip
@pytest.mark.parametrize("prefix", [DATED, "[V] ", ""], ids=["dated", "plain", "bare"])
def test_one_long_list_alone_is_put_together_at_any_width(prefix: str, wording: str) -> None:
    for width in range(60, 200, 3):
        line = f"{prefix}(Sparsity) {wording}: {', '.join(NAMES)}"
        for breaking in (broken_hard, broken_at_blanks):
            (build,) = parse_lines([*breaking(line, width), f"{prefix}Total Weights Memory: 9"])
            assert build.eligible == tuple(NAMES), (width, breaking.__name__)


def test_unnamed_layers_are_put_together_where_an_editor_broke_them_at_blanks() -> None:
    names = tuple(f"(Unnamed Layer* {i}) [Convolution]" for i in range(9))
    line = f"{DATED}(Sparsity) Layers eligible for sparse math: {', '.join(names)}"
    for width in range(60, 140):
        (build,) = parse_lines([*broken_at_blanks(line, width), f"{DATED}Total Weights Memory: 9"])
        assert build.eligible == names, width


MARKED = (
    "**(Sparsity) Found 2 layer(s) eligible to use sparse tactics: a, b**",
    "(Sparsity) **Found 2 layer(s) eligible to use sparse tactics**: a, b",
    "(Sparsity) Found 2 layer(s) eligible to use sparse tactics:** a, b",
    "`(Sparsity) Found 2 layer(s) eligible to use sparse tactics: a, b`",
    "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: `a`, `b`",
    "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: **a**, **b**",
    "<b>(Sparsity) Found 2 layer(s) eligible to use sparse tactics: a, b</b>",
    "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: a, b<br>",
    "(Sparsity) Layers eligible for sparse math:** a, b",
    "**(Sparsity) Layers eligible for sparse math: a, b**",
)


@pytest.mark.parametrize("line", MARKED)
def test_marks_of_markdown_and_html_are_no_part_of_a_name(line: str) -> None:
    for prefix in (DATED, "", "> ", "- "):
        (build,) = parse_lines([prefix + line])
        assert build.eligible == ("a", "b")
    empty = line.replace(" a, b", "").replace(" `a`, `b`", "").replace(" **a**, **b**", "")
    (none,) = parse_lines([DATED + empty.replace("Found 2", "Found 0")])
    assert none.eligible in {(), None}


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        [""] * 1_000_000,
        [f"{DATED}(Sparsity) Found 1 layer(s) eligible to use sparse tactics: a"]
        + [",b"] * 100_000,
        [f"{DATED}Set", "Tactic"] * 50_000,
        [f"{DATED}x:", "y"] * 50_000,
    ],
    ids=["newlines", "continuations", "halves", "pairs"],
)
def test_many_short_lines_are_read_in_time(lines: list[str]) -> None:
    parser = LogParser("log", Budget())
    began = time.process_time()
    for start in range(0, len(lines), 10_000):
        parser.feed(lines[start : start + 10_000])
    parser.finish()
    assert time.process_time() - began < 4.0


# --- progress between tactics ---------------------------------------------------------------------

SEVEN = (
    "fc (caskFullyConnectedFP32) Set Tactic Name: volta_sgemm_128x32_relu_nn_v1",
    "Tactic: 8190451076631534509 time 0.028288",
    "fc (caskFullyConnectedFP32) Set Tactic Name: volta_sgemm_64x32_relu_nn_v1",
    "Tactic: 8190451076631534510 time 0.5",
)
SAME_LENGTH = tuple(
    f"Tactic Name: sm80_xmma_fprop_tilesize{i} Tactic: 0x00000000000000a{i} Time: 0.0{i}5"
    for i in range(1, 8)
)
PROGRESS = (
    ".",
    "..",
    "....",
    "." * 79,
    "12",
    "3",
    "0.5",
    "7.",
    "e",
    "1e5",
    "50%",
    "[3/9]",
    "...12",
)


@pytest.mark.parametrize("tactics", [NEW, OLD, SEVEN, SAME_LENGTH], ids=["8.6", "8.4", "7", "even"])
@pytest.mark.parametrize("prefix", [DATED, "[TensorRT] VERBOSE: ", ""], ids=["dated", "7", "bare"])
def test_progress_printed_between_tactics_changes_no_time_and_no_kernel(
    prefix: str, tactics: tuple[str, ...]
) -> None:
    lines = [prefix + line for line in (*BEFORE, *tactics, *AFTER)]
    (expected,) = parse_lines(lines)
    for progress in PROGRESS:
        between = [piece for line in lines for piece in (line, progress)]
        (build,) = parse_lines(between)
        assert without_places(build) == without_places(expected), progress
        (counted,) = parse_lines(
            piece for n, line in enumerate(lines) for piece in (line, str(n), str(n))
        )
        assert without_places(counted) == without_places(expected)


def test_a_time_that_a_terminal_broke_is_put_together() -> None:
    time_only = "Tactic: 0x00000000000000a1 Time: 0."
    assert kernels(*BEFORE, time_only, "|0129196")[0][2] == 0.0129196


@pytest.mark.parametrize("blank", [[], [""]], ids=["at once", "after a blank line"])
@pytest.mark.parametrize("mark", ["- ", "  * ", "\N{BULLET} ", "{}. ", "  {}) "])
def test_a_list_with_a_mark_before_every_name_is_read(mark: str, blank: list[str]) -> None:
    names = ("c24 + relu1", "PWN(PWN(a), b)", "(Unnamed Layer* 3) [Convolution]", "x || y")
    points = [mark.format(n) + name for n, name in enumerate(names, 1)]
    found = f"{DATED}(Sparsity) Found 5 layer(s) eligible to use sparse tactics:"
    none = f"{DATED}(Sparsity) Chose 0 layer(s) using sparse tactics:"
    other = ["- pushed the engine to the server", "- 3 files written", "- gemmT"]
    lines = [found, *blank, *points, *other, none, *blank, points[0], points[3], *other]
    (build,) = parse_lines([*lines, f"{DATED}Engine generation completed in 8.5 seconds."])
    assert build.eligible == names
    assert build.chosen == (names[0], names[3])


def test_points_that_are_no_names_are_not_taken_for_a_list_of_tensorrt_8() -> None:
    old = f"{DATED}(Sparsity) Layers eligible for sparse math:"
    (build,) = parse_lines([old, "", "- conv1 + relu1", "- conv2", "- see the docs for more"])
    assert build.eligible == ("conv1 + relu1", "conv2")
    (empty,) = parse_lines([old, "- see the docs for more", "- conv2"])
    chosen = f"{DATED}(Sparsity) TRT inference plan picked sparse implementation for layers:"
    (both,) = parse_lines([old, "- conv1", "- conv2", chosen, "- conv2", "- conv3"])
    assert (both.eligible, both.chosen) == (("conv1", "conv2"), ("conv2",))
    assert empty.eligible == ()


@pytest.mark.parametrize("chosen", [0, 3])
def test_a_break_inside_the_sign_of_a_fusion_adds_no_blank(chosen: int) -> None:
    start = f"(Sparsity) Chose {chosen} layer(s) using sparse tactics: /m/a/Conv |"
    lines = [DATED + start, "| /m/b/Conv, /m/c/Conv || /m/d/", "Conv, /m/e/Conv"]
    found = "(Sparsity) Found 5 layer(s) eligible to use sparse tactics: "
    whole = ("/m/a/Conv || /m/b/Conv", "/m/c/Conv || /m/d/Conv", "/m/e/Conv")
    (build,) = parse_lines([f"{DATED}{found}{', '.join(whole)}", *lines])
    assert build.chosen == whole
