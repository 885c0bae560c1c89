"""A TensorRT plan, timed by CUDA events."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.typing as npt

from twofour.engines.protocol import Arrays, Mode, OpenOptions
from twofour.engines.tensorrt.log import build_log
from twofour.engines.tensorrt.plan import LoadedPlan, load_cuda_runtime
from twofour.engines.tensorrt.status import ENGINE, tensorrt_status
from twofour.errors import BuildFailedError, MissingToolError
from twofour.records.build import LayerTime
from twofour.records.export import TensorShape
from twofour.records.latency import VariantSettings

GPU = "gpu"
FLAG_OFF = "gpu-sparsity-off"
MODES = (
    Mode(name=GPU, sparse_kernels=True),
    Mode(name=FLAG_OFF, sparse_kernels=False, needs_sparse=True),
)
"""The second is for sparse weights in an engine that was not allowed sparse kernels."""
EVENTS = "one enqueue between two CUDA events; no copies between host and device"


def cuda_runtime() -> ctypes.CDLL:
    """The library that Polygraphy loads; raises MissingToolError where there is none."""
    from polygraphy import cuda
    from polygraphy.exception import PolygraphyException
    from polygraphy.logger import G_LOGGER

    try:
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
            load_cuda_runtime()
        library: ctypes.CDLL = cuda.wrapper().handle
    except (OSError, PolygraphyException) as error:
        raise MissingToolError(
            f"the CUDA runtime library cannot be loaded: {str(error).splitlines()[0]}",
            hint="pip install nvidia-cuda-runtime, or put libcudart.so on LD_LIBRARY_PATH",
        ) from error
    return library


class CudaTimer:
    """Two events on a stream, which the GPU itself stamps; `close` frees them.

    Raises BuildFailedError with CUDA's words for any call that fails, an earlier kernel's included.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._start, self._end = ctypes.c_void_p(), ctypes.c_void_p()
        for event in (self._start, self._end):
            _check(library, library.cudaEventCreate(ctypes.byref(event)), "cudaEventCreate")

    def time_ms(self, stream: int, enqueue: Callable[[], None]) -> float:
        """Milliseconds (to half a microsecond) of what `enqueue` puts on the stream; waits for it.

        Resolution: CUDA runtime API, cudaEventElapsedTime.
        """
        library, queue, elapsed = self._library, ctypes.c_void_p(stream), ctypes.c_float()
        _check(library, library.cudaEventRecord(self._start, queue), "cudaEventRecord")
        enqueue()
        _check(library, library.cudaEventRecord(self._end, queue), "cudaEventRecord")
        _check(library, library.cudaEventSynchronize(self._end), "cudaEventSynchronize")
        status = library.cudaEventElapsedTime(ctypes.byref(elapsed), self._start, self._end)
        _check(library, status, "cudaEventElapsedTime")
        return elapsed.value

    def close(self) -> None:
        """Free the events; a failure is of no consequence any more."""
        for event in (self._start, self._end):
            if event:
                self._library.cudaEventDestroy(event)
                event.value = None


class DeviceMemory:
    """Growth of the GPU's memory in use since `watch`: weights, activations and libraries' own.

    From cudaMemGetInfo, which sees the whole GPU: what other processes take or give back meanwhile
    is counted too, and what is freed again between two looks is not seen.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._before = self._used()
        self._peak = 0

    @classmethod
    def watch(cls) -> DeviceMemory | None:
        """Start now, before the engine is loaded; None where the memory cannot be had."""
        with contextlib.suppress(MissingToolError, BuildFailedError, AttributeError):
            return cls(cuda_runtime())
        return None

    def look(self) -> None:
        """Take note of what is in use now; raises BuildFailedError where CUDA does not say."""
        self._peak = max(self._peak, self._used() - self._before)

    def peak_bytes(self) -> int | None:
        """The largest growth seen, this moment's included; None where CUDA does not say."""
        try:
            self.look()
        except BuildFailedError:
            return None
        return self._peak

    def _used(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        status = self._library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        _check(self._library, status, "cudaMemGetInfo")
        return total.value - free.value


def _check(library: ctypes.CDLL, status: int, call: str) -> None:
    if status == 0:
        return
    describe = library.cudaGetErrorString
    describe.restype = ctypes.c_char_p
    words = (describe(status) or b"no description").decode(errors="replace")
    raise BuildFailedError(f"{call} failed: {words} (CUDA error {status})")


def open_tensorrt(
    plan: Path,
    options: OpenOptions,
    *,
    mode: str,
    sparse_kernels: bool | None,
    model: str,
    precision: str,
) -> TensorRtTimedModel:
    """Load a plan that `TensorRtEngine.build` or trtexec made here.

    `sparse_kernels` is what its builder was allowed, None where that is not known; `model` is the
    ONNX file it was built from. Raises MissingToolError where TensorRT or the CUDA runtime library
    cannot be used, and BadInputError and BuildFailedError as LoadedPlan.
    """
    status = tensorrt_status()
    if not status.can_run:
        raise MissingToolError(f"TensorRT cannot run here: {status.why_not}", hint=status.hint)
    settings = VariantSettings(
        engine=ENGINE,
        mode=mode,
        version=status.version,
        device=status.device or "GPU",
        model=model,
        weights=options.weights,
        precision=precision,
        sparse_kernels=sparse_kernels,
        threads=None,
        timing=EVENTS,
    )
    return TensorRtTimedModel(plan, settings)


class TensorRtTimedModel:
    """Meets TimedModel; made by `open_tensorrt`."""

    def __init__(self, plan: Path, settings: VariantSettings) -> None:
        trt = importlib.import_module("tensorrt")
        self._settings = settings
        self._file = plan
        self._prepared: Arrays = {}
        with contextlib.ExitStack() as opened:
            library = cuda_runtime()
            self._memory = DeviceMemory(library)  # from here on: the engine's weights are counted
            log = opened.enter_context(build_log(trt, None))
            self._plan = opened.enter_context(LoadedPlan(trt, plan, log))
            self._timer = CudaTimer(library)
            opened.callback(self._timer.close)
            self._opened = opened.pop_all()

    @property
    def settings(self) -> VariantSettings:
        """As it was opened."""
        return self._settings

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """The engine's inputs."""
        return self._plan.inputs

    @property
    def size_bytes(self) -> int | None:
        """Of the plan."""
        return self._file.stat().st_size if self._file.is_file() else None

    def prepare(self, inputs: Arrays) -> None:
        """Set shapes, copy the inputs to the GPU and run once."""
        self._plan.outputs(inputs)
        self._prepared = dict(inputs)
        self._memory.look()

    def run_ms(self) -> float:
        """GPU time of one run, from CUDA events on the engine's stream."""
        return self._timer.time_ms(self._plan.stream, self._plan.enqueue)

    def outputs(self, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Every output by name; the prepared inputs are copied to the GPU again after."""
        found = self._plan.outputs(inputs)
        if self._prepared:
            self._plan.outputs(self._prepared)
        return found

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """From TensorRT's profiler, which stays attached: to be taken last."""
        return self._plan.layer_times(self._prepared, iterations).layers()

    def peak_device_memory_bytes(self) -> int | None:
        """Weights, activations and buffers of this engine, as `DeviceMemory` measures them."""
        return self._memory.peak_bytes()

    def close(self) -> None:
        """Free the events, the context, its buffers and the engine."""
        self._opened.close()
