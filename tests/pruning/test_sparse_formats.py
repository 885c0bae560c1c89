"""COO and CSR against torch's, the memory that making them takes, and bytes of formats by hand."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from twofour.pruning.formats import array_size, to_sparse, total_size
from twofour.sources.calibration.loaders import array_from_tensor


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


def test_bytes_of_every_format_are_those_by_hand() -> None:
    # 300 rows of 10 half-precision weights, 900 of them non-zero; 2:4 along the rows needs 3 groups
    # each, the last one padded: 300 * 3 * 2 values, half a byte of metadata for a group
    one = array_size(("a", "float16"), (300, 10), 900, 2, 1)
    assert (one.values, one.dense_bytes, one.bitmask_bytes) == (3000, 6000, 1800 + 375)
    assert (one.compressed_bytes, one.metadata_bytes) == (3600 + 450, 450)
    assert (one.coo_bytes, one.coo_memory_bytes) == (1800 + 900 * (2 + 1), 1800 + 900 * 16)
    assert one.csr_bytes == 1800 + 900 * 1 + 301 * 2
    assert one.csr_memory_bytes == 1800 + 900 * 8 + 301 * 8
    other = array_size(("b", "float16"), (300, 10), 900, 2, None)
    total = total_size(("all", ""), [one, other])
    assert (total.layer, total.values, total.coo_bytes) == ("all", 6000, 2 * one.coo_bytes)
    assert (total.compressed_bytes, total.metadata_bytes) == (4050 + 6000, 450)
