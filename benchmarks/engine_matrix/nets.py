"""Image networks as torch modules with random weights; each function gives a model source."""

from __future__ import annotations

import itertools

import torch
import transformers
from torch import Tensor, nn

Source = tuple[nn.Module, dict[str, Tensor]]


def resnext50_32x4d() -> Source:
    """ResNeXt-50 32x4d (Xie et al. 2017, table 1): the 3x3 convolutions have 32 groups."""
    stages = [_stage(*args) for args in ((64, 128, 256, 3, 1), (256, 256, 512, 4, 2))]
    stages += [_stage(*args) for args in ((512, 512, 1024, 6, 2), (1024, 1024, 2048, 3, 2))]
    stem = [_conv(3, 64, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*stem, *stages, *head), {"input": torch.randn(1, 3, 224, 224)}


def mobilenet_v2() -> Source:
    """MobileNetV2 (Sandler et al. 2018): depthwise 3x3 between 1x1 convolutions."""
    config = transformers.MobileNetV2Config(num_labels=1000)
    image = {"pixel_values": torch.randn(1, 3, 224, 224)}
    return transformers.MobileNetV2ForImageClassification(config), image


def unet() -> Source:
    """A U-Net (Ronneberger et al. 2015) whose way up is by ConvTranspose2d, 64 to 512 channels."""
    return UNet((64, 128, 256, 512)), {"x": torch.randn(1, 3, 256, 256)}


class Residual(nn.Module):
    """The body plus a shortcut, a projection where shapes differ."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Both at the same shape."""
        return torch.relu(self.body(x) + self.shortcut(x))


class UNet(nn.Module):
    """Two convolutions a level, max pooling down, transposed convolutions and skips up."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(channels))
        self.first = _double(3, channels[0])
        self.down = nn.ModuleList(_double(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(_double(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(channels[0], 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of 21 classes for each pixel."""
        skips = [self.first(x)]
        for level in self.down:
            skips.append(level(nn.functional.max_pool2d(skips[-1], 2)))
        y = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            y = merge(torch.cat([skips.pop(), up(y)], dim=1))
        out: Tensor = self.head(y)
        return out


def _stage(channels: int, width: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    """Bottleneck blocks with 32 groups; only the first changes size."""
    first = Residual(
        _bottleneck(channels, width, outputs, stride), _conv(channels, outputs, 1, stride=stride)
    )
    rest = [
        Residual(_bottleneck(outputs, width, outputs, 1), nn.Identity()) for _ in range(blocks - 1)
    ]
    return nn.Sequential(first, *rest)


def _bottleneck(channels: int, width: int, outputs: int, stride: int) -> nn.Sequential:
    middle = _conv(width, width, 3, stride=stride, groups=32)
    return nn.Sequential(
        _conv(channels, width, 1), nn.ReLU(), middle, nn.ReLU(), _conv(width, outputs, 1)
    )


def _double(channels: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        _conv(channels, outputs, 3), nn.ReLU(), _conv(outputs, outputs, 3), nn.ReLU()
    )


def _conv(
    channels: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    conv = nn.Conv2d(
        channels, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False
    )
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))
