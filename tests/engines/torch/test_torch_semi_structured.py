from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.torch_small_modules import OPTIONS, arrays_of, program
from torch import nn

from twofour.engines.torch.placed import TorchProgram, torch_dtype
from twofour.engines.torch.semi_structured import (
    SPARSE_SHAPES,
    convert,
    cosine_of,
    why_dense,
)
from twofour.engines.torch.timed import open_torch
from twofour.errors import BuildFailedError

needs_sparse_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU with sparse tensor cores",
)

TORCHS_OWN = {
    "cusparselt": torch.sparse.SparseSemiStructuredTensorCUSPARSELT,
    "cutlass": torch.sparse.SparseSemiStructuredTensorCUTLASS,
}


class OnGpu(torch.Tensor):
    """Says that it is on a GPU: torch's own check of the shape comes after that."""

    is_cuda = True


def sparse_weight(rows: int, columns: int) -> torch.Tensor:
    kept = torch.tensor([0, 1, 1, 0]).repeat(columns // 4 + 1)[:columns]
    return kept.repeat(rows, 1).to(torch.float16)


def make_sparse(*layers: nn.Linear) -> None:
    with torch.no_grad():
        for layer in layers:
            layer.weight *= sparse_weight(layer.out_features, layer.in_features)


def torch_takes(backend: str, weight: torch.Tensor) -> bool:
    try:
        TORCHS_OWN[backend]._validate_device_dim_dtype_shape(weight.as_subclass(OnGpu))
    except RuntimeError:
        return False
    return True


@given(
    backend=st.sampled_from(sorted(TORCHS_OWN)),
    kind=st.sampled_from(
        ["float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float64", "int32"]
    ),
    rows=st.sampled_from([1, 8, 15, 16, 24, 32, 48, 64]),
    columns=st.sampled_from([4, 16, 31, 32, 64, 96, 128, 192]),
)
def test_the_rules_of_shape_and_type_are_those_of_the_installed_torch(
    backend: str, kind: str, rows: int, columns: int
) -> None:
    weight = sparse_weight(rows, columns).to(torch_dtype(kind))
    assert (why_dense(weight, backend) is None) == torch_takes(backend, weight)


def test_no_rule_of_the_installed_torch_is_missing() -> None:
    own = {
        (backend, str(dtype).removeprefix("torch.")): tuple(limits)[:2]
        for backend, kind in TORCHS_OWN.items()
        for dtype, limits in kind._DTYPE_SHAPE_CONSTRAINTS.items()
    }
    assert own == SPARSE_SHAPES


def test_a_shape_that_does_not_fit_is_named_with_what_would() -> None:
    assert why_dense(sparse_weight(1000, 768), "cutlass") == (
        "1000x768 is no multiple of 32x64 (cutlass, float16)"
    )
    assert why_dense(sparse_weight(1000, 768), "cusparselt") == (
        "1000x768 is no multiple of 16x16 (cusparselt, float16)"
    )
    assert why_dense(sparse_weight(1008, 768), "cusparselt") is None


def test_a_weight_that_is_not_2_to_4_stays_dense_though_torch_would_take_it() -> None:
    weight = sparse_weight(32, 64)
    weight[3, 4] = 1
    assert torch_takes("cutlass", weight)
    assert why_dense(weight, "cutlass") == "its weight is not 2:4"


def test_the_pattern_is_looked_for_along_the_inputs_of_the_layer() -> None:
    assert why_dense(sparse_weight(64, 64).T.contiguous(), "cutlass") == "its weight is not 2:4"


def test_layers_that_cannot_be_packed_keep_their_weights_and_say_why() -> None:
    layers = nn.Linear(64, 32), nn.Linear(32, 10)
    module = nn.Sequential(*layers, nn.Conv2d(3, 4, 1)).half()
    make_sparse(*layers)
    first, second = (layer.weight for layer in layers)
    total, left = convert(module, "cutlass")
    assert total == 2
    assert left["1"] == "10x32 is no multiple of 32x64 (cutlass, float16)"
    # on a CPU torch itself refuses the one that fits
    assert "Only CUDA tensors are currently supported" in left["0"]
    assert layers[0].weight is first
    assert layers[1].weight is second


def test_the_cosine_tells_other_outputs_from_rounded_ones() -> None:
    a = torch.linspace(-1, 1, 200)
    assert cosine_of(a, a.half()) == pytest.approx(1.0, abs=1e-6)
    assert cosine_of(a, -a) == pytest.approx(-1.0)
    assert cosine_of(torch.zeros(3), torch.zeros(3)) == 1.0
    assert cosine_of(torch.zeros(3), torch.ones(3)) == 0.0
    assert cosine_of(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0])) == pytest.approx(0.96)
    assert not cosine_of(a, torch.full_like(a, torch.nan)) >= 0.99
    # what overflowed in dense kernels too is no fault of the sparse ones
    assert cosine_of(torch.tensor([1.0, torch.inf]), torch.tensor([2.0, 5.0])) == 1.0


def sparse_net() -> TorchProgram:
    torch.manual_seed(0)
    layers = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 10)
    make_sparse(*layers)
    module = nn.Sequential(layers[0], nn.ReLU(), *layers[1:])
    return program(module, (torch.randn(16, 128),), inputs=("x",))


@needs_sparse_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("backend", sorted(TORCHS_OWN))
def test_sparse_kernels_compute_what_dense_ones_do(backend: str) -> None:
    inputs = arrays_of(sparse_net())
    dense = open_torch(sparse_net(), "fp16", OPTIONS)
    wanted = torch.from_numpy(dense.outputs(inputs)["y"])
    dense.close()
    model = open_torch(sparse_net(), f"semi-structured-{backend}", OPTIONS)
    assert model.settings.sparse_kernels is True
    assert "sparse_layers=2 of 3 Linear" in model.settings.options
    assert cosine_of(wanted, torch.from_numpy(model.outputs(inputs)["y"])) > 0.9999
    model.close()


@needs_sparse_gpu
@pytest.mark.gpu
def test_dense_weights_have_no_layer_for_sparse_kernels() -> None:
    made = program(nn.Linear(128, 256), (torch.randn(16, 128),), inputs=("x",))
    with pytest.raises(BuildFailedError, match="its weight is not 2:4"):
        open_torch(made, "semi-structured-cutlass", OPTIONS)
