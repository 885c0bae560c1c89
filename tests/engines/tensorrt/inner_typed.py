"""What TensorRT 10 and 11 have and 8.6 lacks: strong typing, a progress monitor, bfloat16.

Against real bindings over stand-in libraries; run by test_engine_tensorrt.py.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorrt as trt
from support.trt_fakes import PLAN, FakeBuild, FakeRun, request_for, spec

from twofour.engines.protocol import no_progress
from twofour.engines.tensorrt.bindings import build_log
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.engines.tensorrt.plan import LoadedPlan
from twofour.errors import BadInputError, BuildFailedError
from twofour.records.options import AllowedType

MAJOR = int(trt.__version__.split(".")[0])


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    return FakeBuild(monkeypatch)


def test_the_network_is_strongly_typed_and_has_no_precision_flag(
    tmp_path: Path, build: FakeBuild
) -> None:
    TensorRtEngine().build(request_for(tmp_path), no_progress)
    assert build.network_flags == {10: 1 << 1, 11: 1 << 0}[MAJOR]
    assert not {"FP16", "BF16", "INT8", "FP8"} & {flag.name for flag in build.flags}


def test_build_phases_reach_the_caller_and_the_monitor_answers_true(
    tmp_path: Path, build: FakeBuild
) -> None:
    told: list[tuple[str, int | None, int | None]] = []

    def report(text: str, done: int, total: int | None) -> None:
        told.append((text, done, total))

    TensorRtEngine().build(request_for(tmp_path), report)
    phases = [(done, total) for text, done, total in told if text == "Building Engine"]
    assert phases == [(0, 2), (1, 2), (2, 2)]
    assert build.monitor_answers == [True, True]


def test_a_progress_display_that_fails_does_not_fail_the_build(
    tmp_path: Path, build: FakeBuild
) -> None:
    def broken(text: str, *_: int | None) -> None:
        if text == "Building Engine":
            raise ValueError("no terminal")

    TensorRtEngine().build(request_for(tmp_path), broken)
    assert build.monitor_answers == [True, True]
    assert "no terminal" in (tmp_path / "sparse.log").read_text()


def test_ctrl_c_in_a_message_cancels_at_the_next_step(tmp_path: Path, build: FakeBuild) -> None:
    build.messages = [("INFO", "anything")]
    build.plan = None

    def interrupt(_text: str, done: int, _total: int | None) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TensorRtEngine().build(request_for(tmp_path), interrupt)
    assert build.monitor_answers == [False, False]
    assert not (tmp_path / "sparse.plan").exists()


@pytest.mark.parametrize(
    ("node", "words", "said"),
    [
        ("bad", "no importer registered for op: Nope", r"node 'bad' \(Nope\)"),
        ("", "Failed to parse the ONNX model.", r"sparse\.onnx: Failed to"),  # of the whole file
    ],
)
def test_a_model_the_parser_refuses_fails_with_the_parsers_words(
    tmp_path: Path, build: FakeBuild, node: str, words: str, said: str
) -> None:
    error = spec("ParserError")
    error.desc.return_value = words
    error.node_name.return_value, error.node_operator.return_value = node, "Nope"
    build.parser.parse_from_file.return_value = False
    build.parser.num_errors = 1
    build.parser.get_error.return_value = error
    with pytest.raises(BuildFailedError, match=said):
        TensorRtEngine().build(request_for(tmp_path), no_progress)


def test_float32_examples_feed_a_bfloat16_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeBuild(monkeypatch)
    plan = tmp_path / "sparse.plan"
    plan.write_bytes(PLAN)
    FakeRun(monkeypatch, dtype=trt.bfloat16)
    x = np.full((2, 16), 1.5, np.float32)
    with build_log(trt, None) as log, LoadedPlan(trt, plan, log) as loaded:
        y = loaded.outputs({"x": x})["y"]
    assert y.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(y.astype(np.float32), 3.0)


def test_types_that_are_allowed_make_a_network_before_11_weakly_typed(
    tmp_path: Path, build: FakeBuild
) -> None:
    if MAJOR > 10:
        return  # the test below
    request = request_for(tmp_path, allow=(AllowedType.FP16, AllowedType.BF16))
    TensorRtEngine().build(request, no_progress)
    assert not (build.network_flags or 0) & 1 << 1  # STRONGLY_TYPED
    assert {"FP16", "BF16"} <= {flag.name for flag in build.flags}
    assert "[I] Precision: FP32+FP16+BF16" in (tmp_path / "sparse.log").read_text()


def test_a_type_that_cannot_be_allowed_is_refused_with_what_to_do(
    tmp_path: Path, build: FakeBuild
) -> None:
    allow = AllowedType.INT8 if MAJOR == 10 else AllowedType.FP16
    request = request_for(tmp_path, allow=(allow,))
    with pytest.raises(BadInputError) as told:
        TensorRtEngine().build(request, no_progress)
    if MAJOR == 10:
        assert "has no Q/DQ nodes" in told.value.message
    else:
        assert "--fp16 ended with" in told.value.message
        assert "--precision float16" in (told.value.hint or "")
    assert build.network_flags is None
