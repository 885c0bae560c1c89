"""twofour.load_weights: pruned weights in force in a module, or a refusal with what is off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.utils import parametrizations, prune, weight_norm

import twofour
from twofour.errors import BadInputError
from twofour.pipeline.torch.weight_files import save_tensors


class Tied(nn.Module):
    """An embedding whose table is the weight of the head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 32)
        self.head = nn.Linear(32, 16, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores of every token."""
        return self.head(self.table(ids))  # type: ignore[no-any-return]  # nn.Module.__call__


def pruned(module: nn.Module, folder: Path) -> Path:
    twofour.prune(module, all_layers=True)
    path = folder / "weights.safetensors"
    save_tensors(module.state_dict(), path)
    return path


def weight_of(module: nn.Module) -> torch.Tensor:
    """Of the first layer, computed or not."""
    weight = next(iter(module.children())).weight
    assert isinstance(weight, torch.Tensor)
    return weight


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))


def with_a_mask(layer: nn.Module) -> nn.Module:
    masked: nn.Module = prune.random_unstructured(layer, "weight", 0.1)  # type: ignore[no-untyped-call]  # torch
    return masked


@pytest.mark.parametrize("change", [None, parametrizations.weight_norm, weight_norm, with_a_mask])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_pruned_weights_are_in_force(
    change: Callable[[nn.Module], nn.Module] | None, tmp_path: Path
) -> None:
    source, other = plain(), plain()
    if change is not None:
        source[0], other[0] = change(source[0]), change(other[0])
    path = pruned(source, tmp_path)
    loaded = twofour.load_weights(other, path)
    assert ((weight_of(other).reshape(-1, 4) != 0).sum(1) <= 2).all()
    x = torch.randn(4, 32)
    assert torch.equal(other.eval()(x), source.eval()(x))
    assert loaded.made_permanent == (() if change is None else ("0.weight",))
    assert set(loaded.keys) == set(other.state_dict())


def test_a_tied_weight_is_filled_once_and_stays_tied_and_an_untied_one_takes_it_twice(
    tmp_path: Path,
) -> None:
    source = Tied()
    path = pruned(source, tmp_path)
    tied, untied = Tied(), Tied(tied=False)
    loaded = twofour.load_weights(tied, path)
    assert tied.head.weight is tied.table.weight
    assert torch.equal(tied.head.weight, source.head.weight)
    assert len(loaded.tied) == 1
    twofour.load_weights(untied, path)
    assert torch.equal(untied.head.weight, untied.table.weight)


@pytest.mark.parametrize(
    ("source", "other", "said"),
    [
        (Tied(tied=False), Tied(), ["table.weight and head.weight differ"]),
        (
            plain(),
            nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 8)),
            ["missing: 3.weight, 3.bias", "1.bias, 1.num_batches_tracked"],
        ),
        (
            plain(),
            nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 9)),
            ["2.weight is", "[9, 32]"],
        ),
    ],
    ids=["two for a tied one", "other keys", "another shape"],
)
def test_weights_that_do_not_fit_are_named_and_nothing_is_changed(
    source: nn.Module, other: nn.Module, said: list[str], tmp_path: Path
) -> None:
    path = pruned(source, tmp_path)
    before = weight_of(other).detach().clone()
    with pytest.raises(BadInputError) as told:
        twofour.load_weights(other, path)
    assert [words for words in said if words not in told.value.message] == []
    assert torch.equal(weight_of(other), before)


def test_the_header_is_the_same_bytes_each_time_however_many_keys_are_tied(tmp_path: Path) -> None:
    weight = torch.ones(4, 4)
    state = {f'{name}."weight"\n\x1fé': weight for name in "hgfedcba"}
    contents = []
    for number in range(5):
        save_tensors(state, tmp_path / f"{number}.safetensors")
        contents.append((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(set(contents)) == 1
    with safe_open(tmp_path / "0.safetensors", framework="pt") as file:
        assert list(file.keys()) == ['a."weight"\n\x1fé']
        assert set(file.metadata()) == set(state) - set(file.keys())
        assert set(file.metadata().values()) == set(file.keys())
    size = int.from_bytes(contents[0][:8], "little")
    assert list(json.loads(contents[0][8 : 8 + size])["__metadata__"]) == sorted(state)[1:]


def test_a_module_in_float32_takes_half_precision_and_not_the_other_way_round(
    tmp_path: Path,
) -> None:
    half, whole = nn.Linear(8, 4).to(torch.bfloat16), nn.Linear(8, 4)
    save_tensors(half.state_dict(), tmp_path / "half.safetensors")
    save_tensors(whole.state_dict(), tmp_path / "whole.safetensors")
    twofour.load_weights(whole, tmp_path / "half.safetensors")
    assert torch.equal(whole.weight, half.weight.float())
    with pytest.raises(BadInputError, match=r"torch.float32, .*torch.bfloat16"):
        twofour.load_weights(half, tmp_path / "whole.safetensors")
