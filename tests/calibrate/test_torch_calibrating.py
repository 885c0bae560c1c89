"""Runs of a torch model with calibration data: what is pruned, kept, done again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from twofour.jobs import run_prune
from twofour.pipeline.stages import Silent
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

    def done(self, name: str, *, seconds: float) -> None:  # noqa: ARG002  # Protocol
        """Remember."""
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
    assert steps.texts[-1].startswith("3/4 head (4 of")
    left = {file.name for file in (folder / "stages").iterdir()}
    assert not {"calibration", "calibrated.onnx"} & left, "the images are larger than the example"
    again = Steps()
    resumed = replace(options(data), resume=True)
    assert run_prune(MODEL, tmp_path / "run", resumed, again)[1] == result
    assert again.did == []


def test_other_data_and_another_method_are_done_again(tmp_path: Path, data: Path) -> None:
    run_prune(MODEL, tmp_path / "run", options(data))
    other = tmp_path / "other.npz"
    np.savez(other, x=np.load(data)["x"] * 2 + 1)
    for changed in (options(data, "wanda"), options(other, "wanda"), RunOptions()):
        steps = Steps()
        run_prune(MODEL, tmp_path / "run", replace(changed, resume=True), steps)
        assert "prune" in steps.did
