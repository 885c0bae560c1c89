"""Runs of a torch model with calibration data: what is pruned, kept, done again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from twofour.main_job import run_prune
from twofour.pipeline.stages import Silent
from twofour.pruning.torch.calls import tree_store
from twofour.records.options import (
    CalibrationOptions,
    MethodOptions,
    RunOptions,
)
from twofour.records.weights import Selection

SUPPORT = Path(__file__).parents[1] / "support"
MODEL = f"{SUPPORT / 'small_model.py'}:make"


@dataclass
class Steps(Silent):
    """Remembers the layers that were worked on, and which stages were done."""

    texts: list[str] = field(default_factory=list)
    did: list[str] = field(default_factory=list)

    def step(self, text: str, done: int, total: int | None) -> None:
        """Remember."""
        self.texts.append(f"{done}/{total} {text}")

    def done(self, name: str, *, seconds: float, reused: bool) -> None:  # noqa: ARG002  # Protocol
        """Remember."""
        if not reused:
            self.did.append(name)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "x.npz"
    generator = np.random.default_rng(0)
    np.savez(path, x=generator.normal(size=(24, 3, 16, 16)).astype(np.float32))
    return path


def options(data: Path, method: str | None = None) -> RunOptions:
    return RunOptions(
        calibration=CalibrationOptions(data=str(data)),
        method=MethodOptions(name=method),
        selection=Selection(all_layers=True),
    )


def test_a_run_prunes_with_its_data_and_says_so(tmp_path: Path, data: Path) -> None:
    steps = Steps()
    folder, result, validation = run_prune(MODEL, tmp_path / "run", options(data), steps)
    assert result.method == "admm"
    assert result.calibration is not None
    assert (result.calibration.source, result.calibration.samples, result.calibration.held_out) == (
        str(data),
        24,
        2,
    )
    pruned = [row for row in result.weights if row.pruned]
    assert pruned
    assert all(row.method == "admm" and row.output_error is not None for row in pruned)
    assert not validation.broken
    assert "prune" in steps.did
    assert steps.texts[-1].startswith("3/4 head (4 of 4, about ")
    assert not (folder / "stages" / "calibration").exists()
    again = Steps()
    assert run_prune(MODEL, tmp_path / "run", options(data), again)[1] == result
    assert again.did == []


def test_other_data_and_another_method_are_done_again(tmp_path: Path, data: Path) -> None:
    run_prune(MODEL, tmp_path / "run", options(data))
    other = tmp_path / "other.npz"
    np.savez(other, x=np.load(data)["x"] * 2 + 1)
    for changed in (options(data, "wanda"), options(other, "wanda"), RunOptions()):
        steps = Steps()
        run_prune(MODEL, tmp_path / "run", changed, steps)
        assert "prune" in steps.did


@pytest.mark.slow
def test_a_killed_run_goes_on_behind_the_last_finished_layers(tmp_path: Path, data: Path) -> None:
    undisturbed, out = Steps(), tmp_path / "killed"
    run_prune(MODEL, tmp_path / "whole", options(data), undisturbed)
    layers = [text.split()[1] for text in undisturbed.texts if "of 4" in text]
    assert layers == ["stem", "body", "grouped", "head"]
    script = [sys.executable, str(SUPPORT / "killed_calibration.py"), MODEL]
    killed = subprocess.run([*script, str(out), str(data), layers[2]], check=False)
    assert killed.returncode == -9
    finished = sorted((out / "stages" / "calibration").glob("*.json"))
    assert len(finished) == 2
    before = {file: file.stat().st_mtime_ns for file in finished}
    touched: dict[Path, int] = {}

    class Watching(Steps):
        def step(self, text: str, done: int, total: int | None) -> None:
            touched.update({f: f.stat().st_mtime_ns for f in before if f.exists()})
            super().step(text, done, total)

    run_prune(MODEL, out, options(data), Watching())
    assert touched == before
    assert not (out / "stages" / "calibration").exists()
    whole = load_file(tmp_path / "whole" / "weights.safetensors")
    resumed = load_file(out / "weights.safetensors")
    assert whole.keys() == resumed.keys()
    assert all(np.array_equal(whole[key], resumed[key]) for key in whole)
    assert (tmp_path / "whole" / "prune.json").read_text() == (out / "prune.json").read_text()


def test_what_a_killed_process_kept_beside_is_removed_by_the_next(
    tmp_path: Path, data: Path
) -> None:
    folder, _, _ = run_prune(MODEL, tmp_path / "run", options(data))
    with tree_store(within=folder / "stages") as kept:
        (left,) = (folder / "stages").glob(".calibration.data.*")
        shutil.copytree(left, tmp_path / "left")
        kept.drop("nothing")
    shutil.move(tmp_path / "left", left)
    run_prune(MODEL, folder, options(data))
    assert not left.exists()
    assert not [*(folder / "stages").iterdir()]
