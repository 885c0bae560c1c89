"""A file that ends its process: tried at a lower level, then a row of a run that goes on."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import onnx_models as om
from support.small_run import Recorder
from support.stand_in_worker import DYING, PLAN

from twofour.engines.protocol import choose_engine
from twofour.errors import BuildFailedError
from twofour.jobs import open_run, run_stages
from twofour.pipeline.building import refuse_crashed
from twofour.pipeline.stages import resolve_options
from twofour.records.export import FailedTry
from twofour.records.options import RunOptions
from twofour.records.run import BuildResult, RunResult, VariantCheck
from twofour.store import read_record
from twofour.workers.host import CrashedError, EngineHost, Sessions

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

SEGV = int(signal.SIGSEGV)
LEVELS = ("ALL", "EXTENDED")
ANY = RunOptions()
ORT = RunOptions(engine="onnxruntime")
TENSORRT = RunOptions(engine="tensorrt")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One MatMul of 64 to 64 in float16, with a batch of 2."""
    weight = om.weights(64, 64, dtype=np.float16)
    return om.one_layer(tmp_path / "model.onnx", "MatMul", weight, ([2, 64], [2, 64]))


def run(
    model: Path, options: RunOptions, *deaths: str, progress: Recorder | None = None
) -> RunResult:
    """The main job with engines that die as told."""
    progress = progress or Recorder()
    folder = model.parent / "r"
    with (
        open_run(str(model), folder, options, progress) as opened,
        EngineHost(note=progress.note, service=DYING) as host,
    ):
        (folder / PLAN).write_text("\n".join(deaths))
        settings = resolve_options(options, opened.model, host.status, progress.note)
        return run_stages(replace(opened, options=settings, host=host, sessions=Sessions(host, 1)))


def errors(built: BuildResult) -> list[str | None]:
    return [variant.error for variant in built.variants]


def test_a_file_that_crashes_the_runtime_at_every_level_is_a_row_of_a_run_that_ends_and_resumes(
    model: Path,
) -> None:
    result = run(model, ORT, f"ALL open {SEGV}", f"EXTENDED open {SEGV}")
    for error in errors(result.build):
        assert error is not None
        assert error.startswith("ONNX Runtime ended: SIGSEGV while loading ")
    assert [v.failed_tries[1].level for v in result.build.variants] == ["EXTENDED", "EXTENDED"]
    checked = read_record(VariantCheck, model.parent / "r/stages/check-dense.json")
    assert checked.outputs is None
    assert "SIGSEGV" in (checked.not_compared or "")
    assert (model.parent / "r/report.html").is_file()
    assert [v.layer for v in result.report.verdicts] == ["fc"]
    with pytest.raises(BuildFailedError, match=r"dense: ONNX Runtime ended: SIGSEGV .*; sparse: "):
        refuse_crashed(result.build)
    progress = Recorder()
    resumed = replace(ORT, resume=True)
    again = run(model, resumed, progress=progress)
    made_again = {"check-dense", "build-dense", "build-sparse", "times", "build", "report"}
    assert made_again <= set(progress.did)
    assert [(v.failed_tries, v.level) for v in again.build.variants] == [((), None)] * 2
    refuse_crashed(again.build)
    third = Recorder()
    run(model, resumed, progress=third)
    assert third.did == []


def test_a_message_of_memory_is_never_a_result(model: Path) -> None:
    progress = Recorder()
    deaths = [f"{level} open std::bad_alloc" for level in LEVELS]
    first = run(model, ANY, *deaths, progress=progress)
    assert any("with --resume" in note for note in progress.notes)
    assert "build-dense" in progress.did
    again = Recorder()
    second = run(model, replace(ANY, resume=True), progress=again)
    assert {"check-dense", "check-sparse", "accuracy", "report"} <= set(again.did)
    assert errors(second.build) == [None, None]
    assert second.accuracy.drift
    assert not first.accuracy.drift


def test_what_went_well_at_a_lower_level_says_so_and_is_no_failure(model: Path) -> None:
    progress = Recorder()
    result = run(model, ORT, f"ALL open {SEGV}", progress=progress)
    assert [v.level for v in result.build.variants] == ["EXTENDED", "EXTENDED"]
    assert errors(result.build) == [None, None]
    (told,) = [n for n in result.build.notes if n.startswith("sparse: ")]
    assert told == (
        "sparse: SIGSEGV while loading sparse.onnx at optimization level ALL; it was built and "
        "timed at level EXTENDED, so its times do not compare with those of another level"
    )
    refuse_crashed(result.build)
    ended = [note for note in progress.notes if note.startswith("ONNX Runtime ended: ")]
    assert len(ended) == 2, "one for each file"
    again = Recorder()
    assert run(model, replace(ORT, resume=True), progress=again) == result
    assert again.did == []


def test_a_tensorrt_build_that_crashes_is_a_row_with_its_log(model: Path) -> None:
    result = run(model, TENSORRT, f"None build {SEGV}")
    dense, sparse = result.build.variants
    assert (dense.plan, dense.log, sparse.log) == (None, "dense.log", "sparse.log")
    assert dense.error == (
        "tensorrt ended: SIGSEGV while building dense.onnx at optimization level default"
    )
    assert (dense.sparse_weights, sparse.sparse_weights) == (False, True)
    assert (model.parent / "r/report.md").is_file()
    with pytest.raises(BuildFailedError):
        refuse_crashed(result.build)


# --- a file and its sessions ----------------------------------------------------------------------

WEIGHT = np.eye(8, dtype=np.float32) * 2
X = {"x": np.ones((2, 8), np.float32)}
ABORT = int(signal.SIGABRT)


@pytest.fixture
def doubling(tmp_path: Path) -> Path:
    return om.one_layer(tmp_path / "dense.onnx", "MatMul", WEIGHT, (["batch", 8], ["batch", 8]))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def sessions(notes: list[str]) -> Iterator[Sessions]:
    with EngineHost(note=notes.append, service=DYING) as host:
        yield Sessions(host, 1)


def plan(doubling: Path, *deaths: str) -> None:
    (doubling.parent / PLAN).write_text("\n".join(deaths))


@pytest.mark.parametrize("can_run", [True, False])
def test_an_engine_that_ends_its_process_when_it_is_tried_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_run: bool
) -> None:
    (tmp_path / "deaths").write_text("" if can_run else "1")
    monkeypatch.setenv("DEATHS", str(tmp_path / "deaths"))
    with EngineHost(service="support.stand_in_worker:KilledAtTheStart") as host:
        ends = (
            contextlib.nullcontext() if can_run else pytest.raises(BuildFailedError, match="KILL")
        )
        with ends:
            assert choose_engine("onnxruntime", host.status)[0].can_run


@pytest.mark.parametrize(("command", "doing"), [("open", "loading"), ("outputs", "running")])
def test_a_death_is_followed_by_a_try_at_a_lower_level_which_stays(
    doubling: Path, sessions: Sessions, notes: list[str], command: str, doing: str
) -> None:
    plan(doubling, f"ALL {command} {SEGV}")
    session = sessions.open(doubling)
    np.testing.assert_array_equal(session.outputs(X)["y"], np.full((2, 8), 2.0))
    assert session.level == "EXTENDED"
    assert session.failed_tries == (
        FailedTry(doing=f"{doing} dense.onnx", level="ALL", ending="SIGSEGV"),
    )
    assert notes == [
        f"ONNX Runtime ended: SIGSEGV while {doing} dense.onnx at optimization level ALL; "
        "trying again at level EXTENDED"
    ]


def test_a_second_death_is_an_error_until_the_file_is_another(
    doubling: Path, sessions: Sessions, notes: list[str]
) -> None:
    deaths = f"ALL open {SEGV}", f"EXTENDED open {ABORT}"
    plan(doubling, *deaths)
    for _ in range(2):
        with pytest.raises(CrashedError) as caught:
            sessions.open(doubling)
    assert caught.value.message == (
        "ONNX Runtime ended: SIGSEGV while loading dense.onnx at optimization level ALL, "
        "then SIGABRT while loading dense.onnx at optimization level EXTENDED"
    )
    assert "--precision float32" in (caught.value.hint or "")
    assert len(notes) == 1, "the file was not tried a third time"
    plan(doubling)
    other = doubling.with_name("sparse.onnx")
    other.write_bytes(doubling.read_bytes())
    np.testing.assert_array_equal(sessions.open(other).outputs(X)["y"], np.full((2, 8), 2.0))
    plan(doubling, *deaths)
    with pytest.raises(CrashedError):
        sessions.open(doubling)
    plan(doubling)
    om.one_layer(doubling, "MatMul", 2 * WEIGHT, (["batch", 8], ["batch", 8]))
    sessions.close()
    np.testing.assert_array_equal(sessions.open(doubling).outputs(X)["y"], np.full((2, 8), 4.0))
