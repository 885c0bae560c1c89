"""Files of a run folder that somebody changed: noticed by their hashes, made again by the run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from onnx import helper
from support import onnx_models as om
from support.small_run import Recorder

from twofour.comparing.compared import open_compared
from twofour.eligibility.layer_gates import Gates, missed_gates
from twofour.errors import BadInputError
from twofour.jobs import run_all, run_prune
from twofour.packages import __version__
from twofour.pipeline.folder import recorded_hashes
from twofour.pipeline.reporting import report_document, report_folder
from twofour.pipeline.validating import validate_path
from twofour.records.latency import LatencyComparison
from twofour.records.options import CompareOptions, RunOptions
from twofour.records.weights import Pattern, Selection
from twofour.reports import html
from twofour.reports.explain import layer_story
from twofour.reports.pruning_document import validation_document
from twofour.reports.terminal import plain_text, render
from twofour.reports.text import markdown
from twofour.store import read_record, to_json, write_record

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


def _replace(path: Path) -> None:
    blank = b"" if path.suffix == ".onnx" else b" "
    path.write_bytes(path.read_bytes().replace(b"dot", b"dab") + blank)


@pytest.mark.parametrize("name", ["eligibility.json", "dense.onnx", "build.json", "layers.json"])
def test_a_report_of_other_files_than_are_there_is_stale_and_meets_no_gate(
    run: Path, name: str
) -> None:
    _replace(run / name)
    report = report_folder(run).report
    (told,) = report.stale
    assert re.fullmatch(
        rf"{re.escape(name)} was changed after the [a-z-]+ stage (wrote|read) it "
        r"\(run\.json has its sha256\)",
        told,
    )
    assert missed_gates(report, Gates()) == ()
    assert missed_gates(report, Gates(no_broken=True)) == (told,)
    assert missed_gates(report, Gates(min_eligible=0.0)) == (told,)


def test_what_is_stale_stands_first_in_every_format(run: Path) -> None:
    shutil.copyfile(run / "dense.onnx", run / "sparse.onnx")
    report = report_folder(run).report
    assert json.loads(to_json(report))["stale"] == list(report.stale)
    document = report_document(run, report)
    texts = (markdown(document), html.page(document), plain_text(render(document)))
    for text, behind in zip(texts, ("\n|", "<table", "pattern 2:4"), strict=True):
        assert text.index("STALE: sparse.onnx") < text.index(behind)
    judged = report_folder(run)
    assert "STALE: sparse.onnx" in plain_text(layer_story(report, judged.evidence(), "dot"))


def test_a_folder_of_another_version_is_said_to_be_stale(run: Path) -> None:
    record = json.loads((run / "run.json").read_bytes()) | {"twofour_version": "0.0.0"}
    (run / "run.json").write_text(json.dumps(record))
    assert report_folder(run).report.stale == (
        f"twofour 0.0.0 made the folder, this is {__version__}",
    )
    assert validate_path(run, None, Selection()).stale == ()


def test_a_folder_that_was_moved_or_copied_is_as_it_was_left(run: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "r"
    shutil.copytree(run, moved, copy_function=shutil.copyfile)
    shutil.rmtree(run)
    assert report_folder(moved).report.stale == ()
    assert validate_path(moved, None, Selection()).stale == ()
    assert open_compared([moved], None, CompareOptions()).is_run


def test_what_a_report_is_not_of_may_be_gone_and_it_itself_may_not(run: Path) -> None:
    (run / "dense.onnx").unlink()
    (run / "stages" / "outputs-dense.npz").unlink()
    assert report_folder(run).report.stale == ()
    (run / "eligibility.json").unlink()
    (stale,) = report_folder(run).report.stale
    assert "eligibility.json is missing since the report stage wrote it" in stale


def test_another_pruning_in_the_folder_makes_the_report_stale(finished: Path, run: Path) -> None:
    run_prune(str(finished / "m.onnx"), run, RunOptions(pattern=Pattern(1, 4)))
    told = report_folder(run).report.stale
    assert "prune.json was changed after the export stage read it" in told[0]
    assert validate_path(run, None, Selection()).stale == ()


def test_a_weight_that_prune_json_forgets_does_not_pass_as_never_pruned(run: Path) -> None:
    shutil.copyfile(run / "dense.onnx", run / "sparse.onnx")
    record = json.loads((run / "prune.json").read_bytes())
    for row in record["weights"]:
        row["pruned"] = False
    (run / "prune.json").write_text(json.dumps(record))
    checked = validate_path(run, None, Selection())
    assert checked.broken == ()
    for found in (checked, validate_path(run / "sparse.onnx", None, Selection())):
        assert {line.split()[0] for line in found.stale} == {"prune.json", "sparse.onnx"}
    assert "STALE: prune.json" in markdown(validation_document(checked))


@pytest.mark.parametrize(
    ("name", "change"),
    [("sparse.onnx", Path.unlink), ("sparse.onnx", _replace), ("dense.onnx", _replace)],
)
def test_a_run_that_is_resumed_makes_a_changed_file_again_byte_for_byte(
    finished: Path, run: Path, name: str, change: Callable[[Path], None]
) -> None:
    before = _content(run)
    change(run / name)
    recorder = Recorder()
    run_all(str(finished / "m.onnx"), run, RunOptions(resume=True), recorder)
    assert len(recorder.did) == 1
    assert _content(run) == before
    assert report_folder(run).report.verdicts


def test_compare_refuses_a_model_that_was_swapped_in(run: Path) -> None:
    _replace(run / "sparse.onnx")
    with pytest.raises(BadInputError, match=r"sparse\.onnx was changed after"):
        open_compared([run], None, CompareOptions())


def test_a_comparison_may_write_its_page_after_the_report(run: Path) -> None:
    (run / "report.html").write_text("with times")
    (run / "latency.json").write_text("{}")
    assert report_folder(run).report.verdicts


def test_times_of_other_models_are_left_out_of_the_page_and_that_is_said(
    finished: Path, run: Path
) -> None:
    models = recorded_hashes(run, ["dense.onnx", "sparse.onnx"])
    timed = read_record(LatencyComparison, run / "stages" / "times.json")
    write_record(run / "latency.json", replace(timed, source="mine", files=models))
    shown = markdown(report_document(run, report_folder(run).report))
    run_prune(str(finished / "m.onnx"), run, RunOptions(pattern=Pattern(1, 4)))
    assert recorded_hashes(run, models) != models
    run_all(str(finished / "m.onnx"), run, RunOptions(pattern=Pattern(1, 4)))
    told = "latency.json was measured on earlier models: its times are left out"
    assert (told in shown, told in (run / "report.md").read_text()) == (False, True)


def test_verdicts_of_the_dense_file_of_a_pruned_folder_say_so(tmp_path: Path) -> None:
    """As where somebody calls `prune` and then `export`, which takes the model as it is."""
    model, out = om.save(om.two_weights(), tmp_path / "m.onnx"), tmp_path / "run"
    run_prune(str(model), out, RunOptions(), Recorder())
    om.save(om.two_weights(), out / "dense.onnx")
    (out / "sparse.onnx").unlink()
    report = report_folder(out).report
    assert report.notes[0].startswith("these are the verdicts of dense.onnx: what `prune` made")
