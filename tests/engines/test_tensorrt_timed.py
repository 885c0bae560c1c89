"""CUDA events, graphs and memory against a library compiled here; plans: trt/inner_timed.py."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
from support.fake_cudart import advance, against_header, fake_cudart
from support.real_bindings import BINDINGS

from twofour.engines.protocol import OpenRequest
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.engines.tensorrt.plan import CudaGraph, CudaTimer, DeviceMemory
from twofour.errors import BuildFailedError, MissingToolError


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    return fake_cudart(tmp_path)


def test_a_time_is_the_mean_of_runs_that_follow_one_which_is_not_timed(
    library: ctypes.CDLL,
) -> None:
    runs_ms = iter([40.0, 1.0, 2.0, 3.0])  # the first may have waited for the host
    timer = CudaTimer(library)
    time_ms = timer.time_ms(1, lambda: advance(library, next(runs_ms)), launches=3)
    assert time_ms == pytest.approx(2.0)
    assert list(runs_ms) == []
    advance(library, 100)
    assert timer.time_ms(1, lambda: advance(library, 0.25)) == pytest.approx(0.25)
    timer.close()
    timer.close()
    assert library.alive() == 0


def test_a_graph_runs_what_was_captured_and_not_before_it_is_launched(
    library: ctypes.CDLL,
) -> None:
    timer = CudaTimer(library)
    graph = CudaGraph(library, 1, lambda: advance(library, 1.5))
    assert timer.time_ms(1, lambda: None) == 0
    assert timer.time_ms(1, graph.launch, launches=4) == pytest.approx(1.5)
    assert library.launches() == 5
    graph.close()
    timer.close()
    assert library.alive() == 0


def test_a_capture_that_fails_ends_and_leaves_no_error_behind(library: ctypes.CDLL) -> None:
    with pytest.raises(BuildFailedError, match=r"cudaStreamEndCapture failed: .*error 901"):
        CudaGraph(library, 1, library.invalidate)
    assert (library.capturing(), library.alive(), library.cudaGetLastError()) == (0, 0, 0)


def test_an_enqueue_that_fails_while_captured_ends_the_capture(library: ctypes.CDLL) -> None:
    def enqueue() -> None:
        raise BuildFailedError("a loop")

    with pytest.raises(BuildFailedError, match="a loop"):
        CudaGraph(library, 1, enqueue)
    assert (library.capturing(), library.alive()) == (0, 0)


@pytest.mark.parametrize("major", ["cuda11", "cuda12", "cuda13"])
def test_the_functions_of_cuda_are_those_of_its_header(major: str, tmp_path: Path) -> None:
    headers = list((BINDINGS / major).rglob("cuda_runtime_api.h"))
    if not headers:
        pytest.skip(f"{BINDINGS / major} is not there: `make bindings` prepares it")
    assert against_header(headers[0], tmp_path) == ""
    wrong = "int cudaGraphStart(void) { return 0; }"
    assert "cudaGraphStart" in against_header(headers[0], tmp_path, wrong)


def test_a_kernel_that_failed_is_told_in_the_words_of_cuda(library: ctypes.CDLL) -> None:
    timer = CudaTimer(library)
    with pytest.raises(BuildFailedError, match=r"illegal memory access .*\(CUDA error 700\)"):
        timer.time_ms(1, lambda: library.fail_with(700))


def test_peak_memory_is_the_largest_growth_in_own_calls(library: ctypes.CDLL) -> None:
    library.use(5000)
    memory = DeviceMemory(library)
    with memory.counting():
        library.use(9000)
    library.use(20_000)
    with memory.counting():
        library.use(17_000)
    assert memory.peak_bytes() == 4000
    with memory.counting():
        library.use(23_500)
    assert memory.peak_bytes() == 7500


def test_engines_that_are_open_at_once_each_have_their_own_memory(library: ctypes.CDLL) -> None:
    memories = []
    used = 1000
    for own in (100, 80, 80, 100):
        memory = DeviceMemory(library)
        with memory.counting():  # loading takes most of it
            used += own - 20
            library.use(used)
        memories.append(memory)
    for memory in memories:
        with memory.counting():  # the first run takes the rest, once all are open
            used += 20
            library.use(used)
    assert [memory.peak_bytes() for memory in memories] == [100, 80, 80, 100]


def test_memory_that_shrinks_or_cannot_be_read_claims_nothing(library: ctypes.CDLL) -> None:
    library.use(5000)
    memory = DeviceMemory(library)
    with memory.counting():
        library.use(100)
    assert memory.peak_bytes() == 0
    library.fail_with(3)
    with pytest.raises(BuildFailedError, match="cudaMemGetInfo"), memory.counting():
        pass
    unknown = DeviceMemory(None)
    with unknown.counting():
        pass
    assert unknown.peak_bytes() is None


def test_without_tensorrt_a_plan_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    request = OpenRequest(
        mode="gpu", weights="dense", threads=1, model="", precision="", file=tmp_path / "dense.plan"
    )
    with pytest.raises(MissingToolError, match=r"cannot run here: .*not installed") as failure:
        TensorRtEngine().open(request)
    assert "twofour[tensorrt]" in (failure.value.hint or "")


def test_without_polygraphy_the_memory_of_a_gpu_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # ONNX Runtime's CUDA provider runs without the extra `tensorrt`, which brings it
    monkeypatch.setitem(sys.modules, "polygraphy", None)
    memory = DeviceMemory.watch()
    with memory.counting():
        pass
    assert memory.peak_bytes() is None
