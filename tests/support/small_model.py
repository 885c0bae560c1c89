"""A model file as a user would write it: small, and the same on every call because it is seeded."""

import torch
from torch import nn


class Small(nn.Module):
    """A stem of 3 channels, a normal, a grouped and a pointwise convolution, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.body = nn.Conv2d(16, 32, 3, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, 8, 8] -> [batch, 10]."""
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.grouped(torch.relu(self.body(x))))
        return self.head(x.reshape(x.shape[0], 32, 4, -1).mean(3).flatten(1))  # type: ignore[no-any-return]  # nn.Module.__call__


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model with random weights, and one example batch."""
    return Small().eval(), (torch.randn(2, 3, 8, 8),)
