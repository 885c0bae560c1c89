"""What a whole engine is expected to gain: a share of what its sparse kernels alone would save.

    LayerForecast..., rest_us -> ForecastGain, Worth

TensorRT does not choose every sparse kernel that is faster alone, convolutions gain less than
their products, and launches and bandwidth have floors. The shares are fitted to published engines
by benchmarks/kernel_model.py; docs/kernel_model.md says how well they hold.
"""

from __future__ import annotations

from collections.abc import Iterable

from twofour.forecasting.roofline import BYTES
from twofour.records.forecast import LIKELY, WORTH, ForecastGain, LayerForecast, Worth

REALISED = 0.50
"""Share of the saving that published engines realised (median)."""
LEAST_REALISED = 0.10
MOST_REALISED = 0.85
"""The realised share is between these in about 80 % of published engines."""
TIMING = 1.02
"""How far two timings of one engine differ."""
MOST_IN_8_BITS = 1.6
"""Cap of a layer's gain in 8 and 4 bits: cuBLASLt's dense kernels are slow there.

At 128 x 128 tokens they alone take 28.8 ms in BERT-large (INT8, A100), TensorRT's dense engine 25.4
ms with all else.
"""


def expected_gain(layers: Iterable[LayerForecast], rest_us: float) -> ForecastGain:
    """The gain of all layers together beside `rest_us`, with the shares of published engines.

    It is at most what all savings together give.
    """
    dense_us = rest_us
    saved_us = most_us = 0.0
    for layer in layers:
        dense_us += layer.dense_us
        saved_us += _saved_us(layer)
        most_us += layer.saves_us
    saved = saved_us / dense_us
    return ForecastGain(
        gain=_gain(REALISED * saved),
        low=_gain(LEAST_REALISED * saved) / TIMING,
        high=min(_gain(MOST_REALISED * saved) * TIMING, _gain(most_us / dense_us)),
    )


def verdict_of(at_most: ForecastGain) -> Worth:
    """Whether to prune, by the bound of the gain as it is shown: 1.196 is 1.20."""
    gain = round(at_most.gain, 2)
    if gain >= LIKELY:
        return Worth.LIKELY
    return Worth.TRY_FIRST if gain >= WORTH else Worth.NO


def _gain(saved: float) -> float:
    """The gain of an engine that saves this share of its time."""
    return 1 / (1 - saved)


def _saved_us(layer: LayerForecast) -> float:
    """What its sparse kernel saves, with the cap of its precision."""
    if not layer.gains:
        return 0.0
    gain = layer.gain
    if BYTES[layer.precision] < 2:
        gain = min(gain, MOST_IN_8_BITS)
    return layer.dense_us * (1 - 1 / gain)
