"""Runs the tests against real TensorRT bindings, each version in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BINDINGS = Path(os.environ.get("TWOFOUR_TRT_BINDINGS", ROOT / "build"))


ALL = ["inner_build.py", "inner_timed.py"]


@pytest.mark.parametrize("major", ["trt10", pytest.param("trt11", marks=pytest.mark.full)])
def test_the_engine_holds_against_the_real_bindings(major: str) -> None:
    assert run_inner([*ALL, "inner_typed.py"], bindings(major)) >= 40


@pytest.mark.full
def test_the_engine_holds_against_the_real_bindings_of_86() -> None:
    assert run_inner([*ALL, "inner_86.py"], bindings("trt8")) >= 40


def bindings(major: str) -> Path:
    folder = BINDINGS / major
    ready = folder / ".ready"
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if not ready.is_file() or not ready.read_text().rstrip().endswith(python):
        pytest.skip(f"{folder} is not there for {python}: `make bindings` prepares it")
    return folder


def run_inner(files: list[str], search: Path) -> int:
    """Tests that passed; none may fail or be skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    path = [str(search), os.environ.get("PYTHONPATH", "")]
    finished = subprocess.run(
        [*command, *(str(HERE / name) for name in files)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary = re.search(r"(\d+) passed(.*)", finished.stdout)
    assert summary is not None, finished.stdout
    assert "skipped" not in summary[2]
    return int(summary[1])
