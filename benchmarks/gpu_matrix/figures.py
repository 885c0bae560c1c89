"""From samples to figures: medians, ratios to dense with intervals, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpu_matrix.rows import Row, short

DENSE, AGAIN = "dense", "dense again"
SAMPLES = "samples_ms"


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval over the rounds."""
    values = np.asarray(ratios, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(values), size=(1000, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)


def noise_floor(samples: Mapping[str, Sequence[float]], tick_ms: float) -> float | None:
    """How far from 1 dense against dense reaches, as a part; None where either is missing."""
    dense, again = samples.get(DENSE), samples.get(AGAIN)
    if not dense or not again:
        return None
    _, low, high = interval([b / a for a, b in zip(dense, again, strict=True)])
    return max(high, 1 / low, 1.0) - 1 + tick_ms / float(np.median(dense))


def verdict(low: float, high: float, floor: float | None, rounds: int) -> str:
    """Of an interval; ten rounds and a noise floor are the least that decides."""
    if floor is None or rounds < 10:
        return "undecided"
    if high < 1 / (1 + floor):
        return "faster"
    return "slower" if low > 1 + floor else "no difference"


def condense(samples: Mapping[str, Sequence[float]], tick_ms: float) -> dict[str, Row]:
    """Samples of each variant, round by round, to their figures and ratio to dense.

    The samples stay beside the figures, rounded to a nanosecond.
    """
    floor = noise_floor(samples, tick_ms)
    rows: dict[str, Row] = {}
    for name, values in samples.items():
        p10, median, p90 = np.percentile(values, (10, 50, 90))
        row = {"median_ms": median, "p10_ms": p10, "p90_ms": p90}
        if name != DENSE and DENSE in samples:
            pairs = zip(samples[DENSE], values, strict=True)
            row["ratio"], row["low"], row["high"] = interval([b / a for a, b in pairs])
        rows[name] = {key: short(float(value)) for key, value in row.items()}
        rows[name]["rounds"] = len(values)
        rows[name][SAMPLES] = [round(value, 6) for value in values]
        if name not in (DENSE, AGAIN) and "ratio" in row:
            rows[name]["verdict"] = verdict(row["low"], row["high"], floor, len(values))
    return rows
