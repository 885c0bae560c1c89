"""2:4 weights, dense and as semi-structured tensors of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  the name it has everywhere
from torch import Tensor


def two_four(weight: Tensor) -> Tensor:
    """The weight with the two smaller of every four values along its last axis set to 0."""
    groups = weight.reshape(-1, 4)
    smaller = groups.abs().float().argsort(dim=1)[:, :2]
    return groups.scatter(1, smaller, 0).reshape(weight.shape)


def sparse_weight(weight: Tensor, backend: str) -> Tensor:
    """A semi-structured tensor of one backend; torch 2.1 has a flag in place of two classes."""
    name = f"SparseSemiStructuredTensor{backend.upper()}"
    if hasattr(torch.sparse, name):
        made: Tensor = getattr(torch.sparse, name).from_dense(weight)
        return made
    torch.sparse.SparseSemiStructuredTensor._FORCE_CUTLASS = backend == "cutlass"
    return torch.sparse.to_sparse_semi_structured(weight)


def padded(x: Tensor, multiple: int) -> Tensor:
    return F.pad(x, (0, 0, 0, -len(x) % multiple))
