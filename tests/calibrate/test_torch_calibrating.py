"""Runs of a torch model with calibration data: what is done again."""

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
    """Remembers which stages were done."""

    did: list[str] = field(default_factory=list)

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


def test_other_data_and_another_method_are_done_again(tmp_path: Path, data: Path) -> None:
    run_prune(MODEL, tmp_path / "run", options(data))
    other = tmp_path / "other.npz"
    np.savez(other, x=np.load(data)["x"] * 2 + 1)
    for changed in (options(data, "wanda"), options(other, "wanda"), RunOptions()):
        steps = Steps()
        run_prune(MODEL, tmp_path / "run", replace(changed, resume=True), steps)
        assert "prune" in steps.did
