"""A run folder with fine-tuned weights: which weights every command takes, and the record."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.small_run import Recorder
from support.trained import lost, zeros
from torch import nn
from typer.testing import CliRunner

import twofour
from twofour.cli import application
from twofour.errors import BadInputError
from twofour.jobs import run_all, run_finetune, run_prune
from twofour.pipeline.folder import final_weights
from twofour.records.options import (
    CalibrationOptions,
    Quantization,
    RunOptions,
    TrainingOptions,
    Trust,
)
from twofour.records.run import Finetuning
from twofour.reports.pruning_document import finetuning_lines
from twofour.store import read_record

MODEL, BATCHES, METRIC = (f"{__file__}:{name}" for name in ("make", "batches", "largest"))


def make() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), (torch.randn(4, 32),)


def batches() -> list[torch.Tensor]:
    mixed = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    return [torch.randn(200, 32, generator=torch.Generator().manual_seed(2)) @ mixed]


def largest(predict: Callable[..., tuple[NDArray[np.float32], ...]]) -> dict[str, float]:
    return {"largest": float(abs(predict(batches()[0].numpy())[0]).max())}


OPTIONS = RunOptions(
    training=TrainingOptions(data=BATCHES, minutes=0.02),
    metric=METRIC,
    trust=Trust(everything=True),
)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, pruned by magnitude and fine-tuned for a second."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    run_prune(MODEL, folder, RunOptions())
    run_finetune(str(folder), None, OPTIONS)
    return folder


def module(weights: Path) -> nn.Module:
    model, _ = make()
    twofour.load_weights(model, weights)
    return model


def test_the_record_says_what_training_brought(tuned: Path) -> None:
    record = read_record(Finetuning, tuned / "finetune.json")
    assert record.train is not None
    assert (record.train.samples, record.train.held_out, record.train.notes) == (200, 24, ())
    assert (record.weights, record.minutes, record.blocks) == (2, 0.02, ("0", "2"))
    assert record.measured[record.best].distance < record.measured[0].distance
    assert [*record.metrics] == ["dense", "pruned", "fine-tuned"]
    assert len({of["largest"] for of in record.metrics.values()}) == 3


@pytest.mark.parametrize(("samples", "notes"), [(None, 1), (64, 1), (200, 0)])
def test_it_says_that_more_calibration_samples_come_first(
    samples: int | None, notes: int, tmp_path: Path
) -> None:
    calibration = CalibrationOptions()
    if samples is not None:
        calibration = CalibrationOptions(data=BATCHES, samples=samples)
    briefly = TrainingOptions(data=BATCHES, minutes=0.001)
    trusted = replace(OPTIONS, training=briefly, calibration=calibration)
    run_prune(MODEL, tmp_path, trusted)
    progress = Recorder()
    run_finetune(MODEL, tmp_path, trusted, progress)
    how = f"with {samples}" if samples else "without"
    said = [note for note in progress.notes if f"pruned {how} calibration samples" in note]
    assert len(said) == notes
    used_twice = [note for note in progress.notes if f"calibrated with {BATCHES} too" in note]
    assert len(used_twice) == (samples is not None)


def test_every_command_takes_the_fine_tuned_weights_with_the_pruned_zeros(tuned: Path) -> None:
    pruned, model = (module(tuned / name) for name in ("weights.safetensors", "."))
    assert not torch.equal(pruned.get_parameter("0.weight"), model.get_parameter("0.weight"))
    assert lost(model, zeros(pruned)) == 0
    found = twofour.validate(tuned)
    assert {check.file for check in found.checks} == {
        str(tuned / name) for name in ("weights.safetensors", "finetuned.safetensors")
    }
    assert not found.broken


def test_the_main_job_goes_on_with_them_and_reports_them(tuned: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tuned, tmp_path / "whole"))
    result = run_all(MODEL, folder, RunOptions())
    assert result.validation.files == ("finetuned.safetensors",)
    report = (folder / "report.md").read_text()
    assert "fine-tuned for" in report
    assert "by magnitude without data" not in report.split("\n\n")[1]
    assert "finetuned.safetensors is not used" not in report
    progress = Recorder()
    again = RunOptions(selection=twofour.Selection(exclude=("2",)))
    run_all(MODEL, folder, again, progress)
    assert final_weights(folder) == "weights.safetensors"
    why = "finetuned.safetensors is not used: it was trained from other pruned weights"
    assert any(why in note for note in progress.notes)
    assert why in (folder / "report.md").read_text()


def test_rounding_afterwards_prunes_nothing_again(tmp_path: Path) -> None:
    progress, data = Recorder(), CalibrationOptions(data=BATCHES)
    run_prune(MODEL, tmp_path, RunOptions(calibration=data))
    rounded = RunOptions(calibration=data, quantize=Quantization.INT8, resume=True)
    run_prune(MODEL, tmp_path, rounded, progress)
    assert (progress.did, progress.kept) == ([], ["graph", "prune", "validate"])


def test_what_is_done_is_not_done_again(tuned: Path) -> None:
    before = (tuned / "finetune.json").stat().st_mtime_ns
    run_finetune(MODEL, tuned, replace(OPTIONS, resume=True))
    assert (tuned / "finetune.json").stat().st_mtime_ns == before
    assert not (tuned / "stages" / "finetune.pt").exists()


def test_what_cannot_be_fine_tuned_is_refused(tuned: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    with pytest.raises(BadInputError, match=r"has no weights\.safetensors, where training starts"):
        run_finetune(MODEL, new, OPTIONS)
    with pytest.raises(BadInputError, match="finetune needs training samples"):
        run_finetune(MODEL, new, replace(OPTIONS, training=TrainingOptions()))
    with pytest.raises(BadInputError, match="names code that this"):
        run_finetune(str(tuned), None, replace(OPTIONS, trust=Trust()))
    missing = replace(OPTIONS, training=TrainingOptions(data="nope.npz"))
    with pytest.raises(BadInputError, match=r"--train nope.npz: there"):
        run_finetune(MODEL, tuned, missing)
    assert not new.exists()


def test_the_command_says_what_it_brought_and_what_is_next(tuned: Path) -> None:
    arguments = ["--train", BATCHES, "--metric", METRIC, "--trust"]
    command = ["finetune", str(tuned), *arguments, "--minutes", "0.02"]
    result = CliRunner().invoke(application(), command)
    assert result.exit_code == 0, result.output
    share = "squared distance of the outputs to the dense ones, as a share of their variance over"
    assert share in result.stdout
    assert "% on 24 held-out samples" in result.stdout
    assert "few" not in result.stdout
    assert CliRunner().invoke(application(), [*command[:-1], "0"]).exit_code == 2
    record = read_record(Finetuning, tuned / "finetune.json")
    assert record.train is not None
    said = finetuning_lines(replace(record, train=replace(record.train, held_out=1)))[0]
    assert said.endswith("% on 1 held-out sample, too few to be sure")
    options = f"--options {tuned}/options.toml --out {tuned} --resume --metric {METRIC}"
    assert f"Next: `twofour prune-export-build {MODEL} {options}`" in result.stderr
