"""A TensorRT plan: loaded, run, and timed by CUDA events."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from twofour.engines.protocol import Mode, Untyped
from twofour.engines.tensorrt.bindings import MessageLog, build_failed, build_log, failures_named
from twofour.errors import BuildFailedError, MissingToolError, system_errors
from twofour.inputs.fits import Array, Arrays, fit_inputs, numpy_type
from twofour.records.export import EngineFiles, LayerTime, TensorShape
from twofour.records.latency import SPARSITY_OFF, VariantSettings
from twofour.records.options import Variant

_SEARCHED = "LD_LIBRARY_PATH"
_DTYPE_NAMES = {"float8e4m3fn": "float8_e4m3fn", "boolean": "bool"}
GPU = "gpu"
MODES = (
    Mode(name=GPU, sparse_kernels=True),
    Mode(name=SPARSITY_OFF, sparse_kernels=False, needs_sparse=True),
)
"""The second is for sparse weights in an engine that was not allowed sparse kernels.

Zeros alone make a dense product faster: the time in the first over that in the second is what the
kernels gain, the time over that of dense weights in the first what a user gains.
"""
_EVENTS = "in a row between two CUDA events; no copies between host and device"
GRAPH = f"mean of launches of a CUDA graph {_EVENTS}"
QUEUED = f"mean of enqueues {_EVENTS}"
"""For engines that cannot be captured: loops, sizes that depend on data, waits for the host."""
_SPAN_MS = 1.0
"""Runs in a row last about so long, so that the 0.5 us of an event are nothing beside them."""
_MOST_LAUNCHES = 50
_ENQUEUES = 5
"""Untimed runs before a capture: TensorRT needs one after new shapes; their host time is kept."""
_THREAD_LOCAL = ctypes.c_int(1)
"""cudaStreamCaptureModeThreadLocal, as in trtexec: other threads do not end the capture."""


def plan_mode(built: EngineFiles) -> str:
    """The mode that an engine of TensorRT belongs to."""
    is_off = built.weights is Variant.SPARSE and not built.sparse_weights
    return SPARSITY_OFF if is_off else GPU


def cuda_runtime_folders(search: list[str] | None = None) -> tuple[Path, ...]:
    """Folders of CUDA runtime wheels (nvidia/cu13/lib and its kin) on Python's path."""
    folders = set()
    for entry in filter(None, sys.path if search is None else search):
        libraries = Path(entry, "nvidia").glob("cu*/lib/libcudart.so*")
        folders |= {library.parent for library in libraries}
    return tuple(sorted(folders))


def load_cuda_runtime() -> None:
    """Load libcudart through Polygraphy, with the wheels' folders searched last.

    Polygraphy reads LD_LIBRARY_PATH once, when it loads the library. Raises OSError without one.
    """
    from polygraphy import cuda

    before = os.environ.get(_SEARCHED)
    parts = [before or "", *map(str, cuda_runtime_folders())]
    os.environ[_SEARCHED] = os.pathsep.join(filter(None, parts))
    try:
        cuda.wrapper()
    finally:
        if before is None:
            del os.environ[_SEARCHED]
        else:
            os.environ[_SEARCHED] = before


class LoadedPlan:
    """An engine with one execution context; use it inside the `build_log` given as `log`.

    Raises BuildFailedError where the plan cannot be deserialized (another TensorRT or GPU built it)
    or no context can be created.
    """

    def __init__(self, trt: ModuleType, plan: Path, log: MessageLog) -> None:
        from polygraphy.backend.trt import EngineFromBytes, TrtRunner

        self._trt = trt
        self._plan = plan
        self._log = log
        with system_errors(f"cannot read {plan}"):
            content = plan.read_bytes()
        with failures_named(f"TensorRT cannot load {plan}", log):
            self.engine = EngineFromBytes(content)()
        self._runner = TrtRunner(self.engine)

    def __enter__(self) -> LoadedPlan:
        with failures_named(f"TensorRT cannot run {self._plan}", self._log):
            load_cuda_runtime()
            self._runner.activate()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.deactivate()

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """The engine's inputs; a dynamic dimension is "?"."""
        engine = self.engine
        inputs = []
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            if engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT:
                shape = tuple("?" if d < 0 else int(d) for d in engine.get_tensor_shape(name))
                inputs.append(TensorShape(name=name, dtype=self._dtype_name(name), shape=shape))
        return tuple(inputs)

    def outputs(self, inputs: Arrays) -> dict[str, Array]:
        """Every output by name, ml_dtypes for types numpy lacks; inputs fitted by `fit_inputs`."""
        feed = fit_inputs(inputs, self.inputs)
        for name, array in feed.items():
            if array.dtype.kind == "V":
                # types that numpy lacks as unsigned integers of the same size: bytes are copied
                feed[name] = array.view(f"u{array.dtype.itemsize}")
        with failures_named(f"TensorRT failed while running {self._plan}", self._log):
            # raw buffers: Polygraphy's own conversion knows only numpy's types
            buffers = self._runner.infer(feed, check_inputs=False, return_raw_buffers=True)
        return {name: self._array(name, value) for name, value in buffers.items()}

    def layer_information(self) -> str | None:
        """The inspector's JSON as TensorRT writes it; None where it gives none."""
        inspector = self.engine.create_engine_inspector()
        if inspector is None:
            return None
        inspector.execution_context = self._runner.context  # for dimensions of dynamic shapes
        text = inspector.get_engine_information(self._trt.LayerInformationFormat.JSON)
        return str(text) if text else None

    def layer_times(self, inputs: Arrays, iterations: int) -> ProfilerTimes:
        """Times of each layer; taken last, because profiling slows the runs that follow."""
        profiler, profile = _profiler(self._trt)
        self.outputs(inputs)
        context = self._runner.context
        context.profiler = profiler
        self.enqueue_times_ms(iterations)
        profile.runs = iterations
        return profile

    def fix_outputs(self) -> list[str]:
        """Leave the outputs of the last `outputs` where they are, until it is called again.

        Polygraphy's allocator takes 7.5 us of each run per output, and a CUDA graph cannot call it.
        Gives the names of those that keep it: their size depends on data, or TensorRT refuses.
        """
        context = self._runner.context
        allocated = []
        for name, buffer in self._runner.output_allocator.buffers.items():
            is_known = min(context.get_tensor_shape(name), default=0) >= 0
            if is_known and context.set_tensor_address(name, buffer.ptr):
                context.set_output_allocator(name, None)
            else:
                allocated.append(name)
        return allocated

    def enqueue_times_ms(self, runs: int) -> list[float]:
        """Host time of each enqueue, with nothing else on the stream: runs wait for each other."""
        times_ms = []
        with failures_named(f"TensorRT failed while running {self._plan}", self._log):
            for _ in range(runs):
                started = time.perf_counter()
                self.enqueue()
                times_ms.append(1e3 * (time.perf_counter() - started))
                self._runner.stream.synchronize()
        return times_ms

    @property
    def stream(self) -> int:
        """The CUDA stream that runs are enqueued on, as a pointer."""
        return int(self._runner.stream.ptr)

    def enqueue(self) -> None:
        """Start one run with the shapes and inputs of the last `outputs`; does not wait for it."""
        if not self._runner.context.execute_async_v3(self._runner.stream.ptr):
            raise build_failed(f"TensorRT failed while running {self._plan}", self._log, "enqueue")

    def _dtype_name(self, name: str) -> str:
        from polygraphy.datatype import DataType

        kind = DataType.from_dtype(self.engine.get_tensor_dtype(name), "tensorrt")
        return _DTYPE_NAMES.get(kind.name, str(kind.name))

    def _array(self, name: str, value: Untyped) -> Array:
        dtype = numpy_type(self._dtype_name(name))
        shape = tuple(value.shape)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        # the buffer is Polygraphy's and is used again by the next run
        raw: Array = np.array(value.array, copy=True).view(np.uint8).reshape(-1)
        return raw[:size].view(dtype).reshape(shape)


@dataclass(slots=True)
class ProfilerTimes:
    """Times of each layer as TensorRT reported them, in the order of the first report."""

    times_ms: dict[str, list[float]] = field(default_factory=dict)
    runs: int = 0

    def layers(self) -> tuple[LayerTime, ...]:
        """Mean ms per run of each layer."""
        return tuple(
            LayerTime(name=name, mean_ms=sum(times) / self.runs)
            for name, times in self.times_ms.items()
        )

    def to_json(self) -> str:
        """The form of trtexec --exportProfile: a count, then a row for each layer."""
        total_ms = sum(map(sum, self.times_ms.values())) or 1.0
        rows: list[Mapping[str, object]] = [{"count": self.runs}]
        for name, times in self.times_ms.items():
            row = {
                "name": name,
                "timeMs": sum(times),
                "averageMs": sum(times) / self.runs,
                "medianMs": statistics.median(times),
                "percentage": 100 * sum(times) / total_ms,
            }
            rows.append(row)
        return json.dumps(rows, indent=1) + "\n"


def _profiler(trt: ModuleType) -> tuple[Any, ProfilerTimes]:
    """A trt.IProfiler, to be kept while it is attached, and the record it fills."""
    profile = ProfilerTimes()

    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]  # bindings have no types
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            profile.times_ms.setdefault(layer_name, []).append(ms)

    return Profiler(), profile


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
        self._start = ctypes.c_void_p()
        self._end = ctypes.c_void_p()
        for event in (self._start, self._end):
            _cuda(library, "cudaEventCreate", ctypes.byref(event))

    def time_ms(self, stream: int, launch: Callable[[], None], launches: int = 1) -> float:
        """Mean milliseconds of `launches` runs in a row, once they are done (both ends to 0.5 us).

        They follow a run that is not timed: while the GPU is busy with it, the host starts them.
        """
        library = self._library
        queue = ctypes.c_void_p(stream)
        elapsed = ctypes.c_float()
        launch()
        _cuda(library, "cudaEventRecord", self._start, queue)
        for _ in range(launches):
            launch()
        _cuda(library, "cudaEventRecord", self._end, queue)
        _cuda(library, "cudaEventSynchronize", self._end)
        _cuda(library, "cudaEventElapsedTime", ctypes.byref(elapsed), self._start, self._end)
        return elapsed.value / launches

    def close(self) -> None:
        """Free the events; a failure is of no consequence any more."""
        for event in (self._start, self._end):
            if event:
                self._library.cudaEventDestroy(event)
                event.value = None


class CudaGraph:
    """What `enqueue` puts on a stream, started by one call of the host; `close` frees it.

    Raises BuildFailedError where it cannot be captured; the stream can be used as before then.
    """

    def __init__(self, library: ctypes.CDLL, stream: int, enqueue: Callable[[], None]) -> None:
        self._library = library
        self._queue = ctypes.c_void_p(stream)
        self._ready = ctypes.c_void_p()
        graph = ctypes.c_void_p()
        _cuda(library, "cudaStreamBeginCapture", self._queue, _THREAD_LOCAL)
        try:
            try:
                enqueue()
            finally:  # a stream whose capture has failed stays in it until this call
                _cuda(library, "cudaStreamEndCapture", self._queue, ctypes.byref(graph))
            flags = ctypes.c_ulonglong(0)
            # cudaGraphInstantiate has other arguments in CUDA 11 than in 12 and 13
            ready = ctypes.byref(self._ready)
            _cuda(library, "cudaGraphInstantiateWithFlags", ready, graph, flags)
        finally:
            if graph:
                library.cudaGraphDestroy(graph)

    def launch(self) -> None:
        """Start one run; does not wait for it."""
        _cuda(self._library, "cudaGraphLaunch", self._ready, self._queue)

    def close(self) -> None:
        """Free it; a failure is of no consequence any more."""
        self._library.cudaGraphExecDestroy(self._ready)


class DeviceMemory:
    """GPU memory that one variant takes: weights, activations, buffers, and libraries' own.

    cudaMemGetInfo sees the whole GPU, so only growth within `counting` is the variant's: the others
    of a comparison are open then, and idle. What other programs take meanwhile is counted too.
    """

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self._library = library
        """None: the memory cannot be had."""
        self._own = 0
        self._peak = 0

    @classmethod
    def watch(cls) -> DeviceMemory:
        """That of the CUDA runtime library, where there is one with an answer."""
        with contextlib.suppress(ImportError, MissingToolError, BuildFailedError, AttributeError):
            memory = cls(cuda_runtime())
            memory._used()
            return memory
        return cls(None)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the block takes or frees; raises BuildFailedError where CUDA does not say."""
        # dense takes 100, sparse 80 beside it: the GPU shows 100, then 180, and sparse has 80
        before = self._used()
        yield
        self._own += self._used() - before
        self._peak = max(self._peak, self._own)

    def peak_bytes(self) -> int | None:
        """The largest sum of what was counted; None where the memory cannot be had."""
        return None if self._library is None else self._peak

    def _used(self) -> int:
        if self._library is None:
            return 0
        free = ctypes.c_size_t()
        total = ctypes.c_size_t()
        _cuda(self._library, "cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value


def _cuda(library: ctypes.CDLL, call: str, *arguments: Untyped) -> None:
    status = getattr(library, call)(*arguments)
    if status == 0:
        return
    describe = library.cudaGetErrorString
    describe.restype = ctypes.c_char_p
    words = (describe(status) or b"no description").decode(errors="replace")
    library.cudaGetLastError()  # forgets it: whoever looks next would take it for their own
    raise BuildFailedError(f"{call} failed: {words} (CUDA error {status})")


class TensorRtTimedModel:
    """Meets TimedModel; made by `TensorRtEngine.open`."""

    def __init__(self, plan: Path, settings: VariantSettings) -> None:
        trt = importlib.import_module("tensorrt")
        self.settings = settings
        self.size_bytes = plan.stat().st_size if plan.is_file() else None
        self._prepared: Arrays = {}
        self._is_prepared = False
        self._graph = contextlib.ExitStack()
        library = self._library = cuda_runtime()
        self._memory = DeviceMemory(library)
        with self._memory.counting(), contextlib.ExitStack() as opened:
            log = opened.enter_context(build_log(trt, None))
            self._plan = opened.enter_context(LoadedPlan(trt, plan, log))
            self.inputs = self._plan.inputs
            self._launch = self._plan.enqueue
            self._timer = CudaTimer(library)
            opened.callback(self._timer.close)
            opened.callback(self._graph.close)
            self._opened = opened.pop_all()

    def prepare(self, inputs: Arrays) -> None:
        """Set shapes, copy the inputs to the GPU, run, and capture a run where it can be captured.

        `settings` then say how runs are started, and how long that takes.
        """
        self._is_prepared = False
        self._graph.close()
        with self._memory.counting():
            self._plan.outputs(inputs)
            self._prepared = dict(inputs)
            allocated = self._plan.fix_outputs()
            enqueue_ms = statistics.median(self._plan.enqueue_times_ms(_ENQUEUES))
            timing, self._launch = self._way_to_launch(allocated)
            run_ms = self._timer.time_ms(self._plan.stream, self._launch)
        launches = math.ceil(_SPAN_MS / max(run_ms, _SPAN_MS / _MOST_LAUNCHES))
        self.settings = replace(
            self.settings, timing=timing, launches=launches, enqueue_ms=enqueue_ms
        )
        self._is_prepared = True

    def _way_to_launch(self, allocated: list[str]) -> tuple[str, Callable[[], None]]:
        """How runs are started, in words and as what starts one."""
        plan = self._plan
        if allocated:
            return f"{QUEUED}; the host allocates {', '.join(allocated)} in each", plan.enqueue
        try:
            graph = CudaGraph(self._library, plan.stream, plan.enqueue)
        except BuildFailedError:
            return QUEUED, plan.enqueue
        self._graph.callback(graph.close)
        return GRAPH, graph.launch

    def run_ms(self) -> float:
        """Mean GPU time of `settings.launches` runs in a row, from CUDA events on the stream."""
        if not self._is_prepared:
            self.prepare(self._prepared)
        return self._timer.time_ms(self._plan.stream, self._launch, self.settings.launches)

    def outputs(self, inputs: Arrays) -> dict[str, Array]:
        """Every output by name; the next timed run takes the prepared inputs to the GPU again."""
        self._is_prepared = False
        with self._memory.counting():
            return self._plan.outputs(inputs)

    def layer_times(self, iterations: int) -> tuple[LayerTime, ...]:
        """From TensorRT's profiler, which stays attached: to be taken last."""
        return self._plan.layer_times(self._prepared, iterations).layers()

    def peak_device_memory_bytes(self) -> int | None:
        """Weights, activations and buffers of this engine, as `DeviceMemory` measures them."""
        return self._memory.peak_bytes()

    def close(self) -> None:
        """Free the events, the context, its buffers and the engine."""
        self._opened.close()
