"""A torch module, how it is called, and what its inputs and outputs are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
