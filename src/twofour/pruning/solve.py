"""A method applied to layers: new weights and bias changes, and the error that they leave.

The parts of a stack, and tiles of their rows, are solved side by side; work that depends on the
Gram matrix alone is done once for layers that share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from array_api_compat import array_namespace, is_numpy_array

from twofour.errors import BadInputError
from twofour.pruning.layer_problem import (
    AIM_SHARE,
    LayerProblem,
    ScaledGram,
    Stack,
    Trial,
    along_stored_axis,
    needs_no_pruning,
    pieces_of,
    scaled_gram,
    stack_of,
    stored_values,
    trial_of,
)
from twofour.pruning.matrices import from_stack, to_stack
from twofour.pruning.methods import Method, wanda
from twofour.pruning.methods.problem import DAMPING, Array, refit
from twofour.pruning.resources import one_blas_thread, side_by_side
from twofour.pruning.statistics import (
    Aim,
    Inputs,
    WeightRows,
    by_output,
    output_means,
    output_squares,
)
from twofour.records.options import MethodOptions
from twofour.records.weights import OutputError
from twofour.words import count

_SUMMED_ROWS = 128
"""Rows of a weight whose magnitudes are added up at a time."""
_SMALL = 1 << 14
"""Elements in all Gram matrices of a layer, below which one thread is the fastest."""
_LEAST_DAMPING = 1e-5
"""Small ones are for inputs of which a few are a thousand times as large as the rest, and make up
the mean."""
_CHOOSING_ROWS = 2
"""Held-out rows from which on they choose better than the formula does (benchmarks/LOG.md)."""
_BETWEEN = 3.0
"""The damping that is best among the powers of ten times and over this number is tried last."""
_TRIED_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedLayer:
    """A pruned weight, and what pruning did to the layer's output."""

    weight: Array
    """In the stored shape and type."""
    bias_change: Array | None
    """(outputs,), to be added to the bias; None: the layer has none."""
    output_error: OutputError
    """Includes the changed bias, where there is one."""
    damping: float | None
    """Share of the mean diagonal that was added; None: nothing depended on it."""
    refit_steps: int
    kept_magnitude: float | None
    by_magnitude: bool = False
    """Every calibration input of the layer was 0."""
    note: str | None = None


class LayerSolver:
    """A method with its options, for layers in turn; neighbours with equal inputs share work.

    The results have the same bits for any number of `threads` (None: the cores of this process).
    Raises BadInputError for options that no layer can be solved with.
    """

    def __init__(
        self, method: Method, options: MethodOptions, *, threads: int | None = None
    ) -> None:
        if (options.refit or 0) < 0:
            raise BadInputError(f"--refit {options.refit} is not a number of steps", hint="0: none")
        if options.damping is not None and not 0 <= options.damping < math.inf:
            raise BadInputError(
                f"--damping {options.damping} is not a share of the mean diagonal",
                hint="0.01 is usual; leave it out and it is chosen on held-out data",
            )
        self._method, self._options = method, options
        self._asked_threads = self._threads = threads
        self._steps = method.refit if options.refit is None else options.refit
        self._scaled: tuple[Inputs, ScaledGram] | None = None
        self._damping, self._share = DAMPING, AIM_SHARE
        self._raised: str | None = None
        self._prepared: list[Any] = []
        self._notes: list[str | None] = []

    def solve(self, layer: LayerProblem) -> SolvedLayer:
        """Solve one layer: its aim, the new weights piece by piece, and the error that they leave.

        Raises BadInputError for weights or statistics that are not finite, and PatternBrokenError
        where `keep` finds no mask.
        """
        if 0 in layer.layout.stack_shape:
            return self._result(layer, layer.stored, None)
        with one_blas_thread():
            held_out = self._tried(layer)
            scaled = self._scaled_gram(layer)
            aimed, unchanged, row = layer, True, 0
            drift = layer.statistics.seen.drift
            if drift is not None and self._share:
                aim = Aim(step=scaled.step, of_outputs=drift.of_outputs, share=self._share)
                aimed = replace(layer, aim=aim)
            new = array_namespace(layer.stored).empty_like(layer.stored)
            for piece in pieces_of(aimed):
                found, stop = self._new_weights(piece, scaled), row + piece.stored.shape[0]
                new[row:stop] = piece.stored if found is None else found
                unchanged, row = unchanged and found is None, stop
            if unchanged:
                return self._result(layer, layer.stored, None if held_out is None else 0.0)
            solved = self._result(aimed, new, held_out)
        used = self._steps or self._method.prepare is not None
        notes = [_few_rows(layer, self._damping) if used else None, self._raised, *self._notes]
        return replace(
            solved,
            damping=self._damping if used else None,
            refit_steps=self._steps,
            by_magnitude=scaled.unfed == layer.layout.stack_shape[0],
            note="; ".join(filter(None, dict.fromkeys(notes))) or None,
        )

    def _tried(self, layer: LayerProblem) -> float | None:
        """Choose the settings by the held-out inputs, and return the error there."""
        trial = trial_of(layer)
        if self._scaled is None or self._scaled[0] is not layer.statistics.seen:
            self._scaled, self._prepared = None, []
            self._damping = self._chosen_damping(layer, trial)
        if trial is None:
            return None
        if trial.share is not None:
            self._share = trial.share
        return self._lost(trial, self._damping)

    def _new_weights(self, layer: LayerProblem, scaled: ScaledGram) -> Array | None:
        """The values to store; None: the pattern holds already."""
        stack = stack_of(layer, scaled)
        self._notes = [_never_fired(stack)]
        if layer.unpruned is None and needs_no_pruning(stack, layer):
            return None
        stack = stack.with_aim(layer.aim)
        if not self._prepared:
            self._prepare(stack)
        # A stack (2, 300, inputs) on the CPU has the tiles (0, 0:128), (0, 128:256), (0, 256:384),
        # (1, 0:128), ...: one problem each, whose rows no other problem depends on.
        problems = [
            stack.problem(tile, self._damping, self._prepared[tile[0]] if self._prepared else None)
            for tile in stack.tiles
        ]
        pruned = stack.joined(side_by_side(self._method.solve, problems, threads=self._threads))
        if layer.layout.straddled:
            pruned = along_stored_axis(pruned * stack.scale, layer) / stack.scale
        if self._steps:
            starts = [
                (each, pruned[tile]) for each, tile in zip(problems, stack.tiles, strict=True)
            ]
            pruned = stack.joined(
                side_by_side(lambda each: refit(*each, self._steps), starts, threads=self._threads)
            )
        return stored_values(from_stack(pruned * stack.scale, layer.layout), layer)

    def _scaled_gram(self, layer: LayerProblem) -> ScaledGram:
        """The layer's Gram matrices, which neighbours and pieces with the same inputs share."""
        if self._scaled is None:
            seen = layer.statistics.seen
            self._scaled = seen, scaled_gram(seen, layer.stored)
            gram = self._scaled[1].gram
            # another device spreads its work itself
            small = not is_numpy_array(gram) or math.prod(gram.shape) < _SMALL
            self._threads = 1 if small else self._asked_threads
        return self._scaled[1]

    def _prepare(self, stack: Stack) -> None:
        """What the method prepares for new Gram matrices, with the damping that it needed."""
        prepare, wanted = self._method.prepare, self._damping
        if prepare is None:
            return
        problems = [
            stack.problem((part, slice(0, 0)), wanted) for part in range(stack.weight.shape[0])
        ]
        self._prepared = side_by_side(prepare, problems, threads=self._threads)
        self._damping = max(getattr(p, "damping", wanted) for p in self._prepared)
        self._raised = None
        if self._damping > wanted:
            self._raised = (
                f"with a damping of {wanted:g} the Gram matrix of the inputs cannot be factored: "
                f"{self._damping:g} was used"
            )

    def _chosen_damping(self, layer: LayerProblem, trial: Trial | None) -> float:
        """The damping with which the trial loses least on the held-out inputs.

        The best one depends on how well the inputs are known, much more than on the mask, and it
        is worth as much in the method as in the refit (benchmarks/LOG.md).
        """
        if self._options.damping is not None:
            return self._options.damping
        if not self._steps and self._method.prepare is None:
            return DAMPING
        if trial is None or trial.held_out.rows < _CHOOSING_ROWS:
            # the fewer rows there are to know the inputs by, the more damping
            rows, inputs = layer.statistics.seen.rows, layer.layout.stack_shape[2]
            return min(1.0, max(DAMPING, 0.03 * inputs / max(1, rows)))

        def lost(damping: float) -> float:
            return self._lost(trial, damping)

        losses: dict[float, float] = {}
        best, factors = DAMPING, [10.0, _BETWEEN]
        while factors:  # downhill by tens, then one step by less
            near = {float(f"{best * by:.1g}") for by in (1 / factors[0], 1, factors[0])}
            new = sorted(d for d in near - losses.keys() if _LEAST_DAMPING <= d <= 1)
            losses |= zip(new, side_by_side(lost, new, threads=self._threads), strict=True)
            before, best = best, min(losses, key=losses.__getitem__)
            if best == before or factors[0] == _BETWEEN:
                del factors[0]
        return best

    def _lost(self, trial: Trial, damping: float) -> float:
        """What the trial loses: with the method's mask, or Wanda's where that takes long."""
        quick, stack = self._method.prepare is None, trial.stack
        solve, steps = (self._method.solve, self._steps) if quick else (wanda.solve, _TRIED_STEPS)
        problems = [stack.problem(tile, damping) for tile in stack.tiles]
        return trial.lost(stack.joined(refit(each, solve(each), steps) for each in problems))

    def _result(self, layer: LayerProblem, saved: Array, held_out: float | None) -> SolvedLayer:
        """The bias change of the weights as they will be stored, and the error that they leave.

        ||(W - W')X - shift||^2 / ||WX||^2, 0 where the layer gave nothing before.
        """
        seen, layout = layer.statistics.seen, layer.layout
        before, after = to_stack(layer.dense, layout), to_stack(saved, layout)
        gone, change, shift = WeightRows(before, after, layer.aim), None, 0.0
        if layer.has_bias:
            # it makes up for the means: W mean(X_dense) + mean(R_dense) = V mean(X) + mean(R) + it
            shift = change = output_means(gone, seen.mean, layout)
            if seen.drift is not None:
                away = seen.drift.total / max(1, seen.rows)
                change = output_means(WeightRows(before, after), seen.mean, layout)
                if seen.drift.of_outputs:
                    change = change + by_output(away, layout)
                else:
                    change = change + output_means(WeightRows(before), away, layout)
        whole = output_squares(WeightRows(before, aim=layer.aim), 0.0, seen, layout)
        error = output_squares(gone, shift, seen, layout) / whole if whole else 0.0
        magnitude, kept = _magnitude(before), _magnitude(after)
        return SolvedLayer(
            weight=saved,
            bias_change=change,
            output_error=OutputError(calibration=error, held_out=held_out),
            damping=None,
            refit_steps=0,
            kept_magnitude=kept / magnitude if magnitude else None,
        )


def _magnitude(stack: Array) -> float:
    """Sum of |w|, some rows at a time."""
    xp = array_namespace(stack)
    tiles = (stack[:, row : row + _SUMMED_ROWS] for row in range(0, stack.shape[1], _SUMMED_ROWS))
    return float(sum(float(xp.sum(xp.abs(tile), dtype=xp.float64)) for tile in tiles))


def _few_rows(layer: LayerProblem, damping: float) -> str | None:
    """A note where the calibration inputs are too few to determine the weights."""
    layout, rows = layer.layout, layer.statistics.seen.rows
    inputs = layout.channels * (1 if layout.per_tap else layout.taps)
    if rows >= inputs:
        return None
    return (
        f"{count(rows, 'row')} of calibration inputs for {inputs} weights of each output: a "
        f"damping of {damping:g} keeps the weights near their old values; more samples help"
    )


def _never_fired(stack: Stack) -> str | None:
    """A note where some inputs are always 0."""
    parts = stack.weight.shape[0]
    if not stack.unfed:
        return None
    if stack.unfed == parts:
        return "every calibration input of the layer is 0: chosen by magnitude"
    return f"every calibration input of {stack.unfed} of {parts} parts is 0: chosen by magnitude"
