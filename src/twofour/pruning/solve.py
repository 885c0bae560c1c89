"""One layer: its weight and the statistics of its inputs through a method, and what that cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from array_api_compat import array_namespace
from threadpoolctl import threadpool_limits

from twofour.pruning.matrices import Layout, from_stack, to_stack
from twofour.pruning.methods import Method
from twofour.pruning.methods.problem import Array, Problem
from twofour.pruning.statistics import Inputs, Statistics
from twofour.records.options import MethodOptions
from twofour.records.pruning import OutputError
from twofour.records.weights import Pattern

_DAMPING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A pruned weight, and what pruning did to the layer's output."""

    weight: Array
    """Of the stored shape and type."""
    bias_change: Array | None
    """(outputs,), to be added to the bias; None: not asked for."""
    output_error: OutputError
    """With the changed bias, where there is one."""
    damping: float | None
    refit_steps: int
    kept_magnitude: float | None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProblem:
    """One stored weight with its statistics."""

    stored: Array
    """float32 or float64."""
    layout: Layout
    pattern: Pattern
    statistics: Statistics
    has_bias: bool
    """Whether there is a bias to correct."""
    rounded: Callable[[Array], Array] | None = None
    """Gives the values of the type that they are stored in: errors are those of what is saved."""


def solve_layer(problem: LayerProblem, method: Method, options: MethodOptions) -> Solved:
    """Prune one stored weight by a method that has data, part by part."""
    stack = to_stack(problem.stored, problem.layout)
    xp = array_namespace(stack)
    gram = xp.astype(problem.statistics.seen.mean_gram, stack.dtype)
    damping = _DAMPING if options.damping is None else options.damping
    with threadpool_limits(limits=1, user_api="blas"):
        solved = xp.stack(
            [
                method.solve(
                    Problem(
                        weight=stack[part],
                        gram=gram[part],
                        pattern=problem.pattern,
                        damping=damping,
                    )
                )
                for part in range(stack.shape[0])
            ]
        )
        saved = from_stack(solved, problem.layout)
        if problem.rounded is not None:
            saved = problem.rounded(saved)
        return _judged(problem, stack, saved, options, damping)


def _judged(
    problem: LayerProblem, stack: Array, saved: Array, options: MethodOptions, damping: float
) -> Solved:
    """What was done, by the weights as they will be stored."""
    xp = array_namespace(stack)
    seen, held_out = problem.statistics.seen, problem.statistics.held_out
    after = to_stack(saved, problem.layout)
    gone = xp.astype(stack, xp.float64) - xp.astype(after, xp.float64)
    shift = None
    if options.bias_correction and problem.has_bias:
        shift = _outputs(xp.matmul(gone, seen.mean[..., None])[..., 0], problem.layout)
    before = xp.astype(stack, xp.float64)
    error = OutputError(
        calibration=_error(before, gone, shift, seen, problem.layout),
        held_out=None
        if held_out is None
        else _error(before, gone, shift, held_out, problem.layout),
    )
    magnitude = float(xp.sum(xp.abs(before)))
    return Solved(
        weight=saved,
        bias_change=shift,
        output_error=error,
        damping=damping,
        refit_steps=0,
        kept_magnitude=float(xp.sum(xp.abs(after))) / magnitude if magnitude else None,
    )


def _outputs(rows: Array, layout: Layout) -> Array:
    """(parts, rows) summed over the parts that make one output, as (outputs,)."""
    xp = array_namespace(rows)
    if layout.per_tap:
        rows = xp.sum(xp.reshape(rows, (-1, layout.taps, rows.shape[-1])), axis=1)
    return xp.reshape(rows, (-1,))


def _error(
    before: Array, gone: Array, shift: Array | None, inputs: Inputs, layout: Layout
) -> float:
    """||(W - W')X - shift||^2 / ||WX||^2; 0 where the layer gave nothing before."""
    xp = array_namespace(before)
    gram = xp.astype(inputs.mean_gram, xp.float64)
    whole = float(xp.sum(xp.matmul(before, gram) * before))
    lost = float(xp.sum(xp.matmul(gone, gram) * gone))
    if shift is not None:
        mean = _outputs(xp.matmul(gone, inputs.mean[..., None])[..., 0], layout)
        lost += float(xp.sum(shift * shift) - 2 * xp.sum(shift * mean))
    return max(0.0, lost) / whole if whole > 0 else 0.0
