"""A plan as a TimedModel against real TensorRT bindings; run by test_bindings.py."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_cudart import advance, fake_cudart
from support.trt_fakes import PLAN, FakeBuild, FakeRun, TimedCuda

from twofour.engines.protocol import OpenRequest
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.engines.tensorrt.plan import EVENTS, TensorRtTimedModel
from twofour.errors import BadInputError, BuildFailedError
from twofour.records.export import LayerTime, TensorShape

X = np.arange(48, dtype=np.float32).reshape(3, 16)


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    return fake_cudart(tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL) -> FakeRun:
    """A run takes 1.5 ms of the GPU's clock."""
    import polygraphy.cuda.cuda

    FakeBuild(monkeypatch)  # so that a builder can be created, which is what the status asks
    fake = FakeRun(monkeypatch)
    monkeypatch.setattr(polygraphy.cuda.cuda, "G_CUDA", TimedCuda(library))
    execute = fake.context.execute_async_v3.side_effect

    def timed(stream: int) -> Any:
        advance(library, 1.5)
        return execute(stream)

    fake.context.execute_async_v3.side_effect = timed
    return fake


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "sparse.plan"
    path.write_bytes(PLAN)
    return path


@pytest.fixture
def model(fake: FakeRun, plan: Path) -> Iterator[TensorRtTimedModel]:
    assert fake.runs == 0
    opened = open_plan(plan)
    yield opened
    opened.close()


def open_plan(plan: Path) -> TensorRtTimedModel:
    request = OpenRequest(
        mode="sparse",
        weights="sparse",
        threads=4,
        model="sparse.onnx",
        precision="float16",
        file=plan,
        sparse_kernels=True,
    )
    return TensorRtEngine().open(request)


def test_settings_inputs_and_size_are_those_of_the_plan(model: TensorRtTimedModel) -> None:
    settings = model.settings
    assert (settings.engine, settings.mode, settings.weights) == ("tensorrt", "sparse", "sparse")
    assert (settings.model, settings.precision) == ("sparse.onnx", "float16")
    assert settings.sparse_kernels is True
    assert (settings.threads, settings.timing, settings.device) == (None, EVENTS, "GPU")
    assert model.inputs == (TensorShape(name="x", dtype="float32", shape=("?", 16)),)
    assert model.size_bytes == len(PLAN)


def test_a_run_is_timed_by_the_clock_of_the_gpu(model: TensorRtTimedModel, fake: FakeRun) -> None:
    model.prepare({"x": X})
    before = fake.runs
    assert [model.run_ms() for _ in range(3)] == pytest.approx([1.5, 1.5, 1.5])
    assert fake.runs == before + 3


def test_other_outputs_leave_the_prepared_inputs_prepared(
    model: TensorRtTimedModel, fake: FakeRun
) -> None:
    model.prepare({"x": X})
    np.testing.assert_array_equal(model.outputs({"x": X[:1]})["y"], 2 * X[:1])
    assert fake.shape == (3, 16)
    model.run_ms()
    assert fake.shape == (3, 16)


def test_the_profile_is_of_the_prepared_inputs(model: TensorRtTimedModel) -> None:
    model.prepare({"x": X})
    assert model.layer_times(4) == (
        LayerTime(name="fc", mean_ms=0.5),
        LayerTime(name="act", mean_ms=0.25),
    )


def test_memory_that_loading_and_running_take_is_counted_and_no_other(
    plan: Path, fake: FakeRun, library: ctypes.CDLL
) -> None:
    execute = fake.context.execute_async_v3.side_effect

    def load(_content: bytes) -> object:
        library.use(1000 + 4096)
        return fake.engine

    def run(stream: int) -> object:
        library.use(9000 + 512)
        return execute(stream)

    fake.runtime.deserialize_cuda_engine.side_effect = load
    fake.context.execute_async_v3.side_effect = run
    model = open_plan(plan)
    library.use(9000)  # another variant is opened
    model.prepare({"x": X})
    library.use(1000)
    assert model.peak_device_memory_bytes() == 4096 + 512


def test_a_run_that_cannot_be_enqueued_fails(model: TensorRtTimedModel, fake: FakeRun) -> None:
    model.prepare({"x": X})
    fake.can_run = False
    with pytest.raises(BuildFailedError, match=r"failed while running .*sparse\.plan"):
        model.run_ms()


def test_inputs_that_do_not_fit_are_bad_input(model: TensorRtTimedModel) -> None:
    with pytest.raises(BadInputError, match="16"):
        model.prepare({"x": X[:, :8]})


@pytest.mark.usefixtures("fake")
def test_a_plan_that_does_not_load_leaves_nothing_open(plan: Path, library: ctypes.CDLL) -> None:
    plan.write_bytes(b"of another version")
    with pytest.raises(BuildFailedError, match=r"cannot load .*sparse\.plan"):
        open_plan(plan)
    assert library.alive() == 0


def test_closing_frees_the_events(fake: FakeRun, plan: Path, library: ctypes.CDLL) -> None:
    assert fake.runs == 0
    opened = open_plan(plan)
    assert library.alive() == 2
    opened.close()
    assert library.alive() == 0
