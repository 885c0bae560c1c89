"""The TensorRT engine: meets the Engine Protocol for 8.6, 10.x and 11.x."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from twofour.engines.inputs import at_shapes, opt_shapes
from twofour.engines.machine import find_gpu
from twofour.engines.protocol import (
    Arrays,
    BuildRequest,
    ModeStatus,
    OpenRequest,
    ProgressCallback,
    TimedModel,
    mode_statuses,
)
from twofour.engines.tensorrt.bindings import MessageLog, build_log, tensorrt_status
from twofour.engines.tensorrt.build import build_plan, weak_typing_flags
from twofour.engines.tensorrt.plan import MODES, LoadedPlan, open_tensorrt
from twofour.errors import BuildFailedError, MissingToolError
from twofour.records.build import EngineStatus, VariantBuild
from twofour.store import write_text

PROFILED_RUNS = 10
_DEFAULT_LEVEL = 3
_WITHOUT_COMPILING = 2
"""TensorRT compiles kernels of its own from level 3 on; up to 2 it takes those of its libraries."""


class TensorRtEngine:
    """Builds with Polygraphy's loaders; its status is established once, because that loads CUDA."""

    modes = MODES
    open_levels: tuple[str, ...] = ()  # a plan has the level it was built at

    def __init__(self) -> None:
        self._status: EngineStatus | None = None

    def attempts(self, request: BuildRequest) -> tuple[tuple[str, BuildRequest], ...]:
        """The second goes without the timing cache, which may be what the first one died of."""
        options = request.options
        asked = options.optimization_level
        asked = _DEFAULT_LEVEL if asked is None else asked
        first = (str(asked), request)
        if asked <= 0:
            return (first,)
        lower = min(asked - 1, _WITHOUT_COMPILING)
        options = replace(options, optimization_level=lower)
        return first, (str(lower), replace(request, options=options, timing_cache=None))

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

    def open(self, request: OpenRequest) -> TimedModel:
        """A plan, as `open_tensorrt` loads it."""
        assert request.file is not None, "a plan is a file"
        return open_tensorrt(
            request.file,
            request.options,
            mode=request.mode,
            model=request.model,
            precision=request.precision,
            sparse_kernels=request.sparse_kernels,
        )

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
            _keep(request.file(".layers.json"), plan.layer_information())
            _keep(request.file(".profile.json"), plan.layer_times(inputs, PROFILED_RUNS).to_json())
    except BuildFailedError as error:
        log.headline(error.message)
        return error.message
    return None


def _keep(path: Path, text: str | None) -> None:
    if text is not None:
        write_text(path, text)


def _variant(request: BuildRequest, build_s: float, error: str | None) -> VariantBuild:
    plan = request.file(".plan")
    return VariantBuild(
        variant=request.variant,
        onnx=request.onnx.name,
        sparse_weights=request.sparse_weights,
        providers=(),
        build_s=build_s,
        size_bytes=plan.stat().st_size,
        plan=plan.name,
        log=request.file(".log").name,
        layers=_name_if_there(request.file(".layers.json")),
        profile=_name_if_there(request.file(".profile.json")),
        error=error,
    )


def _name_if_there(path: Path) -> str | None:
    return path.name if path.is_file() else None
