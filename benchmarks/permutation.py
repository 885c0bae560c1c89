"""The search for a channel order against the published one, on its own matrix, in one run.

The published procedure, in words of our own: for every pair of groups of four columns, the best of
the 35 ways to part eight columns in two; the best pairs are applied, each group once a round, until
no pair gains; then two columns of a random pair are swapped, up to a hundred times in all, and it
goes on from there. Source: Pool and Yu, "Channel Permutations for N:M Sparsity" (NeurIPS 2021), and
its implementation in apex (permutation search kernels, stripe groups of 8). Time is the CPU time of
this process, which has one thread: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray

from twofour.pruning.permutation.search import kept_score, search
from twofour.records.weights import Pattern

Array = NDArray[Any]
Trace = list[tuple[float, float]]
TWO_FOUR = Pattern(2, 4)
CHECKPOINTS = (0.1, 0.2, 1, 5, 20)
PERTURBATIONS = 100
SPLITS = [
    (0, *rest, *sorted({*range(1, 8)} - {*rest})) for rest in itertools.combinations(range(1, 8), 3)
]


def published_matrix(kind: str) -> Array:
    """As the published tests make it (uniform), and of normal magnitudes."""
    random = np.random.RandomState(1)
    return random.rand(128, 64) if kind == "uniform" else np.abs(random.randn(128, 64))


def published(matrix: Array, seconds: float) -> Iterator[tuple[float, float]]:
    """CPU time and kept score each time that it rose."""
    random, start = np.random.default_rng(1), time.process_time()
    order, best = np.arange(matrix.shape[1]), 0.0
    gains: dict[tuple[int, int], tuple[float, Array]] = {}
    stale, left = set(range(matrix.shape[1] // 4)), PERTURBATIONS
    while left and time.process_time() - start < seconds:
        for pair in itertools.combinations(range(len(order) // 4), 2):
            if stale & {*pair}:
                gains[pair] = _best_split(matrix, order, pair)
        stale = set()
        for pair, (gain, split) in sorted(gains.items(), key=lambda item: -item[1][0]):
            if gain > 1e-9 and not stale & {*pair}:
                order[_places(pair)] = order[_places(pair)][split]
                stale |= {*pair}
        kept = kept_score(matrix, TWO_FOUR, order)
        if kept > best:
            best = kept
            yield time.process_time() - start, kept
        if not stale:
            left -= 1
            pair = tuple(random.choice(len(order) // 4, 2, replace=False))
            one, other = (4 * group + random.integers(4) for group in pair)
            order[[one, other]] = order[[other, one]]
            stale = {*pair}


def _places(pair: tuple[int, ...]) -> Array:
    return np.concatenate([np.arange(4 * group, 4 * group + 4) for group in pair])


def _best_split(matrix: Array, order: Array, pair: tuple[int, int]) -> tuple[float, Array]:
    columns = matrix[:, order[_places(pair)]]
    kept = np.sort(columns[:, SPLITS].reshape(len(matrix), 35, 2, 4), 3)[..., 2:].sum((0, 2, 3))
    best = int(kept.argmax())
    return float(kept[best] - kept[0]), np.array(SPLITS[best])


def ours(matrix: Array, steps: int, seed: int) -> Trace:
    """CPU time and kept score after every sweep."""
    start, trace = time.process_time(), []
    search(
        matrix,
        TWO_FOUR,
        steps=steps,
        seed=seed,
        progress=lambda step: trace.append((time.process_time() - start, step.kept)),
    )
    return trace


def efficacies(matrix: Array, trace: Trace) -> list[str]:
    """At each checkpoint that was reached, in percent."""
    plain = search(matrix, TWO_FOUR, steps=0)
    room = plain.kept_at_most - plain.kept_before
    found = []
    for checkpoint in CHECKPOINTS:
        kept = max((kept for at, kept in trace if at <= checkpoint), default=plain.kept_before)
        found.append(f"{100 * (kept - plain.kept_before) / room:.1f}")
    return found


def sweep_seconds(side: int, repeats: int) -> list[float]:
    """CPU seconds of each sweep over a square matrix of normal magnitudes."""
    matrix = np.abs(np.random.default_rng(0).standard_normal((side, side)))
    at = [time.process_time()]
    search(matrix, TWO_FOUR, steps=repeats + 1, progress=lambda _: at.append(time.process_time()))
    return list(np.diff(at)[1:])  # the first holds what comes before the sweeps


def row(name: str, cells: Sequence[str]) -> None:
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=330_000, help="sweeps of each run of ours")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peer-seconds", type=float, default=20.0)
    parser.add_argument("--side", type=int, default=2048)
    options = parser.parse_args()
    print(f"numpy {np.__version__}, Python {platform.python_version()}, one thread, CPU seconds")
    for kind in ("uniform", "normal"):
        matrix = published_matrix(kind)
        row(f"{kind} 128x64: efficacy in % after", [f"{at:g} s" for at in CHECKPOINTS])
        peer = list(published(matrix, options.peer_seconds))
        row(f"published procedure (last gain at {peer[-1][0]:.1f} s)", efficacies(matrix, peer))
        for seed in range(options.seeds):
            row(f"ours, seed {seed}", efficacies(matrix, ours(matrix, options.steps, seed)))
    times = sweep_seconds(options.side, 10)
    print(
        f"sweep of {options.side}x{options.side}: {np.median(times):.3f} s"
        f" [{min(times):.3f} to {max(times):.3f}]"
    )


if __name__ == "__main__":
    main()
