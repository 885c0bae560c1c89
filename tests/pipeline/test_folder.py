"""The run folder: never somebody else's, never two runs at a time."""

import multiprocessing
from pathlib import Path

import pytest

from twofour.errors import BadInputError
from twofour.pipeline.folder import is_run_folder, open_run_folder
from twofour.records import StageRecord


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
    (tmp_path / ".dense.onnx.abc").mkdir()
    (tmp_path / ".dense.onnx.abc" / "dense.onnx.data").write_text("half")
    with open_run_folder(tmp_path, "m"):
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "run.json"]


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
    assert "in use by another twofour run" in message


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
