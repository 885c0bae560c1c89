"""Loading and running a plan against real TensorRT bindings; run by test_bindings.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorrt as trt
from support.trt_fakes import PLAN, FakeBuild, FakeRun, request_for

from twofour.engines.protocol import no_progress
from twofour.engines.tensorrt.bindings import build_log
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.engines.tensorrt.plan import LoadedPlan
from twofour.errors import BadInputError, BuildFailedError
from twofour.inputs.fits import Arrays
from twofour.records.export import LayerTime


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TensorRtEngine:
    FakeBuild(monkeypatch)  # so that a builder can be created, which is what status() asks
    return TensorRtEngine()


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "sparse.plan"
    path.write_bytes(PLAN)
    return path


def outputs_of(plan: Path, inputs: Arrays) -> dict[str, np.ndarray]:
    with build_log(trt, None) as log, LoadedPlan(trt, plan, log) as loaded:
        return loaded.outputs(inputs)


def test_outputs_are_computed_from_the_inputs_of_each_call(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRun(monkeypatch)
    x = np.arange(48, dtype=np.float32).reshape(3, 16)
    outputs = outputs_of(plan, {"x": x})
    np.testing.assert_array_equal(outputs["y"], 2 * x)
    assert outputs["y"].dtype == np.float32
    np.testing.assert_array_equal(outputs_of(plan, {"x": x[:1]})["y"], 2 * x[:1])


def test_inputs_with_other_names_are_bad_input(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRun(monkeypatch)
    with pytest.raises(BadInputError, match="takes the inputs"):
        outputs_of(plan, {"z": np.ones((1, 16), np.float32)})


def test_the_profile_gives_the_mean_of_each_layer_in_order(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRun(monkeypatch)
    with build_log(trt, None) as log, LoadedPlan(trt, plan, log) as loaded:
        times = loaded.layer_times({"x": np.ones((1, 16), np.float32)}, 4).layers()
    assert times == (LayerTime(name="fc", mean_ms=0.5), LayerTime(name="act", mean_ms=0.25))


def test_a_plan_of_another_tensorrt_fails_to_load(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeRun(monkeypatch)
    plan.write_bytes(b"of another version")
    with pytest.raises(BuildFailedError, match=r"cannot load .*sparse\.plan"):
        outputs_of(plan, {"x": np.ones((1, 16), np.float32)})


def test_a_missing_plan_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRun(monkeypatch)
    with pytest.raises(BadInputError, match="cannot read"):
        outputs_of(tmp_path / "none.plan", {})


@pytest.mark.parametrize("broken", ["context", "enqueue"])
def test_a_plan_that_cannot_run_is_kept_and_says_why(
    engine: TensorRtEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    fake = FakeRun(monkeypatch)
    if broken == "context":
        fake.engine.create_execution_context.side_effect = no_memory
    else:
        fake.can_run = False
    result = engine.build(request_for(tmp_path), no_progress)
    assert (tmp_path / "sparse.plan").read_bytes() == PLAN
    assert "TensorRT" in (result.error or "")
    assert (result.layers, result.profile) == (None, None)
    assert "sparse.plan" in (tmp_path / "sparse.log").read_text()


def no_memory(*_: Any) -> None:
    return None
