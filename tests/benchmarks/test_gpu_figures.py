"""The statistics of the GPU benchmark: ratios, noise, verdicts."""

from __future__ import annotations

import random

import pytest
from gpu_matrix.figures import condense, noise_floor


def drifting_rounds(ratios: dict[str, float], rounds: int = 40) -> dict[str, list[float]]:
    rng = random.Random(7)
    samples: dict[str, list[float]] = {name: [] for name in ratios}
    for index in range(rounds):
        drift = 1 + index / rounds
        for name, ratio in ratios.items():
            outlier = 5.0 if rng.random() < 0.05 else 1.0
            samples[name].append(ratio * drift * outlier * rng.gauss(1, 0.01))
    return samples


def test_known_ratios_come_out_of_drift_and_outliers() -> None:
    samples = drifting_rounds({"dense": 1, "dense again": 1, "a": 0.7, "b": 1.0, "c": 1.3})
    rows = condense(samples, 0.0)
    assert rows["a"]["ratio"] == pytest.approx(0.7, rel=0.01)
    assert rows["c"]["ratio"] == pytest.approx(1.3, rel=0.01)
    verdicts = {name: rows[name]["verdict"] for name in "abc"}
    assert verdicts == {"a": "faster", "b": "no difference", "c": "slower"}
    assert "ratio" not in rows["dense"]
    assert "verdict" not in rows["dense again"]


def test_fewer_than_ten_rounds_or_no_noise_decide_nothing() -> None:
    few = condense(drifting_rounds({"dense": 1, "dense again": 1, "a": 0.5}, 9), 0.0)
    assert few["a"]["verdict"] == "undecided"
    alone = condense(drifting_rounds({"dense": 1, "a": 0.5}), 0.0)
    assert alone["a"]["verdict"] == "undecided"


def test_a_tick_of_the_clock_widens_the_noise() -> None:
    steady = {"dense": [1.0] * 20, "dense again": [1.0] * 20, "a": [0.9] * 20}
    assert noise_floor(steady, 0.0) == 0
    assert noise_floor(steady, 0.25) == pytest.approx(0.25)
    assert condense(steady, 0.0)["a"]["verdict"] == "faster"
    assert condense(steady, 0.25)["a"]["verdict"] == "no difference"


def test_samples_are_kept_to_the_nanosecond() -> None:
    rows = condense({"dense": [1.23456789, 0.5], "dense again": [2.0, 0.1 + 0.2]}, 0.0)
    assert rows["dense"]["samples_ms"] == [1.234568, 0.5]
    assert rows["dense again"]["samples_ms"] == [2.0, 0.3]
