"""`twofour compare` as a user meets it, with real engines on small models."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.onnx_models import gemm, save, weights
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.comparing.compared import open_compared
from twofour.comparing.variant_process import prepare_request
from twofour.comparing.variants import PlannedVariant
from twofour.graph.opened import open_onnx
from twofour.inputs.fits import save_arrays
from twofour.pruning.verify import validate_onnx
from twofour.records.options import CompareOptions
from twofour.records.weights import HARDWARE_PATTERN
from twofour.store import sha256_file

MODEL = Path(__file__).parents[1] / "support" / "small_model.py"
ONE = ("--engines", "onnxruntime:cpu")
METRIC = """
import numpy as np
def evaluate(predict):
    (y,) = predict(np.ones((4, 3, 8, 8), np.float32))
    return {"mean": float(y.mean()), "rows": len(y)}
"""


def compare(*arguments: str | Path, ends: int = 0) -> Result:
    named = ("--source", f"{MODEL}:make")  # which the run folder names
    result = CliRunner().invoke(application(), ["compare", *map(str, arguments), *named])
    assert result.exit_code == ends, result.output
    return result


def record(*arguments: str | Path, ends: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(compare(*arguments, "--json", "--quiet", ends=ends).stdout)
    return found


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run folder of a torch model."""
    return shutil.copytree(folder, tmp_path_factory.mktemp("compare") / "small")


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {v["name"]: v for v in found["variants"]}


@pytest.fixture(scope="module")
def found(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One comparison of the run folder, with a metric and variants that cannot run."""
    metric = tmp_path_factory.mktemp("metric") / "metric.py"
    metric.write_text(METRIC)
    engines = "onnxruntime:cpu,torch:eager,onnxruntime:cuda"
    said = compare(
        run, "--engines", engines, "--rounds", "3", "--metric", f"{metric}:evaluate", "--json"
    )
    assert said.stderr.startswith("load the variants\n")
    assert f"Results: {run}" in said.stderr
    made: dict[str, Any] = json.loads(said.stdout)
    return made


def test_a_run_folder_is_compared_and_the_record_holds_what_was_measured(
    run: Path, found: dict[str, Any]
) -> None:
    by_name = rows(found)
    for name in [name for name in by_name if name.endswith(":cuda")]:
        row = by_name.pop(name)
        assert bool(row["error"]) is not bool(row["samples_ms"])  # with and without a GPU
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
    models = ("dense.onnx", "sparse.onnx")
    assert found["files"] == {name: sha256_file(run / name) for name in models}
    for row in by_name.values():
        assert row["error"] is None
        assert len(row["samples_ms"]) == 3
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
    assert [n["again"] for n in found["noise"] if ":cuda" not in n["again"]] == [
        "dense@onnxruntime:cpu again",
        "dense@torch:eager again",
    ]
    assert found["loads"][0]["cores"] >= 1
    assert "inputs: x 2x3x8x8 float32" in found["notes"][0]
    assert found["machine"]["packages"]
    assert found["partial"] is None


def test_by_default_the_files_are_timed_in_the_engine_of_the_run_and_no_code_is_run(
    run: Path, tmp_path: Path
) -> None:
    arguments = ["compare", str(run), "--rounds", "1", "--out", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code == 0, result.output
    (mode,) = json.loads((run / "build.json").read_text())["times"]["options"]["engines"]
    assert list(rows(json.loads(result.stdout))) == [
        f"dense@{mode}",
        f"dense@{mode} again",
        f"sparse@{mode}",
    ]


def test_outputs_are_held_against_the_dense_module_in_float32(found: dict[str, Any]) -> None:
    assert found["inputs_are"] == "your example inputs"
    assert any(note.endswith("(your example inputs)") for note in found["notes"])
    for row in found["variants"]:
        for output in row["agreement"]:
            assert output["relative_error"] == pytest.approx(
                math.sqrt(2 * (1 - output["cosine"])), abs=0.1
            )
    by_name = {name: row for name, row in rows(found).items() if row["agreement"]}
    agreement = {name: row["agreement"][0] for name, row in by_name.items()}
    assert agreement["dense@torch:eager"]["max_abs_error"] < 1e-6
    assert 0 < agreement["dense@onnxruntime:cpu"]["max_abs_error"] < 1e-2  # float16
    assert agreement["sparse@torch:eager"]["max_abs_error"] > 1e-2  # pruned
    assert by_name["dense@torch:eager"]["top1_agreement"] == 1.0
    metrics = {name: row["metrics"] for name, row in by_name.items()}
    assert metrics["dense@onnxruntime:cpu"]["rows"] == 4
    assert metrics["dense@onnxruntime:cpu"] != metrics["sparse@onnxruntime:cpu"]
    assert {ratio["verdict"] for ratio in found["ratios"]} == {"undecided"}, "three rounds"
    assert found["layers"] == []
    assert rows(found)["sparse@onnxruntime:cpu"]["layers"]


def test_an_int8_mode_is_given_a_quantised_copy_that_keeps_two_of_four(
    run: Path, tmp_path: Path
) -> None:
    compared = open_compared([run / "sparse.onnx"], tmp_path, CompareOptions())
    compared.work.mkdir()
    save_arrays(compared.examples, dict(compared.inputs))
    (model,) = compared.models
    planned = PlannedVariant(model=model, engine="onnxruntime", mode="int8")
    request, seconds = prepare_request(compared, planned, 1, (), pytest.fail)
    assert request.file == tmp_path / "compare" / "sparse.int8.onnx"
    assert seconds is not None
    graph = onnx.load(request.file).graph
    assert any(node.op_type == "QuantizeLinear" for node in graph.node)
    checked = validate_onnx(open_onnx(request.file), HARDWARE_PATTERN).checks
    assert {c.layer for c in checked if not c.violations} == {"node_conv2d_1", "node_linear"}


def test_a_sweep_has_a_row_for_each_batch_and_a_fixed_one_is_an_error_of_its_row(
    tmp_path: Path,
) -> None:
    """Where any file fixes the batch it is that of the inputs that are made up."""
    fixed = save(gemm(weights(8, 16), trans_b=1), tmp_path / "fixed.onnx")
    free = onnx.load(fixed)
    batch = free.graph.input[0].type.tensor_type.shape.dim[0].dim_value
    free.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    free.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(free, tmp_path / "free.onnx")
    arguments = (*ONE, "--rounds", "2", "--out", tmp_path / "o")
    found = record(tmp_path / "free.onnx", fixed, *arguments, "--batch", f"{batch},{batch + 1}")
    by_name = rows(found)
    assert list(by_name) == [
        f"{name}:b{size}"
        for name in ("free@onnxruntime:cpu", "free@onnxruntime:cpu again", "fixed@onnxruntime:cpu")
        for size in (batch, batch + 1)
    ]
    assert {v["agreement"][0]["max_abs_error"] for v in found["variants"]} == {0.0}
    assert [n["batch"] for n in found["noise"]] == [batch, batch + 1]
    assert [r["batch"] for r in found["ratios"]] == [batch]
    errors = {name: row["error"] for name, row in by_name.items() if row["error"]}
    assert list(errors) == [f"fixed@onnxruntime:cpu:b{batch + 1}"]
    assert "cannot be" in errors.popitem()[1]


def test_files_are_compared_by_their_stems_with_the_first_as_baseline(tmp_path: Path) -> None:
    """Outputs that are far off are noted, and those that cannot be compared."""
    first = save(gemm(weights(8, 16, seed=1), trans_b=1), tmp_path / "first.onnx")
    far = save(gemm(-weights(8, 16, seed=1), trans_b=1), tmp_path / "far.onnx")
    narrow = save(gemm(weights(4, 16), trans_b=1), tmp_path / "narrow.onnx")
    found = record(first, far, narrow, *ONE, "--rounds", "1", "--out", tmp_path / "out")
    assert found["baseline"] == "first@onnxruntime:cpu"
    assert [v["name"] for v in found["variants"]] == [
        "first@onnxruntime:cpu",
        "first@onnxruntime:cpu again",
        "far@onnxruntime:cpu",
        "narrow@onnxruntime:cpu",
    ]
    names = {f.name for f in (tmp_path / "out").iterdir()}
    assert names >= {"latency.json", "latency.md", "latency.html"}
    notes = found["notes"]
    (given,) = (note for note in notes if note.startswith("inputs: x "))
    assert given.endswith("or shapes with --input-shape)")
    assert any("of narrow@onnxruntime:cpu were not" in note for note in notes)
    assert any("far@onnxruntime:cpu are far" in note for note in notes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fail-if", "sparse is fast"], "--fail-if"),
        (["--fail-if", "spares / dense > 1", *ONE], "names no two variants"),
        (["--engines", "tensorrrt"], "there is no engine 'tensorrrt'"),
        (["--variants", *ONE], "--variants leaves nothing to --engines"),
        (["--batch", "1,x"], "'1,x' is not a list of sizes"),
        (["--metric", "nowhere.py:evaluate", *ONE], "nowhere.py"),
        (["--json", "--format", "html"], "ask for two things"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    run: Path, arguments: list[str], said: str
) -> None:
    results = sorted((path, path.stat().st_mtime_ns) for path in run.glob("latency.*"))
    result = compare(run, *arguments, ends=2)
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert sorted((path, path.stat().st_mtime_ns) for path in run.glob("latency.*")) == results


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    text = tmp_path / "notes.txt"
    text.write_text("no model")
    assert "not a run folder" in compare(tmp_path / "empty", ends=2).stderr
    assert "neither an ONNX file" in compare(text, ends=2).stderr
    assert "no such file" in compare(tmp_path / "gone.onnx", ends=2).stderr
