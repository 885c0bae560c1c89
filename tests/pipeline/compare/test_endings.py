"""What a comparison ends in when its processes do not live to the end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.comparison_cases import run_folder
from support.stand_in_worker import SERVICE
from typer.testing import CliRunner

from twofour.cli.app import app
from twofour.errors import BuildFailedError
from twofour.pipeline.compare import compare as comparing
from twofour.pipeline.compare.compare import refuse_unfinished, statuses_apart
from twofour.pipeline.compare.measure import take_peaks
from twofour.pipeline.compare.plan import ComparedModel, Planned
from twofour.pipeline.compare.process import Memory, VariantProcess
from twofour.pipeline.workers import WorkerProcess
from twofour.records.latency import LatencyComparison

KILLED = "its process was ended by SIGKILL"


def failed(*, but: int = 0, partial: str | None = None) -> LatencyComparison:
    """With samples of the rounds that were whole, and all variants but some dead."""
    whole = run_folder()
    dead = tuple(replace(v, error=KILLED) for v in whole.variants[but:])
    return replace(whole, variants=(*whole.variants[:but], *dead), partial=partial)


def test_a_comparison_of_which_nothing_lived_to_the_end_failed() -> None:
    with pytest.raises(BuildFailedError) as caught:
        refuse_unfinished(failed())
    first = run_folder().variants[0].name
    assert caught.value.message == (
        f"every variant failed before its rounds were over: {first}: {KILLED}"
    )


def test_one_that_lived_or_an_interruption_is_another_ending() -> None:
    for comparison in (run_folder(), failed(but=1), failed(partial="interrupted after 3 rounds")):
        refuse_unfinished(comparison)


def test_the_command_keeps_what_was_measured_and_ends_in_5(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def measured(*_: object) -> Iterator[tuple[Path, LatencyComparison]]:
        yield tmp_path, failed()

    monkeypatch.setattr(comparing, "measure_paths", measured)
    done = CliRunner().invoke(app, ["compare", "a.onnx", "--fail-if", "noise > 100"])
    assert done.exit_code == 5
    assert "every variant failed before its rounds were over" in done.stderr
    assert (tmp_path / "latency.json").is_file()


def test_an_engine_that_takes_its_process_down_when_it_is_tried_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "start_worker", lambda threads: WorkerProcess(SERVICE, threads))
    found = statuses_apart("torch", ("eager", "compile"))  # the stand-in knows no statuses
    assert list(found) == ["eager", "compile"]
    for status in found.values():
        assert status.why_not is not None
        assert status.why_not.startswith("trying it failed: its process ended with code 1")


@pytest.mark.skipif(os.name == "nt", reason="stops a process")
def test_once_interrupted_a_process_that_hangs_keeps_nobody_waiting() -> None:
    """Further Ctrl-C are ignored then: what else is asked has to end by itself."""
    row = Planned(name="a", model=ComparedModel(weights="a"), engine="torch", mode="eager")
    well, hung = (VariantProcess(planned=row, process=WorkerProcess(SERVICE, 1)) for _ in range(2))
    try:
        assert hung.process is not None
        for variant in (well, hung):
            assert variant.call("add", 1, 2) == 3
        os.kill(hung.process.number, signal.SIGSTOP)
        started = time.monotonic()
        assert take_peaks((hung, well), interrupted=True)
        assert time.monotonic() - started < 20  # of 300 without an interruption
    finally:
        well.close()
        hung.close()
    assert hung.peak == Memory(host_bytes=None, device_bytes=None)
    assert well.peak == Memory(host_bytes=7, device_bytes=None)
