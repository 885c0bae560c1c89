"""A run folder with one damaged file: told of or made again, never another verdict unsaid."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from onnx import helper
from support import fuzzing
from support import onnx_models as om
from support.fuzzing import SECONDS, read_all, try_many
from support.unlucky import at_change, full_from

from twofour.comparing.compared import open_compared
from twofour.eligibility.layer_gates import Gates, missed_gates
from twofour.errors import BadInputError
from twofour.jobs import run_all, run_prune
from twofour.pipeline.folder import changed_files
from twofour.pipeline.reporting import report_document, report_folder
from twofour.pipeline.validating import validate_path
from twofour.records.eligibility import EligibilityReport
from twofour.records.options import CompareOptions, Precision, RunOptions
from twofour.records.weights import Selection
from twofour.reports.text import markdown
from twofour.store import to_json

_UNLUCKY = str(Path(__file__).parent / "support" / "unlucky.py")


def _damage(rng: random.Random, file: Path, folder: Path) -> None:
    """Its bytes or its JSON changed; gone, a folder, another file, or of another run."""
    content = file.read_bytes()
    is_json = file.suffix == ".json"
    step = rng.randrange(10 if is_json else 6)
    if step < 3:
        file.write_bytes(fuzzing.mutate_bytes(rng, content))
    elif step == 3:
        file.unlink()
    elif step == 4:
        file.unlink()
        file.mkdir()
    elif step == 5:
        others = [p for p in _files(folder) if p != file and p.suffix == file.suffix]
        shutil.copyfile(rng.choice([*others, folder / "run.json"]), file)
    elif step == 6:
        file.write_bytes(fuzzing.mutate_json(rng, content))
    else:
        file.write_text(json.dumps(_edited(rng, json.loads(content)), indent=2))


def _edited(rng: random.Random, value: object) -> object:
    """Another value of the same type, as of a record of another run, or edited by hand."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return {**value, key: _edited(rng, value[key])}
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        inner = () if rng.random() < 0.2 else (_edited(rng, value[at]),)
        return [*value[:at], *inner, *value[at + 1 :]]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, (int, float)) else f"{value} too"


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its finished run."""
    folder = tmp_path_factory.mktemp("whole")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], "dot")]
    model = om.model(nodes, {"w": om.weights(64, 64)}, inputs={"x": [2, 64]})
    run_all(str(om.save(model, folder / "m.onnx")), folder / "run", RunOptions())
    return folder


def _said(report: EligibilityReport) -> str:
    """What a report holds, besides what is stale."""
    return to_json(report).split('"model"', 1)[1]


def _check_report(folder: Path, expected: str) -> None:
    report = report_folder(folder).report
    assert report.stale or _said(report) == expected, "another report, and not a word"
    if report.stale:
        assert missed_gates(report, Gates(no_broken=True)) == report.stale
    document = report_document(folder, report)
    assert ("STALE" in markdown(document)) == bool(report.stale)
    assert report_folder(folder).report == report


def _validated(folder: Path) -> str:
    found = to_json(validate_path(folder, None, Selection()))
    return found.split('"files"', 1)[1].replace(str(folder), "")


def _check_validation(folder: Path, expected: str) -> None:
    validation = validate_path(folder, None, Selection())
    assert validation.stale or validation.broken or _validated(folder) == expected, "not a word"


def _check_resumed(folder: Path, model: Path, expected: str) -> None:
    options = RunOptions(precision=Precision.FLOAT16, resume=True)  # which prune alone does not do
    _, _, validation = run_prune(str(model), folder, options)
    assert to_json(validation).split('"files"', 1)[1] == expected
    left = ("prune.json", "validate.json", "sparse.onnx", "dense.onnx")
    assert changed_files(folder, left) == ()


@pytest.mark.timeout(max(600, 3 * SECONDS))
def test_a_damaged_run_folder_is_told_of_or_made_again(whole: Path, tmp_path: Path) -> None:
    report = _said(report_folder(whole / "run").report)
    expected = _validated(whole / "run")
    written = (whole / "run" / "validate.json").read_text().split('"files"', 1)[1]

    def once(rng: random.Random) -> Path:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole / "run", folder)
        _damage(rng, rng.choice(_files(folder)), folder)
        return folder

    def read(folder: Path) -> None:
        read_all(
            (
                lambda: _check_report(folder, report),
                lambda: _check_validation(folder, expected),
                lambda: open_compared([folder], None, CompareOptions()),
                lambda: _check_resumed(folder, whole / "m.onnx", written),
            ),
            folder,
        )

    try_many("run folder", once, read, sample=16)


_DONE = ("prune.json", "validate.json", "sparse.onnx", "dense.onnx", "eligibility.json",
         "export.json", "layers.json", "accuracy.json", "inputs.npz")  # fmt: skip
"""What is the same on every run: no times are in them."""


def _content(folder: Path) -> dict[str, bytes]:
    return {n: (folder / n).read_bytes() for n in _DONE if (folder / n).is_file()}


def test_a_disk_that_is_full_at_any_change_leaves_nothing_half_written(
    whole: Path, tmp_path: Path
) -> None:
    """Every place where pruning writes; in `make fuzz` those of the whole job too."""
    model, out = str(whole / "m.onnx"), tmp_path / "out" / "run"
    job = run_all if SECONDS else run_prune
    seen: list[int] = []
    with at_change(tmp_path, seen.append):
        job(model, out, RunOptions())
    expected = _content(out)
    assert len(seen) > 40
    for number in seen[:: 1 if SECONDS else 8]:
        shutil.rmtree(out.parent, ignore_errors=True)
        with (
            at_change(tmp_path, full_from(number)),
            pytest.raises(BadInputError, match=f"{re.escape(str(tmp_path))}.*: No space left") as e,
        ):
            job(model, out, RunOptions())
        assert "choose another" in (e.value.hint or "")
        assert list(tmp_path.rglob("*.part")) == []
        assert all(expected[n] == c for n, c in _content(out).items())
    job(model, out, RunOptions(resume=True))
    assert _content(out) == expected
    assert changed_files(out, _DONE) == ()


@pytest.mark.timeout(max(600, 3 * SECONDS))
def test_a_run_killed_before_any_change_ends_as_one_that_was_not(
    whole: Path, tmp_path: Path
) -> None:
    """At one place; in `make fuzz` at as many as the time allows."""
    model, out = str(whole / "m.onnx"), tmp_path / "run"
    expected = _content(whole / "run")
    rng, ends = random.Random(time.time_ns() if SECONDS else 3), time.monotonic() + SECONDS
    while True:
        shutil.rmtree(out, ignore_errors=True)
        number = rng.randrange(2, 150)
        killed = subprocess.run(
            [sys.executable, _UNLUCKY, model, str(out), str(number)], check=False
        )
        assert killed.returncode == -9, number
        run_all(model, out, RunOptions(resume=True))
        assert _content(out) == expected, number
        assert list(out.rglob("*.part")) == [], number
        assert report_folder(out).report.stale == ()
        if time.monotonic() >= ends:
            break
