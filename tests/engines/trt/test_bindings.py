"""Runs the tests against real TensorRT bindings, each major in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BINDINGS = Path(os.environ.get("TWOFOUR_TRT_BINDINGS", ROOT / "build"))
INNER = ["inner_build.py", "inner_run.py"]


@pytest.mark.parametrize("major", ["trt10", "trt11"])
def test_the_engine_holds_against_the_real_bindings(major: str) -> None:
    bindings = BINDINGS / major
    if not (bindings / ".ready").is_file():
        pytest.skip(f"{bindings} is not there: `make bindings` prepares it")
    files = [str(Path(__file__).with_name(name)) for name in INNER]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    path = os.pathsep.join(filter(None, [str(bindings), os.environ.get("PYTHONPATH")]))
    finished = subprocess.run(
        [*command, *files],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None, finished.stdout
    assert int(passed[1]) >= 30, finished.stdout
    assert "skipped" not in finished.stdout
