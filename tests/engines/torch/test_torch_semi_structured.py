from __future__ import annotations

import pytest
import torch
from support.torch_small_modules import arrays_of, open_torch, program
from torch import nn

from twofour.engines.torch.engine import TorchProgram, cosine_of, pack
from twofour.errors import BuildFailedError

needs_sparse_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a GPU with sparse tensor cores",
)


def sparse_weight(rows: int, columns: int) -> torch.Tensor:
    kept = torch.tensor([0, 1, 1, 0]).repeat(columns // 4 + 1)[:columns]
    return kept.repeat(rows, 1).to(torch.float16)


def make_sparse(*layers: nn.Linear) -> None:
    with torch.no_grad():
        for layer in layers:
            layer.weight *= sparse_weight(layer.out_features, layer.in_features)


def test_layers_that_cannot_be_packed_keep_their_weights_and_say_why() -> None:
    layers = [nn.Linear(64, 32).half() for _ in range(3)]
    make_sparse(*layers[:2])
    # 2:4 along the outputs is not 2:4 for the kernel, though torch would take it
    layers[2].weight.data = sparse_weight(64, 32).T.contiguous()
    before = [layer.weight for layer in layers]
    why = [pack(layer, "cutlass") for layer in layers]
    # on a CPU torch itself refuses those that fit
    assert all("Only CUDA tensors are currently supported" in str(text) for text in why[:2])
    assert why[2] == "the weight is not 2:4"
    assert [layer.weight for layer in layers] == before


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
@pytest.mark.parametrize("backend", ["cusparselt", "cutlass"])
def test_sparse_kernels_compute_what_dense_ones_do(backend: str) -> None:
    inputs = arrays_of(sparse_net())
    dense = open_torch(sparse_net(), "fp16")
    wanted = torch.from_numpy(dense.outputs(inputs)["y"])
    dense.close()
    model = open_torch(sparse_net(), f"semi-structured-{backend}")
    assert model.settings.sparse_kernels is True
    assert "sparse_layers=2 of 3 Linear" in model.settings.options
    assert cosine_of(wanted, torch.from_numpy(model.outputs(inputs)["y"])) > 0.9999
    model.close()


@needs_sparse_gpu
@pytest.mark.gpu
def test_dense_weights_have_no_layer_for_sparse_kernels() -> None:
    made = program(nn.Linear(128, 256), (torch.randn(16, 128),), inputs=("x",))
    with pytest.raises(BuildFailedError, match="its weight is not 2:4"):
        open_torch(made, "semi-structured-cutlass")
