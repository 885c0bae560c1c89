"""Whether an output is right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# relative to the largest value (kernels) or the norm (models): some roundings of the output
TOLERANCES = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.int32: 0.0, torch.float32: 1e-3}


@dataclass(frozen=True)
class Judge:
    """Compares outputs with the reference."""

    reference: Tensor
    by_norm: bool
    """Whole models: relative to the norm; products: largest error by largest value."""

    def error(self, output: Tensor) -> float:
        """Infinity where a value is missing or not finite."""
        found = output[: len(self.reference)].to(torch.float32)
        if found.shape != self.reference.shape or not bool(found.isfinite().all()):
            return math.inf
        difference = found - self.reference
        if self.by_norm:
            return float(difference.norm() / self.reference.norm())
        return float(difference.abs().max() / self.reference.abs().max())

    def wrong(self, output: Tensor, dense_error: float | None) -> bool:
        """Whether it is further off than its type and the dense arithmetic explain."""
        return self.error(output) > max(TOLERANCES[output.dtype], 5 * (dense_error or 0.0))
