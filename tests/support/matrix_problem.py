"""A layer to prune by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twofour.inputs.samples import factors_of, held_out_samples
from twofour.pruning.layer_problem import LayerProblem
from twofour.pruning.matrices import Layout, matrix_rows
from twofour.pruning.methods import Method
from twofour.pruning.solve import LayerSolver, SolvedLayer
from twofour.pruning.statistics import InputSums
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern

TWO_FOUR = Pattern(2, 4)


def layer_problem(
    weight: NDArray[Any],
    layout: Layout,
    pattern: Pattern,
    rows: NDArray[Any],
    factors: NDArray[np.float64],
) -> LayerProblem:
    """A layer with a bias, pruned by these rows of inputs; `factors` are those of the rows."""
    sums = InputSums()
    half = rows.shape[1] // 2
    for some in (slice(0, half), slice(half, None)):
        sums.add(rows[:, some], factors[some])
    statistics = sums.statistics()
    assert statistics is not None
    return LayerProblem(
        stored=weight, layout=layout, pattern=pattern, statistics=statistics, has_bias=True
    )


def matrix_problem(
    weight: NDArray[np.float32], x: NDArray[np.float32], pattern: Pattern = TWO_FOUR
) -> LayerProblem:
    """One Linear with its calibration inputs, (samples, inputs)."""
    layout = Layout(shape=weight.shape, axis=1, m=pattern.m)
    factors = factors_of(held_out_samples(0, len(x)))
    return layer_problem(weight, layout, pattern, matrix_rows(x, layout), factors)


def solve_layer(
    problem: LayerProblem, method: Method, options: MethodOptions, *, threads: int | None = None
) -> SolvedLayer:
    """One layer by itself."""
    return LayerSolver(method, options, threads=threads).solve(problem)
