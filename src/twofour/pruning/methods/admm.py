"""ADMM on the Gram matrix: a dense weight that loses little and a sparse one, drawn together.

Source: Meng et al. 2024, "ALPS: Improved Optimization for Highly Sparse One-Shot Pruning for
Large Language Models", section 3.1. Written in the eigenbasis of the Gram matrix of the inputs
scaled to one norm, so that a change of the penalty costs nothing; the penalty grows by a fixed
factor, so that every row ends after the same number of steps.
"""

from __future__ import annotations

from array_api_compat import array_namespace

from twofour.pruning.methods.problem import Array, Problem, best_of_groups, damped, masked
from twofour.records import frozen

_STEPS = 16
_PENALTY = 0.1
_GROWTH = 1.158
"""Growth of the penalty at each step. The start is low for inputs that rise and fall together, such
as those behind a ReLU; the end, 0.9, is high for independent inputs, whose masks swing below it.
24 steps win 0.5 % of the error, 36 win 2 % (benchmarks/LOG.md)."""


@frozen
class EigenBasis:
    """The damped Gram matrix of the scaled inputs, as its eigenvalues and eigenvectors."""

    norms: Array
    """(inputs,): what the weights of each input are multiplied by."""
    values: Array
    vectors: Array
    turned: Array
    """The vectors, transposed, in memory of their own."""
    damping: float


def prepare(problem: Problem) -> EigenBasis:
    """One eigendecomposition for all rows."""
    xp = array_namespace(problem.gram)
    gram = damped(problem.gram, problem.damping)
    norms = xp.sqrt(xp.linalg.diagonal(gram))
    values, vectors = xp.linalg.eigh(gram / norms / norms[:, None])
    return EigenBasis(
        norms=norms,
        values=xp.where(values > 0, values, xp.zeros_like(values)),
        vectors=vectors,
        turned=xp.asarray(xp.matrix_transpose(vectors), copy=True),
        damping=problem.damping,
    )


def solve(problem: Problem) -> Array:
    """The sparse one of the two after the last step."""
    xp = array_namespace(problem.weight)
    basis: EigenBasis = problem.prepared or prepare(problem)
    dense = problem.weight * basis.norms
    target = xp.matmul(dense, basis.vectors) * basis.values
    sparse = dense
    dual = xp.zeros_like(dense)
    penalty = _PENALTY
    # G = Q L Qᵀ: the dense one is (W0 G + penalty * sparse - dual) (G + penalty)⁻¹, whose inverse
    # is Q (L + penalty)⁻¹ Qᵀ for any penalty
    for _ in range(_STEPS):
        step = xp.matmul(penalty * sparse - dual, basis.vectors)
        dense = xp.matmul((target + step) / (basis.values + penalty), basis.turned)
        moved = dense + dual / penalty
        sparse = masked(moved, best_of_groups(xp.abs(moved), problem.pattern))
        dual += penalty * (dense - sparse)
        penalty *= _GROWTH
    return sparse / basis.norms
