from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofour.engines.timing import percentile, with_samples
from twofour.errors import BadInputError
from twofour.records.latency import (
    ComparedVariant,
    VariantName,
    parse_variant_name,
    variant_name,
    without_batch,
)

WORDS = st.from_regex(r"[a-z0-9][a-z0-9_.+-]{0,12}", fullmatch=True)
LABELS = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="@:/ b8again", max_size=20),
    st.sampled_from(["a@b:c", "a@b:c again", "a@b:c again:b8", "größe 2:4/x", "", "x\ny@z:w"]),
)


@given(LABELS, WORDS, WORDS, st.booleans(), st.none() | st.integers(1, 10**6))
def test_every_name_can_be_read_back(
    weights: str, engine: str, mode: str, again: bool, batch: int | None
) -> None:
    name = variant_name(weights, engine, mode, again=again, batch=batch)
    assert parse_variant_name(name) == VariantName(
        weights=weights, engine_mode=f"{engine}:{mode}", again=again
    )
    assert without_batch(name) == variant_name(weights, engine, mode, again=again)


@pytest.mark.parametrize("name", ["", "dense", "dense@cpu", "onnxruntime:cpu", "a@b:c:d", "a@:c"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(BadInputError, match="not the name of a variant"):
        parse_variant_name(name)


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
