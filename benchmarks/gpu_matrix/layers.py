"""What the transformers have in common: widths, heads, linear layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812  the name it has everywhere
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Widths of a transformer."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    epsilon: float
    vocabulary: int = 0
    positions: int = 0
    """Most tokens; for images with the class token."""


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


class Linear(nn.Linear):
    """On two axes: torch's semi-structured weights take no more, whatever the strides."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        flat = F.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        # some versions of torch leave a sparse product transposed, which no fast attention takes
        return flat.contiguous().view(*x.shape[:-1], -1)
