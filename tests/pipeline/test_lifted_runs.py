"""Runs with --lift: milder patterns end as 2:4 in sparse.onnx, and reports name the layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from support.onnx_models import model, save, two_weights, weights
from support.small_run import Recorder

from twofour.errors import BadInputError
from twofour.forecasting.kernels import product_times
from twofour.inputs.fits import stored_arrays
from twofour.main_job import run_all, run_export, run_prune
from twofour.pipeline.evidence_files import EvidenceFiles
from twofour.pipeline.forecasts import forecast_file
from twofour.pipeline.reporting import report_folder
from twofour.pipeline.validating import validate_path
from twofour.records.eligibility import VerdictName
from twofour.records.options import BudgetOptions, Precision, RunOptions
from twofour.records.weights import HARDWARE_PATTERN, Pattern, Selection

LIFT = RunOptions(pattern=Pattern(4, 6), lift=True, gpu="RTX 4090")
WIDE = """
import torch
class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.body = torch.nn.Linear(48, 388), torch.nn.Linear(388, 16384)
        self.own = torch.nn.Parameter(torch.ones(48, 48))
    def forward(self, x):
        return self.body(self.stem(x @ self.own))
def make():
    return Wide().eval(), (torch.randn(1, 48),)
"""


def run_of(source: str, folder: Path) -> tuple[str, RunOptions]:
    """One wide layer that gains, of a width that 6 does not divide, and a narrow one."""
    if source == "module":
        (folder / "wide.py").write_text(WIDE)
        return f"{folder / 'wide.py'}:make", replace(LIFT, precision=Precision.FLOAT32)
    nodes = [
        helper.make_node("MatMul", ["x", "stem.weight"], ["s"], name="stem"),
        helper.make_node("MatMul", ["s", "body.weight"], ["y"], name="body"),
    ]
    constants = {"stem.weight": weights(48, 388), "body.weight": weights(388, 16384)}
    return str(save(model(nodes, constants, inputs={"x": [1, 48]}), folder / "m.onnx")), LIFT


def outputs(path: Path, inputs: dict[str, Any]) -> Any:
    return onnxruntime.InferenceSession(str(path)).run(None, inputs)


@pytest.mark.parametrize("source", ["module", "file"])
def test_a_run_lifts_what_gains_and_leaves_the_rest_dense(source: str, tmp_path: Path) -> None:
    name, options = run_of(source, tmp_path)
    folder = tmp_path / "run"
    result = run_all(name, folder, options)
    assert result.prune.pattern == Pattern(4, 6)
    assert {r.weight.layer for r in result.prune.weights if r.pruned} == {"body"}
    (check,) = (check for check in result.export.pattern.checks if check.required)
    assert result.export.pattern.pattern == HARDWARE_PATTERN
    assert (check.layer, sorted(check.shape)) == ("body", [520, 16384])  # 65 groups of 6, each 8
    rows = {v.layer: (v.verdict, v.pattern_holds) for v in result.report.verdicts}
    assert rows["body"] == (VerdictName.ELIGIBLE, True)
    assert result.report.notes[-1].startswith("--lift: 1 layer that should gain")
    expected = product_times("RTX 4090", "FP16", 1, 16384, 388, pattern="4:6")
    for report in (result.report, report_folder(folder, "RTX 4090")):
        assert report.forecast is not None
        (row,) = (row for row in report.forecast.layers if row.can_run_sparse)
        assert (row.layer, row.gain) == ("body", expected.gain)
        assert report.forecast.sentence.endswith("; TensorRT runs 4:6 as 2:4 after --lift")
    for file, is_lifted in (("sparse", True), ("pruned", False)):
        files = EvidenceFiles(onnx=folder / f"{file}.onnx")
        cell = forecast_file(files, None, ("RTX 4090", HARDWARE_PATTERN))
        assert ("; the file was lifted: gains" in cell.sentence) is is_lifted
    for file, pattern in (("sparse.onnx", HARDWARE_PATTERN), ("pruned.onnx", Pattern(4, 6))):
        judged = validate_path(folder / file, None, Selection())
        assert (judged.pattern, judged.broken) == (pattern, ())
    inputs = dict(stored_arrays(folder / "inputs.npz"))
    mild, lifted = (outputs(folder / f"{name}.onnx", inputs) for name in ("pruned", "sparse"))
    np.testing.assert_allclose(mild, lifted, rtol=1e-4, atol=1e-4)
    again = Recorder()
    assert run_all(name, folder, options, again) == result
    assert again.did == []


def test_a_file_that_was_pruned_before_is_lifted_by_export(tmp_path: Path) -> None:
    name, options = run_of("file", tmp_path)
    unlifted = replace(options, lift=False, gpu=None, selection=Selection(all_layers=True))
    run_prune(name, tmp_path / "pruned", unlifted)
    mild = str(tmp_path / "pruned" / "sparse.onnx")
    lift = replace(LIFT, pattern=HARDWARE_PATTERN)
    _, exported, _ = run_export(mild, tmp_path / "lifted", lift)
    assert exported.onnx.file == "sparse.onnx"
    judged = validate_path(tmp_path / "lifted" / "sparse.onnx", None, Selection())
    assert {check.layer: check.holds for check in judged.checks} == {"stem": False, "body": True}
    with pytest.raises(BadInputError, match="no weight of a milder pattern that gains"):
        run_export(name, tmp_path / "dense", lift)
    with pytest.raises(BadInputError, match="--gpu of export is for --lift"):
        run_export(name, tmp_path / "gpu", replace(lift, lift=False))


def test_a_budget_measures_layers_before_they_are_lifted(tmp_path: Path) -> None:
    name, options = run_of("file", tmp_path)
    result = run_all(name, tmp_path / "run", replace(options, budget=BudgetOptions(share=0.5)))
    assert result.sensitivity is not None
    assert [x.layer for x in result.export.pattern.checks if x.required] == ["body"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "/m.onnx: --lift finds no weight of 4:6 that gains on RTX 4090"),
        ({"pattern": HARDWARE_PATTERN}, "--lift makes 2:4 of 4:6 and 6:8, not of 2:4"),
        ({"pattern": Pattern(1, 8)}, "--lift makes 2:4 of 4:6 and 6:8, not of 1:8"),
        ({"gpu": None}, "--lift needs the GPU that layers gain on"),
        ({"gpu": "A1000000"}, "unknown GPU 'A1000000'"),
    ],
)
def test_a_run_without_a_layer_to_lift_ends_before_pruning(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = save(two_weights(), tmp_path / "m.onnx")
    with pytest.raises(BadInputError, match=said):
        run_all(str(path), tmp_path / "run", replace(LIFT, **changed))
    assert not (tmp_path / "run" / "prune.json").exists()
    assert (tmp_path / "run" / "dense.onnx").exists() == (not changed)
