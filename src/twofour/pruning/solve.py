"""A method applied to layers: new weights and bias changes, and the error that they leave.

The parts of a stack, and tiles of their rows, are solved side by side; work that depends on the
Gram matrix alone is done once for layers that share it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from array_api_compat import array_namespace, is_numpy_array

from twofour.errors import BadInputError
from twofour.pruning.layer_problem import (
    AIM_SHARE,
    LayerProblem,
    ScaledGram,
    Stack,
    Trial,
    needs_no_pruning,
    pieces_of,
    scaled_gram,
    stack_of,
    stored_values,
    trial_of,
)
from twofour.pruning.matrices import from_stack, to_stack
from twofour.pruning.methods import Method, wanda
from twofour.pruning.methods.problem import DAMPING, Array, Problem, refit
from twofour.pruning.resources import one_blas_thread, side_by_side
from twofour.pruning.statistics import (
    Aim,
    Inputs,
    WeightRows,
    by_output,
    output_means,
    output_squares,
)
from twofour.records import frozen
from twofour.records.options import MethodOptions
from twofour.records.weights import OutputError, Solution
from twofour.words import count

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


@frozen
class SolvedLayer(Solution):
    """A pruned weight, and what pruning did to the layer's output."""

    weight: Array
    """In the stored shape and type."""
    bias_change: Array | None
    """(outputs,), to be added to the bias; None: the layer has none."""
    output_error: OutputError
    """Includes the changed bias, where there is one."""
    by_magnitude: bool = False
    """Every calibration input of the layer was 0."""


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
        self._method = method
        self._options = options
        self._asked_threads = threads
        self._threads = threads
        self._steps = method.refit if options.refit is None else options.refit
        self._depends_on_damping = self._steps > 0 or method.prepare is not None
        self._inputs: Inputs | None = None
        """Inputs of the last layer, for which all below was found."""
        self._scaled: ScaledGram | None = None
        self._damping = DAMPING
        self._share = AIM_SHARE
        self._raised: str | None = None
        self._prepared: list[Any] = []

    def solve(self, layer: LayerProblem) -> SolvedLayer:
        """Solve one layer: its aim, the new weights piece by piece, and the error that they leave.

        Raises BadInputError for weights or statistics that are not finite, and PatternBrokenError
        where `keep` finds no mask.
        """
        if 0 in layer.layout.stack_shape:
            return _solved(layer, layer.stored, None)
        with one_blas_thread():
            held_out = self._tried(layer)
            scaled = self._scaled_gram(layer)
            aimed = self._aimed(layer, scaled)
            new = self._new_weights(aimed, scaled)
            if new is layer.stored:
                return _solved(layer, new, None if held_out is None else 0.0)
            solved = _solved(aimed, new, held_out)
        parts = layer.layout.stack_shape[0]
        notes = [_never_fired(scaled.unfed, parts)]
        damping = None
        if self._depends_on_damping:
            damping = self._damping
            notes = [_few_rows(layer, damping), self._raised, *notes]
        return replace(
            solved,
            damping=damping,
            refit_steps=self._steps,
            by_magnitude=scaled.unfed == parts,
            note="; ".join(filter(None, notes)) or None,
        )

    def _tried(self, layer: LayerProblem) -> float | None:
        """Choose the settings by the held-out inputs, and return the error there."""
        trial = trial_of(layer)
        if self._inputs is not layer.statistics.seen:
            self._inputs = layer.statistics.seen
            self._scaled = None
            self._prepared = []
            self._damping = self._chosen_damping(layer, trial)
        if trial is None:
            return None
        if trial.share is not None:
            self._share = trial.share
        return self._lost(trial, self._damping)

    def _aimed(self, layer: LayerProblem, scaled: ScaledGram) -> LayerProblem:
        """The layer, aimed at what it gives in the dense model."""
        drift = layer.statistics.seen.drift
        if drift is None or not self._share:
            return layer
        aim = Aim(step=scaled.step, of_outputs=drift.of_outputs, share=self._share)
        return replace(layer, aim=aim)

    def _new_weights(self, layer: LayerProblem, scaled: ScaledGram) -> Array:
        """The values to store; `layer.stored` itself where the pattern holds already."""
        new = array_namespace(layer.stored).empty_like(layer.stored)
        unchanged = True
        for rows, piece in pieces_of(layer):
            values = self._piece_weights(piece, scaled)
            unchanged = unchanged and values is piece.stored
            new[rows] = values
        return layer.stored if unchanged else new

    def _piece_weights(self, layer: LayerProblem, scaled: ScaledGram) -> Array:
        """The values to store of some rows; `layer.stored` itself as in `_new_weights`."""
        stack = stack_of(layer, scaled.gram)
        if layer.unpruned is None and needs_no_pruning(stack):
            return layer.stored
        stack = stack.with_aim(layer.aim)
        if not self._prepared:
            self._prepare(stack)

        def solved(problem: Problem) -> Array:
            return refit(problem, self._method.solve(problem), self._steps)

        # A stack (2, 300, inputs) on the CPU has the tiles (0, 0:128), (0, 128:256), (0, 256:384),
        # (1, 0:128), ...: one problem each, whose rows no other problem depends on.
        problems = []
        for part, rows in stack.tiles:
            prepared = self._prepared[part] if self._prepared else None
            problems.append(stack.problem((part, rows), self._damping, prepared))
        pruned = stack.joined(side_by_side(solved, problems, threads=self._threads))
        return stored_values(from_stack(pruned * stack.scale, layer.layout), layer)

    def _scaled_gram(self, layer: LayerProblem) -> ScaledGram:
        """The layer's Gram matrices, which neighbours and pieces with the same inputs share."""
        if self._scaled is None:
            self._scaled = scaled_gram(layer.statistics.seen, layer.stored)
            gram = self._scaled.gram
            # another device spreads its work itself
            small = not is_numpy_array(gram) or math.prod(gram.shape) < _SMALL
            self._threads = 1 if small else self._asked_threads
        return self._scaled

    def _prepare(self, stack: Stack) -> None:
        """What the method prepares for new Gram matrices, with the damping that it needed."""
        prepare = self._method.prepare
        wanted = self._damping
        self._raised = None
        if prepare is None:
            return
        no_rows = slice(0, 0)
        parts = range(stack.weight.shape[0])
        problems = [stack.problem((part, no_rows), wanted) for part in parts]
        self._prepared = side_by_side(prepare, problems, threads=self._threads)
        self._damping = max(each.damping for each in self._prepared)
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
        if not self._depends_on_damping:
            return DAMPING
        if trial is None or trial.held_out.rows < _CHOOSING_ROWS:
            # the fewer rows there are to know the inputs by, the more damping: 0.12 for 768 inputs
            # and 192 rows
            inputs = layer.layout.stack_shape[2]
            return min(1.0, max(DAMPING, 0.03 * inputs / max(1, layer.statistics.seen.rows)))
        return self._best_damping(trial)

    def _best_damping(self, trial: Trial) -> float:
        """The best damping by steps of ten downhill from the default, and one smaller step."""
        # 0.001, 0.01 and 0.1 are tried; where 0.1 is the best, 1; where it stays so, 0.03 and 0.3

        def lost(damping: float) -> float:
            return self._lost(trial, damping)

        losses: dict[float, float] = {}
        best = DAMPING
        factor = 10.0
        while True:
            near = {float(f"{each:.1g}") for each in (best / factor, best, best * factor)}
            new = sorted(d for d in near - losses.keys() if _LEAST_DAMPING <= d <= 1)
            losses.update(zip(new, side_by_side(lost, new, threads=self._threads), strict=True))
            before = best
            best = min(losses, key=losses.__getitem__)
            if factor == _BETWEEN:
                return best
            if best == before:
                factor = _BETWEEN

    def _lost(self, trial: Trial, damping: float) -> float:
        """What the trial loses: with the method's mask, or Wanda's where that takes long."""
        solve = self._method.solve
        steps = self._steps
        if self._method.prepare is not None:
            solve = wanda.solve
            steps = _TRIED_STEPS
        problems = [trial.stack.problem(tile, damping) for tile in trial.stack.tiles]
        return trial.lost(trial.stack.joined(refit(each, solve(each), steps) for each in problems))


def _solved(layer: LayerProblem, saved: Array, held_out: float | None) -> SolvedLayer:
    """The bias change of the weights as they will be stored, and the error that they leave.

    ||(W - W')X - shift||^2 / ||WX||^2, 0 where the layer gave nothing before.
    """
    seen = layer.statistics.seen
    layout = layer.layout
    before = to_stack(layer.dense, layout)
    after = to_stack(saved, layout)
    gone = WeightRows(before, after, layer.aim)
    shift: Array = 0.0
    change = None
    if layer.has_bias:
        shift = output_means(gone, seen.mean, layout)
        change = shift
        if seen.drift is not None:
            change = _bias_change(layer, before, after)
    whole = output_squares(WeightRows(before, aim=layer.aim), 0.0, seen, layout)
    error = 0.0
    if whole:
        error = output_squares(gone, shift, seen, layout) / whole
    return SolvedLayer(
        weight=saved,
        bias_change=change,
        bias_corrected=change is not None,
        output_error=OutputError(calibration=error, held_out=held_out),
    )


def _bias_change(layer: LayerProblem, before: Array, after: Array) -> Array:
    """What makes up for the means where the inputs are not those of the dense model."""
    # W mean(X_dense) + mean(R_dense) = V mean(X) + mean(R) + the change
    seen = layer.statistics.seen
    drift = seen.drift
    assert drift is not None
    away = drift.total / max(1, seen.rows)
    change = output_means(WeightRows(before, after), seen.mean, layer.layout)
    if drift.of_outputs:
        return change + by_output(away, layer.layout)
    return change + output_means(WeightRows(before), away, layer.layout)


def _few_rows(layer: LayerProblem, damping: float) -> str | None:
    """A note where the calibration inputs are too few to determine the weights."""
    layout = layer.layout
    rows = layer.statistics.seen.rows
    inputs = layout.channels
    if not layout.per_tap:
        inputs *= layout.taps
    if rows >= inputs:
        return None
    return (
        f"{count(rows, 'row')} of calibration inputs for {inputs} weights of each output: a "
        f"damping of {damping:g} keeps the weights near their old values; more samples help"
    )


def _never_fired(unfed: int, parts: int) -> str | None:
    """A note where some inputs are always 0."""
    if not unfed:
        return None
    if unfed == parts:
        return "every calibration input of the layer is 0: chosen by magnitude"
    return f"every calibration input of {unfed} of {parts} parts is 0: chosen by magnitude"
