"""A small pruned module, its training, and what training did to its zeros."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import twofour

Model = nn.Module


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))


def pruned_net() -> nn.Sequential:
    model = net()
    twofour.prune(model)
    return model


def loss(model: Model) -> Tensor:
    dtype = next(model.parameters()).dtype
    value: Tensor = model(torch.randn(4, 16, dtype=dtype)).square().sum()
    return value


def train(model: Model, *optimizers: Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(loss(model))
        for optimizer in optimizers:
            optimizer.step()


def zeros(model: Model) -> dict[str, Tensor]:
    return {name: p == 0 for name, p in model.named_parameters() if "weight" in name}


def lost(model: Model, masks: dict[str, Tensor]) -> int:
    """Values under the masks that are no +0.0."""
    found = 0
    for name, mask in masks.items():
        weight = model.get_parameter(name).detach()
        whole: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        found += int(((whole != 0) | whole.signbit())[mask].sum())
    return found
