"""How near the expected gain of a whole model is to published engines, and the fit of its shares.

    python benchmarks/kernel_model.py --published

`published_gains.csv` has an engine a row, with its source. BERT-large is made here from its sizes
(24 layers of width 1,024) and forecast anew. The other models cannot be made without their code:
for them the saving follows from the bound that `twofour forecast` gave when the file was made
(`forecast_at_most`), which knows no cap in 8 bits.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from twofour.forecasting.expected import (
    LEAST_REALISED,
    MOST_REALISED,
    REALISED,
    TIMING,
    expected_gain,
)
from twofour.forecasting.gpus import gpu_named
from twofour.forecasting.kernels import times_of_products
from twofour.forecasting.model_forecast import least_us, total_gain
from twofour.forecasting.roofline import Array
from twofour.records.forecast import ForecastGain, LayerForecast, ProductTimes
from twofour.records.options import MathPrecision
from twofour.records.weights import shared

TABLE = Path(__file__).with_name("published_gains.csv")
REPAIRED = (8, 5)
"""The first version of TensorRT whose sparse INT8 engines of BERT are faster than dense ones."""
WIDTH, LAYERS = 1024, 24
GRID = np.arange(0, 1.2001, 0.05)
BOUNDS = (0.0, 1.05, 1.2, 1.3, 1.4, 1.5, 1.6, 9.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published engine beside its forecast."""

    publication: str
    group: str
    """Publication, GPU and model: groups are weighed alike, because one has 148 engines."""
    version: tuple[int, int]
    gain: float
    at_most: ForecastGain
    expected: ForecastGain

    @property
    def saved(self) -> float:
        """Share of the time that the kernels would save."""
        return (1 - 1 / self.expected.gain) / REALISED


def published() -> tuple[Published, ...]:
    """Every engine that can be compared; those left out have their reason in the file."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return tuple(_engine(row) for row in csv.DictReader(file) if row["use"] == "fit")


def _engine(row: dict[str, str]) -> Published:
    if row["model"] == "BERT-large":
        at_most, expected = bert_large(row["gpu"], int(row["batch"]), int(row["size"].split()[0]))
    else:
        at_most, expected = _recorded(row)
    major, minor = row["version"].replace("EA", "").split(".")[:2]
    return Published(
        publication=row["publication"],
        group=f"{row['publication']}, {row['gpu']}",
        version=(int(major), int(minor)),
        gain=float(row["gain"]),
        at_most=at_most,
        expected=expected,
    )


@cache
def bert_large(gpu: str, batch: int, tokens: int) -> tuple[ForecastGain, ForecastGain]:
    """The bound and the expected gain of BERT-large in INT8."""
    rows = batch * tokens
    layers = [
        _layer(gpu, (rows, WIDTH, WIDTH), 4 * LAYERS),
        _layer(gpu, (rows, 4 * WIDTH, WIDTH), LAYERS),
        _layer(gpu, (rows, WIDTH, 4 * WIDTH), LAYERS),
    ]
    values = rows * WIDTH
    products = [(2 * values, values * tokens)] * 2 * LAYERS
    norms = [(2 * values + 2 * WIDTH, 0)] * (2 * LAYERS + 1)
    rest = [*products, *norms, *[(values, 0)] * 3]
    kind = gpu_named(gpu)
    rest_us = sum(least_us(*least, kind, MathPrecision.INT8) for least in rest)
    return total_gain(layers, rest_us), expected_gain(layers, rest_us)


def _layer(gpu: str, size: tuple[int, int, int], count: int) -> LayerForecast:
    """So many layers of one size as one."""
    (times,) = times_of_products(gpu, "INT8", [size])
    whole = {name: getattr(times, name) * count for name in ("dense_us", "sparse_us")}
    return LayerForecast(
        **shared(times, ProductTimes) | whole,
        layer="",
        op="MatMul",
        count=count,
        reason="",
        can_run_sparse=True,
    )


def _recorded(row: dict[str, str]) -> tuple[ForecastGain, ForecastGain]:
    at_most = float(row["forecast_at_most"])
    low, high = float(row["forecast_low"]), float(row["forecast_high"])
    expected = of_shares(np.array([1 - 1 / at_most]), (REALISED, LEAST_REALISED, MOST_REALISED))
    gain, least, most = (float(one[0]) for one in expected)
    return (
        ForecastGain(gain=at_most, low=low, high=high),
        ForecastGain(gain=gain, low=least, high=most),
    )


def of_shares(saved: Array, shares: Sequence[float]) -> tuple[Array, Array, Array]:
    """Expected, lowest and highest gains where these shares of the saving are realised."""
    middle, low, high = (1 / (1 - share * saved) for share in shares)
    return middle, low / TIMING, high * TIMING


def fit(saved: Array, gain: Array, weight: Array) -> tuple[float, float, float]:
    """The shares, in steps of 0.05: least mean error, and a tenth of the engines on each side."""

    def nearest(off: Callable[[float], float]) -> float:
        return float(min(GRID, key=off))

    def error(share: float) -> float:
        return float(np.average(abs(np.log((1 - share * saved) * gain)), weights=weight))

    def below(share: float) -> float:
        outside = gain < 1 / (1 - share * saved) / TIMING
        return abs(float(np.average(outside, weights=weight)) - 0.1)

    def above(share: float) -> float:
        outside = gain > TIMING / (1 - share * saved)
        return abs(float(np.average(outside, weights=weight)) - 0.1)

    return nearest(error), nearest(below), nearest(above)


def alike(groups: Iterable[str]) -> Array:
    """Weights with which each group counts as much as any other."""
    names = list(groups)
    return np.array([1 / names.count(name) for name in names])


def row(name: str, gain: Array, forecast: tuple[Array, Array, Array], weight: Array) -> str:
    """A line of the table."""
    middle, low, high = forecast
    error = 100 * abs(middle / gain - 1)
    order = np.argsort(error)
    part = np.cumsum(weight[order]) / weight.sum()
    median, ninth = (error[order][np.searchsorted(part, q - 1e-9)] for q in (0.5, 0.9))
    too_high = 100 * np.average(middle > gain, weights=weight)
    holds = 100 * np.average((low <= gain) & (gain <= high), weights=weight)
    return f"{name:<58} {median:5.1f} / {ninth:4.1f} % {too_high:5.0f} % {holds:5.0f} %"


def left_out(engines: Sequence[Published]) -> tuple[Array, Array, Array]:
    """Gains where each publication is forecast by shares that were fitted to the others."""
    made = np.empty((3, len(engines)))
    names = np.array([engine.publication for engine in engines])
    for name in dict.fromkeys(names.tolist()):
        others = [engine for engine in engines if engine.publication != name]
        shares = fit(_saved(others), _gains(others), alike(e.group for e in others))
        print(f"    fitted without {name}: {shares[0]:.2f} ({shares[1]:.2f} to {shares[2]:.2f})")
        made[:, names == name] = np.array(of_shares(_saved(engines), shares))[:, names == name]
    return made[0], made[1], made[2]


def print_table() -> None:
    """Print the table of docs/kernel_model.md."""
    engines = published()
    late = [engine for engine in engines if engine.version >= REPAIRED]
    print(f"{'':<58} error, median / p90  too high  holds")
    for name, some in ((f"{len(engines)} engines", engines), (f"{len(late)} of 8.5 on", late)):
        gain, even = _gains(some), np.ones(len(some))
        print(row(f"{name}, at most", gain, _of([e.at_most for e in some]), even))
        print(row(f"{name}, expected", gain, _of([e.expected for e in some]), even))
        groups = alike(engine.group for engine in some)
        print(row(f"{name}, groups alike", gain, _of([e.expected for e in some]), groups))
        for weigh, weight in (("engines", even), ("groups", groups)):
            shares = fit(_saved(some), gain, weight)
            print(
                f"    fitted, {weigh} alike: {shares[0]:.2f} ({shares[1]:.2f} to {shares[2]:.2f})"
            )
        print(row(f"{name}, one publication left out", gain, left_out(some), groups))
    for group in dict.fromkeys(engine.group for engine in engines):
        own = [engine for engine in engines if engine.group == group]
        expected = _of([engine.expected for engine in own])
        print(row(f"{len(own)} of {group}", _gains(own), expected, np.ones(len(own))))
    print_bins(late)


def print_bins(engines: Sequence[Published]) -> None:
    """How many engines with such a bound gained more than 5 %."""
    for least, most in pairwise(BOUNDS):
        own = [engine for engine in engines if least <= round(engine.at_most.gain, 2) < most]
        if own:
            gained = sum(engine.gain > 1.05 for engine in own)
            print(f"at most {least:.2f} to {most:.2f}: {gained} of {len(own)} gained more than 5 %")


def _of(forecasts: Sequence[ForecastGain]) -> tuple[Array, Array, Array]:
    low, high = (np.array([getattr(one, name) for one in forecasts]) for name in ("low", "high"))
    return np.array([one.gain for one in forecasts]), low, high


def _gains(engines: Sequence[Published]) -> Array:
    return np.array([engine.gain for engine in engines])


def _saved(engines: Sequence[Published]) -> Array:
    return np.array([engine.saved for engine in engines])
