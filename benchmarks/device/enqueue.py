"""What an enqueue costs on the host and on the GPU, for plans: one, many in a row, a CUDA graph.

    trt86/run -m device.enqueue OUT.json PLAN...

Uses TensorRT's bindings and CUDA's runtime library directly, so that it checks twofour's clock and
does not share it. Inputs have the optimization profile's usual shapes: normal numbers in float32,
zeros in other types. All times are medians in milliseconds.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

Call = Callable[[], None]
REPEATS = 100
ROW = 50
"""Enqueues between two events, where there are many."""
_LARGEST_ITEM_BYTES = 8
_RELAXED = 2
"""cudaStreamCaptureModeRelaxed: TensorRT may call what other modes forbid."""


class Plan:
    """A plan with an execution context, buffers at fixed addresses and a stream of its own."""

    def __init__(self, path: Path) -> None:
        from polygraphy import cuda

        trt = importlib.import_module("tensorrt")
        self._kept = ExitStack()
        self._library = cuda.wrapper().handle
        self.stream = self._kept.enter_context(cuda.Stream())
        logger = trt.Logger(trt.Logger.ERROR)
        runtime = trt.Runtime(logger)
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        self._context = engine.create_execution_context()
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        for name in inputs:
            shapes = engine.get_tensor_profile_shape(name, 0)
            self._context.set_input_shape(name, tuple(shapes[1]))
        for name in names:
            values = int(np.prod(tuple(self._context.get_tensor_shape(name))))
            random = name in inputs and engine.get_tensor_dtype(name) == trt.float32
            self._context.set_tensor_address(name, self._buffer(values, random=random))
        self._sources = (logger, runtime, engine)  # what a context came from must outlive it

    def enqueue(self) -> None:
        """Start one run; raises RuntimeError where TensorRT refuses."""
        if not self._context.execute_async_v3(self.stream.ptr):
            raise RuntimeError("TensorRT could not enqueue")

    def call(self, name: str, *arguments: Any) -> None:
        """A function of CUDA's runtime library; raises RuntimeError with its status."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: CUDA error {status}")

    def wait(self) -> None:
        """Until the stream is idle."""
        self.call("cudaStreamSynchronize", ctypes.c_void_p(self.stream.ptr))

    def close(self) -> None:
        """Free the buffers and the stream."""
        self._kept.close()

    def _buffer(self, values: int, *, random: bool) -> int:
        from polygraphy import cuda

        array = np.zeros(max(values, 1) * _LARGEST_ITEM_BYTES, np.uint8)
        if random:
            array = np.random.default_rng(0).standard_normal(values).astype(np.float32)
        device = self._kept.enter_context(cuda.DeviceArray(array.shape, array.dtype))
        device.copy_from(array)
        return int(device.ptr)


class Events:
    """Two CUDA events on a plan's stream."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ends = (ctypes.c_void_p(), ctypes.c_void_p())
        for event in self._ends:
            plan.call("cudaEventCreate", ctypes.byref(event))

    def time_ms(self, call: Call) -> float:
        """GPU time of what `call` puts on the stream, from an idle GPU."""
        plan, stream = self._plan, ctypes.c_void_p(self._plan.stream.ptr)
        elapsed = ctypes.c_float()
        plan.wait()
        plan.call("cudaEventRecord", self._ends[0], stream)
        call()
        plan.call("cudaEventRecord", self._ends[1], stream)
        plan.call("cudaEventSynchronize", self._ends[1])
        plan.call("cudaEventElapsedTime", ctypes.byref(elapsed), *self._ends)
        return elapsed.value


def measure(plan: Plan) -> dict[str, Any]:
    """Rows in milliseconds; a way that fails has its error as its row."""
    events = Events(plan)
    for _ in range(REPEATS):
        plan.enqueue()
    rows: dict[str, Any] = {
        "one_enqueue_ms": _alone_ms(events, plan.enqueue),
        "enqueue_in_a_row_ms": _in_a_row_ms(events, plan.enqueue),
        "host_ms": _host_ms(plan, plan.enqueue),
    }
    try:
        launch = _captured(plan)
        rows["graph_ms"] = _alone_ms(events, launch)
        rows["graph_in_a_row_ms"] = _in_a_row_ms(events, launch)
        rows["graph_host_ms"] = _host_ms(plan, launch)
    except Exception as error:  # noqa: BLE001  # a plan may refuse to be captured
        rows["graph_error"] = repr(error)[:300]
    return rows


def _alone_ms(events: Events, call: Call) -> float:
    return median(events.time_ms(call) for _ in range(REPEATS))


def _in_a_row_ms(events: Events, call: Call) -> float:
    def row() -> None:
        for _ in range(ROW):
            call()

    return median(events.time_ms(row) for _ in range(REPEATS // 10)) / ROW


def _host_ms(plan: Plan, call: Call) -> float:
    """Until the call returns, on an idle GPU."""
    spent = []
    for _ in range(REPEATS):
        plan.wait()
        started = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - started))
    plan.wait()
    return median(spent)


def _captured(plan: Plan) -> Call:
    """One run as a CUDA graph; gives what launches it."""
    graph, ready = ctypes.c_void_p(), ctypes.c_void_p()
    stream = ctypes.c_void_p(plan.stream.ptr)
    plan.wait()
    plan.call("cudaStreamBeginCapture", stream, ctypes.c_int(_RELAXED))
    plan.enqueue()
    plan.call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    flags = ctypes.c_ulonglong(0)
    plan.call("cudaGraphInstantiateWithFlags", ctypes.byref(ready), graph, flags)
    return lambda: plan.call("cudaGraphLaunch", ready, stream)


def main(argv: Sequence[str]) -> int:
    """Exit code 1 where no plan could be measured."""
    rows: dict[str, Any] = {}
    for path in map(Path, argv[1:]):
        try:
            plan = Plan(path)
            rows[f"{path.parent.name}/{path.name}"] = measure(plan)
            plan.close()
        except Exception as error:  # noqa: BLE001  # the other plans are wanted all the same
            rows[f"{path.parent.name}/{path.name}"] = {"error": repr(error)[:300]}
        Path(argv[0]).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(all("error" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
