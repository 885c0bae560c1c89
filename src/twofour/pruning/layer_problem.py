"""A layer as the methods see it: rows of one scale, Gram matrices of mean diagonal 1, in tiles.

Layers before it that are pruned already give it other inputs X than the dense model does, X_dense:
the layer makes up for that where it is aimed at

    W* = W + a [W (C - G) + E] (G + λI)⁻¹,  G = XᵀX, C = X_denseᵀX, E = (R_dense - R)ᵀX,

λ = 0.03 mean diag(G), 0 <= a <= 1, which for a = 1 and λ = 0 is the weight whose outputs on X come
with R nearest to W X_dense + R_dense. R is what is added to the outputs, such as the other branch
of a residual block; E = 0 where that is not known. Source: GPTAQ (arXiv 2504.02692), which calls it
asymmetric calibration and has it, without E, for quantisation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from array_api_compat import array_namespace, device, is_numpy_array

from twofour.errors import BadInputError
from twofour.pruning.matrices import Layout, to_stack
from twofour.pruning.methods.problem import Array, Problem
from twofour.pruning.statistics import (
    Aim,
    Drift,
    Inputs,
    Statistics,
    divided_by_gram,
    drifted,
    mean_diagonal,
)
from twofour.records import frozen
from twofour.records.weights import Pattern

_TILE = 128
"""Rows that one thread solves at a time: their bits do not depend on the number of threads."""
_DEVICE_TILE = 8192
"""Rows at a time on another device, which spreads a product over its own cores: saves memory."""
_TRIED_ROWS = 32
"""Rows of each part on which dampings are tried: enough to choose among them."""
_TRIED_PARTS = 8
_LARGEST_PIECE = 1 << 21
"""Weights of a layer that are solved at a time: the head of a language model has 65 million."""
AIM_SHARE = 0.5
"""a where no samples are held out to choose it on: few samples overfit the whole step."""


@frozen
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
    """Rounds to the type that the weight is stored in: errors are those of the saved weight."""
    unpruned: Array | None = None
    """The dense weight whose outputs count, where `stored` has lost some already (`keep`)."""
    aim: Aim | None = None
    """The change of the dense weight that makes up for changed inputs; None: no change."""

    @property
    def dense(self) -> Array:
        """The weight whose outputs count in the dense model."""
        if self.unpruned is None:
            return self.stored
        return self.unpruned


Tile = tuple[int, Any]
"""A part of a stack, and which of its rows."""


@frozen
class Stack:
    """A layer as the methods see it: rows of one scale, Gram matrices of mean diagonal 1."""

    weight: Array
    """(parts, rows, inputs): what counts."""
    pruned_before: Array | None
    scale: Array
    """(parts, rows, 1): powers of two, which the weights were divided by."""
    gram: Array
    """(parts, inputs, inputs); the identity for a part whose inputs never fired."""
    pattern: Pattern

    def problem(self, tile: Tile, damping: float, prepared: object = None) -> Problem:
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
    def tiles(self) -> list[Tile]:
        """All rows of all parts, in order."""
        parts, rows, _ = self.weight.shape
        size = _TILE if is_numpy_array(self.weight) else _DEVICE_TILE
        slices = [slice(row, row + size) for row in range(0, rows, size)]
        return list(itertools.product(range(parts), slices))

    def joined(self, rows: Iterable[Array]) -> Array:
        """A weight of new rows, which come tile by tile."""
        joined = array_namespace(self.weight).empty_like(self.weight)
        for tile, new in zip(self.tiles, rows, strict=True):
            joined[tile] = new
        return joined

    def with_aim(self, aim: Aim | None) -> Stack:
        """The stack with the weight that is aimed at."""
        if aim is None:
            return self
        change = aim.change(self.weight * self.scale, slice(None))
        return replace(self, weight=self.weight + change / self.scale)


@frozen
class ScaledGram:
    """Gram matrices with a mean diagonal of 1."""

    gram: Array
    """(parts, inputs, inputs); the identity for a part whose inputs never fired."""
    unfed: int
    """Parts whose inputs never fired."""
    step: Array | None
    """(parts, inputs or outputs, inputs): `Drift.cross` times (G + λI)⁻¹; None: the inputs are
    those of the dense model."""


def scaled_gram(inputs: Inputs, like: Array) -> ScaledGram:
    """The matrices in the type of `like`; raises BadInputError for sums that are not finite."""
    xp = array_namespace(inputs.gram)
    _refuse_infinite(inputs.gram)
    step = None
    if inputs.drift is not None:  # before the next wide matrix is made
        step = inputs.drift.step(xp.astype(inputs.gram, like.dtype, copy=False))
        _refuse_infinite(step)
    return _scaled(xp.asarray(inputs.gram, copy=True), step, like)


def _scaled(gram: Array, step: Array | None, like: Array) -> ScaledGram:
    """Gram matrices, changed in place, with a mean diagonal of 1."""
    xp = array_namespace(gram)
    mean = mean_diagonal(gram)
    fires = mean > 0
    gram /= xp.where(fires, mean, xp.ones_like(mean))
    unfed = 0
    for part in range(gram.shape[0]):
        if not bool(fires[part]):
            gram[part] = xp.eye(gram.shape[-1], dtype=gram.dtype, device=device(gram))
            unfed += 1
    return ScaledGram(gram=xp.astype(gram, like.dtype, copy=False), unfed=unfed, step=step)


def _refuse_infinite(sums: Array) -> None:
    xp = array_namespace(sums)
    if not bool(xp.all(xp.isfinite(sums))):
        raise BadInputError(
            "the sums over the layer's calibration inputs are not finite",
            hint="an input holds NaN or infinity, or is too large to be squared: look for it in "
            "the calibration data, and in the model's own outputs before this layer",
        )


@frozen
class Trial:
    """Some rows of a layer, to choose settings with."""

    stack: Stack
    share: float | None
    """The a whose outputs on held-out inputs are nearest to the dense ones; None: not known."""
    mean: Array | None
    """Mean input that the bias makes up for; None: it makes up for nothing."""
    held_out: Inputs

    def lost(self, pruned: Array) -> float:
        """The share of the outputs on held-out inputs that is lost with these rows."""
        whole = self._squares(self.stack.weight, None)
        if not whole:
            return 0.0
        return self._squares(self.stack.weight - pruned, self.mean) / whole

    def _squares(self, rows: Array, mean: Array | None) -> float:
        """||WX - W mean||^2."""
        xp = array_namespace(rows)
        inputs = self.held_out
        rows = xp.astype(rows * self.stack.scale, inputs.gram.dtype, copy=False)
        squares = float(xp.sum(xp.matmul(rows, inputs.gram) * rows, dtype=xp.float64))
        if mean is not None:
            outputs = xp.matmul(rows, inputs.mean[..., None])
            shift = xp.matmul(rows, mean[..., None])
            squares += inputs.rows * float(xp.sum((outputs - shift) ** 2 - outputs**2))
        return max(0.0, squares)


def trial_of(layer: LayerProblem) -> Trial | None:
    """What settings are tried on; None: no inputs are held out."""
    if layer.statistics.held_out is None:
        return None
    # 12 groups with 300 outputs each: parts 0, 2, ... 10 and of each the rows 0, 10, ... 290
    parts, outputs, _ = layer.layout.stack_shape
    some = slice(None, None, math.ceil(parts / _TRIED_PARTS))
    rows = slice(None, None, math.ceil(outputs / _TRIED_ROWS))
    seen = layer.statistics.seen.some(some)
    held_out = layer.statistics.held_out.some(some)
    gram = array_namespace(seen.gram).asarray(seen.gram, copy=True)
    _refuse_infinite(gram)
    trial = Trial(
        stack=stack_of(layer, gram, (some, rows)),
        share=AIM_SHARE,
        mean=seen.mean if layer.has_bias else None,
        held_out=held_out,
    )
    if seen.drift is not None and held_out.drift is not None:
        trial = _aimed(trial, seen.drift.cross, held_out.drift, rows)
    scaled = _scaled(gram, None, layer.stored)
    return replace(trial, stack=replace(trial.stack, gram=scaled.gram))


def _aimed(trial: Trial, cross: Array, drift: Drift, rows: slice) -> Trial:
    """The trial with the a for which |W X_dense + R_dense - W* X - R|² is least on held-out rows.

    `cross`: of the inputs that are seen; None where another layer with these inputs has replaced
    it. `rows`: those of the weight that are tried.
    """
    if cross is None:
        return replace(trial, share=None)
    stack = trial.stack
    xp = array_namespace(stack.gram)
    before = xp.astype(stack.weight * stack.scale, stack.gram.dtype, copy=False)
    some = rows if drift.of_outputs else None
    change = xp.asarray(drifted(before, cross, some), copy=True)  # a wide one is replaced
    change = divided_by_gram(change, stack.gram)
    away = drifted(before, drift.total[..., None], some)
    share = _best_share(trial, change, drifted(before, drift.cross, some), away)
    aimed = stack.weight + xp.astype(share * change, stack.weight.dtype) / stack.scale
    return replace(trial, share=share, stack=replace(stack, weight=aimed))


def _best_share(trial: Trial, change: Array, wanted: Array, away: Array) -> float:
    """The a, 0 to 1, for which the change times a is nearest to what is wanted on held-out rows.

    `wanted` (parts, rows, inputs) is the sum of the outputs' difference times xᵀ, `away`
    (parts, rows, 1) that of the difference.
    """
    # least squares in one unknown: a = <wanted, change> / <change G, change>
    xp = array_namespace(change)
    held_out = trial.held_out
    along = float(xp.sum(wanted * change))
    length = float(xp.sum(xp.matmul(change, held_out.gram) * change))
    if trial.mean is not None:
        mean = xp.matmul(change, held_out.mean[..., None])
        along -= float(xp.sum(away * mean))
        length -= float(xp.sum(mean * mean)) * held_out.rows
    if length <= 0:
        return 0.0
    return min(1.0, max(0.0, along / length))


def stack_of(layer: LayerProblem, gram: Array, some: tuple[slice, ...] = (slice(None),)) -> Stack:
    """Some of the layer, scaled, without its aim; raises BadInputError for weights not finite."""
    weight = to_stack(layer.dense, layer.layout)[some]
    xp = array_namespace(weight)
    largest = xp.max(xp.abs(weight), axis=2, keepdims=True)
    if not bool(xp.all(xp.isfinite(largest))):
        raise BadInputError("the weight holds NaN or infinity")
    one = xp.ones_like(largest)
    # rows whose largest weights are 0.3 and 5 are divided by 0.25 and 4: no bit is lost
    scale = xp.where(largest > 0, 2 ** xp.floor(xp.log2(xp.where(largest > 0, largest, one))), one)
    pruned_before = None
    if layer.unpruned is not None:
        pruned_before = to_stack(layer.stored, layer.layout)[some] / scale
    return Stack(
        weight=weight / scale,
        pruned_before=pruned_before,
        scale=scale,
        gram=gram,
        pattern=layer.pattern,
    )


def pieces_of(layer: LayerProblem) -> Iterator[tuple[slice, LayerProblem]]:
    """All rows and the layer, or some rows in turn where there are very many.

    Each piece takes copies of itself. Rows do not depend on each other; only a plain matrix of
    (outputs, inputs) is taken apart.
    """
    # the head of a language model, (32000, 2048): pieces of 1,024 rows, the last one of 256
    layout = layer.layout
    most = max(1, _LARGEST_PIECE // layout.shape[-1])
    if len(layout.shape) != 2 or layout.axis != 1 or layout.shape[0] <= most:
        yield slice(None), layer
        return
    for first in range(0, layout.shape[0], most):
        some = slice(first, first + most)
        stored = layer.stored[some]
        piece = replace(layer, stored=stored, layout=replace(layout, shape=tuple(stored.shape)))
        if layer.unpruned is not None:
            piece = replace(piece, unpruned=layer.unpruned[some])
        if layer.aim is not None and layer.aim.of_outputs:
            piece = replace(piece, aim=replace(layer.aim, step=layer.aim.step[:, some]))
        yield some, piece


def needs_no_pruning(stack: Stack) -> bool:
    """Whether the pattern holds already."""
    xp = array_namespace(stack.weight)
    groups = xp.reshape(stack.weight != 0, (-1, stack.pattern.m))
    return not bool(xp.any(xp.sum(groups, axis=-1, dtype=xp.int64) > stack.pattern.n))


def stored_values(weight: Array, layer: LayerProblem) -> Array:
    """The values that the layer's type can hold, without -0.0.

    One that grew out of the type's range takes its old value, which did not.
    """
    if layer.rounded is None:
        return weight + 0.0
    xp = array_namespace(weight)
    rounded = layer.rounded(weight)
    return xp.where(xp.isfinite(rounded), rounded, layer.stored) + 0.0
