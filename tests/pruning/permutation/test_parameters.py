"""Nets of torch: exported, permuted in the file, and the same put back into the module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.permuted_models import TWO_FOUR, permuted_at_random, sizes
from torch import Tensor, nn
from torch.nn import functional

from twofour.errors import BadInputError
from twofour.export.torch_export import export_onnx, reference_outputs
from twofour.graph.opened import open_onnx
from twofour.pruning.permutation.apply import same_outputs
from twofour.pruning.permutation.classes import Classes, find_classes
from twofour.pruning.permutation.parameters import permuted_parameters
from twofour.records.export import LayerMap
from twofour.records.options import ExportOptions, Precision

Array = NDArray[Any]


class Block(nn.Module):
    """Pointwise, grouped, pointwise, added to what came in; then depthwise."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.into = nn.Conv2d(width, inner, 1, bias=False)
        self.norm = nn.BatchNorm2d(inner)
        self.grouped = nn.Conv2d(inner, inner, 3, padding=1, groups=2)
        self.norm2 = nn.BatchNorm2d(inner)
        self.out = nn.Conv2d(inner, width, 1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.into(x)))
        y = functional.silu(self.norm2(self.grouped(y)))
        added: Tensor = self.depthwise(x + self.out(y))
        return added


class Images(nn.Module):
    """A residual net with concat, transposed convolution and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.blocks = nn.Sequential(Block(16, 32), Block(16, 32))
        self.group_norm = nn.GroupNorm(4, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.slope = nn.PReLU(24)
        self.mixed = nn.Conv2d(24, 32, 3)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.group_norm(self.blocks(self.stem(x)))
        z = self.slope(torch.cat([self.up(functional.max_pool2d(y, 2)), y], 1))
        made: Tensor = self.head(functional.relu(self.mixed(z)).mean((2, 3)))
        return made


class Tokens(nn.Module):
    """Attention by hand and packed, feed-forward, a head tied to the embedding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.positions = nn.Parameter(torch.randn(1, 7, width))
        self.norm = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 64)
        self.down = nn.Linear(64, width)
        self.packed = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.positions
        y = self.norm(x)
        query, key, value = (f(y).view(*y.shape[:2], 4, -1).transpose(1, 2) for f in self.qkv)
        mixed = torch.softmax(query @ key.transpose(-1, -2) / 3, -1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        x = x + self.packed(x, x, x)[0]
        made: Tensor = self.head(x)
        return made


def ready(net: nn.Module) -> nn.Module:
    """In evaluation mode, with norms and biases that differ from channel to channel."""
    torch.manual_seed(1)
    with torch.no_grad():
        for part in net.modules():
            if isinstance(part, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm):
                part.weight.uniform_(0.5, 2)
                part.bias.normal_()
            if isinstance(part, nn.PReLU):
                part.weight.uniform_(0, 1)
            if isinstance(part, nn.BatchNorm2d):
                assert isinstance(part.running_mean, Tensor)
                assert isinstance(part.running_var, Tensor)
                part.running_mean.normal_()
                part.running_var.uniform_(0.5, 2)
            if isinstance(part, nn.MultiheadAttention):
                part.in_proj_bias.normal_()
    return net.eval()


@dataclass(frozen=True)
class Exported:
    """A net and the file it was exported to."""

    net: nn.Module
    inputs: tuple[Tensor, ...]
    path: Path
    layers: LayerMap
    classes: Classes


_RANDOM = torch.Generator().manual_seed(0)
CASES = {
    "images": (Images, torch.randn(2, 3, 18, 18, generator=_RANDOM)),
    "tokens": (Tokens, torch.randint(50, (2, 7), generator=_RANDOM)),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Precision], Exported]:
    """Each net exported once; it may be changed by the test that puts a permutation back."""

    @functools.cache
    def export(case: str, precision: Precision) -> Exported:
        torch.manual_seed(0)
        build, given = CASES[case]
        net, path = ready(build()), tmp_path_factory.mktemp(case) / "m.onnx"
        layers = export_onnx(net, (given,), {}, path, ExportOptions(precision=precision))
        classes = find_classes(open_onnx(path), TWO_FOUR)
        return Exported(net=net, inputs=(given,), path=path, layers=layers, classes=classes)

    return export


def values_of(net: nn.Module) -> dict[str, Array]:
    return {key: value.detach().numpy() for key, value in net.state_dict().items()}


def put_back(net: nn.Module, it: Exported) -> set[str]:
    """Give the module the file's permutation; the keys that changed."""
    random = np.random.default_rng(0)
    orders = {each.key: random.permutation(each.size).tolist() for each in it.classes.classes}
    changed = permuted_parameters(open_onnx(it.path), it.classes, orders, it.layers, values_of(net))
    state = {key: torch.from_numpy(value.copy()) for key, value in changed.items()}
    net.load_state_dict(net.state_dict() | state)
    return set(changed)


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("images", Precision.FLOAT32),
        ("tokens", Precision.FLOAT32),
        pytest.param("tokens", Precision.FLOAT16, marks=pytest.mark.slow),
    ],
)
def test_the_module_permuted_gives_what_it_gave(
    exported: Callable[[str, Precision], Exported],
    case: str,
    precision: Precision,
    tmp_path: Path,
) -> None:
    it = exported(case, precision)
    net = copy.deepcopy(it.net)
    dtype = "float32" if precision is Precision.FLOAT32 else "float16"
    permuted_at_random(it.path, tmp_path / "p.onnx", dtype=dtype)
    (before,) = reference_outputs(net, it.inputs, {})
    changed = put_back(net, it)
    (after,) = reference_outputs(net, it.inputs, {})
    assert same_outputs({"y": before}, {"y": after}, dtype="float32") is None
    assert changed >= EXPECTED[case]


EXPECTED = {
    "images": {
        *("stem.weight", "stem.bias", "blocks.0.norm.running_var", "blocks.1.norm2.weight"),
        *("blocks.0.out.bias", "blocks.1.depthwise.weight", "group_norm.weight", "up.weight"),
        *("slope.weight", "mixed.weight", "mixed.bias", "head.weight"),
    },
    "tokens": {
        *("table.weight", "head.weight", "positions", "norm.weight", "norm2.bias"),
        *("qkv.0.weight", "qkv.2.bias", "out.weight", "up.weight", "up.bias", "down.bias"),
        *("packed.in_proj_weight", "packed.out_proj.weight"),
    },
}


def test_classes_of_torch_nets_are_those_one_expects(
    exported: Callable[[str, Precision], Exported],
) -> None:
    found = {case: sizes(exported(case, Precision.FLOAT32).classes) for case in CASES}
    assert found["images"] == [32, 16, 16, 16, 16, 16, 16, 16, 16, 8, 4, 4, 4, 4]
    assert found["tokens"] == [64, 32, 8, 8, 8, 8, 8]


def test_what_comes_from_no_parameter_refuses(
    exported: Callable[[str, Precision], Exported],
) -> None:
    it = exported("tokens", Precision.FLOAT32)
    opened = open_onnx(it.path)
    given = values_of(it.net)
    positions = given.pop("positions")
    orders = {each.key: list(range(each.size))[::-1] for each in it.classes.classes}
    with pytest.raises(BadInputError, match=r"'positions' .* comes from no parameter"):
        permuted_parameters(opened, it.classes, orders, it.layers, given)
    assert permuted_parameters(opened, it.classes, {}, it.layers, given) == {}
    given |= {"a.copy": positions.copy(), "b.copy": positions.copy()}
    with pytest.raises(BadInputError, match=r"may come from 'a\.copy' or 'b\.copy'"):
        permuted_parameters(opened, it.classes, orders, it.layers, given)
