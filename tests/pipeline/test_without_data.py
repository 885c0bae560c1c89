"""Runs without calibration data: what is lost is said once, and what needs data is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.onnx_models import save, two_weights
from support.small_run import Recorder

from twofour.errors import BadInputError
from twofour.jobs import run_prune
from twofour.records.options import CalibrationOptions, RunOptions

LOST = "2 weights pruned by magnitude, without calibration samples. `--calibrate DATA` usually"


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save(two_weights(), tmp_path / "model.onnx"))


def test_what_is_lost_without_data_is_one_note_unless_the_model_came_pruned(
    model: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(300, 8, 6, 6)))
    calibration = CalibrationOptions(data=str(tmp_path / "x.npy"))
    without, pruned, with_data = Recorder(), Recorder(), Recorder()
    run_prune(model, tmp_path / "r", RunOptions(), without)
    run_prune(str(tmp_path / "r" / "sparse.onnx"), tmp_path / "s", RunOptions(), pruned)
    run_prune(model, tmp_path / "t", RunOptions(calibration=calibration), with_data)
    (note,) = without.notes
    assert note.startswith(LOST)
    assert [note for note in pruned.notes if "without cal" in note] == with_data.notes == []


@pytest.mark.parametrize(
    "changed",
    [{"image_mean": (0.5,)}, {"image_std": (0.5,)}, {"image_size": (8, 8)}, {"samples": 8}],
)
def test_what_says_how_data_are_read_is_refused_without_data(
    model: str, tmp_path: Path, changed: dict[str, Any]
) -> None:
    options = RunOptions(calibration=replace(CalibrationOptions(), **changed))
    with pytest.raises(BadInputError, match=r"--(mean|std|size|calibrate-samples) needs"):
        run_prune(model, tmp_path / "r", options)
