"""The one-backward score is the change of the outputs, to first order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from twofour.pruning import torch_fisher


def fisher_scores(
    net: nn.Module, call: Any, changes: dict[str, torch.Tensor], seed: int = 0
) -> dict[str, float]:
    """Each parameter as a layer of its own."""
    return torch_fisher.fisher_scores(
        net, call, {key: {key: change} for key, change in changes.items()}, seed=seed
    )


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def _changes(net: nn.Module, size: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        key: size * torch.randn_like(p) * p.abs() for key, p in net.named_parameters() if p.ndim > 1
    }


def _exact(net: nn.Module, x: torch.Tensor, key: str, change: torch.Tensor) -> float:
    """||y - y'||^2 / ||y||^2 with this weight changed, in float64."""
    with torch.no_grad():
        y = net(x)
        dict(net.named_parameters())[key].add_(change)
        moved = net(x)
        dict(net.named_parameters())[key].sub_(change)
        return float((y - moved).double().square().sum() / y.double().square().sum())


def test_scores_estimate_the_error_of_the_outputs_within_the_noise_of_the_probes() -> None:
    net, x = _net().double(), torch.randn(256, 16, dtype=torch.float64)
    changes = {key: change.double() for key, change in _changes(net, 1e-4).items()}
    found = [fisher_scores(net, ((x,), {}), changes, seed=s) for s in range(6)]
    for key, change in changes.items():
        mean = sum(scores[key] for scores in found) / len(found)
        assert mean == pytest.approx(_exact(net, x, key, change), rel=0.35)


def test_a_layer_that_changes_more_scores_more_by_the_square() -> None:
    net, x = _net(), torch.randn(64, 16)
    changes = _changes(net, 0.01)
    scores = fisher_scores(net, ((x,), {}), changes)
    twice = fisher_scores(net, ((x,), {}), {k: 2 * c for k, c in changes.items()})
    assert all(twice[k] == pytest.approx(4 * scores[k], rel=1e-6) for k in scores)
    assert fisher_scores(net, ((x,), {}), {k: 0 * c for k, c in changes.items()}) == {
        "0.weight": 0.0, "2.weight": 0.0,
    }  # fmt: skip


def test_the_same_seed_gives_the_same_scores_and_the_module_is_as_it_was() -> None:
    net, x = _net(), torch.randn(10, 16)
    net[0].weight.requires_grad_(False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    changes = _changes(net, 0.1)
    assert fisher_scores(net, ((x,), {}), changes) == fisher_scores(net, ((x,), {}), changes)
    assert [p.requires_grad for p in net.parameters()] == [False, True, True, True]
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


class Odd(nn.Module):
    """Named inputs of other first axes, nested outputs, a weight that nothing uses, tied ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, object]:
        """Logits in a tuple, and the ids."""
        return {"logits": (self.out(self.embed(ids) * scale),), "ids": ids}


def test_named_inputs_nested_outputs_unused_and_tied_weights() -> None:
    torch.manual_seed(0)
    net = Odd().eval()
    call = ((), {"ids": torch.arange(6).reshape(2, 3), "scale": torch.ones(1)})
    changes = {k: 0.1 * torch.ones_like(v) for k, v in net.state_dict().items() if v.ndim == 2}
    scores = fisher_scores(net, call, {**changes, "nothing.weight": torch.ones(1)})
    assert set(scores) == {"embed.weight", "out.weight", "unused.weight"}
    assert scores["unused.weight"] == 0.0
    assert scores["out.weight"] == scores["embed.weight"] > 0


def test_a_forward_without_gradients_is_torchs_error() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.fc(x))

    with pytest.raises(RuntimeError, match="does not require grad"):
        fisher_scores(Frozen(), ((torch.ones(2, 4),), {}), {"fc.weight": torch.ones(4, 4)})


def test_a_bias_that_makes_up_for_the_mean_lowers_the_score_of_its_layer() -> None:
    net, x = _net(), torch.randn(64, 16).abs() + 1
    change = 0.01 * torch.ones(32, 16)
    made_up = -(change @ x.mean(0))
    alone = {"0": {"0.weight": change}}
    both = {"0": {"0.weight": change, "0.bias": made_up}}
    without = torch_fisher.fisher_scores(net, ((x,), {}), alone)["0"]
    assert torch_fisher.fisher_scores(net, ((x,), {}), both)["0"] < 0.2 * without
