"""What a comparison ends in when processes die or are interrupted, and what it never overwrites."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import onnx_models as om
from support.comparison_cases import run_folder
from support.stand_in_worker import SERVICE
from typer.testing import CliRunner, Result

from twofour.cli import application
from twofour.comparing import comparison as comparing
from twofour.comparing.comparison import (
    compare,
    first_interrupt_only,
    refuse_unfinished,
    statuses_apart,
)
from twofour.errors import BadInputError, BuildFailedError
from twofour.pipeline.stages import Silent
from twofour.records.latency import LatencyComparison, RoundLoad
from twofour.records.options import CompareOptions
from twofour.store import read_record
from twofour.workers.process import WorkerProcess

KILLED = "its process was ended by SIGKILL"


def failed(*, but: int = 0, partial: str | None = None) -> LatencyComparison:
    """With samples of the rounds that were whole, and all variants but some dead."""
    whole = run_folder()
    dead = tuple(replace(v, error=KILLED) for v in whole.variants[but:])
    return replace(whole, variants=(*whole.variants[:but], *dead), partial=partial)


def test_a_comparison_of_which_nothing_lived_to_the_end_failed() -> None:
    with pytest.raises(BuildFailedError) as caught:
        refuse_unfinished(failed())
    names = ", ".join(variant.name for variant in run_folder().variants)
    assert caught.value.message.endswith(f": {names}: {KILLED}")


def test_one_that_lived_or_an_interruption_is_another_ending() -> None:
    for comparison in (run_folder(), failed(but=1), failed(partial="interrupted after 3 rounds")):
        refuse_unfinished(comparison)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """The command after such a comparison with these gates."""

    def command(comparison: LatencyComparison, *gates: str) -> Result:
        options = replace(comparison.options, fail_if=gates)
        found = tmp_path, replace(comparison, options=options)
        measured = contextlib.nullcontext(found)
        monkeypatch.setattr(comparing, "measure_paths", lambda *_: measured)
        return CliRunner().invoke(application(), ["compare", "a.onnx"])

    return command


def test_the_command_keeps_what_was_measured_and_ends_in_5(
    ended: Callable[..., Result], tmp_path: Path
) -> None:
    done = ended(failed(), "sparse / dense > 1.0")
    assert done.exit_code == 5
    assert "every variant failed before its rounds were over" in done.stderr
    assert (tmp_path / "latency.json").is_file()


def test_a_gate_that_is_met_ends_in_4_and_is_named_alone(ended: Callable[..., Result]) -> None:
    done = ended(run_folder(), "sparse / dense > 100", "sparse / dense > 0.01")
    assert done.exit_code == 4
    assert "sparse / dense > 0.01: sparse@onnxruntime:cpu / dense@onnxruntime:cpu is" in done.stderr
    assert "dense > 100" not in done.stderr


def test_on_a_busy_machine_a_gate_is_not_judged_and_ends_in_6(
    ended: Callable[..., Result],
) -> None:
    busy = replace(run_folder(), loads=(RoundLoad(other_cores=1.0, cores=2),))
    done = ended(busy, "sparse / dense > 1.0")
    assert done.exit_code == 6
    assert "not judged: the machine was busy" in done.stderr
    assert "WARNING: other processes kept 1.00 of 2 cores busy" in done.stdout


def test_after_ctrl_c_the_command_says_how_far_it_came_and_ends_in_130(
    ended: Callable[..., Result], tmp_path: Path
) -> None:
    done = ended(replace(run_folder(), partial="interrupted after 3 rounds"))
    assert done.exit_code == 130
    assert done.stderr.endswith("interrupted after 3 rounds\n")
    assert (tmp_path / "latency.json").is_file()


def test_ctrl_c_before_the_first_round_says_that_nothing_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "measure_paths", interrupted)
    done = CliRunner().invoke(application(), ["compare", "a.onnx"])
    assert done.exit_code == 130
    assert done.stderr == "interrupted before the first round: nothing was kept\n"


def test_an_engine_that_takes_its_process_down_when_it_is_tried_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comparing, "start_worker", lambda threads: WorkerProcess(SERVICE, threads))
    found = statuses_apart("torch", ("eager", "compile"))  # the stand-in knows no statuses
    assert [status.engine for status in found] == ["torch", "torch"]
    for status in found:
        assert status.why_not is not None
        assert "ended with code 1" in status.why_not


@pytest.mark.parametrize("name", ["latency.json", "latency.md", "latency.html"])
def test_results_that_no_comparison_wrote_are_refused_and_left(tmp_path: Path, name: str) -> None:
    model, out = om.save(om.two_weights(), tmp_path / "m.onnx"), tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("the user's")
    with pytest.raises(BadInputError, match="no comparison wrote"):
        compare([model], out, CompareOptions())
    assert (out / name).read_text() == "the user's"
    assert [p for p in out.rglob("*") if p.is_file()] == [out / name]


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)  # Python runs its handler before this returns


class CtrlC(Silent):
    """Interrupts this process at one step of the rounds, and again where a stage has ended."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sent = 0

    def step(self, text: str, done: int, total: int | None) -> None:  # noqa: ARG002  # Protocol
        if self.sent or text.startswith(self.text):
            self.sent += 1
            interrupt()

    def done(self, name: str, *, seconds: float) -> None:  # noqa: ARG002  # Protocol
        if self.sent:
            self.sent += 1
            interrupt()


def interrupted(folder: Path, progress: CtrlC) -> LatencyComparison:
    """An endless comparison in this process."""
    model = om.save(om.two_weights(), folder / "m.onnx")
    options = CompareOptions(engines=("onnxruntime:cpu",), rounds=1_000_000, time_limit_s=1e6)
    return compare([model], folder / "out", options, progress)[1]


def test_ctrl_c_keeps_the_rounds_so_far_and_further_ones_lose_none(tmp_path: Path) -> None:
    progress = CtrlC("round 3 of")
    found = interrupted(tmp_path, progress)
    assert progress.sent == 2
    assert [len(v.samples_ms) for v in found.variants] == [2, 2]
    assert "after 2 of 1000000" in (found.partial or "")
    assert read_record(LatencyComparison, tmp_path / "out" / "latency.json") == found


def test_ctrl_c_in_the_first_round_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path, CtrlC("round 1 of"))
    assert not (tmp_path / "out" / "latency.json").exists()


def test_until_exit_it_stays_quiet_after_an_interrupt_and_only_then() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with first_interrupt_only(until_exit=True):
            pass
        assert signal.getsignal(signal.SIGINT) is before
        with first_interrupt_only(until_exit=True), pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
