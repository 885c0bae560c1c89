"""Multiply-adds of exported modules with free sizes, against counts by hooks of torch."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from support.exporting import export_onnx
from torch import Tensor, nn

from twofour.inputs.fits import save_arrays
from twofour.pipeline.evidence_files import EvidenceFiles
from twofour.pipeline.reporting import report_files
from twofour.records.eligibility import ShareUnit
from twofour.records.options import DynamicAxis, ExportOptions


class Windows(nn.Module):
    """A product over windows of a free image, as in Swin, and one of rows, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.mix, self.out = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 1)
        batch, height, width, _ = x.shape
        x = nn.functional.pad(x, (0, 0, 0, -width % 2, 0, -height % 2))
        rows, columns = x.shape[1] // 2, x.shape[2] // 2
        x = x.view(batch, rows, 2, columns, 2, 8).transpose(2, 3).reshape(-1, 4, 8)
        y: Tensor = self.out(self.mix(x).view(-1, 16))
        return y


class Decoder(nn.Module):
    """Upsampling by transposed convolutions, one of them grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.more = nn.ConvTranspose2d(4, 6, 3, 2, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.more(self.up(x))
        return y


class Recurrent(nn.Module):
    """A bidirectional LSTM before a product."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 32, bidirectional=True, batch_first=True)
        self.out = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.lstm(x)[0])
        return y


def count(module: nn.Module, x: Tensor) -> int:
    found: list[int] = []

    def hook(part: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        given = inputs[0]
        matrices = [p for name, p in part.named_parameters() if "weight" in name]
        if isinstance(part, nn.ConvTranspose2d):
            found.append(given.numel() * prod(matrices[0].shape[1:]))
        elif isinstance(part, nn.Conv2d):
            assert isinstance(output, Tensor)
            found.append(output.numel() * prod(matrices[0].shape[1:]))
        else:
            found.append(prod(given.shape[:-1]) * sum(matrix.numel() for matrix in matrices))

    for part in module.children():
        part.register_forward_hook(hook)
    module(x)
    return sum(found)


@pytest.mark.parametrize(
    ("module", "shape", "free"),
    [
        pytest.param(Windows(), (1, 3, 20, 28), {2: "height", 3: "width"}, marks=pytest.mark.full),
        (Decoder(), (1, 8, 5, 5), {}),
        (Recurrent(), (1, 9, 12), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_report_counts_what_the_module_multiplies_for_one_sample(
    tmp_path: Path, module: nn.Module, shape: tuple[int, ...], free: dict[int, str]
) -> None:
    x, path = torch.randn(shape), tmp_path / "m.onnx"
    axes = tuple(DynamicAxis(input="x", axis=axis, name=name) for axis, name in free.items())
    export_onnx(
        module, (), {"x": x.repeat(2, *[1] * (x.dim() - 1))}, path, ExportOptions(dynamic=axes)
    )
    save_arrays(tmp_path / "inputs.npz", {"x": x.numpy()})
    report = report_files(EvidenceFiles(onnx=path, inputs=tmp_path / "inputs.npz")).report
    assert report.totals is not None
    totals = {share.unit: share.total for share in report.totals.shares}
    assert totals[ShareUnit.MULTIPLY_ADDS] == count(module, x)
