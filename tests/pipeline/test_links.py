"""Nothing is written out of a run folder through a link, and by one command at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.onnx_models import gemm, save, weights
from typer.testing import CliRunner

from twofour.cli import application
from twofour.errors import BadInputError
from twofour.pipeline.folder import STAGES, lock_folder, open_run_folder
from twofour.records.run import RunManifest
from twofour.store import write_record

POSIX = pytest.mark.skipif(os.name == "nt", reason="links and locks of POSIX")


@POSIX
@pytest.mark.parametrize("target", ["there", "missing", "run/stages"])
def test_a_folder_of_ours_that_is_a_link_is_refused_before_anything_is_written(
    tmp_path: Path, target: str
) -> None:
    outside = tmp_path / "there"
    outside.mkdir()
    with open_run_folder(tmp_path / "run", "m"):
        pass
    link = tmp_path / "run" / STAGES
    link.symlink_to(tmp_path / target)
    with pytest.raises(BadInputError, match="is a link") as caught, lock_folder(tmp_path / "run"):
        pass
    assert str(link) in caught.value.message
    assert caught.value.hint == "remove the link, or choose another folder with --out"
    assert not [*outside.iterdir()]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "there"]
    with pytest.raises(BadInputError, match="is a link"), open_run_folder(tmp_path / "run", "m"):
        pass


@POSIX
@pytest.mark.parametrize(
    "arguments",
    [("prune", "{model}"), ("compare", "{model}", "{model}"), ("sensitivity", "{model}")],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("name", [STAGES, ".lock"])
def test_no_command_writes_through_a_link(
    tmp_path: Path, arguments: tuple[str, ...], name: str
) -> None:
    model = save(gemm(weights(8, 16), trans_b=1), tmp_path / "m.onnx")
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    run.mkdir()
    write_record(run / "run.json", RunManifest(source=str(model), twofour_version="0", stages=()))
    (run / name).symlink_to(outside / "lock" if name == ".lock" else outside)
    told = [part.format(model=model) for part in arguments]
    result = CliRunner().invoke(application(), [*told, "--out", str(run)])
    assert (result.exit_code, [*outside.iterdir()]) == (2, []), result.output
    assert "is a link" in result.stderr


_HOLDER = """
import sys, time
from pathlib import Path
from twofour.pipeline.folder import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@POSIX
def test_the_lock_of_a_process_that_died_holds_nobody_up(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(BadInputError, match="is in use"), lock_folder(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock_folder(tmp_path):
        pass
