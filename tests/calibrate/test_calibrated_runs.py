"""Runs with calibration data: their records and page, data that change, a module and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from support.onnx_models import save, two_weights
from support.small_run import Recorder

from twofour.jobs import run_all, run_prune
from twofour.records.options import CalibrationOptions, Precision, RunOptions
from twofour.records.run import RunResult
from twofour.records.weights import PruneResult, Selection
from twofour.reports.eligibility_words import accuracy_and_speed
from twofour.reports.pruning_document import prune_document
from twofour.reports.terminal import plain_text, render

MINE = """
import numpy as np, torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32))
    model(images(64))  # in training mode: the batch norm learns what comes
    return model.eval(), (images(4),)

def images(count):
    return torch.randn(count, 8, 10, 10, generator=torch.Generator().manual_seed(count)) + 0.5

def batches():
    return [images(40).numpy()]

def evaluate(predict):
    return {"size": float(np.abs(predict(images(16).numpy())[0]).mean())}
"""


def options(mine: Path) -> RunOptions:
    return RunOptions(
        calibration=CalibrationOptions(data=f"{mine}:batches"),
        precision=Precision.FLOAT32,
        metric=f"{mine}:evaluate",
    )


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture(scope="module")
def done(mine: Path) -> RunResult:
    return run_all(f"{mine}:make", mine.parent / "torch", options(mine))


def test_each_layer_says_method_and_errors_and_holds_the_pattern(done: RunResult) -> None:
    rows = [row for row in done.prune.weights if row.pruned]
    assert [row.method for row in rows] == ["admm"] * 3
    for row in rows:
        assert row.output_error is not None
        assert row.output_error.held_out is not None
        assert 0 < row.output_error.calibration < row.output_error.held_out < 0.5
    assert done.prune.calibration is not None
    assert (done.prune.calibration.samples, done.prune.calibration.held_out) == (40, 4)
    required = [check for check in done.export.pattern.checks if check.required]
    assert [check.violations for check in required] == [0, 0, 0]


def test_both_files_are_measured_and_compared_on_samples_that_no_weight_was_solved_with(
    done: RunResult,
) -> None:
    space: dict[str, Any] = {}
    exec(MINE, space)
    held_out = space["images"](40).numpy()[9::10]
    found, sizes = {}, []
    for name in ("dense", "sparse"):
        path = Path(done.folder, f"{name}.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        x = session.get_inputs()[0].name
        found[name] = session.run(None, {x: held_out})[0]
        measured = space["evaluate"](lambda images, s=session, x=x: s.run(None, {x: images}))
        sizes.append(measured["size"])
    metric = done.accuracy.metrics[0]
    assert (metric.dense, metric.sparse) == pytest.approx(tuple(sizes), rel=1e-5)
    assert sizes[0] != sizes[1]
    size = np.linalg.norm(found["dense"])
    (row,) = done.accuracy.held_out
    assert row.shape == found["dense"].shape
    assert row.relative_error == pytest.approx(
        np.linalg.norm(found["sparse"] - found["dense"]) / size, rel=1e-3
    )
    assert done.accuracy.inputs_are == "your example inputs"
    line = accuracy_and_speed(replace(done.accuracy, metrics=()), None)
    assert line is not None
    assert "samples (no metric)" in line.text
    page = Path(done.folder, "report.md").read_text()
    drift = page.partition("## What pruning did to the outputs")[2].splitlines()[2:4]
    assert drift[0].endswith("measured on held-out calibration samples")
    assert drift[1].endswith("measured on your example inputs")


def test_a_run_that_is_done_measures_nothing_again(done: RunResult, mine: Path) -> None:
    recorder = Recorder()
    folder = Path(done.folder)
    again = run_all(f"{mine}:make", folder, replace(options(mine), resume=True), recorder)
    assert recorder.did == []
    assert again.accuracy == done.accuracy


def test_notes_on_the_data_stand_in_the_record_and_are_said_once(tmp_path: Path) -> None:
    model = str(save(two_weights(), tmp_path / "model.onnx"))
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(40, 8, 6, 6)), y=[1])
    recorder = Recorder()
    options = RunOptions(calibration=CalibrationOptions(data=str(tmp_path / "x.npz")))
    _, result, _ = run_prune(model, tmp_path / "run", options, recorder)
    assert result.calibration is not None
    assert result.calibration.samples == 40
    assert [note.split(": ")[-1] for note in result.calibration.notes] == [
        f"{tmp_path / 'x.npz'} has 40 samples; --calibrate-samples allows 1024",
        "y is not an input of the model and is left out",
    ]
    assert not {*recorder.notes} & {*result.calibration.notes}
    lines = plain_text(render(prune_document(result)), width=200)
    assert all(lines.count(note) == 1 for note in result.calibration.notes)


_SMALL = Path(__file__).parents[1] / "support" / "small_model.py"


@pytest.mark.parametrize("is_file", [False, True], ids=["module", "file"])
def test_samples_count_alike_in_a_module_and_a_file(tmp_path: Path, is_file: bool) -> None:
    model, size = f"{_SMALL}:make", (3, 8, 8)
    if is_file:
        model, size = str(save(two_weights(), tmp_path / "m.onnx")), (8, 6, 6)
    x = np.random.default_rng(0).normal(0.3, size=(31, *size)).astype(np.float32)
    large = np.concatenate([x, x[5:25]])
    large[4] *= 1000

    def pruned(data: NDArray[np.float32] | None) -> PruneResult:
        options = RunOptions(selection=Selection(all_layers=True))
        if data is not None:
            np.savez(tmp_path / "x.npz", x=data)
            options = replace(options, calibration=CalibrationOptions(data=str(tmp_path / "x.npz")))
        return run_prune(model, tmp_path / "p", options)[1]

    found, blank, without = map(pruned, (large, np.zeros_like(x), None))
    assert found.calibration is not None
    assert found.calibration.held_out == 3
    _, copies, size_note = found.calibration.notes
    assert "20 of 51; 31" in copies
    assert size_note.startswith("calibration sample 5 is ")
    assert [w.kept_magnitude for w in blank.weights] == [w.kept_magnitude for w in without.weights]
    assert {w.method for w in blank.weights} == {"magnitude"}
