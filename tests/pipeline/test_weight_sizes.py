"""COO and CSR against torch's, the memory that making them takes, and bytes of formats by hand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from twofour.inputs.fits import array_from_tensor
from twofour.pipeline.weight_sizes import bytes_by_format, to_sparse
from twofour.records.weights import WeightCheck


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
