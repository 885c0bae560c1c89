"""Between two timed runs a worker waits until its threads are idle."""

from __future__ import annotations

import time

from twofour.engines.timing import settle


def test_settling_waits_for_a_busy_process_but_not_for_long() -> None:
    readings: list[float] = []

    def always_busy() -> float:
        readings.append(time.perf_counter())
        return readings[-1]

    settle(always_busy)
    rounds = len(readings) // 2
    assert readings[-1] - readings[0] > 0.015
    assert 1 <= rounds <= 20, "a round sleeps 1 ms or more, and 20 ms is the most"


def test_settling_ends_with_the_first_quiet_round() -> None:
    readings = iter([0.0, 1.0, 2.0, 2.0])  # busy, then quiet
    settle(lambda: next(readings))
    assert next(readings, None) is None, "two rounds, no more and no fewer"
