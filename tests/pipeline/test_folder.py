"""The run folder: never somebody else's, never two runs at a time."""

import multiprocessing
from pathlib import Path

import pytest

from twofour.errors import BadInputError
from twofour.pipeline.folder import is_run_folder, open_run_folder, own_folder
from twofour.pipeline.onnx_stages import remove_onnx
from twofour.pipeline.stages import onnx_files
from twofour.records.run import StageRecord


def test_a_new_folder_becomes_a_run_folder(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "a" / "b", "m.onnx") as folder:
        assert folder.manifest.source == "m.onnx"
    assert is_run_folder(tmp_path / "a" / "b")


def test_a_finished_stage_is_found_again(tmp_path: Path) -> None:
    record = StageRecord(stage="prune", key="k", outputs={"f": "h"})
    with open_run_folder(tmp_path, "m") as folder:
        folder.finish(record)
    with open_run_folder(tmp_path, "m") as folder:
        assert folder.stage("prune") == record
        assert folder.stage("export") is None


def test_a_folder_of_something_else_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with (
        pytest.raises(BadInputError, match=r"not a run folder \(it holds 'thesis.tex'\)"),
        open_run_folder(tmp_path, "m"),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(BadInputError, match="is a file"), open_run_folder(tmp_path / "f", "m"):
        pass


def test_a_run_of_another_model_is_not_overwritten(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, "a.onnx"):
        pass
    with (
        pytest.raises(BadInputError, match=r"holds a run of a\.onnx, not of b\.onnx"),
        open_run_folder(tmp_path, "b.onnx"),
    ):
        pass


def test_half_written_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, "m"):
        pass
    (tmp_path / ".weights.safetensors.abc.part").write_text("half")
    (tmp_path / ".dense.onnx.abc.part").mkdir()
    (tmp_path / ".dense.onnx.abc.part" / "dense.onnx.data").write_text("half")
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / ".export-dense.json.abc.part").write_text("half")
    with open_run_folder(tmp_path, "m"):
        assert sorted(p.name for p in tmp_path.rglob("*")) == [".lock", "run.json", "stages"]


@pytest.mark.parametrize(
    "name",
    [".git/HEAD", ".gitignore", ".dvc/config", ".env", ".part", ".video.mp4.part", ".a.b.part",
     ".notes.json", ".report.html.swp", ".dense.onnx.abc/x"],
)  # fmt: skip
def test_dot_files_that_are_not_ours_are_never_removed(tmp_path: Path, name: str) -> None:
    with open_run_folder(tmp_path, "m"):
        pass
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("the user's")
    with open_run_folder(tmp_path, "m"):
        pass
    assert (tmp_path / name).read_text() == "the user's"


def test_leftovers_behind_a_link_are_not_ours(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".run.json.abc.part").write_text("the user's")
    with open_run_folder(tmp_path / "run", "m"):
        pass
    (tmp_path / "run" / ".dense.onnx.abc.part").symlink_to(outside)
    with open_run_folder(tmp_path / "run", "m"):
        pass
    (tmp_path / "run" / "stages").symlink_to(outside)
    with pytest.raises(BadInputError), open_run_folder(tmp_path / "run", "m"):
        pass
    assert (outside / ".run.json.abc.part").read_text() == "the user's"
    assert not (tmp_path / "run" / ".dense.onnx.abc.part").is_symlink()


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(
    tmp_path: Path, there: bool
) -> None:
    outside = tmp_path / "outside"
    if there:
        outside.write_text("the user's")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(outside)
    with (
        pytest.raises(BadInputError, match=r"\.lock is a link \(to .*outside\)") as caught,
        open_run_folder(tmp_path / "run", "m"),
    ):
        pass
    assert caught.value.hint == "remove the link, or choose another folder with --out"
    assert outside.read_text() == "the user's" if there else not outside.exists()


@pytest.mark.parametrize("name", ["stages", "compare"])
def test_a_folder_of_ours_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(BadInputError, match=rf"{name} is a link .*writes into its own folder"):
        own_folder(tmp_path / name)
    assert not (tmp_path / "outside").exists()


def test_a_run_killed_before_its_first_record_can_be_started_again(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".run.json.abc.part").write_text("half")
    with open_run_folder(tmp_path, "m") as folder:
        assert folder.manifest.stages == ()


def test_a_second_run_in_the_same_folder_is_a_clear_error(tmp_path: Path) -> None:
    with open_run_folder(tmp_path, "m"):
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            message = pool.apply(_error_of_second_run, (tmp_path,))
    assert "in use by another twofour command" in message


def _error_of_second_run(path: Path) -> str:
    try:
        with open_run_folder(path, "m"):
            return ""
    except BadInputError as error:
        return str(error)


def test_a_damaged_run_json_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(BadInputError, match=r"run\.json"), open_run_folder(tmp_path, "m"):
        pass


@pytest.mark.parametrize("name", ["dense.onnx.backup.data", "dense.onnx.1a.data", "dense.onnx.dat"])
def test_data_files_that_are_called_like_ours_are_the_users(tmp_path: Path, name: str) -> None:
    for there in ("dense.onnx", "dense.onnx.data", "dense.onnx.0.data", "dense.onnx.12.data", name):
        (tmp_path / there).write_text("x")
    assert onnx_files(tmp_path / "dense.onnx") == (
        "dense.onnx", "dense.onnx.0.data", "dense.onnx.12.data", "dense.onnx.data",
    )  # fmt: skip
    remove_onnx(tmp_path / "dense.onnx")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_run_json_of_another_tool_is_left_alone_and_not_to_be_removed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"params": 1}')
    with pytest.raises(BadInputError, match=r"run\.json") as caught, open_run_folder(tmp_path, "m"):
        pass
    assert "no run of twofour made it; nothing in it was touched" in (caught.value.hint or "")
    assert (tmp_path / "run.json").read_text() == '{"params": 1}'
