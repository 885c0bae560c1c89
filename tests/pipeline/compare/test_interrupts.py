"""The first Ctrl-C ends a comparison, the next ones nothing."""

from __future__ import annotations

import os
import signal
import time

import pytest

from twofour.pipeline.compare.compare import first_interrupt_only

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # Python runs handlers between bytecodes


def test_only_the_first_interrupt_is_raised_and_the_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    kept = []
    with first_interrupt_only():
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        interrupt()
        kept.append("saved")
    assert kept == ["saved"]
    assert signal.getsignal(signal.SIGINT) is before


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
