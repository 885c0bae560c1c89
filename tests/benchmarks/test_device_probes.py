"""Runs inner_probes.py against real TensorRT bindings, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BINDINGS = Path(os.environ.get("TWOFOUR_TRT_BINDINGS", ROOT / "build"))


@pytest.mark.parametrize("major", [pytest.param("trt8", marks=pytest.mark.full), "trt10"])
def test_the_questions_are_asked_through_the_real_bindings(major: str) -> None:
    ready = BINDINGS / major / ".ready"
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if not ready.is_file() or not ready.read_text().rstrip().endswith(python):
        pytest.skip(f"no bindings for {python}: `make bindings` prepares them")
    path = os.pathsep.join((str(BINDINGS / major), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("inner_probes.py"))],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout + done.stderr
