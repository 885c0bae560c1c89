"""The embedded default engine: ONNX Runtime on the CPU, or a GPU where its CUDA provider loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from twofour.engines.gpu import find_gpu
from twofour.engines.onnxruntime.session import (
    CUDA,
    HINT,
    LEVELS,
    PROBE,
    CannotRunError,
    OrtSession,
    SessionSetup,
    open_session,
)
from twofour.engines.onnxruntime.timed import ENGINE, MODES, onnxruntime_statuses, open_onnxruntime
from twofour.engines.protocol import (
    BuildRequest,
    ModeStatus,
    OpenRequest,
    ProgressCallback,
    TimedModel,
)
from twofour.errors import BuildFailedError, first_line
from twofour.records.build import EngineStatus, VariantBuild


class OnnxRuntimeEngine:
    """Meets the Engine Protocol; what it builds is a session, so no plan or log is left."""

    modes = MODES
    open_levels = LEVELS

    def status(self) -> EngineStatus:
        """Whether a session can be made here, and on which device."""
        try:
            import onnxruntime as ort
        except (ImportError, OSError) as error:
            why = f"onnxruntime cannot be imported: {first_line(error)}"
            return _status(None, why_not=why, hint=HINT)
        try:
            providers = _try_providers()
        except Exception as error:  # noqa: BLE001  # doctor reports whatever keeps it from running
            return _status(ort.__version__, why_not=first_line(error), hint=HINT)
        gpu = find_gpu() if CUDA in providers else None
        return _status(ort.__version__, device=gpu.name if gpu else "CPU")

    def build(self, request: BuildRequest, report: ProgressCallback) -> VariantBuild:
        """Load the model and run it once; one that cannot be run here gets `error`."""
        report("loading the session", 0, 2)
        try:
            with OrtSession(request.onnx, threads=request.options.threads) as session:
                report("running", 1, 2)
                built = opened(request, load_s=session.load_s, providers=session.providers)
                try:
                    session.outputs(request.inputs)
                except BuildFailedError as error:
                    built = replace(built, error=error.message)
                report("running", 2, 2)
        except CannotRunError as error:
            return not_opened(request, error)
        return built

    def statuses(self, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
        """Each tried with a session."""
        return onnxruntime_statuses(modes)

    def attempts(self, request: BuildRequest) -> tuple[tuple[str, BuildRequest], ...]:
        """One: a run loads its sessions at lower levels itself."""
        return ((LEVELS[0], request),)

    def open(self, request: OpenRequest) -> TimedModel:
        """An ONNX file, as `open_onnxruntime` loads it."""
        assert request.file is not None, "planned only where there is one"
        return open_onnxruntime(
            request.file, request.mode, request.options, precision=request.precision
        )


def _try_providers() -> tuple[str, ...]:
    session = open_session(PROBE, SessionSetup(threads=1))
    session.run(None, {"x": np.ones(1, np.float32)})
    return tuple(session.get_providers())


def _status(
    version: str | None,
    *,
    why_not: str | None = None,
    hint: str | None = None,
    device: str | None = None,
) -> EngineStatus:
    return EngineStatus(
        engine=ENGINE,
        version=version,
        can_run=why_not is None,
        why_not=why_not,
        hint=hint,
        device=device,
    )


def opened(request: BuildRequest, *, load_s: float, providers: tuple[str, ...]) -> VariantBuild:
    """The record of a session that is open."""
    return _variant(request, build_s=load_s, providers=providers)


def not_opened(request: BuildRequest, error: BuildFailedError) -> VariantBuild:
    """The record of a model that ONNX Runtime does not take."""
    return _variant(request, error=error.message)


def _variant(
    request: BuildRequest,
    *,
    build_s: float = 0.0,
    providers: tuple[str, ...] = (),
    error: str | None = None,
) -> VariantBuild:
    return VariantBuild(
        variant=request.variant,
        onnx=request.onnx.name,
        sparse_weights=False,  # ONNX Runtime's own providers have no sparse kernels to allow
        providers=providers,
        build_s=build_s,
        size_bytes=None,
        plan=None,
        log=None,
        layers=None,
        profile=None,
        error=error,
    )
