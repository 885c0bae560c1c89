"""Every layer alone, sets of them, and the set that a budget chooses, on a small ONNX file."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.mlp_onnx import NAMES, save_mlp
from support.small_run import Recorder

from twofour.budget import study
from twofour.budget.measuring import output_change
from twofour.engines.onnxruntime.session import OrtSession
from twofour.errors import BadInputError
from twofour.forecasting import model_forecast
from twofour.forecasting.kernels import times_of_products
from twofour.graph.opened import open_onnx
from twofour.inputs.fits import stored_arrays
from twofour.jobs import run_all, run_prune, run_sensitivity
from twofour.pruning.onnx import prune_onnx
from twofour.pruning.selection import read_layers
from twofour.records.eligibility import ShareUnit
from twofour.records.forecast import GpuKind, ProductTimes
from twofour.records.options import (
    BudgetOptions,
    BuildOptions,
    CalibrationOptions,
    LossKind,
    RunOptions,
    ShapeProfile,
    SideBySide,
)
from twofour.records.run import LayerCost, SensitivityResult
from twofour.records.weights import HARDWARE_PATTERN, Selection
from twofour.store import read_record

METRIC = f"{Path(__file__).parents[1] / 'support' / 'mlp_onnx.py'}:evaluate"
AGREEMENT = METRIC.replace(":evaluate", ":agreement")
SHAPES = ShapeProfile(input="x", min=(4096, 16), opt=(4096, 16), max=(4096, 16))
ALL = Selection(all_layers=True)  # they are smaller than what is pruned by default
OPTIONS = RunOptions(
    selection=ALL,
    metric=AGREEMENT,
    budget=BudgetOptions(max_drop=5.0),
    side_by_side=SideBySide(jobs=1),
)


pytestmark = pytest.mark.usefixtures("measured_in_one_process")


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SensitivityResult]:
    """One study, shared by the tests that only look at it."""
    folder = tmp_path_factory.mktemp("study")
    model = save_mlp(folder / "mlp.onnx")
    return run_sensitivity(str(model), folder / "run", OPTIONS)


def _row(result: SensitivityResult, layer: str) -> LayerCost:
    return next(row for row in result.layers if row.layer == layer)


def test_a_layer_alone_is_the_model_with_that_layer_alone_pruned(
    studied: tuple[Path, SensitivityResult], tmp_path: Path
) -> None:
    folder, result = studied
    dense = open_onnx(folder / "dense.onnx")
    inputs = stored_arrays(folder / "inputs.npz")
    before = OrtSession(folder / "dense.onnx", threads=1).outputs(inputs)
    for layer in NAMES:
        others = tuple(name for name in NAMES if name != layer)
        alone = tmp_path / f"{layer}.onnx"
        prune_onnx(dense, alone, HARDWARE_PATTERN, replace(ALL, exclude=others))
        after = OrtSession(alone, threads=1).outputs(inputs)
        measured = _row(result, layer).alone
        assert measured is not None
        assert measured.outputs == output_change(before, after)  # one batch: the names do not count
        assert measured.outputs is not None
        assert measured.outputs > 0


def test_losses_are_the_fall_of_the_figure_and_the_robust_layer_loses_least(
    studied: tuple[Path, SensitivityResult],
) -> None:
    _, result = studied
    assert (result.loss, result.figure, result.unit) == (
        LossKind.METRIC, "agreement", ShareUnit.MULTIPLY_ADDS,
    )  # fmt: skip
    whole = result.dense.metrics["agreement"]
    for row in result.layers:
        assert row.alone is not None
        assert row.loss == whole - row.alone.metrics["agreement"]
    errors = {r.layer: r.alone.outputs for r in result.layers if r.alone and r.alone.outputs}
    assert min(errors, key=lambda layer: errors[layer]) == "robust"
    assert [row.saves for row in result.layers] == [16 * 32 / 2, 512, 512, 32 * 8 / 2]


def test_the_chosen_set_was_measured_and_holds_the_budget(
    studied: tuple[Path, SensitivityResult],
) -> None:
    _, result = studied
    assert result.budget is not None
    chosen = result.budget.chosen
    assert chosen.loss is not None
    assert chosen.loss <= 5.0
    assert chosen.measured.metrics["agreement"] == 100.0 - chosen.loss
    everything = result.pareto[-1]
    assert (everything.layers, everything.share, everything.dense) == (4, 1.0, ())
    assert everything.loss is not None
    assert everything.loss > 5.0
    assert "robust" not in chosen.dense
    assert chosen.dense
    assert all((row.pruned is False) == (row.layer in chosen.dense) for row in result.layers)
    better = [t for t in result.budget.trials if t.share > chosen.share]
    assert all(t.loss is not None and t.loss > 5.0 for t in better)


def test_the_list_of_layers_leaves_dense_what_the_budget_does(
    studied: tuple[Path, SensitivityResult],
) -> None:
    folder, result = studied
    found = read_layers(folder / "layers.txt", Selection())
    assert result.budget is not None
    assert set(found.exclude) == set(result.budget.chosen.dense)
    assert "allows" in (folder / "sensitivity.html").read_text()
    assert "robust" in (folder / "sensitivity.md").read_text()
    assert read_record(SensitivityResult, folder / "sensitivity.json") == result


def test_a_limit_is_of_the_metric_whatever_layers_are_judged_by(
    studied: tuple[Path, SensitivityResult], tmp_path: Path
) -> None:
    folder, _ = studied
    shutil.copytree(folder, tmp_path / "run")
    options = replace(OPTIONS, budget=replace(OPTIONS.budget, loss=LossKind.OUTPUTS))
    _, result = run_sensitivity(str(folder.parent / "mlp.onnx"), tmp_path / "run", options)
    assert result.loss is LossKind.OUTPUTS
    for row in result.layers:
        assert row.alone is not None
        assert row.loss == row.alone.outputs
    assert result.budget is not None
    for one in (result.budget.chosen, *result.budget.trials):
        assert one.loss == 100.0 - one.measured.metrics["agreement"]
    assert result.budget.chosen.loss is not None
    assert 0 < result.budget.chosen.loss <= 5.0


def test_a_study_that_is_resumed_measures_nothing_again_and_another_budget_does(
    tmp_path: Path,
) -> None:
    model, folder = str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run"
    _, first = run_sensitivity(model, folder, OPTIONS)
    recorder, resumed = Recorder(), replace(OPTIONS, resume=True)
    assert run_sensitivity(model, folder, resumed, recorder)[1] == first
    assert "sensitivity" not in recorder.did
    tighter = replace(resumed, budget=BudgetOptions(max_drop=2.0), side_by_side=SideBySide(jobs=2))
    _, second = run_sensitivity(model, folder, tighter, recorder)
    assert "sensitivity" in recorder.did
    assert second.layers[0].alone == first.layers[0].alone
    assert second.budget is not None
    assert second.budget.chosen.loss is not None
    assert second.budget.chosen.loss <= 2.0
    again = replace(tighter, resume=False, side_by_side=SideBySide(jobs=1))
    _, fresh = run_sensitivity(model, folder, again, recorder)
    assert fresh == second


def test_a_metric_that_changed_is_measured_again(tmp_path: Path) -> None:
    code = tmp_path / "score.py"
    code.write_text("def score(predict):\n    return 1.0\n")
    model, folder = str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run"
    options = replace(OPTIONS, metric=f"{code}:score", budget=BudgetOptions())
    _, first = run_sensitivity(model, folder, options)
    assert {row.loss for row in first.layers} == {0.0}
    code.write_text("def score(predict):\n    return 2.0\n")
    assert run_sensitivity(model, folder, options)[1].dense.metrics == {"score": 2.0}


def test_without_a_metric_the_outputs_count_and_a_share_is_reached_for_the_least_loss(
    tmp_path: Path,
) -> None:
    options = RunOptions(
        selection=ALL, budget=BudgetOptions(share=0.6), side_by_side=SideBySide(jobs=1)
    )
    _, result = run_sensitivity(str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run", options)
    assert result.loss is LossKind.OUTPUTS
    assert result.budget is not None
    chosen = result.budget.chosen
    assert chosen.share >= 0.6
    assert chosen.loss == chosen.measured.outputs
    assert "robust" not in chosen.dense


def test_a_figure_that_is_better_when_lower_falls_where_it_grows(tmp_path: Path) -> None:
    budget = BudgetOptions(max_drop=0.1, figure="error", lower_is_better=True)
    options = replace(OPTIONS, metric=METRIC, budget=budget)
    _, result = run_sensitivity(str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run", options)
    assert all(row.loss is not None and row.loss > 0 for row in result.layers)
    assert result.budget is not None
    chosen = result.budget.chosen
    assert chosen.layers > 0
    assert chosen.measured.metrics["error"] - result.dense.metrics["error"] == chosen.loss
    assert chosen.loss is not None
    assert chosen.loss <= 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": None}, "--max-drop is in the units of your metric, and none is given"),
        ({"metric": METRIC}, "the metric gives 2 figures: agreement, error"),
        (
            {"metric": METRIC, "budget": BudgetOptions(max_drop=1.0, figure="f1")},
            "the metric gives no figure 'f1'",
        ),
        ({"metric": METRIC.replace("evaluate", "broken")}, "no such data"),
        (
            {"metric": None, "budget": BudgetOptions(loss=LossKind.METRIC)},
            "--loss metric needs a metric",
        ),
        ({"budget": BudgetOptions(profile="nowhere")}, "nowhere does not exist"),
        ({"gpu": "A1000"}, "unknown GPU 'A1000'"),
        ({"dense_reference": "mlp.onnx"}, "with --dense-reference the model is pruned already"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = replace(OPTIONS, **changes)  # type: ignore[arg-type]  # fields by name
    with pytest.raises(BadInputError) as caught:
        run_sensitivity(str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run", options)
    assert message in caught.value.message


def test_calibration_data_gives_errors_of_layers_and_is_what_outputs_are_compared_on(
    tmp_path: Path,
) -> None:
    data = np.random.default_rng(3).normal(size=(160, 16)).astype(np.float16)
    np.savez(tmp_path / "data.npz", x=data)
    options = RunOptions(
        selection=ALL,
        calibration=CalibrationOptions(data=str(tmp_path / "data.npz")),
        side_by_side=SideBySide(jobs=1),
    )
    _, result = run_sensitivity(str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run", options)
    assert result.method == "admm"
    for row in result.layers:
        assert row.output_error is not None
        assert row.output_error.held_out is not None
    measured_on = stored_arrays(tmp_path / "run/sensitivity/stages/measured-on.npz")
    batches = [measured_on[f"{i}:x"] for i in range(len(measured_on))]
    np.testing.assert_array_equal(np.concatenate(batches), data[9::10])
    assert any("held-out calibration samples" in note for note in result.notes)
    assert "fitted after" in result.notes[-1]


def test_a_run_folder_is_studied_as_the_run_was(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((3, 16), np.float16))
    model, folder = str(save_mlp(tmp_path / "mlp.onnx")), tmp_path / "run"
    run_prune(model, folder, RunOptions(selection=ALL, inputs=str(tmp_path / "x.npz")))
    shown, result = run_sensitivity(
        str(folder), None, RunOptions(selection=ALL, side_by_side=SideBySide(jobs=1))
    )
    assert shown == folder
    assert result.source == model
    assert stored_arrays(folder / "inputs.npz")["x"].shape == (3, 16)
    assert (folder / "layers.txt").is_file()


STRICT = """
from support.mlp_onnx import agreement

def strict(predict):
    found = agreement(predict)
    if 50 < found < 100:
        raise ValueError(f"{found} is too low")
    return found
"""


def test_a_layer_whose_loss_cannot_be_measured_stays_dense_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strict.py").write_text(STRICT)
    monkeypatch.setenv("HOME", str(tmp_path))  # which the process that measures does not know
    options = replace(OPTIONS, metric="~/strict.py:strict")
    model = str(save_mlp(tmp_path / "mlp.onnx"))
    _, result = run_sensitivity(model, tmp_path / "run", options)
    broken = [row for row in result.layers if row.loss is None]
    assert broken
    for row in broken:
        why = row.why_dense or ""
        assert why.startswith("what pruning it loses could not be measured: ")
        assert "is too low" in why
        assert row.pruned is False


def test_times_of_a_build_decide_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"first": 0.3, "middle": -0.1, "head": 0.1}
    monkeypatch.setattr(study, "read_times_saved", lambda _: times)
    budget = BudgetOptions(profile="runs/built", share=1.0)
    model = str(save_mlp(tmp_path / "mlp.onnx"))
    _, result = run_sensitivity(model, tmp_path / "run", replace(OPTIONS, budget=budget))
    assert result.unit is ShareUnit.MILLISECONDS
    assert [row.saves for row in result.layers] == pytest.approx([0.3, 0.0, 0.0, 0.1])
    assert "is no faster" in (_row(result, "middle").why_dense or "")
    assert "runs/built has no" in (_row(result, "robust").why_dense or "")
    assert result.budget is not None
    assert result.budget.chosen.layers == 2
    monkeypatch.setattr(study, "read_times_saved", lambda _: {"other": 1.0})
    with pytest.raises(BadInputError, match="none of its 1"):
        run_sensitivity(model, tmp_path / "run", replace(OPTIONS, budget=budget))


def test_a_forecast_decides_what_is_saved_where_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense_and_sparse_us = {(32, 16): (500, 200), (32, 32): (200, 300), (8, 32): (1000, 900)}

    def timed(
        gpu: GpuKind, precision: str, shapes: Sequence[tuple[int, int, int]]
    ) -> tuple[ProductTimes, ...]:
        """What the forecast says, with these times where a layer has such a size."""
        rows = []
        for row in times_of_products(gpu, precision, shapes):
            size = row.outputs, row.reduction
            dense, sparse = dense_and_sparse_us.get(size, (row.dense_us, row.sparse_us))
            rows.append(replace(row, dense_us=dense, sparse_us=sparse, gain=dense / sparse))
        return tuple(rows)

    monkeypatch.setattr(model_forecast, "times_of_products", timed)
    options = replace(OPTIONS, gpu="A100", budget=BudgetOptions(share=1.0))
    options = replace(options, build=BuildOptions(shapes=(SHAPES,)))
    model = str(save_mlp(tmp_path / "mlp.onnx"))

    def study() -> SensitivityResult:
        return run_sensitivity(model, tmp_path / "run", options)[1]

    found = study()
    assert found.unit is ShareUnit.FORECAST
    assert [row.saves for row in found.layers] == pytest.approx([0.3, 0, 0, 0.1])
    assert "forecast: no gain" in (_row(found, "middle").why_dense or "")
    assert found.budget is not None
    assert found.budget.chosen.layers == 2
    assert "all layers pruned: expected 1." in found.notes[0]
    assert "is a forecast for" in found.notes[1]
    page = (tmp_path / "run" / "sensitivity.md").read_text()
    assert "possible saving (forecast)" in page
    assert "saves (forecast)" in page
    dense_and_sparse_us[32, 16] = dense_and_sparse_us[8, 32] = (200, 300)
    found = study()
    assert not any(row.saves for row in found.layers), "no zeros are counted instead"
    assert [row.alone for row in found.layers] == [None] * 4, "nothing is measured in vain"
    page = (tmp_path / "run" / "sensitivity.md").read_text()
    assert "**by the forecast no layer gains on A100 80GB PCIe**" in page
    for budget in (options.budget, BudgetOptions(max_drop=50.0)):
        with pytest.raises(
            BadInputError, match="by the forecast no layer gains on A100 80GB"
        ) as no:
            run_all(model, tmp_path / "run", replace(options, budget=budget, engine="onnxruntime"))
        assert "leave --gpu out" in str(no.value.hint)
