"""Files of a run folder that somebody changed: noticed by their hashes, made again by the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import helper
from support import onnx_models as om
from test_run import Recorder

from twofour.errors import BadInputError
from twofour.pipeline.compare.variants import open_compared
from twofour.pipeline.reporting import explained_folder, report_folder
from twofour.pipeline.run import run_all, run_prune
from twofour.records.options import CompareOptions, RunOptions
from twofour.records.weights import Pattern
from twofour.store import sha256_file

_TIMED = {"build.json", "run.json", "report.html", "stages/build-dense.json"}
_TIMED |= {"stages/build-sparse.json", "stages/times.json"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "dot")]
    model = om.model(nodes, {"w": om.weights(64, 64)}, inputs={"x": [2, 64]})
    path = om.save(model, folder / "m.onnx")
    run_all(str(path), folder / "run", RunOptions())
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished / "run", tmp_path / "run"))


def _content(folder: Path) -> dict[str, bytes]:
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
    found = {str(p.relative_to(folder)): p.read_bytes() for p in files}
    return {name: content for name, content in found.items() if name not in _TIMED}


def _remove(path: Path) -> None:
    path.unlink()


def _replace(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"dot", b"dab") + b" ")


@pytest.mark.parametrize("change", [_remove, _replace])
@pytest.mark.parametrize("command", [report_folder, explained_folder])
def test_a_report_that_is_gone_or_replaced_is_never_made_up(
    run: Path, change: Callable[[Path], None], command: Callable[[Path], object]
) -> None:
    change(run / "eligibility.json")
    with pytest.raises(BadInputError, match=r"eligibility\.json is .* the report of the run left"):
        command(run)


@pytest.mark.parametrize("name", ["sparse.onnx", "prune.json", "layers.json", "build.json"])
def test_a_report_of_other_files_than_are_there_is_refused(run: Path, name: str) -> None:
    _replace(run / name)
    with pytest.raises(BadInputError, match=f"{name} is not the file that the report") as caught:
        report_folder(run)
    assert "run.json has its sha256" in caught.value.message


def test_another_pruning_in_the_folder_makes_the_report_stale(finished: Path, run: Path) -> None:
    run_prune(str(finished / "m.onnx"), run, RunOptions(pattern=Pattern(1, 4)))
    with pytest.raises(BadInputError, match="is not the file that the report"):
        report_folder(run)


@pytest.mark.parametrize("name", ["eligibility.json", "sparse.onnx", "dense.onnx", "layers.json"])
@pytest.mark.parametrize("change", [_remove, _replace])
def test_the_same_command_makes_a_changed_file_again_byte_for_byte(
    finished: Path, run: Path, name: str, change: Callable[[Path], None]
) -> None:
    before = _content(run)
    change(run / name)
    recorder = Recorder()
    run_all(str(finished / "m.onnx"), run, RunOptions(), recorder)
    assert len(recorder.did) == 1
    assert _content(run) == before
    assert report_folder(run).verdicts


@pytest.mark.parametrize("name", ["dense.onnx", "sparse.onnx"])
def test_compare_refuses_a_model_that_was_swapped_in(run: Path, name: str) -> None:
    _replace(run / name)
    with pytest.raises(BadInputError, match=f"{name} is not the file"):
        open_compared([run], None, CompareOptions())


def test_a_comparison_may_write_its_page_after_the_report(run: Path) -> None:
    (run / "report.html").write_text("with times")
    (run / "latency.json").write_text("{}")
    assert report_folder(run).verdicts


def test_run_json_keeps_what_every_stage_read(run: Path) -> None:
    stages = {s["stage"]: s for s in json.loads((run / "run.json").read_bytes())["stages"]}
    assert stages["prune"]["inputs"] == {"dense.onnx": sha256_file(run / "dense.onnx")}
    assert stages["report"]["inputs"]["sparse.onnx"] == sha256_file(run / "sparse.onnx")
