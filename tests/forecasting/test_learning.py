"""`forecast --learn`: layer times of runs become rows that later forecasts stand on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from support import onnx_models as om
from support.join_cases import chosen, eligible
from support.trtexec_machine import emit
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.forecasting.kernels import learned_file, product_times, read_products
from twofour.records.forecast import Basis, LearnedTimes
from twofour.store import from_json

WIDTHS = {"q": 512, "k": 512, "up": 2048, "head": 64}
ENGINE = {"q + k": 0.05, "up": 0.080, "down": 0.070, "head": 0.02, "reformat": 0.01}
"""Rows of the dense profile, in milliseconds; the sparse engine is twice as fast."""


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


def run(folder: Path, *, gpu: str = "NVIDIA L4") -> Path:
    """An emitted folder that came back: q and k are one row, and the head runs dense."""
    nodes = [helper.make_node("MatMul", ["x", n], [f"{n}.y"], name=n) for n in ("q", "k", "up")]
    nodes += [
        helper.make_node("MatMul", ["up.y", "down"], ["down.y"], name="down"),
        helper.make_node("Sum", ["q.y", "k.y", "down.y"], ["sum"]),
        helper.make_node("MatMul", ["sum", "head"], ["y"], name="head"),
    ]
    constants = {name: om.weights(512, n, dtype=np.float16) for name, n in WIDTHS.items()}
    constants["down"] = om.weights(2048, 512, dtype=np.float16)
    made = om.model(nodes, constants, inputs={"x": ("batch", 128, 512)})
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.elem_type = 10  # FLOAT16
    folder.mkdir()
    emit(om.save(made, folder / "net.onnx"), folder / "run")
    came_back(folder / "run", gpu, ENGINE)
    return folder / "run"


def came_back(folder: Path, gpu: str, times: Mapping[str, float]) -> None:
    log = [
        "&&&& RUNNING TensorRT.trtexec [TensorRT v100300] # trtexec --sparsity=enable",
        f"[07/07/2026-02:11:08] [I] Selected Device: {gpu}",
        *(f"[07/07/2026-02:11:08] [V] [TRT] {line}" for line in (
            eligible("q + k", "up", "down", "head"), chosen("q + k", "up", "down")
        )),
        "&&&& PASSED TensorRT.trtexec [TensorRT v100300]",
    ]  # fmt: skip
    (folder / "sparse.log").write_text("\n".join(log), encoding="utf-8")
    for variant, factor in (("dense", 1), ("sparse", 0.5)):
        rows = [{"name": name, "averageMs": ms * factor} for name, ms in times.items()]
        (folder / f"{variant}.profile.json").write_text(json.dumps([{"count": 10}, *rows]))


def forecast(*arguments: Path | str) -> Result:
    return CliRunner().invoke(application(), ["forecast", *map(str, arguments)])


def test_what_is_learned_is_the_next_forecast_and_corrects_its_neighbours(tmp_path: Path) -> None:
    near, far = (1024, 2048, 640), (8192, 8192, 8192)
    before = [product_times("L4", "FP16", *size) for size in (near, far)]
    done = forecast("--learn", run(tmp_path / "a"))
    assert (done.exit_code, done.stdout) == (0, "")
    folder = tmp_path / "a" / "run"
    assert done.stderr.splitlines() == [
        f"Learned the times of 2 layers: {tmp_path}/settings/twofour/kernel_times.csv",
        f"  left out: {folder}: no row of both profiles is theirs alone: q and k",
        f"  left out: {folder}: no sparse kernel was chosen: head",
    ]
    up = product_times("L4", "FP16", 1024, 2048, 512)
    assert (up.dense_us, up.sparse_us) == pytest.approx((80, 40))
    assert (up.basis, str(up.note)[:22]) == (Basis.MEASURED, "learned from your runs")
    after = [product_times("L4", "FP16", *size) for size in (near, far)]
    assert [x.basis for x in after] == [Basis.BETWEEN, Basis.SCALED]
    assert 2 * before[0].dense_us < after[0].dense_us < 100
    assert after[0].high / after[0].low < 0.9 * before[0].high / before[0].low
    assert after[1].dense_us == pytest.approx(before[1].dense_us, rel=0.05)
    assert product_times("L4", "INT8", *near).basis is Basis.SCALED


def test_a_run_counts_once_and_its_last_times_replace_the_first(tmp_path: Path) -> None:
    first = run(tmp_path / "a", gpu="NVIDIA A100-SXM4-80GB")
    done = forecast("--learn", first, first, "--json")
    found = from_json(LearnedTimes, done.stdout)
    assert (found.layers, len(found.left_out)) == (2, 2)
    rows = (1024.0, 2048.0, 512.0, 80.0, 40.0), (1024.0, 512.0, 2048.0, 70.0, 35.0)
    assert read_products(learned_file()) == {("A100-SXM4-80GB", "FP16"): rows}
    came_back(first, "NVIDIA L4", {**ENGINE, "up": 0.09})
    forecast("--learn", first)
    assert read_products(learned_file())["L4", "FP16"][0][3:] == (90, 45)
    assert read_products(learned_file())["A100-SXM4-80GB", "FP16"] == rows


def test_a_model_is_forecast_with_what_was_learned(tmp_path: Path) -> None:
    forecast("--learn", run(tmp_path / "a"))
    done = forecast(tmp_path / "a" / "net.onnx", "--gpu", "L4", "--batch", "8", "--json")
    cell = json.loads(done.stdout)["cells"][0]
    bases = {layer["layer"]: layer["basis"] for layer in cell["layers"]}
    assert (bases["up"], bases["head"]) == ("measured here", "scaled from another GPU")


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        ("Tesla T4", "unknown GPU 'Tesla T4'"),
        ("", "no GPU is named, the engine is tensorrt 10.3.0 (trtexec)"),
    ],
)
def test_a_run_on_an_unknown_gpu_is_left_out(tmp_path: Path, gpu: str, why: str) -> None:
    folder = run(tmp_path / "a", gpu=gpu)
    assert forecast("--learn", folder).stderr.splitlines() == [
        f"Learned the times of 0 layers: {learned_file()}",
        f"  left out: {folder}: {why}",
    ]
    assert not learned_file().exists()


def test_a_damaged_table_and_a_second_model_are_refused() -> None:
    learned_file().parent.mkdir(parents=True)
    learned_file().write_text("gpu,precision\nL4,FP16,64,64,64,1.0,-1\n")
    with pytest.raises(
        BadInputError, match=r"cannot read .*kernel_times\.csv: 'L4,FP16,64,64,64,1"
    ):
        product_times("L4", "FP16", 64, 64, 64)
    done = forecast("a.onnx", "b.onnx")
    assert (done.exit_code, done.stderr) == (
        2,
        "error: one model is forecast at a time, found a.onnx and b.onnx\n",
    )
