"""What a logger puts behind every message is no part of a name, a time or an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from twofour.logs.outer import OuterSuffixes
from twofour.logs.read import parse_lines
from twofour.reports.log_document import answer

MESSAGES = (
    "--------------- Timing Runner: conv1 + relu1 (CaskConvolution[0x80000009])",
    "Tactic Name: sm80_xmma_fprop_implicit_gemm_f16f16 Tactic: 0x00000000000000a1 Time: 0.5",
    "Tactic Name: sm80_xmma_fprop_sparse_conv_sptensor Tactic: 0x00000000000000a2 Time: 0.75",
    ">>>>>>>>>>>>>>> Chose Runner Type: CaskConvolution Tactic: 0x00000000000000a1",
    " (foreignNode) (Sparsity) Found 1 layer(s) eligible to use sparse tactics: fc",
    " (foreignNode) (Sparsity) Chose 0 layer(s) using sparse tactics:",
    "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: conv1 + relu1, conv2",
    "(Sparsity) Chose 0 layer(s) using sparse tactics:",
    "Engine generation completed in 8.5 seconds.",
)
DATED = "[07/07/2026-10:00:00] [V] [TRT] "
Behind = Callable[[int, str], str]
BEHIND: dict[str, Behind] = {
    "a source position": lambda n, m: f"[06:14:{n:02d}] DEBUG    {m}   builder.py:{40 + n}",
    "a position, flush right": lambda n, m: f"[06:14:{n:02d}] DEBUG    {m:<120} builder.py:42",
    "a field": lambda n, m: f"2026-07-07T06:14:{n:02d}Z [debug    ] {m:<30} severity=VERBOSE",
    "a logger and fields": lambda n, m: f"{DATED}{m}    [trt] pid={n} severity=VERBOSE",
    "a quote": lambda n, m: f'I0707 06:14:{n:02d}.123456 1 logging.cc:49] "{m}"',
    "a quote and a brace": lambda n, m: f'06:14:{n:02d} DEBUG {{"log": "{m}"}} end',
    "fields of JSON": lambda n, m: f'app 06:14:{n:02d} INFO {{"msg": "{m}", "line": {n}}}x',
    "a function in brackets": lambda n, m: f"{DATED}{m} (build.py:{n}, in make)",
    "a thread": lambda n, m: f"[V] {m} <thread-{n % 3}>",
    "an HTML tag": lambda _, m: f"[TRT] [V] {m}</li>",
}


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_what_stands_behind_every_message_changes_no_fact(behind: Behind) -> None:
    (build,) = parse_lines(behind(n, message) for n, message in enumerate(MESSAGES))
    (expected,) = parse_lines(DATED + message for message in MESSAGES)
    assert (build.eligible, build.chosen) == (("fc", "conv1 + relu1", "conv2"), ())
    assert build.contradictions == ()
    assert build.build_s == 8.5
    assert [t.ms for t in build.layers[0].tactics] == [0.5, 0.75]
    assert build.layers[0].name == expected.layers[0].name == "conv1 + relu1"


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
def test_two_lines_alone_show_what_stands_behind_both(behind: Behind) -> None:
    found, none, end = MESSAGES[6:]
    (build,) = parse_lines(behind(n, message) for n, message in enumerate((found, none, end)))
    assert (build.eligible, build.chosen) == (("conv1 + relu1", "conv2"), ())


def test_what_another_program_glued_to_the_lists_alone_is_no_name() -> None:
    lines = [DATED + m + "Saved to m.plan" * ("(Sparsity)" in m) for m in MESSAGES]
    (build,) = parse_lines(lines)
    assert (build.eligible, build.chosen) == (("fc", "conv1 + relu1", "conv2"), ())
    assert answer(build).startswith("3 layers are eligible, none runs sparse")
    old = (
        "(Sparsity) Layers eligible for sparse math: conv1 + relu1, conv2",
        "(Sparsity) TRT inference plan picked sparse implementation for layers:",
    )
    (build,) = parse_lines(f"{DATED}{m}Saved to m.plan" for m in old)
    assert (build.eligible, build.chosen) == (("conv1 + relu1", "conv2"), ())
    (build,) = parse_lines(f"{DATED}{m} conv2" for m in (old[0] + ", a,", old[1]))
    assert build.chosen == ("conv2",)


@pytest.mark.parametrize(
    ("eligible", "chosen"),
    [("a, b", " b"), ("b", " b"), ("a + b", " b"), ("a || b", " b"), ("a, b", ", a, b")],
)
def test_names_behind_a_count_of_none_stay_names(eligible: str, chosen: str) -> None:
    found = f"(Sparsity) Found 2 layer(s) eligible to use sparse tactics: {eligible}"
    lines = [DATED + m for m in (found, MESSAGES[5] + chosen, found, MESSAGES[7] + chosen)]
    (build, *_) = parse_lines(lines)
    assert build.chosen == tuple(chosen.strip(", ").split(", "))
    assert build.eligible == tuple(eligible.split(", "))


def test_a_log_with_nothing_behind_its_messages_comes_back_as_given() -> None:
    lines = [DATED + message for message in MESSAGES] * 8
    suffixes = OuterSuffixes()
    assert suffixes.removed(lines) is lines
    assert suffixes.removed(lines) is lines
