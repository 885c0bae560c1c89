"""A whole run with calibration data: what its records and its page say of the method, the errors
and the metric."""

from __future__ import annotations

import re
from pathlib import Path

import onnxruntime
import pytest
from support.small_run import Recorder

from twofour.main_job import run_all
from twofour.records.options import CalibrationOptions, Precision, RunOptions
from twofour.records.run import RunResult
from twofour.reports.eligibility_words import accuracy_and_speed, change_words

MINE = """
import numpy as np, torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 16))
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


def test_the_metric_is_that_of_the_dense_and_the_pruned_file(done: RunResult) -> None:
    space: dict[str, object] = {}
    exec(MINE, space)
    evaluate = space["evaluate"]
    assert callable(evaluate)
    found = {}
    for name in ("dense", "sparse"):
        path = Path(done.folder, f"{name}.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        x = session.get_inputs()[0].name
        found[name] = evaluate(lambda images, s=session, x=x: s.run(None, {x: images}))["size"]
    metric = done.accuracy.metrics[0]
    assert (metric.dense, metric.sparse) == pytest.approx(tuple(found.values()), rel=1e-5)
    assert len({*found.values()}) == 2


def test_summary_and_page_say_it(done: RunResult) -> None:
    metric = done.accuracy.metrics[0]
    line = accuracy_and_speed(done.accuracy, None)
    assert line is not None
    assert re.search(r"size [\d.]+ → [\d.]+ \(", line)
    page = Path(done.folder, "report.md").read_text()
    assert page.splitlines()[2].startswith("**Accuracy: size ")
    assert "## What pruning did to each layer" in page
    assert "| method | output error | held out |" in page
    assert change_words(metric) in page


def test_a_run_that_is_done_measures_nothing_again(done: RunResult, mine: Path) -> None:
    recorder = Recorder()
    folder = Path(done.folder)
    again = run_all(f"{mine}:make", folder, options(mine), recorder)
    assert recorder.did == []
    assert again.accuracy == done.accuracy
