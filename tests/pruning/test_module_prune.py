"""Pruning torch modules in place, judged by pattern.check."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from twofour.errors import BadInputError, PatternBrokenError
from twofour.pattern import check
from twofour.pruning.torch import prune_module
from twofour.records.weights import Pattern, PrunedWeight, ReasonCode, Selection

TWO_FOUR = Pattern(2, 4)


def numbers(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().double().numpy()
    return array


def by_layer(model: nn.Module, selection: Selection | None = None) -> dict[str, PrunedWeight]:
    result = prune_module(model, TWO_FOUR, selection)
    return {str(row.weight.weight): row for row in result.weights}


class Mixed(nn.Module):
    """One of each kind of layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)
        self.grouped = nn.Conv2d(16, 16, 3, groups=2)
        self.depthwise = nn.Conv1d(8, 8, 3, groups=8)
        self.up = nn.ConvTranspose2d(32, 8, 2)
        self.deep = nn.Conv3d(8, 8, 3)
        self.odd = nn.Linear(10, 128)
        self.attention = nn.MultiheadAttention(32, 2)
        self.cross = nn.MultiheadAttention(32, 2, kdim=64, vdim=32)


PRUNED = {
    "conv.weight",
    "up.weight",
    "deep.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "cross.q_proj_weight",
    "cross.k_proj_weight",
    "cross.v_proj_weight",
    "cross.out_proj.weight",
}


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_every_layer_is_pruned_along_its_axis_and_nothing_else_is_touched(kind: Any) -> None:
    model = Mixed().to(kind)
    before = copy.deepcopy(model.state_dict())
    rows = by_layer(model)
    assert {name for name, row in rows.items() if row.pruned} == PRUNED
    for name, tensor in model.state_dict().items():
        if name not in PRUNED:
            assert torch.equal(tensor, before[name])
            continue
        row, array, old = rows[name], numbers(tensor), numbers(before[name])
        assert row.weight.axis is not None
        assert check(array, row.weight.axis, TWO_FOUR).holds
        assert row.zeros == array.size // 2
        assert ((array == old) | (array == 0)).all()
        assert row.kept_magnitude == pytest.approx(abs(array).sum() / abs(old).sum(), rel=1e-5)
    assert [r.code.value for r in rows["grouped.weight"].reasons] == ["GROUPED_CONV"]
    assert [r.code.value for r in rows["depthwise.weight"].reasons] == ["DEPTHWISE_CONV"]
    assert [r.code.value for r in rows["odd.weight"].reasons] == ["AXIS_NOT_MULTIPLE"]
    assert rows["odd.weight"].kept_magnitude is None


class Detector(nn.Module):
    """A trained layer, and the fixed weights of a decoder."""

    def __init__(self, fixed: nn.Module, trained: int = 320) -> None:
        super().__init__()
        self.body = nn.Linear(trained, trained)
        self.fixed = fixed.requires_grad_(False)


@pytest.mark.parametrize(
    ("fixed", "code"),
    [
        (nn.Conv2d(16, 1, 1, bias=False), ReasonCode.TOO_SMALL),
        (nn.Linear(32, 32, bias=False), ReasonCode.FROZEN),
    ],
)
def test_fixed_weights_of_a_trained_model_stay_dense_unless_they_are_asked_for(
    fixed: nn.Module, code: ReasonCode
) -> None:
    model = Detector(fixed)
    before = fixed.get_parameter("weight").detach().clone()
    row = by_layer(model)["fixed.weight"]
    assert (row.pruned, code in {reason.code for reason in row.reasons}) == (False, True)
    assert torch.equal(fixed.get_parameter("weight"), before)
    for asked in (Selection(include=("fixed",)), Selection(all_layers=True)):
        assert by_layer(Detector(copy.deepcopy(fixed)), asked)["fixed.weight"].pruned


@pytest.mark.parametrize("trained", [32, 300])
def test_a_frozen_backbone_under_an_adapter_and_a_model_frozen_as_a_whole_are_pruned(
    trained: int,
) -> None:
    adapted = Detector(nn.Linear(32, 32, bias=False), trained)  # 1,024 of 91,324 values: 1.1 %
    assert by_layer(adapted)["fixed.weight"].pruned
    assert by_layer(Detector(nn.Linear(32, 32)).requires_grad_(False))["fixed.weight"].pruned


def test_zeros_of_a_dense_weight_are_counted_minus_zero_too() -> None:
    layer = nn.Linear(8, 1, dtype=torch.bfloat16)
    layer.weight.data = torch.tensor([[-0.0, 0, 1, 2, 3, 4, 5, 6]], dtype=torch.bfloat16)
    rows = by_layer(layer, Selection(exclude=("*",)))
    assert (rows["weight"].zeros, rows["weight"].pruned) == (2, False)


def test_pruning_writes_into_the_parameters_and_their_memory_of_any_layout() -> None:
    conv, linear = nn.Conv2d(16, 8, 3), nn.Linear(16, 64)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    linear.weight = nn.Parameter(torch.randn(16, 64).t())
    model = nn.Sequential(conv, linear)
    before = [*model.parameters()]
    places = [(p.data_ptr(), p.stride()) for p in before]
    prune_module(model, TWO_FOUR)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert all(p.requires_grad and p.grad_fn is None for p in before)
    assert [(p.data_ptr(), p.stride()) for p in model.parameters()] == places
    for weight in (conv.weight, linear.weight):
        assert check(numbers(weight), 1, TWO_FOUR).holds
        assert int(weight.count_nonzero()) == weight.numel() // 2


class Tied(nn.Module):
    """An embedding, a head, and a third layer on one array."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 16)
        self.head, self.third = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head.weight = self.third.weight = self.table.weight


def test_a_head_tied_to_an_embedding_is_left_dense_unless_it_is_asked_for() -> None:
    model = Tied()
    before = model.table.weight.detach().clone()
    rows = by_layer(model)
    assert torch.equal(model.table.weight, before)
    for name in ("head", "third"):
        row = rows[f"{name}.weight"]
        said = [r.message for r in row.reasons if "embedding table" in r.message]
        assert row.pruned is False
        assert f"(--include {name})" in said[0]
    for asked in (Selection(include=("head",)), Selection(all_layers=True)):
        by_layer(model := Tied(), asked)
        assert check(numbers(model.table.weight), 1, TWO_FOUR).holds


def test_a_transposed_view_of_an_array_is_an_axis_conflict() -> None:
    one, other = nn.Linear(16, 64), nn.Linear(64, 16)
    other.weight = nn.Parameter(one.weight.detach().t())
    model = nn.Sequential(one, other)
    with pytest.raises(BadInputError, match=r"0 .axis 1. and 1 .axis 1."):
        prune_module(model, TWO_FOUR)
    assert int(one.weight.count_nonzero()) == 16 * 64


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_before_anything_changes(kind: Any, value: float) -> None:
    linear, conv = nn.Linear(8, 8), nn.Conv2d(8, 8, 3)
    model = nn.Sequential(linear, conv).to(kind)
    conv.weight.data[3, 2, :, 1] = value
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadInputError, match="layer '1': 3 of"):
        prune_module(model, TWO_FOUR)
    assert all(
        torch.equal(before[k].nan_to_num(), v.nan_to_num()) for k, v in model.state_dict().items()
    )
    assert int(linear.weight.count_nonzero()) == 64


def test_a_meta_tensor_is_refused() -> None:
    with pytest.raises(BadInputError, match="meta tensor"):
        prune_module(nn.Sequential(nn.Linear(8, 8, device="meta")), TWO_FOUR)


@pytest.mark.gpu
def test_a_weight_on_the_gpu_is_pruned_in_its_place() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = nn.Linear(4096, 1536, dtype=torch.bfloat16, device="cuda")
    twin = copy.deepcopy(model).cpu()
    place = model.weight.data_ptr()
    (row,), (same,) = prune_module(model, TWO_FOUR).weights, prune_module(twin, TWO_FOUR).weights
    assert model.weight.data_ptr() == place
    assert check(numbers(model.weight.cpu()), 1, TWO_FOUR).holds
    assert torch.equal(model.weight.cpu().view(torch.int16), twin.weight.view(torch.int16))
    assert row.zeros == same.zeros
    assert row.kept_magnitude == pytest.approx(same.kept_magnitude, rel=1e-6)


def test_a_layer_without_a_mask_to_keep_is_named() -> None:
    with pytest.raises(PatternBrokenError, match="layer '1': there is"):
        prune_module(nn.Sequential(nn.ReLU(), nn.Linear(32, 32)), TWO_FOUR, method="keep")
