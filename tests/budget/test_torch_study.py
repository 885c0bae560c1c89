"""A torch model within its budget in one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from twofour.jobs import run_all
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
    assert rows["0"].reasons[0].message.startswith("left dense by")
