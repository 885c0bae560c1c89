"""`twofour sizes`: every kind of model, the figures of the record, and activations."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file
from support import onnx_models as om
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.records.run import ModelSizes
from twofour.store import from_json

CODE = """
import torch
from torch import nn
from torch.nn.functional import relu

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.r, self.second = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)

    def forward(self, x):
        return relu(self.second(self.r(self.first(x))) - 1e9)

def make():
    return Net(), torch.randn(2, 8)

def data():
    for _ in range(3):
        yield torch.randn(5, 8)
"""


def sizes(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), ["sizes", *map(str, arguments)])


def record(*arguments: str | Path) -> ModelSizes:
    result = sizes(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return from_json(ModelSizes, result.stdout)


@pytest.fixture
def code(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(CODE)
    return f"{tmp_path / 'net.py'}"


def test_a_run_is_measured_in_the_file_that_it_left(code: str, tmp_path: Path) -> None:
    torch_run, onnx_run, onnx = tmp_path / "torch", tmp_path / "onnx", tmp_path / "net.onnx"
    om.save(om.matmul(om.weights(16, 8)), onnx)
    for model, run in ((f"{code}:make", torch_run), (onnx, onnx_run)):
        arguments = ["prune", str(model), "--all-layers", "--out", str(run), "--quiet"]
        made = CliRunner().invoke(application(), arguments)
        assert made.exit_code == 0, made.stderr
    dense, found, graph = record(f"{code}:make"), record(torch_run), record(onnx_run)
    for one in (dense, found):
        assert [(x.layer, x.values) for x in one.weights] == [("first", 128), ("second", 64)]
    assert [x.holds for x in (*dense.weights, *found.weights)] == [False, False, True, True]
    assert [x.nonzeros for x in (*found.weights, *graph.weights)] == [64, 32, 64]
    total = found.total
    assert (total.dense_bytes, total.compressed_bytes, total.metadata_bytes) == (768, 408, 24)
    assert (total.bitmask_bytes, total.coo_memory_bytes) == (384 + 24, 96 * 20)
    assert graph.total.compressed_bytes == 64 * 4 + 16


def test_the_shape_of_the_largest_weight_is_converted_by_both(tmp_path: Path) -> None:
    arrays = {f"{n}.weight": om.weights(rows, 64) for n, rows in (("a", 8), ("b", 64))}
    save_file(arrays, tmp_path / "two.safetensors")
    found = record(tmp_path / "two.safetensors")
    assert found.converted == "b"
    names = ["twofour COO", "torch COO", "twofour CSR", "torch CSR"]
    assert [x.name for x in found.conversions] == names
    for row, indices in zip(found.conversions, (2, 2, 1, 1), strict=True):
        assert row.peak_bytes >= 64 * 64 * (4 + 8 * indices)
        assert len(row.samples_ms) == 5
    shown = sizes(tmp_path / "two.safetensors").stdout
    assert "2 weights, 2:4 holds in 0: 0.01758 MiB dense, 0.009338 MiB as 2:4 (0.0005" in shown
    assert "Converting ones and zeros in the shape and type of b on " in shown


def test_zeros_after_relu_are_counted_for_modules_and_functions(code: str) -> None:
    found = record(f"{code}:make", "--calibrate", f"{code}:data").activations
    assert [(x.layer, x.kind, x.values) for x in found] == [("r", "relu", 240), ("", "relu", 60)]
    assert 0 < found[0].nonzeros < 240
    assert found[1].nonzeros == 0
    assert (found[1].dense_bytes, found[1].bitmask_bytes) == (240, 3 * 3)
    assert found[1].csr_bytes == 3 * 6


def test_calibration_needs_a_module(tmp_path: Path) -> None:
    model = om.save(om.matmul(om.weights(8, 4)), tmp_path / "m.onnx")
    result = sizes(model, "--calibrate", "data.npz")
    assert result.exit_code == 2
    assert "is no torch module that can run" in result.stderr
