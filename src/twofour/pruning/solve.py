"""A method applied to layers: new weights and bias changes, and the error that they leave.

The parts of a stack, and tiles of their rows, are solved side by side; work that depends on the
Gram matrix alone is done once for layers that share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from array_api_compat import array_namespace, is_numpy_array

from twofour.errors import BadInputError
from twofour.pruning.layer_problem import (
    LayerProblem,
    ScaledGram,
    Stack,
    along_stored_axis,
    choose_aim,
    needs_no_pruning,
    pieces_of,
    scaled,
    scaled_gram,
    stack_of,
    stored_values,
)
from twofour.pruning.matrices import from_stack, to_stack
from twofour.pruning.methods import METHODS, Method, wanda
from twofour.pruning.methods.problem import DAMPING, Array, refit
from twofour.pruning.resources import one_blas_thread, side_by_side
from twofour.pruning.statistics import (
    Inputs,
    Statistics,
    WeightRows,
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
_CLEARLY = 0.95
"""Less than this share of a loss is worth a note."""
_ROUNDING = 1e-8
"""Share of the outputs' energy below which a loss is that of arithmetic."""
_TRIED_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedLayer:
    """A pruned weight, and what pruning did to the layer's output."""

    weight: Array
    """In the stored shape and type."""
    bias_change: Array | None
    """(outputs,), to be added to the bias; None: not asked for."""
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
        self._whole: tuple[Inputs, Array] | None = None
        self._gram: Array = None
        self._damping = DAMPING
        self._raised: str | None = None
        self._prepared: list[Any] = []
        self._notes: list[str | None] = []

    def solve(self, layer: LayerProblem) -> SolvedLayer:
        """Solve one layer: its aim, the new weights piece by piece, and the error that they leave.

        Raises BadInputError for weights or statistics that are not finite, and PatternBrokenError
        where `keep` finds no mask.
        """
        if 0 in layer.layout.stack_shape:
            return self._result(layer, layer.stored, layer.stored)
        with one_blas_thread():
            biased = self._options.bias_correction and layer.has_bias
            aimed = choose_aim(layer, self._scaled_gram(layer), biased=biased)
            pieces, unchanged, row = pieces_of(aimed), True, 0
            judged = new = array_namespace(layer.stored).empty_like(layer.stored)
            if self._refits_again(layer):
                new = array_namespace(new).empty_like(new)
            for piece in pieces:
                found, stop = self._new_weights(piece), row + piece.stored.shape[0]
                both = (piece.stored, piece.stored) if found is None else found
                judged[row:stop], new[row:stop] = both
                unchanged, row = unchanged and found is None, stop
            if unchanged:
                return self._result(layer, layer.stored, layer.stored)
            solved = self._result(aimed, judged, new)
        used = self._steps or self._method.prepare is not None
        notes = [_few_rows(layer, self._damping) if used else None, self._raised, *self._notes]
        return replace(
            solved,
            damping=self._damping if used else None,
            refit_steps=self._steps,
            by_magnitude=self._scaled_gram(layer).unfed == layer.layout.stack_shape[0],
            note="; ".join(filter(None, dict.fromkeys(notes))) or None,
        )

    def _new_weights(self, layer: LayerProblem) -> tuple[Array, Array] | None:
        """The values to judge by held-out inputs, and those to store, which are refitted to them.

        None: the pattern holds already.
        """
        stack = stack_of(layer, self._scaled_gram(layer))
        self._notes = []
        if layer.unpruned is None and needs_no_pruning(stack, layer):
            return None
        stack = stack.with_aim(layer.aim)
        if self._gram is None or not _equal(self._gram, stack.gram):
            self._prepare(layer.statistics, stack)
        # A stack (2, 300, inputs) on the CPU has the tiles (0, 0:128), (0, 128:256), (0, 256:384),
        # (1, 0:128), ...: one problem each, whose rows no other problem depends on.
        problems = [
            stack.problem(tile, self._damping, self._prepared[tile[0]] if self._prepared else None)
            for tile in stack.tiles
        ]
        pruned = stack.joined(side_by_side(self._method.solve, problems, threads=self._threads))
        if layer.layout.straddled:
            pruned = along_stored_axis(pruned * stack.scale, layer) / stack.scale
        pruned = self._refitted(stack, pruned)
        against = self._against_magnitude(stack, layer.statistics.held_out, pruned)
        self._notes = [_never_fired(stack), against]
        judged = stored_values(from_stack(pruned * stack.scale, layer.layout), layer)
        if not self._refits_again(layer):
            return judged, judged
        pruned = self._refitted(replace(stack, gram=self._whole_gram(layer)), pruned)
        return judged, stored_values(from_stack(pruned * stack.scale, layer.layout), layer)

    def _refits_again(self, layer: LayerProblem) -> bool:
        """Whether the refit is done once more, with the held-out inputs too."""
        return self._steps > 0 and layer.statistics.held_out is not None

    def _refitted(self, stack: Stack, pruned: Array) -> Array:
        """The values that the refit gives to the weights that stay."""
        if not self._steps:
            return pruned
        starts = [(stack.problem(tile, self._damping), pruned[tile]) for tile in stack.tiles]
        refitted = side_by_side(
            lambda each: refit(*each, self._steps), starts, threads=self._threads
        )
        return stack.joined(refitted)

    def _whole_gram(self, layer: LayerProblem) -> Array:
        """The scaled Gram matrices of all inputs, held-out ones too."""
        known, (seen, held_out) = self._whole, layer.statistics.every
        if known is None or known[0] is not seen or known[1].dtype != layer.stored.dtype:
            gram, _ = scaled(seen.gram + held_out.gram, layer.stored)
            known = self._whole = seen, gram
        return known[1]

    def _scaled_gram(self, layer: LayerProblem) -> ScaledGram:
        """The layer's Gram matrices, which neighbours and pieces with the same inputs share."""
        seen, known = layer.statistics.seen, self._scaled
        if known is None or known[0] is not seen or known[1].gram.dtype != layer.stored.dtype:
            known = self._scaled = seen, scaled_gram(seen, layer.stored)
        return known[1]

    def _prepare(self, statistics: Statistics, stack: Stack) -> None:
        """The damping and what the method prepares for new Gram matrices."""
        self._gram = gram = stack.gram
        # another device spreads its work itself
        small = not is_numpy_array(gram) or math.prod(gram.shape) < _SMALL
        self._threads = 1 if small else self._asked_threads
        prepare, asked = self._method.prepare, self._options.damping
        if asked is not None:
            self._damping = asked
        elif self._steps or prepare is not None:
            self._damping = self._chosen_damping(statistics, stack)
        if prepare is None:
            return
        wanted, parts = self._damping, range(stack.weight.shape[0])
        problems = [stack.problem((part, slice(0, 0)), wanted) for part in parts]
        self._prepared = side_by_side(prepare, problems, threads=self._threads)
        self._damping = max(getattr(p, "damping", wanted) for p in self._prepared)
        self._raised = None
        if self._damping > wanted:
            self._raised = (
                f"with a damping of {wanted:g} the Gram matrix of the inputs cannot be factored: "
                f"{self._damping:g} was used"
            )

    def _chosen_damping(self, statistics: Statistics, stack: Stack) -> float:
        """The damping with which Wanda's mask, refitted, loses least on the held-out inputs.

        Tried on some rows. The best one depends on how well the inputs are known, much more than
        on the mask, and it is worth as much in the method as in the refit (benchmarks/LOG.md).
        """
        held_out = statistics.held_out
        if held_out is None or held_out.rows < _CHOOSING_ROWS:
            # the fewer rows there are to know the inputs by, the more damping
            rows, inputs = statistics.seen.rows, int(stack.weight.shape[2])
            return min(1.0, max(DAMPING, 0.03 * inputs / max(1, rows)))
        pruned = [wanda.solve(stack.problem(tile, DAMPING)) for tile in stack.sample]

        def lost(damping: float) -> float:
            return _lost(
                stack,
                held_out,
                [
                    refit(stack.problem(tile, damping), start, _TRIED_STEPS)
                    for tile, start in zip(stack.sample, pruned, strict=True)
                ],
            )

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

    def _against_magnitude(self, stack: Stack, inputs: Inputs | None, pruned: Array) -> str | None:
        """A note where magnitude's mask would have done better with the same refit."""
        magnitude = METHODS["magnitude"]
        same = not self._steps or self._method is magnitude
        if same or inputs is None or inputs.rows < _CHOOSING_ROWS:
            return None
        problems = [stack.problem(tile, self._damping) for tile in stack.sample]
        plain = [refit(p, magnitude.solve(p), self._steps) for p in problems]
        theirs = _lost(stack, inputs, plain)
        ours = _lost(stack, inputs, [pruned[tile] for tile in stack.sample])
        whole = _lost(stack, inputs, [0 * rows for rows in plain])
        if ours <= _ROUNDING * whole or theirs >= _CLEARLY * ours:
            return None
        return (
            "--method magnitude, with the same refit, would lose less here: "
            f"{theirs / ours:.2f} of this error on held-out inputs"
        )

    def _result(self, layer: LayerProblem, judged: Array, saved: Array) -> SolvedLayer:
        """The bias change of the weights as they will be stored, and the errors of both.

        ||(W - W')X - shift||^2 / ||WX||^2, 0 where the layer gave nothing before. The held-out
        error is that of `judged`, which has not seen those inputs.
        """
        every, layout = layer.statistics.every, layer.layout
        before, after = to_stack(layer.dense, layout), to_stack(saved, layout)
        whole = output_squares(WeightRows(before, aim=layer.aim), 0.0, every, layout)
        change, lost = self._left(layer, after, every, every)
        held_out = None
        if every[1:]:
            unseen = self._left(layer, to_stack(judged, layout), every[:1], every[1:])[1]
            held_out = unseen / whole[1] if whole[1] else 0.0
        magnitude, kept = _magnitude(before), _magnitude(after)
        error = lost / sum(whole) if any(whole) else 0.0
        return SolvedLayer(
            weight=saved,
            bias_change=change,
            output_error=OutputError(calibration=error, held_out=held_out),
            damping=None,
            refit_steps=0,
            kept_magnitude=kept / magnitude if magnitude else None,
        )

    def _left(
        self, layer: LayerProblem, after: Array, known: Sequence[Inputs], inputs: Sequence[Inputs]
    ) -> tuple[Array | None, float]:
        """The bias change for the inputs that are known, and ||(W - W')X - shift||^2 on others.

        The bias makes up for the means: W mean(X_dense) = V mean(X) + its change.
        """
        layout, shift, change = layer.layout, None, None
        before = to_stack(layer.dense, layout)
        gone = WeightRows(before, after, layer.aim)
        if self._options.bias_correction and layer.has_bias:
            rows = max(1, sum(each.rows for each in known))
            mean = sum(each.total for each in known) / rows
            shift = change = output_means(gone, mean, layout)
            drifts = [each.drift.total for each in known if each.drift is not None]
            if drifts:
                change = output_means(WeightRows(before), mean + sum(drifts) / rows, layout)
                change = change - output_means(WeightRows(after), mean, layout)
        return change, sum(output_squares(gone, 0.0 if shift is None else shift, inputs, layout))


def _magnitude(stack: Array) -> float:
    """Sum of |w|, some rows at a time."""
    xp = array_namespace(stack)
    tiles = (stack[:, row : row + _SUMMED_ROWS] for row in range(0, stack.shape[1], _SUMMED_ROWS))
    return float(sum(float(xp.sum(xp.abs(tile), dtype=xp.float64)) for tile in tiles))


def _lost(stack: Stack, inputs: Inputs, rows: Sequence[Array]) -> float:
    """What the outputs of the sample's rows lose on these inputs."""
    xp = array_namespace(stack.weight)
    total = 0.0
    for tile, new in zip(stack.sample, rows, strict=True):
        gram = inputs.gram[tile[0]]  # float32 where it is wide: no copy of it in float64
        gone = xp.astype((stack.weight[tile] - new) * stack.scale[tile], gram.dtype, copy=False)
        total += float(xp.sum(xp.matmul(gone, gram) * gone, dtype=xp.float64))
    return total


def _equal(a: Array, b: Array) -> bool:
    xp = array_namespace(b)
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(xp.all(a == b)))


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
