"""A run killed in any stage: the same command finishes it, and the result is the same."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_run import ALL_STAGES, MODEL, OPTIONS, Recorder

from twofour.pipeline.run import run_all

_SCRIPT = Path(__file__).parents[1] / "support" / "killed_run.py"
_TIMED = {"build.json", "run.json", "report.md", "report.html"}
"""Files that hold times, and so differ from run to run."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    run_all(MODEL, path, OPTIONS)
    return _content(path)


def _content(path: Path) -> dict[str, bytes]:
    files = (p for p in path.iterdir() if p.is_file() and p.name not in _TIMED)
    return {p.name: p.read_bytes() for p in files}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["begin", "end"])
@pytest.mark.parametrize("stage", ALL_STAGES)
def test_a_run_killed_there_finishes_as_if_undisturbed(
    undisturbed: dict[str, bytes], tmp_path: Path, stage: str, moment: str
) -> None:
    if moment == "begin" and stage not in {"export-dense", "prune", "export-sparse", "report"}:
        pytest.skip("the same as the end of the stage before")
    out = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, str(_SCRIPT), MODEL, str(out), stage, moment], check=False
    )
    assert killed.returncode == -9
    recorder = Recorder()
    run_all(MODEL, out, OPTIONS, recorder)
    reached = ALL_STAGES.index(stage) + (moment == "end")
    assert recorder.reused == ALL_STAGES[:reached]
    assert recorder.did == ALL_STAGES[reached:]
    assert _content(out) == undisturbed
