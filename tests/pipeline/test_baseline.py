"""Models that come in 2:4, and the dense reference of one that was fine-tuned with its mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.onnx_models import gemm, save, two_weights, weights

from twofour.errors import BadInputError
from twofour.jobs import run_all
from twofour.records.options import Precision, RunOptions
from twofour.records.run import RunManifest
from twofour.store import read_record

MODULE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width=32):
        super().__init__(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, width))

def make(width=32):
    torch.manual_seed(3)
    return Net(width), (torch.ones(2, 32),)

def tuned():
    module, inputs = make()
    with torch.no_grad():
        for layer in (module[0], module[2]):
            layer.weight.view(-1, 4)[:, ::2] = 0
            layer.weight.mul_(1.1)
    return module, inputs

def partly():
    module, inputs = make()
    with torch.no_grad():
        module[0].weight.view(-1, 4)[:, ::2] = 0
    return module, inputs

def other():
    return make(16)
"""
FLOAT32 = RunOptions(precision=Precision.FLOAT32)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(MODULE)
    return path


@pytest.mark.parametrize(("name", "count"), [("tuned", 2), ("partly", 1)])
def test_a_model_that_came_in_two_of_four_has_no_dense_baseline(
    module: Path, name: str, count: int, tmp_path: Path
) -> None:
    result = run_all(f"{module}:{name}", tmp_path / "r", FLOAT32)
    assert [row.held_before for row in result.prune.weights] == [True, count == 2]
    why = result.accuracy.no_baseline or ""
    assert why.startswith(f"{count} of 2 weights came in 2:4 already")
    assert why in result.build.notes
    page = (tmp_path / "r" / "report.md").read_text()
    assert why in page
    assert "cosine to the dense" not in page


def test_the_dense_reference_is_what_is_compared_with(module: Path, tmp_path: Path) -> None:
    options = RunOptions(precision=Precision.FLOAT32, dense_reference=f"{module}:make")
    result = run_all(f"{module}:tuned", tmp_path / "r", options)
    assert result.accuracy.no_baseline is None
    (drift,) = result.accuracy.drift
    assert 0.3 < drift.cosine < 0.9999
    manifest = read_record(RunManifest, tmp_path / "r" / "run.json")
    assert manifest.dense_reference == f"{module}:make"
    alone = run_all(f"{module}:tuned", tmp_path / "alone", FLOAT32)
    assert result.export.files[1].size_bytes == alone.export.files[1].size_bytes


def test_the_dense_reference_of_an_onnx_file_is_one_too(tmp_path: Path) -> None:
    dense = weights(64, 64)
    tuned = dense * np.float32(1.1)
    tuned.reshape(-1, 4)[:, ::2] = 0
    reference, source = (
        str(save(gemm(weight, trans_b=1), tmp_path / f"{name}.onnx"))
        for name, weight in (("dense", dense), ("tuned", tuned))
    )
    result = run_all(source, tmp_path / "r", RunOptions(dense_reference=reference))
    (drift,) = result.accuracy.drift
    assert drift.cosine < 0.99
    assert result.prune.weights[0].held_before


def test_a_reference_of_another_shape_or_kind_is_refused(module: Path, tmp_path: Path) -> None:
    save(two_weights(), tmp_path / "m.onnx")
    references = {f"{module}:other": "other does not fit", f"{tmp_path}/m.onnx": "not of one kind"}
    for reference, message in references.items():
        options = RunOptions(precision=Precision.FLOAT32, dense_reference=reference)
        with pytest.raises(BadInputError, match=message):
            run_all(f"{module}:tuned", tmp_path / "r", options)
