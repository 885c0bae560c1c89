"""Which order of a matrix's columns keeps most under N:M: assignment sweeps, annealed swaps.

Only the sums of what a row keeps matter, so a matrix of scores is all that is looked at: |w|, or
|w| times the size of its input. In a group, let b be the N-th largest of all members but one, and a
the sum of those above it; with x as the missing member a row keeps a + max(b, x), and
max(b, x) = (b + x + |b - x|) / 2. What any column would bring in any place is therefore one matrix
of city-block distances, for every N:M. Two moves rest on it: one member of each group is dealt out
anew (linear assignment; the idea is RIA's, Zhang et al. 2024), and two columns are swapped. The
permutation search of Pool and Yu (NeurIPS 2021) looks at pairs of groups instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from twofour.errors import BadInputError
from twofour.records.weights import Pattern

Array = NDArray[Any]
Order = NDArray[np.intp]

_FIRST_ROUND = 50
"""Sweeps of the first annealing; each that follows takes twice as many, so that one that is cut
short costs half of the time at most."""
_LONGEST = 1 << 15
"""Sweeps of one annealing: beyond, several find more than one that is longer."""
_HOT, _COLD = 0.3, 0.1
"""First and last temperature of an annealing, in standard deviations of what a column is worth."""
_QUENCH = 0.9
"""Share of an annealing after which no noise is added any more."""
_WORK = 3e9
"""Distances between two numbers that the default number of sweeps may take: seconds."""
_MOST_SWEEPS, _LEAST_SWEEPS = 1 << 11, 32
_ENOUGH = 2e-3
"""An annealing that adds less of what there is to gain is one without success."""
_PATIENCE = 2
"""Annealings without success, one after the other, that end a search without a number of steps."""
_POOL = 1 << 16


class Stop(str, Enum):
    """Why a search ended."""

    CONVERGED = "converged"
    STEPS = "steps"
    SECONDS = "seconds"
    """Time ran out: another machine may find another order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """The best order found, and what it keeps."""

    order: Order
    """Column `order[i]` of the matrix comes to place i."""
    kept_before: float
    """Sum of the scores that N:M keeps in the order given."""
    kept: float
    kept_at_most: float
    """If every row kept its own largest share N/M, wherever they lie."""
    steps: int
    """Sweeps."""
    stop: Stop

    @property
    def efficacy(self) -> float:
        """Share of what there is to gain that is gained, 0 to 1 (Pool and Yu 2021, section 4)."""
        room = self.kept_at_most - self.kept_before
        return (self.kept - self.kept_before) / room if room > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search has come."""

    steps: int
    of: int
    kept: float


def search(
    scores: Array,
    pattern: Pattern,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Found:
    """The best order of the columns of `scores` (rows x columns, none negative) that is found.

    The same scores, seed and steps give the same order. `steps` are taken in full; None: until it
    converges, and no more than fit the size of the matrix. `seconds` is an upper bound, and
    `Found.stop` tells when it cut the search short. Columns behind the last whole group of M stay
    where they are. Raises BadInputError for scores that are negative, NaN or infinite, or no
    matrix.
    """
    matrix = _checked(scores)
    whole = matrix.shape[1] - matrix.shape[1] % pattern.m
    start = np.arange(matrix.shape[1])
    room = (kept_score(matrix, pattern), _kept_at_most(matrix, pattern))
    run = _Run(
        columns=np.ascontiguousarray(matrix[:, :whole].T),
        pattern=pattern,
        steps=_default_steps(matrix.shape[0], whole, pattern) if steps is None else steps,
        patience=_PATIENCE if steps is None else math.inf,
        room=room[1] - room[0],
        seed=seed,
        until=None if seconds is None else time.monotonic() + seconds,
        progress=progress,
    )
    order, stop, taken = start, Stop.CONVERGED, 0
    if whole > pattern.m and room[1] > room[0]:
        head, stop, taken = _searched(run)
        order = np.concatenate([head, start[whole:]])
    return Found(
        order=order,
        kept_before=room[0],
        kept=kept_score(matrix, pattern, order),
        kept_at_most=room[1],
        steps=taken,
        stop=stop,
    )


def kept_score(scores: Array, pattern: Pattern, order: Order | None = None) -> float:
    """Sum over rows and groups of the N largest of M; a tail shorter than M keeps its N largest."""
    return sum(float(part.sum()) for part in _kept_parts(scores, pattern, order))


def _kept_parts(scores: Array, pattern: Pattern, order: Order | None) -> Iterator[Array]:
    rows, width = scores.shape
    whole, block = width - width % pattern.m, max(1, (1 << 20) // max(1, width))
    for first in range(0, rows, block):
        part = scores[first : first + block].astype(np.float64)
        part = part if order is None else part[:, order]
        groups = part[:, :whole].reshape(len(part), -1, pattern.m)
        yield _largest(groups, pattern.n)
        yield _largest(part[:, whole:], pattern.n)


def _largest(values: Array, count: int) -> Array:
    """The `count` largest along the last axis, in any order; all where there are no more."""
    length = values.shape[-1]
    if length <= count:
        return values
    return np.partition(values, length - count, axis=-1)[..., length - count :]


def _kept_at_most(matrix: Array, pattern: Pattern) -> float:
    whole = matrix.shape[1] - matrix.shape[1] % pattern.m
    best = _largest(matrix[:, :whole], whole // pattern.m * pattern.n).sum()
    return float(best + _largest(matrix[:, whole:], pattern.n).sum())


def _checked(scores: Array) -> Array:
    if scores.ndim != 2:
        raise BadInputError(f"scores of shape {scores.shape} are no matrix of rows x columns")
    matrix: Array = scores.astype(np.float64)
    if not (np.isfinite(matrix).all() and (matrix >= 0).all()):
        raise BadInputError(
            "the scores of a permutation search hold negative, infinite or NaN values",
            hint="repair the model, or leave the layer out with --exclude",
        )
    return matrix


def _default_steps(rows: int, width: int, pattern: Pattern) -> int:
    work = (max(1, width) // pattern.m) ** 2 * max(1, rows)
    return int(min(_MOST_SWEEPS, max(_LEAST_SWEEPS, _WORK // max(1, work))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    columns: Array
    """One column of the scores a row, float64."""
    pattern: Pattern
    steps: int
    patience: float
    room: float
    seed: int
    until: float | None
    progress: Callable[[Progress], None] | None

    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() >= self.until

    def tell(self, steps: int, kept: float) -> None:
        if self.progress is not None:
            self.progress(Progress(steps=steps, of=self.steps, kept=kept))


def _searched(run: _Run) -> tuple[Order, Stop, int]:
    """Sweeps without noise, then annealings of growing length; the best that was seen."""
    random = np.random.default_rng(run.seed)
    groups = np.arange(len(run.columns)).reshape(-1, run.pattern.m)
    best, best_kept = groups.copy(), 0.0
    taken, failed, length, noise = 0, 0, _FIRST_ROUND, np.zeros(0)
    while taken < run.steps and failed < run.patience:
        planned = min(length, run.steps - taken)
        before = best_kept
        for kept in _annealed(run, groups, planned, random, noise):
            taken += 1
            if kept > best_kept:
                best, best_kept = groups.copy(), kept
            run.tell(taken, best_kept)
            if run.is_over():
                return best.reshape(-1), Stop.SECONDS, taken
        failed = failed + 1 if best_kept - before < _ENOUGH * run.room else 0
        length = min(2 * length, _LONGEST)
        if not len(noise):
            noise = random.gumbel(size=_POOL + len(groups) ** 2)
    stop = Stop.CONVERGED if failed >= run.patience else Stop.STEPS
    return best.reshape(-1), stop, taken


def _annealed(
    run: _Run, groups: Order, sweeps: int, random: np.random.Generator, noise: Array
) -> Iterator[float]:
    """Sweeps over `groups` with noise that grows less; what is kept after each.

    Gumbel noise of scale T makes the largest a draw in proportion to exp(worth / T).
    """
    scale = 0.0
    for sweep in range(sweeps):
        member = random.integers(run.pattern.m, size=len(groups))
        worth = _worth_in(run, groups, member)
        before, noisy = float(worth.trace()), worth
        if not sweep:
            scale = float((worth - worth.mean(0) - worth.mean(1)[:, None]).std())
        if len(noise) and sweep < _QUENCH * sweeps:
            heat = scale * _HOT * (_COLD / _HOT) ** (sweep / (_QUENCH * sweeps))
            first = int(random.integers(_POOL))
            noisy = worth + heat * noise[first : first + worth.size].reshape(worth.shape)
        _, column = linear_sum_assignment(noisy, maximize=True)
        kept = float(np.take_along_axis(worth, column[:, None], 1).sum())
        if noisy is not worth or kept > before:
            every = np.arange(len(groups))
            groups[every, member] = groups[every, member][column]
        yield max(kept, before) if noisy is worth else kept


def _worth_in(run: _Run, groups: Order, member: Order) -> Array:
    """What each group would keep with the member taken out of each, its own on the diagonal."""
    is_out = np.arange(groups.shape[1]) == member[:, None]
    rest = groups[~is_out].reshape(len(groups), -1)
    above, at = _thresholds(run.columns[rest], run.pattern.n)
    offered = run.columns[groups[is_out]]
    worth: Array = cdist(at, offered, "cityblock")
    worth += offered.sum(1)
    worth += at.sum(1)[:, None]
    worth *= 0.5
    worth += above[:, None]
    return worth


def _thresholds(others: Array, n: int) -> tuple[Array, Array]:
    """Of groups x (M - 1) members x rows: sums of the N - 1 largest, and the N-th largest."""
    if (n, others.shape[1]) == (2, 3):  # 2:4 without sorting: the median of three
        one, two, three = others[:, 0], others[:, 1], others[:, 2]
        low, high = np.minimum(one, two), np.maximum(one, two)
        return np.maximum(high, three).sum(1), np.maximum(low, np.minimum(high, three))
    ranked = np.partition(others, others.shape[1] - n, axis=1)[:, others.shape[1] - n :]
    # the first of the N largest is the smallest of them: partition puts it in its place
    return ranked[:, 1:].sum((1, 2)), ranked[:, 0]
