"""What must hold for any names, any producer, any cut and any bytes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.log_lines import parse_lines

from twofour.logs.read import LogParser, OpenSource, lines_of
from twofour.logs.tactics import Budget
from twofour.records.log import Build, Producer, SparsityLine

LOGS = Path(__file__).parents[1] / "data" / "logs"
MESSAGES = (
    "Applying generic optimizations to the graph for inference.",
    "--------------- Timing Runner: conv1 + relu1 (CaskConvolution[0x80000009])",
    "Tactic Name: sm80_xmma_fprop_implicit_gemm_f16f16 Tactic: 0x0000000000000001 Time: 0.5",
    "Tactic Name: sm80_xmma_fprop_sparse_conv_sptensor Tactic: 0x0000000000000002 Time: 0.25",
    ">>>>>>>>>>>>>>> Chose Runner Type: CaskConvolution Tactic: 0x0000000000000002",
    " (foreignNode) (Sparsity) Found 1 layer(s) eligible to use sparse tactics: fc",
    " (foreignNode) (Sparsity) Chose 0 layer(s) using sparse tactics:",
    "Total Weights Memory: 4096 bytes",
    "(Sparsity) Found 2 layer(s) eligible to use sparse tactics: conv1 + relu1, conv2",
    "(Sparsity) Chose 1 layer(s) using sparse tactics: conv1 + relu1",
    "Engine generation completed in 8.5 seconds.",
)
ORT = (
    "2026-05-01 10:00:00.123456789 [V:onnxruntime:Default, tensorrt_execution_provider.h:84 log] "
    "[2026-05-01 10:00:00 VERBOSE] "
)
PREFIXES = {
    "trtexec": ("[07/07/2026-10:00:00] [V] [TRT] ", Producer.TRTEXEC),
    "python": ("[07/07/2026-10:00:00] [TRT] [V] ", Producer.PYTHON),
    "python 8.0": ("[TensorRT] VERBOSE: ", Producer.PYTHON),
    "polygraphy": ("[X] ", Producer.POLYGRAPHY),
    "polygraphy with a clock": ("[X] (10:00:00) [util.py:33] ", Producer.POLYGRAPHY),
    "torch-tensorrt": ("DEBUG: [Torch-TensorRT] - ", Producer.TORCH_TENSORRT),
    "torch-tensorrt in colour": (
        "\x1b[1;35mDEBUG: \x1b[0m[Torch-TensorRT TorchScript Conversion Context] - ",
        Producer.TORCH_TENSORRT,
    ),
    "onnxruntime": (ORT, Producer.ONNXRUNTIME),
    "deepstream": ("INFO: [TRT]: ", Producer.DEEPSTREAM),
    "deepstream by gstreamer": (
        "0:00:01.234 12345 0x55 INFO nvinfer gstnvinfer.cpp:680:gst_nvinfer_logger:<primary> "
        "NvDsInferContext[UID 1]: Info from NvDsInferContextImpl: [TRT]: ",
        Producer.DEEPSTREAM,
    ),
    "a logger of Python": ("2026-11-20 10:00:02,123 - trt - VERBOSE - ", Producer.PYTHON),
    "jetson-inference": ("[TRT]    ", Producer.JETSON_INFERENCE),
    "plain": ("[V] ", Producer.PYTHON),
    "none": ("", Producer.UNKNOWN),
}


def facts(build: Build) -> Build:
    """The build without what its place and prefix decide."""
    layers = tuple(
        replace(layer, tactics=tuple(replace(t, line=0, raw=None) for t in layer.tactics))
        for layer in build.layers
    )
    nowhere = replace(
        build, file="", first_line=0, last_line=0, producer=Producer.UNKNOWN, layers=layers,
        contradictions=tuple(replace(c, line=0) for c in build.contradictions),
    )  # fmt: skip
    quoted: dict[str, Any] = {
        name: tuple(replace(each, line=0, raw="") for each in getattr(build, name))
        for name in ("sparsity_lines", "skipped_tactics", "warnings", "errors", "fusions")
    }
    return replace(nowhere, **quoted)


def parse_bytes(data: bytes, chunk: int = 997) -> tuple[Build, ...]:
    parser = LogParser("log", Budget())
    chunks = (data[i : i + chunk] for i in range(0, len(data), chunk))
    for batch in lines_of(chunks, OpenSource("log")):
        parser.feed(*batch)
    return tuple(parser.finish())


# --- producers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefix", "producer"), PREFIXES.values(), ids=PREFIXES)
def test_the_same_messages_give_the_same_facts_behind_any_prefix(
    prefix: str, producer: Producer
) -> None:
    (build,) = parse_bytes("".join(f"{prefix}{m}\n" for m in MESSAGES).encode())
    (expected,) = parse_lines(f"[07/07/2026-10:00:00] [TRT] [V] {m}" for m in MESSAGES)
    assert facts(build) == facts(expected)
    assert build.producer is producer
    assert build.eligible == ("fc", "conv1 + relu1", "conv2")
    assert build.chosen == ("conv1 + relu1",)
    (layer,) = build.layers
    assert (layer.best_sparse_ms, layer.best_dense_ms, layer.chosen) == (0.25, 0.5, True)


def test_what_a_progress_bar_left_before_a_message_is_no_part_of_it() -> None:
    lines = [f" 10%\r 20%\r[07/07/2026-10:00:00] [TRT] [V] {m}\r" for m in MESSAGES]
    (build,) = parse_lines(lines)
    assert build.eligible == ("fc", "conv1 + relu1", "conv2")
    assert build.sparsity_lines[-1].line == 10


# --- several builds -------------------------------------------------------------------------------

ALONE = {"elided.log", "docker.log", "wrapped.log"}
"""A paste is put together by its own width, which is not that of another log beside it."""
FIXTURES = [p for p in sorted(LOGS.glob("*.log")) if p.name not in ALONE]


@pytest.mark.parametrize("second", FIXTURES, ids=lambda p: p.name)
@pytest.mark.parametrize("first", ["wording_8.log", "contradiction.log", "foreign_node.log"])
def test_two_logs_in_one_file_give_the_builds_of_both(first: str, second: Path) -> None:
    one, two = (path.read_text(encoding="utf-8").splitlines() for path in (LOGS / first, second))
    together = parse_lines([*one, *two])
    assert [facts(b) for b in together] == [
        facts(b) for b in (*parse_lines(one), *parse_lines(two))
    ]


def test_a_second_optimization_profile_is_the_same_build() -> None:
    profile = "Constructing optimization profile number 1 [2/2]."
    messages = [*MESSAGES[:5], profile, *MESSAGES[:1], *MESSAGES[5:]]
    (build,) = parse_lines(f"[TRT] [V] {m}" for m in messages)
    assert build.eligible == ("fc", "conv1 + relu1", "conv2")


# --- names ----------------------------------------------------------------------------------------

PLAIN_NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters=',()[]{}"…'),
    min_size=1,
    max_size=12,
).filter(lambda t: not t.endswith("..") and t.strip() == t)
PARTS = st.one_of(
    PLAIN_NAMES,
    PLAIN_NAMES.map(lambda n: f"(Unnamed Layer* 3) [{n}]"),
    st.tuples(PLAIN_NAMES, PLAIN_NAMES).map(lambda p: f"PWN(PWN({p[0]}, 1), {p[1]})"),
    st.tuples(PLAIN_NAMES, PLAIN_NAMES).map(lambda p: f"{{ForeignNode[{p[0]}...{p[1]}]}}"),
    PLAIN_NAMES.map(lambda n: f"[CONVOLUTION]-[aten_ops.convolution]-[/{n}/conv]"),
)
NAMES = st.lists(PARTS, min_size=1, max_size=4).flatmap(
    lambda parts: st.sampled_from([" + ", " || "]).map(lambda glue: glue.join(parts))
)


def listed(names: list[str], lead: str = " ") -> SparsityLine:
    text = ", ".join(names)
    message = f"(Sparsity) Found {len(names)} layer(s) eligible to use sparse tactics:{lead}{text}"
    (build,) = parse_lines([f"[07/07/2026-10:00:00] [TRT] [V] {message}"])
    return build.sparsity_lines[0]


@settings(max_examples=40, deadline=None)
@given(names=st.lists(NAMES, max_size=8), lead=st.sampled_from([" ", ", ", ""]))
def test_any_list_of_layer_names_survives_being_printed(names: list[str], lead: str) -> None:
    line = listed(names, lead)
    assert line.names == tuple(names)
    assert not line.uncertain


# --- anything -------------------------------------------------------------------------------------

WORDS = [m.encode() for m in MESSAGES] + [
    b"[07/07/2026-10:00:00] [TRT] [V] ", b"[V] ", b"\n", b"\r", b"\x1b[1m", b"(Sparsity) ",
    b"Found ", b"Layers:", b"Name: a, LayerType: ", b"Layer(Cask): a, Tactic: ",
    b"=== Profile (3 iterations ) ===", b"   Time(ms)     Avg.(ms)   Median(ms)   Time(%)   Layer",
    b"&&&& RUNNING TensorRT", b"....", b"[", b" (foreignNode) Autotuning op a: [",
    b" (foreignNode) tactic_id, cost(in ms), kernel_name", b" (foreignNode)   1, 0.5, a",
    b"Throughput: ", b"GPU Compute", b"min: 1 ms", b"||", b", ", b"(", b"\xff", b"Tactic: ",
    b" Time: ", b"0x", b"Engine generation completed in ", b"[MemUsageChange] Init CUDA",
    b"Set Tactic Name: ", b"\x00", b'"', b"Total Weights Memory: 9", b"Deleting timing cache: 9",
    b"9" * 30,
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.binary(max_size=6)), max_size=60))
def test_no_mixture_of_known_words_and_bytes_raises(parts: list[bytes]) -> None:
    parse_bytes(b"".join(parts))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_log_cut_at_any_byte_never_raises_and_keeps_what_came_before(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(LOGS.glob("*.log"))))
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    before, after = parse_bytes(whole[:cut]), parse_bytes(whole)
    assert len(before) <= len(after)


@pytest.mark.parametrize(
    "unit",
    [
        b"(Sparsity) Found 9 layer(s) eligible to use sparse tactics: a\n",
        b"a, ",
        b"Name: a, LayerType: b, Metadata: [ONNX Layer: [",
        b"Layer(a): \n",
        b"\r",
        b"{\n",
        b"[07/07/2026-10:00:00] [",
        b"--------------- Timing Runner: a (",
        b"\x1b[",
        b'"',
    ],
    ids=range(10),
)
@pytest.mark.parametrize("start", [b"", b"[07/07/2026-10:00:00] [TRT] [V] (Sparsity) Found 3 "])
def test_no_repetition_makes_it_slow(unit: bytes, start: bytes) -> None:
    data = start + unit * (200_000 // len(unit))
    began = time.process_time()
    parse_bytes(data, 1 << 20)
    assert time.process_time() - began < 1.5


def test_a_budget_that_is_used_up_loses_tactics_before_it_loses_layers() -> None:
    parser = LogParser("log", Budget(20_000))
    for i in range(40):
        parser.feed([f"[TRT] [V] --------------- Timing Runner: conv{i} (Cask[0x80000009])"])
        parser.feed([f"[TRT] [V] Tactic Name: k{j} Tactic: 0x{j} Time: {j + 1}" for j in range(40)])
    (build,) = parser.finish()
    assert len(build.layers) >= 10
    assert all(layer.best_dense_ms == 1.0 for layer in build.layers)
    assert sum(layer.dropped_tactics for layer in build.layers) >= 500
    assert build.dropped == 40 - len(build.layers)
