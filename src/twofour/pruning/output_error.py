"""What a changed weight does to a layer's output, from the statistics of its inputs alone."""

from __future__ import annotations

from collections.abc import Sequence

from array_api_compat import array_namespace, device

from twofour.pruning.matrices import Layout
from twofour.pruning.methods.problem import Array
from twofour.pruning.statistics import Inputs, Statistics
from twofour.records.pruning import OutputError

_ROWS = 1024
"""Worked on at a time: float64 copies stay small."""
_COLUMNS = 256
"""Of WᵀW, worked out at a time."""


def mean_change(before: Array, after: Array, inputs: Inputs, layout: Layout) -> Array:
    """(outputs,): how much the mean of each output falls from one stack to the other, in float64.

    Biases do not count.
    """
    return _outputs(_part_means(_Difference(before, after), inputs), layout)


def output_error(
    before: Array, after: Array, shift: Array | None, statistics: Statistics, layout: Layout
) -> OutputError:
    """||(W - W')X - shift||^2 / ||WX||^2; 0 where the layer gave nothing before.

    Of two stacks; `shift` (outputs,) is added to the bias of the one after.
    """
    held_out = statistics.held_out
    every = [statistics.seen] if held_out is None else [statistics.seen, held_out]
    whole = _output_powers(_Difference(before), 0.0, every, layout)
    gone = _Difference(before, after)
    lost = _output_powers(gone, 0.0 if shift is None else shift, every, layout)
    errors = [
        max(0.0, one) / all_ if all_ > 0 else 0.0 for one, all_ in zip(lost, whole, strict=True)
    ]
    return OutputError(calibration=errors[0], held_out=None if held_out is None else errors[1])


class _Difference:
    """A stack, or one less another, some rows at a time: there is never a copy of the whole."""

    def __init__(self, stack: Array, less: Array | None = None) -> None:
        self.shape = stack.shape
        self._stack, self._less = stack, less

    def rows(self, part: int, first: int) -> Array:
        """Some rows of a part, from `first` on."""
        some = slice(first, first + _ROWS)
        found = self._stack[part, some]
        return found if self._less is None else found - self._less[part, some]


def _output_powers(
    weight: _Difference, shift: Array | float, every: Sequence[Inputs], layout: Layout
) -> list[float]:
    """For each of the inputs the mean square of the outputs less `shift`, summed over the outputs.

    Of a convolution cut into taps, the deviations of different taps count as independent.
    """
    xp = array_namespace(every[0].gram)
    found = []
    for power, inputs in zip(_powers(weight, every), every, strict=True):
        mean = _part_means(weight, inputs)
        deviations = power / max(1, inputs.rows) - float(xp.sum(mean * mean))
        found.append(deviations + float(xp.sum((_outputs(mean, layout) - shift) ** 2)))
    return found


def _powers(weight: _Difference, every: Sequence[Inputs]) -> list[float]:
    """tr(W G Wᵀ) of each Gram matrix: the sum of WᵀW times G, place by place.

    So one product serves all of them, and of it the triangle above is enough.
    """
    xp = array_namespace(every[0].gram)
    parts, rows, inputs = weight.shape
    powers = [0.0 for _ in every]
    for part in range(parts):
        for row in range(0, rows, _ROWS):
            # float32 where the Gram matrix is wide: no copy of it in float64
            some = xp.astype(weight.rows(part, row), every[0].gram.dtype, copy=False)
            for first in range(0, inputs, _COLUMNS):
                stop = min(first + _COLUMNS, inputs)
                product = xp.matmul(xp.matrix_transpose(some[:, :stop]), some[:, first:stop])
                for at, each in enumerate(every):
                    terms = product * each.gram[part, :stop, first:stop]
                    above = float(xp.sum(terms[:first], dtype=xp.float64))
                    powers[at] += 2 * above + float(xp.sum(terms[first:], dtype=xp.float64))
    return powers


def _part_means(weight: _Difference, inputs: Inputs) -> Array:
    """(parts, rows)."""
    xp = array_namespace(inputs.gram)
    mean = xp.astype(inputs.mean, xp.float64)
    parts, rows, _ = weight.shape
    found = xp.zeros((parts, rows), dtype=xp.float64, device=device(mean))
    for part in range(parts):
        for row in range(0, rows, _ROWS):
            some = xp.astype(weight.rows(part, row), xp.float64, copy=False)
            found[part, row : row + _ROWS] = xp.matmul(some, mean[part])
    return found


def _outputs(rows: Array, layout: Layout) -> Array:
    """(parts, rows) summed over the parts that make one output, as (outputs,)."""
    xp = array_namespace(rows)
    if layout.per_tap:
        rows = xp.sum(xp.reshape(rows, (-1, layout.taps, rows.shape[-1])), axis=1)
    return xp.reshape(rows, (-1,))
