"""SparseGPT: inputs are pruned from left to right, and those to the right make up for it.

Source: Frantar & Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
One-Shot", section 3 and the published code: damping 0.01 of the mean diagonal, blocks of 128
inputs, the mask of a group chosen when its first input is reached, from the weights as they are
by then.
"""

from __future__ import annotations

from array_api_compat import array_namespace

from twofour.pruning.methods.problem import Array, Problem, best_of_groups, cholesky, damped, masked
from twofour.records import frozen

_BLOCK = 128
"""Inputs whose updates are applied to the rest of the matrix in one product."""
_SMALL = 64
"""A triangle of this side is inverted as it is."""


@frozen
class Factor:
    """The part of the Gram matrix that the update needs."""

    upper: Array
    """The upper Cholesky factor of its inverse."""
    damping: float
    """The damping with which it could be factored: the one asked for, or more."""


def prepare(problem: Problem) -> Factor:
    """The factor, in float64; tenfold damping as often as the matrix is not positive definite."""
    xp = array_namespace(problem.gram)
    gram = xp.astype(problem.gram, xp.float64)
    damping = problem.damping
    while (lower := cholesky(xp.flip(damped(gram, damping)))) is None:
        damping = max(1e-6, 10 * damping)
    # gram = R Rᵀ with R upper triangular, so its inverse is R⁻ᵀ R⁻¹: no inverse is factored
    upper = xp.astype(_inverse_of_upper(xp.flip(lower)), problem.gram.dtype)
    return Factor(upper=upper, damping=damping)


def solve(problem: Problem) -> Array:
    """The weight after the last column, zeros where its score was among the lowest."""
    xp = array_namespace(problem.weight)
    factor: Factor = problem.prepared or prepare(problem)
    upper = factor.upper
    m = problem.pattern.m
    dead = xp.linalg.diagonal(problem.gram) <= 0
    weight = masked(problem.weight, ~dead)
    # 300 inputs for 2:4: the blocks are the columns 0:128, 128:256 and 256:300
    block = max(_BLOCK // m * m, m)
    for start in range(0, weight.shape[1], block):
        stop = start + block
        lost = _prune_block(weight[:, start:stop], upper[start:stop, start:stop], problem)
        weight[:, stop:] -= xp.matmul(lost, upper[start:stop, stop:])
    return weight


def _prune_block(weight: Array, upper: Array, problem: Problem) -> Array:
    """Prune a block in place; gives each column's error, for the columns behind the block."""
    xp = array_namespace(weight)
    m = problem.pattern.m
    lost = xp.zeros_like(weight)
    diagonal = xp.linalg.diagonal(upper)
    for i in range(weight.shape[1]):
        if i % m == 0:
            group = slice(i, i + m)
            keep = best_of_groups((weight[:, group] / diagonal[group]) ** 2, problem.pattern)
        kept = masked(weight[:, i], keep[:, i % m])
        lost[:, i] = (weight[:, i] - kept) / diagonal[i]
        weight[:, i + 1 :] -= lost[:, i, None] * upper[i, i + 1 :]
        weight[:, i] = kept
    return lost


def _inverse_of_upper(upper: Array) -> Array:
    """The inverse by halves: that of [[A, B], [0, C]] is [[A⁻¹, -A⁻¹ B C⁻¹], [0, C⁻¹]]."""
    xp = array_namespace(upper)
    size = upper.shape[0]
    if size <= _SMALL:
        return xp.triu(xp.linalg.inv(upper))
    half = size // 2
    first = _inverse_of_upper(upper[:half, :half])
    last = _inverse_of_upper(upper[half:, half:])
    inverse = xp.zeros_like(upper)
    inverse[:half, :half] = first
    inverse[half:, half:] = last
    inverse[:half, half:] = -xp.matmul(xp.matmul(first, upper[:half, half:]), last)
    return inverse
