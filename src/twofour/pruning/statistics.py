"""Statistics of a layer's calibration inputs, and the error of its output for a changed weight.

Gram matrices and means are summed in a fixed order. Where layers before this one are pruned
already, the statistics also say how far its inputs have drifted from those in the dense model, and
what is added to its outputs (the other branch of a residual block): `solve` aims at the sum there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array
from numpy.typing import NDArray

from twofour.pruning.matrices import Layout
from twofour.pruning.methods.problem import Array, cholesky, plus_diagonal
from twofour.pruning.resources import one_blas_thread, side_by_side

_WIDE = 4096
"""Inputs from which on the sums are float32: float64 would take 128 MiB and more."""
_COLUMNS = 512
"""Columns of a Gram matrix that one thread sums up at a time, on the diagonal and above it."""
_SUMMED_AT_ONCE = 1 << 21
"""Numbers in the rows that are summed up at a time: with few rows, adding a product to the sums
takes longer than the product."""


_AIM_DAMPING = 0.03
"""λ, as a share of the mean diagonal."""


@dataclass(slots=True, kw_only=True)
class Drift:
    """Sums over the same rows of a difference: d, the layer's input in the dense model, less x.

    With `of_outputs` it is W (d - x) + r: no other layer than W has these inputs, and r is what is
    added to its outputs in the dense model less what is added here.
    """

    cross: Array
    """(parts, inputs or outputs, inputs): the sum of the difference times xᵀ; None where `step` has
    replaced a wide one."""
    total: Array
    """(parts, inputs or outputs): the sum of the difference."""
    of_outputs: bool = False
    _step: Array = None

    def step(self, gram: Array) -> Array:
        """(C - G)(G + λI)⁻¹ in the type of G, the Gram matrices of x; a wide one replaces `cross`.

        With 5,632 inputs each of these matrices takes 127 MB, and numpy's `solve` holds ten of that
        size at once: it copies all it is given to float64.
        """
        if self._step is None:
            cross = array_namespace(gram).astype(self.cross, gram.dtype, copy=False)
            self._step = divided_by_gram(cross, gram)
            if self._step is self.cross:
                self.cross = None
        return self._step


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The weight that a layer is to come near: W + a [W (C - G) + E] (G + λI)⁻¹."""

    step: Array
    """(parts, inputs or outputs, inputs), of all layers with these inputs: no copy for each a."""
    of_outputs: bool
    """Whether the step has rows for outputs, as in `Drift`."""
    share: float
    """a, 0 to 1."""
    first: int = 0
    """The row of the step's outputs that is the first of the weight."""

    def change(self, rows: Array, part: int | slice, first: int = 0) -> Array:
        """What is added to rows of a weight, from `first` on."""
        first += self.first
        step = array_namespace(rows).astype(self.step[part], rows.dtype, copy=False)
        some = slice(first, first + rows.shape[-2])
        return self.share * drifted(rows, step, some if self.of_outputs else None)


def drifted(rows: Array, sums: Array, some: slice | None) -> Array:
    """Sums as in `Drift` for rows of a weight: W S, or `some` of those that are of outputs."""
    return array_namespace(rows).matmul(rows, sums) if some is None else sums[..., some, :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Sums over input rows of one layer."""

    gram: Array
    """(parts, inputs, inputs): the sum of x xᵀ."""
    total: Array
    """(parts, inputs): the sum of x."""
    rows: int
    """Input rows of each part."""
    drift: Drift | None = None
    """None: the inputs are those of the dense model."""

    @property
    def mean(self) -> Array:
        """The mean input; zeros where no row came."""
        return self.total / max(1, self.rows)

    def some(self, parts: slice) -> Inputs:
        """The sums of some of the parts."""
        drift = self.drift
        if drift is not None:
            cross = None if drift.cross is None else drift.cross[parts]
            drift = replace(drift, cross=cross, total=drift.total[parts], _step=None)
        return replace(self, gram=self.gram[parts], total=self.total[parts], drift=drift)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The inputs of one layer."""

    seen: Inputs
    """Those that the weights are solved with."""
    held_out: Inputs | None
    """Other ones, that choose the settings; None: too few samples to hold any out."""


class InputSums:
    """Adds up the input rows of one layer; users of a tied weight add to the same one."""

    def __init__(self, weight: Array | None = None) -> None:
        """`weight`: (parts, outputs, inputs), in the dense model, of the only layer that has these
        inputs: the sums are of how far its outputs are, which is less work for few outputs.
        """
        self._weight = weight
        self._seen: Inputs | None = None
        self._held_out: Inputs | None = None
        self._waiting: list[tuple[Array, NDArray[np.float64], Array | None]] = []

    def add(
        self,
        rows: Array,
        factors: NDArray[np.float64],
        dense: Array | None = None,
        added: Array | None = None,
    ) -> None:
        """Add rows of `matrix_rows` or `window_rows`, (parts, n, inputs).

        `factors` has the factor of each row's sample, as `SampleSplit` gives it. `dense` are the
        same rows in the dense model; None, or `rows` itself: no difference. `added`, (parts, n,
        outputs): what the dense model adds to the outputs of the one `weight`, less what this one
        does. Nobody may change the rows any more: they are summed up later.
        """
        away = None if dense is None or dense is rows else dense - rows
        if self._weight is not None:
            away = None if away is None else away @ _turned(self._weight)
            away = away if added is None else added if away is None else away + added
        self._waiting.append((rows, factors, away))
        if sum(math.prod(waiting[0].shape) for waiting in self._waiting) >= _SUMMED_AT_ONCE:
            self._sum()

    def _sum(self) -> None:
        """Add the products of the rows that wait."""
        every, marks, others = zip(*self._waiting, strict=True)
        self._waiting, xp = [], array_namespace(every[0])
        away, rows, factors = None, xp.concat(every, axis=1), np.concatenate(marks)
        if known := [each for each in others if each is not None]:
            nothing = xp.zeros_like(known[0][:, :1])
            found = (nothing if each is None else each for each in others)
            sizes = ((*x.shape[:2], nothing.shape[2]) for x in every)
            away = xp.concat(list(map(xp.broadcast_to, found, sizes)), axis=1)
        for some, name in ((factors > 0, "_seen"), (factors < 0, "_held_out")):
            if some.any():
                counted = (None if x is None else _counted(x, some, factors) for x in (rows, away))
                of_outputs = self._weight is not None
                setattr(self, name, _plus(getattr(self, name), *counted, of_outputs=of_outputs))

    def statistics(self) -> Statistics | None:
        """None: no input ever reached the layer, but for samples that are held out."""
        if self._waiting:
            self._sum()
        if self._seen is None:
            return None
        for inputs in filter(None, (self._seen, self._held_out)):
            _mirror(inputs.gram)
        return Statistics(seen=self._seen, held_out=self._held_out)


def _counted(rows: Array, some: NDArray[np.bool_], factors: NDArray[np.float64]) -> Array:
    """Some of the rows, times their factors."""
    xp, on = array_namespace(rows), device(rows)
    if not some.all():
        rows = xp.take(rows, xp.asarray(np.flatnonzero(some), device=on), axis=1)
    sizes = np.abs(factors[some])[:, None]
    return rows if (sizes == 1).all() else rows * xp.asarray(sizes, dtype=rows.dtype, device=on)


def _plus(before: Inputs | None, rows: Array, away: Array | None, *, of_outputs: bool) -> Inputs:
    """The sums with more rows; the matrices grow in place."""
    xp = array_namespace(rows)
    rows = xp.astype(rows, xp.float32) if rows.dtype != xp.float64 else rows
    parts, count, inputs = rows.shape
    wide = xp.float32 if inputs > _WIDE else xp.float64
    total = xp.sum(rows, axis=1, dtype=wide)

    def zeros(*shape: int) -> Array:
        return xp.zeros((parts, *shape), dtype=wide, device=device(rows))

    if before is None:
        before = Inputs(gram=zeros(inputs, inputs), total=zeros(inputs), rows=0)
    _add_products(before.gram, rows)
    drift = before.drift
    if away is not None:
        width, away = away.shape[2], xp.astype(away, rows.dtype, copy=False)
        if drift is None:
            drift = Drift(cross=zeros(width, inputs), total=zeros(width), of_outputs=of_outputs)
        _add_products(drift.cross, rows, away)
        drift = replace(drift, total=drift.total + xp.sum(away, axis=1, dtype=wide))
    return Inputs(
        gram=before.gram, total=before.total + total, rows=before.rows + count, drift=drift
    )


def _add_products(sums: Array, rows: Array, left: Array | None = None) -> None:
    """Add LᵀX of each part, L being X itself for None; the same bits for any number of threads.

    XᵀX is symmetric: on the CPU only blocks on the diagonal and above it are computed here, the
    others by `_mirror`.
    """
    xp = array_namespace(rows)
    other = rows if left is None else left
    if not is_numpy_array(rows):
        sums += xp.matmul(xp.matrix_transpose(other), rows)
        return

    # With 1,200 inputs the pieces of a part are the columns 0:512, 512:1024 and 1024:1200. Of XᵀX
    # the second one sums rows 0:1024 (its own block and the one above), of LᵀX all 1,200 rows.
    def add(piece: tuple[int, int]) -> None:
        part, first = piece
        some = slice(first, first + _COLUMNS)
        above = slice(0, some.stop if left is None else None)
        sums[part, above, some] += np.matmul(other[part, :, above].T, rows[part, :, some])

    pieces = [(p, i) for p in range(rows.shape[0]) for i in range(0, rows.shape[-1], _COLUMNS)]
    with one_blas_thread():
        side_by_side(add, pieces)


def _mirror(gram: Array) -> None:
    """Fill in the blocks below the diagonal."""
    if is_numpy_array(gram):
        for first in range(_COLUMNS, gram.shape[-1], _COLUMNS):
            some = slice(first, first + _COLUMNS)
            gram[:, some, :first] = np.swapaxes(gram[:, :first, some], 1, 2)


def mean_diagonal(gram: Array) -> Array:
    """Mean of the diagonal of each part, (parts, 1, 1)."""
    xp = array_namespace(gram)
    return xp.mean(xp.linalg.diagonal(gram), axis=1)[:, None, None]


def divided_by_gram(rows: Array, gram: Array) -> Array:
    """B (G + λI)⁻¹; a wide B is replaced, some columns at a time."""
    xp = array_namespace(rows)
    mean = mean_diagonal(gram)
    mean = xp.where(mean > 0, mean, xp.ones_like(mean))[:, :, 0]
    damping, width = _AIM_DAMPING, rows.shape[-1]
    if width <= _WIDE:
        return _divided(rows, plus_diagonal(gram, damping * mean))
    while (lower := _cholesky(plus_diagonal(gram, damping * mean))) is None:
        damping *= 10
    # With two blocks of columns, [Y1 Y2] Lᵀ = [B1 B2]: Y1 L11ᵀ = B1, then Y2 L22ᵀ = B2 - Y1 L21ᵀ.
    for start in range(0, width, _COLUMNS):
        here, before = slice(start, start + _COLUMNS), slice(0, start)
        rows[..., here] -= xp.matmul(rows[..., before], _turned(lower[..., here, before]))
        rows[..., here] = _divided(rows[..., here], _turned(lower[..., here, here]))
    # Then [X1 X2] L = [Y1 Y2], from the last block on: X2 L22 = Y2, then X1 L11 = Y1 - X2 L21.
    for start in reversed(range(0, width, _COLUMNS)):
        here, behind = slice(start, start + _COLUMNS), slice(start + _COLUMNS, width)
        rows[..., here] -= xp.matmul(rows[..., behind], lower[..., behind, here])
        rows[..., here] = _divided(rows[..., here], lower[..., here, here])
    return rows


def _cholesky(lower: Array) -> Array | None:
    """The lower triangle is replaced by the factor; None: not definite, by rounding."""
    xp = array_namespace(lower)
    for start in range(0, lower.shape[-1], _COLUMNS):
        here, before = slice(start, start + _COLUMNS), slice(0, start)
        behind = slice(start + _COLUMNS, None)
        turned = _turned(lower[..., here, before])
        lower[..., start:, here] -= xp.matmul(lower[..., start:, before], turned)
        factor = cholesky(lower[..., here, here])
        if factor is None:
            return None
        lower[..., here, here] = factor
        turned = _turned(lower[..., here, here])
        lower[..., behind, here] = _divided(lower[..., behind, here], turned)
    return lower


def _divided(rows: Array, square: Array) -> Array:
    """X with X S = rows."""
    xp = array_namespace(rows)
    return _turned(xp.linalg.solve(_turned(square), _turned(rows)))


def _turned(stack: Array) -> Array:
    return array_namespace(stack).matrix_transpose(stack)


def added(one: Statistics, other: Statistics) -> Statistics:
    """The statistics of two users of one array, added up."""
    held_out = one.held_out or other.held_out
    if one.held_out is not None and other.held_out is not None:
        held_out = _plus_inputs(one.held_out, other.held_out)
    return Statistics(seen=_plus_inputs(one.seen, other.seen), held_out=held_out)


def _plus_inputs(one: Inputs, other: Inputs) -> Inputs:
    """The sums over the rows of both users."""
    drift = one.drift or other.drift
    if one.drift is not None and other.drift is not None:
        drift = replace(
            one.drift,
            cross=one.drift.cross + other.drift.cross,
            total=one.drift.total + other.drift.total,
        )
    return Inputs(
        gram=one.gram + other.gram,
        total=one.total + other.total,
        rows=one.rows + other.rows,
        drift=drift,
    )


_AT_ONCE = 512
"""Rows of a weight that are worked on at a time: float64 copies stay small."""
_TRIANGLE = 256
"""Columns of WᵀW that are computed at a time."""


class WeightRows:
    """A stack (aimed, if there is an aim) less another one, some rows at a time."""

    def __init__(self, stack: Array, less: Array | None = None, aim: Aim | None = None) -> None:
        self.shape = stack.shape
        self._stack, self._less, self._aim = stack, less, aim

    def some(self, part: int, first: int) -> Array:
        """Some rows of a part, from `first` on."""
        some = slice(first, first + _AT_ONCE)
        found = self._stack[part, some]
        if self._aim is not None:
            found = found + self._aim.change(found, part, first)
        return found if self._less is None else found - self._less[part, some]


def output_means(weight: WeightRows, mean: Array, layout: Layout) -> Array:
    """(outputs,): the mean of each output for a mean input (parts, inputs), in float64.

    Biases do not count.
    """
    return by_output(_part_means(weight, mean), layout)


def output_squares(
    weight: WeightRows, shift: Array | float, inputs: Inputs, layout: Layout
) -> float:
    """||WX - shift||^2, summed over outputs and rows.

    In a convolution cut into taps, the deviations of different taps count as independent.
    """
    xp = array_namespace(inputs.gram)
    mean = _part_means(weight, inputs.mean)
    centre = xp.sum((by_output(mean, layout) - shift) ** 2) - xp.sum(mean * mean)
    return max(0.0, _power(weight, inputs.gram) + inputs.rows * float(centre))


def _power(weight: WeightRows, gram: Array) -> float:
    """tr(W G Wᵀ): the sum of the upper triangle of WᵀW times G, element by element."""
    xp, power = array_namespace(gram), 0.0
    parts, rows, inputs = weight.shape
    for part in range(parts):
        for row in range(0, rows, _AT_ONCE):
            # float32 where the Gram matrix is wide: no copy of it in float64
            some = xp.astype(weight.some(part, row), gram.dtype, copy=False)
            for first in range(0, inputs, _TRIANGLE):
                stop = min(first + _TRIANGLE, inputs)
                product = xp.matmul(xp.matrix_transpose(some[:, :stop]), some[:, first:stop])
                terms = product * gram[part, :stop, first:stop]
                power += 2 * float(xp.sum(terms[:first], dtype=xp.float64))
                power += float(xp.sum(terms[first:], dtype=xp.float64))
    return power


def _part_means(weight: WeightRows, mean: Array) -> Array:
    """(parts, rows)."""
    xp = array_namespace(mean)
    mean = xp.astype(mean, xp.float64)
    parts, rows, _ = weight.shape
    found = xp.zeros((parts, rows), dtype=xp.float64, device=device(mean))
    for part in range(parts):
        for row in range(0, rows, _AT_ONCE):
            some = xp.astype(weight.some(part, row), xp.float64, copy=False)
            found[part, row : row + _AT_ONCE] = xp.matmul(some, mean[part])
    return found


def by_output(rows: Array, layout: Layout) -> Array:
    """(parts, rows) summed over the parts that make one output, as (outputs,)."""
    xp = array_namespace(rows)
    if layout.per_tap:
        rows = xp.sum(xp.reshape(rows, (-1, layout.taps, rows.shape[-1])), axis=1)
    return xp.reshape(rows, (-1,))
