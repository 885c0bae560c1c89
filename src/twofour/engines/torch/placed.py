"""A torch module on its device, with the program that is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twofour.engines.torch.device import TorchDevice
from twofour.errors import BadInputError, BuildFailedError
from twofour.records.export import TensorShape

if TYPE_CHECKING:
    import torch
    from torch import nn


Forward = Callable[..., object]
"""Is called as the module is; gives what its forward gives."""


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
