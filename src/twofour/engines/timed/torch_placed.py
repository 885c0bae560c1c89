"""A torch program on a device, in the types of a mode, and what a mode makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofour.engines.timed.torch_device import TorchDevice
from twofour.engines.timed.torch_program import Forward, TorchProgram

if TYPE_CHECKING:
    import torch
    from torch import nn


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

    from twofour.engines.timed.torch_program import flat_tensors

    class ByPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = program.module

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            args, kwargs = program.arguments(tensors)
            return flat_tensors(self.module(*args, **kwargs))

    return ByPosition().eval()
