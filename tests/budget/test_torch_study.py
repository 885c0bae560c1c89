"""A torch model within its budget in one command; and a study that is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.mlp_onnx import save_mlp

from twofour.main_job import run_all, run_sensitivity
from twofour.records.options import BudgetOptions, RunOptions, SideBySide
from twofour.records.run import RunResult, SensitivityResult
from twofour.store import read_record

pytestmark = pytest.mark.usefixtures("measured_in_one_process")
SMALL = """
import numpy as np
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                        nn.Linear(64, 16, bias=False))
    with torch.no_grad():
        net[2].weight.view(64, 16, 4)[..., 2:] *= 1e-2
    return net.eval(), (torch.randn(64, 32),)

def agreement(predict):
    torch.manual_seed(1)
    x = torch.randn(200, 32)
    found = np.asarray(predict(x.numpy())[0], np.float32).argmax(1)
    return float((found == make()[0].half().float()(x).argmax(1).numpy()).mean())
"""


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, RunResult]:
    """Model, run folder and result of one run within a budget."""
    folder = tmp_path_factory.mktemp("within")
    (folder / "small.py").write_text(SMALL)
    options = RunOptions(
        metric=f"{folder / 'small.py'}:agreement",
        engine="onnxruntime",
        budget=BudgetOptions(max_drop=0.1),
        side_by_side=SideBySide(jobs=1),
    )
    model = f"{folder / 'small.py'}:make"
    return model, folder / "run", run_all(model, folder / "run", options)


@pytest.mark.slow
def test_a_torch_model_is_pruned_within_its_budget_in_one_command(
    within: tuple[str, Path, RunResult],
) -> None:
    _, folder, result = within
    metric = result.accuracy.metrics[0]
    assert metric.dense == 1.0
    assert metric.dense - metric.sparse <= 0.1
    chosen = read_record(SensitivityResult, folder / "sensitivity.json")
    assert chosen.pareto[-1].loss is not None
    assert chosen.pareto[-1].loss > 0.1
    rows = {row.weight.layer: row for row in result.prune.weights}
    assert rows["2"].pruned
    assert not rows["0"].pruned
    assert rows["0"].reasons[0].message.startswith("left dense by the budget: it loses")


KILLED = """
import sys
from pathlib import Path
from twofour.main_job import run_sensitivity
from twofour.records.options import BudgetOptions, RunOptions, SideBySide

if __name__ == "__main__":
    options = RunOptions(metric=sys.argv[3], side_by_side=SideBySide(jobs=1))
    run_sensitivity(sys.argv[1], Path(sys.argv[2]), options)
"""
SLOW_SCORE = """
import time
from support.mlp_onnx import agreement

def score(predict):
    time.sleep(0.5)
    return agreement(predict)
"""


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_behind_its_last_measurement(tmp_path: Path) -> None:
    model, folder = str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run"
    (tmp_path / "killed.py").write_text(KILLED)
    (tmp_path / "score.py").write_text(SLOW_SCORE)
    metric = f"{tmp_path / 'score.py'}:score"
    here = Path(__file__).parents[1]
    path = os.pathsep.join((str(here), str(here.parent / "src"), os.environ.get("PYTHONPATH", "")))
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "killed.py"), model, str(folder), metric],
        env={**os.environ, "PYTHONPATH": path},
    )
    kept = folder / "sensitivity" / "measured"
    deadline = time.monotonic() + 120
    while len(list(kept.glob("*.json"))) < 3 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.name: path.stat().st_mtime_ns for path in kept.glob("*.json")}
    assert 3 <= len(before) < 6
    options = RunOptions(metric=metric, side_by_side=SideBySide(jobs=1))
    _, result = run_sensitivity(model, folder, options)
    after = {path.name: path.stat().st_mtime_ns for path in kept.glob("*.json")}
    assert before.items() < after.items()
    assert len(result.layers) == 4
    assert json.loads((folder / "sensitivity.json").read_text())["figure"] == "score"
