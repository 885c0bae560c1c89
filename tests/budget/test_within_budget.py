"""prune-export-build with a budget: the limit holds for the model that comes out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.mlp_onnx import save_mlp
from support.small_run import Recorder

from twofour.engines.onnxruntime.session import CannotRunError
from twofour.errors import BuildFailedError, PatternBrokenError
from twofour.jobs import run_all
from twofour.records.options import (
    BudgetOptions,
    RunOptions,
    SideBySide,
)
from twofour.records.run import RunResult, SensitivityResult
from twofour.records.weights import ReasonCode, Selection
from twofour.store import read_record

METRIC = f"{Path(__file__).parents[1] / 'support' / 'mlp_onnx.py'}:agreement"
OPTIONS = RunOptions(
    selection=Selection(all_layers=True),
    metric=METRIC,
    engine="onnxruntime",
    budget=BudgetOptions(max_drop=8.0),
    side_by_side=SideBySide(jobs=1),
)


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, RunResult]:
    """Model, run folder and result of one run, shared by the tests that only look at it."""
    folder = tmp_path_factory.mktemp("within")
    model = save_mlp(folder / "mlp.onnx")
    return model, folder / "run", run_all(str(model), folder / "run", OPTIONS)


def _dense(result: RunResult) -> list[str]:
    return [row.weight.layer for row in result.prune.weights if not row.pruned]


def _drop(result: RunResult) -> float:
    metric = result.accuracy.metrics[0]
    return metric.dense - metric.sparse


@pytest.mark.usefixtures("measured_in_one_process")
def test_one_command_measures_chooses_prunes_and_holds_the_limit(
    within: tuple[Path, Path, RunResult],
) -> None:
    model, folder, result = within
    chosen = read_record(SensitivityResult, folder / "sensitivity.json")
    assert chosen.budget is not None
    assert 0 < _drop(result) <= 8.0
    assert _drop(result) == pytest.approx(chosen.budget.chosen.loss)
    assert _dense(result) == [row.layer for row in chosen.layers if not row.pruned]
    assert 0 < len(_dense(result)) < 4
    reasons = [row.reasons[0] for row in result.prune.weights if not row.pruned]
    assert all(r.code is ReasonCode.EXCLUDED for r in reasons)
    assert all(r.message.startswith("left dense by") for r in reasons)
    page = (folder / "report.html").read_text()
    assert "What each layer loses" in page
    again = Recorder()
    resumed = replace(OPTIONS, resume=True)
    assert run_all(str(model), folder, resumed, again).accuracy == result.accuracy
    assert again.did == []


HARSH = '''
import sys
from support.mlp_onnx import agreement

def harsh(predict):
    """As the workers see it; in the process of the run itself all is lost below 90."""
    found = agreement(predict)
    return 0.0 if found < 90.0 and "pytest" in sys.modules else found
'''


def test_where_the_model_that_comes_out_falls_further_layers_are_taken_back(
    tmp_path: Path,
) -> None:
    (tmp_path / "harsh.py").write_text(HARSH)
    metric, budget = f"{tmp_path / 'harsh.py'}:harsh", BudgetOptions(max_drop=50.0)
    options = replace(OPTIONS, metric=metric, budget=budget)
    model, folder, recorder = str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run", Recorder()
    result = run_all(model, folder, options, recorder)
    assert _drop(result) <= 10.0
    chosen = read_record(SensitivityResult, folder / "sensitivity.json")
    by_budget = [row.layer for row in chosen.layers if not row.pruned]
    assert set(by_budget) < set(_dense(result))
    assert any("1 layer more left" in note for note in recorder.notes)
    again = Recorder()
    resumed = replace(options, resume=True)
    assert run_all(model, folder, resumed, again).accuracy == result.accuracy
    assert again.did == []


@pytest.mark.usefixtures("measured_in_one_process")
def test_where_no_layer_holds_the_limit_a_gate_is_not_met(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "from support.mlp_onnx import evaluate\n"
        "def score(predict):\n    return -1e6 * evaluate(predict)['error'] ** 2\n"
    )
    options = replace(
        OPTIONS, metric=f"{tmp_path / 'score.py'}:score", budget=BudgetOptions(max_drop=1e-9)
    )
    with pytest.raises(PatternBrokenError, match="--max-drop 1e-09"):
        run_all(str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run", options)


@pytest.mark.usefixtures("measured_in_one_process")
def test_a_pruned_model_that_does_not_run_any_more_is_not_pruned_less_and_less(
    within: tuple[Path, Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        if path == tmp_path / "run" / "sparse.onnx":
            raise CannotRunError("it needs about 9 GB of memory, 1 are free")

    monkeypatch.setattr("twofour.pipeline.checks.refuse_too_large", refuse)
    recorder = Recorder()
    with pytest.raises(BuildFailedError, match="it needs about 9 GB of memory"):
        run_all(str(within[0]), tmp_path / "run", OPTIONS, recorder)
    assert not any("more left" in note for note in recorder.notes)


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


@pytest.mark.usefixtures("measured_in_one_process")
def test_a_torch_model_is_pruned_within_its_budget_in_one_command(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    options = RunOptions(
        metric=f"{tmp_path / 'small.py'}:agreement",
        engine="onnxruntime",
        budget=BudgetOptions(max_drop=0.1),
        side_by_side=SideBySide(jobs=1),
    )
    folder = tmp_path / "run"
    result = run_all(f"{tmp_path / 'small.py'}:make", folder, options)
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
