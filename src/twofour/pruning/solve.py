"""Layers: their weights and the statistics of their inputs through a method, and what that cost.

The parts of a stack, and tiles of their rows, are solved side by side; what depends on the Gram
matrix alone is worked out once for layers that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from array_api_compat import array_namespace, device, is_numpy_array

from twofour.errors import BadInputError
from twofour.pruning.matrices import Layout, from_stack, to_stack
from twofour.pruning.methods import Method
from twofour.pruning.methods.problem import DAMPING, Array, Problem
from twofour.pruning.methods.refit import refit
from twofour.pruning.statistics import Inputs, Statistics
from twofour.pruning.threads import one_blas_thread, side_by_side
from twofour.records.options import MethodOptions
from twofour.records.pruning import OutputError
from twofour.records.weights import Pattern

_TILE = 128
"""Rows that one thread solves at a time: their bits do not depend on the number of threads."""
_DEVICE_TILE = 8192
"""The same on another device, which spreads a product over its own cores: a bound on memory."""
_DAMPINGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Tried in the refit, where the user names none."""
_TRIED_ROWS = 64
"""Of each part: enough to choose among the dampings."""
_TRIED_PARTS = 8


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
    reference: Array | None = None
    """The dense weight whose outputs count, where `stored` has lost some already (`keep`)."""


_Tile = tuple[int, Any]
"""A part of a stack, and which of its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """A layer as the methods see it: rows of one scale, Gram matrices of mean diagonal 1."""

    weight: Array
    """(parts, rows, inputs): what counts."""
    pruned_before: Array | None
    scale: Array
    """(parts, rows, 1): powers of two, which the weights were divided by."""
    gram: Array
    """(parts, inputs, inputs); the identity for a part whose inputs never fired."""
    unfed: int
    """Parts whose inputs never fired."""
    pattern: Pattern

    def problem(self, tile: _Tile, damping: float, prepared: object = None) -> Problem:
        """Some rows of one part."""
        before = self.pruned_before
        return Problem(
            weight=self.weight[tile],
            gram=self.gram[tile[0]],
            pattern=self.pattern,
            damping=damping,
            pruned_before=None if before is None else before[tile],
            prepared=prepared,
        )

    @property
    def tiles(self) -> list[_Tile]:
        """All rows of all parts, in order."""
        parts, rows, _ = self.weight.shape
        size = _TILE if is_numpy_array(self.weight) else _DEVICE_TILE
        return [(p, slice(r, r + size)) for p in range(parts) for r in range(0, rows, size)]

    @property
    def sample(self) -> list[_Tile]:
        """Some rows of some parts, spread evenly."""
        parts, rows, _ = self.weight.shape
        every = slice(0, rows, -(-rows // _TRIED_ROWS))
        return [(p, every) for p in range(0, parts, -(-parts // _TRIED_PARTS))]


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
    """One method over some layers, with what it prepared for the last Gram matrix."""

    def __init__(self, method: Method, options: MethodOptions, threads: int | None) -> None:
        self._method, self._options, self._threads = method, options, threads
        self._gram: Array | None = None
        self._prepared: list[Any] = []

    def solve(self, layer: LayerProblem) -> Solved:
        """One layer: the method, the damping of the refit, the refit, and the judgement."""
        stack = _stack(layer)
        if layer.reference is None and _holds(stack):
            return self._judged(layer, layer.stored)
        options = self._options
        damping = DAMPING if options.damping is None else options.damping
        steps = self._method.refit if options.refit is None else options.refit
        self._prepare(stack, damping)
        pruned = self._of_tiles(stack, lambda tile: self._pruned(stack, tile, damping))
        if steps > 0:
            if options.damping is None:
                damping = self._chosen_damping(layer, stack, pruned, steps)
            pruned = self._of_tiles(
                stack, lambda tile: refit(stack.problem(tile, damping), pruned[tile], steps)
            )
        saved = from_stack(pruned * stack.scale, layer.layout)
        saved = saved if layer.rounded is None else layer.rounded(saved)
        solved = self._judged(layer, saved + 0.0)  # a small negative weight may round to -0.0
        return replace(
            solved,
            damping=damping if steps > 0 or self._method.prepare else None,
            refit_steps=max(0, steps),
            note=_note(layer, stack, damping),
        )

    def _prepare(self, stack: _Stack, damping: float) -> None:
        """Once for neighbours with the same Gram matrices."""
        prepare = self._method.prepare
        if prepare is None or (self._gram is not None and _same(self._gram, stack.gram)):
            return
        self._prepared = side_by_side(
            lambda part: prepare(stack.problem((part, slice(0, 0)), damping)),
            range(stack.weight.shape[0]),
            threads=self._threads,
        )
        self._gram = stack.gram

    def _pruned(self, stack: _Stack, tile: _Tile, damping: float) -> Array:
        prepared = self._prepared[tile[0]] if self._prepared else None
        return self._method.solve(stack.problem(tile, damping, prepared))

    def _of_tiles(self, stack: _Stack, solve: Callable[[_Tile], Array]) -> Array:
        """A stack of what each tile becomes."""
        xp = array_namespace(stack.weight)
        result = xp.empty_like(stack.weight)
        tiles = stack.tiles
        for tile, rows in zip(tiles, self._side_by_side(solve, tiles), strict=True):
            result[tile] = rows
        return result

    def _side_by_side(self, work: Callable[[Any], Any], pieces: Sequence[Any]) -> list[Any]:
        """In threads for numpy; another device has a queue of its own."""
        return side_by_side(work, pieces, threads=self._threads)

    def _chosen_damping(
        self, layer: LayerProblem, stack: _Stack, pruned: Array, steps: int
    ) -> float:
        """The one whose refit of some rows loses least on the held-out inputs."""
        held_out = layer.statistics.held_out
        if held_out is None:
            return DAMPING
        xp = array_namespace(stack.weight)
        gram = xp.astype(held_out.mean_gram, stack.weight.dtype)

        def lost(damping: float) -> float:
            total = 0.0
            for tile in stack.sample:
                new = refit(stack.problem(tile, damping), pruned[tile], steps)
                gone = (stack.weight[tile] - new) * stack.scale[tile]
                total += float(xp.sum(xp.matmul(gone, gram[tile[0]]) * gone, dtype=xp.float64))
            return total

        losses = self._side_by_side(lost, _DAMPINGS)
        return _DAMPINGS[losses.index(min(losses))]

    def _judged(self, layer: LayerProblem, saved: Array) -> Solved:
        """What was done, by the weights as they will be stored."""
        before = to_stack(
            layer.stored if layer.reference is None else layer.reference, layer.layout
        )
        xp = array_namespace(before)
        before = xp.astype(before, xp.float64)
        after = xp.astype(to_stack(saved, layer.layout), xp.float64)
        gone = before - after
        seen, held_out = layer.statistics.seen, layer.statistics.held_out
        shift = None
        if self._options.bias_correction and layer.has_bias:
            shift = _outputs(_mean_output(gone, seen), layer.layout)
        error = OutputError(
            calibration=_error(before, gone, shift, seen, layer.layout),
            held_out=None
            if held_out is None
            else _error(before, gone, shift, held_out, layer.layout),
        )
        magnitude = float(xp.sum(xp.abs(before)))
        return Solved(
            weight=saved,
            bias_change=shift,
            output_error=error,
            damping=None,
            refit_steps=0,
            kept_magnitude=float(xp.sum(xp.abs(after))) / magnitude if magnitude else None,
        )


def _stack(layer: LayerProblem) -> _Stack:
    """The layer, scaled; raises BadInputError where it or its statistics are not finite."""
    stored = to_stack(layer.stored, layer.layout)
    weight = stored if layer.reference is None else to_stack(layer.reference, layer.layout)
    xp = array_namespace(weight)
    gram = layer.statistics.seen.mean_gram
    diagonal = xp.linalg.diagonal(gram)
    mean = xp.mean(diagonal, axis=1)
    largest = xp.max(xp.abs(weight), axis=2, keepdims=True)
    if not bool(xp.all(xp.isfinite(largest))):
        raise BadInputError("the weight holds NaN or infinity")
    if not bool(xp.all(xp.isfinite(gram))):
        raise BadInputError(
            "the sums over the layer's calibration inputs are not finite",
            hint="an input holds NaN or infinity, or is too large to be squared: look for it in "
            "the calibration data, and in the model's own outputs before this layer",
        )
    fed = (mean > 0)[:, None, None]
    eye = xp.eye(gram.shape[-1], dtype=gram.dtype, device=device(gram))
    gram = xp.where(fed, gram / xp.where(fed, mean[:, None, None], xp.ones_like(eye)), eye)
    one = xp.ones_like(largest)
    scale = xp.where(largest > 0, 2 ** xp.floor(xp.log2(xp.where(largest > 0, largest, one))), one)
    return _Stack(
        weight=weight / scale,
        pruned_before=None if layer.reference is None else stored / scale,
        scale=scale,
        gram=xp.astype(gram, weight.dtype),
        unfed=int(xp.sum(mean <= 0, dtype=xp.int64)),
        pattern=layer.pattern,
    )


def _holds(stack: _Stack) -> bool:
    """Whether nothing has to go."""
    xp = array_namespace(stack.weight)
    groups = xp.reshape(stack.weight != 0, (-1, stack.pattern.m))
    return not bool(xp.any(xp.sum(groups, axis=-1, dtype=xp.int64) > stack.pattern.n))


def _same(a: Array, b: Array) -> bool:
    xp = array_namespace(b)
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(xp.all(a == b)))


def _note(layer: LayerProblem, stack: _Stack, damping: float) -> str | None:
    """What the user should know of the data."""
    notes = []
    rows, inputs = layer.statistics.seen.rows, layer.layout.taps * layer.layout.channels
    if layer.layout.per_tap:
        inputs = layer.layout.channels
    if rows < inputs:
        notes.append(
            f"{rows} calibration inputs for {inputs} weights of an output: what they leave open "
            f"is decided by the damping of {damping:g}; more samples would help"
        )
    if stack.unfed:
        parts = stack.weight.shape[0]
        which = (
            "no calibration input was"
            if stack.unfed == parts
            else (f"in {stack.unfed} of {parts} groups no calibration input was")
        )
        notes.append(f"{which} other than 0: chosen by magnitude")
    return "; ".join(notes) or None


def _mean_output(weight: Array, inputs: Inputs) -> Array:
    """(parts, rows)."""
    xp = array_namespace(weight)
    return xp.matmul(weight, xp.astype(inputs.mean, weight.dtype)[..., None])[..., 0]


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
    whole = _output_power(before, 0.0, inputs, layout)
    lost = _output_power(gone, 0.0 if shift is None else shift, inputs, layout)
    return max(0.0, lost) / whole if whole > 0 else 0.0


def _output_power(weight: Array, shift: Array | float, inputs: Inputs, layout: Layout) -> float:
    """Mean square of the outputs less `shift`, summed over the outputs.

    Of a convolution cut into taps, the deviations of different taps count as independent.
    """
    xp = array_namespace(weight)
    gram = xp.astype(inputs.mean_gram, weight.dtype)
    mean = _mean_output(weight, inputs)
    deviations = xp.sum(xp.matmul(weight, gram) * weight) - xp.sum(mean * mean)
    return float(deviations + xp.sum((_outputs(mean, layout) - shift) ** 2))
