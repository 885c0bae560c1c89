"""Where a torch variant runs: the device, its clock and its peak memory."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from twofour.engines.protocol import Untyped
from twofour.errors import MissingToolError, first_line

Run = Callable[[], object]

CPU = "cpu"
CUDA = "cuda"
XLA = "xla"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevice:
    """One device and how a run on it is timed."""

    kind: str
    """cpu, cuda (ROCm builds of torch say so too) or xla."""
    handle: Untyped
    """What Tensor.to takes."""
    name: str
    """"CPU" or the name of the GPU."""
    timing: str
    """What one sample spans, in words."""
    time_ms: Callable[[Run], float]
    """Runs it once and returns when it is over, with its milliseconds."""


def best_device() -> TorchDevice:
    """The first GPU where torch has one, else the CPU."""
    import torch

    return cuda_device() if torch.cuda.is_available() else cpu_device()


def cpu_device() -> TorchDevice:
    """The CPU, with the monotonic clock."""
    return TorchDevice(
        kind=CPU,
        handle=CPU,
        name="CPU",
        timing="one call of forward from tensors to tensors, monotonic clock",
        time_ms=_by_host_clock,
    )


def cuda_device() -> TorchDevice:
    """The current GPU, with a pair of events around the run on the current stream."""
    import torch

    start, end = timing_event(), timing_event()

    def by_events(run: Run) -> float:
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return TorchDevice(
        kind=CUDA,
        handle=CUDA,
        name=str(torch.cuda.get_device_name()),
        timing="one call of forward from tensors to tensors on the GPU, CUDA events",
        time_ms=by_events,
    )


def timing_event() -> Untyped:
    """A CUDA event that keeps its time."""
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch lacks the types


def xla_device() -> TorchDevice:
    """The device of torch_xla, which runs what was recorded when it is told to.

    Raises MissingToolError where torch_xla is not installed or finds no device. Not measured on a
    real device; `torch_xla.sync(wait=True)` returns when the device is done (pytorch/xla 8858).
    """
    try:
        torch_xla: Untyped = importlib.import_module("torch_xla")
        handle = torch_xla.device()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise MissingToolError(
            f"torch_xla cannot be used: {first_line(error)}",
            hint="pip install torch_xla, in the release of the torch that is installed",
        ) from error

    def until_synced(run: Run) -> float:
        started = time.perf_counter()
        kept = run()  # what nobody holds is not computed
        torch_xla.sync(wait=True)
        elapsed = (time.perf_counter() - started) * 1e3
        del kept
        return elapsed

    return TorchDevice(
        kind=XLA,
        handle=handle,
        name=f"XLA ({handle})",
        timing="one call of forward and torch_xla.sync(wait=True), monotonic clock",
        time_ms=until_synced,
    )


def reset_peak(device: TorchDevice) -> None:
    """Let the peak of device memory start from what is allocated now."""
    if device.kind == CUDA:
        import torch

        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: TorchDevice) -> int | None:
    """Most device memory in tensors since the last reset; None elsewhere than on a GPU."""
    if device.kind != CUDA:
        return None
    import torch

    return int(torch.cuda.max_memory_allocated())


def release(device: TorchDevice) -> None:
    """Give cached device memory back."""
    if device.kind == CUDA:
        import torch

        torch.cuda.empty_cache()


def float32_options(device: TorchDevice) -> tuple[str, ...]:
    """What float32 arithmetic on a GPU may be rounded to; () elsewhere."""
    if device.kind != CUDA:
        return ()
    import torch

    options = [f"float32_matmul_precision={torch.get_float32_matmul_precision()}"]
    with contextlib.suppress(RuntimeError):  # where the newer settings were used instead
        options.append(f"cudnn_tf32={torch.backends.cudnn.allow_tf32}")
    return tuple(options)


def _by_host_clock(run: Run) -> float:
    started = time.perf_counter()
    kept = run()
    elapsed = (time.perf_counter() - started) * 1e3
    del kept  # freeing the outputs is no part of the run
    return elapsed
