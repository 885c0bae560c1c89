"""Measurements side by side: every call is answered once, and a passing failure is no result."""

from __future__ import annotations

import platform
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.mlp_onnx import save_mlp
from support.stand_in_worker import DYING, PLAN

from twofour.budget.measuring import MEASURED_ON, Measurer, OneAfterAnother, SetMeasurements
from twofour.engines.protocol import no_progress
from twofour.errors import BadInputError, BuildFailedError, TwofourError
from twofour.inputs.fits import save_arrays
from twofour.records.run import Measured
from twofour.workers.host import CrashedError, EngineHost, Sessions
from twofour.workers.side_by_side import (
    MOST_TRIES,
    Arguments,
    Done,
    NodeUnfitError,
    Pool,
    WorkerLostError,
)

NAME = "support.job_service:JobService"


def _run(command: str, arguments: dict[str, tuple[object, ...]], count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def done(key: str, value: object) -> None:
        assert key not in found
        found[key] = value

    with Pool(NAME, command, count) as pool:
        pool.run(arguments, done)
    return found


def test_every_job_is_answered_once_in_as_many_processes_as_were_asked_for() -> None:
    found = _run("square", {str(i): (i,) for i in range(20)}, 2)
    assert {key: value for key, (value, _) in found.items()} == {str(i): i * i for i in range(20)}
    assert 1 <= len({process for _, process in found.values()}) <= 2


def test_a_job_that_is_refused_ends_in_its_error_and_the_others_go_on() -> None:
    found = _run("refuse_odd", {str(i): (i,) for i in range(4)}, 1)
    assert {k: v for k, v in found.items() if not isinstance(v, TwofourError)} == {"0": 0, "2": 2}
    assert isinstance(found["1"], BadInputError)
    assert found["3"].message == "3 is odd"


def test_a_job_whose_process_ends_is_tried_again_and_told_how_often() -> None:
    found = _run("die_before", {"lives": (0,), "once": (1,), "always": (9,)}, 1)
    assert (found["lives"], found["once"]) == (0, 1)
    assert isinstance(found["always"], WorkerLostError)
    assert found["always"].message == f"its process ended in {MOST_TRIES} tries: SIGKILL"


def test_a_bug_in_a_service_is_an_error_of_its_job() -> None:
    found = _run("square", {"a": ("text",)}, 1)
    assert "TypeError" in found["a"].message


def test_processes_are_kept_from_one_run_to_the_next() -> None:
    seen: dict[str, Any] = {}
    with Pool(NAME, "square", 1) as pool:
        for number in range(3):
            pool.run({str(number): (number,)}, seen.__setitem__)
    assert [seen[str(i)][0] for i in range(3)] == [0, 1, 4]
    assert len({process for _, process in seen.values()}) == 1


def _failing(folder: Path, error: TwofourError) -> SetMeasurements:
    """Every call is answered with this error."""

    def fail(calls: Mapping[str, Arguments], done: Done) -> None:
        for key in calls:
            done(key, error)

    workers: Any = SimpleNamespace(run=fail)
    return SetMeasurements(
        folder=folder, metric=None, seed=0, workers=workers,
        step=lambda _done, _of: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "lasts"),
    [
        (WorkerLostError(["SIGKILL", "SIGKILL"]), False),
        (WorkerLostError(["SIGSEGV"]), False),
        (BuildFailedError("cannot load the model: std::bad_alloc"), False),
        (BuildFailedError("no kernel for LSTM(14)"), True),
    ],
)
def test_only_what_would_come_again_is_a_result(
    tmp_path: Path, error: TwofourError, lasts: bool
) -> None:
    sets = _failing(tmp_path, error)
    sets.measure([(1,), (2,)])
    assert sets.measurements[(1,)].error == error.message
    assert sets.is_lasting is lasts


def test_a_node_that_does_not_see_the_files_ends_the_study(tmp_path: Path) -> None:
    metric = f"{tmp_path / 'm.py'}:f"
    for name in ("dense.onnx", "m.py"):
        with pytest.raises(NodeUnfitError) as caught:
            Measurer(no_progress).measure(0, str(tmp_path), (1,), metric, 0)
        assert caught.value.message == f"{tmp_path / name} is missing on {platform.node()}"
        assert "at the same paths" in (caught.value.hint or "")
        (tmp_path / name).touch()
    sets = _failing(tmp_path, caught.value)
    with pytest.raises(NodeUnfitError):
        sets.measure([(1,)])


@pytest.mark.parametrize("levels", [("ALL",), ("ALL", "EXTENDED")])
def test_a_model_that_ends_onnx_runtime_is_measured_at_a_lower_level_or_named_as_the_model(
    tmp_path: Path, levels: tuple[str, ...]
) -> None:
    for name in ("dense.onnx", "sparse.onnx"):
        save_mlp(tmp_path / name)
    (tmp_path / "stages").mkdir()
    save_arrays(tmp_path / MEASURED_ON, {"0:x": np.ones((2, 16), np.float32)})
    deaths = (f"{level} outputs {int(signal.SIGSEGV)}\n" for level in levels)
    (tmp_path / PLAN).write_text("".join(deaths))
    found: dict[str, object] = {}
    with EngineHost(note=lambda _: None, service=DYING) as host:
        calls = {"dense": (str(tmp_path), (), None, 0)}
        OneAfterAnother(Sessions(host)).run(calls, found.__setitem__)
    assert not list(tmp_path.glob(".mixed*"))
    if levels == ("ALL",):
        assert found["dense"] == Measured(outputs=0.0)
        return
    assert isinstance(found["dense"], CrashedError)
    assert "SIGSEGV while running the model at" in found["dense"].message
