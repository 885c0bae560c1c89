"""One weight matrix to prune, what is known of its inputs, and the masks that a score gives.

Arrays are numpy's, or torch's where the weight lies on another device; methods are written once
against the array namespace of what they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace

from twofour.records.weights import Pattern

Array = Any
"""A numpy array or a torch tensor; the namespace is asked of the array itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a method sees: a matrix whose groups of M lie side by side along its inputs."""

    weight: Array
    """(rows, inputs), float32 or float64; the inputs are a multiple of M."""
    gram: Array
    """(inputs, inputs): the mean of x xᵀ over all calibration inputs x; of the weight's type.

    The rows of an input that never fires, or only fills a group up to M, are 0.
    """
    pattern: Pattern
    damping: float = 0.01
    """Share of the mean of the diagonal that is added to it."""


Solve = Callable[[Problem], Array]
"""The pruned matrix: of the weight's shape, with zeros where a weight is pruned."""


def damped(problem: Problem) -> Array:
    """The Gram matrix with the damping on its diagonal; dead inputs get 1, so that it inverts."""
    xp = array_namespace(problem.gram)
    diagonal = xp.linalg.diagonal(problem.gram)
    ridge = problem.damping * xp.mean(diagonal)
    added = xp.where(diagonal > 0, ridge, xp.ones_like(diagonal))
    return problem.gram + added * xp.eye(diagonal.shape[0], dtype=diagonal.dtype)


def best_of_groups(score: Array, pattern: Pattern) -> Array:
    """True for the N highest scores of every M along the last axis; ties keep the lower index.

    `score` is (rows, inputs) and finite, the inputs a multiple of M.
    """
    xp = array_namespace(score)
    groups = xp.reshape(score, (-1, pattern.m))
    order = xp.argsort(-groups, axis=-1, stable=True)
    rank = xp.argsort(order, axis=-1, stable=True)
    return xp.reshape(rank < pattern.n, score.shape)


def masked(weight: Array, mask: Array) -> Array:
    """The weight where the mask is true and +0.0 elsewhere."""
    xp = array_namespace(weight)
    return xp.where(mask, weight, xp.zeros_like(weight))
