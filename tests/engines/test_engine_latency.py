from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.engines.timing import latency_of, no_latency, percentile, time_runs
from twofour.records.options import BuildOptions


def test_warm_up_runs_are_made_and_not_counted() -> None:
    calls: list[int] = []
    samples = time_runs(lambda: calls.append(1), BuildOptions(iterations=6, warmup=2))
    assert (len(samples), len(calls)) == (6, 8)
    assert all(sample >= 0 for sample in samples)


def test_slow_runs_stop_after_the_budget_with_five_samples() -> None:
    options = BuildOptions(iterations=1000, warmup=1)
    samples = time_runs(lambda: time.sleep(0.004), options, budget_s=0.001)
    assert len(samples) == 5
    assert all(sample >= 4 for sample in samples)


def test_fewer_samples_than_five_are_taken_where_they_are_asked_for() -> None:
    assert len(time_runs(lambda: None, BuildOptions(iterations=2, warmup=0))) == 2


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50), st.floats(1, 100))
def test_a_percentile_is_the_smallest_sample_that_covers_that_share(
    samples: list[float], percent: float
) -> None:
    found = percentile(samples, percent)
    share = percent / 100 * len(samples)
    assert found in samples
    assert sum(sample <= found for sample in samples) >= share - 1e-9
    assert sum(sample < found for sample in samples) < share + 1e-9


def test_statistics_follow_from_the_samples() -> None:
    latency = latency_of("dense", tuple(map(float, range(1, 101))), timing="one run", threads=2)
    assert (latency.median_ms, latency.p90_ms, latency.p99_ms) == (50.5, 90.0, 99.0)
    assert latency.throughput == pytest.approx(1000 / 50.5)
    assert (latency.threads, latency.timing, latency.error) == (2, "one run", None)


def test_a_variant_without_times_has_none_rather_than_zero() -> None:
    latency = no_latency("dense", "no kernel")
    assert (latency.median_ms, latency.throughput, latency.samples_ms) == (None, None, ())
    assert latency.error == "no kernel"
