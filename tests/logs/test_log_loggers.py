"""Prefixes of loggers that hand TensorRT's messages on: Python's logging, GStreamer, Polygraphy."""

from __future__ import annotations

import pytest

from twofour.logs.prefix import take_apart
from twofour.logs.read import parse_lines
from twofour.records.log import Producer, SparsityFlag

PYTHON = "2026-11-20 10:00:02,123 - trt - VERBOSE - "
GSTREAMER = (
    "0:00:01.234 12345 0x55 INFO nvinfer gstnvinfer.cpp:680:gst_nvinfer_logger:<primary> "
    "NvDsInferContext[UID 1]: Info from NvDsInferContextImpl: [TRT]: "
)
MESSAGES = (
    "--------------- Timing Runner: c1 (CaskConvolution[0x80000009])",
    "c1 Set Tactic Name: sm80_xmma_fprop_sparse_conv_sptensor Tactic: 0x00000000000000a1",
    "Tactic: 0x00000000000000a1 Time: 0.008",
    "(Sparsity) Found 1 layer(s) eligible to use sparse tactics: c1",
    "(Sparsity) Chose 1 layer(s) using sparse tactics: c1",
    "Engine generation completed in 3.5 seconds.",
)


@pytest.mark.parametrize(
    ("prefix", "producer"), [(PYTHON, Producer.PYTHON), (GSTREAMER, Producer.DEEPSTREAM)]
)
def test_tactics_behind_a_logger_s_prefix_are_read(prefix: str, producer: Producer) -> None:
    (build,) = parse_lines(prefix + message for message in MESSAGES)
    assert (build.producer, build.chosen, build.build_s) == (producer, ("c1",), 3.5)
    assert build.layers[0].best_sparse_ms == 0.008


@pytest.mark.parametrize("message", [*MESSAGES, "conv: x Set Tactic Name: a Tactic: 1"])
@pytest.mark.parametrize(
    "prefix",
    [
        PYTHON.replace("VERBOSE", "WARNING"),
        "2026-11-20 10:00:02,123 [WARNING] trt: ",
        "2026-11-20 10:00:02,123 WARNING trt: ",
        "2026-11-20 10:00:02,123:WARNING:trt: ",
        "[2026-11-20 10:00:02,123] [trt] [WARNING] ",
        "2026-11-20 10:00:02 | WARNING  | tensorrt:",
        "WARNING:my.tensorrt_logger:",
        GSTREAMER.replace("INFO", "WARN"),
    ],
)
def test_a_logger_s_prefix_of_any_usual_form_gives_severity_and_message(
    prefix: str, message: str
) -> None:
    found = take_apart(prefix + message)
    assert found is not None
    assert (found.severity, found.message) == ("W", message)


def test_what_other_loggers_warn_of_is_no_warning_of_tensorrt() -> None:
    for line in ("WARNING:root:slow", "2026-11-20 10:00:02,123 - app - ERROR - no such file"):
        assert take_apart(line) is None
        assert parse_lines([line]) == ()


def test_a_tag_behind_a_logger_s_prefix_gives_the_severity() -> None:
    found = take_apart("2026-11-20 10:00:02,123 - root - INFO - [TRT] [E] Builder failed")
    assert found is not None
    assert (found.style, found.severity, found.message) == (Producer.PYTHON, "E", "Builder failed")


def test_an_excerpt_of_polygraphy_is_known_by_its_words_and_its_flags_give_the_precision() -> None:
    lines = (
        "[I] Building engine with configuration:",
        "    Flags                  | [FP16, SPARSE_WEIGHTS]",
        "    Engine Capability      | EngineCapability.STANDARD",
        "[I] Finished engine building in 3.500 seconds",
    )
    (build,) = parse_lines(lines)
    assert (build.producer, build.precision) == (Producer.POLYGRAPHY, "FP32+FP16")
    assert (build.sparsity, build.build_s) == (SparsityFlag.ENABLED, 3.5)
    (silent,) = parse_lines([lines[0], "    Flags                  | []", lines[3]])
    assert (silent.precision, silent.sparsity) == (None, SparsityFlag.DISABLED)
