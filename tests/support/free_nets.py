"""Modules whose sizes can stay free, and modules that fix one of them."""

import torch
from torch import Tensor, nn


class Image(nn.Module):
    """Any even height and width: the skip connection wants the halves to fit again."""

    example_input_array = torch.randn(1, 16, 16, 16)  # a size of 1 is doubled for the trace

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Conv2d(32, 16, 1)

    def forward(self, image: Tensor) -> Tensor:
        """[batch, 16, height, width] -> the same."""
        up = self.up(torch.relu(self.down(image)))
        mask: Tensor = self.out(torch.cat([image, up], 1))
        return mask


class Flat(nn.Module):
    """One size alone: the pixels are the features of a Linear layer."""

    example_input_array = torch.randn(2, 16, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16 * 8 * 8, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16, 8, 8] -> [batch, 16]."""
        return self.linear(x.flatten(1))  # type: ignore[no-any-return]  # nn.Module.__call__


class Compares(nn.Module):
    """Runs at any length, and is traced for one of its branches."""

    example_input_array = torch.randn(2, 6, 16)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, 16] -> the same."""
        y: Tensor = self.linear(x)
        if x.shape[1] == 6:
            return y
        return y * 2


class Window(nn.Module):
    """Keeps the smallest size that it saw, as Swin keeps a smaller window."""

    example_input_array = torch.randn(2, 16, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 1)
        self.window = 16

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16, height, 16] -> [batch, 16, height - window + 1, 16]."""
        self.window = min(self.window, x.shape[2])
        y: Tensor = self.conv(x)
        return y[:, :, : y.shape[2] - self.window + 1]


class Square(nn.Module):
    """Height and width must be one size."""

    example_input_array = torch.randn(2, 16, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16, n, n] -> the same."""
        y: Tensor = self.conv(x)
        return y @ y.transpose(-1, -2) + y


class DependsOnData(nn.Module):
    """Cannot be traced."""

    example_input_array = torch.randn(2, 16)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 16] -> the same."""
        y: Tensor = self.linear(x)
        if y.sum() > 0:
            return y
        return -y


class Ids(nn.Module):
    """Token ids with positions up to 32, and a mask of the same length."""

    example_input_array = {"ids": torch.randint(0, 40, (2, 6)), "mask": torch.ones(2, 6)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.places = nn.Embedding(32, 32)
        self.linear = nn.Linear(32, 32)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """[batch, length] twice -> hidden [batch, length, 32] and their mean [batch, 32]."""
        places = self.places(torch.arange(ids.shape[1]))
        hidden = self.linear(self.words(ids) + places) * mask.unsqueeze(-1)
        return {"hidden": hidden, "pooled": hidden.mean(1)}
