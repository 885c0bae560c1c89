"""Interleaved rounds: order, drop-outs, the time limit, Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from twofour.engines import timing
from twofour.engines.protocol import no_progress
from twofour.engines.timing import LEAST_ROUNDS, RoundPlan, interleave, settle
from twofour.errors import BuildFailedError


@dataclass
class Fake:
    """A contestant whose runs are what the test says."""

    name: str
    run: Callable[[], float]

    def run_ms(self) -> float:
        return self.run()


def plan(rounds: int = 20, *, time_limit_s: float = 60.0, seed: int = 0) -> RoundPlan:
    return RoundPlan(rounds=rounds, time_limit_s=time_limit_s, seed=seed)


def noted(order: list[str], name: str) -> Fake:
    def run() -> float:
        order.append(name)
        return float(len(order))

    return Fake(name, run)


def test_the_order_changes_from_round_to_round_and_is_the_same_for_a_seed() -> None:
    orders: list[list[str]] = []
    for seed in (1, 1, 2):
        order: list[str] = []
        interleave([noted(order, n) for n in "abc"], plan(60, seed=seed), no_progress)
        orders.append(order)
    firsts = [orders[0][i] for i in range(0, 180, 3)]
    rounds = [orders[0][i : i + 3] for i in range(0, 180, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert orders[0] == orders[1] != orders[2]
    assert min(firsts.count(n) for n in "abc") > 8  # about 20 each


def test_one_that_fails_drops_out_with_its_error_and_the_others_go_on() -> None:
    runs = iter(range(100))

    def fails_in_the_fifth() -> float:
        if next(runs) == 4:
            raise BuildFailedError("lost the device")
        return 1.0

    found = interleave(
        [Fake("bad", fails_in_the_fifth), Fake("good", lambda: 2.0)], plan(20), no_progress
    )
    assert found.samples_ms["bad"] == (1.0,) * 4
    assert found.samples_ms["good"] == (2.0,) * 20
    assert found.failed["bad"].message == "lost the device"
    assert not found.interrupted


class Clock:
    """The clock of the rounds, which goes on where a test says so: no machine is too slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(timing, "time", self)

    def perf_counter(self) -> float:
        return self.now_s

    def quarter_second(self) -> float:
        """A run that takes so long."""
        self.now_s += 0.25
        return 250.0


def test_the_time_limit_ends_the_rounds_but_not_before_ten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = [Fake("a", Clock(monkeypatch).quarter_second)]
    assert interleave(slow, plan(1000, time_limit_s=0.1), no_progress).done == LEAST_ROUNDS
    assert interleave(slow, plan(1000, time_limit_s=5), no_progress).done == 21


def test_ctrl_c_keeps_the_complete_rounds_and_leaves_out_the_one_it_fell_into() -> None:
    runs = iter(range(100))

    def interrupted_in_the_eighth() -> float:
        if next(runs) == 7:
            raise KeyboardInterrupt
        return 1.0

    contestants = [Fake("a", interrupted_in_the_eighth), Fake("b", lambda: 2.0)]
    found = interleave(contestants, plan(20), no_progress)
    assert found.interrupted
    assert found.done == 7
    assert found.samples_ms == {"a": (1.0,) * 7, "b": (2.0,) * 7}


def test_progress_counts_rounds_and_says_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[tuple[str, int, int | None]] = []

    slow = [Fake("a", Clock(monkeypatch).quarter_second)]
    interleave(slow, plan(60), lambda *step: said.append(step))
    assert [done for _, done, _ in said] == list(range(60))
    assert {total for _, _, total in said} == {60}
    assert said[0][0] == "round 1 of 60"
    assert said[10][0] == "round 11 of 60, 12 s left"


def test_settling_waits_for_a_busy_process_but_not_for_long() -> None:
    readings: list[float] = []

    def always_busy() -> float:
        readings.append(time.perf_counter())
        return readings[-1]

    settle(always_busy)
    rounds = len(readings) // 2
    assert readings[-1] - readings[0] > 0.015
    assert 1 <= rounds <= 20, "a round sleeps 1 ms or more, and 20 ms is the most"
