"""Small nets with a layer of every kind the exporter treats in its own way."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

from twofour.records.export import LayerMap
from twofour.records.options import Precision

WIDTH = 32
LAYERS = {
    "conv": ("conv.weight", "Conv"),
    "grouped": ("grouped.weight", "Conv"),
    "up": ("up.weight", "ConvTranspose"),
    "conv1d": ("conv1d.weight", "Conv"),
    "conv3d": ("conv3d.weight", "Conv"),
    "matrix": ("matrix.weight", "Gemm"),
    "tokens.0": ("tokens.0.weight", "MatMul"),
    "tokens.2": ("tokens.2.weight", "MatMul"),
    "mha": ("mha.in_proj_weight", "MatMul"),
    "mha.out_proj": ("mha.out_proj.weight", "Gemm"),
    "addmm": ("addmm.weight", "Gemm"),
    "small_head": ("small_head.weight", "MatMul"),
    "large_head": ("large_head.weight", "MatMul"),
}
"""Layers of `Kinds` with parameter and ONNX op; `right` and `borrowed` belong to no layer."""

_INPUTS_FIRST = ("up.weight", "addmm.weight", "right")
REDUCTION_AXIS = {
    name: 0 if name in _INPUTS_FIRST else 1
    for name in (*(parameter for parameter, _ in LAYERS.values()), "right", "borrowed")
}
"""Reduction axis of every weight of `Kinds`, as torch stores it."""


class AddmmLayer(nn.Module):
    """Stored [in, out] and computed by addmm, like Conv1D of transformers."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) / width**0.5)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.reshape(*x.shape[:-1], -1)


class Kinds(nn.Module):
    """Images [batch, 8, 6, 6] and token numbers [batch, 5] in, two outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.up_bn = nn.BatchNorm2d(8)
        self.conv1d = nn.Conv1d(8, 8, 3, padding=1)
        self.conv3d = nn.Conv3d(8, 8, 1)
        self.matrix = nn.Linear(8, WIDTH)
        self.small = nn.Embedding(40, WIDTH)
        self.large = nn.Embedding(300, WIDTH)
        self.tokens = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        )
        self.mha = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.addmm = AddmmLayer(WIDTH, 40)
        self.right = nn.Parameter(torch.randn(40, 24) / 6)
        self.borrowed = nn.Parameter(torch.randn(WIDTH, 24) / 5)
        self.norm = nn.LayerNorm(WIDTH)
        self.small_head = nn.Linear(WIDTH, 40, bias=False)
        self.small_head.weight = self.small.weight
        self.large_head = nn.Linear(WIDTH, 300, bias=False)
        self.large_head.weight = self.large.weight

    def forward(self, image: Tensor, ids: Tensor) -> dict[str, Tensor]:
        x = functional.relu(self.bn(self.conv(image)))
        x = functional.relu(self.up_bn(self.up(self.grouped(x))))
        x = self.conv3d(self.conv1d(x.flatten(2)).unflatten(2, (8, 8)).unsqueeze(2))
        picture = self.matrix(x.mean((2, 3, 4)))
        y = self.tokens(self.small(ids) + self.large(ids) + picture.unsqueeze(1))
        y = self.norm(y + self.mha(y, y, y)[0])
        y = self.norm(functional.linear(self.addmm(y) @ self.right, self.borrowed))
        return {"small": self.small_head(y), "large": self.large_head(y)}


@functools.cache
def kinds() -> Kinds:
    """A `Kinds` with 2:4 weights and batch norms that scale by both signs; not to be changed."""
    torch.manual_seed(0)
    net = Kinds()
    with torch.no_grad():
        for bn in (net.bn, net.up_bn):
            bn.weight.copy_(torch.linspace(-2, 2, len(bn.weight)))
            assert isinstance(bn.running_mean, Tensor)
            assert isinstance(bn.running_var, Tensor)
            bn.running_mean.normal_()
            bn.running_var.uniform_(0.5, 2)
        for name, axis in REDUCTION_AXIS.items():
            weight = net.get_parameter(name)
            for first in (0, 3):
                weight.index_fill_(axis, torch.arange(first, weight.shape[axis], 4), 0.0)
    return net


def example(batch: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs for `Kinds`."""
    torch.manual_seed(batch)
    return torch.randn(batch, 8, 6, 6), torch.randint(0, 40, (batch, 5))


@dataclass(frozen=True)
class Exported:
    """`Kinds` as it was exported in one precision."""

    precision: Precision
    path: Path
    layers: LayerMap
    model: onnx.ModelProto


class PaddedEncoder(nn.Module):
    """Positions of zeros are padding, which torch's fast path leaves out: [batch, length, 32]."""

    def __init__(self, *, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = x.abs().sum(-1) == 0
        outputs: torch.Tensor = self.encoder(x, src_key_padding_mask=padding)
        return outputs
