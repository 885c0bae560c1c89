"""A TensorRT plan as a TimedModel, timed with CUDA events."""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

import numpy.typing as npt

from twofour.engines.protocol import Arrays
from twofour.engines.tensorrt.logger import build_log
from twofour.engines.tensorrt.plan import LoadedPlan
from twofour.engines.tensorrt.status import tensorrt_status
from twofour.engines.timed.cuda_events import CudaTimer, DeviceMemory, cuda_runtime
from twofour.engines.timed.protocol import OpenOptions
from twofour.errors import MissingToolError
from twofour.records.build import LayerTime
from twofour.records.export import TensorShape
from twofour.records.latency import VariantSettings

ENGINE = "tensorrt"
EVENTS = "one enqueue between two CUDA events; no copies between host and device"


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
