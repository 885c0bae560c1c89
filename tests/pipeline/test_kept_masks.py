"""Models that come in 2:4, and the dense model that one of them was made from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.onnx_models import gemm, save, two_weights, weights
from torch import nn

from twofour.errors import BadInputError
from twofour.jobs import run_all, run_prune
from twofour.records.options import CalibrationOptions, MethodOptions, Precision, RunOptions
from twofour.records.run import RunManifest
from twofour.records.weights import PruneResult
from twofour.store import read_record

Made = tuple[nn.Sequential, tuple[torch.Tensor, ...]]
FLOAT32 = RunOptions(precision=Precision.FLOAT32)


def dense() -> Made:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), (torch.randn(4, 32),)


def sparse(names: tuple[str, ...] = ("0", "2")) -> Made:
    """The same with a mask, and fine-tuned."""
    model, inputs = dense()
    with torch.no_grad():
        for name in names:
            groups = model.get_parameter(f"{name}.weight").view(32, -1, 4)
            smallest = groups.abs().argsort(-1)[..., :2]
            groups.scatter_(-1, smallest, 0.0)
            model.get_parameter(f"{name}.bias").add_(0.5)
    return model, inputs


def partly() -> Made:
    return sparse(("0",))


def other() -> Made:
    layers = nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 16)
    return nn.Sequential(*layers), (torch.randn(4, 32),)


def batches() -> list[torch.Tensor]:
    mixed = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    return [torch.randn(200, 32, generator=torch.Generator().manual_seed(2)) @ mixed]


@pytest.mark.parametrize("name", ["sparse", "partly"])
def test_a_model_that_came_in_two_of_four_has_no_dense_baseline_but_for_what_is_pruned_now(
    name: str, tmp_path: Path
) -> None:
    result = run_all(f"{__file__}:{name}", tmp_path / "r", FLOAT32)
    is_whole = name == "sparse"
    assert [row.held_before for row in result.prune.weights] == [True, is_whole]
    (why,) = (note for note in result.build.notes if "weights came in 2:4 already" in note)
    assert why.startswith(f"{1 + is_whole} of 2 ")
    assert result.accuracy.no_baseline == (why if is_whole else None)
    page = (tmp_path / "r" / "report.md").read_text()
    assert why in page
    assert ("cosine to the dense" in page) == (not is_whole)
    assert (result.accuracy.drift[0].cosine < 0.999) == (not is_whole)


def test_the_dense_reference_is_what_is_compared_with(tmp_path: Path) -> None:
    options = RunOptions(precision=Precision.FLOAT32, dense_reference=f"{__file__}:dense")
    result = run_all(f"{__file__}:sparse", tmp_path / "r", options)
    assert result.accuracy.no_baseline is None
    (drift,) = result.accuracy.drift
    assert 0.3 < drift.cosine < 0.9999
    manifest = read_record(RunManifest, tmp_path / "r" / "run.json")
    assert manifest.dense_reference == f"{__file__}:dense"
    alone = run_all(f"{__file__}:sparse", tmp_path / "alone", FLOAT32)
    assert result.export.files[1].size_bytes == alone.export.files[1].size_bytes


def test_the_dense_reference_of_an_onnx_file_is_one_too(tmp_path: Path) -> None:
    dense = weights(64, 64)
    tuned = dense * np.float32(1.1)
    tuned.reshape(-1, 4)[:, ::2] = 0
    reference, source = (
        str(save(gemm(weight, trans_b=1), tmp_path / f"{name}.onnx"))
        for name, weight in (("dense", dense), ("tuned", tuned))
    )
    result = run_all(source, tmp_path / "r", RunOptions(dense_reference=reference))
    (drift,) = result.accuracy.drift
    assert drift.cosine < 0.99
    assert result.prune.weights[0].held_before


def test_a_reference_of_another_shape_or_kind_is_refused(tmp_path: Path) -> None:
    save(two_weights(), tmp_path / "m.onnx")
    references = {
        f"{__file__}:other": "other does not fit",
        f"{tmp_path}/m.onnx": "not of one kind",
    }
    for reference, message in references.items():
        options = RunOptions(precision=Precision.FLOAT32, dense_reference=reference)
        with pytest.raises(BadInputError, match=message):
            run_all(f"{__file__}:sparse", tmp_path / "r", options)


# --- the mask that is kept ------------------------------------------------------------------------

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


def test_another_reference_of_a_refit_is_refused_by_name(pruned: Pruned) -> None:
    with pytest.raises(BadInputError, match=r"'0\.weight' is \[32, 32\]"):
        pruned(20, "other")
