"""Batches as calls of a torch module: arrays in its order, as tensors."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from twofour.pipeline.sources.calibration.data import Batch

if TYPE_CHECKING:
    import torch
    from torch import nn

    from twofour.pruning.torch_calls import Call

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def torch_call(module: nn.Module, batch: Batch) -> Call:
    """The batch in forward's order, on the CPU; no memory is shared with it."""
    from twofour.pruning.torch_calls import Call

    left = {name: tensor_of(array) for name, array in batch.arrays.items()}
    args: list[torch.Tensor] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            args.extend(left.pop(name) for name in _numbered(left))
        if parameter.kind not in _BY_POSITION or parameter.name not in left:
            break
        args.append(left.pop(parameter.name))
    padding = None if batch.padding is None else tensor_of(batch.padding)
    return Call(args=tuple(args), kwargs=left, samples=batch.samples, padding=padding)


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


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """The array in torch, of its own type and in memory of its own."""
    import torch

    own = np.array(array)  # mapped files are read-only, which torch cannot say of a tensor
    if own.dtype.name == "bfloat16":
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)
