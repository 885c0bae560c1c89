"""A run folder with fine-tuned weights: which weights every command takes, and the record."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
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

MINE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)), (torch.randn(4, 32),)

def batches():
    mixed = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    return [torch.randn(200, 32, generator=torch.Generator().manual_seed(2)) @ mixed]

def largest(predict):
    return {"largest": float(abs(predict(batches()[0].numpy())[0]).max())}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned") / "mine.py"
    path.write_text(MINE)
    return path


def options(source: Path, minutes: float = 0.02) -> RunOptions:
    return RunOptions(
        training=TrainingOptions(data=f"{source}:batches", minutes=minutes),
        metric=f"{source}:largest",
        trust=Trust(everything=True),
    )


@pytest.fixture(scope="module")
def tuned(source: Path) -> Path:
    """A run folder, pruned by magnitude and fine-tuned for a second."""
    folder = source.parent / "run"
    run_prune(f"{source}:make", folder, RunOptions())
    run_finetune(str(folder), None, options(source))
    return folder


def module(folder: Path, weights: Path) -> nn.Module:
    space: dict[str, object] = {}
    exec((folder.parent / "mine.py").read_text(), space)
    make = space["make"]
    assert callable(make)
    model: nn.Module = make()[0]
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
    source: Path, samples: int | None, notes: int, tmp_path: Path
) -> None:
    calibration = CalibrationOptions()
    if samples is not None:
        calibration = CalibrationOptions(data=f"{source}:batches", samples=samples)
    trusted = replace(options(source, 0.001), calibration=calibration)
    run_prune(f"{source}:make", tmp_path, trusted)
    progress = Recorder()
    run_finetune(f"{source}:make", tmp_path, trusted, progress)
    how = f"with {samples}" if samples else "without"
    said = [note for note in progress.notes if f"pruned {how} calibration samples" in note]
    assert len(said) == notes
    used_twice = [
        note for note in progress.notes if f"calibrated with {source}:batches too" in note
    ]
    assert len(used_twice) == (samples is not None)


def test_every_command_takes_the_fine_tuned_weights_with_the_pruned_zeros(tuned: Path) -> None:
    pruned, model = (module(tuned, tuned / n) for n in ("weights.safetensors", "."))
    assert not torch.equal(pruned.get_parameter("0.weight"), model.get_parameter("0.weight"))
    assert lost(model, zeros(pruned)) == 0
    found = twofour.validate(tuned)
    assert {check.file for check in found.checks} == {
        str(tuned / name) for name in ("weights.safetensors", "finetuned.safetensors")
    }
    assert not found.broken


def test_the_main_job_goes_on_with_them_and_reports_them(tuned: Path, source: Path) -> None:
    folder = source.parent / "whole"
    shutil.copytree(tuned, folder)
    result = run_all(f"{source}:make", folder, RunOptions())
    assert result.validation.files == ("finetuned.safetensors",)
    report = (folder / "report.md").read_text()
    assert "fine-tuned for" in report
    assert "by magnitude without data" not in report.split("\n\n")[1]
    assert "finetuned.safetensors is not used" not in report
    progress = Recorder()
    again = RunOptions(selection=twofour.Selection(exclude=("2",)))
    run_all(f"{source}:make", folder, again, progress)
    assert final_weights(folder) == "weights.safetensors"
    why = "finetuned.safetensors is not used: it was trained from other pruned weights"
    assert any(why in note for note in progress.notes)
    assert why in (folder / "report.md").read_text()


def test_rounding_afterwards_prunes_nothing_again(source: Path) -> None:
    folder, progress = source.parent / "rounded", Recorder()
    data = CalibrationOptions(data=f"{source}:batches")
    run_prune(f"{source}:make", folder, RunOptions(calibration=data))
    rounded = RunOptions(calibration=data, quantize=Quantization.INT8, resume=True)
    run_prune(f"{source}:make", folder, rounded, progress)
    assert (progress.did, progress.kept) == ([], ["graph", "prune", "validate"])


def test_what_is_done_is_not_done_again(tuned: Path, source: Path) -> None:
    before = (tuned / "finetune.json").stat().st_mtime_ns
    run_finetune(f"{source}:make", tuned, replace(options(source), resume=True))
    assert (tuned / "finetune.json").stat().st_mtime_ns == before
    assert not (tuned / "stages" / "finetune.pt").exists()


def test_what_cannot_be_fine_tuned_is_refused(tuned: Path, source: Path) -> None:
    wanted, new = options(source), source.parent / "new"
    with pytest.raises(BadInputError, match=r"has no weights\.safetensors, where training starts"):
        run_finetune(f"{source}:make", new, wanted)
    with pytest.raises(BadInputError, match="finetune needs training samples"):
        run_finetune(f"{source}:make", new, replace(wanted, training=TrainingOptions()))
    with pytest.raises(BadInputError, match="names code that this"):
        run_finetune(str(tuned), None, replace(wanted, trust=Trust()))
    missing = replace(wanted, training=TrainingOptions(data="nope.npz"))
    with pytest.raises(BadInputError, match=r"--train nope.npz: there"):
        run_finetune(f"{source}:make", tuned, missing)
    assert not new.exists()


def test_the_command_says_what_it_brought_and_what_is_next(tuned: Path, source: Path) -> None:
    arguments = ["--train", f"{source}:batches", "--metric", f"{source}:largest", "--trust"]
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
    options = f"--options {tuned}/options.toml --out {tuned} --resume --metric {source}:largest"
    assert f"Next: `twofour prune-export-build {source}:make {options}`" in result.stderr
