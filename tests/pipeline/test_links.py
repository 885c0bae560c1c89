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

from twofour.cli.app import app
from twofour.errors import BadInputError
from twofour.pipeline.compare.variants import FOLDER as COMPARE
from twofour.pipeline.folder import FOLDERS, STAGES, alone_in, open_run_folder, writing_into
from twofour.pipeline.sensitivity.everything import FOLDER as SENSITIVITY
from twofour.pipeline.stages import CHECKPOINT
from twofour.records.run import RunManifest
from twofour.store import write_record

POSIX = pytest.mark.skipif(os.name == "nt", reason="links and locks of POSIX")


def test_every_folder_that_a_run_makes_is_looked_through() -> None:
    assert set(FOLDERS) == {STAGES, COMPARE, SENSITIVITY, CHECKPOINT}


@POSIX
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("inside", ["", "calibration", "calibration/piece.onnx", "a/b/c.json"])
@pytest.mark.parametrize("target", ["there", "missing", "loop"])
def test_a_link_in_a_folder_of_ours_is_refused_before_anything_is_written(
    tmp_path: Path, folder: str, inside: str, target: str
) -> None:
    outside = tmp_path / "there"
    outside.mkdir()
    (outside / "piece.onnx").write_text("the user's")
    with open_run_folder(tmp_path / "run", "m"):
        pass
    link = tmp_path / "run" / folder / inside
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(link if target == "loop" else tmp_path / target)
    with pytest.raises(BadInputError, match="is a link") as caught, writing_into(tmp_path / "run"):
        pass
    assert str(link) in caught.value.message
    assert caught.value.hint == "remove the link, or choose another folder with --out"
    assert (outside / "piece.onnx").read_text() == "the user's"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run", "there"]
    with pytest.raises(BadInputError, match="is a link"), open_run_folder(tmp_path / "run", "m"):
        pass


@POSIX
def test_a_link_of_the_users_beside_our_folders_is_left_alone(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "run", "m"):
        pass
    (tmp_path / "run" / "data").symlink_to(tmp_path)
    with open_run_folder(tmp_path / "run", "m"):
        pass
    assert (tmp_path / "run" / "data").is_symlink()


@POSIX
@pytest.mark.parametrize(
    "arguments",
    [("prune", "{model}"), ("compare", "{model}", "{model}"), ("sensitivity", "{model}")],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("name", [*FOLDERS[:2], ".lock"])
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
    result = CliRunner().invoke(app, [*told, "--out", str(run)])
    assert (result.exit_code, [*outside.iterdir()]) == (2, []), result.output
    assert "is a link" in result.stderr


def test_a_second_command_in_the_folder_is_told_in_a_line(tmp_path: Path) -> None:
    with writing_into(tmp_path), pytest.raises(BadInputError) as caught, writing_into(tmp_path):
        pass
    assert caught.value.message == f"{tmp_path} is in use by another twofour command"
    with writing_into(tmp_path):  # it is let go of
        pass


@POSIX
def test_two_comparisons_in_one_folder_are_one_too_many(tmp_path: Path) -> None:
    model = save(gemm(weights(8, 16), trans_b=1), tmp_path / "m.onnx")
    out = tmp_path / "out"
    out.mkdir()
    with writing_into(out):
        result = CliRunner().invoke(app, ["compare", str(model), str(model), "--out", str(out)])
    assert result.exit_code == 2
    assert f"{out} is in use by another twofour command" in result.stderr


@POSIX
def test_two_that_emit_into_one_folder_are_one_too_many(tmp_path: Path) -> None:
    model = save(gemm(weights(8, 16), trans_b=1), tmp_path / "m.onnx")
    out = tmp_path / "out"
    arguments = ["build", str(model), "--emit-trtexec", str(out)]
    out.mkdir()
    with alone_in(out):
        result = CliRunner().invoke(app, arguments)
        assert (result.exit_code, [*out.iterdir()]) == (2, [])
    assert f"{out} is in use by another twofour command" in result.stderr
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not (out / ".lock").exists()


_HOLDER = """
import sys, time
from pathlib import Path
from twofour.pipeline.folder import writing_into
with writing_into(Path(sys.argv[1])):
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
    with pytest.raises(BadInputError, match="is in use"), writing_into(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with writing_into(tmp_path):
        pass
