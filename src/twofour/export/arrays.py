"""Large arrays cast and transposed by torch, which is several times as fast as numpy at both.

numpy does it where torch is not installed, with the same bits.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from twofour.graph.files import Array
from twofour.packages import installed_version

if TYPE_CHECKING:
    import torch

_INTEGERS: dict[int, type[np.generic]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_LARGE = 1 << 16
"""Elements from which on a conversion takes longer than to find out whether torch is there."""


def cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """The values in another type of floats, rounded to nearest even."""
    kinds = {values.dtype.name, dtype.name}
    if values.size < _LARGE or not kinds <= {"float32", "float16", "bfloat16"} or not _has_torch():
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    import torch

    made = _tensor(values).to(getattr(torch, dtype.name))
    return made.view(torch.int16).numpy().view(dtype) if dtype.itemsize == 2 else made.numpy()


def transposed(values: Array, order: tuple[int, ...]) -> Array:
    """The values with their axes in another order, one after the other in memory."""
    if not _has_torch():
        return np.ascontiguousarray(values.transpose(order))
    raw = _tensor(values.view(_INTEGERS[values.itemsize]))
    return raw.permute(order).contiguous().numpy().view(values.dtype)


def _has_torch() -> bool:
    return installed_version("torch") is not None


def _tensor(values: Array) -> torch.Tensor:
    """A tensor of the same memory, which is only read: mapped files cannot be written."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if values.dtype.name == "bfloat16":
            return torch.from_numpy(np.asarray(values.view(np.int16))).view(torch.bfloat16)
        return torch.from_numpy(np.asarray(values))
