"""The embedded default engine: ONNX Runtime on the CPU, or a GPU where its CUDA provider loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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
    Arrays,
    BuildRequest,
    ModeStatus,
    OpenRequest,
    ProgressCallback,
    TimedModel,
)
from twofour.engines.timing import no_latency
from twofour.errors import BuildFailedError, first_line
from twofour.records.build import EngineStatus, VariantBuild, VariantLatency
from twofour.records.options import BuildOptions


class TimedSession(Protocol):
    """What is timed of a session: an OrtSession, or one in another process."""

    @property
    def load_s(self) -> float:
        """Seconds its load took."""

    @property
    def providers(self) -> tuple[str, ...]:
        """The providers in use."""

    def measure(self, variant: str, inputs: Arrays, options: BuildOptions) -> VariantLatency:
        """As `OrtSession.measure`."""


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
        """Load the model and time it; a model without a kernel here gets `latency.error`."""
        report("loading the session", 0, 2)
        try:
            session = OrtSession(request.onnx, threads=request.options.threads)
        except CannotRunError as error:
            return self.not_built(request, error)
        with session:
            return self.build_from(session, request, report)

    def build_from(
        self, session: TimedSession, request: BuildRequest, report: ProgressCallback
    ) -> VariantBuild:
        """`build` with a session that is already open and stays open."""
        report("timing", 1, 2)
        latency = session.measure(request.variant, request.inputs, request.options)
        report("timing", 2, 2)
        return _variant(
            request, build_s=session.load_s, latency=latency, providers=session.providers
        )

    def not_built(self, request: BuildRequest, error: BuildFailedError) -> VariantBuild:
        """The record of a model that ONNX Runtime does not take."""
        return _variant(request, build_s=0.0, latency=no_latency(request.variant, error.message))

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


def _variant(
    request: BuildRequest,
    *,
    build_s: float,
    latency: VariantLatency,
    providers: tuple[str, ...] = (),
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
        latency=latency,
    )
