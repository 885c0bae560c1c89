"""A run folder with one damaged file: told of or made again, never another verdict unsaid."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import helper
from support import onnx_models as om
from support.unlucky import at_change, full_from

from twofour.eligibility.gates import Gates, check_gates
from twofour.errors import BadInputError, TwofourError
from twofour.pipeline.changed_files import changes
from twofour.pipeline.compare.variants import open_compared
from twofour.pipeline.reporting import (
    check_page,
    explained_folder,
    report_document,
    report_folder,
)
from twofour.pipeline.run import run_all, run_prune
from twofour.pipeline.validating import validate_path
from twofour.records.eligibility import EligibilityReport
from twofour.records.options import CompareOptions, RunOptions, Selection
from twofour.reports import html, markdown
from twofour.reports.terminal import plain_text, render
from twofour.store import to_json

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
"""How long `make fuzz` goes on; 0: a bounded sample, the same each time."""
_SAMPLE = 24
_LONGEST_S = 20.0
_KEPT = Path("build/fuzz")
_UNLUCKY = str(Path(__file__).parent / "support" / "unlucky.py")
Mutate = Callable[[random.Random, Path, Path], None]
"""Given the random numbers, the file, and the folder that it lies in."""


def _truncate(rng: random.Random, file: Path, _folder: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(max(1, len(content)))])


def _flip(rng: random.Random, file: Path, _folder: Path) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 4)):
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(bytes(content))


def _empty(_rng: random.Random, file: Path, _folder: Path) -> None:
    file.write_bytes(b"")


def _delete(_rng: random.Random, file: Path, _folder: Path) -> None:
    file.unlink()


def _make_folder(_rng: random.Random, file: Path, _folder: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside.txt").write_text("the user's")


def _replace(rng: random.Random, file: Path, folder: Path) -> None:
    """By another file of the folder, of the same kind where there is one."""
    others = [p for p in _files(folder) if p != file and p.suffix == file.suffix]
    if others:
        shutil.copyfile(rng.choice(others), file)


def _nest(_rng: random.Random, file: Path, _folder: Path) -> None:
    file.write_text("[" * 100_000 + "]" * 100_000)


_ODD = (
    "NaN", "-Infinity", '"\\ud800"', "9" * 400, "1e999", "-1", "true", "null", '""', "[]", "{}",
    '"../../outside"', '"' + "n" * 300 + '"', '"\\u0000"',
)  # fmt: skip


def _odd_value(rng: random.Random, file: Path, _folder: Path) -> None:
    """A value somewhere in the JSON is one that is hardly ever there."""
    text = json.dumps(_marked(rng, json.loads(file.read_bytes())))
    file.write_text(text.replace('"@here"', rng.choice(_ODD)))


def _as_text(rng: random.Random, file: Path, _folder: Path) -> None:
    """Numbers as strings, strings as numbers."""
    found = json.loads(file.read_bytes())
    text = json.dumps(_marked(rng, found))
    file.write_text(text.replace('"@here"', rng.choice(('"7"', "7", '"0.5"', "false"))))


def _edit(rng: random.Random, file: Path, _folder: Path) -> None:
    """Another value of the same type, as of a record of another run, or edited by hand."""
    file.write_text(json.dumps(_edited(rng, json.loads(file.read_bytes())), indent=2))


def _edited(rng: random.Random, value: object) -> object:
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


def _marked(rng: random.Random, value: object) -> object:
    """The JSON with one of its values, at any depth, replaced by "@here"."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        return {**value, key: _marked(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], _marked(rng, value[at]), *value[at + 1 :]]
    return "@here"


_OF_BYTES: tuple[Mutate, ...] = (_truncate, _flip, _empty, _delete, _make_folder, _replace)
_OF_JSON: tuple[Mutate, ...] = (*_OF_BYTES, _nest, _odd_value, _as_text, *[_edit] * 5)


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
    report = report_folder(folder)
    assert report.stale or _said(report) == expected, "another report, and not a word"
    if report.stale:
        assert check_gates(report, Gates(no_broken=True)) == report.stale
    document = report_document(folder, report)
    assert ("STALE" in markdown.render(document)) == bool(report.stale)
    if SECONDS:
        html.render(document)
        plain_text(render(document))
    assert explained_folder(folder)[0] == report


def _check_validation(folder: Path, expected: str) -> None:
    validation = validate_path(folder, None, Selection())
    found = to_json(validation).split('"files"', 1)[1].replace(str(folder), "")
    assert validation.stale or validation.broken or found == expected, "another, and not a word"


def _check_compared(folder: Path) -> None:
    open_compared([folder], None, CompareOptions())
    check_page(folder)


def _check_resumed(folder: Path, model: Path, expected: str) -> None:
    _, _, validation = run_prune(str(model), folder, RunOptions())
    assert to_json(validation).split('"files"', 1)[1] == expected
    assert not validation.broken
    left = ("prune.json", "validate.json", "sparse.onnx", "dense.onnx")
    assert changes(folder, left) == ()


def _problem(check: Callable[[], None]) -> str | None:
    """What is wrong with how the folder was read: where in our code, to tell kinds apart."""
    started = time.monotonic()
    try:
        check()
    except TwofourError as error:
        if error.exit_code not in (2, 4) or not error.message:
            return f"exit {error.exit_code}: {error.message[:80]}"
    except Exception as error:  # noqa: BLE001  # the point of this test
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if "src/twofour" in f.filename] or frames
        return f"{type(error).__name__} in {ours[-1].filename}:{ours[-1].lineno} {str(error)[:90]}"
    took = time.monotonic() - started
    return f"took {took:.0f} s" if took > _LONGEST_S else None


@pytest.mark.timeout(max(600, 3 * SECONDS))
def test_a_damaged_run_folder_is_told_of_or_made_again(whole: Path, tmp_path: Path) -> None:
    model, folder = whole / "m.onnx", tmp_path / "run"
    report = _said(report_folder(whole / "run"))
    by_path = to_json(validate_path(whole / "run", None, Selection()))
    by_run = (whole / "run" / "validate.json").read_text().split('"files"', 1)[1]
    expected = by_path.split('"files"', 1)[1].replace(str(whole / "run"), "")
    checks = (
        lambda: _check_report(folder, report),
        lambda: _check_validation(folder, expected),
        lambda: _check_compared(folder),
        lambda: _check_resumed(folder, model, by_run),
    )
    first = time.time_ns() if SECONDS else 0
    ends, number = time.monotonic() + SECONDS, 0
    failures: dict[str, str] = {}
    while time.monotonic() < ends if SECONDS else number < _SAMPLE:
        rng = random.Random(first + number)
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole / "run", folder)
        file = rng.choice(_files(folder))
        mutate = rng.choice(_OF_JSON if file.suffix == ".json" else _OF_BYTES)
        mutate(rng, file, folder)
        for check in checks:
            problem = _problem(check)
            if problem is not None and problem not in failures:
                name = f"{mutate.__name__.strip('_')} of {file.relative_to(folder)}"
                failures[problem] = f"{name}, {_keep(folder, f'folder-{first + number - 1}')}"
    told = "\n".join(f"{problem}: {kept}" for problem, kept in failures.items())
    assert not failures, f"{len(failures)} kinds of failure in {number} folders:\n{told}"


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
    for number in seen[:: 1 if SECONDS else 2]:
        shutil.rmtree(out.parent, ignore_errors=True)
        with (
            at_change(tmp_path, full_from(number)),
            pytest.raises(BadInputError, match=f"{re.escape(str(tmp_path))}.*: No space left") as e,
        ):
            job(model, out, RunOptions())
        assert "--out" in (e.value.hint or "")
        assert list(tmp_path.rglob("*.part")) == []
        assert all(expected[n] == c for n, c in _content(out).items())
    job(model, out, RunOptions())
    assert (_content(out), _stale(out)) == (expected, ())


def _stale(folder: Path) -> tuple[str, ...]:
    """What of the folder's main files is stale."""
    return changes(folder, ("eligibility.json", "prune.json", "validate.json", "sparse.onnx"))


@pytest.mark.slow
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
        run_all(model, out, RunOptions())
        assert _content(out) == expected, number
        assert list(out.rglob("*.part")) == [], number
        assert report_folder(out).stale == ()
        if time.monotonic() >= ends:
            break


def _refusal(work: Callable[[], object]) -> str | None:
    try:
        work()
    except BadInputError as error:
        return error.message
    return None


def _keep(folder: Path, name: str) -> str:
    target = _KEPT / name
    if not target.exists():
        shutil.copytree(folder, target)
    return str(target)


@pytest.mark.slow
@pytest.mark.timeout(max(600, 3 * SECONDS))
def test_the_main_job_mends_every_file_of_its_folder(whole: Path, tmp_path: Path) -> None:
    """With its worker processes, so only one damage of each file, and many in `make fuzz`."""
    report, model = _said(report_folder(whole / "run")), str(whole / "m.onnx")
    rng = random.Random(time.time_ns() if SECONDS else 7)
    names = [str(p.relative_to(whole / "run")) for p in _files(whole / "run")]
    ends = time.monotonic() + SECONDS
    for name in names if SECONDS else rng.sample([n for n in names if n != "run.json"], 4):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole / "run", folder)
        _flip(rng, folder / name, folder)
        refused = _refusal(lambda: run_all(model, folder, RunOptions()))  # noqa: B023  # called here
        if refused is not None:
            assert (name, "run.json" in refused) == ("run.json", True)
            continue
        again = report_folder(folder)
        assert (again.stale, _said(again)) == ((), report), name
        if SECONDS and time.monotonic() > ends:
            break
