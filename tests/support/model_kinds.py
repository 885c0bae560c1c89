"""Small models of the kinds whose weights no Linear or Conv holds.

Used by file name (`model_kinds.py:Recurrent`), as a user would.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Recurrent(nn.Module):
    """A bidirectional LSTM, a GRU and a Linear."""

    example_input_array = torch.randn(2, 6, 32)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 48, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(96, 40, batch_first=True)
        self.head = nn.Linear(40, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.gru(self.lstm(x)[0])[0])
        return y


class Detector(nn.Module):
    """As DETR: learned queries, cross-attention in nn.TransformerDecoder; a head for training."""

    example_input_array = torch.randn(2, 16, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(16, 64, 1)
        self.query = nn.Embedding(20, 64)
        self.position = nn.Parameter(torch.randn(16, 1, 64))
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 128), 1)
        self.classes = nn.Linear(64, 24)
        self.auxiliary = nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.project(x).flatten(2).permute(2, 0, 1) + self.position
        query = self.query.weight.unsqueeze(1).expand(-1, x.shape[0], -1)
        found = self.decoder(query, memory)
        y: Tensor = self.auxiliary(found) if self.training else self.classes(found)
        return y


class SoftMixture(nn.Module):
    """Every expert sees every token; experts are one stacked parameter used by einsum."""

    example_input_array = torch.randn(2, 5, 64)

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.up = nn.Parameter(torch.randn(4, 64, 48) / 8)
        self.down = nn.Parameter(torch.randn(4, 48, 64) / 8)
        self.out = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bsd,edh->ebsh", x, self.up).relu()
        experts = torch.einsum("ebsh,ehd->ebsd", hidden, self.down)
        mixed = torch.einsum("ebsd,bse->bsd", experts, self.gate(x).softmax(-1))
        y: Tensor = self.out(mixed)
        return y


class Top1Mixture(nn.Module):
    """One expert for each row: its matrices are picked from the stack."""

    example_input_array = torch.randn(3, 64)

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.up = nn.Parameter(torch.randn(4, 64, 48) / 8)
        self.down = nn.Parameter(torch.randn(4, 48, 64) / 8)
        self.out = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        expert = self.gate(x).argmax(-1)
        hidden = torch.bmm(x.unsqueeze(1), self.up[expert]).relu()
        y: Tensor = self.out(torch.bmm(hidden, self.down[expert]).squeeze(1))
        return y


class Tied(nn.Module):
    """An embedding whose table is the head's too, and two layers of one array."""

    example_input_array = torch.randint(0, 96, (2, 7))

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 64)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.second(self.first(self.table(tokens)).relu()))
        return y


class ByHand(nn.Module):
    """Parameters that the forward multiplies by itself, in four ways, and a matrix of the code."""

    example_input_array = torch.randn(6, 64)

    def __init__(self) -> None:
        super().__init__()
        self.fixed = torch.randn(64, 64) / 8
        self.plain = nn.Parameter(torch.randn(64, 64) / 8)
        self.linear = nn.Parameter(torch.randn(64, 64) / 8)
        self.added = nn.Parameter(torch.randn(64, 64) / 8)
        self.bias = nn.Parameter(torch.randn(64))
        self.kernel = nn.Parameter(torch.randn(16, 8, 3, 3) / 8)
        self.out = nn.Linear(16, 128)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x @ self.fixed @ self.plain, self.linear)
        y = torch.addmm(self.bias, y, self.added)
        y = functional.conv2d(y.view(-1, 8, 2, 4), self.kernel, padding=1)
        z: Tensor = self.out(y.mean((2, 3)))
        return z
