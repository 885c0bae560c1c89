"""A mask that came with the model, refitted to the dense model that it was made from."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from twofour.errors import BadInputError
from twofour.jobs import run_prune
from twofour.records.options import CalibrationOptions, MethodOptions, RunOptions
from twofour.records.weights import PruneResult

MINE = """
import torch
from torch import nn

def dense():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), (torch.randn(4, 32),)

def sparse():
    model, inputs = dense()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            groups = layer.weight.view(layer.out_features, -1, 4)
            smallest = groups.abs().argsort(-1)[..., :2]
            groups.scatter_(-1, smallest, 0.0)
            layer.bias += 0.5
    return model, inputs

def batches():
    mixed = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    return [torch.randn(200, 32, generator=torch.Generator().manual_seed(2)) @ mixed]
"""
OTHER = """
def other():
    layers = nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 16)
    return nn.Sequential(*layers), (torch.randn(4, 32),)
"""


@functools.cache
def pruned(mine: Path, refit: int | None, reference: str | None) -> tuple[Path, PruneResult]:
    options = RunOptions(
        calibration=CalibrationOptions(data=f"{mine}:batches"),
        method=MethodOptions(name="keep", refit=refit),
        dense_reference=None if reference is None else f"{mine}:{reference}",
    )
    out = mine.parent / f"{refit}-{reference}"
    folder, result, validation = run_prune(f"{mine}:sparse", out, options)
    assert not validation.broken
    return folder, result


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "mine.py"
    path.write_text(MINE + OTHER)
    return path


def outputs(
    mine: Path, weights: Path | None, maker: str
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    space: dict[str, object] = {}
    exec(mine.read_text(), space)
    make, batches = space[maker], space["batches"]
    assert callable(make)
    assert callable(batches)
    model = make()[0]
    if weights is not None:
        model.load_state_dict(load_file(weights))
    with torch.no_grad():
        found: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = model(batches()[0]).numpy()
    return found


def test_a_refit_brings_the_outputs_to_the_dense_ones_under_the_same_mask(mine: Path) -> None:
    folder, result = pruned(mine, 20, "dense")
    kept = load_file(folder / "weights.safetensors")
    left = load_file(pruned(mine, None, "dense")[0] / "weights.safetensors")
    for name in ("0.weight", "2.weight"):
        assert torch.equal(kept[name] == 0, left[name] == 0)
        assert not torch.equal(kept[name], left[name])
    dense = outputs(mine, None, "dense")
    before = outputs(mine, None, "sparse") - dense
    after = outputs(mine, folder / "weights.safetensors", "sparse") - dense
    assert (after**2).mean() < 0.5 * (before**2).mean()
    assert [row.method for row in result.weights] == ["keep", "keep"]
    assert [row.refit_steps for row in result.weights] == [20, 20]
    assert all(
        row.output_error is not None and row.output_error.calibration > 0 for row in result.weights
    )


@pytest.mark.parametrize(("refit", "reference"), [(None, "dense"), (20, None)])
def test_without_a_refit_or_a_reference_nothing_is_changed(
    mine: Path, refit: int | None, reference: str | None
) -> None:
    folder, result = pruned(mine, refit, reference)
    space: dict[str, object] = {}
    exec(mine.read_text(), space)
    make = space["sparse"]
    assert callable(make)
    state = make()[0].state_dict()
    saved = load_file(folder / "weights.safetensors")
    assert all(torch.equal(state[name], saved[name]) for name in state)
    assert all(row.held_before for row in result.weights)


def test_another_reference_is_refused_by_name(mine: Path) -> None:
    with pytest.raises(BadInputError, match=r"'0\.weight' is \[32, 32\]"):
        pruned(mine, 20, "other")
