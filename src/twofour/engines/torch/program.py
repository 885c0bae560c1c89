"""A torch module with its inputs, the device it runs on, and its failures as ours."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofour.engines.protocol import Untyped
from twofour.errors import BuildFailedError, TwofourError
from twofour.records.export import TensorShape

if TYPE_CHECKING:
    import torch
    from torch import nn


CPU, CUDA = "cpu", "cuda"
Forward = Callable[..., object]
"""Is called as the module is; gives what its forward gives."""
_LONGEST = 300
_COMPILER_ERROR = re.compile(r"^.*\berror: .*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevice:
    """One device and how a run on it is timed."""

    kind: str
    """cpu or cuda (ROCm builds of torch say so too); Tensor.to takes it."""
    name: str
    """"CPU" or the name of the GPU."""
    timing: str
    """What one sample spans, in words."""
    time_ms: Callable[[Callable[[], object]], float]
    """Runs something once and returns when it is over, with its milliseconds."""


def best_device() -> TorchDevice:
    """The current GPU where torch has one, timed by CUDA events, else the CPU by its clock."""
    import torch

    if not torch.cuda.is_available():
        timing = "one call of forward from tensors to tensors, monotonic clock"
        return TorchDevice(kind=CPU, name="CPU", timing=timing, time_ms=_cpu_ms)
    return TorchDevice(
        kind=CUDA,
        name=str(torch.cuda.get_device_name()),
        timing="one call of forward from tensors to tensors on the GPU, CUDA events",
        time_ms=_gpu_ms,
    )


def _cpu_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    kept = run()
    ms = (time.perf_counter() - started) * 1e3
    del kept  # freeing it is no part of the run
    return ms


def _gpu_ms(run: Callable[[], object]) -> float:
    import torch

    event: Untyped = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    end.record()  # an event is made when it is first recorded
    start.record()
    kept = run()
    end.record()
    end.synchronize()
    del kept
    return float(start.elapsed_time(end))


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
    inputs: tuple[TensorShape, ...]
    """Inputs of the exported file: those of `args`, then of `kwargs`; floats are float32."""
    output_names: tuple[str, ...]
    """Names of the tensors in what forward returns, in the order of torch.utils._pytree."""
    source: str
    """The model as the user named it."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The example inputs, in the order of `inputs`."""
        return (*self.args, *self.kwargs.values())

    def arguments(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Tensors in the order of `inputs` as positional and keyword arguments."""
        count = len(self.args)
        return tuple(tensors[:count]), dict(zip(self.kwargs, tensors[count:], strict=True))

    def outputs(self, returned: object) -> tuple[torch.Tensor, ...]:
        """The tensors in what forward returned, one for each of `output_names`.

        Raises BuildFailedError where their number is another.
        """
        import torch
        from torch.utils import _pytree

        leaves = _pytree.tree_leaves(returned)  # of a tuple, dict or ModelOutput
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if len(tensors) != len(self.output_names):
            raise BuildFailedError(
                f"{self.source} returns {len(tensors)} tensors here, "
                f"and {len(self.output_names)} when it was exported: {', '.join(self.output_names)}"
            )
        return tensors


@contextlib.contextmanager
def torch_errors(what: str) -> Iterator[None]:
    """Whatever torch or the user's forward raises, SystemExit included, becomes one of ours.

    Raises BuildFailedError: "WHAT: message".
    """
    try:
        yield
    except TwofourError:
        raise
    except (Exception, SystemExit) as error:
        hint = "use a smaller batch" if "OutOfMemory" in type(error).__name__ else None
        raise BuildFailedError(f"{what}: {in_one_line(error)}", hint=hint) from error


def in_one_line(error: BaseException) -> str:
    """Type and first line of the message; of a C++ compiler's error, the compiler's own line."""
    text = str(error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    said = _COMPILER_ERROR.search(text)
    if said is not None and said[0].strip() != line:
        line = f"{line}: {said[0].strip()}"
    line = line if len(line) <= _LONGEST else line[:_LONGEST] + "..."
    name = type(error).__name__
    return line if line.startswith(name) else f"{name}: {line}"


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Hold back warnings and log lines below an error's; prints are left to the caller."""
    logger = logging.getLogger("torch")
    level = logger.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger.setLevel(logging.ERROR)
            yield
    finally:
        logger.setLevel(level)
