from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.latency.samples import percentile, with_samples
from twofour.records.latency import ComparedVariant


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50), st.floats(1, 100))
def test_a_percentile_is_the_smallest_sample_that_covers_that_share(
    samples: list[float], percent: float
) -> None:
    found = percentile(samples, percent)
    share = percent / 100 * len(samples)
    assert found in samples
    assert sum(sample <= found for sample in samples) >= share - 1e-9
    assert sum(sample < found for sample in samples) < share + 1e-9


def test_figures_follow_from_the_samples_and_the_batch() -> None:
    row = with_samples(ComparedVariant(name="dense", batch=4), tuple(map(float, range(1, 101))))
    assert (row.median_ms, row.p90_ms, row.p99_ms) == (50.5, 90.0, 99.0)
    assert row.throughput == pytest.approx(4000 / 50.5)
    assert row.samples_ms[:2] == (1.0, 2.0)


def test_percentiles_are_of_the_runs_where_a_sample_is_a_median_of_several() -> None:
    row = with_samples(ComparedVariant(name="dense"), (2.0, 3.0), tuple(map(float, range(1, 11))))
    assert (row.median_ms, row.p90_ms, row.p99_ms) == (2.5, 9.0, 10.0)
    assert row.throughput == pytest.approx(400)


def test_a_variant_without_samples_has_no_figures_rather_than_zero() -> None:
    row = with_samples(ComparedVariant(name="dense", error="no kernel"), ())
    assert row == ComparedVariant(name="dense", error="no kernel")
    assert (row.median_ms, row.throughput) == (None, None)
