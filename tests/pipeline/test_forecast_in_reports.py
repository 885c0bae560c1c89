"""A GPU that is named, or that a build names: runs and reports have the forecast for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from support import onnx_models as om
from support.small_run import Recorder
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.jobs import run_all
from twofour.pipeline.evidence_files import EvidenceFiles
from twofour.pipeline.reporting import report_document, report_files, report_folder, with_forecast
from twofour.records.forecast import Worth
from twofour.records.options import BuildOptions, MathPrecision, RunOptions
from twofour.records.weights import Pattern, Selection
from twofour.reports.explain import layer_story
from twofour.reports.terminal import plain_text
from twofour.reports.text import markdown

HINT = "time and possible gain are not known:"


def network(path: Path, *, batch: int | str = 2048, dtype: type = np.float16) -> Path:
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["h"], "up"),
        helper.make_node("MatMul", ["h", "down"], ["y"], "down"),
    ]
    constants = {
        "up": om.weights(512, 2048, dtype=dtype),
        "down": om.weights(2048, 512, dtype=dtype),
    }
    made = om.model(nodes, constants, inputs={"x": [batch, 512]}, dtype=dtype)
    return om.save(made, path / "net.onnx")


def test_a_run_forecasts_first_and_counts_what_it_pruned_in_the_end(tmp_path: Path) -> None:
    options = RunOptions(
        gpu="a100",
        engine="onnxruntime",
        selection=Selection(exclude=("down",)),
        build=BuildOptions(iterations=1, warmup=0),
    )
    said, out = Recorder(), tmp_path / "run"
    cell = run_all(str(network(tmp_path)), out, options, said).report.forecast
    assert cell is not None
    assert (cell.gpu, cell.precision) == ("A100 80GB PCIe", MathPrecision.FLOAT16)
    assert [(x.layer, x.rows, x.can_run_sparse) for x in cell.layers] == [
        ("up", 2048, True),
        ("down", 2048, False),
    ]
    (early,) = (note for note in said.notes if note.startswith("Forecast for A100 80GB PCIe, flo"))
    assert "if the 2 layers that gain run sparse" in early
    assert early.endswith("; sizes: x (2048 x 512)")
    page = markdown(report_document(out, report_folder(out).report))
    first = page.splitlines()[2]
    assert cell.verdict is Worth.TRY_FIRST
    assert first.startswith("**Worth shipping: perhaps, by the forecast, if a build")
    assert f" {cell.sentence}." in first
    assert HINT not in page
    assert "| forecast gain |" in page
    up = next(x for x in cell.layers if x.layer == "up")
    assert f"| {up.gain:.2f} |" in page
    report = report_folder(out).report
    fused = tuple(replace(v, engine_layer="up + down") for v in report.verdicts)
    both = sum(x.dense_us for x in cell.layers)
    assert replace(report, verdicts=fused).forecast_gains == {
        "up": pytest.approx(up.gain),
        "up + down": pytest.approx(both / (both - up.dense_us + up.sparse_us)),
    }
    judged = report_folder(out)
    told = plain_text(layer_story(judged.report, judged.evidence(), "up"))
    assert f"forecast gain      {up.in_words}; dense {up.dense_us:,.1f} us (" in told
    assert f"model's forecast   {cell.name}: {cell.in_words}" in told
    other = report_folder(out, "RTX 4090").report.forecast
    assert other is not None
    assert [x.can_run_sparse for x in other.layers] == [True, False]
    assert "for GeForce RTX 4090" in other.sentence


def test_report_and_explain_give_the_same_gain_to_a_layer_that_would_run_dense(
    tmp_path: Path,
) -> None:
    narrow = network(tmp_path, batch=8)
    judged = with_forecast(report_files(EvidenceFiles(onnx=narrow)), "A100")
    report, evidence = judged.report, judged.evidence()
    assert report.forecast is not None
    slow = replace(report.forecast.layers[0], can_run_sparse=True, sparse_us=99.0, gain=0.5)
    cell = replace(report.forecast, layers=(slow, *report.forecast.layers[1:]))
    report = replace(report, forecast=cell)
    assert report.forecast_gains[slow.layer] == 1.0
    assert "| 1.00 |" in markdown(report_document(None, report))
    story = plain_text(layer_story(report, evidence, slow.layer))
    assert "forecast gain      TensorRT would keep the dense kernel: 1.00" in story
    assert "0.50x" not in story


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RunOptions(gpu="A1000000"), "unknown GPU 'A1000000'"),
        (RunOptions(gpu="A100", pattern=Pattern(4, 8)), "--gpu A100: no sparse kernel runs 4:8"),
    ],
)
def test_what_cannot_be_forecast_is_refused_before_anything_is_pruned(
    tmp_path: Path, options: RunOptions, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        run_all(str(network(tmp_path)), tmp_path / "run", options)
    assert not (tmp_path / "run/prune.json").exists()


def test_float32_is_forecast_in_float16_and_says_why(tmp_path: Path) -> None:
    files = EvidenceFiles(onnx=network(tmp_path, dtype=np.float32))
    report = with_forecast(report_files(files), "A100").report
    assert report.forecast is not None
    assert report.forecast.precision is MathPrecision.FLOAT16
    assert report.forecast.sentence.endswith(
        "; no sparse kernel is known for float32, the model's own type"
    )


def test_the_gpu_of_a_log_is_taken_where_it_is_known_and_nothing_else_is_asked(
    tmp_path: Path,
) -> None:
    lines = ["&&&& RUNNING TensorRT.trtexec [TensorRT v101601] # trtexec --onnx=net.onnx"]
    found = {}
    for device in ("NVIDIA A100-SXM4-80GB", "Tesla T4"):
        log = tmp_path / "build.log"
        log.write_text("\n".join([*lines, f"[I] Selected Device: {device}"]))
        judged = report_files(EvidenceFiles(onnx=network(tmp_path), log=log))
        found[device] = with_forecast(judged, None).report
    known, unknown = found.values()
    assert known.forecast is not None
    assert known.forecast.gpu == "A100-SXM4-80GB"
    assert unknown.forecast is None
    assert HINT in markdown(report_document(None, unknown))


def test_a_report_names_the_command_that_takes_sizes(tmp_path: Path) -> None:
    path = network(tmp_path, batch="batch")
    arguments = ["report", "--onnx", str(path), "--gpu", "A100"]
    done = CliRunner().invoke(application(), arguments)
    assert done.exit_code == 0
    assert "Forecast for A100 80GB PCIe, float16, batch 8" in done.stdout
    node = helper.make_node("MatMul", ["x", "w"], ["y"], "fc")
    inputs = {"x": ("batch", "length", 512)}
    om.save(om.model([node], {"w": om.weights(512, 2048)}, inputs=inputs), path)
    done = CliRunner().invoke(application(), arguments)
    assert done.exit_code == 2
    assert "takes them: give the sizes" in done.stderr.replace("\n", " ")
