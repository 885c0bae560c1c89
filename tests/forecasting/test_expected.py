"""The expected gain by hand, and the verdict at its limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import published_gains
import pytest
from support.forecast_cases import DENSE, LAYER, LOSING

from twofour.forecasting.expected import expected_gain, verdict_of
from twofour.forecasting.model_forecast import PUBLISHED
from twofour.records.forecast import WORTH, ForecastGain, LayerForecast, Worth

INT8 = replace(LAYER, precision="INT8")


@pytest.mark.parametrize(
    ("layers", "rest_us", "saved", "most"),
    [
        ((LAYER,), 0.0, 0.5, 2.0),
        ((LAYER,), 100.0, 0.25, 4 / 3),
        ((LAYER, DENSE), 0.0, 0.25, 4 / 3),
        ((LAYER,), 900.0, 0.05, 1 / 0.95),
        ((LOSING,), 0.0, 0.0, 1.0),  # the builder takes the dense kernel
        ((INT8,), 0.0, 1 - 1 / 1.6, 2.0),  # cuBLASLt's dense kernels are slow in 8 bits
        ((replace(INT8, gain=1.25, sparse_us=80.0),), 0.0, 0.2, 1.25),
    ],
)
def test_half_of_the_saving_of_the_kernels_is_expected(
    layers: tuple[LayerForecast, ...], rest_us: float, saved: float, most: float
) -> None:
    expected = expected_gain(layers, rest_us)
    assert expected.gain == pytest.approx(1 / (1 - 0.5 * saved))
    assert expected.low == pytest.approx(1 / (1 - 0.1 * saved) / 1.02)
    # never above the bound: two timings of an engine that saves nothing differ by 2 %
    assert expected.high == pytest.approx(min(1.02 / (1 - 0.85 * saved), most))


@pytest.mark.parametrize(
    ("at_most", "verdict"),
    [
        (1.2, Worth.LIKELY),
        (1.1957, Worth.LIKELY),  # shown as 1.20
        (1.194, Worth.TRY_FIRST),
        (1.05, Worth.TRY_FIRST),
        (1.044, Worth.NO),
        (1.0, Worth.NO),
    ],
)
def test_the_verdict_follows_from_the_bound(at_most: float, verdict: Worth) -> None:
    assert verdict_of(ForecastGain(gain=at_most, low=1.0, high=2.0)) is verdict


@pytest.mark.parametrize(
    ("first", "count", "median", "ninth", "holds"),
    [((0, 0), 430, 8.5, 23, 75), (published_gains.REPAIRED, 328, 7, 17, 84)],
)
def test_the_expected_gain_is_near_that_of_published_engines(
    first: tuple[int, int], count: int, median: float, ninth: float, holds: float
) -> None:
    """Error in percent: median and 90th percentile; how often the interval holds."""
    engines = [engine for engine in published_gains.published() if engine.version >= first]
    error = [100 * abs(engine.expected.gain / engine.gain - 1) for engine in engines]
    inside = [engine.expected.low <= engine.gain <= engine.expected.high for engine in engines]
    assert len(engines) == count
    assert np.median(error) < median
    assert np.quantile(error, 0.9) < ninth
    assert 100 * np.mean(inside) > holds


def test_the_fit_to_published_engines_is_near_the_shares_that_are_taken() -> None:
    engines = published_gains.published()
    saved = np.array([engine.saved for engine in engines])
    gain = np.array([engine.gain for engine in engines])
    share, low, high = published_gains.fit(saved, gain, np.ones(len(engines)))
    assert share == pytest.approx(0.50, abs=0.1)
    assert low == pytest.approx(0.10, abs=0.1)
    assert high == pytest.approx(0.85, abs=0.1)


NONE_OR_ONE = 1
"""Published engines below the least bound: too few to say a share of them."""


def test_an_answer_counts_the_engines_of_the_table_by_their_bound() -> None:
    gains: dict[Worth, list[float]] = {verdict: [] for verdict in Worth}
    for engine in published_gains.published():
        if engine.version >= published_gains.REPAIRED:
            gains[verdict_of(engine.at_most)].append(engine.gain)
    assert len(gains.pop(Worth.NO)) <= NONE_OR_ONE
    assert {
        verdict: (len(all_of_it), sum(gain > WORTH for gain in all_of_it))
        for verdict, all_of_it in gains.items()
    } == {verdict: counts[:2] for verdict, counts in PUBLISHED.items()}
