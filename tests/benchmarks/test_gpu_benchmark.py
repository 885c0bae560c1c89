"""The benchmark for a GPU machine as it is run: its line, its file, its end."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_matrix.child import work
from gpu_matrix.plan import Order, full_plan

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run_smoke(
    folder: Path, *arguments: str
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """The line of a run in that folder, and how the run ended."""
    command = [sys.executable, str(SCRIPT), "--smoke", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stderr
    return json.loads(lines[0]), done


def taken_samples(cases: list[Any]) -> Iterator[list[float]]:
    """Take the samples out of the cases, each as many as its rounds."""
    for case in cases:
        for variant in case["variants"]:
            for clock in variant.keys() & {"launch", "device"}:
                samples = variant[clock].pop("samples_ms")
                assert len(samples) == variant[clock]["rounds"]
                yield samples


def imported(file: Path) -> set[str]:
    """The packages a file imports anywhere."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def test_nothing_but_torch_and_numpy_is_needed() -> None:
    files = [SCRIPT, *SCRIPT.with_name("gpu_matrix").glob("*.py")]
    foreign = set[str]().union(*map(imported, files)) - sys.stdlib_module_names
    assert foreign == {"torch", "numpy", "gpu_matrix"}


def test_smoke_run_measures_dense_and_reports_every_sparse_kernel_as_an_error(
    tmp_path: Path,
) -> None:
    out = tmp_path / "gpu.json"
    report, done = run_smoke(tmp_path, "--out", out.name)
    assert (done.returncode, report["ended"], report["skipped"]) == (0, "complete", [])
    assert [len(report["kernels"]), len(report["models"]), report["planned"]] == [6, 5, 11]
    for row in report["kernels"] + report["models"]:
        dense, again, *sparse = row["variants"]
        assert (dense["variant"], again["variant"]) == ("dense", "dense again")
        assert dense["device"]["median_ms"] > 0
        assert again["launch"]["low"] <= again["launch"]["ratio"] <= again["launch"]["high"]
        assert row["floor"]["launch"] >= 0
        assert sparse
        assert all("Error" in variant["error"] for variant in sparse)
        assert "no CUDA graphs on a CPU" in row["device_calls"]
    saved = json.loads(out.read_text(encoding="utf-8"))
    samples = list(taken_samples(saved["kernels"] + saved["models"]))
    assert len(samples) == 2 * 2 * 11  # dense and dense again by both clocks in every case
    assert all(taken == [round(value, 6) for value in taken] for taken in samples)
    assert "samples_ms" not in done.stdout
    assert [saved["kernels"], saved["models"]] == [report["kernels"], report["models"]]
    assert report["environment"]["torch"] == torch.__version__
    assert [state["when"] for state in report["clocks"]] == [
        "before layers",
        "before models",
        "end",
    ]


def test_a_budget_of_nothing_skips_every_case_and_says_why(tmp_path: Path) -> None:
    report, done = run_smoke(tmp_path, "--budget", "0")
    assert (report["kernels"], report["models"], done.returncode) == ([], [], 1)
    assert len(report["skipped"]) == report["planned"] == 11
    assert {case["reason"] for case in report["skipped"]} == {"the budget of 0 s was spent"}


def test_a_terminated_run_still_prints_what_it_measured() -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--smoke"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "float16" in process.stderr.readline()  # the first case is done
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    report = json.loads(stdout)
    assert report["ended"] == "interrupted by SIGTERM"
    measured = len(report["kernels"]) + len(report["models"])
    assert measured >= 1
    assert measured + len(report["skipped"]) == 11
    assert {case["reason"] for case in report["skipped"]} == {"interrupted by SIGTERM"}


def test_without_a_gpu_the_full_plan_is_skipped() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    sent: list[Any] = []
    with torch.no_grad():  # gives back what the work turns off for good
        work(Order(full_plan(), 420.0, time.monotonic(), 0, False), sent.append)
    assert {message[2] for message in sent} == {"torch sees no CUDA device"}
    assert [message[1] for message in sent] == list(range(len(full_plan())))
