"""Wanda: the weights of a group with the largest |w| * ||x|| stay, unchanged.

Source: Sun et al. 2023, "A Simple and Effective Pruning Approach for Large Language Models",
section 3. The norm of an input is the root of its place on the Gram matrix's diagonal.
"""

from __future__ import annotations

from array_api_compat import array_namespace

from twofour.pruning.methods.problem import Array, Problem, best_of_groups, masked


def solve(problem: Problem) -> Array:
    """The weight with all but the N highest scores of each group at zero."""
    xp = array_namespace(problem.weight)
    norms = xp.sqrt(xp.linalg.diagonal(problem.gram))
    score = xp.abs(problem.weight) * norms
    return masked(problem.weight, best_of_groups(score, problem.pattern))
