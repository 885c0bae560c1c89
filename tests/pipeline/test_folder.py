"""The run folder: made, recognised, used by one command at a time, and never left by a link."""

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
from twofour.pipeline.folder import STAGES, lock_folder, onnx_files, open_run_folder
from twofour.records.run import RunManifest
from twofour.store import write_record


def test_a_folder_of_something_else_and_a_file_are_never_touched(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("x")
    for path, message in ((tmp_path, r"'thesis\.tex'"), (thesis, "is a file")):
        with pytest.raises(BadInputError, match=message), open_run_folder(path, "m"):
            pass
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_of_another_model_is_not_overwritten(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, "a.onnx"):
        (tmp_path / "dense.onnx").write_text("made")
    with (
        pytest.raises(BadInputError, match=r"a\.onnx, not of b\.onnx"),
        open_run_folder(tmp_path, "b.onnx"),
    ):
        pass


def test_a_run_that_failed_before_it_made_anything_does_not_own_its_folder(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, "timm:x"):
        (tmp_path / STAGES).mkdir(exist_ok=True)
    with open_run_folder(tmp_path, "timm:x?pretrained=false") as folder:
        assert folder.manifest.source == "timm:x?pretrained=false"


def test_half_written_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, "m"):
        pass
    (tmp_path / ".weights.safetensors.abc.part").write_text("half")
    (tmp_path / "..dense.onnx.abc.part.def.part").write_text("half")
    (tmp_path / ".dense.onnx.abc.part").mkdir()
    (tmp_path / ".dense.onnx.abc.part" / "dense.onnx.data").write_text("half")
    (tmp_path / "stages").mkdir(exist_ok=True)
    (tmp_path / "stages" / ".export-dense.json.abc.part").write_text("half")
    with open_run_folder(tmp_path, "m"):
        assert sorted(p.name for p in tmp_path.rglob("*")) == [".lock", "run.json", "stages"]


@pytest.mark.parametrize(
    "name",
    [".git/HEAD", ".part", ".video.mp4.part", ".a.b.part", ".notes.json", ".dense.onnx.abc/x"],
)
def test_dot_files_that_are_not_ours_are_never_removed(tmp_path: Path, name: str) -> None:
    with open_run_folder(tmp_path, "m"):
        pass
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("the user's")
    with open_run_folder(tmp_path, "m"):
        pass
    assert (tmp_path / name).read_text() == "the user's"


def test_a_run_killed_before_its_first_record_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".run.json.abc.part").write_text("half")
    with open_run_folder(tmp_path, "m") as folder:
        assert folder.manifest.stages == ()


@pytest.mark.parametrize("name", ["dense.onnx.backup.data", "dense.onnx.1a.data", "dense.onnx.dat"])
def test_data_files_that_are_called_like_ours_are_the_users(tmp_path: Path, name: str) -> None:
    for there in ("dense.onnx", "dense.onnx.data", "dense.onnx.0.data", "dense.onnx.12.data", name):
        (tmp_path / there).write_text("x")
    assert onnx_files(tmp_path / "dense.onnx") == (
        "dense.onnx", "dense.onnx.0.data", "dense.onnx.12.data", "dense.onnx.data",
    )  # fmt: skip


def test_a_run_json_of_another_tool_is_left_alone_and_not_to_be_removed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"params": 1}')
    with pytest.raises(BadInputError, match=r"run\.json") as caught, open_run_folder(tmp_path, "m"):
        pass
    assert "no run of twofour" in (caught.value.hint or "")
    assert (tmp_path / "run.json").read_text() == '{"params": 1}'


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
    link.rmdir()
    link.symlink_to(tmp_path / target)
    with pytest.raises(BadInputError, match="is a link") as caught, lock_folder(tmp_path / "run"):
        pass
    assert str(link) in caught.value.message
    assert "remove the link" in (caught.value.hint or "")
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
