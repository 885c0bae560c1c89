"""Scripts of benchmarks, each run once on a stand-in: a CPU, ONNX Runtime, made-up reports.

What they measure is in benchmarks/LOG.md.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import engine_evidence
import engines
import pytest
import torch
from engine_matrix.plan import Case
from engine_matrix.sweep import Chain, write_sweep
from onnx import helper
from support import onnx_models as om
from support.join_cases import DENSE, SPARSE, build, chain, chosen, eligible, tuned
from support.report_cases import check, conv, report

from twofour.eligibility.build_evidence import BuildEvidence
from twofour.eligibility.join import join_report
from twofour.records.log import Build
from twofour.store import write_record

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def imported(file: Path) -> set[str]:
    """The packages a file imports anywhere."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_the_kernel_benchmark_needs_torch_and_numpy_alone() -> None:
    files = [GPU, *GPU.with_name("gpu_matrix").glob("*.py")]
    foreign = set[str]().union(*map(imported, files)) - sys.stdlib_module_names
    assert foreign == {"torch", "numpy", "gpu_matrix"}


def test_the_kernel_benchmark_measures_dense_on_a_cpu_and_every_sparse_kernel_is_an_error(
    tmp_path: Path,
) -> None:
    command = [sys.executable, str(GPU), "--smoke", "--out", "gpu.json"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert (done.returncode, found["ended"], found["skipped"]) == (0, "complete", [])
    assert [len(found["kernels"]), len(found["models"]), found["planned"]] == [3, 3, 6]
    for row in found["kernels"] + found["models"]:
        dense, again, *sparse = row["variants"]
        assert (dense["variant"], again["variant"]) == ("dense", "dense again")
        assert dense["device"]["median_ms"] > 0
        assert again["launch"]["low"] <= again["launch"]["ratio"] <= again["launch"]["high"]
        assert sparse
        assert all("Error" in variant["error"] for variant in sparse)
    saved = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    dense = saved["kernels"][0]["variants"][0]["device"]
    assert len(dense["samples_ms"]) == dense["rounds"]
    assert found["environment"]["torch"] == torch.__version__


def joined(log: Build) -> Any:
    """Layers a and b (512 x 512), broken and grouped (128 x 128), with what this log says."""
    whole = [conv(name, 512, 512, node=name) for name in "ab"]
    broken = conv("broken", 128, 128, node="broken")
    grouped = conv("grouped", 128, 128, groups=4, node="grouped")
    predicted = report(*whole, (broken, check(broken, violations=3)), grouped)
    nodes = chain(*((name, "Conv") for name in ("a", "b", "broken", "grouped")))
    return join_report(predicted, BuildEvidence(build=log, nodes=nodes))


def test_the_reports_of_two_nets_become_tables_rows_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tuned("a", (DENSE, 0.02), (SPARSE, 0.01))
    right = build(*times, eligible("a", "b"), chosen("a"))
    wrong = build(eligible("a", "b", "grouped"), chosen())
    for name, log in (("good-float16-b8", right), ("odd-int8-b1", wrong)):
        place = tmp_path / "nets" / name
        place.mkdir(parents=True)
        write_record(place / "eligibility.json", joined(log))
    files = ("--csv", str(tmp_path / "o.csv"), "--json", str(tmp_path / "o.json"))
    assert engine_evidence.main([str(tmp_path / "nets"), *files]) == 0
    out = capsys.readouterr().out
    assert "2 nets, 8 layers with a weight, of which 8 measured." in out
    assert "Agreement: 7 of 8 (87.5 %)" in out
    assert "### Disagreements: 1 of 8 comparable layers" in out
    with (tmp_path / "o.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["folder"], row["node"], row["chosen"]) for row in table] == [
        ("good-float16-b8", "a", "true"),
        ("good-float16-b8", "b", "false"),
        ("odd-int8-b1", "a", "false"),
        ("odd-int8-b1", "b", "false"),
        ("odd-int8-b1", "grouped", "false"),
    ]
    assert (table[0]["best_dense_ms"], table[0]["best_sparse_ms"]) == ("0.02", "0.01")
    everything = json.loads((tmp_path / "o.json").read_text())
    assert everything["confusion"]["agreeing"] == 7
    assert [x["node"] for x in everything["disagreements"]] == ["grouped"]


def test_the_networks_are_made_built_and_packed_and_a_run_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nets, built = tmp_path / "nets", tmp_path / "engines"
    both = [Case(net=f"sweep_{n}", precision="float16", batch=1) for n in ("conv1x1", "gemm")]
    monkeypatch.setattr(engines, "cases", lambda: both)
    for case in both:
        (nets / case.folder).mkdir(parents=True)
    write_sweep(Chain(op="Conv", channels=(8,)), nets / both[0].folder / "dense.onnx")
    relu = helper.make_node("Relu", ["x"], ["y"])
    without_weights = om.model([relu], {}, inputs={"x": ["n", 8]}, opset=17)
    om.save(without_weights, nets / both[1].folder / "dense.onnx")
    command = ["build", str(nets), "--out", str(built), "--engine", "onnxruntime"]
    assert engines.main(command) == 1
    write_sweep(Chain(op="Gemm", channels=(8,)), nets / both[1].folder / "dense.onnx")
    assert engines.main(command) == 0
    lines = (built / "outcomes.jsonl").read_text().splitlines()
    outcomes = [(row["case"], row["exit_code"]) for row in map(json.loads, lines)]
    assert outcomes == [(both[0].name, 0), (both[1].name, 2), (both[1].name, 0)]
    assert engines.main(["pack", str(built), "--to", str(tmp_path / "kept")]) == 0
    with tarfile.open(tmp_path / "kept-0.tar") as archive:
        kept = archive.extractfile(f"{both[0].name}/eligibility.json.gz")
        assert kept is not None
        assert (
            gzip.decompress(kept.read()) == (built / both[0].name / "eligibility.json").read_bytes()
        )


@pytest.mark.full
@pytest.mark.parametrize("case", ["magnitude, no data", "wanda, refit"])
def test_calibrated_judges_on_docstrings_and_on_the_lines_of_a_file(
    case: str, tmp_path: Path
) -> None:
    import calibrated  # transformers and scipy, for `make test-all` alone

    judge = tmp_path / "judge.txt"
    judge.write_text("".join(calibrated.EVERYDAY.read_text().splitlines(keepends=True)[:16]))
    row = calibrated.measure(case, 16, judge)
    assert 0.3 < row["cosine"] < 1
    assert 0.3 < row["judge"] < 1
