"""CUDA events and memory against a library compiled here; plans are in trt/inner_timed.py."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
from support.fake_cudart import advance, fake_cudart

from twofour.engines.protocol import OpenRequest
from twofour.engines.tensorrt.engine import TensorRtEngine
from twofour.engines.tensorrt.plan import CudaTimer, DeviceMemory
from twofour.errors import BuildFailedError, MissingToolError


@pytest.fixture
def library(tmp_path: Path) -> ctypes.CDLL:
    return fake_cudart(tmp_path)


def test_a_time_is_what_the_gpu_clock_went_on_between_the_events(library: ctypes.CDLL) -> None:
    timer = CudaTimer(library)
    assert timer.time_ms(1, lambda: advance(library, 1.5)) == pytest.approx(1.5)
    advance(library, 100)
    assert timer.time_ms(1, lambda: advance(library, 0.25)) == pytest.approx(0.25)


def test_closing_frees_both_events_once(library: ctypes.CDLL) -> None:
    timer = CudaTimer(library)
    assert library.alive() == 2
    timer.close()
    timer.close()
    assert library.alive() == 0


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
    with pytest.raises(MissingToolError, match=r"cannot run here: .*not installed") as failure:
        TensorRtEngine().open(
            OpenRequest(
                mode="gpu",
                weights="dense",
                threads=1,
                model="dense.onnx",
                precision="float32",
                file=tmp_path / "dense.plan",
            )
        )
    assert "twofour[tensorrt]" in (failure.value.hint or "")
