"""A whole run with calibration data, of a module and of an ONNX file: what its records and its
page say of the method, the errors, the repair and the metric before and after it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from test_run import Recorder

from twofour.pipeline.run import run_all, run_prune
from twofour.records.options import CalibrationOptions, MethodOptions, Precision, RunOptions
from twofour.records.run import RunResult
from twofour.reports.shipping import shipping_line

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


def options(mine: Path, *, metric: bool = True, repair: bool | None = True) -> RunOptions:
    return RunOptions(
        calibration=CalibrationOptions(data=f"{mine}:batches"),
        method=MethodOptions(repair=repair),
        precision=Precision.FLOAT32,
        metric=f"{mine}:evaluate" if metric else None,
    )


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture(scope="module")
def of_module(mine: Path) -> RunResult:
    return run_all(f"{mine}:make", mine.parent / "torch", options(mine))


@pytest.fixture(scope="module")
def of_file(mine: Path, of_module: RunResult) -> RunResult:
    dense = Path(of_module.folder, "dense.onnx")
    return run_all(str(dense), mine.parent / "onnx", options(mine))


@pytest.fixture(params=["module", "file"])
def done(request: pytest.FixtureRequest, of_module: RunResult, of_file: RunResult) -> RunResult:
    return of_module if request.param == "module" else of_file


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


def test_the_metric_is_that_of_the_dense_the_one_shot_and_the_repaired_file(
    done: RunResult,
) -> None:
    space: dict[str, object] = {}
    exec(MINE, space)
    evaluate = space["evaluate"]
    assert callable(evaluate)
    found = {}
    for name in ("dense", "stages/one-shot", "sparse"):
        path = Path(done.folder, f"{name}.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        x = session.get_inputs()[0].name
        found[name] = evaluate(lambda images, s=session, x=x: s.run(None, {x: images}))["size"]
    metric = done.accuracy.metrics[0]
    assert metric.one_shot is not None
    assert (metric.dense, metric.one_shot, metric.sparse) == pytest.approx(
        tuple(found.values()), rel=1e-5
    )
    assert len({*found.values()}) == 3


def test_one_shot_is_the_model_that_no_repair_leaves(
    of_module: RunResult, of_file: RunResult, mine: Path
) -> None:
    plain = options(mine, metric=False, repair=False)
    folder, _, _ = run_prune(f"{mine}:make", mine.parent / "torch-plain", plain)
    kept = load_file(Path(of_module.folder, "stages", "one-shot.safetensors"))
    tensors = load_file(folder / "weights.safetensors")
    assert kept.keys() == tensors.keys()
    assert all(torch.equal(kept[name], tensors[name]) for name in kept)
    assert not (folder / "stages" / "one-shot.safetensors").exists()
    dense = Path(of_module.folder, "dense.onnx")
    folder, _, _ = run_prune(str(dense), mine.parent / "onnx-plain", plain)
    one_shot = Path(of_file.folder, "stages", "one-shot.onnx")
    assert _constants(folder / "sparse.onnx") == _constants(one_shot)


def _constants(path: Path) -> dict[str, bytes]:
    model = onnx.load(path)
    return {t.name: onnx.numpy_helper.to_array(t).tobytes() for t in model.graph.initializer}


def test_summary_and_page_say_it(done: RunResult) -> None:
    metric, repair = done.accuracy.metrics[0], done.prune.repair
    assert repair is not None
    assert repair.taken is not None
    line = shipping_line(done.accuracy, None, repair)
    assert line is not None
    assert re.search(r"size [\d.]+ dense, [\d.]+ one-shot, [\d.]+ repaired \(", line)
    page = Path(done.folder, "report.md").read_text()
    assert page.splitlines()[2].startswith("**worth shipping: not known yet: size ")
    assert "## What pruning did to each layer" in page
    assert "| method | output error | held out |" in page
    assert f"repair: {repair.taken.value} of " in page
    assert f"one-shot {metric.one_shot:.4g}, repaired {metric.sparse:.4g}" in page
    assert "Output error of each pruned layer" in Path(done.folder, "report.html").read_text()


def test_a_run_that_is_done_measures_nothing_again(of_module: RunResult, mine: Path) -> None:
    recorder = Recorder()
    folder = Path(of_module.folder)
    again = run_all(f"{mine}:make", folder, options(mine), recorder)
    assert recorder.did == []
    assert again.accuracy == of_module.accuracy


def test_without_a_metric_the_summary_tells_the_error_of_the_outputs(
    of_module: RunResult,
) -> None:
    repair = of_module.prune.repair
    assert repair is not None
    line = shipping_line(replace(of_module.accuracy, metrics=()), None, repair)
    assert line is not None
    assert "of what tells held-out samples apart in the outputs, pruning loses " in line
    assert " one-shot, " in line
