"""A mask that came with the model, refitted to the dense model that it was made from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from twofour.errors import BadInputError
from twofour.jobs import run_prune
from twofour.records.options import CalibrationOptions, MethodOptions, RunOptions
from twofour.records.weights import PruneResult

Made = tuple[nn.Sequential, tuple[torch.Tensor, ...]]


def dense() -> Made:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), (torch.randn(4, 32),)


def sparse() -> Made:
    """The same with a mask, and fine-tuned."""
    model, inputs = dense()
    with torch.no_grad():
        for name in ("0", "2"):
            groups = model.get_parameter(f"{name}.weight").view(32, -1, 4)
            smallest = groups.abs().argsort(-1)[..., :2]
            groups.scatter_(-1, smallest, 0.0)
            model.get_parameter(f"{name}.bias").add_(0.5)
    return model, inputs


def other() -> Made:
    layers = nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 16)
    return nn.Sequential(*layers), (torch.randn(4, 32),)


def batches() -> list[torch.Tensor]:
    mixed = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    return [torch.randn(200, 32, generator=torch.Generator().manual_seed(2)) @ mixed]


Pruned = Callable[[int | None, str | None], tuple[Path, PruneResult]]


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    """The sparse model with so many steps of a refit to the dense model of that name."""
    folder = tmp_path_factory.mktemp("kept")

    @functools.cache
    def prune(refit: int | None, reference: str | None) -> tuple[Path, PruneResult]:
        options = RunOptions(
            calibration=CalibrationOptions(data=f"{__file__}:batches"),
            method=MethodOptions(name="keep", refit=refit),
            dense_reference=None if reference is None else f"{__file__}:{reference}",
        )
        out = folder / f"{refit}-{reference}"
        _, result, validation = run_prune(f"{__file__}:sparse", out, options)
        assert not validation.broken
        return out, result

    return prune


def test_a_refit_brings_the_outputs_to_the_dense_ones_under_the_same_mask(pruned: Pruned) -> None:
    folder, result = pruned(20, "dense")
    kept = load_file(folder / "weights.safetensors")
    left = load_file(pruned(None, "dense")[0] / "weights.safetensors")
    for name in ("0.weight", "2.weight"):
        assert torch.equal(kept[name] == 0, left[name] == 0)
        assert not torch.equal(kept[name], left[name])
    refitted = sparse()[0]
    refitted.load_state_dict(kept)
    (x,) = batches()
    with torch.no_grad():
        expected, before, after = (model(x) for model in (dense()[0], sparse()[0], refitted))
    assert ((after - expected) ** 2).mean() < 0.5 * ((before - expected) ** 2).mean()
    assert [row.method for row in result.weights] == ["keep", "keep"]
    assert [row.refit_steps for row in result.weights] == [20, 20]
    assert all(
        row.output_error is not None and row.output_error.calibration > 0 for row in result.weights
    )


@pytest.mark.parametrize(("refit", "reference"), [(None, "dense"), (20, None)])
def test_without_a_refit_or_a_reference_nothing_is_changed(
    pruned: Pruned, refit: int | None, reference: str | None
) -> None:
    folder, result = pruned(refit, reference)
    state = sparse()[0].state_dict()
    saved = load_file(folder / "weights.safetensors")
    assert all(torch.equal(state[name], saved[name]) for name in state)
    assert all(row.held_before for row in result.weights)


def test_another_reference_is_refused_by_name(pruned: Pruned) -> None:
    with pytest.raises(BadInputError, match=r"'0\.weight' is \[32, 32\]"):
        pruned(20, "other")
