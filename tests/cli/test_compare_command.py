"""`twofour compare` as a user meets it, with real engines on small models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.onnx_models import gemm, save, weights
from typer.testing import CliRunner, Result

from twofour.cli.app import app
from twofour.store import sha256_file

MODEL = Path(__file__).parents[1] / "support" / "small_model.py"
METRIC = """
import numpy as np
def evaluate(predict):
    (y,) = predict(np.ones((4, 3, 8, 8), np.float32))
    return {"mean": float(y.mean()), "rows": len(y)}
"""


def compare(*arguments: str | Path, ends: int = 0) -> Result:
    named = ("--source", f"{MODEL}:make")  # which the run folder names
    result = CliRunner().invoke(app, ["compare", *map(str, arguments), *named])
    assert result.exit_code == ends, result.output
    return result


def record(*arguments: str | Path, ends: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(compare(*arguments, "--json", "--quiet", ends=ends).stdout)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder of a torch model."""
    out = tmp_path_factory.mktemp("compare") / "small"
    arguments = ["prune-export-build", f"{MODEL}:make", "--out", str(out), "--quiet"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return out


@pytest.fixture
def fixed(tmp_path: Path) -> Path:
    """An ONNX file whose batch is fixed at 3."""
    return save(gemm(weights(8, 16), trans_b=1), tmp_path / "fixed.onnx")


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {v["name"]: v for v in found["variants"]}


def test_a_run_folder_is_compared_and_the_record_holds_what_was_measured(run: Path) -> None:
    found = record(run, "--engines", "onnxruntime:cpu,torch:eager", "--rounds", "12")
    by_name = rows(found)
    assert list(by_name) == [
        "dense@onnxruntime:cpu",
        "dense@onnxruntime:cpu again",
        "sparse@onnxruntime:cpu",
        "dense@torch:eager",
        "dense@torch:eager again",
        "sparse@torch:eager",
    ]
    assert found["baseline"] == "dense@onnxruntime:cpu"
    assert json.loads((run / "latency.json").read_text()) == found
    models = [f"{variant}.onnx{data}" for variant in ("dense", "sparse") for data in ("", ".data")]
    assert found["files"] == {name: sha256_file(run / name) for name in models}
    for row in by_name.values():
        assert row["error"] is None
        assert len(row["samples_ms"]) == 12
        assert row["median_ms"] == pytest.approx(np.median(row["samples_ms"]))
        assert row["throughput"] == pytest.approx(2e3 / row["median_ms"])  # batch of 2
        assert row["peak_memory_bytes"] > 20e6
        assert row["settings"]["device"] == "CPU"
    assert by_name["dense@onnxruntime:cpu"]["size_bytes"] == sum(
        f.stat().st_size for f in run.glob("dense.onnx*")
    )
    ratios = {(r["variant"], r["baseline"]) for r in found["ratios"]}
    assert ("sparse@onnxruntime:cpu", "dense@onnxruntime:cpu") in ratios
    assert ("sparse@torch:eager", "dense@torch:eager") in ratios
    assert [n["again"] for n in found["noise"]] == [
        "dense@onnxruntime:cpu again",
        "dense@torch:eager again",
    ]
    assert found["notes"][0] == "inputs: x 2x3x8x8 float32"
    assert found["machine"]["packages"]
    assert found["partial"] is None


def test_outputs_are_held_against_the_dense_module_in_float32(run: Path) -> None:
    by_name = rows(record(run, "--engines", "onnxruntime:cpu,torch:eager", "--rounds", "1"))
    agreement = {name: row["agreement"][0] for name, row in by_name.items()}
    assert agreement["dense@torch:eager"]["max_abs_error"] < 1e-6
    assert 0 < agreement["dense@onnxruntime:cpu"]["max_abs_error"] < 1e-2  # float16
    assert agreement["sparse@torch:eager"]["max_abs_error"] > 1e-2  # pruned
    assert by_name["dense@torch:eager"]["top1_agreement"] == 1.0


def test_the_text_names_the_noise_the_machine_and_what_the_ratio_is(run: Path) -> None:
    said = compare(run, "--engines", "onnxruntime:cpu", "--rounds", "12")
    assert "sparse@onnxruntime:cpu" in said.stdout
    assert "time / baseline" in said.stdout
    assert "noise" in said.stdout
    assert f"everything is in {run}" in said.stderr


def test_a_sweep_has_a_row_for_each_batch_and_noise_for_each(run: Path) -> None:
    found = record(run, "--engines", "onnxruntime:cpu", "--rounds", "2", "--batch", "1,4")
    assert [v["batch"] for v in found["variants"]] == [1, 4, 1, 4, 1, 4]
    assert "sparse@onnxruntime:cpu:b4" in rows(found)
    assert [n["batch"] for n in found["noise"]] == [1, 4]
    assert {r["batch"] for r in found["ratios"]} == {1, 4}


def test_a_metric_is_evaluated_with_each_variant(run: Path, tmp_path: Path) -> None:
    metric = tmp_path / "metric.py"
    metric.write_text(METRIC)
    found = record(
        run, "--engines", "onnxruntime:cpu", "--rounds", "1", "--metric", f"{metric}:evaluate"
    )
    by_name = rows(found)
    assert by_name["dense@onnxruntime:cpu"]["metrics"]["rows"] == 4
    dense, sparse = (
        by_name[f"{w}@onnxruntime:cpu"]["metrics"]["mean"] for w in ("dense", "sparse")
    )
    assert dense != sparse


def test_layers_of_sparse_and_dense_are_matched_and_add_up(run: Path) -> None:
    found = record(run, "--engines", "onnxruntime:cpu", "--rounds", "1")
    (contrast,) = (c for c in found["layers"] if c["variant"].startswith("sparse"))
    total = sum(row["difference_ms"] for row in contrast["rows"])
    assert total == pytest.approx(contrast["variant_ms"] - contrast["baseline_ms"], abs=1e-9)
    assert any(row["ratio"] is not None for row in contrast["rows"])


def test_a_variant_that_fails_is_a_row_with_its_reason_and_the_others_go_on(run: Path) -> None:
    found = record(
        run, "--engines", "onnxruntime:cpu,torch:sdpa-math,onnxruntime:cuda", "--rounds", "1"
    )
    by_name = rows(found)
    assert "scaled_dot_product_attention" in by_name["dense@torch:sdpa-math"]["error"]
    assert by_name["dense@torch:sdpa-math"]["samples_ms"] == []
    assert by_name["sparse@onnxruntime:cpu"]["error"] is None


def test_int8_keeps_two_of_four_and_agrees_roughly(run: Path) -> None:
    by_name = rows(record(run, "--engines", "onnxruntime:int8", "--rounds", "1"))
    assert by_name["dense@onnxruntime:int8"]["error"] is None
    assert by_name["dense@onnxruntime:int8"]["agreement"][0]["cosine"] > 0.99
    quantized = run / "compare" / "sparse.int8.onnx"
    checked = CliRunner().invoke(app, ["validate", str(quantized), "--include", "*body*", "--json"])
    assert checked.exit_code == 0, checked.output


def test_files_are_compared_by_their_stems_with_the_first_as_baseline(
    run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "result"
    found = record(
        run / "sparse.onnx", run / "dense.onnx", "--engines", "onnxruntime:cpu", "--rounds", "1",
        "--out", out,
    )  # fmt: skip
    assert found["baseline"] == "sparse@onnxruntime:cpu"
    assert [v["name"] for v in found["variants"]] == [
        "sparse@onnxruntime:cpu",
        "sparse@onnxruntime:cpu again",
        "dense@onnxruntime:cpu",
    ]
    assert {f.name for f in out.iterdir()} >= {"latency.json", "latency.md", "latency.html"}


def test_a_fixed_batch_is_an_error_of_the_row_not_of_the_run(fixed: Path, tmp_path: Path) -> None:
    model = onnx.load(fixed)
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    arguments = ("--engines", "onnxruntime:cpu", "--rounds", "1", "--out", tmp_path / "o")
    by_name = rows(record(fixed, *arguments, "--batch", f"{batch},{batch + 1}"))
    assert by_name[f"fixed@onnxruntime:cpu:b{batch}"]["error"] is None
    assert "shape" in by_name[f"fixed@onnxruntime:cpu:b{batch + 1}"]["error"]


def test_the_gate_ends_in_4_where_it_is_met_and_in_0_where_not(run: Path) -> None:
    arguments = (run, "--engines", "onnxruntime:cpu", "--rounds", "12", "--quiet")
    # of the noise: what others do on the machine meanwhile cannot keep it from being judged
    assert compare(*arguments, "--fail-if", "noise > 100").stderr == ""
    failed = compare(*arguments, "--fail-if", "noise >= 0", ends=4)
    assert "noise >= 0: the noise is" in failed.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the load is read from /proc")
def test_on_a_machine_that_others_keep_busy_nothing_is_claimed_and_a_gate_ends_in_6(
    run: Path,
) -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in os.sched_getaffinity(0)
    ]
    try:
        arguments = (run, "--engines", "onnxruntime:cpu", "--rounds", "12")
        result = compare(*arguments, "--fail-if", "sparse/dense > 1.0", ends=6)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert "not judged: the machine was busy" in result.stderr
    assert result.stdout.startswith("WARNING: other processes kept")
    found = json.loads((run / "latency.json").read_text())
    assert found["loads"][0]["other_cores"] > 0.25 * found["loads"][0]["cores"]
    assert {r["verdict"] for r in found["ratios"]} == {"undecided"}


@pytest.mark.parametrize(
    ("arguments", "ends", "said"),
    [
        (["--fail-if", "sparse is fast"], 2, "--fail-if"),
        (["--fail-if", "spares/dense > 1"], 2, "names no two variants"),
        (["--engines", "tensorrrt"], 2, "there is no engine 'tensorrrt'"),
        (["--engines", "torch:slow"], 2, "torch has no mode 'slow'"),
        (["--batch", "1,x"], 2, "'1,x' is not a list of sizes"),
        (["--batch", "0"], 2, "'0' is not a list of sizes"),
        (["--rounds", "0"], 2, "--rounds must be at least 1"),
        (["--baseline", "dense@torch:eager", "--engines", "onnxruntime:cpu"], 2, "--baseline"),
        (["--metric", "nowhere.py:evaluate"], 2, "nowhere.py"),
        (["--json", "--format", "html"], 2, "ask for two things"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    run: Path, arguments: list[str], ends: int, said: str
) -> None:
    started = time.perf_counter()
    result = compare(run, *arguments, ends=ends)
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert time.perf_counter() - started < 20


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    text = tmp_path / "notes.txt"
    text.write_text("no model")
    assert "is not a run folder" in compare(tmp_path / "empty", ends=2).stderr
    assert "neither an ONNX file nor" in compare(text, ends=2).stderr
    assert "no such file" in compare(tmp_path / "gone.onnx", ends=2).stderr


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_keeps_the_rounds_so_far_and_ends_in_130(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "interrupted"
    command = [
        sys.executable, "-c", "from twofour.cli import main; main()", "compare", str(run),
        "--engines", "onnxruntime:cpu", "--rounds", "1000000", "--out", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    found = json.loads((out / "latency.json").read_text())
    samples = [len(v["samples_ms"]) for v in found["variants"]]
    assert len(set(samples)) == 1
    assert samples[0] > 10
    assert found["partial"] == f"interrupted after {samples[0]} of 1000000 rounds"
    assert found["partial"] in said


def interrupted(run: Path, out: Path, *moments_s: float) -> tuple[int, str]:
    """Exit code and stderr of an endless comparison that gets SIGINT at these moments."""
    command = [
        sys.executable, "-c", "from twofour.cli import main; main()", "compare", str(run),
        "--engines", "onnxruntime:cpu", "--rounds", "1000000", "--out", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    started = time.perf_counter()
    for moment_s in moments_s:
        time.sleep(max(0.0, started + moment_s - time.perf_counter()))
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_a_second_ctrl_c_does_not_lose_the_rounds(run: Path, tmp_path: Path) -> None:
    code, said = interrupted(run, tmp_path / "twice", 8.0, 8.02, 8.3)
    assert code == 130, said
    assert json.loads((tmp_path / "twice" / "latency.json").read_text())["partial"] in said


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_before_the_first_round_says_that_nothing_was_kept(
    run: Path, tmp_path: Path
) -> None:
    code, said = interrupted(run, tmp_path / "early", 1.2)
    assert code == 130, said
    assert "interrupted before the first round: nothing was kept" in said
    assert "Traceback" not in said
    assert not (tmp_path / "early" / "latency.json").exists()


def test_a_folder_that_cannot_be_made_is_bad_input(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for out in (tmp_path / "file", tmp_path / "file" / "inside"):
        said = compare(run, "--engines", "onnxruntime:cpu", "--out", out, ends=2).stderr
        assert f"cannot create {out}" in said


def test_made_up_inputs_and_far_outputs_are_noted(run: Path, tmp_path: Path) -> None:
    arguments = ("--engines", "onnxruntime:cpu", "--rounds", "1", "--out", tmp_path / "o")
    notes = record(run / "dense.onnx", *arguments)["notes"]
    assert notes[0] == (
        "inputs: x 8x3x8x8 float32 (made up: give real ones with --inputs, or shapes with "
        "--input-shape)"
    )
    other = save(gemm(weights(8, 16, seed=1), trans_b=1), tmp_path / "a.onnx")
    same = save(gemm(-weights(8, 16, seed=1), trans_b=1), tmp_path / "b.onnx")
    found = record(other, same, *arguments)
    assert any("the outputs of b@onnxruntime:cpu are far from" in note for note in found["notes"])


def test_a_fixed_batch_in_any_file_decides_the_inputs_that_are_made_up(tmp_path: Path) -> None:
    free = onnx.load(save(gemm(weights(8, 16), trans_b=1), tmp_path / "fixed.onnx"))
    batch = free.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    free.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    free.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(free, tmp_path / "free.onnx")
    arguments = ("--engines", "onnxruntime:cpu", "--rounds", "1", "--out", tmp_path / "o")
    found = record(tmp_path / "free.onnx", tmp_path / "fixed.onnx", *arguments)
    assert [v["error"] for v in found["variants"]] == [None] * 3
    assert {v["batch"] for v in found["variants"]} == {batch}
    assert {v["agreement"][0]["max_abs_error"] for v in found["variants"]} == {0.0}


def test_files_with_other_layers_are_called_two_models(tmp_path: Path) -> None:
    one = save(gemm(weights(8, 16), trans_b=1), tmp_path / "one.onnx")
    other = save(gemm(weights(4, 16), trans_b=1), tmp_path / "other.onnx")
    arguments = ("--engines", "onnxruntime:cpu", "--rounds", "1", "--out", tmp_path / "o")
    notes = record(one, other, *arguments)["notes"]
    assert any("other.onnx has other layers than one.onnx" in note for note in notes)
    assert any("outputs of other@onnxruntime:cpu were not compared" in note for note in notes)


@pytest.mark.parametrize("name", ["eligibility.json", "accuracy.json"])
def test_a_record_of_a_newer_twofour_is_refused_before_anything_is_measured(
    name: str, run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "newer"
    shutil.copytree(run, folder)
    text = (folder / name).read_text().replace('"schema_version": 1', '"schema_version": 9')
    (folder / name).write_text(text)
    (folder / "latency.json").unlink(missing_ok=True)
    result = CliRunner().invoke(app, ["compare", str(folder), "--engines", "onnxruntime:cpu"])
    assert result.exit_code == 2
    assert "a newer twofour wrote it" in result.stderr
    assert not (folder / "latency.json").exists()
