"""A plan as a TimedModel against real TensorRT bindings; run by test_engine_tensorrt.py."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_cudart import advance, fake_cudart
from support.trt_fakes import PLAN, FakeBuild, FakeRun, TimedCuda

from twofour.engines.protocol import OpenRequest
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.engines.tensorrt.plan import GRAPH, QUEUED, TensorRtTimedModel
from twofour.errors import BadInputError, BuildFailedError
from twofour.records.export import LayerTime, TensorShape

X = np.arange(48, dtype=np.float32).reshape(3, 16)


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    return fake_cudart(tmp_path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL) -> FakeRun:
    """A run takes `gpu_ms` of the GPU's clock; a captured one only calls the library."""
    import polygraphy.cuda.cuda

    FakeBuild(monkeypatch)  # so that a builder can be created, which is what the status asks
    fake = FakeRun(monkeypatch)
    monkeypatch.setattr(polygraphy.cuda.cuda, "G_CUDA", TimedCuda(library))
    execute = fake.context.execute_async_v3.side_effect

    def timed(stream: int) -> Any:
        if library.capturing() and fake.allocator is not None:
            return False  # a graph cannot call it
        advance(library, fake.gpu_ms)
        return True if library.capturing() else execute(stream)

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
    assert (settings.threads, settings.timing, settings.device) == (None, QUEUED, "GPU")
    assert model.inputs == (TensorShape(name="x", dtype="float32", shape=("?", 16)),)
    assert model.size_bytes == len(PLAN)


def test_the_host_time_of_an_enqueue_is_kept(model: TensorRtTimedModel, fake: FakeRun) -> None:
    model.prepare({"x": X})
    enqueue = fake.context.execute_async_v3.side_effect

    def slow(stream: int) -> Any:
        time.sleep(0.02)
        return enqueue(stream)

    fast_ms = model.settings.enqueue_ms
    fake.context.execute_async_v3.side_effect = slow
    model.prepare({"x": X})
    slow_ms = model.settings.enqueue_ms
    assert fast_ms is not None
    assert slow_ms is not None
    assert 0 < fast_ms < 20 <= slow_ms


@pytest.mark.parametrize(("ms", "launches"), [(0.0, 50), (0.1, 10), (0.4, 3), (20.0, 1)])
def test_a_run_is_a_graph_that_is_launched_for_a_millisecond(
    model: TensorRtTimedModel, fake: FakeRun, library: ctypes.CDLL, ms: float, launches: int
) -> None:
    fake.gpu_ms = ms
    model.prepare({"x": X})
    assert (model.settings.timing, model.settings.launches) == (GRAPH, launches)
    enqueued, launched = fake.runs, library.launches()
    assert [model.run_ms() for _ in range(3)] == pytest.approx([ms] * 3, abs=1e-4)
    # each sample follows a run that is not timed
    assert (fake.runs, library.launches()) == (enqueued, launched + 3 * (1 + launches))


@pytest.mark.parametrize("is_invalid", [True, False])
def test_an_engine_that_cannot_be_captured_is_enqueued(
    model: TensorRtTimedModel, fake: FakeRun, library: ctypes.CDLL, is_invalid: bool
) -> None:
    enqueue = fake.context.execute_async_v3.side_effect

    def refusing(stream: int) -> Any:
        if not library.capturing():
            return enqueue(stream)
        library.invalidate()
        return is_invalid  # TensorRT may notice or not

    fake.context.execute_async_v3.side_effect = refusing
    model.prepare({"x": X})
    assert model.settings.timing == QUEUED
    enqueued = fake.runs
    assert model.run_ms() == pytest.approx(1.5)
    assert (fake.runs, library.launches()) == (enqueued + 2, 0)


def test_an_output_whose_size_depends_on_data_keeps_its_allocator(
    model: TensorRtTimedModel, fake: FakeRun
) -> None:
    fake.is_data_dependent = True
    model.prepare({"x": X})
    assert fake.allocator is not None
    assert model.settings.timing.startswith(QUEUED)
    assert " y " in model.settings.timing.removeprefix(QUEUED)
    assert model.run_ms() == pytest.approx(1.5)


def test_timed_outputs_have_the_addresses_of_the_run_before(
    model: TensorRtTimedModel, fake: FakeRun
) -> None:
    model.prepare({"x": X})
    assert fake.allocator is None
    raw = ctypes.string_at(fake.address["y"], X.nbytes)
    np.testing.assert_array_equal(np.frombuffer(raw, np.float32).reshape(X.shape), 2 * X)


def test_an_output_that_tensorrt_refuses_to_place_keeps_its_allocator(
    model: TensorRtTimedModel, fake: FakeRun
) -> None:
    place = fake.context.set_tensor_address.side_effect
    fake.context.set_tensor_address.side_effect = lambda name, to: name != "y" and place(name, to)
    model.prepare({"x": X})
    assert model.settings.timing.startswith(QUEUED)
    assert model.run_ms() == pytest.approx(1.5)


def test_inputs_that_fail_do_not_leave_a_freed_graph_to_be_launched(
    model: TensorRtTimedModel, fake: FakeRun, library: ctypes.CDLL
) -> None:
    model.prepare({"x": X})
    fake.can_run = False
    with pytest.raises(BuildFailedError):
        model.prepare({"x": X})
    launched = library.launches()
    with pytest.raises(BuildFailedError):
        model.run_ms()
    assert library.launches() == launched


def test_other_outputs_leave_the_prepared_inputs_to_the_next_run(
    model: TensorRtTimedModel, fake: FakeRun, library: ctypes.CDLL
) -> None:
    model.prepare({"x": X})
    found = model.outputs({"x": X[:1]})["y"]
    np.testing.assert_array_equal(found, 2 * X[:1])
    assert found.dtype == np.float32
    alive = library.alive()
    assert model.run_ms() == pytest.approx(1.5)
    assert fake.shape == (3, 16)
    assert library.alive() == alive  # the graph of before was freed


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
    fake.is_data_dependent = True
    model.prepare({"x": X})
    fake.can_run = False
    with pytest.raises(BuildFailedError, match=r"failed while running .*sparse\.plan"):
        model.run_ms()


def test_inputs_that_do_not_fit_are_bad_input(model: TensorRtTimedModel) -> None:
    with pytest.raises(BadInputError, match="16"):
        model.prepare({"x": X[:, :8]})
    with pytest.raises(BadInputError, match="takes the inputs"):
        model.outputs({"z": X})


@pytest.mark.usefixtures("fake")
def test_a_plan_that_does_not_load_leaves_nothing_open(plan: Path, library: ctypes.CDLL) -> None:
    plan.write_bytes(b"of another version")
    with pytest.raises(BuildFailedError, match=r"cannot load .*sparse\.plan"):
        open_plan(plan)
    plan.unlink()
    with pytest.raises(BadInputError, match="cannot read"):
        open_plan(plan)
    assert library.alive() == 0


def test_closing_frees_events_and_graph(fake: FakeRun, plan: Path, library: ctypes.CDLL) -> None:
    assert fake.runs == 0
    opened = open_plan(plan)
    assert library.alive() == 2
    opened.prepare({"x": X})
    assert library.alive() == 3
    opened.close()
    assert library.alive() == 0
