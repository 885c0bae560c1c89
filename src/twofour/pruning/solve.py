"""Layers: their weights and the statistics of their inputs through a method, and what that cost.

The parts of a stack, and tiles of their rows, are solved side by side; what depends on the Gram
matrix alone is worked out once for layers that share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from array_api_compat import array_namespace, is_numpy_array

from twofour.errors import BadInputError
from twofour.pruning.layer_problem import (
    LayerProblem,
    ScaledGram,
    Stack,
    Tile,
    aimed,
    along_stored_axis,
    holds,
    pieces_of,
    scaled_gram,
    stack_of,
    stored_values,
)
from twofour.pruning.matrices import from_stack, to_stack
from twofour.pruning.methods import METHODS, Method, wanda
from twofour.pruning.methods.problem import DAMPING, Array
from twofour.pruning.methods.refit import refit
from twofour.pruning.statistics import Inputs, Rows, Statistics, output_error, output_means
from twofour.pruning.threads import R, one_blas_thread, side_by_side
from twofour.records.options import MethodOptions
from twofour.records.weights import OutputError
from twofour.words import count

_SUMMED_ROWS = 128
"""Of weights at a time."""
_SMALL = 1 << 14
"""Places in all Gram matrices of a layer, below which one thread is the fastest."""
_DAMPINGS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Tried where the user names none and samples are held out; the small ones are for inputs of which
a few are a thousand times as large as the rest, and make up the mean."""
_BETWEEN = 3.0
"""Of the neighbours of the best one that are tried after them, so many times more and less."""
_CLEARLY = 0.95
"""Less than this share of a loss is worth a word."""
_ROUNDING = 1e-8
"""Share of the outputs' energy below which a loss is that of arithmetic."""
_TRIED_STEPS = 10


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
    """Share of the mean diagonal that was added; None: nothing depended on it."""
    refit_steps: int
    kept_magnitude: float | None
    note: str | None = None


def solve_layer(
    problem: LayerProblem, method: Method, options: MethodOptions, *, threads: int | None = None
) -> Solved:
    """Prune one stored weight by a method that has data.

    The result has the same bits for any number of `threads` (None: the cores of this process).
    Raises BadInputError for weights or statistics that are not finite, and PatternBrokenError
    where `keep` finds no mask.
    """
    return solve_layers([problem], method, options, threads=threads)[0]


def solve_layers(
    problems: Sequence[LayerProblem],
    method: Method,
    options: MethodOptions,
    *,
    threads: int | None = None,
) -> list[Solved]:
    """Prune layers in turn; neighbours with equal Gram matrices share the work on them."""
    run = _Run(method, options, threads)
    with one_blas_thread():
        return [run.solve(problem) for problem in problems]


class _Run:
    """One method over some layers, with what was worked out for the last Gram matrices."""

    def __init__(self, method: Method, options: MethodOptions, threads: int | None) -> None:
        if (options.refit or 0) < 0:
            raise BadInputError(f"--refit {options.refit} is not a number of steps", hint="0: none")
        if options.damping is not None and not 0 <= options.damping < math.inf:
            raise BadInputError(
                f"--damping {options.damping} is not a share of the mean diagonal",
                hint="0.01 is usual; leave it out and it is chosen on held-out data",
            )
        self._method, self._options, self._threads = method, options, threads
        self._steps = method.refit if options.refit is None else options.refit
        self._scaled: tuple[Inputs, ScaledGram] | None = None
        self._gram: Array = None
        self._damping = DAMPING
        self._raised: str | None = None
        self._prepared: list[Any] = []
        self._notes: list[str | None] = []

    def solve(self, layer: LayerProblem) -> Solved:
        """One layer: what its inputs tell, the method, the refit, the judgement."""
        if 0 in layer.layout.stack_shape:
            return self._judged(layer, layer.stored)
        goal = aimed(layer, self._scaled_gram(layer), biased=self._corrects(layer))
        new = self._new_weights(pieces_of(goal), layer.stored)
        if new is None:
            return self._judged(layer, layer.stored)
        solved = self._judged(goal, new)
        used = self._steps or self._method.prepare is not None
        notes = [_few_rows(layer, self._damping) if used else None, self._raised, *self._notes]
        return replace(
            solved,
            damping=self._damping if used else None,
            refit_steps=self._steps,
            note="; ".join(filter(None, dict.fromkeys(notes))) or None,
        )

    def _new_weights(self, pieces: Sequence[LayerProblem], stored: Array) -> Array | None:
        """Of all pieces together; None: the pattern holds in each already."""
        if len(pieces) == 1:
            return self._new_weight(pieces[0])
        result, held, row = array_namespace(stored).empty_like(stored), True, 0
        for piece in pieces:
            new = self._new_weight(piece)
            held = held and new is None
            rows = piece.stored.shape[0]
            result[row : row + rows] = piece.stored if new is None else new
            row += rows
        return None if held else result

    def _new_weight(self, layer: LayerProblem) -> Array | None:
        """What is to be stored; None: the pattern holds already."""
        stack = stack_of(layer, self._scaled_gram(layer))
        self._notes = []
        if layer.reference is None and holds(stack, layer):
            return None
        stack = stack.aimed(layer.aim)
        if self._gram is None or not _same(self._gram, stack.gram):
            self._study(layer.statistics, stack)
        pruned = self._of_tiles(stack, lambda tile: self._pruned(stack, tile))
        if layer.layout.straddled:
            pruned = along_stored_axis(pruned * stack.scale, layer) / stack.scale
        if self._steps:
            pruned = self._of_tiles(
                stack,
                lambda tile: refit(stack.problem(tile, self._damping), pruned[tile], self._steps),
            )
        against = self._against_magnitude(stack, layer.statistics.held_out, pruned)
        self._notes = [_unfed(stack), against]
        return stored_values(from_stack(pruned * stack.scale, layer.layout), layer)

    def _scaled_gram(self, layer: LayerProblem) -> ScaledGram:
        """Of the layer's inputs: neighbours and pieces with the same statistics share it."""
        seen, known = layer.statistics.seen, self._scaled
        if known is None or known[0] is not seen or known[1].gram.dtype != layer.stored.dtype:
            known = self._scaled = seen, scaled_gram(seen, layer.stored)
        return known[1]

    def _study(self, statistics: Statistics, stack: Stack) -> None:
        """The damping, and what the method prepares: neighbours with the same inputs share both."""
        self._gram = stack.gram
        prepare, asked = self._method.prepare, self._options.damping
        if asked is not None:
            self._damping = asked
        elif self._steps or prepare is not None:
            self._damping = self._chosen_damping(statistics, stack)
        if prepare is None:
            return
        self._prepared = self._side_by_side(
            lambda part: prepare(stack.problem((part, slice(0, 0)), self._damping)),
            range(stack.weight.shape[0]),
        )
        wanted = self._damping
        self._damping = max(getattr(p, "damping", wanted) for p in self._prepared)
        self._raised = None
        if self._damping > wanted:
            self._raised = (
                f"with a damping of {wanted:g} the Gram matrix of the inputs cannot be factored: "
                f"{self._damping:g} was taken"
            )

    def _chosen_damping(self, statistics: Statistics, stack: Stack) -> float:
        """The one with which Wanda's mask, refitted, loses least on the held-out inputs.

        Tried on some rows. The best one hangs on how well the inputs are known, much more than on
        the mask, and it is worth as much in the method as in the refit (benchmarks/LOG.md).
        """
        held_out = statistics.held_out
        if held_out is None:
            return _damping_for(statistics.seen.rows, stack.weight.shape[2])
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

        losses = dict(zip(_DAMPINGS, self._side_by_side(lost, _DAMPINGS), strict=True))
        best = min(losses, key=losses.__getitem__)
        near = [best / _BETWEEN, best * _BETWEEN] if best < _DAMPINGS[-1] else [best / _BETWEEN]
        losses |= zip(near, self._side_by_side(lost, near), strict=True)
        return float(f"{min(losses, key=losses.__getitem__):.1g}")

    def _against_magnitude(self, stack: Stack, inputs: Inputs | None, pruned: Array) -> str | None:
        """Says so where magnitude's mask would have done better with the same refit."""
        magnitude = METHODS["magnitude"]
        if inputs is None or not self._steps or self._method is magnitude:
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

    def _pruned(self, stack: Stack, tile: Tile) -> Array:
        prepared = self._prepared[tile[0]] if self._prepared else None
        return self._method.solve(stack.problem(tile, self._damping, prepared))

    def _of_tiles(self, stack: Stack, solve: Callable[[Tile], Array]) -> Array:
        """A stack of what each tile becomes."""
        result = array_namespace(stack.weight).empty_like(stack.weight)

        def fill(tile: Tile) -> None:
            result[tile] = solve(tile)

        self._side_by_side(fill, stack.tiles)
        return result

    def _side_by_side(self, work: Callable[[Any], R], pieces: Sequence[Any]) -> list[R]:
        """In threads for numpy, where it is worth it; another device spreads its work itself."""
        threads = self._threads
        if not is_numpy_array(self._gram) or math.prod(self._gram.shape) < _SMALL:
            threads = 1
        return side_by_side(work, pieces, threads=threads)

    def _corrects(self, layer: LayerProblem) -> bool:
        return self._options.bias_correction and layer.has_bias

    def _judged(self, layer: LayerProblem, saved: Array) -> Solved:
        """What was done, by the weights as they will be stored.

        The bias makes up for the means: W mean(X_dense) = V mean(X) + its change.
        """
        layout, seen = layer.layout, layer.statistics.seen
        before, after = to_stack(layer.dense, layout), to_stack(saved, layout)
        gone = Rows(before, after, layer.aim)
        shift = change = None
        if self._corrects(layer):
            shift = change = output_means(gone, seen.mean, layout)
            if seen.drift is not None:
                mean = seen.mean + seen.drift.total / max(1, seen.rows)
                change = output_means(Rows(before), mean, layout)
                change = change - output_means(Rows(after), seen.mean, layout)
        whole = Rows(before, aim=layer.aim)
        magnitude, kept = _magnitude(before), _magnitude(after)
        return Solved(
            weight=saved,
            bias_change=change,
            output_error=output_error(whole, gone, shift, layer.statistics, layout),
            damping=None,
            refit_steps=0,
            kept_magnitude=kept / magnitude if magnitude else None,
        )


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


def _damping_for(rows: int, inputs: int) -> float:
    """Where nothing is held out: the more, the fewer rows there are to know the inputs by."""
    return min(0.3, max(DAMPING, 0.3 * inputs / max(1, rows)))


def _same(a: Array, b: Array) -> bool:
    xp = array_namespace(b)
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(xp.all(a == b)))


def _few_rows(layer: LayerProblem, damping: float) -> str | None:
    """Says so where the inputs are known too little to determine the weights."""
    layout, rows = layer.layout, layer.statistics.seen.rows
    inputs = layout.channels * (1 if layout.per_tap else layout.taps)
    if rows >= inputs:
        return None
    return (
        f"{count(rows, 'row')} of calibration inputs for {inputs} weights of each output: what "
        f"they leave open is held at the old weights by a damping of {damping:g}; more samples help"
    )


def _unfed(stack: Stack) -> str | None:
    """Says so where nothing is known of some inputs."""
    parts = stack.weight.shape[0]
    if not stack.unfed:
        return None
    if stack.unfed == parts:
        return "every calibration input of the layer is 0: chosen by magnitude"
    return f"every calibration input of {stack.unfed} of {parts} parts is 0: chosen by magnitude"
