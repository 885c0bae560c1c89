"""The embedded default engine: ONNX Runtime on the CPU, or a GPU where its CUDA provider loads."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from twofour.engines.gpu import find_gpu
from twofour.engines.onnxruntime.session import (
    CUDA,
    CannotRunError,
    OrtSession,
    SessionSetup,
    open_session,
)
from twofour.engines.protocol import Arrays, BuildRequest, ProgressCallback
from twofour.engines.timing import no_latency
from twofour.errors import BuildFailedError, first_line
from twofour.records.build import EngineStatus, LayerTime, VariantBuild, VariantLatency
from twofour.records.options import BuildOptions, EngineName

__all__ = ["CannotRunError", "OnnxRuntimeEngine", "OrtSession", "node_times"]

HINT = "pip install onnxruntime (or onnxruntime-gpu, exactly one of the two)"
PROBE = (
    b'\x08\x07:7\n\x0c\n\x01x\x12\x01y"\x04Relu\x12\x05probe'
    b"Z\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01"
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x0e"
)
"""The smallest model that shows whether a session can run: y = Relu(x), one float32 each, opset 14.

Written out, because importing onnx to make it takes as long as starting the session."""
_KERNEL_TIME = "_kernel_time"


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

    @property
    def name(self) -> EngineName:
        """EngineName.ONNXRUNTIME."""
        return EngineName.ONNXRUNTIME

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

    def run(self, model: Path, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Outputs of the ONNX file."""
        with OrtSession(model) as session:
            return session.outputs(inputs)

    def profile(self, model: Path, inputs: Arrays, iterations: int) -> tuple[LayerTime, ...]:
        """Mean time of each node of ONNX Runtime's own, fused graph: its names, not the file's.

        A first run, in which memory is laid out, is left out: it takes many times as long.
        """
        with tempfile.TemporaryDirectory() as folder:
            with OrtSession(model, profile_prefix=Path(folder, "ort")) as session:
                for _ in range(iterations + 1):
                    session.outputs(inputs)
                events = session.end_profiling().read_text(encoding="utf-8")
            return node_times(without_first_run(events), iterations)


def without_first_run(events: str) -> str:
    """ONNX Runtime's profile without what came before the end of the first run, its warm-up."""
    rows = json.loads(events)
    ends = [place for place, event in enumerate(rows) if event.get("name") == "model_run"]
    return json.dumps(rows[ends[0] + 1 :] if ends else [])


def node_times(events: str, iterations: int) -> tuple[LayerTime, ...]:
    """Mean ms per run of each node in ONNX Runtime's profiling JSON, in order of execution."""
    total_us: dict[str, float] = {}
    for event in json.loads(events):
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith(_KERNEL_TIME):
            node = name[: -len(_KERNEL_TIME)]
            total_us[node] = total_us.get(node, 0.0) + float(event["dur"])
    return tuple(
        LayerTime(name=name, mean_ms=us / 1e3 / iterations) for name, us in total_us.items()
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
        engine=EngineName.ONNXRUNTIME,
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
