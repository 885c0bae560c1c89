"""Batches as calls of a torch module, and what is said where its forward fails on one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twofour.errors import BadInputError
from twofour.export.model_code import described
from twofour.pipeline.sources.calibration.data import Batch, CalibrationData

if TYPE_CHECKING:
    import torch
    from torch import nn

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCall:
    """Arguments of one forward: `module(*args, **kwargs)`."""

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]
    padding: torch.Tensor | None
    """Booleans, samples x positions: True where a position is padding; None: none is."""


def torch_call(module: nn.Module, batch: Batch, device: torch.device | None = None) -> TorchCall:
    """The batch in forward's order, on `device` (None: the CPU); no memory is shared with it."""
    left = {name: tensor_of(array, device) for name, array in batch.arrays.items()}
    args: list[torch.Tensor] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            args.extend(left.pop(name) for name in _numbered(left))
        if parameter.kind not in _BY_POSITION or parameter.name not in left:
            break
        args.append(left.pop(parameter.name))
    padding = None if batch.padding is None else tensor_of(batch.padding, device)
    return TorchCall(args=tuple(args), kwargs=left, padding=padding)


def failed_forward(
    data: CalibrationData, number: int, batch: Batch, error: BaseException, module: nn.Module
) -> BadInputError:
    """The error to raise where the module's forward fails on batch `number`, counted from 0."""
    shapes = ", ".join(
        f"{name} {'x'.join(map(str, array.shape)) or 'scalar'} {array.dtype.name}"
        for name, array in batch.arrays.items()
    )
    return BadInputError(
        f"{type(module).__name__}.forward fails on batch {number} of {data.source} ({shapes}): "
        f"{described(error)}",
        hint="give calibration data of the shapes and types that the model takes",
    )


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor in numpy, of its own type, bfloat16 too."""
    import torch

    plain = tensor.detach().cpu()
    if plain.dtype is torch.bfloat16:
        import ml_dtypes

        return plain.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: NDArray[Any] = plain.resolve_conj().resolve_neg().numpy()
    return array


def _numbered(names: dict[str, torch.Tensor]) -> list[str]:
    """arr_0, arr_1, ..., as arrays without a name are called, in order."""
    found: list[str] = []
    while f"arr_{len(found)}" in names:
        found.append(f"arr_{len(found)}")
    return found


def tensor_of(array: NDArray[Any], device: torch.device | None = None) -> torch.Tensor:
    """The array in torch, of its own type and in memory of its own; on the CPU, unless told."""
    import torch

    own = np.array(array)  # mapped files are read-only, which torch cannot say of a tensor
    if own.dtype.name == "bfloat16":
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16).to(device or "cpu")
    return torch.from_numpy(own).to(device or "cpu")
