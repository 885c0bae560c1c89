"""Statistics of a layer's calibration inputs, and the error of its output for a changed weight.

Gram matrices and means are summed in a fixed order. Where layers before this one are pruned
already, the statistics also say how far its inputs have drifted from those in the dense model, and
what is added to its outputs (the other branch of a residual block): `solve` aims at the sum there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from twofour.pruning.matrices import Layout
from twofour.pruning.methods.problem import Array, cholesky, plus_diagonal
from twofour.pruning.resources import one_blas_thread, side_by_side
from twofour.records import frozen

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


@frozen
class Aim:
    """The weight that a layer is to come near: W + a [W (C - G) + E] (G + λI)⁻¹."""

    step: Array
    """(parts, inputs or outputs, inputs), of all layers with these inputs: no copy for each a."""
    of_outputs: bool
    """Whether the step has rows for outputs, as in `Drift`."""
    share: float
    """a, 0 to 1."""

    def change(self, rows: Array, part: int | slice, first: int = 0) -> Array:
        """What is added to rows of a weight, from `first` on."""
        step = array_namespace(rows).astype(self.step[part], rows.dtype, copy=False)
        some = None
        if self.of_outputs:
            some = slice(first, first + rows.shape[-2])
        return self.share * drifted(rows, step, some)


def drifted(rows: Array, sums: Array, some: slice | None) -> Array:
    """Sums as in `Drift` for rows of a weight: W S, or `some` of those that are of outputs."""
    if some is None:
        return array_namespace(rows).matmul(rows, sums)
    return sums[..., some, :]


@frozen
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
        some = replace(self, gram=self.gram[parts], total=self.total[parts])
        drift = self.drift
        if drift is None:
            return some
        cross = drift.cross
        if cross is not None:
            cross = cross[parts]
        own = Drift(cross=cross, total=drift.total[parts], of_outputs=drift.of_outputs)
        return replace(some, drift=own)


@frozen
class Statistics:
    """The inputs of one layer."""

    seen: Inputs
    """Those that the weights are solved with."""
    held_out: Inputs | None
    """Other ones, that choose the settings; None: too few samples to hold any out."""


@frozen
class _Rows:
    """Input rows that are not summed up yet."""

    x: Array
    """(parts, n, inputs)."""
    factors: NDArray[np.float64]
    """(n,)."""
    away: Array | None
    """(parts, n, inputs or outputs): the difference of `Drift`; None: there is none."""


class InputSums:
    """Adds up the input rows of one layer."""

    def __init__(self, weight: Array | None = None) -> None:
        """`weight`: (parts, outputs, inputs), in the dense model, of the only layer that has these
        inputs: the sums are of how far its outputs are, which is less work for few outputs.
        """
        self._weight = weight
        self._seen: Inputs | None = None
        self._held_out: Inputs | None = None
        self._waiting: list[_Rows] = []

    def add(
        self,
        rows: Array,
        factors: NDArray[np.float64],
        dense: Array | None = None,
        added: Array | None = None,
    ) -> None:
        """Add rows of `matrix_rows` or `window_rows`, (parts, n, inputs), float32 or float64.

        `factors` has the factor of each row's sample, as `SampleSplit` gives it. `dense` are the
        same rows in the dense model; None, or `rows` itself: no difference. `added`, (parts, n,
        outputs): what the dense model adds to the outputs of the one `weight`, less what this one
        does. Nobody may change the rows any more: they are summed up later.
        """
        away = None
        if dense is not None and dense is not rows:
            away = dense - rows
        if self._weight is not None:
            if away is not None:
                away = away @ _turned(self._weight)
            if added is not None:
                away = added if away is None else away + added
        self._waiting.append(_Rows(x=rows, factors=factors, away=away))
        if sum(each.x.size for each in self._waiting) >= _SUMMED_AT_ONCE:
            self._sum()

    def statistics(self) -> Statistics | None:
        """None: no input ever reached the layer, but for samples that are held out."""
        if self._waiting:
            self._sum()
        if self._seen is None:
            return None
        for inputs in (self._seen, self._held_out):
            if inputs is not None:
                _mirror(inputs.gram)
        return Statistics(seen=self._seen, held_out=self._held_out)

    def _sum(self) -> None:
        """Add the products of the rows that wait."""
        rows = _joined(self._waiting)
        self._waiting = []
        self._seen = self._plus(self._seen, rows, rows.factors > 0)
        self._held_out = self._plus(self._held_out, rows, rows.factors < 0)

    def _plus(self, before: Inputs | None, rows: _Rows, some: NDArray[np.bool_]) -> Inputs | None:
        """The sums with some more rows; the matrices grow in place."""
        if not some.any():
            return before
        x = _counted(rows.x, some, rows.factors)
        away = None
        if rows.away is not None:
            away = _counted(rows.away, some, rows.factors)
        if before is None:
            inputs = x.shape[2]
            before = Inputs(gram=_zeros(x, inputs, inputs), total=_zeros(x, inputs), rows=0)
        _add_products(before.gram, x)
        return Inputs(
            gram=before.gram,
            total=before.total + np.sum(x, axis=1, dtype=before.total.dtype),
            rows=before.rows + x.shape[1],
            drift=self._plus_drift(before.drift, x, away),
        )

    def _plus_drift(self, before: Drift | None, x: Array, away: Array | None) -> Drift | None:
        """The sums of the difference with more rows."""
        if away is None:
            return before
        if before is None:
            width = away.shape[2]
            before = Drift(
                cross=_zeros(x, width, x.shape[2]),
                total=_zeros(x, width),
                of_outputs=self._weight is not None,
            )
        _add_products(before.cross, x, away)
        total = before.total + np.sum(away, axis=1, dtype=before.total.dtype)
        return replace(before, total=total)


def _zeros(x: Array, *shape: int) -> Array:
    """Zeros of (parts, *shape) for sums over rows of `x`."""
    wide = np.float32 if x.shape[2] > _WIDE else np.float64
    return np.zeros((x.shape[0], *shape), wide)


def _joined(waiting: Sequence[_Rows]) -> _Rows:
    """All rows in one; a difference of 0 for those that have none."""
    x = np.concatenate([rows.x for rows in waiting], axis=1)
    factors = np.concatenate([rows.factors for rows in waiting])
    known = [rows.away for rows in waiting if rows.away is not None]
    if not known:
        return _Rows(x=x, factors=factors, away=None)
    every = []
    for rows in waiting:
        away = rows.away
        if away is None:
            away = np.zeros((*rows.x.shape[:2], known[0].shape[2]), known[0].dtype)
        every.append(away)
    return _Rows(x=x, factors=factors, away=np.concatenate(every, axis=1))


def _counted(rows: Array, some: NDArray[np.bool_], factors: NDArray[np.float64]) -> Array:
    """Some of the rows, times their factors."""
    sizes = np.abs(factors[some])[:, None]
    if not some.all():
        rows = rows[:, some]
    if (sizes == 1).all():
        return rows
    return rows * sizes.astype(rows.dtype)


def _add_products(sums: Array, rows: Array, left: Array | None = None) -> None:
    """Add LᵀX of each part, L being X itself for None; the same bits for any number of threads.

    XᵀX is symmetric: only blocks on the diagonal and above it are computed here, the others by
    `_mirror`.
    """
    other = rows if left is None else left

    # With 1,200 inputs the pieces of a part are the columns 0:512, 512:1024 and 1024:1200. Of XᵀX
    # the second one sums rows 0:1024 (its own block and the one above), of LᵀX all 1,200 rows.
    def add(piece: tuple[int, int]) -> None:
        part, first = piece
        some = slice(first, first + _COLUMNS)
        above = slice(0, some.stop if left is None else None)
        sums[part, above, some] += np.matmul(other[part, :, above].T, rows[part, :, some])

    pieces = itertools.product(range(rows.shape[0]), range(0, rows.shape[2], _COLUMNS))
    with one_blas_thread():
        side_by_side(add, list(pieces))


def _mirror(gram: Array) -> None:
    """Fill in the blocks below the diagonal."""
    for first in range(_COLUMNS, gram.shape[2], _COLUMNS):
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
    damping = _AIM_DAMPING
    if rows.shape[-1] <= _WIDE:
        return _divided(rows, plus_diagonal(gram, damping * mean))
    while (lower := _cholesky(plus_diagonal(gram, damping * mean))) is None:
        damping *= 10
    _divide_by_factor(rows, lower)
    return rows


def _divide_by_factor(rows: Array, lower: Array) -> None:
    """B (L Lᵀ)⁻¹ in the place of B."""
    xp = array_namespace(rows)
    starts = range(0, rows.shape[-1], _COLUMNS)
    # With two blocks of columns, [Y1 Y2] Lᵀ = [B1 B2]: Y1 L11ᵀ = B1, then Y2 L22ᵀ = B2 - Y1 L21ᵀ.
    for start in starts:
        here = slice(start, start + _COLUMNS)
        before = slice(0, start)
        rows[..., here] -= xp.matmul(rows[..., before], _turned(lower[..., here, before]))
        rows[..., here] = _divided(rows[..., here], _turned(lower[..., here, here]))
    # Then [X1 X2] L = [Y1 Y2], from the last block on: X2 L22 = Y2, then X1 L11 = Y1 - X2 L21.
    for start in reversed(starts):
        here = slice(start, start + _COLUMNS)
        behind = slice(start + _COLUMNS, None)
        rows[..., here] -= xp.matmul(rows[..., behind], lower[..., behind, here])
        rows[..., here] = _divided(rows[..., here], lower[..., here, here])


def _cholesky(lower: Array) -> Array | None:
    """The lower triangle is replaced by the factor; None: not definite, by rounding."""
    # by blocks of columns, A = [[A11, .], [A21, A22]]: L11 is the factor of A11, L21 = A21 L11⁻ᵀ,
    # and L22 that of A22 - L21 L21ᵀ
    xp = array_namespace(lower)
    for start in range(0, lower.shape[-1], _COLUMNS):
        here = slice(start, start + _COLUMNS)
        before = slice(0, start)
        behind = slice(start + _COLUMNS, None)
        turned = _turned(lower[..., here, before])
        lower[..., start:, here] -= xp.matmul(lower[..., start:, before], turned)
        factor = cholesky(lower[..., here, here])
        if factor is None:
            return None
        lower[..., here, here] = factor
        lower[..., behind, here] = _divided(lower[..., behind, here], _turned(factor))
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
        held_out = _added(one.held_out, other.held_out)
    return Statistics(seen=_added(one.seen, other.seen), held_out=held_out)


def _added(one: Inputs, other: Inputs) -> Inputs:
    """The sums over the rows of both users."""
    drift = one.drift or other.drift
    if one.drift is not None and other.drift is not None:
        cross = one.drift.cross + other.drift.cross
        drift = replace(one.drift, cross=cross, total=one.drift.total + other.drift.total)
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
        self._stack = stack
        self._less = less
        self._aim = aim

    def some(self, part: int, first: int) -> Array:
        """Some rows of a part, from `first` on."""
        some = slice(first, first + _AT_ONCE)
        rows = self._stack[part, some]
        if self._aim is not None:
            rows = rows + self._aim.change(rows, part, first)
        if self._less is not None:
            rows = rows - self._less[part, some]
        return rows


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
    # With 600 inputs the columns 256:512 of WᵀW are computed with rows 0:512: the first 256 stand
    # for those below the diagonal too, so that they count twice.
    xp = array_namespace(gram)
    power = 0.0
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
    means = xp.zeros((parts, rows), dtype=xp.float64, device=device(mean))
    for part in range(parts):
        for row in range(0, rows, _AT_ONCE):
            some = xp.astype(weight.some(part, row), xp.float64, copy=False)
            means[part, row : row + _AT_ONCE] = xp.matmul(some, mean[part])
    return means


def by_output(rows: Array, layout: Layout) -> Array:
    """(parts, rows) summed over the parts that make one output, as (outputs,)."""
    xp = array_namespace(rows)
    if layout.per_tap:
        rows = xp.sum(xp.reshape(rows, (-1, layout.taps, rows.shape[-1])), axis=1)
    return xp.reshape(rows, (-1,))
