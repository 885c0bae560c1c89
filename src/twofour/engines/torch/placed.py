"""A torch module on its device: clock and memory there, and its failures as ours."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofour.engines.protocol import Untyped
from twofour.errors import (
    BadInputError,
    BuildFailedError,
    MissingToolError,
    TwofourError,
    first_line,
)
from twofour.records.export import TensorShape

if TYPE_CHECKING:
    import torch
    from torch import nn


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
Forward = Callable[..., object]
"""Is called as the module is; gives what its forward gives."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchProgram:
    """What a torch variant is made of. The variant changes the module in place.

    Its type, device and layout become those of the mode, so that the weights are held once: load a
    module anew for each variant.
    """

    module: nn.Module
    args: tuple[torch.Tensor, ...]
    """Example inputs by position."""
    kwargs: Mapping[str, torch.Tensor]
    """Example inputs by name, after those by position."""
    input_names: tuple[str, ...]
    """What arrays are known by: of `args`, then of `kwargs`."""
    output_names: tuple[str, ...]
    """Of the tensors in what forward returns, in the order of torch.utils._pytree."""
    source: str
    """The model as the user named it."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The example inputs, in the order of `input_names`."""
        return (*self.args, *self.kwargs.values())

    @property
    def inputs(self) -> tuple[TensorShape, ...]:
        """As the exported file has them: floats are float32, axis 0 is `batch` where it is one.

        Raises BadInputError where there are more names than inputs, or fewer.
        """
        tensors = self.tensors
        if len(tensors) != len(self.input_names):
            raise BadInputError(
                f"{self.source} has {len(tensors)} example inputs, "
                f"and {len(self.input_names)} names for them: {', '.join(self.input_names)}"
            )
        batch = next((t.shape[0] for t in tensors if t.dim()), None)
        return tuple(
            _described(name, tensor, batch)
            for name, tensor in zip(self.input_names, tensors, strict=True)
        )

    def arguments(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Tensors in the order of `input_names` as positional and keyword arguments."""
        count = len(self.args)
        return tuple(tensors[:count]), dict(zip(self.kwargs, tensors[count:], strict=True))

    def outputs(self, returned: object) -> tuple[torch.Tensor, ...]:
        """The tensors in what forward returned, one for each of `output_names`.

        Raises BuildFailedError where their number is another.
        """
        tensors = flat_tensors(returned)
        if len(tensors) != len(self.output_names):
            raise BuildFailedError(
                f"{self.source} returns {len(tensors)} tensors here, "
                f"and {len(self.output_names)} when it was exported: {', '.join(self.output_names)}"
            )
        return tensors


def flat_tensors(returned: object) -> tuple[torch.Tensor, ...]:
    """Every tensor in a tensor, tuple, dict or ModelOutput, in the order of its fields."""
    import torch
    from torch.utils import _pytree as pytree

    return tuple(leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor))


def _described(name: str, tensor: torch.Tensor, batch: int | None) -> TensorShape:
    kind = "float32" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    shape: tuple[int | str, ...] = tuple(tensor.shape)
    if shape and shape[0] == batch:
        shape = ("batch", *shape[1:])
    return TensorShape(name=name, dtype=kind, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A program whose module was brought to a device, a float type and a memory layout."""

    program: TorchProgram
    device: TorchDevice
    dtype: str
    """Of the weights and of floating-point inputs."""
    channels_last: bool
    """4-dimensional inputs are given with the channels innermost."""

    @property
    def module(self) -> nn.Module:
        """The program's own."""
        return self.program.module

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Inputs where the module is and as it takes them."""
        return tuple(self._put(tensor) for tensor in tensors)

    def run_example(self, forward: Forward) -> tuple[torch.Tensor, ...]:
        """The tensors that forward gives for the example inputs; raises what forward raises."""
        import torch

        args, kwargs = self.program.arguments(self.put(self.program.tensors))
        with torch.inference_mode():
            return self.program.outputs(forward(*args, **kwargs))

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        if tensor.is_floating_point():
            tensor = tensor.to(torch_dtype(self.dtype))
        moved: torch.Tensor = tensor.to(self.device.handle)
        if self.channels_last and moved.dim() == 4:
            moved = moved.contiguous(memory_format=torch.channels_last)
        return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a mode made of a program."""

    placed: Placed
    forward: Forward
    precision: str
    """For VariantSettings."""
    options: tuple[str, ...] = ()
    sparse_kernels: bool | None = None
    layers: nn.Module | None = None
    """A module whose submodules run when `forward` does; None: their times cannot be had."""


def place(
    program: TorchProgram,
    device: TorchDevice,
    dtype: str = "float32",
    *,
    channels_last: bool = False,
) -> Placed:
    """Bring the module to the device, in evaluation mode, its floats to `dtype`; in place."""
    import torch

    program.module.eval().requires_grad_(requires_grad=False)
    program.module.to(device.handle)
    # Module.to(dtype) would cast complex buffers too, and drop their imaginary part
    {
        "float32": program.module.float,
        "float16": program.module.half,
        "bfloat16": program.module.bfloat16,
    }[dtype]()
    if channels_last:
        program.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    return Placed(program=program, device=device, dtype=dtype, channels_last=channels_last)


def without_fast_path(stack: ExitStack) -> None:
    """Turn off the fused kernels of nn.TransformerEncoderLayer and nn.MultiheadAttention."""
    import torch

    stack.callback(
        torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
    )
    torch.backends.mha.set_fastpath_enabled(value=False)


def torch_dtype(name: str) -> torch.dtype:
    """float32, float16 or bfloat16 in torch."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


class PerShape:
    """A forward for fixed shapes, made anew for shapes that were not met before.

    What was made for other shapes is kept: a comparison comes back to them.
    """

    def __init__(self, make: Callable[[tuple[torch.Tensor, ...]], Forward]) -> None:
        self._make = make
        self._made: dict[tuple[tuple[int, ...], ...], Forward] = {}

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> object:
        """Raises what making it raises, on the first call with these shapes."""
        tensors = (*args, *kwargs.values())
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes not in self._made:
            self._made[shapes] = self._make(tensors)
        return self._made[shapes](*tensors)


def by_position(program: TorchProgram) -> nn.Module:
    """The module behind a forward of plain tensors: takes them in order, gives them as a tuple."""
    from torch import nn

    class ByPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = program.module

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            args, kwargs = program.arguments(tensors)
            return flat_tensors(self.module(*args, **kwargs))

    return ByPosition().eval()
