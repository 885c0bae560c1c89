"""One weight matrix to prune: the problem of every method, the mask of a score, and the refit.

Arrays are numpy's, or torch's where the weight lies on another device; methods are written once
against the array namespace of their arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from twofour.records import frozen
from twofour.records.weights import Pattern

Array = Any
"""A numpy array or a torch tensor; the namespace is asked of the array itself."""

DAMPING = 0.01
"""The default. Source: SparseGPT's `percdamp`."""


@frozen
class Problem:
    """The problem of a method: a matrix whose groups of M lie side by side along its inputs."""

    weight: Array
    """(rows, inputs), float32 or float64, finite; the inputs are a multiple of M. Its outputs are
    what counts. A method may be given any of its rows alone: they do not depend on each other."""
    gram: Array
    """(inputs, inputs): the mean of x xᵀ over all calibration inputs x, finite, not all 0.

    The rows of an input that never fires, or only fills a group up to M, are 0.
    """
    pattern: Pattern
    damping: float = DAMPING
    """Share of the mean of the diagonal (of inputs that fire) that is added to it."""
    pruned_before: Array | None = None
    """A weight of the same shape that has a mask already; None: `weight` itself."""
    prepared: Any = None
    """Result of the method's `prepare` for this Gram matrix; None: `solve` calls it itself."""


REFIT_STEPS = 10
"""Steps of the refit after every method, unless the user says how many."""

Solve = Callable[[Problem], Array]
"""The pruned matrix: of the weight's shape, with zeros where a weight is pruned."""


def ridge(gram: Array, damping: float) -> Array:
    """The number that the damping adds to each place of the diagonal, (inputs,).

    Inputs that never fire do not count in the mean. Without damping they get it whole, as the
    matrix would not invert (and their weights change no output).
    """
    xp = array_namespace(gram)
    diagonal = xp.linalg.diagonal(gram)
    fires = diagonal > 0
    count = xp.sum(fires, dtype=diagonal.dtype)
    mean = xp.sum(diagonal) / xp.where(count > 0, count, xp.ones_like(count))
    if damping > 0:
        return damping * mean * xp.ones_like(diagonal)
    return xp.where(fires, xp.zeros_like(diagonal), mean)


def damped(gram: Array, damping: float) -> Array:
    """The Gram matrix with the ridge on its diagonal."""
    return plus_diagonal(gram, ridge(gram, damping))


def plus_diagonal(gram: Array, added: Array) -> Array:
    """A copy, the only one, of a matrix or a stack of them with more on the diagonals."""
    xp = array_namespace(gram)
    raised = xp.asarray(gram, copy=True)
    every = xp.arange(gram.shape[-1], device=device(gram))
    raised[..., every, every] += added
    return raised


def cholesky(matrix: Array) -> Array | None:
    """The lower factor; None: not positive definite. Other errors, as of memory, are raised."""
    try:
        return array_namespace(matrix).linalg.cholesky(matrix)
    except (np.linalg.LinAlgError, RuntimeError) as error:  # torch's LinAlgError is a RuntimeError
        if not type(error).__name__.endswith("LinAlgError"):
            raise
        return None


def best_of_groups(score: Array, pattern: Pattern) -> Array:
    """True for the N highest scores of every M along the last axis; ties keep the lower index.

    `score` is (rows, inputs) without NaN, the inputs a multiple of M. Each score counts how many
    of its group come before it: M (M - 1) / 2 comparisons a group, and no sorting.
    """
    # 2:4 of (5, 1, 7, 5): ahead of them are 1, 3, 0 and 2 others, so that 5 and 7 stay
    xp = array_namespace(score)
    places = [score[:, place :: pattern.m] for place in range(pattern.m)]
    shape = (pattern.m, *places[0].shape)
    ahead = xp.zeros(shape, dtype=xp.uint8, device=device(score))
    for i, j in itertools.combinations(range(pattern.m), 2):
        wins = places[i] >= places[j]
        ahead[j] += wins
        ahead[i] += ~wins
    return xp.reshape(xp.permute_dims(ahead < pattern.n, (1, 2, 0)), score.shape)


def masked(weight: Array, mask: Array) -> Array:
    """The weight where the mask is true and +0.0 elsewhere."""
    xp = array_namespace(weight)
    return xp.where(mask, weight, xp.zeros_like(weight))


def refit(problem: Problem, pruned: Array, steps: int) -> Array:
    """The kept weights make up for those that went: `pruned`, with new values at its non-zeros.

    For each row they minimise (w - w') H (w - w')ᵀ, H the damped Gram matrix, by conjugate
    gradients. Ten to twenty steps come within a few percent of the least-squares solution. Rows
    are independent. No row's damped error rises: where rounding would raise it, the row's old
    values stay. Sources: Meng et al. 2024 (ALPS), section 3.2; Hestenes & Stiefel 1952,
    preconditioned with the diagonal.
    """
    if steps <= 0:
        return pruned
    xp = array_namespace(pruned)
    gram = problem.gram
    added = ridge(gram, problem.damping)
    curve = xp.linalg.diagonal(gram) + added
    # With 2:4 a row such as (0.9, 0, 0, -0.4) keeps its two places: the residual is set to zero
    # at the two others, so that every step of the descent leaves them at zero. `pull` is the
    # gradient at all four places, (w - w') H, and is updated instead of computed anew.
    mask = pruned != 0
    weight = pruned
    gone = problem.weight - pruned
    pull = xp.matmul(gone, gram) + gone * added
    before = _dot(gone, pull)
    residual = masked(pull, mask)
    step = residual / curve
    slope = _dot(residual, step)
    for _ in range(steps):
        through = xp.matmul(step, gram) + step * added
        length = _ratio(slope, _dot(step, through))
        weight = weight + length * step
        pull = pull - length * through
        residual = masked(pull, mask)
        scaled = residual / curve
        last = slope
        slope = _dot(residual, scaled)
        step = scaled + _ratio(slope, last) * step
    better = _dot(problem.weight - weight, pull) < before
    return xp.where(better, weight, pruned)


def _dot(a: Array, b: Array) -> Array:
    """The product of each row of `a` with the same row of `b`, (rows, 1)."""
    xp = array_namespace(a)
    return xp.sum(a * b, axis=1, keepdims=True)


def _ratio(over: Array, under: Array) -> Array:
    """The ratio; 0 for a row that has converged (both are 0) or lost its curvature to rounding."""
    xp = array_namespace(over)
    sound = under > 0
    return masked(over, sound) / xp.where(sound, under, xp.ones_like(under))
