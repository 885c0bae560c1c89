"""The first Ctrl-C ends a comparison, the next ones nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support import onnx_models as om

from twofour.comparing.comparison import compare, first_interrupt_only
from twofour.pipeline.stages import Silent
from twofour.records.latency import LatencyComparison
from twofour.records.options import CompareOptions
from twofour.store import read_record

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")


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
