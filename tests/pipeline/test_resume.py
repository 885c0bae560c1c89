"""A run that is killed: the same command finishes it, and the result is the same."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.small_run import ALL_STAGES, MODEL, OPTIONS, Recorder

from twofour.main_job import run_all

_SCRIPT = Path(__file__).parents[1] / "support" / "killed_run.py"
_TIMED = {"build.json", "run.json", "report.md", "report.html"}
"""Files that hold times, and so differ from run to run."""


def _content(path: Path) -> dict[str, bytes]:
    files = (p for p in path.iterdir() if p.is_file() and p.name not in _TIMED)
    return {p.name: p.read_bytes() for p in files}


@pytest.mark.slow
def test_a_run_killed_after_a_stage_finishes_as_if_undisturbed(tmp_path: Path) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "run"
    run_all(MODEL, undisturbed, OPTIONS)
    killed = subprocess.run(
        [sys.executable, str(_SCRIPT), MODEL, str(out), "check-sparse"], check=False
    )
    assert killed.returncode == -9
    recorder = Recorder()
    run_all(MODEL, out, OPTIONS, recorder)
    reached = ALL_STAGES.index("check-sparse") + 1
    assert recorder.reused == ALL_STAGES[:reached]
    assert recorder.did == ALL_STAGES[reached:]
    assert _content(out) == _content(undisturbed)
