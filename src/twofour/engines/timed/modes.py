"""The engines a comparison knows and, for each, its modes with what can run here."""

from __future__ import annotations

from collections.abc import Mapping

from twofour.engines.timed.protocol import ModeStatus

ENGINES = ("tensorrt", "onnxruntime", "torch", "torch-tensorrt")
"""In the order of preference: the first that runs gives the baseline."""
GPU = "gpu"
FLAG_OFF = "gpu-sparsity-off"
"""TensorRT: sparse weights in an engine that was not allowed sparse kernels."""


def statuses_of(engine: str) -> Mapping[str, ModeStatus]:
    """Mode -> whether it can run here, established by trying; the usual mode comes first."""
    if engine == "tensorrt":
        return _by_mode(_tensorrt())
    if engine == "onnxruntime":
        from twofour.engines.timed.onnxruntime_modes import onnxruntime_statuses

        return _by_mode(onnxruntime_statuses())
    from twofour.engines.timed.torch_modes import torch_statuses

    return _by_mode(tuple(s for s in torch_statuses() if s.engine == engine))


def _by_mode(statuses: tuple[ModeStatus, ...]) -> dict[str, ModeStatus]:
    return {status.mode: status for status in statuses}


def _tensorrt() -> tuple[ModeStatus, ...]:
    from twofour.engines.tensorrt.status import tensorrt_status

    found = tensorrt_status()
    return tuple(
        ModeStatus(engine="tensorrt", mode=mode, why_not=found.why_not, hint=found.hint)
        for mode in (GPU, FLAG_OFF)
    )
