"""Sizes of weights in every format: against torch's, by hand, and as `twofour sizes` says them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support import onnx_models as om
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.inputs.fits import array_from_tensor
from twofour.pipeline import weight_sizes
from twofour.pipeline.weight_sizes import bytes_by_format, to_sparse
from twofour.records.run import ModelSizes
from twofour.records.weights import WeightCheck
from twofour.store import from_json


def weight(*shape: int, zeros: float = 0.5) -> torch.Tensor:
    made = torch.Generator().manual_seed(0)
    found = torch.randn(shape, generator=made)
    return found.masked_fill(torch.rand(shape, generator=made) < zeros, 0)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int8"])
@pytest.mark.parametrize(
    "tensor",
    [
        weight(100, 700),
        weight(3, 40_000),  # a row is longer than a tile
        weight(70_000, 1),
        weight(5, 7, zeros=1.0),
        weight(0, 4),
        weight(4, 0),
        weight(64, 200).t(),
        torch.tensor([[-0.0, 0.0, 1.0], [float("nan"), 0.0, float("inf")]]),
    ],
    ids=lambda tensor: "x".join(map(str, tensor.shape)),
)
def test_coo_and_csr_are_those_of_torch(tensor: torch.Tensor, dtype: str) -> None:
    tensor = tensor.nan_to_num(3, 4).to(torch.int8) if dtype == "int8" else tensor
    tensor = tensor.to(getattr(torch, dtype))
    array = array_from_tensor(tensor)
    theirs, rows = tensor.to_sparse_csr(), tensor.to_sparse().coalesce().indices()[0]
    for coo, first in ((True, rows), (False, theirs.crow_indices())):
        found, columns, values = to_sparse(array, coo=coo)
        assert np.array_equal(found, first)
        assert np.array_equal(columns, theirs.col_indices())
        assert values.dtype == array.dtype
        assert values.tobytes() == array_from_tensor(theirs.values()).tobytes()


@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("coo", [True, False])
def test_beside_the_result_it_takes_less_than_one_bit_per_weight(
    *, coo: bool, zeros: float
) -> None:
    array = weight(2048, 4096, zeros=zeros).numpy()
    tracemalloc.start()
    _, columns, values = to_sparse(array, coo=coo)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held >= columns.nbytes + values.nbytes
    assert peak - held < array.size / 8


# 300 rows of 10 half-precision weights, 900 of them non-zero
HALF_EMPTY = WeightCheck(
    layer="a", node=None, op="Gemm", weight="a", shape=(300, 10), axis=1, groups_checked=0,
    violations=0, first_violation=None, holds_along=None, required=True, dtype="float16",
    zeros=2100,
)  # fmt: skip


def test_bytes_of_every_format_are_those_by_hand() -> None:
    # 2:4 along the rows needs 3 groups each, the last one padded: 300 * 3 * 2 values, half a byte
    # of metadata for a group
    assert bytes_by_format(HALF_EMPTY) == {
        "dense": 6000,
        "2:4": 3600 + 450,
        "bitmask": 1800 + 375,
        "COO": 1800 + 900 * (2 + 1),
        "CSR": 1800 + 900 * 1 + 301 * 2,
    }


# --- the command ----------------------------------------------------------------------------------


def sizes(*arguments: str | Path) -> Result:
    return CliRunner().invoke(application(), ["sizes", *map(str, arguments)])


def record(*arguments: str | Path) -> ModelSizes:
    result = sizes(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return from_json(ModelSizes, result.stdout)


def bytes_of(*arguments: str | Path) -> dict[str, int]:
    return {one.format: one.size_bytes for one in record(*arguments).sizes}


def test_a_run_is_measured_in_the_file_that_it_left(tmp_path: Path) -> None:
    made, checkpoint = tmp_path / "onnx", tmp_path / "net.safetensors"
    onnx = om.save(om.matmul(om.weights(16, 8)), tmp_path / "net.onnx")
    save_file({"fc.weight": om.weights(8, 16)}, checkpoint)
    arguments = ["prune", str(onnx), "--all-layers", "--out", str(made), "--quiet"]
    pruned = CliRunner().invoke(application(), arguments)
    assert pruned.exit_code == 0, pruned.stderr
    assert [record(path).holding for path in (onnx, checkpoint, made)] == [0, 0, 1]
    dense, found = bytes_of(onnx), bytes_of(made)
    assert bytes_of(checkpoint)["dense"] == dense["dense"] == found["dense"] == 512
    assert dense["2:4"] == found["2:4"] == 64 * 4 + 16
    assert (dense["bitmask"], found["bitmask"]) == (512 + 16, 256 + 16)
    assert found["COO"] == 64 * (4 + 2)


def test_the_shape_of_the_largest_weight_is_converted(tmp_path: Path) -> None:
    arrays = {f"{n}.weight": om.weights(rows, 64) for n, rows in (("a", 8), ("b", 64))}
    save_file(arrays, tmp_path / "two.safetensors")
    found = record(tmp_path / "two.safetensors")
    assert found.converted == "b"
    assert [x.format for x in found.conversions] == ["COO", "CSR"]
    for row, indices in zip(found.conversions, (2, 1), strict=True):
        assert row.peak_bytes >= 64 * 64 * (4 + 8 * indices)
        assert len(row.samples_ms) == 5
    shown = sizes(tmp_path / "two.safetensors").stdout
    assert "2:4 holds in 0" in shown
    assert "0.009338" in shown, "MiB as 2:4"
    assert "Converting ones and zeros" in shown


def test_of_a_weight_that_is_too_large_to_convert_the_first_rows_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_sizes, "_MOST", 8 * 64)
    save_file({"lm_head.weight": om.weights(64, 64)}, tmp_path / "head.safetensors")
    found = record(tmp_path / "head.safetensors")
    assert found.converted == "lm_head (its first 8 rows)"
    assert found.conversions[0].peak_bytes < 64 * 64 * (4 + 8 * 2)


def test_a_partly_pruned_file_has_sizes_in_every_format(tmp_path: Path) -> None:
    arrays = {f"{name}.weight": om.weights(32, 32) for name in ("pruned", "dense")}
    arrays["pruned.weight"][:, ::2] = 0
    save_file(arrays, tmp_path / "partly.safetensors")
    assert record(tmp_path / "partly.safetensors").holding == 1
    for more in ((), ("--format", "markdown")):
        shown = sizes(tmp_path / "partly.safetensors", *more)
        assert (shown.exit_code, "2 weights, 2:4 holds in 1" in shown.stdout) == (0, True)


def test_a_model_that_is_no_file_is_refused(tmp_path: Path) -> None:
    result = sizes(tmp_path / "net.py:make")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr
