"""A file that ends its process: tried again at a lower level, then an error that stays."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import onnx_models as om
from support.stand_in_worker import DYING, PLAN

from twofour.engines.protocol import choose_engine
from twofour.errors import BuildFailedError
from twofour.records.export import FailedTry
from twofour.workers.host import CrashedError, EngineHost, Sessions

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

WEIGHT = np.eye(8, dtype=np.float32) * 2
X = {"x": np.ones((2, 8), np.float32)}
ABORT, SEGV, KILL = int(signal.SIGABRT), int(signal.SIGSEGV), int(signal.SIGKILL)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return om.one_layer(tmp_path / "dense.onnx", "MatMul", WEIGHT, (["batch", 8], ["batch", 8]))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def sessions(notes: list[str]) -> Iterator[Sessions]:
    with EngineHost(note=notes.append, service=DYING) as host:
        yield Sessions(host, 1)


def plan(model: Path, *deaths: str) -> None:
    (model.parent / PLAN).write_text("\n".join(deaths))


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
    model: Path, sessions: Sessions, notes: list[str], command: str, doing: str
) -> None:
    plan(model, f"ALL {command} {SEGV}")
    session = sessions.open(model)
    np.testing.assert_array_equal(session.outputs(X)["y"], np.full((2, 8), 2.0))
    assert session.level == "EXTENDED"
    assert session.failed_tries == (
        FailedTry(doing=f"{doing} dense.onnx", level="ALL", ending="SIGSEGV"),
    )
    assert notes == [
        f"ONNX Runtime ended: SIGSEGV while {doing} dense.onnx at optimization level ALL; "
        "trying again at level EXTENDED"
    ]


def test_a_second_death_is_an_error_at_once_the_next_time_and_another_file_is_loaded(
    model: Path, sessions: Sessions, notes: list[str]
) -> None:
    plan(model, f"ALL open {SEGV}", f"EXTENDED open {ABORT}")
    for _ in range(2):
        with pytest.raises(CrashedError) as caught:
            sessions.open(model)
    assert caught.value.message == (
        "ONNX Runtime ended: SIGSEGV while loading dense.onnx at optimization level ALL, "
        "then SIGABRT while loading dense.onnx at optimization level EXTENDED"
    )
    assert "--precision float32" in (caught.value.hint or "")
    assert len(notes) == 1, "the file was not tried a third time"
    plan(model)
    other = model.with_name("sparse.onnx")
    other.write_bytes(model.read_bytes())
    np.testing.assert_array_equal(sessions.open(other).outputs(X)["y"], np.full((2, 8), 2.0))


def test_a_file_that_was_written_again_is_loaded_after_close(
    model: Path, sessions: Sessions
) -> None:
    plan(model, f"ALL open {SEGV}", f"EXTENDED open {ABORT}")
    with pytest.raises(CrashedError):
        sessions.open(model)
    plan(model)
    om.one_layer(model, "MatMul", 2 * WEIGHT, (["batch", 8], ["batch", 8]))
    sessions.close()
    np.testing.assert_array_equal(sessions.open(model).outputs(X)["y"], np.full((2, 8), 4.0))
