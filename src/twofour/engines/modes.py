"""The engines a comparison knows and, for each, its modes with what can run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twofour.engines.timed_protocol import ModeStatus

ENGINES = ("tensorrt", "onnxruntime", "torch", "torch-tensorrt")
"""In the order of preference: the first that runs gives the baseline."""
GPU = "gpu"
FLAG_OFF = "gpu-sparsity-off"
"""TensorRT: sparse weights in an engine that was not allowed sparse kernels."""


def modes_of(engine: str) -> tuple[str, ...]:
    """Every mode of an engine of `ENGINES`, the usual one first; nothing is tried."""
    if engine == "onnxruntime":
        from twofour.engines.onnxruntime.modes import MODES

        return MODES
    if engine == "torch":
        from twofour.engines.torch.modes import MODES as TORCH_MODES

        return tuple(TORCH_MODES)
    return (GPU, FLAG_OFF)


def statuses_of(engine: str, modes: Sequence[str]) -> Mapping[str, ModeStatus]:
    """Mode -> whether it can run here, established by trying those of `modes`; never raises."""
    return {status.mode: status for status in _tried(engine, modes) if status.mode in modes}


def _tried(engine: str, modes: Sequence[str]) -> tuple[ModeStatus, ...]:
    if engine == "tensorrt":
        return _tensorrt()
    if engine == "onnxruntime":
        from twofour.engines.onnxruntime.modes import onnxruntime_statuses

        return onnxruntime_statuses(modes)
    if engine == "torch":
        from twofour.engines.torch.modes import torch_statuses

        return torch_statuses(modes)
    from twofour.engines.torch.tensorrt import torch_tensorrt_statuses

    return torch_tensorrt_statuses()


def _tensorrt() -> tuple[ModeStatus, ...]:
    from twofour.engines.tensorrt.status import tensorrt_status

    found = tensorrt_status()
    return tuple(
        ModeStatus(engine="tensorrt", mode=mode, why_not=found.why_not, hint=found.hint)
        for mode in (GPU, FLAG_OFF)
    )
