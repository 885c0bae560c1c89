"""The TensorRT engine: meets the Engine Protocol for 8.6, 10.x and 11.x."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from types import ModuleType

from twofour.engines.machine import find_gpu
from twofour.engines.protocol import (
    Arrays,
    BuildRequest,
    ModeStatus,
    OpenRequest,
    ProgressCallback,
    mode_statuses,
)
from twofour.engines.tensorrt.bindings import ENGINE, MessageLog, build_log, tensorrt_status
from twofour.engines.tensorrt.build import build_plan, weak_typing_flags
from twofour.engines.tensorrt.plan import EVENTS, MODES, LoadedPlan, TensorRtTimedModel
from twofour.errors import BuildFailedError, MissingToolError
from twofour.inputs.examples import opt_shapes
from twofour.inputs.fits import at_shapes
from twofour.records.export import EngineStatus, VariantBuild
from twofour.records.latency import VariantSettings
from twofour.store import write_text

PROFILED_RUNS = 10


class TensorRtEngine:
    """Builds with Polygraphy's loaders; its status is established once, because that loads CUDA."""

    modes = MODES
    open_levels: tuple[str, ...] = ()  # a plan has the level it was built at

    def __init__(self) -> None:
        self._status: EngineStatus | None = None

    def status(self) -> EngineStatus:
        """Whether a builder can be created here, and if not why, in one line."""
        if self._status is None:
            self._status = tensorrt_status()
        return self._status

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        """Build the plan, load it back from its file, and keep its layers, profile and messages.

        Raises BuildFailedError when no plan comes out or it cannot be loaded. A plan that cannot
        run the example inputs is returned with `error`.
        """
        trt = self._module()
        for stale in (".plan", ".layers.json", ".profile.json"):
            request.file(stale).unlink(missing_ok=True)
        with build_log(trt, request.file(".log"), _headlines(trt, request)) as log:
            started = time.perf_counter()
            profiles = build_plan(trt, request, report, log)
            build_s = time.perf_counter() - started
            report("profiling", 0, None)
            inputs = at_shapes(request.inputs, opt_shapes(profiles))
            error = _profile(trt, request, inputs, log)
        return _variant(request, build_s, error)

    def open(self, request: OpenRequest) -> TensorRtTimedModel:
        """Load a plan that `build` or trtexec made here.

        Raises MissingToolError where TensorRT or the CUDA runtime library cannot be used, and
        BadInputError and BuildFailedError as LoadedPlan.
        """
        assert request.file is not None, "a plan is a file"
        self._module()
        status = self.status()
        settings = VariantSettings(
            engine=ENGINE,
            mode=request.mode,
            version=status.version,
            device=status.device or "GPU",
            model=request.model,
            weights=request.weights,
            precision=request.precision,
            sparse_kernels=request.sparse_kernels,
            threads=None,
            timing=EVENTS,
        )
        return TensorRtTimedModel(request.file, settings)

    def statuses(self, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
        """All modes need what a builder needs."""
        return mode_statuses(self.status(), modes)

    def _module(self) -> ModuleType:
        status = self.status()
        if not status.can_run:
            raise MissingToolError(f"TensorRT cannot run here: {status.why_not}", hint=status.hint)
        return importlib.import_module("tensorrt")


def _headlines(trt: ModuleType, request: BuildRequest) -> tuple[str, ...]:
    """What trtexec prints too; TensorRT itself tells version and GPU of a process's first build."""
    gpu = find_gpu()
    device: tuple[str, ...] = ()
    if gpu is not None:
        capability = ".".join(map(str, gpu.compute_capability))
        device = (f"Selected Device: {gpu.name}", f"Compute Capability: {capability}")
    sparsity = "Enabled" if request.sparse_weights else "Disabled"
    # what trtexec prints of a weakly typed build; reports go by it
    types = [name.upper() for name, on in weak_typing_flags(trt, request).items() if on]
    precision = (f"Precision: {'+'.join(('FP32', *types))}",) if types else ()
    return (f"TensorRT version: {trt.__version__}", *device, *precision, f"Sparsity: {sparsity}")


def _profile(trt: ModuleType, request: BuildRequest, inputs: Arrays, log: MessageLog) -> str | None:
    """layers.json and profile.json, or why the plan cannot run; its other files are kept then."""
    loaded = LoadedPlan(trt, request.file(".plan"), log)
    try:
        with loaded as plan:
            plan.outputs(inputs)
            layers = plan.layer_information()
            if layers is not None:
                write_text(request.file(".layers.json"), layers)
            times = plan.layer_times(inputs, PROFILED_RUNS)
            write_text(request.file(".profile.json"), times.to_json())
    except BuildFailedError as error:
        log.headline(error.message)
        return error.message
    return None


def _variant(request: BuildRequest, build_s: float, error: str | None) -> VariantBuild:
    def name_if_there(suffix: str) -> str | None:
        file = request.file(suffix)
        return file.name if file.is_file() else None

    plan = request.file(".plan")
    return VariantBuild(
        variant=request.variant,
        onnx=request.onnx.name,
        sparse_weights=request.sparse_weights,
        build_s=build_s,
        size_bytes=plan.stat().st_size,
        plan=plan.name,
        log=request.file(".log").name,
        layers=name_if_there(".layers.json"),
        profile=name_if_there(".profile.json"),
        error=error,
    )
