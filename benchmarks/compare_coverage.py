"""How often the interval of a ratio covers the truth, and how wide it is, on simulated rounds.

    python benchmarks/compare_coverage.py [--runs 2000] [--others 400]

Every case has true ratios of 1.00, 1.02 and 1.30 in turn. Three tables: the interval that twofour
uses, by case and rounds; the same for other estimators, lowest to highest coverage over the cases
and mean half width; how often a comparison with a twin calls a ratio a difference. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from twofour.latency.noise import paired_ratio
from twofour.latency.ratios import verdict_of
from twofour.records.latency import LatencyVerdict

Array: TypeAlias = npt.NDArray[Any]
Case: TypeAlias = Callable[[np.random.Generator, int], Array]
Interval: TypeAlias = Callable[[Array, Array], tuple[float, float]]

ROUNDS = (10, 12, 15, 20, 30, 50, 200)
TRUTHS = (1.00, 1.02, 1.30)
RESAMPLES = 1000
CLOCK_TICK = 0.01
EDGE = 1e-12


# --- cases: times of [variant, baseline] in each round, both 1 in truth --------------------------


def lognormal(part: float) -> Case:
    return lambda rng, rounds: np.exp(part * rng.standard_normal((2, rounds)))


def when(rng: np.random.Generator, rounds: int) -> Array:
    """Each runs at a random moment of its round; the unit is a round."""
    moments: Array = np.arange(rounds) + rng.random((2, rounds))
    return moments


def ramp(rng: np.random.Generator, rounds: int) -> Array:
    return lognormal(0.02)(rng, rounds) * (1 + 0.5 * when(rng, rounds) / rounds)


def waves(rng: np.random.Generator, rounds: int) -> Array:
    wave = np.sin(2 * math.pi * 3 * when(rng, rounds) / rounds)
    return lognormal(0.02)(rng, rounds) * (1 + 0.25 * wave)


def bursts(rng: np.random.Generator, rounds: int) -> Array:
    """Half as slow again for two rounds, an eighth as many times as there are rounds."""
    since = when(rng, rounds)[..., None] - rng.random(max(1, rounds // 8)) * rounds
    slow = ((since > 0) & (since < 2)).any(-1)
    return lognormal(0.02)(rng, rounds) * np.where(slow, 1.5, 1)


def outliers(rng: np.random.Generator, rounds: int) -> Array:
    slow = rng.random((2, rounds)) < 0.05
    return lognormal(0.02)(rng, rounds) * np.where(slow, 3, 1)


def heavy_tail(rng: np.random.Generator, rounds: int) -> Array:
    return lognormal(0.02)(rng, rounds) * (1 + 0.02 * rng.pareto(1.5, (2, rounds)))


def two_clocks(rng: np.random.Generator, rounds: int) -> Array:
    slow = rng.random((2, rounds)) < 0.3
    return lognormal(0.02)(rng, rounds) * np.where(slow, 1.1, 1)


CASES: dict[str, Case] = {
    "log-normal 1 %": lognormal(0.01),
    "log-normal 2 %, clock of 1 %": lognormal(0.02),
    "log-normal 5 %": lognormal(0.05),
    "ramp to 1.5": ramp,
    "three waves of 25 %": waves,
    "bursts of 1.5": bursts,
    "5 % of runs x3": outliers,
    "heavy tail (Pareto 1.5)": heavy_tail,
    "two clocks, 30 % x1.1": two_clocks,
}


def simulate(name: str, rng: np.random.Generator, rounds: int, truth: float) -> tuple[Array, Array]:
    variant, baseline = CASES[name](rng, rounds)
    variant = variant * truth
    if "clock of" in name:
        variant, baseline = np.round(np.stack([variant, baseline]) / CLOCK_TICK) * CLOCK_TICK
    return variant, baseline


# --- estimators: a 95 % interval of the log ratio ------------------------------------------------


def used(variant: Array, baseline: Array) -> tuple[float, float]:
    found = paired_ratio(tuple(variant), tuple(baseline), seed=0)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    return math.log(found.low), math.log(found.high)


@lru_cache(maxsize=4)
def drawn(rounds: int) -> Array:
    ranks: Array = np.random.default_rng(0).integers(0, rounds, (RESAMPLES, rounds))
    return ranks


def percentiles(values: Array) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def median(variant: Array, baseline: Array) -> tuple[float, float]:
    logs = np.log(variant / baseline)
    return percentiles(np.median(logs[drawn(len(logs))], axis=1))


def ratio_of_medians(variant: Array, baseline: Array) -> tuple[float, float]:
    ranks = drawn(len(variant))
    medians = [np.median(np.log(side)[ranks], axis=1) for side in (variant, baseline)]
    return percentiles(medians[0] - medians[1])


def middle(logs: Array) -> Array:
    cut = logs.shape[-1] // 4
    mean: Array = np.sort(logs, axis=-1)[..., cut : logs.shape[-1] - cut].mean(-1)
    return mean


def middle_plain(variant: Array, baseline: Array) -> tuple[float, float]:
    logs = np.log(variant / baseline)
    return percentiles(middle(logs[drawn(len(logs))]))


def winsorized_error(logs: Array) -> Array:
    size = logs.shape[-1]
    cut = size // 4
    kept = np.sort(logs, axis=-1)
    kept[..., :cut] = kept[..., cut : cut + 1]
    kept[..., size - cut :] = kept[..., size - cut - 1 : size - cut]
    error: Array = kept.std(-1, ddof=1) / ((1 - 2 * cut / size) * math.sqrt(size))
    return error


def middle_bootstrap_t(variant: Array, baseline: Array) -> tuple[float, float]:
    logs = np.log(variant / baseline)
    again = logs[drawn(len(logs))]
    errors = winsorized_error(again)
    t = np.abs(middle(again) - middle(logs)) / np.where(errors > EDGE, errors, np.inf)
    half = float(np.quantile(t, 0.95) * winsorized_error(logs))
    return float(middle(logs)) - half, float(middle(logs)) + half


@lru_cache(maxsize=4)
def signed_rank(rounds: int) -> tuple[int, Array, Array]:
    """Walsh averages to leave out at either end (2.5 % of the signed-rank distribution), pairs."""
    chances = np.ones(1)
    for rank in range(1, rounds + 1):
        wider = np.zeros(len(chances) + rank)
        wider[: len(chances)] += chances / 2
        wider[rank:] += chances / 2
        chances = wider
    first, second = np.triu_indices(rounds)
    return int(np.searchsorted(np.cumsum(chances), 0.025)), first, second


def hodges_lehmann(variant: Array, baseline: Array) -> tuple[float, float]:
    logs = np.log(variant / baseline)
    cut, first, second = signed_rank(len(logs))
    walsh = np.sort((logs[first] + logs[second]) / 2)
    return float(walsh[max(cut, 1) - 1]), float(walsh[-max(cut, 1)])


ESTIMATORS: dict[str, Interval] = {
    "middle half, widened (used)": used,
    "middle half, percentiles": middle_plain,
    "middle half, bootstrap-t": middle_bootstrap_t,
    "median, percentiles": median,
    "ratio of medians, percentiles": ratio_of_medians,
    "Hodges-Lehmann, signed ranks": hodges_lehmann,
}


# --- the tables ----------------------------------------------------------------------------------


def coverage(case: str, rounds: int, interval: Interval, runs: int) -> tuple[float, float]:
    """Per cent of the runs whose interval holds the truth, and mean half width in per cent."""
    rng = np.random.default_rng([rounds, list(CASES).index(case)])
    held, width = 0, 0.0
    for run in range(runs):
        truth = TRUTHS[run % len(TRUTHS)]
        low, high = interval(*simulate(case, rng, rounds, truth))
        held += low - EDGE <= math.log(truth) <= high + EDGE
        width += (high - low) / 2
    return 100 * held / runs, 100 * width / runs


def called_different(rounds: int, truth: float, runs: int) -> float:
    """Per cent of comparisons with 2 % of noise that do not say "no difference"."""
    rng = np.random.default_rng([rounds, round(1000 * truth)])
    different = 0
    for _ in range(runs):
        variant, baseline, twin = np.exp(0.02 * rng.standard_normal((3, rounds)))
        noise = paired_ratio(twin, baseline, seed=0)
        found = paired_ratio(variant * truth, baseline, seed=0)
        assert noise is not None
        assert noise.low is not None
        assert noise.high is not None
        assert found is not None
        floor = max(noise.high, 1 / noise.low) - 1
        verdict = verdict_of(found.low, found.high, floor)
        different += verdict is not LatencyVerdict.NO_DIFFERENCE
    return 100 * different / runs


def print_row(name: str, cells: list[str]) -> None:
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def print_used(runs: int) -> dict[str, dict[int, tuple[float, float]]]:
    print_row("case: coverage % (half width %)", [f"{n} rounds" for n in ROUNDS])
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for case in CASES:
        found[case] = {n: coverage(case, n, used, runs) for n in ROUNDS}
        print_row(case, [f"{held:.1f} ({width:.2f})" for held, width in found[case].values()])
    return found


def print_others(runs: int) -> None:
    print_row("estimator: coverage % (mean half width %)", [f"{n} rounds" for n in ROUNDS])
    for name, interval in ESTIMATORS.items():
        cells = []
        for rounds in ROUNDS:
            found = [coverage(case, rounds, interval, runs) for case in CASES]
            held = [h for h, _ in found]
            width = sum(w for _, w in found) / len(found)
            cells.append(f"{min(held):.1f} to {max(held):.1f} ({width:.2f})")
        print_row(name, cells)


def print_verdicts(runs: int) -> dict[str, dict[int, float]]:
    print_row("true ratio: called a difference %", [f"{n} rounds" for n in ROUNDS])
    found: dict[str, dict[int, float]] = {}
    for truth in (1.00, 1.01, 1.02, 1.05, 1.30):
        found[f"{truth:.2f}"] = {n: called_different(n, truth, runs) for n in ROUNDS}
        print_row(f"{truth:.2f}", [f"{c:.1f}" for c in found[f"{truth:.2f}"].values()])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--others", type=int, default=400)
    args = parser.parse_args()
    found = print_used(args.runs)
    print_others(args.others)
    verdicts = print_verdicts(args.runs)
    print(json.dumps({"runs": args.runs, "coverage": found, "different": verdicts}))


if __name__ == "__main__":
    main()
