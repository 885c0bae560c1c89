"""prune-export-build with a budget: the limit holds for the model that comes out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.mlp_onnx import save_mlp
from support.small_run import Recorder

from twofour.budget.choosing import no_layer_within
from twofour.engines.onnxruntime.session import CannotRunError
from twofour.errors import BadInputError, BuildFailedError, PatternBrokenError
from twofour.jobs import run_all, run_sensitivity
from twofour.pruning.selection import read_layers
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


@pytest.mark.usefixtures("measured_in_one_process")
def test_the_list_of_a_study_gives_the_same_model(
    within: tuple[Path, Path, RunResult], tmp_path: Path
) -> None:
    model, other, second = within
    folder = tmp_path / "run"
    run_sensitivity(str(model), folder, OPTIONS)
    by_list = read_layers(folder / "layers.txt", Selection())
    listed = replace(OPTIONS, budget=BudgetOptions(), selection=by_list)
    first = run_all(str(model), folder, listed)
    assert _dense(first) == _dense(second)
    assert (folder / "sparse.onnx").read_bytes() == (other / "sparse.onnx").read_bytes()
    said = [row.reasons[0].message for row in first.prune.weights if not row.pruned]
    assert all("layers.txt line" in message for message in said)


def test_where_the_last_layer_does_not_hold_the_error_says_what_the_model_lost(
    within: tuple[Path, Path, RunResult],
) -> None:
    chosen = read_record(SensitivityResult, within[1] / "sensitivity.json")
    assert "the model loses 8.500" in no_layer_within(chosen, chosen.layers[1], 8.5).message


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


def test_a_drop_without_a_metric_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    options = replace(OPTIONS, metric=None)
    recorder = Recorder()
    with pytest.raises(BadInputError, match="--max-drop is in"):
        run_all(str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run", options, recorder)
    assert recorder.did == []


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
