"""Where a torch variant runs, with its clock and peak memory, and its failures as ours."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from twofour.engines.protocol import Untyped
from twofour.errors import BuildFailedError, MissingToolError, TwofourError, first_line

Run = Callable[[], object]

_LONGEST = 300
_MISSING = {
    "InvalidCxxCompiler": (
        "torch.compile finds no C++ compiler",
        "install g++ or clang, or name one in the environment variable CXX",
    ),
    "TritonMissing": ("torch.compile finds no working Triton", "pip install triton"),
}
"""By the name of torch._inductor.exc's class."""
_HINTS = {
    "OutOfMemory": "use a smaller batch",
    "LimitHit": "it is compiled for each set of shapes: give it fewer",
}
"""By a part of the name of torch's or dynamo's class."""
_COMPILER_ERROR = re.compile(r"^.*\berror: .*$", re.MULTILINE)
_LOGGER = "torch"

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


@contextlib.contextmanager
def torch_errors(what: str) -> Iterator[None]:
    """Whatever torch or the user's forward raises, SystemExit included, becomes one of ours.

    Raises MissingToolError where a compiler is missing, else BuildFailedError: "WHAT: message".
    """
    try:
        yield
    except TwofourError:
        raise
    except (Exception, SystemExit) as error:
        raise _translated(what, error) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings and log lines below an error's; what is printed is the caller's."""
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger.setLevel(logging.ERROR)
            yield
    finally:
        logger.setLevel(level)


def in_one_line(error: BaseException) -> str:
    """Type and first line of its message; a C++ compiler's own line where it is that."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    said = _COMPILER_ERROR.search(text)
    if said is not None and said[0].strip() != line:
        line = f"{line}: {said[0].strip()}"
    line = line if len(line) <= _LONGEST else line[:_LONGEST] + "..."
    name = type(error).__name__
    return line if line.startswith(name) else f"{name}: {line}"


def _translated(what: str, error: BaseException) -> TwofourError:
    for cause in _chain(error):
        missing = _MISSING.get(type(cause).__name__)
        if missing is not None:
            return MissingToolError(f"{what}: {missing[0]}", hint=missing[1])
    hints = (hint for part, hint in _HINTS.items() if part in type(error).__name__)
    return BuildFailedError(f"{what}: {in_one_line(error)}", hint=next(hints, None))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it came from; torch keeps some in `inner_exception`."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [found.__cause__, found.__context__, getattr(found, "inner_exception", None)]
