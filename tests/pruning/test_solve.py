"""One layer through a method: the mask, the bias, the errors."""

from __future__ import annotations

import numpy as np

from twofour.pattern import check
from twofour.pruning.matrices import Layout, matrix_rows
from twofour.pruning.methods import method_named
from twofour.pruning.solve import LayerProblem, solve_layer
from twofour.pruning.statistics import InputSums, held_out_samples
from twofour.records.options import MethodOptions
from twofour.records.weights import Pattern

PATTERN = Pattern(2, 4)


def test_wandas_errors_are_those_of_the_outputs() -> None:
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(6, 10)).astype(np.float32)
    x = (generator.normal(size=(40, 3, 10)) * generator.uniform(0.1, 3, 10) + 1).astype(np.float32)
    layout = Layout(shape=weight.shape, axis=1, m=4)
    sums, held = InputSums(layout), held_out_samples(0, 40)
    sums.add(matrix_rows(x[:20], layout), np.repeat(held[:20], 3))
    sums.add(matrix_rows(x[20:], layout), np.repeat(held[20:], 3))
    statistics = sums.statistics()
    assert statistics is not None
    problem = LayerProblem(
        stored=weight, layout=layout, pattern=PATTERN, statistics=statistics, has_bias=True
    )
    solved = solve_layer(problem, method_named("wanda"), MethodOptions())
    assert check(solved.weight, 1, PATTERN).holds
    score = np.abs(weight) * np.sqrt((x[~held].astype(np.float64) ** 2).mean((0, 1)))
    padded = np.pad(score, ((0, 0), (0, 2))).reshape(6, 3, 4)
    kept = np.argsort(np.argsort(-padded, axis=-1, kind="stable"), axis=-1) < 2
    assert np.array_equal(solved.weight != 0, kept.reshape(6, 12)[:, :10])
    gone = (weight - solved.weight).astype(np.float64)
    for inputs, error in (
        (x[~held], solved.output_error.calibration),
        (x[held], solved.output_error.held_out),
    ):
        assert error is not None
        lost = inputs @ gone.T - solved.bias_change
        assert np.isclose(error, (lost**2).sum() / ((inputs @ weight.T) ** 2).sum(), rtol=1e-4)
