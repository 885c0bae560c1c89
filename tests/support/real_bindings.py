"""Tests against real TensorRT bindings over stand-in libraries, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BINDINGS = Path(os.environ.get("TWOFOUR_TRT_BINDINGS", ROOT / "build"))


def run_inner(major: str, *files: Path) -> int:
    """Tests that passed with these bindings; none may fail or be skipped."""
    folder = BINDINGS / major
    ready = folder / ".ready"
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if not ready.is_file() or not ready.read_text().rstrip().endswith(python):
        pytest.skip(f"{folder} is not there for {python}: `make bindings` prepares it")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    path = [str(folder), os.environ.get("PYTHONPATH", "")]
    finished = subprocess.run(
        [*command, *map(str, files)],
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
