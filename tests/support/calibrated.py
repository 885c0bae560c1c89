"""Weights and calls for tests of calibrated pruning."""

from __future__ import annotations

from torch import Tensor, nn

from twofour.calibrate.torch.stored_weights import CalibratedWeight, calibrated_weight
from twofour.pruning.torch.calls import Call
from twofour.pruning.torch.module_layers import find_module_weights
from twofour.records.weights import Pattern

TWO_FOUR = Pattern(2, 4)


def calibrated(model: nn.Module, key: str) -> CalibratedWeight:
    """One weight of a model, as calibrated pruning takes it."""
    (row,) = [row for row in find_module_weights(model) if row.weight == key]
    return calibrated_weight(model, row, TWO_FOUR)


def call(*args: Tensor, samples: int = 3, padding: Tensor | None = None) -> Call:
    """One forward by position."""
    return Call(args=args, kwargs={}, samples=samples, padding=padding)
